"""``python -m bert_tasks``, which launchers such as torchrun start: the console script, with the same import path.

Python puts the working directory first for ``-m``; a ``torch.py`` lying there would run instead of the library.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from bert_tasks.cli import main

    main()

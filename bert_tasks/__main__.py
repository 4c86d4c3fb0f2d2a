"""``python -m bert_tasks``, which launchers such as torchrun start. It is the console script with the same import path.

For ``-m``, Python puts the working directory first, so a ``torch.py`` in it would run instead of the library.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from bert_tasks.cli import main

    main()

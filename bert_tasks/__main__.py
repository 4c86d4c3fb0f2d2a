"""``python -m bert_tasks``: what launchers such as torchrun start."""

from bert_tasks.cli import main

if __name__ == "__main__":
    main()

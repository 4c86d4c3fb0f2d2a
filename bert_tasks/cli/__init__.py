"""The command line, where each command is a few lines that call the API. The only package that prints.

Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 data, 4 model or checkpoint, 5 diverged, 143 or 130 stopped by
SIGTERM or SIGINT after saving. torch and transformers are imported inside the commands, so that ``--help`` is quick.
"""

from bert_tasks.cli import training  # isort: skip  # its commands come first in the help of the application
from bert_tasks.cli import models
from bert_tasks.cli.entry import main

__all__ = ["main", "models", "training"]

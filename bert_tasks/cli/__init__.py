"""The command line: each command is a few lines that call the API. The only package that prints.

Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 data, 4 model or checkpoint, 5 diverged (or a reproduction that
differs from its run), 143 or 130 stopped by SIGTERM or SIGINT after saving. torch and transformers are imported inside
the commands, so that ``--help`` is quick.
"""

from bert_tasks.cli import app as application
from bert_tasks.cli import models as models
from bert_tasks.cli import training as training
from bert_tasks.cli.entry import main as main

# The order of ``--help``: what one does with a model, then with a run, then around both.
COMMANDS = (
    "train",
    "evaluate",
    "predict",
    "embed",
    "serve",
    "export",
    "report",
    "push",
    "check",
    "inspect",
    "init",
    "tokenizer",
    "convert",
    "search",
    "reproduce",
    "env",
)
application.app.registered_commands.sort(key=lambda command: COMMANDS.index(str(command.name)))

__all__ = ["main"]

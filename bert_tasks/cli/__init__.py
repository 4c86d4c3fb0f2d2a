"""The command line: each command is a few lines onto the API, and the only place that prints.

Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 data, 4 model or checkpoint, 5 diverged (or a reproduction that
differs from its run), 143 or 130 stopped by SIGTERM or SIGINT after saving. torch and transformers are imported inside
the commands, so that ``--help`` is quick.
A module here holds the commands of one concern; importing it adds them to ``app``, in the order of ``--help``.
"""

from bert_tasks.cli import training as training

# isort: split
from bert_tasks.cli import inference as inference

# isort: split
from bert_tasks.cli import models as models

# isort: split
from bert_tasks.cli.entry import main as main

__all__ = ["main"]

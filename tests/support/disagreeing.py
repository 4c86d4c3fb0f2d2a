"""Owns a run whose processes were given different things (``-m support.disagreeing CHECKPOINT FOLDER``, by torchrun).

Each process prints the error that it met for each of them.
"""

import os
import sys
from pathlib import Path

import torch

from bert_tasks import fit
from bert_tasks.distributed import leave_process_group
from bert_tasks.errors import BertTasksError
from bert_tasks.tasks.sequence_classification.task import SequenceClassification
from support.training_runs import LABELS, load_model, make_rows

DIFFERENT = ("labels", "rows", "settings")


def main(checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for what in DIFFERENT:
        try:
            run(Path(checkpoint), Path(folder) / what, what if rank == "1" else "")
        except BertTasksError as error:
            print(f"process {rank}, {what}: {type(error).__name__}: {error}", file=sys.stderr)
    leave_process_group()


def run(checkpoint: Path, folder: Path, different: str) -> None:
    labels = LABELS[::-1] if different == "labels" else LABELS
    rows = make_rows(12)[::-1] if different == "rows" else make_rows(12)
    rate = 1e-4 if different == "settings" else 1e-3
    model = load_model(checkpoint, SequenceClassification(labels=labels, max_length=40))
    fit(model, rows, make_rows(3), output_dir=folder, epochs=1, learning_rate=rate, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])

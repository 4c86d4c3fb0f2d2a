"""Owns what the tests of several processes run: the same scenarios under any launcher, with their results in a file.

Run by torchrun as a script (``-m support.process_scenarios CHECKPOINT FOLDER``) and called by the tests in one process.
"""

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.table import RowTable
from bert_tasks.distributed import make_accelerator
from bert_tasks.inference import evaluate_samples
from bert_tasks.model.inputs import tokenized
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.tasks.base import Task
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.objectives import Objective, Supervised
from support.training_runs import (
    TASK,
    WEIGHTED_TASK,
    LengthAndLabel,
    load_model,
    make_rows,
    make_steps,
    walk,
    weights_of,
)

EVALUATED = (9, 1, 3, 17)
MASKED = MaskedLanguageModeling(max_length=40, mlm_probability=0.3, whole_word_mask=True)
DTYPES = (torch.float64, torch.float32)


def trajectory(
    checkpoint: Path,
    dtype: torch.dtype,
    *,
    rows: int,
    kind: Callable[[TaskModel], Objective] = Supervised,
    task: Task = WEIGHTED_TASK,
    **sizes: int,
) -> dict[str, Any]:
    """Twenty steps without dropout over rows of unequal lengths, weights and labels; ``sizes``: of batches."""
    objective = kind(load_model(checkpoint, task)).to(dtype)
    steps = make_steps(
        objective.model,
        make_rows(rows, unlabelled=range(1, rows, 7)),
        objective=objective,
        max_steps=20,
        **sizes,
        learning_rate=1e-3,
        weight_decay=0.01,
        adam_epsilon=1e-4,
    )
    logs = [{name: value for name, value in asdict(log).items() if name != "terms"} | log.terms for log in walk(steps)]
    return {"weights": weights_of(objective), "logs": logs, "seen": steps.samples.seen}


def evaluation(checkpoint: Path, count: int) -> dict[str, Any]:
    """Metrics of the public function and the predictions behind them, in batches so small that all have some."""
    model, rows = load_model(checkpoint), make_rows(count, seed=count)
    table = RowTable.from_rows(rows, columns=TASK.columns)
    with mock.patch.object(TaskModel, "batch_tokens", 40):
        found = evaluate_samples(model, tokenized(table, TASK, model), table, make_accelerator())
        return {"metrics": evaluate(model, rows), "predictions": [p.to_json() for p in found.predictions]}


def trained(checkpoint: Path, folder: Path) -> dict[str, Any]:
    model = load_model(checkpoint)
    result = fit(
        model,
        make_rows(28),
        make_rows(9, seed=1),
        output_dir=folder,
        epochs=5,
        batch_size=8,
        learning_rate=1e-3,
        warmup_ratio=0.2,
        adam_epsilon=1e-4,
        logging_steps=1,
    )
    return {"weights": weights_of(model), "metrics": result.metrics, "best_step": result.best_step}


def scenarios(checkpoint: Path, wide_checkpoint: Path, folder: Path) -> dict[str, Any]:
    accelerator = make_accelerator()
    return {
        "world": accelerator.num_processes,
        "steps": {
            str(dtype): trajectory(wide_checkpoint, dtype, rows=37, batch_size=8, micro_batch_tokens=60)
            for dtype in DTYPES
        },
        # ten rows in batches of three: each epoch has a batch of one row, so a process has none
        "few": trajectory(wide_checkpoint, torch.float64, rows=10, batch_size=3, micro_batch_tokens=60),
        # two loss terms, whose counts differ between the processes
        "terms": trajectory(
            wide_checkpoint, torch.float64, rows=10, batch_size=3, micro_batch_tokens=20, kind=LengthAndLabel
        ),
        # rows without a label have a distance from the teacher all the same
        "teacher": trajectory(
            wide_checkpoint,
            torch.float64,
            rows=10,
            batch_size=3,
            micro_batch_tokens=20,
            kind=lambda model: Distillation(model, load_model(wide_checkpoint, WEIGHTED_TASK, seed=3)),
        ),
        # both processes see the same masks, and mask different numbers of tokens
        "masks": trajectory(wide_checkpoint, torch.float64, rows=15, batch_size=4, micro_batch_tokens=30, task=MASKED),
        # epochs of different numbers of steps
        "tokens": trajectory(wide_checkpoint, torch.float64, rows=15, batch_tokens=60, micro_batch_tokens=30),
        # rank 0 has long rows, one micro-batch each; rank 1 may have fewer of them
        "uneven": trajectory(wide_checkpoint, torch.float64, rows=15, batch_size=3, micro_batch_tokens=1),
        "evaluations": {count: evaluation(wide_checkpoint, count) for count in EVALUATED},
        "trained": trained(checkpoint, folder / "run"),
    }


def note_process_group(folder: Path) -> None:
    """Writes whether the process group is still there."""
    rank = os.environ.get("RANK", "0")
    (folder / f"group{rank}.txt").write_text("joined" if torch.distributed.is_initialized() else "left")


def main(checkpoint: str, wide_checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    atexit.register(note_process_group, Path(folder))  # called after what the package registers
    found = scenarios(Path(checkpoint), Path(wide_checkpoint), Path(folder))
    torch.save(found, Path(folder) / f"rank{make_accelerator().process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs that a signal stops after a step, and what their folders hold in the end.

Called by the tests in one process, and run by torchrun (``-m support.stopped_runs CHECKPOINT FOLDER``): then a
single model is stopped after every step and each other kind of task after one, by a signal that only the last process
gets, and goes on. With BERT_TASKS_STOPS=all every kind is stopped after every step, as tests/training/test_resuming.py
does on one process.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tasks import TaskModel, fit
from bert_tasks.distributed import make_accelerator
from bert_tasks.errors import StoppedError
from bert_tasks.outputs.base import LossTerm
from bert_tasks.training.state import FitResult
from bert_tasks.training.step import OptimizerSteps, StepResult
from support.runs import digests, events
from support.task_examples import EXAMPLES
from support.training_runs import load_model

STEPS = 6  # 8 rows in batches of 3, twice
KINDS = ("single", "several", "token crf", "span v2", "pair regression", "adapters", "masked")
ADAPTERS = {"lora_rank": 4, "lora_dropout": 0.2, "lora_targets": ("query", "value", "output")}
# Kind -> the steps after which it is stopped on two processes.
STOPS = {kind: [1 + number % (STEPS - 1)] for number, kind in enumerate(KINDS)} | {"single": list(range(1, STEPS))}
if os.environ.get("BERT_TASKS_STOPS") == "all":
    STOPS = {kind: list(range(1, STEPS)) for kind in KINDS}
SETTINGS = {
    "epochs": 2,
    "batch_size": 3,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.4,
    "weight_decay": 0.01,
    "micro_batch_tokens": 30,
    "logging_steps": 1,
    "keep_checkpoints": True,
    "progress": False,
}


def run(folder: Path, checkpoint: Path, case: str = "single", **changes: Any) -> tuple[TaskModel, FitResult]:
    """A run with dropout, several micro-batches a step, and another new head at each call."""
    example, changes = (EXAMPLES["single"], ADAPTERS | changes) if case == "adapters" else (EXAMPLES[case], changes)
    model = load_model(checkpoint, example.task, seed=changes.pop("head_seed", 0))
    result = fit(model, list(example.rows), list(example.rows), output_dir=folder, **{**SETTINGS, **changes})
    return model, result


def stopped(step: int, *arguments: Any, **options: Any) -> StoppedError:
    """A run to which a signal comes while the given step (from 1) is computed; of several processes, to the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerSteps, "update", signalling(OptimizerSteps.update, step))
        with pytest.raises(StoppedError) as error:
            run(*arguments, **options)
    return error.value


def signalling(original: Callable[..., StepResult], last: int) -> Callable[..., StepResult]:
    accelerator = make_accelerator()

    def update(
        steps: OptimizerSteps, step: int, batch: Sequence[int], terms: Sequence[LossTerm], *, stop: bool = False
    ) -> StepResult:
        mine = step + 1 == last and accelerator.is_last_process
        if mine:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(steps, step, batch, terms, stop=stop or mine)

    return update


def main(checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    accelerator, cases = make_accelerator(), []
    for case, steps in STOPS.items():
        whole = Path(folder) / case / "whole"
        _, result = run(whole, Path(checkpoint), case)
        for step in steps:
            run_folder = Path(folder) / case / str(step)
            error = stopped(step, run_folder, Path(checkpoint), case)
            _, again = run(run_folder, Path(checkpoint), case, head_seed=5)
            accelerator.wait_for_everyone()
            cases.append(
                {
                    "case": f"{case}, step {step}",
                    "stopped": f"after step {step} of {STEPS}" in str(error),
                    "resumed_at": json.loads((run_folder / "run.json").read_text("utf-8"))["resumed_at"] == [step],
                    "bits": digests(run_folder) == digests(whole),
                    "log": events(run_folder) == events(whole),
                    "metrics": again.metrics == result.metrics,
                }
            )
    report = {"processes": accelerator.num_processes, "cases": cases}
    (Path(folder) / f"rank{accelerator.process_index}.json").write_text(json.dumps(report), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

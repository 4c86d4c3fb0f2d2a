"""How long a training step waits for its data: reading its features and packing them, as a share of the step.

    BERT_TASKS_DATA=DIR python benchmarks/data_wait.py --json data_wait.json

Features lie in a memory-mapped Arrow file, as in any run; each workload of train_throughput.py trains two epochs on one
thread, and what counts is that thread's processor time, so that other programs on the machine do not. On a GPU the host
prepares a step while the device works on the one before, and what matters is that its seconds a step are fewer than the
device's: the seconds are printed too.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from train_throughput import train_ours
from train_workloads import SHAPES, WORKLOADS, prepared
from turns import Job

from bert_tasks.data.features import Samples
from bert_tasks.model.windows import pack_features
from bert_tasks.training import step
from bert_tasks.training.step import OptimizerSteps


class Clock:
    """Adds up the processor seconds of this thread in the functions that it wraps, outside of evaluations."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if torch.is_inference_mode_enabled():  # an evaluation
                return function(*arguments, **options)
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return timed


def measure(workload: str, rows: int) -> dict[str, Any]:
    work = prepared(workload, shape=SHAPES[0], rows=rows)
    job: Job = {"bf16": False}
    data, stepping, backward = Clock(), Clock(), Clock()
    with (
        mock.patch.object(Samples, "features_of", data.around(Samples.features_of)),
        mock.patch.object(step, "pack_features", data.around(pack_features)),
        mock.patch.object(OptimizerSteps, "backward", stepping.around(OptimizerSteps.backward)),
        mock.patch.object(OptimizerSteps, "update", backward.around(OptimizerSteps.update)),
    ):
        train_ours(work, job)
    total = stepping.seconds + backward.seconds
    return {
        "workload": workload,
        "steps": stepping.calls,
        "step_ms": round(1000 * total / stepping.calls, 2),
        "data_ms": round(1000 * data.seconds / stepping.calls, 2),
        "share_percent": round(100 * data.seconds / total, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all but SQuAD's")
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    default = [name for name, workload in WORKLOADS.items() if workload.format != "squad"]
    figures = [measure(workload, arguments.rows) for workload in arguments.workload or default]
    for row in figures:
        print(
            "{workload:<10} {steps:>4} steps  {step_ms:>9} ms a step, {data_ms} of data ({share_percent} %)".format(
                **row
            )
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

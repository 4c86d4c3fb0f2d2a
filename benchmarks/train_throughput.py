"""Training speed side by side: bert_tasks against transformers' Trainer, same rows, weights, batch size and threads.

    BERT_TASKS_DATA=DIR python benchmarks/train_throughput.py --repeats 5 --json throughput.json

A run is a fresh process that trains two epochs, and the runs of the sides are interleaved. The first epoch meets every
shape of batch for the first time, which costs time where code is compiled for a shape. The second one is the steady
state. What is timed is an epoch over rows that are tokenized already: batches, forward, backward, clipping and AdamW,
without evaluation and saving. Memory is the peak of the process. Sides:

- ``ours``: ``fit`` as it is.
- ``default``: the Trainer with dynamic padding and random batches.
- ``grouped``: the same with length-grouped batches.
- ``compiled``: the same as ``grouped`` with ``torch_compile``.
- ``routed``: the same as ``grouped`` with linear layers in the matrix library that bert_tasks chooses.
- ``padded``: the Trainer with all texts padded to the longest allowed length, as in its example scripts.
- ``bound``: the lower bound of our own epoch: its matrix products, each in its fastest library, and a copy of as many
  bytes as AdamW and the norm of the gradients read and write.

The Trainer has scaled_dot_product_attention and fused AdamW, which are its defaults. Dropout is the checkpoint's.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from datasets import Dataset
from matrix_products import Products, Recorder
from result_files import write_results
from torch import nn
from train_workloads import SHAPES, WORKLOADS, Predictor, prepared, trainer_dataset
from turns import Figures, Job, in_turns, report

from bert_tasks import TaskModel, fit
from bert_tasks.data.columns import Row
from bert_tasks.encoder.linear import Linear
from bert_tasks.tasks.features import collate
from bert_tasks.training.files import environment
from bert_tasks.training.progress import Clock
from bert_tasks.training.sampling import SampleOrder

LEARNING_RATE = 5e-5
EPOCHS = 2
COPIES = 5  # tries of the copy that measures memory traffic; the fastest counts
DEFAULT_WORKLOADS = ("sst2", "stsb", "conll2003")
COLUMNS = {
    "first_epoch": "first epoch, s",
    "steady": "second epoch, s",
    "tokens_per_second": "tokens/s",
    "peak_rss_mib": "peak MiB",
}


class EpochClock(Clock):
    """Keeps the seconds of each epoch. ``fit`` stops the clock after each one, because it evaluates then."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []

    def stop(self) -> float:
        seconds = super().stop()
        self.epochs.append(seconds)
        return seconds


def train_ours(work: Predictor, job: Job) -> list[float]:
    return timed_fit(work.model(), work.rows, job, batch_size=work.workload.batch_size)


def timed_fit(model: TaskModel, rows: Sequence[Row], job: Job, **optim: Any) -> list[float]:
    """Returns the seconds of each epoch of ``fit``. ``optim`` are further arguments of it."""
    clock = EpochClock()
    precision: Literal["bf16", "no"] = "bf16" if job["bf16"] else "no"
    with tempfile.TemporaryDirectory() as folder, patch("bert_tasks.training.loop.Clock", return_value=clock):
        fit(
            model,
            rows,
            rows[:8],
            output_dir=Path(folder) / "run",
            progress=False,
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            warmup_ratio=0.1,
            weight_decay=0.01,
            max_grad_norm=1.0,
            mixed_precision=precision,
            seed=0,
            **optim,
        )
    return clock.epochs[:EPOCHS]


def train_theirs(
    work: Predictor,
    job: Job,
    *,
    padding: bool = False,
    sampling: str = "group_by_length",
    compiled: bool = False,
    routed: bool = False,
) -> list[float]:
    """Returns the seconds of each epoch of ``Trainer.train``.

    Args:
        padding: to ``max_length``, else dynamic.
        routed: linear layers in the library that ours chooses.
    """
    model = work.trainer_model()
    if routed:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
    return timed_trainer(
        model,
        trainer_dataset(work),
        work.trainer_collator(to_max_length=padding),
        job,
        batch_size=work.workload.batch_size,
        sampling=sampling,
        compiled=compiled,
    )


def timed_trainer(
    model: Any,
    dataset: Dataset,
    collator: Any,
    job: Job,
    *,
    batch_size: int,
    sampling: str = "random",
    compiled: bool = False,
) -> list[float]:
    """Returns the seconds of each epoch of ``Trainer.train``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seconds: list[float] = []

    class EpochTimer(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            learning_rate=LEARNING_RATE,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=batch_size,
            warmup_steps=0.1,  # below 1: a ratio
            weight_decay=0.01,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            train_sampling_strategy=sampling,
            use_cpu=True,
            bf16=job["bf16"],
            torch_compile=compiled,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        timer = EpochTimer()
        Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=[timer]).train()
    return seconds


def lower_bound(work: Predictor, job: Job) -> list[float]:
    """Returns the seconds of the matrix products of our epoch, and of the memory traffic of its updates."""
    steps = math.ceil(len(work.rows) / work.workload.batch_size)
    products = _recorded_products(work, job)
    return [products.seconds() + steps * _update_seconds(work) for _ in range(EPOCHS)]


def _update_seconds(work: Predictor) -> float:
    """Returns the seconds to move the bytes of an update: eight times those of the trained parameters.

    AdamW reads the parameters, the gradients and two moments, and writes three of them. The norm reads the gradients.
    A copy of four times the bytes moves as many. Rows of the vocabulary that no text has are not trained.
    """
    model = work.model()
    vocabulary, width = model.encoder.embeddings.word.weight.shape
    used = len(set().union(*(feature["input_ids"] for feature in work.features)))
    idle_rows = 0
    if used <= vocabulary / 2:
        idle_rows = vocabulary - used
    numbers = 4 * (sum(parameter.numel() for parameter in model.parameters()) - idle_rows * width)
    source = torch.ones(numbers)  # a copy reads and writes each number once
    target = torch.empty_like(source)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return min(times)


def _recorded_products(work: Predictor, job: Job) -> Products:
    model = work.model().train()
    lengths = [len(feature["input_ids"]) for feature in work.features]
    with patch("bert_tasks.encoder.cpu.matmul_library", return_value="mkl"), Recorder() as recorder:
        for batch in SampleOrder(lengths, samples=work.workload.batch_size, seed=0).epoch(0):
            packed = collate([work.features[i] for i in batch], position_offset=model.config.position_offset)
            with torch.autocast("cpu", torch.bfloat16, enabled=job["bf16"]):
                logits = model(packed)
            (loss,) = model.task.output.loss(logits.to(torch.float32), packed)
            loss.total.backward()
            model.zero_grad(set_to_none=True)
    return Products(recorder.products)


SIDES: dict[str, Callable[[Predictor, Job], list[float]]] = {
    "ours": train_ours,
    "default": partial(train_theirs, sampling="random"),
    "grouped": train_theirs,
    "compiled": partial(train_theirs, compiled=True),
    "routed": partial(train_theirs, routed=True),
    "padded": partial(train_theirs, padding=True, sampling="random"),
    "bound": lower_bound,
}


def run(job: Job) -> Figures:
    """Trains one side. It is called in a fresh process."""
    torch.set_num_threads(job["threads"])
    work = prepared(job["workload"], shape=job["shape"], rows=job["rows"])
    first_epoch, steady = SIDES[job["side"]](work, job)
    return epoch_figures(first_epoch, steady, work.tokens)


def epoch_figures(first_epoch: float, steady: float, tokens: int) -> Figures:
    return {"first_epoch": first_epoch, "steady": steady, "tokens": tokens, "tokens_per_second": tokens / steady}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all but squad")
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all; may be repeated")
    parser.add_argument("--shape", default=SHAPES[0], choices=SHAPES, help="of the encoder")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, help="default: those of the workload; fewer for a quick look")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(run(json.loads(options.job))))
        return
    machine = environment()
    print(f"{machine['cpu']}, {options.threads} threads, float32 matrix library {machine['matmul_library']}")
    settings = {name: getattr(options, name) for name in ("shape", "bf16", "threads", "rows")}
    figures = {}
    for workload in options.workload or DEFAULT_WORKLOADS:
        figures[workload] = in_turns(options.side or list(SIDES), settings | {"workload": workload}, options.repeats)
        print("\n".join([workload, *report(figures[workload], COLUMNS, baseline="ours")]), flush=True)
        if options.json is not None:  # after each workload, because a run of all of them takes hours
            content = {"options": settings | {"repeats": options.repeats}, "environment": machine, "figures": figures}
            write_results(options.json, content)


if __name__ == "__main__":
    main()

"""Training speed side by side: bert_tasks against transformers' Trainer, same rows, weights, batch size and threads.

    BERT_TASKS_DATA=DIR python benchmarks/train_throughput.py --repeats 5 --json throughput.json

Sides are our ``fit``; the Trainer with the padding of its example scripts (``padded``), with dynamic padding
(``dynamic``) and at its best (``grouped``: dynamic padding, batches of like lengths), all with
scaled_dot_product_attention and fused AdamW, without evaluation, saving or logging; and, for information, the Trainer
at its best with linear layers in the matrix library that ours chooses (``routed``). ``limit`` is the least time of our
own steps: their matrix products, each in its fastest library, and a copy of as many bytes as AdamW and the norm of the
gradients read and write. The share of the limit depends less on the processor than a speed does.

Every side lives in a process of its own and warms up before it is timed. The sides take turns. What is timed is an
epoch over sampled rows that are tokenized already: batches, forward, backward, clipping and AdamW. Dropout is the
checkpoint's on both sides; ``--no-attention-dropout`` sets the dropout of attention weights to 0 on both.

On a GPU, with transformers' ``torch_compile`` as one more side:

    BERT_TASKS_DATA=DIR python benchmarks/train_throughput.py --shape bert-base --bf16 --workload squad128 \\
        --workload squad --side ours --side grouped --side compiled --side limit
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from datasets import Dataset
from matrix_products import Products, Recorder
from result_files import write_results
from torch import nn
from train_workloads import SHAPES, WORKLOADS, Predictor, prepared, trainer_dataset

from bert_tasks import TaskModel, fit
from bert_tasks.data.columns import Row
from bert_tasks.encoder.cpu import matmul_library
from bert_tasks.encoder.linear import Linear
from bert_tasks.tasks.features import collate
from bert_tasks.training.files import environment
from bert_tasks.training.progress import Clock
from bert_tasks.training.sampling import SampleOrder

LEARNING_RATE = 5e-5
WARM_UP_BATCHES = 10
COPIES = 5  # tries of the copy that measures memory traffic; the fastest counts


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run.

    Attributes:
        attention_dropout: that of the checkpoint, or 0 on both sides.
        share: of the workload's batches.
        clock: a name of ``CLOCKS``.
    """

    threads: int
    repeats: int
    shape: str
    bf16: bool
    attention_dropout: bool
    share: float
    clock: str

    @property
    def device(self) -> torch.device:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    def work(self, workload: str) -> Predictor:
        return prepared(workload, shape=self.shape, attention_dropout=self.attention_dropout, share=self.share)


def train_ours(work: Predictor, options: Options) -> float:
    """Returns the seconds of an epoch of ``fit``, without its evaluation and saving."""
    return timed_fit(work.model(), work.rows, options, batch_size=work.workload.batch_size)


def timed_fit(model: TaskModel, rows: Sequence[Row], options: Options, **optim: Any) -> float:
    """Returns the seconds of an epoch over rows. ``optim`` are further arguments of ``fit``."""
    timer = partial(Clock, CLOCKS[options.clock])
    precision: Literal["bf16", "no"] = "bf16" if options.bf16 else "no"
    with tempfile.TemporaryDirectory() as folder, patch("bert_tasks.training.loop.Clock", timer):
        result = fit(
            model,
            rows,
            rows[:8],
            output_dir=Path(folder) / "run",
            progress=False,
            epochs=1,
            learning_rate=LEARNING_RATE,
            warmup_ratio=0.1,
            weight_decay=0.01,
            max_grad_norm=1.0,
            mixed_precision=precision,
            seed=0,
            **optim,
        )
    return result.train_seconds


def train_theirs(
    work: Predictor,
    options: Options,
    *,
    padding: bool = False,
    sampling: str = "random",
    compiled: bool = False,
    routed: bool = False,
) -> float:
    """Seconds of an epoch of ``Trainer.train``, without its set-up.

    Args:
        padding: to ``max_length``, else dynamic.
        routed: linear layers in the library that ours chooses.
    """
    model = work.trainer_model()
    if routed:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
    if options.share < 1 and sampling == "group_by_length":
        sampling = "sequential"  # the rows of a share are already in the order of their groups
    return timed_trainer(
        model,
        trainer_dataset(work),
        work.trainer_collator(to_max_length=padding),
        options,
        batch_size=work.workload.batch_size,
        sampling=sampling,
        compiled=compiled,
    )


def timed_trainer(
    model: Any,
    dataset: Dataset,
    collator: Any,
    options: Options,
    *,
    batch_size: int,
    sampling: str = "random",
    compiled: bool = False,
) -> float:
    """Returns the seconds of an epoch of ``Trainer.train``, without its set-up."""
    from transformers import Trainer, TrainingArguments

    clock = _clock(options)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            learning_rate=LEARNING_RATE,
            num_train_epochs=1,
            per_device_train_batch_size=batch_size,
            warmup_steps=0.1,  # below 1: a ratio
            weight_decay=0.01,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            train_sampling_strategy=sampling,
            use_cpu=options.device.type == "cpu",
            bf16=options.bf16,
            torch_compile=compiled,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=[clock]).train()
    return float(clock.ended - clock.started)


def _clock(options: Options) -> Any:
    from transformers import TrainerCallback

    now = CLOCKS[options.clock]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended = now()

    return Clock()


def least_work(work: Predictor, options: Options) -> float:
    """Returns the seconds of the matrix products of our epoch, and of the memory traffic of its updates."""
    steps = math.ceil(len(work.rows) / work.workload.batch_size)
    return _products(work, options).seconds(CLOCKS[options.clock]) + steps * _update_seconds(work, options)


def _update_seconds(work: Predictor, options: Options) -> float:
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
    source = torch.ones(numbers, device=options.device)  # a copy reads and writes each number once
    target = torch.empty_like(source)
    return min(_seconds(partial(target.copy_, source), options) for _ in range(COPIES))


def _seconds(call: Callable[[], object], options: Options) -> float:
    now = CLOCKS[options.clock]
    started = now()
    call()
    if options.device.type == "cuda":
        torch.cuda.synchronize()
    return now() - started


@cache
def _products(work: Predictor, options: Options) -> Products:
    model = work.model().to(options.device).train()
    lengths = [len(feature["input_ids"]) for feature in work.features]
    with patch("bert_tasks.encoder.cpu.matmul_library", return_value="mkl"), Recorder() as recorder:
        for batch in SampleOrder(lengths, samples=work.workload.batch_size, seed=0).epoch(0):
            features = [work.features[i] for i in batch]
            packed = collate(features, position_offset=model.config.position_offset).to(options.device)
            with torch.autocast(options.device.type, torch.bfloat16, enabled=options.bf16):
                logits = model(packed)
            (loss,) = model.task.output.loss(logits.to(torch.float32), packed)
            loss.total.backward()
            model.zero_grad(set_to_none=True)
    return Products(recorder.products, options.device)


SIDES: dict[str, Callable[[Predictor, Options], float]] = {
    "ours": train_ours,
    "grouped": partial(train_theirs, sampling="group_by_length"),
    "routed": partial(train_theirs, sampling="group_by_length", routed=True),
    "compiled": partial(train_theirs, sampling="group_by_length", compiled=True),
    "dynamic": train_theirs,
    "padded": partial(train_theirs, padding=True),
    "limit": least_work,
}
ON_EVERY_DEVICE = [side for side in SIDES if side != "compiled"]


def warmed_up(side: str, workload: str, options: Options) -> int:
    """Warms a process up with a short run of the side. Returns the tokens of an epoch."""
    torch.set_num_threads(options.threads)
    work = options.work(workload)
    SIDES[side](work.first(WARM_UP_BATCHES * work.workload.batch_size), options)
    return work.tokens


def timed(side: str, workload: str, options: Options) -> float:
    return SIDES[side](options.work(workload), options)


def library(side: str, workload: str, options: Options) -> str:
    """Returns the library in which the products of linear layers ran."""
    if options.device.type != "cpu":
        return options.device.type
    if side == "limit":
        return f"onednn {_products(options.work(workload), options).onednn_share:.0%}"
    default = matmul_library() if side in ("ours", "routed") else "mkl"
    return "onednn" if options.bf16 else default


def measure(workload: str, sides: Sequence[str], options: Options) -> dict[str, Any]:
    """Measures the epochs of every side in turns, and returns their seconds."""
    pools = {side: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for side in sides}
    try:
        tokens = [pool.submit(warmed_up, side, workload, options).result() for side, pool in pools.items()]
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, pool in pools.items():
                seconds[side].append(pool.submit(timed, side, workload, options).result())
        libraries = {side: pool.submit(library, side, workload, options).result() for side, pool in pools.items()}
    finally:
        for pool in pools.values():
            pool.shutdown()
    return {"workload": workload, "tokens": tokens[0], "seconds": seconds, "matmul_library": libraries}


def report(result: dict[str, Any]) -> list[str]:
    """Returns a line for each side: median and quartiles of time, tokens per second, ratio to ours, and library."""
    medians = {side: statistics.median(values) for side, values in result["seconds"].items()}
    lines = []
    for side, values in result["seconds"].items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        turns = [theirs / ours for theirs, ours in zip(values, result["seconds"].get("ours", values), strict=True)]
        lines.append(
            f"{result['workload']:10}{side:9}{medians[side]:8.2f} s ({low:.2f} to {high:.2f})"
            f"{result['tokens'] / medians[side]:10.0f} tokens/s{statistics.median(turns):7.2f} x ours"
            f"  {result['matmul_library'][side]}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="default: all but squad128; may be repeated"
    )
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all but compiled; may be repeated")
    parser.add_argument("--shape", default=SHAPES[0], choices=SHAPES, help="of the encoder")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the batches, for a quick look or a large model")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="processor: on a busy machine, one thread"
    )
    parser.add_argument("--no-attention-dropout", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = Options(
        threads=arguments.threads,
        repeats=arguments.repeats,
        shape=arguments.shape,
        bf16=arguments.bf16,
        attention_dropout=not arguments.no_attention_dropout,
        share=arguments.share,
        clock=arguments.clock,
    )
    torch.set_num_threads(options.threads)
    machine = environment()
    print(f"{machine['cpu']}, {machine['threads']} threads, float32 matrix library {machine['matmul_library']}")
    results = []
    sides = ON_EVERY_DEVICE if arguments.side is None else arguments.side
    workloads = arguments.workload
    if workloads is None:
        workloads = [name for name in WORKLOADS if name != "squad128"]
    for workload in workloads:
        results.append(measure(workload, sides, options))
        print("\n".join(report(results[-1])), flush=True)
    if arguments.json is not None:
        content = {"options": vars(options), "environment": machine, "results": results}
        write_results(arguments.json, content)


if __name__ == "__main__":
    main()

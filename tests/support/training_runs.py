"""Owns what the tests of training share: a tiny checkpoint, rows to learn from, and a run cut down to its steps."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel
from bert_tasks.data.features import Samples
from bert_tasks.data.reading import read
from bert_tasks.distributed import make_accelerator
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.model.encoder_with_heads import EncoderWithHeads
from bert_tasks.model.features import training_samples
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.step import OptimizerSteps, StepLog, read_step_metrics
from support.hf_models import hf_class, hf_config, widen

LABELS = ("negative", "positive")
KEYWORDS = {"negative": "terrible", "positive": "wonderful"}
FILLER = (
    "the",
    "ferry",
    "leaves",
    "old",
    "harbour",
    "at",
    "seven",
    "whoever",
    "misses",
    "it",
    "walks",
    "home",
    "along",
)
TASK = SequenceClassification.of(labels=LABELS, max_length=40)
WEIGHTED_TASK = SequenceClassification.of(labels=LABELS, max_length=40, class_weights=(0.3, 1.7))
UNLABELLED = (1, 8, 17, 30)
# Key biases have a gradient of zero, which rounding makes a little more; a small epsilon would make it a step.
TWENTY_STEPS = {"epochs": 4, "batch_size": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.01}

Row = dict[str, Any]


def save_checkpoint(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, dropout: float = 0.0, layers: int = 2, wide: bool = False
) -> Path:
    """A RoBERTa without a task head, for the tests' byte-level BPE tokenizer; ``wide``: see hf_models."""
    config = hf_config(
        "roberta",
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(0)
    model = hf_class("roberta", "base")(config, add_pooling_layer=False)
    if wide:
        widen(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(count: int, *, seed: int = 0, unlabelled: Iterable[int] = ()) -> list[Row]:
    """Texts of 1 to 12 words; one of them says the label. A third are positive."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for number in range(count):
        label = LABELS[number % 3 == 0]
        words = [*draw.choices(FILLER, k=draw.randrange(12)), KEYWORDS[label]]
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    for number in unlabelled:
        rows[number]["label"] = None
    return rows


def load_model(checkpoint: Path, task: Task = TASK, *, seed: int = 0) -> TaskModel:
    """The checkpoint with a new head drawn from the seed."""
    torch.manual_seed(seed)
    return TaskModel.from_pretrained(checkpoint, task=task)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of any two weights."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@dataclass(frozen=True, kw_only=True)
class RecordedSamples(Samples):
    """Samples that remember which of them were read."""

    seen: list[int] = field(default_factory=list)

    def features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        numbers = list(samples)
        self.seen.extend(numbers)
        return super().features_of(numbers)


class LengthAndLabel(Objective):
    """The task's loss, and the squared distance of a row's logits from a learnt number times its length.

    The counts differ: sums of class weights over labelled rows, and rows with more than ``shortest`` tokens.
    """

    def __init__(self, model: TaskModel, *, shortest: int = 8) -> None:
        super().__init__(model)
        self.slope = torch.nn.Parameter(torch.zeros(()))
        self.shortest = shortest

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        logits = self.model(batch)
        (labels,) = self.model.task.output.loss(logits, batch)
        lengths = torch.tensor(batch.layout.lengths, dtype=logits.dtype)
        counted = (lengths > self.shortest).to(logits.dtype)
        distances = (logits.sum(dim=1) - self.slope * lengths).square() * counted
        return labels, LossTerm(name="length", total=distances.sum(), count=counted.sum(), weight=0.1)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        longer = sum(len(feature["input_ids"]) > self.shortest for feature in features)
        return {**super().counts(features), "length": float(longer)}


def make_steps(
    model: EncoderWithHeads, rows: list[Row], *, seed: int = 0, objective: Objective | None = None, **optim: Any
) -> OptimizerSteps:
    """What ``fit`` makes for its steps, of rows in memory."""
    table = training_samples(read(rows, model.row_columns, require_labels=False), model)
    return OptimizerSteps(
        objective=Supervised(model) if objective is None else objective,
        samples=RecordedSamples(**vars(table)),
        optim=OptimSection(**optim),
        seed=seed,
        accelerator=make_accelerator(),
    )


def batches(steps: OptimizerSteps) -> Iterator[list[int]]:
    return (batch for _, batch in steps.batches())


def walk(steps: OptimizerSteps) -> list[StepLog]:
    """All steps of the run, without evaluation or files."""
    logs = []
    for step, batch in enumerate(batches(steps)):
        result = steps.update(step, batch, steps.backward(step, batch))
        logs.append(read_step_metrics(result, overflows=0, mixed_precision="no")[0])
    steps.optimizer.update_weights()
    return logs

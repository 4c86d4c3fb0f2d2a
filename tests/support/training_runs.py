"""Owns what the tests of training share: a tiny checkpoint, rows to learn from, and a run cut down to its steps."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel
from bert_tasks.data.features import Samples
from bert_tasks.data.table import RowTable
from bert_tasks.inference import make_accelerator
from bert_tasks.model.inputs import tokenized
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.sequence_classification.task import SequenceClassification
from bert_tasks.training.optim import build_optimizer, parameter_groups
from bert_tasks.training.sampling import epoch_batches, total_steps
from bert_tasks.training.step import StepLog, TrainContext, accumulate, read_step_metrics, update
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
TASK = SequenceClassification(labels=LABELS, max_length=40)
WEIGHTED_TASK = SequenceClassification(labels=LABELS, max_length=40, class_weights=(0.3, 1.7))

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
        wanted = list(samples)
        self.seen.extend(wanted)
        return super().features_of(wanted)


def make_stepper(model: TaskModel, rows: list[Row], *, seed: int = 0, **optim: Any) -> TrainContext:
    """What ``fit`` makes for its steps, of rows in memory."""
    settings = OptimSection(**optim)
    made = tokenized(RowTable.from_rows(rows, columns=model.task.columns), model.task, model)
    accelerator = make_accelerator()
    groups = parameter_groups(
        model,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        head_learning_rate=settings.head_learning_rate,
    )
    optimizer = build_optimizer(groups, betas=(0.9, 0.999), eps=settings.adam_epsilon, fused=True)
    prepared, optimizer = accelerator.prepare(model.train(), optimizer)
    return TrainContext(
        accelerator=accelerator,
        model=model,
        prepared=prepared,
        optimizer=optimizer,
        rates=tuple(group["lr"] for group in groups),
        samples=RecordedSamples(**vars(made)),
        optim=settings,
        seed=seed,
        total_steps=total_steps(len(made), settings.batch_size, settings.epochs),
    )


def batches(stepper: TrainContext) -> Iterator[list[int]]:
    for epoch in range(stepper.optim.epochs):
        yield from epoch_batches(
            stepper.samples.lengths, batch_size=stepper.optim.batch_size, seed=stepper.seed, epoch=epoch
        )


def walk(stepper: TrainContext) -> list[StepLog]:
    """All steps of the run, without evaluation or files."""
    logs = []
    for step, batch in enumerate(batches(stepper)):
        result = update(stepper, step, batch, accumulate(stepper, step, batch))
        logs.append(read_step_metrics(result, overflows=0, mixed_precision="no")[0])
    return logs

"""The settings of ``fit``: the keys of a recipe's ``[optim]`` and ``[run]`` as keywords.

Owns their types for editors and type checkers, and what is said of a keyword that is none of them. Must not know what
the settings do.

What goes into a run and what comes out of it.

Owns the two types that the parts of training share, and what is asked of a model before training. Must not know how
training works.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, TypedDict

from bert_tasks.data.splits import Splits
from bert_tasks.errors import UsageError
from bert_tasks.metrics.tables import MetricTable, metrics_by_set
from bert_tasks.model.exported import ExportedModel
from bert_tasks.model.pretrained import check_names
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.errors import nearest_or_all
from bert_tasks.recipe.schema import OptimSection, RunSection, TrackerName
from bert_tasks.tasks.base import Task


class FitSettings(TypedDict, total=False):
    """Keyword -> its type; docs/reference/recipe.md says what each means, its limits and its default."""

    learning_rate: float
    epochs: int
    batch_size: int
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    mixed_precision: Literal["no", "fp16", "bf16"]
    head_learning_rate: float | None
    layerwise_lr_decay: float | None
    freeze_embeddings: bool
    freeze_layers: int
    micro_batch_tokens: int
    seed: int
    eval_steps: int | None
    early_stopping_patience: int | None
    metric_for_best_model: str | None
    logging_steps: int
    save_steps: int | None
    keep_last: int
    trackers: tuple[TrackerName, ...]
    project: str


# What users of transformers' TrainingArguments and Trainer write -> what does the same here.
HF_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "num_train_epochs": "epochs",
        "max_steps": "epochs",
        "per_device_train_batch_size": "batch_size, which counts samples over all devices",
        "per_gpu_train_batch_size": "batch_size, which counts samples over all devices",
        "train_batch_size": "batch_size, which counts samples over all devices",
        "per_device_eval_batch_size": "nothing: evaluation forms its batches by length",
        "gradient_accumulation_steps": "micro_batch_tokens, which limits what a device holds at once",
        "auto_find_batch_size": "micro_batch_tokens, which limits what a device holds at once",
        "lr": "learning_rate",
        "warmup_steps": "warmup_ratio, a share of the steps",
        "lr_scheduler_type": "nothing: the learning rate falls to 0 in a straight line",
        "fp16": 'mixed_precision="fp16"',
        "bf16": 'mixed_precision="bf16"',
        "save_total_limit": "keep_last",
        "eval_strategy": "eval_steps; without it after each epoch",
        "evaluation_strategy": "eval_steps; without it after each epoch",
        "save_strategy": "save_steps; with every evaluation in any case",
        "logging_strategy": "logging_steps",
        "logging_dir": "trackers, whose files go to output_dir",
        "report_to": "trackers",
        "run_name": "project",
        "data_seed": "seed",
        "load_best_model_at_end": "nothing: the model ends with the best weights",
        "greater_is_better": "nothing: each metric knows whether more of it is better",
        "overwrite_output_dir": "overwrite",
        "resume_from_checkpoint": "nothing: the same call resumes the run in output_dir",
        "train_dataset": "train",
        "eval_dataset": "validation",
        "callbacks": "callback",
        "compute_metrics": "nothing: the task computes its metrics",
        "disable_tqdm": "progress=False",
        "max_seq_length": "the setting max_length of the model's task",
        "max_length": "the setting max_length of the model's task",
        "label_smoothing_factor": "the setting label_smoothing of the model's task",
        "optim": "nothing: the optimizer is AdamW",
    }
)


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses keywords that ``fit`` does not have.

    Raises:
        UsageError: naming all of them, each with the argument that was probably meant.
    """
    arguments = [*known, *FitSettings.__annotations__]
    wrong = [name for name in given if name not in arguments]
    if wrong:
        raise UsageError("fit: " + "; ".join(f"unknown argument '{name}'{_hint(name, arguments)}" for name in wrong))


def _hint(name: str, arguments: Iterable[str]) -> str:
    ours = HF_ARGUMENTS.get(name)
    if ours is not None:
        return f"; transformers' {name} is {ours}" if not ours.startswith("nothing") else f"; {ours[9:]}"
    return nearest_or_all(name, arguments)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run ended with; the same as in ``metrics.json``.

    Attributes:
        metrics: of the best model on the validation rows; ``last_metrics``: of the last evaluation.
        best_step, steps: optimizer steps until the best model, and in all.
        train_seconds: without evaluation and saving.
        task: of the best model, with its tuned thresholds.
        validation_sets: the names of the validation sets, which their metrics begin with; a single one may be "".
        collapse: what the best model predicts for every row if it does so although the labels differ, such as "predicts
            'calm' for every row"; else None. On the validation set whose metric picks the best model.
        notes: sentences on what a reader of the metrics must know.
        reused: the run was complete already; nothing was trained.
    """

    metrics: dict[str, float]
    last_metrics: dict[str, float]
    best_step: int
    steps: int
    stopped_early: bool
    train_seconds: float
    output_dir: Path
    task: Task
    validation_sets: tuple[str, ...]
    collapse: str | None = None
    notes: tuple[str, ...] = ()
    reused: bool = False

    def summary(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        others = ("output_dir", "task", "validation_sets", "reused")
        return {key: value for key, value in vars(self).items() if key not in others}

    def metric_tables(self) -> dict[str, MetricTable]:
        """Validation set -> its metrics of the best model, told apart for people."""
        found = metrics_by_set(self.metrics, self.validation_sets)
        return {name: self.task.metric_table(metrics) for name, metrics in found.items()}

    @classmethod
    def from_summary(
        cls, summary: Mapping[str, Any], *, output_dir: Path, task: Task, validation_sets: Sequence[str]
    ) -> Self:
        """The result of a finished run; JSON's null is a metric that is not a number."""
        values = dict(summary)
        for name in ("metrics", "last_metrics"):
            values[name] = {key: math.nan if value is None else value for key, value in summary[name].items()}
        values["notes"] = tuple(summary["notes"])
        return cls(**values, output_dir=output_dir, task=task, validation_sets=tuple(validation_sets), reused=True)


def prepare_model(model: TaskModel, *, seed: int) -> None:
    """Makes a model ready for a run: a head that is new is drawn from the run's seed.

    Raises:
        UsageError: it cannot be trained and saved: it is exported, wrapped by another library, or no ``TaskModel``.
    """
    if isinstance(model, ExportedModel):
        raise UsageError("an exported model has no weights to train: train the model that it was made from")
    if not isinstance(model, TaskModel):
        raise UsageError(
            f"expected a TaskModel, got a {type(model).__name__}. Of a model that another library has wrapped, pass "
            "the TaskModel inside; adapters of peft are merged by model = peft_model.merge_and_unload()"
        )
    check_names(model)
    model.draw_new_head(seed)


class Callback(Protocol):
    """What a run calls on its first process with each line that it adds to metrics.jsonl, once it is written.

    ``record["event"]`` is "step" (with step, epoch, loss, learning_rate, grad_norm, tokens_per_second) or "evaluation"
    (with step, epoch, metrics). A true answer to an evaluation ends the run as early stopping does: the best model so
    far is its result. Answers to steps do not count.
    """

    def __call__(self, record: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs, loaded and checked.

    Attributes:
        source: of the weights, as a recipe's ``[model]`` names it; empty for a model made by the caller.
        provenance: file name -> text, written into the output folder.
    """

    model: TaskModel
    splits: Splits
    optim: OptimSection
    run: RunSection
    output_dir: Path
    gradient_checkpointing: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    callback: Callback | None = None

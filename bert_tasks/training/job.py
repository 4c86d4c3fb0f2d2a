"""What goes into a run and what comes out of it.

Owns the two types that the parts of training share, and what is asked of a model before training. Must not know how
training works.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from bert_tasks.data.splits import Splits
from bert_tasks.errors import UsageError
from bert_tasks.metrics.tables import MetricTable, metrics_by_set
from bert_tasks.model.exported import ExportedModel
from bert_tasks.model.pretrained import check_names
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.tasks.base import Task


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

"""Which model of a run is the best: evaluation while training, the value compared, and when to stop early.

Owns the course of a run (what changes from one evaluation to the next). Must not know optimizer steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from accelerate import Accelerator

from bert_tasks.data.features import Samples
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import evaluate_samples
from bert_tasks.metrics.tables import LOSS, metric_key, metrics_by_set, split_key, untuned
from bert_tasks.model.inputs import tokenized
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import RunSection
from bert_tasks.tasks.base import Task

Validation = Mapping[str, tuple[Samples, RowTable]]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How good an evaluated model is.

    Attributes:
        value: of the metric that picks the best model, as a number of which more is better; -inf if it is no number.
        loss: on the same validation rows, which decides between equal values; inf where there is none.
    """

    value: float
    loss: float

    def is_above(self, value: float, loss: float) -> bool:
        return self.value > value or (self.value == value and self.loss < loss)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation of all validation sets.

    Attributes:
        metrics: under their ``metric_key``.
        task: tuned on the first set.
        collapses: validation set -> see ``Task.collapse``.
    """

    metrics: dict[str, float]
    task: Task
    collapses: Mapping[str, str | None]


@dataclass(kw_only=True)
class TrainerState:
    """How a run has gone so far.

    Attributes:
        step: optimizer steps done; ``evaluated_step``: those of the last evaluation.
        task: of the best evaluation, with its tuned thresholds.
        best_value: what the best model has most of; ``best_loss``: its validation loss.
        best_collapse: see ``Task.collapse``; of the best model on the validation set that its metric belongs to.
        seconds: spent on training, without evaluation and saving.
        overflows: steps in a row that fp16 skipped.
    """

    task: Task
    step: int = 0
    evaluated_step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    best_value: float = -math.inf
    best_loss: float = math.inf
    best_step: int = 0
    best_collapse: str | None = None
    last: dict[str, float] = field(default_factory=dict)
    since_best: int = 0
    seconds: float = 0.0
    overflows: int = 0
    stopped: bool = False

    def add(
        self, metrics: dict[str, float], rank: Rank, *, task: Task, collapse: str | None, patience: int | None
    ) -> bool:
        """Takes in an evaluation; True if it is the best so far. Of equals the first is."""
        is_best = rank.is_above(self.best_value, self.best_loss) or not self.best
        self.last, self.evaluated_step = metrics, self.step
        self.since_best = 0 if is_best else self.since_best + 1
        if is_best:
            self.best, self.best_step, self.task = metrics, self.step, task
            self.best_value, self.best_loss, self.best_collapse = rank.value, rank.loss, collapse
        self.update_early_stopping(patience)
        return is_best

    def update_early_stopping(self, patience: int | None) -> None:
        """Whether the run stops early."""
        self.stopped = patience is not None and self.since_best >= patience


def evaluate_all(
    model: TaskModel, validation: Validation, accelerator: Accelerator, *, stop: Callable[[], bool] = lambda: False
) -> Evaluated:
    """Evaluates the model on all validation sets and tunes the task on the first.

    Raises:
        GivenUpError: see ``evaluate_samples``. The model's task is then the one it came with.
    """
    plain, task = model.task, model.task
    metrics: dict[str, float] = {}
    collapses: dict[str, str | None] = {}
    try:
        for position, (name, (samples, table)) in enumerate(validation.items()):
            model.task = task
            result = evaluate_samples(model, samples, table, accelerator, tune=position == 0, stop=stop)
            task, collapses[name] = result.task, result.collapse
            metrics |= {metric_key(name, metric): value for metric, value in result.metrics.items()}
    finally:
        model.task = plain
    return Evaluated(metrics=metrics, task=task, collapses=collapses)


def overall_metrics(metrics: Mapping[str, float], task: Task, sets: Sequence[str]) -> dict[str, float]:
    """Of what ``evaluate_all`` gave the metrics over all rows, each number once."""
    found = metrics_by_set(metrics, sets)
    return {
        metric_key(name, metric): value
        for name, one in found.items()
        for metric, value in task.metric_table(one).overall.items()
    }


def check_metric(
    model: TaskModel, run: RunSection, validation: Mapping[str, RowTable], accelerator: Accelerator
) -> None:
    """Refuses a metric that evaluation will not report, before an epoch is spent.

    It evaluates one row to know, and all of them where one says too little: some metrics exist only if there is a row
    of some class, and a row may have nothing to measure.

    Raises:
        UsageError: naming the metrics there are.
    """
    wanted = run.metric_for_best_model
    if wanted is None or wanted in _metric_names(model, validation, accelerator, rows=1):
        return
    names = _metric_names(model, validation, accelerator, rows=None)
    if wanted not in names:
        raise UsageError(f"metric_for_best_model = {wanted!r}: there are {', '.join(names)}")


def _metric_names(
    model: TaskModel, validation: Mapping[str, RowTable], accelerator: Accelerator, *, rows: int | None
) -> list[str]:
    """The metrics over the first rows of each set, or over all; none where they cannot be computed."""
    model.to(accelerator.device)
    some = {name: table if rows is None else table.select(range(rows)) for name, table in validation.items()}
    samples = {name: (tokenized(table, model.task, model), table) for name, table in some.items()}
    try:
        return list(evaluate_all(model, samples, accelerator).metrics)
    except DataError:
        if rows is None:
            raise
        return []


def best_metric(task: Task, run: RunSection, sets: Iterable[str]) -> str:
    """The key of the metric that picks the best model: by default the task's main one on the first validation set."""
    stated = run.metric_for_best_model
    return metric_key(next(iter(sets)), task.primary_metric) if stated is None else stated


def chosen_set(task: Task, run: RunSection, sets: Sequence[str]) -> str:
    """The validation set whose metric picks the best model."""
    return split_key(best_metric(task, run, sets), sets)[0]


def lower_is_better(task: Task) -> frozenset[str]:
    """The metrics of a validation set of which less is better, by their names without the set."""
    untuned_too = {untuned(task.primary_metric)} if task.primary_metric in task.lower_is_better else set()
    return task.lower_is_better | {LOSS} | untuned_too


def rank_of(metrics: Mapping[str, float], task: Task, run: RunSection, sets: Sequence[str]) -> Rank:
    """How good a model with these metrics is. A metric that is not a number is worse than any."""
    key = best_metric(task, run, sets)
    name, metric = split_key(key, sets)
    value = -metrics[key] if metric in lower_is_better(task) else metrics[key]
    loss = metrics.get(metric_key(name, LOSS), math.inf)
    return Rank(value=value if math.isfinite(value) else -math.inf, loss=loss if math.isfinite(loss) else math.inf)

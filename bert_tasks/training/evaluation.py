"""Evaluation during training: all validation sets, and the metric that picks the best model.

Owns which metric decides, its direction, and what a reader of the metrics must know.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
        value: of the metric that picks the best model, negated if lower is better; -inf if it is not a number.
        loss: on the same validation rows, which decides between equal values; inf if there is none.
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
    """Those metrics of ``evaluate_all`` that are over all rows, each number once."""
    found = metrics_by_set(metrics, sets)
    return {
        metric_key(name, metric): value
        for name, one in found.items()
        for metric, value in task.metric_table(one).overall.items()
    }


def check_metric(
    model: TaskModel, run: RunSection, validation: Mapping[str, RowTable], accelerator: Accelerator
) -> None:
    """Refuses a ``metric_for_best_model`` that evaluation will not report, before an epoch is spent.

    Evaluates one row, and all of them if that is not enough: some metrics exist only if there is a row of some class,
    and a row may have nothing to measure.

    Raises:
        UsageError: naming the metrics there are.
    """
    wanted = run.metric_for_best_model
    if wanted is None:
        return
    model.to(accelerator.device)

    def names(tables: Mapping[str, RowTable]) -> list[str]:
        samples = {name: (tokenized(table, model.task, model), table) for name, table in tables.items()}
        return list(evaluate_all(model, samples, accelerator).metrics)

    with suppress(DataError):  # one row may not be enough to compute any metric
        if wanted in names({name: table.select(range(1)) for name, table in validation.items()}):
            return
    known = names(validation)
    if wanted not in known:
        raise UsageError(f"metric_for_best_model = {wanted!r}: there are {', '.join(known)}")


def best_metric(task: Task, run: RunSection, sets: Iterable[str]) -> str:
    """The key of the metric that picks the best model: by default the task's main one on the first validation set."""
    stated = run.metric_for_best_model
    return metric_key(next(iter(sets)), task.primary_metric) if stated is None else stated


def chosen_set(task: Task, run: RunSection, sets: Sequence[str]) -> str:
    """The validation set whose metric picks the best model."""
    return split_key(best_metric(task, run, sets), sets)[0]


def lower_is_better(task: Task) -> frozenset[str]:
    """The metrics for which lower is better, by their names without the validation set."""
    untuned_too = {untuned(task.primary_metric)} if task.primary_metric in task.lower_is_better else set()
    return task.lower_is_better | {LOSS} | untuned_too


def rank_of(metrics: Mapping[str, float], task: Task, run: RunSection, sets: Sequence[str]) -> Rank:
    """The rank of a model with these metrics. A metric that is not a number is worse than any."""
    key = best_metric(task, run, sets)
    name, metric = split_key(key, sets)
    value = -metrics[key] if metric in lower_is_better(task) else metrics[key]
    loss = metrics.get(metric_key(name, LOSS), math.inf)
    return Rank(value=value if math.isfinite(value) else -math.inf, loss=loss if math.isfinite(loss) else math.inf)


def metric_metadata(task: Task, run: RunSection, sets: Sequence[str]) -> dict[str, Any]:
    """What a reader of the metrics must know: validation sets, the metric that picks the best model, directions."""
    return {
        "sets": list(sets),
        "best": best_metric(task, run, sets),
        "primary": task.primary_metric,
        "lower_is_better": sorted(lower_is_better(task)),
        "neutral": sorted(task.neutral_metrics),
    }

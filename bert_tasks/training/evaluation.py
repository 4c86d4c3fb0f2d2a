"""Evaluation on all validation sets, and the metric that picks the best model."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from bert_tasks.data.table import RowTable, Samples
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import evaluate_samples
from bert_tasks.metrics.tables import LOSS, metric_key, split_key, untuned
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.features import tokenized
from bert_tasks.model.heads import primary_metric
from bert_tasks.model.multitask import AnyModel
from bert_tasks.recipe.schema import RunSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import head_key

Validation = Mapping[str, tuple[Samples, RowTable]]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Metrics by ``metric_key``, the tuned task of each head and ``Output.degeneracy`` of all sets."""

    metrics: dict[str, float]
    tasks: Mapping[str, Task]
    collapses: Mapping[str, str | None]


def evaluate_all(
    model: AnyModel,
    validation: Validation,
    accelerator: Accelerator,
    *,
    forward_fn: ForwardFn | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Evaluates the model on all validation sets and tunes its tasks on the first."""
    plain = tasks = model.tasks
    metrics: dict[str, float] = {}
    collapses: dict[str, str | None] = {}
    try:
        for position, (name, (samples, table)) in enumerate(validation.items()):
            model.tasks = tasks
            result = evaluate_samples(
                model, samples, table, accelerator, tune=position == 0, forward_fn=forward_fn, stop=stop
            )
            tasks = tasks | {head: score.task for head, score in result.scores.items()}
            collapses[name] = result.collapse
            metrics |= {metric_key(name, metric): value for metric, value in result.metrics.items()}
    finally:
        model.tasks = plain
    return Evaluated(metrics=metrics, tasks=tasks, collapses=collapses)


def check_metric(
    model: AnyModel,
    metric: str,
    validation: Mapping[str, RowTable],
    accelerator: Accelerator,
    forward_fn: ForwardFn | None = None,
) -> None:
    """Raises UsageError if evaluation will not report ``metric_for_best_model``.

    Evaluates one row, and all of them if that is not enough, because some metrics exist only if there is a row of some
    class.
    """
    model.to(accelerator.device)
    metric_names: list[str] = []
    for tables in ({name: table.select(range(1)) for name, table in validation.items()}, validation):
        samples = {name: (tokenized(table, model), table) for name, table in tables.items()}
        # One row may not be enough to compute any metric.
        with nullcontext() if tables is validation else suppress(DataError):
            metric_names = list(evaluate_all(model, samples, accelerator, forward_fn=forward_fn).metrics)
        if metric in metric_names:
            return
    raise UsageError(f"metric_for_best_model is {metric!r}, expected one of {', '.join(metric_names)}")


def metric_metadata(tasks: Mapping[str, Task], run: RunSection, sets: Sequence[str]) -> dict[str, Any]:
    """Returns facts for readers of the metrics, such as the best model's metric."""
    primary, best = primary_metric(tasks), run.metric_for_best_model
    lower: set[str] = set()
    neutral: set[str] = set()
    for name, task in tasks.items():
        lower |= {head_key(name, metric) for metric in task.output.lower_is_better}
        neutral |= {head_key(name, metric) for metric in task.output.neutral_metrics}
    untuned_too = {untuned(primary)} if primary in lower else set()
    return {
        "sets": list(sets),
        "best": metric_key(sets[0], primary) if best is None else best,
        "primary": primary,
        "lower_is_better": sorted(lower | {LOSS} | untuned_too),
        "neutral": sorted(neutral),
    }


def rank_of(metrics: Mapping[str, float], metadata: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the metric that picks the best model, and the loss for ties.

    The value is negated if lower is better. -inf stands for a value that is not a number, inf for no loss. ``metadata``
    is the result of ``metric_metadata``.
    """
    key = metadata["best"]
    name, metric = split_key(key, metadata["sets"])
    value = -metrics[key] if metric in metadata["lower_is_better"] else metrics[key]
    loss = metrics.get(metric_key(name, LOSS), math.inf)
    return value if math.isfinite(value) else -math.inf, loss if math.isfinite(loss) else math.inf

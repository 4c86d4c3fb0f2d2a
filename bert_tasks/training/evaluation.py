"""Evaluation on all validation sets, and the metric that selects the best model.

With several validation sets, the names of metrics begin with the name of their set (see ``metric_key``). The first set
is the one on which thresholds are tuned.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from bert_tasks.data.columns import head_rows
from bert_tasks.data.features import Samples
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import evaluate_samples
from bert_tasks.inference.own_metrics import OwnMetric, lower_names
from bert_tasks.metrics.tables import (
    LOSS,
    SEPARATOR,
    format_number,
    metric_key,
    metrics_by_set,
    metrics_of_set,
    split_key,
    untuned,
)
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.features import tokenized
from bert_tasks.model.heads import metric_table, primary_metric
from bert_tasks.model.multitask import AnyModel
from bert_tasks.recipe.schema import RunSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import head_key
from bert_tasks.training.records import MetricRecord

Validation = Mapping[str, tuple[Samples, Rows]]
# Metrics that are the fraction of a label if a model always predicts that label.
_ACCURACIES = ("accuracy", "overall_accuracy")


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The result of an evaluation on all validation sets.

    Attributes:
        metrics: All metrics of all sets, by ``metric_key``.
        tasks: The task of each head, with the thresholds that the evaluation has tuned.
        collapses: For each set, the prediction that the model makes for every row, or None. See ``Output.degeneracy``.
    """

    metrics: dict[str, float]
    tasks: Mapping[str, Task]
    collapses: Mapping[str, str | None]

    @property
    def overall(self) -> dict[str, float]:
        """The metrics over all rows for people, without those of labels and those that equal another one."""
        overall: dict[str, float] = {}
        for name, metrics in metrics_by_set(self.metrics, list(self.collapses)).items():
            table = metric_table(self.tasks, metrics)
            for metric, value in table.overall.items():
                overall[metric_key(name, table.title(metric))] = value
        return overall


def evaluate_all(
    model: AnyModel,
    validation: Validation,
    accelerator: Accelerator,
    *,
    forward_fn: ForwardFn | None = None,
    stop: Callable[[], bool] = lambda: False,
    own: Sequence[OwnMetric] = (),
) -> Evaluated:
    """Evaluates the model on all validation sets, and tunes its tasks on the first of them.

    Args:
        model: The model. Afterwards it has the tasks that it had before.
        validation: The tokenised rows of each set.
        accelerator: Divides the rows over processes.
        forward_fn: Runs a batch instead of the model.
        stop: Is called between batches. If it returns True, the evaluation ends.
        own: Metrics of one's own, which are computed in addition.

    Raises:
        GivenUpError: ``stop`` returned True.
    """
    plain = tasks = model.tasks
    metrics: dict[str, float] = {}
    collapses: dict[str, str | None] = {}
    try:
        for position, (name, (samples, table)) in enumerate(validation.items()):
            model.tasks = tasks
            result = evaluate_samples(
                model,
                samples,
                table,
                accelerator,
                tune=position == 0,  # the other sets are evaluated with the thresholds of the first
                forward_fn=forward_fn,
                stop=stop,
                metrics=own,
            )
            tasks = tasks | {head: score.task for head, score in result.scores.items()}
            collapses[name] = result.collapse
            metrics |= {metric_key(name, metric): value for metric, value in result.metrics.items()}
    finally:
        model.tasks = plain
    return Evaluated(metrics=metrics, tasks=tasks, collapses=collapses)


def check_set_names(names: Sequence[str]) -> None:
    """Raises UsageError if there is no validation set, or if metrics cannot begin with the name of their set."""
    is_unnamed = len(names) > 1 and "" in names
    if not names or is_unnamed or any(SEPARATOR in name for name in names):
        raise UsageError(
            f"the validation sets are {list(names)}, expected at least one, with a name for each of several, "
            f"without {SEPARATOR!r} in names"
        )


def check_metrics(
    model: AnyModel,
    run: RunSection,
    own: Sequence[OwnMetric],
    validation: Mapping[str, Rows],
    accelerator: Accelerator,
    forward_fn: ForwardFn | None = None,
) -> None:
    """Tries the metrics of one's own, and the metrics that settings name, before the run trains for hours.

    It evaluates two rows of each task, and all rows if that is not enough, because some metrics exist only if there is
    a row of some class.

    Raises:
        UsageError: A metric of one's own fails, or evaluation will not report ``metric_for_best_model`` or one of
            ``lower_is_better``.
    """
    if run.metric_for_best_model is None and not run.lower_is_better and not own:
        return
    model.to(accelerator.device)
    problem: DataError | UsageError | None = None
    for is_last in (False, True):
        samples = {}
        for name, table in validation.items():
            rows = table if is_last else _first_rows(table, model)
            samples[name] = (tokenized(rows, model), rows)
        try:
            metrics = evaluate_all(model, samples, accelerator, forward_fn=forward_fn, own=own).metrics
            problem = _unknown_metric(run, metrics, list(validation))
        except (DataError, UsageError) as error:  # two rows may not be enough to compute a metric
            problem = error
        if problem is None:
            return
    if problem is not None:
        raise problem


def _first_rows(table: Rows, model: AnyModel) -> Rows:
    """Returns two rows of a table, or, if there are several tasks, two rows with labels of each task."""
    if "" in model.tasks:
        return table.select(range(min(2, len(table))))
    rows = list(table)
    numbers = set[int]()
    for name, task in model.tasks.items():
        numbers.update(head_rows(rows, name, task.columns)[0][:2])
    return table.select(sorted(numbers))


def _unknown_metric(run: RunSection, metrics: Mapping[str, float], sets: Sequence[str]) -> UsageError | None:
    """Returns the error of a setting that names a metric which evaluation does not report."""
    if run.metric_for_best_model not in (None, *metrics):
        return UsageError(
            f"metric_for_best_model is {run.metric_for_best_model!r}, expected one of {', '.join(metrics)}"
        )
    names = list(dict.fromkeys(split_key(key, sets)[1] for key in metrics))
    for name in run.lower_is_better:
        if name not in names:
            return UsageError(f"lower_is_better names {name!r}, expected names among {', '.join(names)}")
    return None


def metric_metadata(
    tasks: Mapping[str, Task], run: RunSection, sets: Sequence[str], own: Sequence[OwnMetric] = ()
) -> MetricRecord:
    """Returns what readers of the metrics must know, such as the metric that selects the best model.

    Args:
        tasks: The task of each head.
        run: The section ``[run]``.
        sets: The names of the validation sets.
        own: The metrics of ``run.metrics``, which may say for which of their numbers lower is better.
    """
    primary, best = primary_metric(tasks), run.metric_for_best_model
    lower = {*run.lower_is_better, *lower_names(own, tasks)}
    neutral: set[str] = set()
    for name, task in tasks.items():
        lower |= {head_key(name, metric) for metric in task.output.lower_is_better}
        neutral |= {head_key(name, metric) for metric in task.output.neutral_metrics}
    if primary in lower:
        lower.add(untuned(primary))  # the same metric without the tuned thresholds
    lower.add(LOSS)
    if best is None:
        best = metric_key(sets[0], primary)
    return MetricRecord(
        sets=list(sets),
        best=best,
        primary=primary,
        lower_is_better=sorted(lower),
        neutral=sorted(neutral),
    )


def headline(
    tasks: Mapping[str, Task], metrics: Mapping[str, float], *, name: str, frequent: tuple[str, float] | None
) -> str:
    """Returns the primary metric on a validation set, beside its majority baseline if it has one.

    An accuracy that is not above the baseline shows that the model learned nothing.

    Args:
        tasks: The task of each head.
        metrics: All metrics of all validation sets.
        name: The name of the validation set.
        frequent: The most frequent label of its rows and the fraction of this label, if there are labels.
    """
    metric = primary_metric(tasks)
    of_set = metrics_of_set(metrics, name)
    title = metric_key(name, metric_table(tasks, of_set).title(metric))
    text = f"{title} {format_number(of_set.get(metric))}"
    if frequent is None or metric not in _ACCURACIES:
        return text
    label, fraction = frequent
    return f"{text} (always predicting {label!r}: {format_number(fraction)})"


def rank_of(metrics: Mapping[str, float], metadata: MetricRecord) -> tuple[float, float]:
    """Returns the metric that selects the best model, and the loss of the same set, which decides between equal ones.

    The metric is negated if lower is better, so that the higher value always wins. It is -inf if it is not a number,
    and the loss is inf if there is none. ``metadata`` is the result of ``metric_metadata``.

    Raises:
        UsageError: The metric is not among them, because a metric of one's own no longer returns it.
    """
    key = metadata.best
    if key not in metrics:
        raise UsageError(
            f"metric_for_best_model is {key!r}, which this evaluation does not report (it reports {', '.join(metrics)}"
            "). A metric of your own has to return it each time"
        )
    name, metric = split_key(key, metadata.sets)
    value = metrics[key]
    if metric in metadata.lower_is_better:
        value = -value
    if not math.isfinite(value):  # comparisons with NaN are always False, so the order of evaluations would decide
        value = -math.inf
    loss = metrics.get(metric_key(name, LOSS), math.inf)
    if not math.isfinite(loss):
        loss = math.inf
    return value, loss

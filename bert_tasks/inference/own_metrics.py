"""Metrics of one's own, which are reported behind those of the task.

The module owns how modules of Hugging Face's evaluate and functions are named and loaded, what they may return, and
under which names their numbers are reported. What they get is decided by the output (``Output.metric_inputs``).
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from numbers import Real
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.recipe.schema import MetricSources, import_name
from bert_tasks.recipe.toml import EVALUATE_MODULE
from bert_tasks.tasks.several import head_key
from bert_tasks.variables import disable_telemetry

# Modules of evaluate whose number, which has the name of the module, is an error. They do not say so themselves. See
# https://huggingface.co/spaces/evaluate-metric/mse and the pages of the others. A function of such a name is one, too.
_ERRORS = frozenset({"brier_score", "mae", "mape", "mase", "mse", "smape"})
_LONGEST_REASON = 300  # characters of the message of another library


@dataclass(frozen=True, kw_only=True)
class OwnMetric:
    """A module of evaluate, or a function, that computes metrics of one's own.

    Attributes:
        name: The name of the function or of the module.
        source: The function, or the module with its method ``compute``.
        task: The name of the task that it is for, if the model has several. None for all tasks.
        lower_is_better: The names among its results for which lower is better.

    Examples:
        >>> OwnMetric(name="bias", source=lambda predictions, labels: 0.5).values([1], [0])
        {'bias': 0.5}
    """

    name: str
    source: Any
    task: str | None = None
    lower_is_better: frozenset[str] = frozenset()

    @property
    def is_module(self) -> bool:
        """True for a module of evaluate, also for modules that ``evaluate.combine`` has joined."""
        return hasattr(self.source, "compute")

    def values(self, predictions: list[Any], labels: list[Any]) -> dict[str, float]:
        """Returns the numbers that it computes, by the names that it gives them.

        A single number gets the name of the metric. A number in a mapping inside the result, such as F1 of the type PER
        by evaluate's seqeval, is named ``PER_f1``. Infinity becomes nan.

        Args:
            predictions, labels: The result of ``Output.metric_inputs``.

        Raises:
            UsageError: It fails, or returns no number or anything else beside numbers.
        """
        try:
            if self.is_module:
                result = self.source.compute(predictions=predictions, references=labels)
            else:
                result = self.source(predictions, labels)
        except Exception as error:  # outer boundary: code of the user
            raise UsageError(
                f"metric '{self.name}' failed with {_reason(error)}. It gets the predictions and references that "
                "metric_inputs of the task's output describes"
            ) from error
        if not isinstance(result, Mapping):
            result = {self.name: result}
        numbers: list[tuple[str, Any]] = []
        for name, value in result.items():
            if isinstance(value, Mapping):
                numbers += [(f"{name}_{inner}", number) for inner, number in value.items()]
            else:
                numbers.append((str(name), value))
        values: dict[str, float] = {}
        for name, number in numbers:
            if name in values or not name:
                raise UsageError(f"metric '{self.name}' returns the name '{name}' twice or without a character")
            values[name] = self._number(name, number)
        if not values:
            raise UsageError(f"metric '{self.name}' returns nothing, expected a number or numbers by their names")
        return values

    def _number(self, name: str, value: Any) -> float:
        """Returns a value as a number. One element of numpy or torch is a number, too."""
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Real):  # a bool is a Real in Python
            found = "None" if value is None else f"a value of type {type(value).__name__}"
            raise UsageError(f"metric '{self.name}' returns {found} as '{name}', expected a number")
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond the range of a float
            return nan
        if not isfinite(number):  # JSON has no infinity
            return nan
        return number

    def reported_names(self, name: str) -> tuple[str, ...]:
        """Returns the names that one of its numbers may be reported under. See ``metrics_of_head``."""
        if self.is_module:
            return (name, f"{self.name}_{name}")
        return (name,)


def own_metrics(sources: MetricSources, tasks: Collection[str]) -> tuple[OwnMetric, ...]:
    """Returns metrics by their names, or from functions and modules, ready to be computed.

    Args:
        sources: See ``run.metrics`` of a recipe.
        tasks: The names of the tasks of the model.

    Raises:
        RecipeError: A function cannot be imported.
        UsageError: A module cannot be loaded, there is no such task, or something is neither a module nor a function.
    """
    if not isinstance(sources, Mapping):
        return tuple(_own_metric(source, None) for source in _as_list(sources))
    metrics: list[OwnMetric] = []
    for task, of_task in sources.items():
        if "" in tasks:
            raise UsageError(f"metrics are given for the task '{task}', but the model has one task. Pass a list")
        if task not in tasks:
            known = ", ".join(tasks)
            raise UsageError(f"metrics are given for the task '{task}', but the model has the tasks {known}")
        metrics += [_own_metric(source, task) for source in _as_list(of_task)]
    return tuple(metrics)


def metric_names(sources: MetricSources) -> Any:
    """Returns what run.json records of metrics of one's own, for functions and modules in memory their names."""
    if isinstance(sources, Mapping):
        return {task: metric_names(of_task) for task, of_task in sources.items()}
    names: list[str] = []
    for source in _as_list(sources):
        if isinstance(source, str):
            names.append(source)
        else:
            names.append(_name_of(source))
    return names


def _as_list(sources: Any) -> list[Any]:
    """Returns several metrics, also if there is only one."""
    if isinstance(sources, list | tuple):
        return list(sources)
    return [sources]


def _name_of(source: Any) -> str:
    """Returns the name of a module or a function. A partial function has the name of the function inside."""
    if hasattr(source, "compute"):
        return str(getattr(source, "name", "combined"))  # evaluate.combine gives no name
    if isinstance(source, partial):
        return _name_of(source.func)
    return str(getattr(source, "__name__", type(source).__name__))


def _own_metric(source: Any, task: str | None) -> OwnMetric:
    """Returns the metric of a name, a function or a module. Raises UsageError for anything else."""
    named = source  # as the user gave it, for the message
    if isinstance(source, str):
        source = _loaded(source)
    if not hasattr(source, "compute") and not callable(source):
        raise UsageError(
            f"metric {named!r} is of type {type(source).__name__}, expected a function of predictions and references, "
            "or a module of evaluate"
        )
    name = _name_of(source)
    return OwnMetric(name=name, source=source, task=task, lower_is_better=_lower_is_better(source, name))


def _lower_is_better(source: Any, name: str) -> frozenset[str]:
    """Returns the names among the results of a function or module for which it says that lower is better.

    A training run needs to know, because it selects the best checkpoint by a metric.
    """
    if isinstance(source, partial):
        return _lower_is_better(source.func, name)
    lower = getattr(source, "lower_is_better", _ERRORS & {name})
    if isinstance(lower, str) or not isinstance(lower, Collection):
        raise UsageError(f"metric '{name}': lower_is_better is {lower!r}, expected a set of names")
    names = frozenset(lower)
    for module in getattr(source, "evaluation_modules", ()):  # of evaluate.combine
        names |= _lower_is_better(module, module.name)
    return names


def _loaded(name: str) -> Any:
    """Returns the function or module of a name, and runs its code."""
    module = EVALUATE_MODULE.fullmatch(name)
    try:
        if module is None:
            return import_name(name, "metric", example="'evaluate:NAME_OR_PATH' or 'module:function'")
        return _evaluate_module(module["path"], module["configuration"])
    except BertTasksError:
        raise
    except Exception as error:  # outer boundary: code of the user
        raise UsageError(
            f"metric '{name}' cannot be loaded, because of {_reason(error)}. Name a module of evaluate, the folder of "
            "its script, or a function in a module that Python can import"
        ) from error


def _evaluate_module(path: str, configuration: str | None) -> Any:
    """Loads a module of evaluate, which needs no network for a folder or a file.

    Predictions stay in memory, so that nothing is written when it computes.
    """
    disable_telemetry()
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
    # Imported here, because it takes seconds and few runs need it.
    import evaluate

    return evaluate.load(path, configuration, keep_in_memory=True)


def _reason(error: Exception) -> str:
    """Returns an error of other code in one line."""
    text = " ".join(str(error).split()).removesuffix(".")
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]}..."
    return f"{type(error).__name__}: {text}"


def metrics_of_head(
    metrics: Sequence[OwnMetric],
    task: str,
    output: Output[Any],
    predictions: Sequence[Prediction],
    rows: Sequence[Row],
    taken: Collection[str],
) -> dict[str, float]:
    """Returns the metrics of one's own of a head, by the names under which they are reported.

    A number of a module of evaluate whose name is taken is reported with the module's name in front, as
    ``evaluate.combine`` does (https://huggingface.co/docs/evaluate/a_quick_tour). A function can return another name,
    so there it is an error.

    Args:
        metrics: Metrics of one's own, also of other heads.
        task: The name of the head.
        output: The output of the head.
        predictions, rows: Its predictions, and as many rows.
        taken: Names of the task's metrics.

    Raises:
        UsageError: A metric fails, returns anything but numbers, or two metrics have one name. Or the output has no
            form for such metrics.
    """
    owners = dict.fromkeys(taken, "the task")  # name of each number -> what reports it, for messages
    results: dict[str, float] = {}
    for metric in metrics:
        if metric.task not in (None, task):
            continue
        for name, value in metric.values(*output.metric_inputs(predictions, rows)).items():
            if metric.is_module and name in owners:  # accuracy of evaluate is there beside the accuracy of the task
                name = f"{metric.name}_{name}"
            if name in owners:
                raise UsageError(
                    f"metric '{metric.name}' returns '{name}', which {owners[name]} reports already. Return another "
                    "name, or remove one of them"
                )
            owners[name] = f"metric '{metric.name}'"
            results[name] = value
    return results


def lower_names(metrics: Sequence[OwnMetric], tasks: Collection[str]) -> frozenset[str]:
    """Returns the reported names for which the metrics themselves say that lower is better."""
    lower = set[str]()
    for metric in metrics:
        for task in tasks:
            if metric.task not in (None, task):
                continue
            for name in metric.lower_is_better:
                lower |= {head_key(task, reported) for reported in metric.reported_names(name)}
    return frozenset(lower)

"""Metrics under the keys that a run records, and as tables for people.

A key joins the names of a validation set and of a metric, and no metric is recorded over another. The table has a row
for each class. An output decides which metrics belong to a class, and which repeat another (``Output.metric_table``).
This module must not know metrics other than the two that evaluation itself adds.

A run with one unnamed set records ``accuracy``. A run with the sets dev and dev_strict records ``dev/accuracy`` and
``dev_strict/accuracy``. A set's name holds no "/", so the first "/" in a key ends it, whatever labels are called.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from bert_tasks.errors import DataError
from bert_tasks.tables import Table

LOSS = "loss"  # of the evaluated rows. A lower loss is better in every task
SEPARATOR = "/"  # between a set's name, which holds none, and the metric
Value = TypeVar("Value")  # a number, or None if a file has null instead of a number


def metric_key(name: str, metric: str) -> str:
    """Returns the key of a metric on the set ``name``, empty for a single set."""
    if not name:
        return metric
    return f"{name}{SEPARATOR}{metric}"


def split_key(key: str, sets: Sequence[str]) -> tuple[str, str]:
    """Splits a key into validation set and metric, if ``sets`` are the run's sets."""
    if not any(sets):  # a single set without a name, whose metrics may contain the separator
        return "", key
    name, _, metric = key.partition(SEPARATOR)
    return name, metric


def metrics_of_set(metrics: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Returns the metrics of one validation set, without its name."""
    start = metric_key(name, "")
    of_set: dict[str, Value] = {}
    for key, value in metrics.items():
        if key.startswith(start):
            of_set[key.removeprefix(start)] = value
    return of_set


def metrics_by_set(metrics: Mapping[str, Value], sets: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Maps each validation set to its metrics, without its name."""
    return {name: metrics_of_set(metrics, name) for name in sets}


def untuned(metric: str) -> str:
    """Returns the name of a metric before the thresholds were tuned."""
    return f"untuned_{metric}"


def merged(*each: Mapping[str, float]) -> dict[str, float]:
    """Joins all metrics.

    Raises:
        DataError: Two metrics have the same key, which a label's name can cause.
    """
    union: dict[str, float] = {}
    for metrics in each:
        repeated = sorted(union.keys() & metrics.keys())
        if repeated:
            raise DataError(
                f"metrics: {', '.join(map(repr, repeated))} would be reported twice, once for a label of that name. "
                "Rename the label in the rows"
            )
        union |= metrics
    return union


CLASS_SCORES = ("precision", "recall", "f1")


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """Scores of one class. ``support`` counts its true rows, words or questions."""

    name: str
    scores: tuple[float | None, ...]
    support: int | None


@dataclass(frozen=True, kw_only=True)
class MetricTable:
    """The metrics of one data set.

    Attributes:
        overall: Metrics over all rows, without metrics that equal another by definition.
        word: Noun for a row of the table (class, label, type, tag or questions). Empty without rows.
        columns: Names of the scores of a row.
        repeated: Skipped metrics -> the metric of ``overall`` that each equals by definition.
        titles: Metrics of ``overall`` -> their names for people, if the key says too little, "f1" -> "f1 (praise)".
    """

    overall: Mapping[str, float]
    word: str = ""
    columns: tuple[str, ...] = CLASS_SCORES
    rows: tuple[ClassRow, ...] = ()
    repeated: Mapping[str, str] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)

    def title(self, metric: str) -> str:
        """Returns the name of a metric for people."""
        return self.titles.get(metric, metric)

    def lines(self, name: str = "") -> list[str]:
        """Returns lines for people, with the validation set's ``name`` before metrics."""
        named = {metric_key(name, self.title(metric)): value for metric, value in self.overall.items()}
        width = max((len(key) for key in named), default=0)
        lines = [f"{key:<{width}}  {format_number(value)}" for key, value in named.items()]
        if self.rows:
            lines += ["", *self.class_lines(), ""]
        return lines

    def class_lines(self, count: str = "support") -> list[str]:
        """Returns the table of the classes, if any. ``count`` names its last column."""
        if not self.rows:
            return []
        rows = [_cells(row) for row in self.rows]
        return Table(columns=(self.word, *self.columns, count), rows=rows, has_numbers=True).lines()


def _cells(row: ClassRow) -> tuple[str, ...]:
    """Returns the cells of a class."""
    scores = [format_number(score) for score in row.scores]
    support = "-" if row.support is None else str(row.support)
    return (on_one_line(row.name), *scores, support)


def on_one_line(label: str) -> str:
    """Returns a label, quoted and escaped if it holds characters that would break the line."""
    if label.isprintable():
        return label
    return repr(label)


def format_number(value: float | None) -> str:
    """Formats a number for people with four digits after the point, except counts. None and NaN are a dash."""
    if value is None or math.isnan(value):
        return "-"
    # Whole numbers above 1 are counts. An accuracy of exactly 1 keeps its digits, like the ones below it.
    if abs(value) > 1 and float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.4f}"


def metric_table(
    metrics: Mapping[str, float],
    names: Iterable[str],
    key: Callable[[str, str], str],
    *,
    word: str,
    columns: Sequence[str] = CLASS_SCORES,
    support: str = "support",
    repeated: Mapping[str, str] = MappingProxyType({}),
) -> MetricTable:
    """Separates the metrics of single classes from metrics over all rows.

    Args:
        metrics: Metrics of one data set.
        names: Names of the classes. A class without any metric gets no row.
        key: Function from class and score to the name of the metric.
        word: See ``MetricTable``.
        columns: Scores of a class.
        support: Score that counts the true rows of a class.
        repeated: See ``MetricTable``.
    """
    rows: list[ClassRow] = []
    taken = set(repeated)  # the metrics that do not stand among those over all rows
    for name in names:
        keys = [key(name, column) for column in columns]
        count_key = key(name, support)
        if not any(metric in metrics for metric in (*keys, count_key)):
            continue
        scores = [metrics.get(metric) for metric in keys]
        count = metrics.get(count_key)
        whole = None
        if count is not None and math.isfinite(count):
            whole = int(count)
        rows.append(ClassRow(name=name, scores=tuple(scores), support=whole))
        taken.update(keys)
        taken.add(count_key)
    overall = {name: value for name, value in metrics.items() if name not in taken}
    if not rows:
        word = ""
    return MetricTable(overall=overall, word=word, columns=tuple(columns), rows=tuple(rows), repeated=repeated)

"""Metrics under the keys that a run records, and as people read them.

Owns how the names of a validation set and of a metric make one key, that no metric is recorded over another, and the
table with a row for each class. Which metrics belong to a class, and which repeat another, is the task's to say
(``Report.table``). Must not know which metrics there are, other than the two that evaluation itself adds.

A run with one unnamed set records ``accuracy``; a run with the sets dev and dev_strict records ``dev/accuracy`` and
``dev_strict/accuracy``. A set's name holds no "/": the first one in a key ends it, whatever labels are called.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from bert_tasks.errors import DataError

LOSS = "loss"  # of the evaluated rows; less of it is better, whatever the task
SEPARATOR = "/"  # between a set's name, which holds none, and the metric
Value = TypeVar("Value")  # a number, or None where a file has null for what is not a number


def metric_key(name: str, metric: str) -> str:
    """The key of a metric on the validation set ``name``; empty for the only one, which has no name."""
    return f"{name}{SEPARATOR}{metric}" if name else metric


def split_key(key: str, sets: Sequence[str]) -> tuple[str, str]:
    """The validation set and the metric of a key, where ``sets`` are the run's validation sets."""
    if not any(sets):
        return "", key
    name, _, metric = key.partition(SEPARATOR)
    return name, metric


def metrics_of_set(metrics: Mapping[str, Value], name: str) -> dict[str, Value]:
    """The metrics of one validation set, without its name."""
    start = metric_key(name, "")
    return {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}


def metrics_by_set(metrics: Mapping[str, Value], sets: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Validation set -> its metrics, without its name."""
    return {name: metrics_of_set(metrics, name) for name in sets}


def untuned(metric: str) -> str:
    """The name of a metric as it was before the thresholds were tuned."""
    return f"untuned_{metric}"


def merged(*each: Mapping[str, float]) -> dict[str, float]:
    """All metrics together.

    Raises:
        DataError: two of them have the same key, which a label's name can cause.
    """
    union: dict[str, float] = {}
    for metrics in each:
        repeated = sorted(union.keys() & metrics.keys())
        if repeated:
            raise DataError(
                f"metrics: {', '.join(map(repr, repeated))} would be reported twice, once for a label of that name; "
                "rename the label in the rows"
            )
        union |= metrics
    return union


CLASS_SCORES = ("precision", "recall", "f1")


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """Scores of one class; ``support``: how many rows (entities, words, questions) truly are of it."""

    name: str
    scores: tuple[float | None, ...]
    support: int | None


@dataclass(frozen=True, kw_only=True)
class MetricTable:
    """The metrics of one data set.

    Attributes:
        overall: metrics over all rows, without those that equal another one by definition.
        word: what a row of the table is: class, label, type, tag, questions. Empty without rows.
        columns: the names of the scores of a row.
        repeated: skipped metrics -> the one of ``overall`` that each equals by definition.
    """

    overall: Mapping[str, float]
    word: str = ""
    columns: tuple[str, ...] = CLASS_SCORES
    rows: tuple[ClassRow, ...] = ()
    repeated: Mapping[str, str] = field(default_factory=dict)

    def lines(self, name: str = "") -> list[str]:
        """For people; ``name``: of the validation set, in front of the names of the metrics over all rows."""
        named = [(metric_key(name, metric), value) for metric, value in self.overall.items()]
        width = max((len(metric) for metric, _ in named), default=0)
        lines = [f"{metric:<{width}}  {format_number(value)}" for metric, value in named]
        return [*lines, "", *self.class_lines(), ""] if self.rows else lines

    def class_lines(self, count: str = "support") -> list[str]:
        """The table of the classes with its header; empty without classes. ``count`` names its last column."""
        if not self.rows:
            return []
        cells: list[tuple[str, ...]] = [(self.word, *self.columns, count), *map(_cells, self.rows)]
        first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
        return ["  ".join([head.ljust(first), *map(str.rjust, rest, others)]) for head, *rest in cells]


def _cells(row: ClassRow) -> tuple[str, ...]:
    support = "-" if row.support is None else str(row.support)
    return (row.name if row.name.isprintable() else repr(row.name), *map(format_number, row.scores), support)


def format_number(value: float | None) -> str:
    """Formats a number for people with four digits after the point, except counts. None and NaN are a dash."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) > 1 and float(value).is_integer() else f"{value:.4f}"


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
    """Tells the metrics of single classes from those over all rows.

    Args:
        metrics: of one data set.
        names: of the classes; one without any metric gets no row.
        key: class and score -> the name of that metric.
        word: see ``MetricTable``.
        columns: the scores of a class.
        support: the score that says how often a class is true.
        repeated: see ``MetricTable``.
    """
    rows, taken = [], set(repeated)
    for name in names:
        keys = [key(name, column) for column in (*columns, support)]
        if any(one in metrics for one in keys):
            *scores, count = map(metrics.get, keys)
            whole = None if count is None or not math.isfinite(count) else int(count)
            rows.append(ClassRow(name=name, scores=tuple(scores), support=whole))
            taken |= set(keys)
    overall = {name: value for name, value in metrics.items() if name not in taken}
    return MetricTable(
        overall=overall, word=word if rows else "", columns=tuple(columns), rows=tuple(rows), repeated=repeated
    )

"""Metrics, tables, charts and examples of predictions as plain data.

An output fills in a ``ReportSections``. report/ adds intervals and renders it, whatever the output is. This module also
owns the limits on how much text a report holds.

Shape legend: L classes that occur.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from bert_tasks.data.columns import Row
from bert_tasks.data.issues import counted
from bert_tasks.metrics.calibration import Calibration
from bert_tasks.metrics.formulas import MetricFormula

MOST_EXAMPLES = 20
MOST_CHARACTERS = 500  # in one text
MOST_POINTS = 400  # on a line
SHOWN_CLASSES = 25  # in a matrix that fits on a page
MOST_CELLS = 40_000  # in a matrix of all classes
MOST_CONFUSIONS = 12  # in the list of the most frequent mistakes
HUES = 6  # colours of marked segments in the style sheet

Point = tuple[float, float | None]
PointT = TypeVar("PointT", bound=tuple[float | None, ...])
Scale = Literal["linear", "whole"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``counts[i][j]`` rows or words of class ``labels[i]`` as ``labels[j]``."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """The number of predictions of each class for the ``unit`` of each class.

    Attributes:
        labels: The classes that occur, in their order. All classes if they are few.
        pairs: (label, prediction, count), the most frequent first, with correct predictions.
    """

    unit: str
    labels: tuple[str, ...]
    pairs: tuple[tuple[str, str, int], ...]

    @classmethod
    def of(cls, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str], unit: str) -> Self:
        """Counts the pairs of label and prediction. ``names`` are all classes in order."""
        counts = Counter(zip(labels, predictions, strict=True)).most_common()
        pairs = tuple((label, prediction, count) for (label, prediction), count in counts)
        shown = tuple(names)
        if len(names) > SHOWN_CLASSES:
            occurring = {*labels, *predictions}
            shown = tuple(name for name in names if name in occurring)
        return cls(unit=unit, labels=shown, pairs=pairs)

    @property
    def mistakes(self) -> tuple[tuple[str, str, int], ...]:
        """The most frequent pairs of two different classes."""
        return tuple(pair for pair in self.pairs if pair[0] != pair[1])[:MOST_CONFUSIONS]

    @property
    def left_out(self) -> int:
        """The number of classes that ``matrix`` shows as one."""
        if len(self.labels) <= SHOWN_CLASSES:
            return 0
        return len(self.labels) - SHOWN_CLASSES + 1  # the row of the others takes the place of a class

    @property
    def matrix(self) -> Matrix:
        """All classes, or the worst classes and the others as the last row and column."""
        if not self.left_out:
            return self._counted(self.labels)
        wrong: Counter[str] = Counter()
        for label, prediction, count in self.pairs:
            if label != prediction:
                wrong.update({label: count, prediction: count})
        worst = sorted(self.labels, key=lambda label: -wrong[label])[: SHOWN_CLASSES - 1]
        in_order = [label for label in self.labels if label in worst]
        return self._counted(in_order, counted(self.left_out, "other"))

    @property
    def full(self) -> Matrix | None:
        """All classes if ``matrix`` skips some. None if there are too many for a page."""
        fits = len(self.labels) ** 2 <= MOST_CELLS
        if not self.left_out or not fits:
            return None
        return self._counted(self.labels)

    def _counted(self, labels: Sequence[str], *rest: str) -> Matrix:
        """Returns the matrix of these classes, and of all others under the name ``rest``, if it is given."""
        shown = (*labels, *rest)
        index = {label: number for number, label in enumerate(labels)}
        last = len(shown) - 1  # the place of the others
        counts = [[0] * len(shown) for _ in shown]  # [L, L]
        for label, prediction, count in self.pairs:
            counts[index.get(label, last)][index.get(prediction, last)] += count
        return Matrix(labels=shown, counts=tuple(tuple(row) for row in counts))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from ``low`` to ``high``, with whole numbers for the scale ``whole``."""

    name: str
    low: float
    high: float
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        size = max(1.0, abs(self.low), abs(self.high))
        # Equal values have no span to divide into steps, so they get some space on both sides.
        if self.high - self.low <= 1e-9 * size:
            half = max(0.5, 1e-6 * size)
            object.__setattr__(self, "low", self.low - half)
            object.__setattr__(self, "high", self.high + half)

    @classmethod
    def around(cls, name: str, values: Iterable[float], scale: Scale = "linear") -> Self:
        """Spans from the round number below all values to the round number above."""
        numbers = list(values)
        tight = cls(name=name, low=min(numbers), high=max(numbers), scale=scale)
        # Without 1e-9, a value that is a multiple of the step but for rounding would add an empty step.
        low = math.floor(tight.low / tight.step + 1e-9)
        high = math.ceil(tight.high / tight.step - 1e-9)
        return cls(name=name, low=low * tight.step, high=high * tight.step, scale=scale)

    @property
    def step(self) -> float:
        """The distance of two ticks, which is 1, 2 or 5 times a power of ten."""
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
        if self.scale == "whole":
            return max(1.0, step)
        return step

    @property
    def ticks(self) -> list[float]:
        """About six round numbers on the axis."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return [round(number * self.step, 12) for number in range(first, last + 1)]

    def tick_text(self, tick: float) -> str:
        """Returns a tick's number, with as many decimals as the steps have."""
        step = self.step
        largest = max(abs(other) for other in self.ticks)
        if max(largest, 1e3 * step) < 1e15 and max(step, 0.1 * largest) >= 1e-4:
            decimals = max(0, math.ceil(-math.log10(step) - 1e-9))
            text = f"{tick:,.{decimals}f}"
        else:
            text = f"{tick:g}"  # with an exponent, because the digits would not fit below the axis
        if tick < 0:
            return text.replace("-", "\N{MINUS SIGN}")
        return text


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line through (x, y) with gaps at None. ``style`` is its colour and dashes."""

    name: str
    points: Sequence[Point]
    style: int = 0
    marked: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of lines and of points (x, y, radius).

    Attributes:
        description: The content of the chart, for readers who cannot see it.
        rule: A vertical line at an x, and its label.
        note: A sentence below the title.
        is_fitted: True if the note is about a value that was chosen on validation rows. The report adds on which rows.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    points: tuple[tuple[float, float, float], ...] = ()
    rule: tuple[float, str] | None = None
    note: str = ""
    is_fitted: bool = False


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a text with its marks. ``hue`` is a colour below ``HUES``."""

    text: str
    label: str = ""
    prediction: str = ""
    hue: int = 0


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A name above an example, with a value if there is one. ``tone`` is its colour."""

    name: str
    value: str | float | None = None
    tone: Literal["", "good", "bad"] = ""


@dataclass(frozen=True, kw_only=True)
class Shading:
    """The contribution of each word of an example to its prediction.

    Attributes:
        label: The predicted label. None for a number.
        texts: The name of a column, and its text in pieces (piece, contribution), with None between words.
        largest: The largest contribution without its sign. Not 0.
        total: The sum of all contributions.
    """

    label: str | None
    texts: tuple[tuple[str, tuple[tuple[str, float | None], ...]], ...]
    largest: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Example:
    """A row with its label and prediction.

    Attributes:
        line: The line of the row in its file.
        texts: Paragraphs.
        excerpt: A text in which both label and prediction are marked.
        sides: (name, text) twice, with the marks of the label and with the marks of the prediction.
        remarks: Whether the prediction is right, the label, the prediction and their scores.
        candidates: The best predictions with their probabilities.
        row: The row, if its prediction can be explained.
        shading: The explanation, if it was requested.
    """

    line: int | None
    texts: tuple[str, ...] = ()
    excerpt: tuple[Segment, ...] = ()
    sides: tuple[tuple[str, tuple[Segment, ...]], ...] = ()
    remarks: tuple[Remark, ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    row: Row | None = None
    shading: Shading | None = None


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples, with ``word`` for the table of contents and the text ``lead``."""

    word: str
    title: str
    lead: str
    items: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """A row, its label, the prediction, and its confidence (for a number, the error).

    The report lists and sorts them, and compares those of two models row by row.
    """

    row: Row
    label: Any
    prediction: Any
    score: float
    is_correct: bool


@dataclass(frozen=True, kw_only=True)
class ReportSections:
    """A report's content on the predictions for one data set.

    ``Output.report`` returns it, without any HTML. ``bert-tasks report`` adds intervals of the metrics, and renders the
    sections in its order. Fields that a task does not have stay empty, and their sections do not appear.

    Attributes:
        measure: The metrics as a formula over sums, so that the report can resample rows.
        unit: The name of rows in the plural, which is rows, sentences or questions.
        headline: The names of the metrics that are shown first.
        results: The results of each row that has a label, in row order.
        summary: What the results amount to for readers who do not know the metrics, as a clause behind the number of
            rows: "83 predictions are right (96.5 %)". Empty if the metrics are not easier to understand as a clause.
        percent: Metrics are on a scale of 0 to 100 instead of 0 to 1.
        label_word: The name of a label, which is class, label, type or tag. Empty if there is no table by label.
        labels: The labels of that table, in order.
        groups: The metrics of kinds of rows, by the name of the kind.
        uncalibrated: The calibration without the fitted temperature, if there is one.
        confidence_in: Noun that the confidences of ``calibration`` refer to: prediction, label or tag.
        figures: Further plain values for ``report --json``.
    """

    measure: MetricFormula
    unit: str
    headline: tuple[str, ...]
    results: tuple[RowResult, ...]
    summary: str = ""
    percent: bool = False
    label_word: str = ""
    labels: tuple[str, ...] = ()
    groups: Mapping[str, MetricFormula] = field(default_factory=dict)
    confusion: Confusion | None = None
    calibration: Calibration | None = None
    uncalibrated: Calibration | None = None
    confidence_in: str = "prediction"
    charts: tuple[Chart, ...] = ()
    examples: Examples | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


RIGHT = Remark(name="✓ right", tone="good")
WRONG = Remark(name="✗ wrong", tone="bad")


def per_cent(part: float, whole: float) -> str:
    """Returns a fraction in per cent, such as ``96.5 %``."""
    return f"{100 * part / whole:.1f} %"


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """Returns the text, or its beginning if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    return text[: most - 1].rstrip() + "…"


def thinned(points: Sequence[PointT]) -> list[PointT]:
    """Returns at most ``MOST_POINTS`` evenly spread points, with the last one."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(index * step)] for index in range(MOST_POINTS)]

"""What was taken for what: counts of (true, answered) pairs, and the part of the matrix that fits on a page.

Owns which classes are shown. Must not know tasks or how a page is laid out.

Shape legend: L classes that occur.

What is told of a model's answers to one validation set: the types that figures and pages share.

Owns their form and the limits on how much text a report holds. Must not know tasks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from bert_tasks.data.columns import Row
from bert_tasks.metrics.tables import ClassRow, MetricTable
from bert_tasks.report.statistics import Calibration, Estimate, Measure, bootstrap

SHOWN = 25  # classes of a matrix that fits on a page
MOST_CELLS = 40_000  # of the full matrix
LISTED = 12  # of the most frequent mistakes


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``counts[i][j]``: rows (or words) of ``labels[i]`` that were answered ``labels[j]``."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def digits(self) -> int:
        """Of the largest count."""
        return max((len(str(count)) for row in self.counts for count in row), default=1)


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Pairs of a true and an answered class.

    Attributes:
        unit: what is counted: rows or words.
        labels: the classes that occur on either side, in their order; all classes where there are few.
        pairs: (true, answered, count), the most frequent first; right answers are among them.
    """

    unit: str
    labels: tuple[str, ...]
    pairs: tuple[tuple[str, str, int], ...]

    @classmethod
    def of(cls, truths: Sequence[str], answers: Sequence[str], labels: Sequence[str], unit: str) -> Self:
        counted = Counter(zip(truths, answers, strict=True))
        pairs = tuple((truth, answer, count) for (truth, answer), count in counted.most_common())
        occurring = {*truths, *answers}
        kept = tuple(label for label in labels if len(labels) <= SHOWN or label in occurring)
        return cls(unit=unit, labels=kept, pairs=pairs)

    @property
    def mistakes(self) -> tuple[tuple[str, str, int], ...]:
        """The most frequent pairs of two classes."""
        return tuple(pair for pair in self.pairs if pair[0] != pair[1])[:LISTED]

    @property
    def left_out(self) -> int:
        """How many classes ``matrix`` shows as one."""
        return 0 if len(self.labels) <= SHOWN else len(self.labels) - SHOWN + 1

    @property
    def matrix(self) -> Matrix:
        """All classes, or those with the most mistakes and, in the last row and column, all others as one."""
        if not self.left_out:
            return self._counted(self.labels)
        wrong: Counter[str] = Counter()
        for truth, answer, count in self.pairs:
            if truth != answer:
                wrong.update({truth: count, answer: count})
        worst = set(sorted(self.labels, key=lambda label: -wrong[label])[: SHOWN - 1])
        return self._counted(tuple(label for label in self.labels if label in worst), rest=f"{self.left_out} others")

    @property
    def full(self) -> Matrix | None:
        """All classes, where ``matrix`` leaves some out; None for more than a page can hold."""
        fits = len(self.labels) ** 2 <= MOST_CELLS
        return self._counted(self.labels) if self.left_out and fits else None

    def _counted(self, labels: tuple[str, ...], rest: str | None = None) -> Matrix:
        shown = labels if rest is None else (*labels, rest)
        place = {label: number for number, label in enumerate(labels)}
        counts = [[0] * len(shown) for _ in shown]  # [L, L]
        for truth, answer, count in self.pairs:
            counts[place.get(truth, len(shown) - 1)][place.get(answer, len(shown) - 1)] += count
        return Matrix(labels=shown, counts=tuple(map(tuple, counts)))


EXAMPLES = 20
QUESTIONS = 12
MOST_CHARACTERS = 500  # of one text
MOST_WORDS = 80  # of one sentence
MOST_POINTS = 1500  # of a scatter plot


@dataclass(frozen=True, kw_only=True)
class LabelRow:
    """A class, label, entity type or tag. ``support``: how often it is true."""

    label: str
    precision: Estimate
    recall: Estimate
    f1: Estimate
    support: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row, its label, what was predicted, and how sure the model was of that (how far off, of a number)."""

    row: Row
    label: Any
    prediction: Any
    score: float
    right: bool


@dataclass(frozen=True, kw_only=True)
class TextExample:
    """A row that was answered wrong; ``line``: where it stands in its file."""

    line: int | None
    text: str
    text_pair: str | None
    truth: str
    answer: str
    score: float


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Part of a text: what it truly is and what the model says it is, "" for nothing special."""

    text: str
    truth: str = ""
    answer: str = ""

    @property
    def right(self) -> bool:
        return self.truth == self.answer


@dataclass(frozen=True, kw_only=True)
class SentenceExample:
    """A sentence twice: with its true spans and with the model's. What only one of them has is not right."""

    line: int | None
    truth: tuple[Segment, ...]
    answer: tuple[Segment, ...]
    mistakes: int


@dataclass(frozen=True, kw_only=True)
class QuestionExample:
    """A question, the part of its context around both answers, and the best answers with their probabilities."""

    line: int | None
    question: str
    excerpt: tuple[Segment, ...]
    truths: tuple[str, ...]
    answer: str
    score: float
    f1: float
    n_best: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """Questions with or without an answer."""

    name: str
    exact: Estimate
    f1: Estimate
    count: int


@dataclass(frozen=True, kw_only=True)
class ThresholdCurve:
    """(threshold of the null odds, exact match, F1) and the threshold that the model has."""

    points: tuple[tuple[float, float, float], ...]
    chosen: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """One validation set's figures and examples; what a task does not have is empty.

    Attributes:
        unit: what is drawn anew in the intervals: rows, sentences or questions.
        headline: names of the measure's numbers that stand first.
        label_word: what a row of ``table`` is: class, label, type, tag.
        sure_of: whose confidence the calibration is about.
        pairs: (true, predicted) numbers of a regression.
        right: for each row whether it is right, where rows are right or wrong.
        verdicts: on every row that has a label, in their order.
    """

    measure: Measure
    rows: int
    unit: str
    headline: tuple[str, ...]
    label_word: str = ""
    table: tuple[LabelRow, ...] = ()
    left_out: int = 0
    confusion: Confusion | None = None
    calibration: Calibration | None = None
    sure_of: str = ""
    mistakes: int = 0
    texts: tuple[TextExample, ...] = ()
    sentences: tuple[SentenceExample, ...] = ()
    questions: tuple[QuestionExample, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    curve: ThresholdCurve | None = None
    pairs: tuple[tuple[float, float], ...] = ()
    right: tuple[bool, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    estimates: Mapping[str, Estimate]

    def metric_table(self) -> MetricTable:
        """The figures that stand first and those of each class, without intervals."""
        overall = {name: value for name in self.headline if (value := self.estimates[name].value) is not None}
        if self.groups:
            rows = [
                ClassRow(name=one.name, scores=(one.exact.value, one.f1.value), support=one.count)
                for one in self.groups
            ]
            return MetricTable(overall=overall, word="questions", columns=("exact", "f1"), rows=tuple(rows))
        rows = [
            ClassRow(name=one.label, scores=(one.precision.value, one.recall.value, one.f1.value), support=one.support)
            for one in self.table
        ]
        return MetricTable(overall=overall, word=self.label_word, rows=tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """The figures, without the texts."""
        kept = {"rows", "unit", "table", "confusion", "calibration", "mistakes", "groups", "curve"}
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name in kept}
        figures["estimates"] = {name: one for name, one in self.estimates.items() if "\0" not in name}
        return {name: _plain(value) for name, value in figures.items() if value not in (None, ())}


def label_rows(measure: Measure, estimates: Mapping[str, Estimate], labels: tuple[str, ...]) -> tuple[LabelRow, ...]:
    """A table of those labels that the measure has numbers of; its first sums are how often each label is true."""
    support = dict(zip(measure.labels, measure.addends.total.tolist(), strict=False))
    return tuple(
        LabelRow(
            label=label,
            precision=estimates[f"precision\0{label}"],
            recall=estimates[f"recall\0{label}"],
            f1=estimates[f"f1\0{label}"],
            support=int(support[label]),
        )
        for label in labels
        if f"f1\0{label}" in estimates
    )


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, or its beginning."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def estimated(measure: Measure) -> dict[str, Estimate]:
    return bootstrap(measure)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value

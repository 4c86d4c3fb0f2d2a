"""What is told of a model's answers to one validation set: the types that figures and pages share.

Owns their form and the limits on how much text a report holds. Must not know tasks.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.metrics.tables import ClassRow, MetricTable
from bert_tasks.report.confusion import Confusion
from bert_tasks.report.statistics import Calibration, Estimate, Measure, bootstrap

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

"""The measures of each task as sums over rows: what can be resampled.

Owns the addends and formulas; the numbers equal those of ``task.metrics`` under the same names. Must not know how they
are shown. A row is what is drawn: a text, a sentence with all its words, a question.

Shape legend: S rows, L labels (or entity types).
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert_tasks.metrics.squad import exact_score, f1_score, normalize_answer
from bert_tasks.report.addends import Addends
from bert_tasks.report.statistics import Floats, Measure, ratio

MOST_CLASSES = 200  # of which numbers of their own are told


class Span(NamedTuple):
    """Words ``start`` to ``end - 1`` of a sentence."""

    start: int
    end: int
    type: str


class Counts(NamedTuple):
    """Of each label: how often true, predicted, and both; each ``[..., L]``."""

    actual: Floats
    predicted: Floats
    both: Floats


def label_counts(actual: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> Addends:
    """Of rows that have a set of labels each."""
    pairs = ((set(one), set(two)) for one, two in zip(actual, predicted, strict=True))
    return _counts(((one, two, one & two) for one, two in pairs), labels)


def word_counts(actual: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> Addends:
    """Of sentences whose words have one tag each."""
    pairs = zip(actual, predicted, strict=True)
    return _counts(((one, two, [a for a, b in zip(one, two, strict=True) if a == b]) for one, two in pairs), labels)


def span_counts(actual: Sequence[Set[Span]], predicted: Sequence[Set[Span]], types: Sequence[str]) -> Addends:
    """Of sentences with spans, right only where type and both ends are."""
    rows = ((one, two, one & two) for one, two in zip(actual, predicted, strict=True))
    return _counts(([[span.type for span in side] for side in sides] for sides in rows), types)


def _counts(rows: Iterable[Iterable[Iterable[str]]], labels: Sequence[str]) -> Addends:
    """How often each label is true, predicted and both, K = 3 L; labels of three sides a row, others count nowhere."""
    place = {label: number for number, label in enumerate(labels)}
    size = len(labels)

    def counted(sides: Iterable[Iterable[str]]) -> Counter[int]:
        return Counter(place[name] + size * side for side, names in enumerate(sides) for name in names if name in place)

    return Addends.of_counts(map(counted, rows), 3 * size)


def most_frequent(counts: Addends, labels: Sequence[str]) -> list[int]:
    """The places of the labels that numbers are told of: all, or those that are most often true."""
    support = counts.total[: len(labels)]
    return sorted(np.argsort(-support, kind="stable")[:MOST_CLASSES].tolist())


def class_measure(counts: Addends, labels: Sequence[str]) -> Measure:
    """Of one class per row: precision, recall and F1 of each, and over all what the task reports."""
    f1 = (lambda sums: _f1(sums)[..., 1]) if len(labels) == 2 else _macro_occurring
    overall = {"accuracy": _accuracy, "f1": f1, "macro_f1": _macro_occurring, "matthews_correlation": _matthews}
    return _counted(counts, labels, overall)


def multilabel_measure(counts: Addends, labels: Sequence[str]) -> Measure:
    """Of several labels per row: those of each, macro F1 (a label that is never true counts as 0) and micro F1.

    A replicate that happens to miss a rare label says nothing about it: there the macro F1 is that of the others. Which
    labels are never true follows from the rows alone, so that the answers of two models can change places.
    """
    never = counts.total[: len(labels)] == 0

    def macro(sums: Counts) -> Floats:
        return _macro_occurring(sums, never)

    return _counted(counts, labels, {"f1": macro, "macro_f1": macro, "micro_f1": _micro})


def word_measure(counts: Addends, labels: Sequence[str]) -> Measure:
    return _counted(counts, labels, {"overall_accuracy": _accuracy, "macro_f1": _macro_occurring})


def entity_measure(counts: Addends, types: Sequence[str]) -> Measure:
    overall = {"overall_precision": _micro_precision, "overall_recall": _micro_recall, "overall_f1": _micro}
    return _counted(counts, types, overall)


def _counted(counts: Addends, labels: Sequence[str], overall: dict[str, Any]) -> Measure:
    """Numbers of a label that a replicate has neither as truth nor as answer are not defined there."""
    told = most_frequent(counts, labels)
    names = [f"{score}\0{labels[place]}" for score in ("precision", "recall", "f1") for place in told]

    def formula(sums: Floats) -> Floats:
        parts = Counts(*np.split(sums, 3, axis=-1))
        few = Counts(*(part[..., told] for part in parts))
        absent = few.actual + few.predicted == 0
        each = [np.where(absent, np.nan, scores(few)) for scores in (_precision, _recall, _f1)]
        return np.concatenate([*each, *(made(parts)[..., None] for made in overall.values())], axis=-1)

    return Measure(names=(*names, *overall), addends=counts, formula=formula, labels=tuple(labels))


def _precision(sums: Counts) -> Floats:
    return ratio(sums.both, sums.predicted)


def _recall(sums: Counts) -> Floats:
    return ratio(sums.both, sums.actual)


def _f1(sums: Counts) -> Floats:
    return ratio(2 * sums.both, sums.predicted + sums.actual)


def _macro_occurring(sums: Counts, always: NDArray[np.bool_] | None = None) -> Floats:
    """The mean F1 of labels that occur, and of those that count ``always`` (``[L]``)."""
    occurs = sums.predicted + sums.actual > 0
    counted = occurs if always is None else occurs | always
    return ratio(_f1(sums).sum(axis=-1), counted.sum(axis=-1))


def _pooled(sums: Counts) -> Counts:
    return Counts(*(part.sum(axis=-1) for part in sums))


def _micro(sums: Counts) -> Floats:
    return _f1(_pooled(sums))


def _micro_precision(sums: Counts) -> Floats:
    return _precision(_pooled(sums))


def _micro_recall(sums: Counts) -> Floats:
    return _recall(_pooled(sums))


def _accuracy(sums: Counts) -> Floats:
    """One class a row (or word): what is right over what there is."""
    return _recall(_pooled(sums))


def _matthews(sums: Counts) -> Floats:
    """Matthews' correlation for any number of classes; 0 when either side holds one class only."""
    total = sums.actual.sum(axis=-1)
    spreads = [np.sqrt(total * total - (side * side).sum(axis=-1)) for side in (sums.actual, sums.predicted)]
    covariance = total * sums.both.sum(axis=-1) - (sums.actual * sums.predicted).sum(axis=-1)
    return ratio(covariance, spreads[0] * spreads[1])


def regression_measure(actual: Sequence[float], predicted: Sequence[float]) -> Measure:
    """Pearson's correlation, mean absolute error and root of the mean squared error."""
    true, guessed = np.asarray(actual, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    x, y = true - true.mean(), guessed - guessed.mean()  # sums of squares keep their digits
    gap = guessed - true
    addends = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y, np.abs(gap), gap * gap], axis=1)
    return Measure(names=("pearson", "mean_absolute_error", "rmse"), addends=Addends.of(addends), formula=_regression)


def _regression(sums: Floats) -> Floats:
    count, x, y, xx, yy, xy, gap, squared = np.moveaxis(sums, -1, 0)
    spread = np.sqrt(np.maximum(count * xx - x * x, 0.0) * np.maximum(count * yy - y * y, 0.0))
    pearson = np.divide(count * xy - x * y, spread, out=np.full(spread.shape, np.nan), where=spread > 1e-12)
    return np.stack([np.clip(pearson, -1.0, 1.0), gap / count, np.sqrt(squared / count)], axis=-1)


class AnswerScore(NamedTuple):
    """Of one question: exact match and F1, from 0 to 1."""

    exact: float
    f1: float


def answer_score(golds: Sequence[str], guess: str) -> AnswerScore:
    """The best over the gold answers, as in evaluate-v2.0; without any, "" is right."""
    given = [gold for gold in golds if normalize_answer(gold)]
    accepted = given if given else [""]
    exact = max(exact_score(gold, guess) for gold in accepted)
    return AnswerScore(exact, max(f1_score(gold, guess) for gold in accepted))


def answer_measure(scores: Sequence[AnswerScore], exact_name: str) -> Measure:
    """Exact match and F1 from 0 to 100."""
    addends = np.array([(1.0, score.exact, score.f1) for score in scores], dtype=np.float64)

    def formula(sums: Floats) -> Floats:
        return np.stack([100.0 * ratio(sums[..., 1], sums[..., 0]), 100.0 * ratio(sums[..., 2], sums[..., 0])], axis=-1)

    return Measure(names=(exact_name, "f1"), addends=Addends.of(addends), formula=formula)

"""What each row adds to the sums that numbers follow from; rows that add the same are one group.

Owns grouping and summing. Thousands of labels make thousands of sums, and a row adds to a few of them: only addends
that are not 0 are held. Must not know what is summed, or chance.

Shape legend: S rows, G groups of equal rows, Z addends that are not 0, K sums, R replicates.

How sure a number is: intervals, paired tests and calibration, all from sums over rows.

Owns the resampling. Everything is seeded, so that the same predictions give the same report. A measure's numbers follow
from sums over rows (counts, squares, scores); rows with equal addends are drawn together, which makes a thousand
replicates of a large data set cheap and changes nothing about their distribution. Must not know tasks or labels.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates.

The measures of each task as sums over rows: what can be resampled.

Owns the addends and formulas; the numbers equal those of ``task.metrics`` under the same names. Must not know how they
are shown. A row is what is drawn: a text, a sentence with all its words, a question.

Shape legend: S rows, L labels (or entity types).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bert_tasks.metrics.squad import exact_score, f1_score, normalize_answer

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SufficientStatistics:
    """Addend ``z`` is ``value[z]``, of the rows of ``group[z]`` to the sum ``column[z]``.

    Attributes:
        of_row: ``[S]``, the group of each row.
        columns: K, how many sums there are.
    """

    of_row: Integers
    group: Integers
    column: Integers
    value: Floats
    columns: int

    @classmethod
    def of(cls, rows: Floats) -> Self:
        """Of all addends of each row, ``[S, K]``."""
        groups, of_row = np.unique(rows, axis=0, return_inverse=True)
        group, column = np.nonzero(groups)
        return cls(of_row=of_row, group=group, column=column, value=groups[group, column], columns=rows.shape[1])

    @classmethod
    def of_counts(cls, rows: Iterable[Mapping[int, int]], columns: int) -> Self:
        """Of rows that say how much they add to which sums."""
        known: dict[tuple[tuple[int, int], ...], int] = {}
        of_row = [known.setdefault(tuple(sorted(row.items())), len(known)) for row in rows]
        found = [(group, column, count) for row, group in known.items() for column, count in row]
        group, column, value = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return cls(
            of_row=np.array(of_row, dtype=np.int64),
            group=group,
            column=column,
            value=value.astype(np.float64),
            columns=columns,
        )

    @cached_property
    def sizes(self) -> Integers:
        """``[G]``, the rows of each group."""
        return np.bincount(self.of_row)

    @property
    def width(self) -> int:
        """The longest of a replicate's vectors."""
        return max(len(self.sizes), len(self.value), self.columns)

    @property
    def total(self) -> Floats:
        """``[K]`` over all rows."""
        found: Floats = self.sums(self.sizes[None])[0]
        return found

    def sums(self, counts: Integers | Floats) -> Floats:
        """``[R, G] -> [R, K]``: so many rows of each group."""
        return gathered(counts[:, self.group] * self.value, self.column, self.columns)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The same rows in two groupings: groups of rows that are equal in both.

    Attributes:
        sizes: ``[G]``, the rows of each group.
        places: ``[G]`` each, what group of the first and of the second it is part of.
    """

    first: SufficientStatistics
    second: SufficientStatistics
    sizes: Integers
    places: tuple[Integers, Integers]

    @classmethod
    def of(cls, first: SufficientStatistics, second: SufficientStatistics) -> Self:
        both, sizes = np.unique(np.stack([first.of_row, second.of_row]), axis=1, return_counts=True)
        return cls(first=first, second=second, sizes=sizes, places=(both[0], both[1]))

    @property
    def width(self) -> int:
        return max(len(self.sizes), self.first.width, self.second.width)

    def sums(self, counts: Integers) -> tuple[Floats, Floats]:
        """``[R, G] -> [R, K]`` of the first and of the second."""
        first, second = (
            one.sums(gathered(counts, place, len(one.sizes)))
            for one, place in zip((self.first, self.second), self.places, strict=True)
        )
        return first, second


def gathered(values: Integers | Floats, place: Integers, size: int) -> Floats:
    """``[R, Z] -> [R, size]``: the sum of the values that belong to each place."""
    found = np.zeros((len(values), size))
    if len(place):
        order = np.argsort(place, kind="stable")
        present, starts = np.unique(place[order], return_index=True)
        found[:, present] = np.add.reduceat(values[:, order], starts, axis=1)
    return found


SEED = 0
REPLICATES = 1000
FLIPS = 10_000
LEVEL = 95  # per cent
_MOST_DRAWS = 20_000_000  # binomial draws of one call: seconds
_FEWEST_REPLICATES, _FEWEST_FLIPS = 100, 999  # however many draws they are
_MOST_CELLS = 2_000_000  # numbers of an array: a replicate at least, however long


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and its percentile interval; None where there is none."""

    value: float | None
    low: float | None
    high: float | None


class Randomised(NamedTuple):
    """A p-value, and from how many draws."""

    p: float
    draws: int


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Numbers of a data set that follow from sums over its rows.

    Attributes:
        names: of the numbers.
        formula: ``[..., K] -> [..., M]``.
        labels: what the sums count, where they count labels.
    """

    names: tuple[str, ...]
    addends: SufficientStatistics
    formula: Callable[[Floats], Floats]
    labels: tuple[str, ...] = ()

    def values(self) -> dict[str, float | None]:
        return dict(zip(self.names, map(_number, self.formula(self.addends.total)), strict=True))

    def number(self, name: str, sums: Floats) -> Floats:
        """``[..., K] -> [...]``: one of them."""
        found: Floats = self.formula(sums)[..., self.names.index(name)]
        return found


def bootstrap(measure: Measure, *, seed: int = SEED, replicates: int = REPLICATES) -> dict[str, Estimate]:
    """Percentile intervals at 95 % from rows drawn with replacement (Efron 1979).

    Numbers that are not defined in a replicate (a correlation of equal values) are left out of the interval.
    """
    drawn = _resampled(measure.addends, seed, replicates)
    found = np.concatenate([measure.formula(measure.addends.sums(counts)) for counts in drawn])  # [R, M]
    return {
        name: _estimate(value, column) for (name, value), column in zip(measure.values().items(), found.T, strict=True)
    }


def difference(first: Measure, second: Measure, name: str, *, seed: int = SEED) -> Estimate:
    """``second`` minus ``first`` in one of their numbers, with the interval of a paired bootstrap over rows."""
    paired = Paired.of(first.addends, second.addends)

    def gap(counts: Integers) -> Floats:
        ours, theirs = paired.sums(counts)
        return second.number(name, theirs) - first.number(name, ours)

    found = np.concatenate([gap(counts) for counts in _resampled(paired, seed, REPLICATES)])  # [R]
    return _estimate(_number(gap(paired.sizes[None])[0]), found)


def randomisation_p(first: Measure, second: Measure, name: str, *, seed: int = SEED) -> Randomised | None:
    """Two-sided p-value of approximate randomisation (Noreen 1989; Yeh 2000): swapping the two models row by row.

    Exchanges the models' answers to each row with probability 1/2 and counts how often the difference is at least as
    large as the observed one; (hits + 1) / (draws + 1). Both measures must be of the same addends. None where the
    number is not defined.
    """
    paired = Paired.of(first.addends, second.addends)
    ours, theirs = first.addends.total, second.addends.total
    observed = float(second.number(name, theirs) - first.number(name, ours))
    if not math.isfinite(observed):
        return None
    times = _times(FLIPS, _FEWEST_FLIPS, len(paired.sizes))
    chance = np.random.default_rng(seed)
    hits = 0
    for rows in _blocks(times, paired.width):
        out, into = paired.sums(chance.binomial(paired.sizes, 0.5, size=(rows, len(paired.sizes))))
        gaps = second.number(name, theirs - into + out) - first.number(name, ours - out + into)
        hits += int((np.abs(gaps) >= abs(observed) - 1e-12).sum())
    return Randomised((hits + 1) / (times + 1), times)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided p-value of McNemar's exact test: rows that only one of two models has right, as tosses of a coin."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    logs = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(fewer + 1)]
    return min(1.0, 2.0 * math.fsum(math.exp(log - total * math.log(2)) for log in logs))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Answers whose confidence lies between ``low`` and ``high``: how many, how sure and how often right."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """``ece``: the mean gap between confidence and accuracy over answers (Guo et al. 2017), from 0 (none) to 1."""

    bins: tuple[Bin, ...]
    ece: float
    answers: int


def calibration(confidences: Sequence[float], right: Sequence[bool | float], *, bins: int = 10) -> Calibration | None:
    """Answers in bins of equal width; empty bins are left out. None without answers."""
    if not len(confidences):
        return None
    sure = np.clip(np.asarray(confidences, dtype=np.float64), 0.0, 1.0)
    hits = np.asarray(right, dtype=np.float64)
    place = np.minimum((sure * bins).astype(np.int64), bins - 1)
    found = tuple(
        Bin(
            low=number / bins,
            high=(number + 1) / bins,
            count=int(inside.sum()),
            confidence=float(sure[inside].mean()),
            accuracy=float(hits[inside].mean()),
        )
        for number in range(bins)
        if (inside := place == number).any()
    )
    gap = sum(one.count * abs(one.confidence - one.accuracy) for one in found) / len(sure)
    return Calibration(bins=found, ece=gap, answers=len(sure))


def ratio(parts: Floats, wholes: Floats) -> Floats:
    """Elementwise, 0 where the whole is 0, as in the metrics."""
    return np.divide(parts, wholes, out=np.zeros(np.broadcast(parts, wholes).shape), where=np.asarray(wholes) > 0)


def _resampled(rows: SufficientStatistics | Paired, seed: int, replicates: int) -> Iterator[Integers]:
    """``[R, G]``, a part of the replicates at a time: how many rows of each group are drawn."""
    chance, total = np.random.default_rng(seed), rows.sizes.sum()
    times = _times(replicates, _FEWEST_REPLICATES, len(rows.sizes))
    for size in _blocks(times, rows.width):
        yield chance.multinomial(total, rows.sizes / total, size=size)


def _times(wanted: int, fewest: int, groups: int) -> int:
    """How many replicates can be afforded."""
    return min(wanted, max(fewest, _MOST_DRAWS // groups))


def _blocks(times: int, width: int) -> Iterator[int]:
    """``times`` in parts that fit in memory."""
    size = max(1, _MOST_CELLS // width)
    for start in range(0, times, size):
        yield min(size, times - start)


def _estimate(value: float | None, found: Floats) -> Estimate:
    return Estimate(value=value, low=_percentile(found, (100 - LEVEL) / 2), high=_percentile(found, 50 + LEVEL / 2))


def _percentile(values: Floats, percent: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.percentile(finite, percent)) if len(finite) else None


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


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


def label_counts(
    actual: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> SufficientStatistics:
    """Of rows that have a set of labels each."""
    pairs = ((set(one), set(two)) for one, two in zip(actual, predicted, strict=True))
    return _counts(((one, two, one & two) for one, two in pairs), labels)


def word_counts(
    actual: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> SufficientStatistics:
    """Of sentences whose words have one tag each."""
    pairs = zip(actual, predicted, strict=True)
    return _counts(((one, two, [a for a, b in zip(one, two, strict=True) if a == b]) for one, two in pairs), labels)


def span_counts(
    actual: Sequence[Set[Span]], predicted: Sequence[Set[Span]], types: Sequence[str]
) -> SufficientStatistics:
    """Of sentences with spans, right only where type and both ends are."""
    rows = ((one, two, one & two) for one, two in zip(actual, predicted, strict=True))
    return _counts(([[span.type for span in side] for side in sides] for sides in rows), types)


def _counts(rows: Iterable[Iterable[Iterable[str]]], labels: Sequence[str]) -> SufficientStatistics:
    """How often each label is true, predicted and both, K = 3 L; labels of three sides a row, others count nowhere."""
    place = {label: number for number, label in enumerate(labels)}
    size = len(labels)

    def counted(sides: Iterable[Iterable[str]]) -> Counter[int]:
        return Counter(place[name] + size * side for side, names in enumerate(sides) for name in names if name in place)

    return SufficientStatistics.of_counts(map(counted, rows), 3 * size)


def most_frequent(counts: SufficientStatistics, labels: Sequence[str]) -> list[int]:
    """The places of the labels that numbers are told of: all, or those that are most often true."""
    support = counts.total[: len(labels)]
    return sorted(np.argsort(-support, kind="stable")[:MOST_CLASSES].tolist())


def class_measure(counts: SufficientStatistics, labels: Sequence[str]) -> Measure:
    """Of one class per row: precision, recall and F1 of each, and over all what the task reports."""
    f1 = (lambda sums: _f1(sums)[..., 1]) if len(labels) == 2 else _macro_occurring
    overall = {"accuracy": _accuracy, "f1": f1, "macro_f1": _macro_occurring, "matthews_correlation": _matthews}
    return _counted(counts, labels, overall)


def multilabel_measure(counts: SufficientStatistics, labels: Sequence[str]) -> Measure:
    """Of several labels per row: those of each, macro F1 (a label that is never true counts as 0) and micro F1.

    A replicate that happens to miss a rare label says nothing about it: there the macro F1 is that of the others. Which
    labels are never true follows from the rows alone, so that the answers of two models can change places.
    """
    never = counts.total[: len(labels)] == 0

    def macro(sums: Counts) -> Floats:
        return _macro_occurring(sums, never)

    return _counted(counts, labels, {"f1": macro, "macro_f1": macro, "micro_f1": _micro})


def word_measure(counts: SufficientStatistics, labels: Sequence[str]) -> Measure:
    return _counted(counts, labels, {"overall_accuracy": _accuracy, "macro_f1": _macro_occurring})


def entity_measure(counts: SufficientStatistics, types: Sequence[str]) -> Measure:
    overall = {"overall_precision": _micro_precision, "overall_recall": _micro_recall, "overall_f1": _micro}
    return _counted(counts, types, overall)


def _counted(counts: SufficientStatistics, labels: Sequence[str], overall: dict[str, Any]) -> Measure:
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
    return Measure(
        names=("pearson", "mean_absolute_error", "rmse"), addends=SufficientStatistics.of(addends), formula=_regression
    )


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

    return Measure(names=(exact_name, "f1"), addends=SufficientStatistics.of(addends), formula=formula)

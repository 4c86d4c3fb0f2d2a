"""How sure a number is: intervals, paired tests and calibration, all from sums over rows.

Owns the resampling. Everything is seeded, so that the same predictions give the same report. A measure's numbers follow
from sums over rows (counts, squares, scores); rows with equal addends are drawn together, which makes a thousand
replicates of a large data set cheap and changes nothing about their distribution. Must not know tasks or labels.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert_tasks.report.addends import Addends, Paired

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

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
    addends: Addends
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


def _resampled(rows: Addends | Paired, seed: int, replicates: int) -> Iterator[Integers]:
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

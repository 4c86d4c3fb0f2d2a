"""How sure a number is: intervals, paired tests and calibration, all from sums over rows.

Owns the resampling. Everything is seeded, so that the same predictions give the same report. A measure's numbers follow
from sums over rows (counts, squares, scores); rows with equal addends are drawn together, which makes a thousand
replicates of a large data set cheap and changes nothing about their distribution. Must not know tasks or labels.

Shape legend: S rows, G groups of equal rows, K addends, M numbers, R replicates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEED = 0
REPLICATES = 1000
FLIPS = 10_000
LEVEL = 95  # per cent
_MOST_DRAWS = 20_000_000  # binomial draws of one call: seconds


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and its percentile interval; None where there is none."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Numbers of a data set that follow from sums over its rows.

    Attributes:
        names: of the numbers.
        addends: ``[S, K]``, those of each row.
        formula: ``[..., K] -> [..., M]``.
    """

    names: tuple[str, ...]
    addends: Floats
    formula: Callable[[Floats], Floats]

    def values(self) -> dict[str, float | None]:
        return dict(zip(self.names, map(_number, self.formula(self.addends.sum(axis=0))), strict=True))


def bootstrap(measure: Measure, *, seed: int = SEED, replicates: int = REPLICATES) -> dict[str, Estimate]:
    """Percentile intervals at 95 % from rows drawn with replacement (Efron 1979).

    Numbers that are not defined in a replicate (a correlation of equal values) are left out of the interval.
    """
    groups, counts = _grouped(measure.addends)
    times = min(replicates, max(100, _MOST_DRAWS // len(groups)))
    drawn = np.random.default_rng(seed).multinomial(len(measure.addends), counts / counts.sum(), size=times)  # [R, G]
    found = measure.formula(drawn @ groups)  # [R, M]
    return {
        name: Estimate(
            value=value, low=_percentile(column, (100 - LEVEL) / 2), high=_percentile(column, 50 + LEVEL / 2)
        )
        for (name, value), column in zip(measure.values().items(), found.T, strict=True)
    }


def difference(first: Measure, second: Measure, name: str, *, seed: int = SEED) -> Estimate:
    """``second`` minus ``first`` in one of their numbers, with the interval of a paired bootstrap over rows."""
    own = first.addends.shape[1]

    def formula(sums: Floats) -> Floats:
        return (_named(second, name, sums[..., own:]) - _named(first, name, sums[..., :own]))[..., None]

    both = Measure(names=(name,), addends=np.hstack([first.addends, second.addends]), formula=formula)
    return bootstrap(both, seed=seed)[name]


def randomisation_p(first: Measure, second: Measure, name: str, *, seed: int = SEED) -> float | None:
    """Two-sided p-value of approximate randomisation (Noreen 1989; Yeh 2000): swapping the two models row by row.

    Exchanges the models' answers to each row with probability 1/2 and counts how often the difference is at least as
    large as the observed one; (hits + 1) / (draws + 1). Both measures must be of the same addends. None where the
    number is not defined.
    """
    own = first.addends.shape[1]
    groups, counts = _grouped(np.hstack([first.addends, second.addends]))
    times = min(FLIPS, max(999, _MOST_DRAWS // len(groups)))
    swapped = np.random.default_rng(seed).binomial(counts, 0.5, size=(times, len(groups)))  # [R, G]
    moved = swapped @ (groups[:, own:] - groups[:, :own])
    ours, theirs = first.addends.sum(axis=0), second.addends.sum(axis=0)
    gaps = _named(second, name, theirs - moved) - _named(first, name, ours + moved)
    observed = float(_named(second, name, theirs) - _named(first, name, ours))
    if not math.isfinite(observed):
        return None
    hits = int((np.abs(gaps) >= abs(observed) - 1e-12).sum())
    return (hits + 1) / (times + 1)


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


def _named(measure: Measure, name: str, sums: Floats) -> Floats:
    found: Floats = measure.formula(sums)[..., measure.names.index(name)]
    return found


def _grouped(addends: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Different rows, and how often each stands."""
    groups, counts = np.unique(addends, axis=0, return_counts=True)
    return groups, counts


def _percentile(values: Floats, percent: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.percentile(finite, percent)) if len(finite) else None


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None

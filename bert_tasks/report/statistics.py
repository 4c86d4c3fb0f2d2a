"""How certain a number is: bootstrap intervals and paired tests, from sums over rows.

Everything is seeded, so that the same predictions give the same report. Rows that add the same to the sums are drawn
together, which makes a thousand replicates of a large data set cheap and does not change their distribution.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_tasks.metrics.formulas import Floats, Integers, MetricFormula, SufficientStatistics, sum_by_index

SEED = 0
REPLICATES = 1000
FLIPS = 10_000
LEVEL = 95  # per cent
_EQUAL = 1e-12  # of their size: differences that sums in another order give of the same predictions
_MOST_DRAWS = 20_000_000  # binomial draws of one call: seconds
_FEWEST_REPLICATES, _FEWEST_FLIPS = 100, 999  # however many draws they are
_MOST_CELLS = 2_000_000  # numbers of an array: a replicate at least, however long


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and its percentile interval; None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None


class RandomisationTest(NamedTuple):
    """A p-value, and the number of draws that it comes from."""

    p: float
    draws: int


@dataclass(frozen=True, kw_only=True)
class PairedStatistics:
    """Two models' statistics of the same rows; rows that are equal in both form one group.

    Attributes:
        sizes: ``[G]``, the number of rows in each group.
        groups: ``[G]`` each: the group of the first and of the second statistics that holds these rows.
    """

    first: SufficientStatistics
    second: SufficientStatistics
    sizes: Integers
    groups: tuple[Integers, Integers]

    @classmethod
    def of(cls, first: SufficientStatistics, second: SufficientStatistics) -> "PairedStatistics":
        pairs, sizes = np.unique(np.stack([first.group_of_row, second.group_of_row]), axis=1, return_counts=True)
        return cls(first=first, second=second, sizes=sizes, groups=(pairs[0], pairs[1]))

    @property
    def width(self) -> int:
        """The length of the longest vector that one replicate needs."""
        return max(len(self.sizes), self.first.width, self.second.width)

    def sums(self, counts: Integers) -> tuple[Floats, Floats]:
        """``[R, G] -> [R, K]`` of the first and of the second."""
        first = self.first.sums(sum_by_index(counts, self.groups[0], len(self.first.sizes)))
        return first, self.second.sums(sum_by_index(counts, self.groups[1], len(self.second.sizes)))


def bootstrap(measure: MetricFormula, *, seed: int = SEED, replicates: int = REPLICATES) -> dict[str, Estimate]:
    """Percentile intervals at 95 % from rows drawn with replacement (Efron 1979).

    Replicates in which a number is not defined (a correlation of equal values) are left out of its interval.
    """
    drawn = _resampled(measure.statistics, seed, replicates)
    found = np.concatenate([measure.formula(measure.statistics.sums(counts)) for counts in drawn])  # [R, M]
    return {
        name: _estimate(value, column) for (name, value), column in zip(measure.values().items(), found.T, strict=True)
    }


def difference(first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED) -> Estimate:
    """``second`` minus ``first`` in one of their numbers, with the interval of a paired bootstrap over rows."""
    paired = PairedStatistics.of(first.statistics, second.statistics)

    def gap(counts: Integers) -> Floats:
        sums = paired.sums(counts)
        return second.number(name, sums[1]) - first.number(name, sums[0])

    found = np.concatenate([gap(counts) for counts in _resampled(paired, seed, REPLICATES)])  # [R]
    observed = float(gap(paired.sizes[None])[0])
    return _estimate(observed if math.isfinite(observed) else None, found)


def randomisation_test(
    first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED
) -> RandomisationTest | None:
    """Two-sided approximate randomisation (Noreen 1989; Yeh 2000): swapping two models' predictions row by row.

    Exchanges the predictions for each row with probability 1/2 and counts how often the difference is at least as large
    as the observed one; p = (hits + 1) / (draws + 1). Both measures must have the same sums.

    Returns:
        None where the number is not defined.
    """
    paired = PairedStatistics.of(first.statistics, second.statistics)
    values = [float(measure.number(name, measure.statistics.total)) for measure in (first, second)]
    observed = abs(values[1] - values[0])
    if not math.isfinite(observed):
        return None
    lowest = observed - _EQUAL * max(1.0, *map(abs, values))
    draws = _affordable(FLIPS, _FEWEST_FLIPS, len(paired.sizes))
    generator = np.random.default_rng(seed)
    hits = 0
    for size in _blocks(draws, paired.width):
        swapped = generator.binomial(paired.sizes, 0.5, size=(size, len(paired.sizes)))
        gaps = swapped_differences(first, second, name, paired, swapped)
        hits += int((~(np.abs(gaps) < lowest)).sum())  # a swap without a value is no evidence of a difference
    return RandomisationTest((hits + 1) / (draws + 1), draws)


def swapped_differences(
    first: MetricFormula, second: MetricFormula, name: str, paired: PairedStatistics, swapped: Integers
) -> Floats:
    """``[R, G] -> [R]``: ``second`` minus ``first`` after ``swapped`` rows of each group exchanged predictions."""
    kept, moved = paired.sums(paired.sizes - swapped), paired.sums(swapped)
    return second.number(name, kept[1] + moved[0]) - first.number(name, kept[0] + moved[1])


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided p-value of McNemar's exact test: a sign test on rows that only one of two models predicts correctly."""
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


def _resampled(rows: SufficientStatistics | PairedStatistics, seed: int, replicates: int) -> Iterator[Integers]:
    """Some of the replicates at a time, ``[R, G]``: how many rows of each group are drawn."""
    generator, total = np.random.default_rng(seed), rows.sizes.sum()
    for size in _blocks(_affordable(replicates, _FEWEST_REPLICATES, len(rows.sizes)), rows.width):
        yield generator.multinomial(total, rows.sizes / total, size=size)


def _affordable(wanted: int, fewest: int, groups: int) -> int:
    """The number of replicates that can be drawn in a few seconds."""
    return min(wanted, max(fewest, _MOST_DRAWS // groups))


def _blocks(times: int, width: int) -> Iterator[int]:
    """``times`` in parts that fit in memory."""
    size = max(1, _MOST_CELLS // width)
    for start in range(0, times, size):
        yield min(size, times - start)


def _estimate(value: float | None, replicates: Floats) -> Estimate:
    finite = replicates[np.isfinite(replicates)]
    if not len(finite):
        return Estimate(value=value)
    low, high = np.percentile(finite, [(100 - LEVEL) / 2, 50 + LEVEL / 2]).tolist()
    return Estimate(value=value, low=low, high=high)

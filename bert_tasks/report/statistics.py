"""Bootstrap intervals and paired tests, from sums over rows.

Everything is seeded, so that the same predictions give the same report. Rows that add the same to the sums form one
group, and a replicate draws how many rows of each group there are. This has the distribution of drawing rows one by
one, as ``scipy.stats.bootstrap`` does, and makes a thousand replicates of a large data set cheap.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_tasks.metrics.formulas import Floats, Integers, MetricFormula, SufficientStatistics

SEED = 0
REPLICATES = 1000
FLIPS = 10_000
LEVEL = 95  # per cent
_EQUAL = 1e-12  # relative difference of equal sums in another order
_MOST_DRAWS = 20_000_000  # binomial draws in one call of a few seconds
_FEWEST_REPLICATES, _FEWEST_FLIPS = 100, 999  # however many draws they are
_MOST_CELLS = 2_000_000  # numbers in an array, but at least one replicate


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and its percentile interval. None if it has no interval."""

    value: float | None
    low: float | None = None
    high: float | None = None


class RandomisationTest(NamedTuple):
    """A p-value, and its number of draws."""

    p: float
    draws: int


def bootstrap(measure: MetricFormula, *, seed: int = SEED, replicates: int = REPLICATES) -> dict[str, Estimate]:
    """Returns percentile intervals at 95 % from resampled rows (Efron 1979).

    The interval of a number ignores replicates in which the number is not defined (a correlation of equal values).
    """
    rows, generator = measure.statistics, np.random.default_rng(seed)
    shares = rows.sizes / rows.rows
    sizes = _batches(replicates, _FEWEST_REPLICATES, rows)
    drawn = (rows.sums(generator.multinomial(rows.rows, shares, size=size)) for size in sizes)
    numbers = np.concatenate([measure.formula(sums) for sums in drawn])  # [R, M]
    return {
        name: _estimate(value, column)
        for (name, value), column in zip(measure.values().items(), numbers.T, strict=True)
    }


def paired(first: MetricFormula, second: MetricFormula, name: str) -> MetricFormula:
    """Returns the formula of ``second`` minus ``first`` in one number."""
    columns = first.statistics.columns

    def gap(sums: Floats) -> Floats:
        difference = second.number(name, sums[..., columns:]) - first.number(name, sums[..., :columns])
        return difference[..., None]

    statistics = first.statistics.beside(second.statistics)
    return MetricFormula(names=(name,), statistics=statistics, formula=gap)


def difference(first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED) -> Estimate:
    """Returns ``second`` minus ``first``, with a paired bootstrap interval over rows."""
    return bootstrap(paired(first, second, name), seed=seed)[name]


def randomisation_test(
    first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED
) -> RandomisationTest | None:
    """Runs a two-sided approximate randomisation test (Noreen 1989, Yeh 2000).

    Exchanges two models' predictions for each row with probability 1/2 and counts how often the difference is at least
    as large as the observed one. The p-value is (hits + 1) / (draws + 1). Both formulas must have the same sums.

    Returns:
        The test, or None if the number is not defined.
    """
    values = [float(measure.number(name, measure.statistics.total)) for measure in (first, second)]
    observed = abs(values[1] - values[0])
    if not math.isfinite(observed):
        return None
    lowest = observed - _EQUAL * max(1.0, *map(abs, values))
    pair, generator = paired(first, second, name), np.random.default_rng(seed)
    groups = pair.statistics.sizes
    hits = draws = 0
    for size in _batches(FLIPS, _FEWEST_FLIPS, pair.statistics):
        gaps = swapped_differences(pair, generator.binomial(groups, 0.5, size=(size, len(groups))))
        hits += int((~(np.abs(gaps) < lowest)).sum())  # a swap without a value is no evidence of a difference
        draws += size
    return RandomisationTest((hits + 1) / (draws + 1), draws)


def swapped_differences(pair: MetricFormula, swapped: Integers) -> Floats:
    """Returns the ``paired`` number after ``swapped`` swaps, ``[R, G] -> [R]``."""
    rows = pair.statistics
    kept, moved = rows.sums(rows.sizes - swapped), rows.sums(swapped)  # [R, 2 K]
    return pair.number(pair.names[0], kept + np.roll(moved, rows.columns // 2, axis=-1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for their number (Holm 1979), in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _batches(replicates: int, fewest: int, rows: SufficientStatistics) -> Iterator[int]:
    """Yields numbers of replicates that fit in memory and can be drawn in seconds."""
    total = min(replicates, max(fewest, _MOST_DRAWS // len(rows.sizes)))
    size = max(1, _MOST_CELLS // max(len(rows.sizes), rows.columns))
    for start in range(0, total, size):
        yield min(size, total - start)


def _estimate(value: float | None, replicates: Floats) -> Estimate:
    finite = replicates[np.isfinite(replicates)]
    if not len(finite):
        return Estimate(value=value)
    low, high = np.percentile(finite, [(100 - LEVEL) / 2, 50 + LEVEL / 2]).tolist()
    return Estimate(value=value, low=low, high=high)

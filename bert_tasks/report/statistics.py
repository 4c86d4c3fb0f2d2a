"""Bootstrap intervals and paired permutation tests of metrics, computed by scipy from sums over rows.

A metric is a formula of sums over rows (``MetricFormula``). scipy draws rows, and the formula is applied to the sums
over the drawn rows, so that a replicate costs a matrix product and not another evaluation. Rows with equal summands
form a group, and only the number of drawn rows of each group matters. Everything is seeded, so that the same
predictions give the same report.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_tasks.metrics.formulas import Floats, Integers, MetricFormula, SufficientStatistics

SEED = 0
REPLICATES = 1000
SWAPS = 10_000
LEVEL = 95  # per cent
_EQUAL = 1e-12  # relative difference of equal sums in another order
_MOST_DRAWS = 20_000_000  # rows that are drawn in a few seconds
_FEWEST_SWAPS = 999  # however many rows there are
_MOST_CELLS = 2_000_000  # numbers in an array


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and the ends of its percentile interval. They are None if it has no interval."""

    value: float | None
    low: float | None = None
    high: float | None = None


class PermutationTest(NamedTuple):
    """A p-value, and the number of draws that it was computed from."""

    p: float
    draws: int


def bootstrap(measure: MetricFormula, *, seed: int = SEED, replicates: int = REPLICATES) -> dict[str, Estimate]:
    """Returns the numbers of a formula with percentile intervals at 95 % from resampled rows (Efron 1979).

    The interval of a number ignores replicates in which the number is not defined, such as a correlation of equal
    values. A single row has no interval. The intervals cover the chance of the rows, but not that of the training.

    Args:
        measure: The formula, with its sums over rows.
        seed: The seed of the drawn rows.
        replicates: The number of times that rows are drawn.
    """
    from scipy import stats  # its import takes 2 s

    rows = measure.statistics
    # A single row is the only one that can be drawn, so all replicates would be equal.
    if rows.rows < 2:
        return {name: Estimate(value=value) for name, value in measure.values().items()}

    def numbers(drawn: Integers, axis: int = -1) -> Floats:
        metrics: Floats = measure.formula(rows.sums(_group_counts(rows, drawn)))  # [R, M]
        return np.moveaxis(metrics, -1, 0)

    with warnings.catch_warnings():
        # scipy warns of numbers that some replicates do not define, and of its own interval, which is not used.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (np.arange(rows.rows),),
            numbers,
            n_resamples=replicates,
            batch=_batch_size(rows),
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(seed),
        )
    distributions = np.atleast_2d(result.bootstrap_distribution)  # [M, R]
    pairs = zip(measure.values().items(), distributions, strict=True)
    return {name: _estimate(value, distribution) for (name, value), distribution in pairs}


def paired(first: MetricFormula, second: MetricFormula, name: str) -> MetricFormula:
    """Returns the formula of ``second`` minus ``first`` in one number."""
    columns = first.statistics.columns  # the sums of the second model follow those of the first

    def gap(sums: Floats) -> Floats:
        difference = second.number(name, sums[..., columns:]) - first.number(name, sums[..., :columns])
        return difference[..., None]

    statistics = first.statistics.beside(second.statistics)
    return MetricFormula(names=(name,), statistics=statistics, formula=gap)


def difference(first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED) -> Estimate:
    """Returns ``second`` minus ``first``, with a paired bootstrap interval over rows."""
    return bootstrap(paired(first, second, name), seed=seed)[name]


def permutation_test(
    first: MetricFormula, second: MetricFormula, name: str, *, seed: int = SEED
) -> PermutationTest | None:
    """Runs a two-sided permutation test of the metrics of two models on the same rows (Noreen 1989, Yeh 2000).

    It exchanges the two models' predictions for each row with probability 1/2 and counts how often the difference is at
    least as large as the observed one. For few rows it makes all exchanges. Both formulas must have the same sums.

    Returns:
        The test, or None if the number is not defined.
    """
    from scipy import stats

    first_value = float(first.number(name, first.statistics.total))
    second_value = float(second.number(name, second.statistics.total))
    observed = abs(second_value - first_value)
    if not math.isfinite(observed):
        return None
    # Sums of the same numbers in another order differ in their last digits. A swap that changes nothing must count.
    tolerance = _EQUAL * max(1.0, abs(first_value), abs(second_value))
    pair = paired(first, second, name)
    count = pair.statistics.rows

    def absolute_gap(rows: Integers, partners: Integers, axis: int = -1) -> Floats:
        """Returns the difference if the first model has these of 2 S predictions, ``[R, S] -> [R]``."""
        swapped = _group_counts(pair.statistics, rows % count, chosen=rows >= count)
        gaps = np.abs(swapped_differences(pair, swapped))
        gaps[np.abs(gaps - observed) <= tolerance] = observed
        gaps[np.isnan(gaps)] = math.inf  # a swap without a value is no evidence of a difference
        return gaps

    # "samples" exchanges the two values of a row. The test gets numbers of rows instead of values, and the gap above
    # looks the sums up, because the metric is no function of two values of a row. "greater" of an absolute value is
    # two-sided.
    result: Any = stats.permutation_test(
        (np.arange(count), np.arange(count, 2 * count)),
        absolute_gap,
        permutation_type="samples",
        alternative="greater",
        n_resamples=min(SWAPS, max(_FEWEST_SWAPS, _MOST_DRAWS // count)),
        batch=_batch_size(pair.statistics),
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return PermutationTest(float(result.pvalue), len(result.null_distribution))


def swapped_differences(pair: MetricFormula, swapped: Integers) -> Floats:
    """Returns the ``paired`` number after ``swapped`` swaps in each group, ``[R, G] -> [R]``."""
    rows = pair.statistics
    kept = rows.sums(rows.sizes - swapped)  # [R, 2 K]
    moved = rows.sums(swapped)  # [R, 2 K]
    # The first K sums are those of the first model, the others of the second. Rolling by K exchanges the two halves.
    return pair.number(pair.names[0], kept + np.roll(moved, rows.columns // 2, axis=-1))


def _group_counts(rows: SufficientStatistics, drawn: Integers, *, chosen: Any = None) -> Integers:
    """Counts the drawn rows of each group, ``[R, S] -> [R, G]``, and of them only the ``chosen`` ones."""
    groups = rows.group_of_row[np.atleast_2d(drawn)]  # [R, S]
    replicates = len(groups)
    size = len(rows.sizes)
    # One call counts all replicates, because those of replicate r are numbered from r G on.
    cells = groups + size * np.arange(replicates)[:, None]
    if chosen is not None:
        cells = cells[np.atleast_2d(chosen)]
    counts: Integers = np.bincount(cells.ravel(), minlength=replicates * size)
    return counts.reshape(replicates, size)


def _batch_size(rows: SufficientStatistics) -> int:
    """Returns the number of replicates that are computed at once, so that their arrays fit in memory."""
    return max(1, _MOST_CELLS // max(rows.rows, rows.columns))


def _estimate(value: float | None, replicates: Floats) -> Estimate:
    """Returns a number with the percentile interval of its finite replicates."""
    finite = replicates[np.isfinite(replicates)]
    if len(finite) == 0:
        return Estimate(value=value)
    low, high = np.percentile(finite, [(100 - LEVEL) / 2, 50 + LEVEL / 2]).tolist()
    return Estimate(value=value, low=low, high=high)

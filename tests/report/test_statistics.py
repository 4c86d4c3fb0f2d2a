"""Intervals, paired tests and calibration against other ways to compute them."""

import math

import numpy as np
import pytest
from scipy import stats

from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import MetricFormula, SufficientStatistics
from bert_tasks.report.statistics import Estimate, bootstrap, difference, permutation_test


def mean_of(values):
    rows = np.stack([np.ones(len(values)), np.asarray(values, dtype=float)], axis=1)
    return MetricFormula(
        names=("mean",),
        statistics=SufficientStatistics.of(rows),
        formula=lambda sums: (sums[..., 1] / sums[..., 0])[..., None],
    )


def test_interval_of_a_share_is_that_of_a_binomial():
    estimate = bootstrap(mean_of([1] * 80 + [0] * 20), replicates=4000)["mean"]
    exact = stats.binom(100, 0.8).ppf([0.025, 0.975]) / 100
    assert estimate.value == 0.8
    assert (estimate.low, estimate.high) == pytest.approx(tuple(exact), abs=0.011)


def test_intervals_are_the_same_each_time_and_differ_by_seed():
    values = np.random.default_rng(1).normal(size=30)
    assert bootstrap(mean_of(values)) == bootstrap(mean_of(values))
    assert bootstrap(mean_of(values), seed=1) != bootstrap(mean_of(values), seed=2)


def test_paired_interval_is_narrow_where_both_predict_alike():
    values = np.random.default_rng(2).normal(size=200)
    gap = difference(mean_of(values), mean_of(values + 0.1), "mean")
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))


def test_draws_are_made_in_parts_and_fewer_for_many_rows(monkeypatch):
    values = np.random.default_rng(4).normal(0.1, 1, size=(2, 50))
    first, second = map(mean_of, values)
    whole = bootstrap(first), difference(first, second, "mean"), permutation_test(first, second, "mean")
    assert whole[2].draws == 10_000
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_CELLS", 1000)
    assert (bootstrap(first), difference(first, second, "mean")) == whole[:2]
    assert permutation_test(first, second, "mean").p == pytest.approx(whole[2].p, abs=0.02)
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_DRAWS", 60_000)
    assert permutation_test(first, second, "mean").draws == 1200
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_DRAWS", 1)
    fewest = permutation_test(first, second, "mean")
    assert fewest.draws == 999
    assert fewest.p >= 1 / 1000


@pytest.mark.slow
def test_intervals_cover_the_value_of_the_population():
    """95 of 100 intervals hold the accuracy with which 120 rows were drawn, within the error of 300 simulations."""
    draw = np.random.default_rng(7)
    covered = 0
    for number in range(300):
        estimate = bootstrap(mean_of(draw.random(120) < 0.7), seed=number)["mean"]
        covered += estimate.low <= 0.7 <= estimate.high
    assert 0.91 <= covered / 300 <= 0.98


@pytest.mark.slow
def test_p_values_of_equal_models_are_uniform(monkeypatch):
    monkeypatch.setattr("bert_tasks.report.statistics.SWAPS", 500)
    draw = np.random.default_rng(8)
    small = 0
    for number in range(200):
        first, second = (mean_of(draw.normal(size=40)) for _ in range(2))
        small += permutation_test(first, second, "mean", seed=number).p <= 0.1
    assert 8 <= small <= 34


def test_one_row_has_no_interval():
    assert bootstrap(mean_of([0.5]))["mean"] == Estimate(value=0.5)


def test_equal_predictions_are_no_evidence():
    values = np.random.default_rng(3).normal(size=20)
    assert permutation_test(mean_of(values), mean_of(values), "mean").p == 1.0


def test_calibration_error_by_hand():
    result = calibration([0.95, 0.85, 0.85, 1.0], [True, True, False, True])
    assert [(score_bin.count, score_bin.accuracy) for score_bin in result.bins] == [(2, 0.5), (2, 1.0)]
    assert result.ece == pytest.approx((2 * 0.35 + 2 * 0.025) / 4)
    assert calibration([], []) is None


def test_few_rows_are_exchanged_in_all_ways():
    """Of the 8 exchanges of 3 rows, only none and all give a difference of 1 or -1."""
    test = permutation_test(mean_of([0, 0, 0]), mean_of([1, 1, 1]), "mean")
    assert (test.p, test.draws) == (0.25, 8)


def test_undefined_numbers_have_no_interval():
    nothing = MetricFormula(
        names=("none",),
        statistics=SufficientStatistics.of(np.ones((3, 1))),
        formula=lambda sums: np.full_like(sums, math.nan),
    )
    estimate = bootstrap(nothing)["none"]
    assert (estimate.value, estimate.low, estimate.high) == (None, None, None)

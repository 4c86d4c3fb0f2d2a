"""Intervals, paired tests and calibration against other ways to compute them."""

import math

import numpy as np
import pytest
from scipy import stats

from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import MetricFormula, SufficientStatistics
from bert_tasks.report.statistics import bootstrap, difference, holm, randomisation_test


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


def test_draws_are_counted_and_made_in_parts(monkeypatch):
    values = np.random.default_rng(4).normal(0.1, 1, size=(2, 50))
    first, second = map(mean_of, values)
    whole = bootstrap(first), difference(first, second, "mean"), randomisation_test(first, second, "mean")
    assert whole[2].draws == 10_000
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_CELLS", 1000)
    assert (bootstrap(first), difference(first, second, "mean"), randomisation_test(first, second, "mean")) == whole
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_DRAWS", 60_000)
    assert randomisation_test(first, second, "mean").draws == 1200
    monkeypatch.setattr("bert_tasks.report.statistics._MOST_DRAWS", 1)
    fewest = randomisation_test(first, second, "mean")
    assert fewest.draws == 999
    assert fewest.p >= 1 / 1000


def test_equal_predictions_are_no_evidence():
    values = np.random.default_rng(3).normal(size=20)
    assert randomisation_test(mean_of(values), mean_of(values), "mean").p == 1.0


def test_holm_multiplies_the_smallest_by_their_number_and_never_reverses_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_calibration_error_by_hand():
    result = calibration([0.95, 0.85, 0.85, 1.0], [True, True, False, True])
    assert [(score_bin.count, score_bin.accuracy) for score_bin in result.bins] == [(2, 0.5), (2, 1.0)]
    assert result.ece == pytest.approx((2 * 0.35 + 2 * 0.025) / 4)
    assert calibration([], []) is None


def test_undefined_numbers_have_no_interval():
    nothing = MetricFormula(
        names=("none",),
        statistics=SufficientStatistics.of(np.ones((3, 1))),
        formula=lambda sums: np.full_like(sums, math.nan),
    )
    estimate = bootstrap(nothing)["none"]
    assert (estimate.value, estimate.low, estimate.high) == (None, None, None)

"""Thresholds with a promise: exact bounds, what is promised over many draws of rows, and what is refused."""

from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import beta, binom, binomtest

from bert_tasks.metrics.classification import (
    MISSED,
    THRESHOLDS,
    accepted_and_right,
    fewest_right,
    promised_threshold,
)

DRAWS = 200
ROWS = 1500


def drawn(generator: np.random.Generator, rows: int) -> list[tuple[float, bool]]:
    """Scores of an overconfident model, whose logits are 1.6 times too large, and which predictions are right."""
    logits = np.abs(generator.normal(4.0, 2.5, rows))
    right = generator.random(rows) < 1 / (1 + np.exp(-logits / 1.6))
    return list(zip((1 / (1 + np.exp(-logits))).tolist(), right.tolist(), strict=True))


@pytest.fixture(scope="module")
def truth() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coverage, precision and recall of every threshold on 300,000 rows."""
    everything = drawn(np.random.default_rng(99), 300_000)
    accepted, right = accepted_and_right(everything, THRESHOLDS)
    return accepted / len(everything), right / np.maximum(accepted, 1), right / right.max()


def thresholds(metric: str, share: float, draws: int = DRAWS) -> Iterator[int | None]:
    """The places in the grid of the thresholds for many draws of rows."""
    generator = np.random.default_rng(7)
    for _ in range(draws):
        threshold = promised_threshold(drawn(generator, ROWS), metric, share, 0.95)  # type: ignore[arg-type]
        yield None if threshold is None else int(np.flatnonzero(threshold == THRESHOLDS)[0])


def test_the_precision_holds_in_95_of_100_draws_and_most_predictions_remain(truth) -> None:
    coverage, precision, _ = truth
    best = coverage[precision >= 0.95].max()
    chosen = list(thresholds("precision", 0.95))
    broken = sum(place is not None and precision[place] < 0.95 for place in chosen)
    assert broken <= 0.05 * DRAWS
    assert np.mean([0.0 if place is None else coverage[place] for place in chosen]) > 0.7 * best


def test_the_recall_holds_in_95_of_100_draws_and_few_thresholds_are_lower_than_needed(truth) -> None:
    _, _, recall = truth
    chosen = list(thresholds("recall", 0.9))
    assert None not in chosen
    broken = sum(recall[place] < 0.9 for place in chosen)
    # The confidence is used up, since the recall has one sequence of tests and falls with the threshold.
    assert 0 < broken <= binom.ppf(0.99, DRAWS, 0.05)
    assert np.mean([recall[place] for place in chosen]) < 0.93


def test_a_model_whose_precision_is_just_too_low_everywhere_passes_in_at_most_5_of_100_draws() -> None:
    generator = np.random.default_rng(5)
    passed = 0
    for _ in range(400):
        pairs = list(zip(generator.random(1000).tolist(), (generator.random(1000) < 0.899).tolist(), strict=True))
        passed += promised_threshold(pairs, "precision", 0.9, 0.95) is not None
    assert passed <= binom.ppf(0.99, 400, 0.05)


@pytest.mark.parametrize(("hits", "trials"), [(59, 59), (90, 93), (180, 200), (700, 720), (0, 10)])
def test_the_p_value_of_a_test_is_the_bound_of_clopper_and_pearson(hits: int, trials: int) -> None:
    p_value = binom.sf(hits - 1, trials, 0.9)
    assert p_value == pytest.approx(binomtest(hits, trials, 0.9, alternative="greater").pvalue)
    for confidence in (0.9, 0.95, 0.99, 1 - p_value * 1.001, 1 - p_value * 0.999):
        if not 0 < confidence < 1:
            continue
        low = beta.ppf(1 - confidence, hits, trials - hits + 1) if hits else 0.0
        # For a recall, the rows that have the label are the trials.
        pairs = [(0.9, True)] * hits + [(MISSED, True)] * (trials - hits)
        assert (promised_threshold(pairs, "recall", 0.9, confidence) is not None) == (low > 0.9)


@pytest.mark.parametrize("metric", ["precision", "recall"])
@pytest.mark.parametrize(("share", "confidence"), [(0.95, 0.95), (0.8, 0.9), (0.99, 0.99), (0.5, 0.75)])
def test_the_fewest_right_predictions_are_enough_and_one_less_is_not(metric, share, confidence) -> None:
    fewest = fewest_right(metric, share, confidence)
    assert promised_threshold([(0.7, True)] * fewest, metric, share, confidence) is not None
    assert promised_threshold([(0.7, True)] * (fewest - 1), metric, share, confidence) is None


def test_a_score_is_accepted_from_the_threshold_on() -> None:
    pairs = [(0.2, False), (0.5, True), (0.5, False), (0.9, True), (MISSED, True)]
    counts = accepted_and_right(pairs, [0.95, 0.9, 0.5, 0.500001, 0.0])
    assert counts.tolist() == [[0, 1, 3, 1, 4], [0, 1, 2, 1, 2]]


def test_the_lowest_threshold_is_chosen_for_a_precision_and_the_highest_for_a_recall() -> None:
    pairs = [(0.99, True)] * 500 + [(0.6, False)] * 500
    threshold = promised_threshold(pairs, "precision", 0.95, 0.95)
    assert threshold is not None
    assert 0.6 < threshold < 0.63
    highest = promised_threshold(pairs, "recall", 0.95, 0.95)
    assert highest is not None
    assert 0.985 < highest <= 0.99


def test_one_mistake_among_the_highest_scores_does_not_end_the_tests() -> None:
    fewest = fewest_right("precision", 0.95, 0.95)
    pairs = [(0.9999, False), *[(0.999, True)] * (fewest - 1), *[(0.9, True)] * 900]
    assert promised_threshold(pairs, "precision", 0.95, 0.95) == 0.0


def test_no_candidates_give_no_threshold() -> None:
    assert promised_threshold([], "precision", 0.9, 0.9) is None
    assert promised_threshold([(MISSED, True)] * 100, "recall", 0.9, 0.9) is None

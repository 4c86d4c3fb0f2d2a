"""The temperature against a search by hand, and accuracy by coverage against counting."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bert_tasks.metrics.calibration import COVERAGES, coverage_curve, fit_temperature


def drawn(rows: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels that are drawn with the probabilities of ``softmax(logits / temperature)``."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / temperature).softmax(dim=1), 1, generator=generator).squeeze(1)
    return logits.numpy(), labels.numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_the_labels_is_recovered(temperature: float) -> None:
    assert fit_temperature(*drawn(40_000, temperature)) == pytest.approx(temperature, rel=0.02)


def test_no_other_temperature_has_a_lower_cross_entropy() -> None:
    logits, labels = (torch.from_numpy(array) for array in drawn(200, 2.0))
    best = fit_temperature(logits.numpy(), labels.tolist())
    losses = {
        factor: F.cross_entropy(logits / (best * factor), labels).item() for factor in (0.9, 0.999, 1, 1.001, 1.1)
    }
    assert min(losses, key=losses.__getitem__) == 1
    steps = np.geomspace(0.05, 20, 4000)
    by_hand = min(steps, key=lambda step: F.cross_entropy(logits / step, labels).item())
    assert best == pytest.approx(by_hand, rel=2e-3)


def test_predictions_may_have_different_numbers_of_classes() -> None:
    logits, labels = drawn(200, 2.0)
    longer = [[*row, -1e9] if number % 2 else row for number, row in enumerate(logits)]
    assert fit_temperature(longer, labels.tolist()) == pytest.approx(fit_temperature(logits, labels.tolist()), rel=1e-6)


def test_the_range_of_temperatures_is_limited() -> None:
    assert fit_temperature([[1.0, 0.0]] * 3, [0, 0, 0]) == pytest.approx(0.05, rel=1e-3)
    assert fit_temperature([[1.0, 0.0]] * 2, [0, 1]) == pytest.approx(20, rel=1e-3)
    assert fit_temperature([], []) == 1.0


def test_accuracy_by_coverage_is_the_accuracy_of_the_most_confident() -> None:
    generator = np.random.default_rng(0)
    scores = generator.random(57).round(2)  # some are equal
    correct = generator.random(57) < scores
    curve = coverage_curve(scores.tolist(), correct.tolist())
    for coverage, (score, accuracy) in zip(COVERAGES, curve, strict=True):
        answered = scores >= score
        assert answered.sum() >= coverage * 57 - 1e-9
        assert (scores > score).sum() < coverage * 57
        assert accuracy == pytest.approx(correct[answered].mean(), abs=1e-12)
    assert all(point[0] >= other[0] for point, other in pairwise(curve))
    assert curve[-1] == (scores.min(), pytest.approx(correct.mean()))
    assert coverage_curve([], []) == ()

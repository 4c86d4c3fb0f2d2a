"""Calibration compares confidences with accuracy, and a temperature corrects it.

Source: Guo et al., "On Calibration of Modern Neural Networks" (arXiv:1706.04599). Everything is computed in float64.

Shape legend: S predictions, L classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Shares of the most confident predictions for which ``coverage_curve`` returns the accuracy, from 5 % to all.
COVERAGES = tuple(share / 20 for share in range(1, 21))
_TEMPERATURES = (0.05, 20.0)  # the range of ``fit_temperature``


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Number, mean confidence and accuracy of predictions from ``low`` to ``high``."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A reliability diagram and the expected calibration error.

    Attributes:
        ece: Mean gap between confidence and accuracy over predictions (Guo et al. 2017), from 0 (none) to 1.
        predictions: Number of predictions.
    """

    bins: tuple[Bin, ...]
    ece: float
    predictions: int


def calibration(confidences: Sequence[float], correct: Sequence[float], *, bins: int = 10) -> Calibration | None:
    """Returns the calibration in bins of equal width, without empty bins.

    Args:
        confidences: Confidence of each prediction, from 0 to 1.
        correct: 1 (or True) for each correct prediction, else 0.
        bins: Number of bins.

    Returns:
        None without predictions.
    """
    if not len(confidences):
        return None
    confidence = np.clip(np.asarray(confidences, dtype=np.float64), 0.0, 1.0)
    hits = np.asarray(correct, dtype=np.float64)
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)  # a confidence of 1 is in the last bin
    filled: list[Bin] = []
    for number in range(bins):
        inside = bin_of == number
        if not inside.any():
            continue
        filled_bin = Bin(
            low=number / bins,
            high=(number + 1) / bins,
            count=int(inside.sum()),
            confidence=float(confidence[inside].mean()),
            accuracy=float(hits[inside].mean()),
        )
        filled.append(filled_bin)
    # The paper's equation 3: the gap of each bin weighs as much as the bin has predictions.
    gaps = [bin.count * abs(bin.confidence - bin.accuracy) for bin in filled]
    return Calibration(bins=tuple(filled), ece=sum(gaps) / len(confidence), predictions=len(confidence))


def fit_temperature(logits: Sequence[ArrayLike], labels: Sequence[int]) -> float:
    """Returns the T for which ``softmax(logits / T)`` has the lowest cross entropy.

    Dividing by one number keeps the order of the logits, so the predictions stay the same and only the confidences
    change.

    Args:
        logits: ``S x [L]``, one array for each prediction. Their numbers of classes may differ (choices of a row).
        labels: ``[S]`` index of the correct class of each prediction.

    Returns:
        From 0.05 to 20. Above 1 if the confidences are too high. 1 without predictions.

    Examples:
        >>> fit_temperature([[2.0, 0.0]] * 4, [0, 0, 0, 1])  # 88 % confidence, 75 % accuracy
        1.82...
    """
    from scipy.optimize import minimize_scalar  # here, because the import takes 0.2 s

    if not len(labels):
        return 1.0
    arrays = [np.asarray(each, dtype=np.float64) for each in logits]
    most_classes = max(len(array) for array in arrays)
    scores = np.full((len(arrays), most_classes), -np.inf)  # [S, L], where -inf is a class that the row lacks
    for row, array in zip(scores, arrays, strict=True):
        row[: len(array)] = array
    scores -= scores.max(axis=1, keepdims=True)  # at most 0, so that exp cannot overflow, whatever T is
    correct = np.take_along_axis(scores, np.asarray(labels)[:, None], axis=1)[:, 0]  # [S]

    def cross_entropy(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        log_sums = np.log(np.exp(scores / temperature).sum(axis=1))  # [S]
        return float((log_sums - correct / temperature).mean())

    # The logarithm of T is searched, in which halving and doubling are steps of the same length.
    low, high = _TEMPERATURES
    bounds = (math.log(low), math.log(high))
    best = minimize_scalar(cross_entropy, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return math.exp(best.x)


def coverage_curve(confidences: Sequence[float], correct: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Returns confidence and accuracy of the most confident shares, ``COVERAGES``.

    It shows what a user gains who leaves the least confident rows to a person. Predictions with the same confidence are
    answered or rejected together, so a share may be exceeded.

    Args:
        confidences: ``[S]`` from 0 to 1.
        correct: ``[S]`` 1 (or True) for each correct prediction, else 0.

    Returns:
        A pair (lowest confidence, accuracy) for each share. Empty without predictions.
    """
    if not len(confidences):
        return ()
    scores = np.asarray(confidences, dtype=np.float64)
    hits = np.asarray(correct, dtype=np.float64)
    descending = np.sort(scores)[::-1]
    curve: list[tuple[float, float]] = []
    for share in COVERAGES:
        answered = math.ceil(share * len(scores) - 1e-9)  # 0.55 * 100 is a little more than 55
        lowest = float(descending[answered - 1])
        curve.append((lowest, float(hits[scores >= lowest].mean())))
    return tuple(curve)

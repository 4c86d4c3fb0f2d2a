"""Calibrated probabilities by a temperature fitted on the validation rows.

The temperature changes confidences, not predictions. Source: Guo et al., "On Calibration of Modern Neural Networks"
(arXiv:1706.04599).

Shape legend: L classes or choices of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bert_tasks.errors import UsageError, argument
from bert_tasks.metrics.calibration import Calibration, calibration, fit_temperature
from bert_tasks.outputs.settings import require

ECE = "ece"  # the expected calibration error among the metrics
CalibrationMethod = Literal["none", "temperature"]


def check_temperature(temperature: float) -> None:
    """Raises ValueError if logits cannot be divided by the temperature."""
    require(0 < temperature < float("inf"), f"temperature is {temperature}, expected a number above 0")


def fitted_temperature(pairs: Sequence[tuple[Tensor, int]]) -> float | None:
    """Returns the temperature that gives the classes the lowest cross entropy, or None without pairs.

    Args:
        pairs: Logits ``[L]`` and the index of the class.
    """
    if not pairs:
        return None
    logits: list[NDArray[np.float64]] = []
    labels: list[int] = []
    for of_row, label in pairs:
        logits.append(of_row.double().numpy())
        labels.append(label)
    return fit_temperature(logits, labels)


def calibration_metrics(scores: Sequence[float], correct: Sequence[float]) -> dict[str, float]:
    """Returns the expected calibration error of scores, or nothing if there are none."""
    measured = calibration(scores, correct)
    if measured is None:
        return {}
    return {ECE: measured.ece}


def uncalibrated(scores: Sequence[Sequence[float]], correct: Sequence[bool], temperature: float) -> Calibration | None:
    """Returns the calibration of the probabilities without the temperature.

    Args:
        scores: The calibrated probabilities of the classes or choices of each row.
        correct: Whether the most probable one is right, for each row.
        temperature: The temperature of the probabilities. 1 changes nothing, so that None is returned.
    """
    if temperature == 1:
        return None
    largest = []
    for of_row in scores:
        # log p is a logit divided by T plus a constant, which a softmax does not notice. Times T it is the logit again.
        logs = np.log(np.clip([*of_row], 1e-30, 1.0))
        powers = np.exp((logs - logs.max()) * temperature)
        largest.append(float(1 / powers.sum()))  # the power of the largest is 1
    return calibration(largest, correct)


def score_list(scores: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Returns the probabilities of a prediction in the order of the labels or choices."""
    if isinstance(scores, Mapping):
        return [*scores.values()]
    return [*scores]


def check_abstention(output: Any, abstain_below: float) -> None:
    """Checks the score below which a prediction loses its label.

    Raises:
        UsageError: It is no score, or the predictions of the output have no single label.
    """
    option = argument("abstain_below", None)
    if not 0 <= abstain_below <= 1:
        raise UsageError(f"{option} is {abstain_below}, expected a number from 0 to 1")
    if not output.can_abstain:
        raise UsageError(f"{option} needs predictions with one label for each row, unlike this model's")


def without_label(prediction: Any, score: float) -> Any:
    """Returns the prediction, without label and answer if its own score is below ``score``."""
    if prediction.score >= score:
        return prediction
    names = {field.name for field in fields(prediction)} & {"label", "answer"}
    return replace(prediction, **dict.fromkeys(names))

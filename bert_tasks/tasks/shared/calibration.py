"""Calibrated probabilities by a temperature fitted on the validation rows.

The temperature changes confidences, not predictions. Source: Guo et al., "On Calibration of Modern Neural Networks"
(arXiv:1706.04599).

Shape legend: L classes or choices of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

from bert_tasks.data.columns import Row
from bert_tasks.errors import UsageError, argument
from bert_tasks.metrics.calibration import calibration, coverage_curve, fit_temperature
from bert_tasks.tasks.base import Feature, PredictionT, Task, require
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.lazy import Tensor

ECE = "ece"  # the expected calibration error among the metrics


@dataclass(frozen=True, kw_only=True)
class CalibratedTask(Task[PredictionT]):
    """A task whose probabilities are a softmax over classes or choices.

    Attributes:
        calibration: ``temperature`` divides the logits by one number that gives the validation rows the lowest cross
            entropy. ``none`` uses them as they are.
        temperature: The number, fitted on the validation rows.
        coverage_scores: The lowest score of the most confident 5 %, 10 %, ..., 100 % of the validation rows.
        coverage_accuracies: The accuracy of these rows.
    """

    calibration: Literal["none", "temperature"] = "none"
    temperature: float = 1.0
    coverage_scores: tuple[float, ...] = ()
    coverage_accuracies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.temperature < float("inf"), f"temperature is {self.temperature}, expected a number above 0")

    def row_logits(self, compact: Sequence[Tensor], features: Sequence[Feature]) -> Iterable[Tensor]:
        """Returns the logits of each row, ``S x [L]``, or of each word."""
        raise NotImplementedError

    def calibrated(self, logits: Tensor) -> Tensor:
        """Returns the logits of the calibrated probabilities, of the same shape."""
        return logits / self.temperature if self.calibration == "temperature" else logits

    def calibration_metrics(self, scores: Sequence[float], correct: Sequence[float]) -> dict[str, float]:
        """Returns the expected calibration error, if the probabilities are calibrated."""
        measured = calibration(scores, correct) if self.calibration == "temperature" else None
        return {} if measured is None else {ECE: measured.ece}


class CalibratedFitting(Fitting):
    """Fits a temperature and, for single labels, scores of the most confident rows."""

    task: CalibratedTask[Any]
    fields: ClassVar[tuple[str, ...]] = ("temperature", "coverage_scores", "coverage_accuracies")

    @property
    def calibrates(self) -> bool:
        return self.task.calibration == "temperature"

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Task[Any]:
        return self.fit(self.labelled_logits(compact, features, rows))

    def fit(self, pairs: Sequence[tuple[Tensor, int]]) -> Task[Any]:
        """Returns the task fitted to pairs of logits ``[L]`` and the index of the class."""
        if not pairs:
            return self.task
        temperature = fit_temperature([logits.double().numpy() for logits, _ in pairs], [label for _, label in pairs])
        if self.sample == "window":  # the labels are of words
            return replace(self.task, temperature=temperature)
        best = [(logits / temperature).softmax(dim=0).max(dim=0) for logits, _ in pairs]
        correct = [int(index) == label for (_, index), (_, label) in zip(best, pairs, strict=True)]
        scores, accuracies = zip(*coverage_curve([float(score) for score, _ in best], correct), strict=True)
        return replace(self.task, temperature=temperature, coverage_scores=scores, coverage_accuracies=accuracies)

    def labelled_logits(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[tuple[Tensor, int]]:
        """Returns logits ``[L]`` and label index of each prediction with a label."""
        pairs = zip(self.task.row_logits(compact, features), map(self.label_of, rows), strict=True)
        return [(logits, label) for logits, label in pairs if label is not None]

    def label_of(self, row: Row) -> int | None:
        """Returns the index of a row's class or choice, or None without a label."""
        raise NotImplementedError


def abstention_score(task: Task[Any], *, abstain_below: float | None, min_accuracy: float | None) -> float:
    """Returns the score below which a prediction is rejected. 0 rejects none.

    Args:
        task: The task of a model.
        abstain_below: The score itself.
        min_accuracy: The accuracy that the answered validation rows had. The score is the lowest that reached it.

    Raises:
        UsageError: A value is out of range, predictions have no single label, or the accuracy was never reached.
    """
    if abstain_below is None and min_accuracy is None:
        return 0.0
    names = [argument(name, None) for name in ("abstain_below", "min_accuracy")]
    option, value = (names[0], abstain_below) if min_accuracy is None else (names[1], min_accuracy)
    reject = partial(require, error=UsageError)
    reject(abstain_below is None or min_accuracy is None, f"{' and '.join(names)} exclude each other")
    reject(value is not None and 0 <= value <= 1, f"{option} is {value}, expected a number from 0 to 1")
    has_label = Fitting.of(task).sample == "row" and task.output_kind in ("softmax", "choice")
    if not isinstance(task, CalibratedTask) or not has_label:
        raise UsageError(f"{option} needs predictions with one label for each row, unlike this model's")
    if abstain_below is not None:
        return abstain_below
    curve = list(zip(task.coverage_scores, task.coverage_accuracies, strict=True))
    reject(bool(curve), f"{option} needs a model that was trained with settings.calibration = 'temperature'")
    scores = [score for score, accuracy in curve if min_accuracy is not None and accuracy >= min_accuracy]
    reject(bool(scores), f"{option} is {value}, and no share of the validation rows reached it")
    return min(scores)


def without_label(prediction: Any, score: float) -> Any:
    """Returns the prediction, without label and answer below ``score``."""
    names = {field.name for field in fields(prediction)} & {"label", "answer"}
    return prediction if prediction.score >= score else replace(prediction, **dict.fromkeys(names))

"""Calibrated probabilities by a temperature fitted on the validation rows.

The temperature changes confidences, not predictions. Source: Guo et al., "On Calibration of Modern Neural Networks"
(arXiv:1706.04599).

Shape legend: L classes or choices of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.errors import UsageError, argument
from bert_tasks.metrics.calibration import calibration, fit_temperature
from bert_tasks.tasks.base import Feature, PredictionT, Task, require
from bert_tasks.tasks.shared.fitting import Fitting

ECE = "ece"  # the expected calibration error among the metrics


@dataclass(frozen=True, kw_only=True)
class CalibratedTask(Task[PredictionT]):
    """A task whose probabilities are a softmax over classes or choices.

    Attributes:
        calibration: ``temperature`` divides the logits by one number that gives the validation rows the lowest cross
            entropy. ``none`` uses them as they are.
        temperature: The number, fitted on the validation rows.
    """

    calibration: Literal["none", "temperature"] = "none"
    temperature: float = 1.0

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
    """Fits a temperature."""

    task: CalibratedTask[Any]
    fields: ClassVar[tuple[str, ...]] = ("temperature",)

    @property
    def calibrates(self) -> bool:
        return self.task.calibration == "temperature"

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Task[Any]:
        return self.fit(self.labelled_logits(compact, features, rows))

    def fit(self, pairs: Sequence[tuple[Tensor, int]]) -> Task[Any]:
        """Returns the task fitted to pairs of logits ``[L]`` and the index of the class."""
        if not pairs:
            return self.task
        logits = [each.double().numpy() for each, _ in pairs]
        labels = [label for _, label in pairs]
        return replace(self.task, temperature=fit_temperature(logits, labels))

    def labelled_logits(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[tuple[Tensor, int]]:
        """Returns logits ``[L]`` and label index of each prediction with a label."""
        pairs = zip(self.task.row_logits(compact, features), map(self.label_of, rows), strict=True)
        return [(logits, label) for logits, label in pairs if label is not None]

    def label_of(self, row: Row) -> int | None:
        """Returns the index of a row's class or choice, or None without a label."""
        raise NotImplementedError


def check_abstention(task: Task[Any], abstain_below: float) -> None:
    """Checks the score below which a prediction loses its label.

    Raises:
        UsageError: It is no score, or the task's predictions have no single label.
    """
    option = argument("abstain_below", None)
    if not 0 <= abstain_below <= 1:
        raise UsageError(f"{option} is {abstain_below}, expected a number from 0 to 1")
    has_label = Fitting.of(task).sample == "row" and task.output_kind in ("softmax", "choice")
    if not isinstance(task, CalibratedTask) or not has_label:
        raise UsageError(f"{option} needs predictions with one label for each row, unlike this model's")


def without_label(prediction: Any, score: float) -> Any:
    """Returns the prediction, without label and answer below ``score``."""
    names = {field.name for field in fields(prediction)} & {"label", "answer"}
    return prediction if prediction.score >= score else replace(prediction, **dict.fromkeys(names))

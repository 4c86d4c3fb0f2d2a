"""Outputs whose labels have thresholds."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from bert_tasks.data.columns import Row
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.outputs.settings import fitted, require


@dataclass(frozen=True, kw_only=True)
class ThresholdOutput(Output[PredictionT]):
    """The base class of outputs that predict a label if its score reaches a threshold.

    Attributes:
        default_threshold: The threshold of each label if there are no ``thresholds``.
        thresholds: A threshold for each label, chosen on validation rows, or by ``calibrate``.
        promise: What ``calibrate`` chose the thresholds for, in words.

    Examples:
        >>> LabelSet(labels=("refund", "angry")).limits
        (0.5, 0.5)
    """

    default_threshold: ClassVar[float] = 0.0
    thresholds: tuple[float, ...] = fitted((), per_label=True)
    promise: str = fitted("")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.thresholds or len(self.thresholds) == len(self.labels),
            f"thresholds: one per label, expected {len(self.labels)} numbers instead of {len(self.thresholds)}",
        )

    @property
    def limits(self) -> tuple[float, ...]:
        """The threshold of each label."""
        return self.thresholds if self.thresholds else (self.default_threshold,) * len(self.labels)

    @abstractmethod
    def candidates(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> Iterable[tuple[str, float, bool]]:
        """Yields the label of each possible prediction, its score and whether it is right, for ``calibrate``.

        ``predictions`` were decoded without thresholds. If a row has a label that is not among its possible
        predictions, this label follows with the score ``MISSED``, and is right.
        """

    def threshold_name(self, label: str) -> str:
        """Returns the label in ``candidates`` whose threshold is that of ``label``. Default: the label itself."""
        return label

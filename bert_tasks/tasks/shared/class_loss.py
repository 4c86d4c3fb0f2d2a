"""Class weights and the focal loss, for every task whose loss is a cross entropy.

The focal loss multiplies the cross entropy of an example by (1 - p)^gamma, where p is the probability of its right
label, so examples that the model gets right count less (Lin et al., "Focal Loss for Dense Object Detection", 2017,
arXiv:1708.02002, equation 4). With class weights it is the paper's alpha-balanced loss (equation 5).

The count of the mean does not depend on gamma. It is the sum of the class weights of the examples, or their number
without weights, as in ``torch.nn.functional.cross_entropy``. (The paper divides by the number of boxes with an object,
which sentences and words do not have.)

Shape legend: R examples (rows or words), L labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.problems import counted
from bert_tasks.encoder import packing
from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import PredictionT, Task, require
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig, label_places


@dataclass(frozen=True, kw_only=True)
class FocalTask(Task[PredictionT]):
    """A task whose loss may be the focal loss.

    Attributes:
        focal_gamma: Exponent of the focal loss (arXiv:1708.02002), which multiplies the cross entropy of an example by
            (1 - p)^focal_gamma, where p is the probability of the right label. 0 is the cross entropy, the paper uses
            2.
    """

    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        gamma = self.focal_gamma
        require(0 <= gamma < float("inf"), f"focal_gamma is {gamma}, expected 0 (cross entropy) or more")


@dataclass(frozen=True, kw_only=True)
class WeightedTask(FocalTask[PredictionT]):
    """A task with classes, whose loss may have a weight for each.

    Attributes:
        class_weights: One weight per label, or ``balanced`` (n / (labels x n of the label), from the n labelled rows or
            words of the training data). For several labels they weigh the positive examples (``balanced`` is then
            negatives / positives).
        balanced_weights: The weights of ``balanced`` on the training rows, one per label.
    """

    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    balanced_weights: tuple[float, ...] = ()

    @property
    def without_classes(self) -> str | None:
        """The setting that leaves no loss of single classes, and why, or None."""
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = self.without_classes
        require(
            reason is None or (self.class_weights is None and self.focal_gamma == 0),
            f"class_weights and focal_gamma do not apply to {reason}",
        )
        require(
            not isinstance(self.class_weights, str) or self.class_weights == "balanced",
            f"class_weights is {self.class_weights!r}, expected 'balanced' or one weight per label",
        )
        require(
            not self.balanced_weights or self.class_weights == "balanced",
            "balanced_weights are fitted to the training rows where class_weights = 'balanced'",
        )
        for name in ("class_weights", "balanced_weights"):
            weights = getattr(self, name)
            if isinstance(weights, tuple) and (weights or name == "class_weights"):
                if len(weights) != len(self.labels):
                    raise ValueError(f"{name} holds {counted(len(weights), 'weight')} for {len(self.labels)} labels")
                if not all(map(isfinite, weights)) or min(weights) < 0 or max(weights) == 0:
                    raise ValueError(f"{name} must be finite numbers, none of them negative, and not all 0")

    def label_weights(self) -> tuple[float, ...] | None:
        """Returns the weight of each label. None if there are no weights.

        Raises:
            UsageError: The weights are ``balanced`` and were not computed yet.
        """
        if self.class_weights is None:
            return None
        weights = self.balanced_weights if self.class_weights == "balanced" else self.class_weights
        if not weights:
            raise UsageError(
                "class_weights = 'balanced' needs the training rows. Call Fitting.of(task).fit_to_train(rows) first"
            )
        return weights

    def weights_like(self, logits: Tensor) -> Tensor | None:
        """Returns the weights ``[L]`` on the device of logits, or None without weights."""
        weights = self.label_weights()
        return None if weights is None else packing.device_tensor(weights, logits.device, logits.dtype)


class WeightedFitting(Fitting):
    """Training of a task with class weights."""

    task: Any

    def balance(self, counts: Mapping[str, int], total: int, *, noun: str = "row", is_set: bool = False) -> Any:
        """Returns the task with the weights that ``balanced`` comes to.

        Args:
            counts: The number of training examples with each label.
            total: The number of training examples with a label.
            noun: The word for an example in messages.
            is_set: True if an example has any number of labels.

        Raises:
            DataError: A label has no training example, so its weight would be infinite, or in sets of labels one is in
                all sets, so its weight would be 0.
        """
        labels = self.task.labels
        for label in labels:
            count = counts.get(label, 0)
            if not count or (is_set and count == total):
                share, weight, remedy = ("every", "0", "without") if count else ("no", "infinite", "with")
                raise DataError(
                    f"class_weights = 'balanced': {share} training {noun} has the label {label!r}, so its weight would "
                    f"be {weight}. Add rows {remedy} it, remove the label, or set class_weights to one number per label"
                )
        weights = (
            (total - counts[label]) / counts[label] if is_set else total / len(labels) / counts[label]
            for label in labels
        )
        return replace(self.task, balanced_weights=tuple(weights))

    @property
    def remedies(self) -> tuple[str, ...]:
        has_remedy = self.task.without_classes is None and self.task.class_weights is None
        return ('class_weights = "balanced"',) if has_remedy else ()


class WeightedConfig(HFConfig):
    """The config of transformers of a task with class weights."""

    def compatible_fields(self, stored: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Orders values for each label by the labels."""
        compatible = super().compatible_fields(stored, options)
        if options.get("class_weights", "balanced") != "balanced":
            compatible.pop("balanced_weights", None)  # they were computed for another setting
        stored_labels = stored.get("labels", ())
        labels = options.get("labels", stored_labels)
        if labels == stored_labels:
            return compatible
        places = label_places(stored_labels, labels)
        for name, nothing in (("class_weights", None), ("balanced_weights", ()), ("thresholds", ())):
            values = compatible.get(name)
            if isinstance(values, tuple) and values:
                compatible[name] = nothing if places is None else tuple(values[index] for index in places)
        return compatible


def cross_entropy(
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, gamma: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """Returns the sum over examples of -w (1 - p)^gamma log(p), ``[R, L], [R] -> []``.

    Args:
        logits: Logits, with ``-inf`` for labels that an example cannot have.
        labels: The right labels as int64. p is the softmax probability of the right label.
        weights: ``[L]`` w, the weight of each label. None if all are 1.
        gamma: Exponent. 0 is ``torch.nn.functional.cross_entropy``, bit for bit.
        smoothing: Label smoothing, if gamma is 0.
    """
    if gamma == 0:
        return F.cross_entropy(logits, labels, weight=weights, reduction="sum", label_smoothing=smoothing)
    losses = focal_loss(F.cross_entropy(logits, labels, reduction="none"), gamma)
    return losses.sum() if weights is None else (weights.index_select(0, labels) * losses).sum()


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, gamma: float = 0.0
) -> Tensor:
    """Returns the sum of -w (1 - p)^gamma log(p), ``[R, L], [R, L] -> []``.

    The sum runs over examples and labels.

    Args:
        logits: Logits.
        labels: 1.0 if the label is present (p is the sigmoid of the logit), 0.0 if it is absent (p is 1 - sigmoid).
        weights: ``[L]`` w of the labels that are present. None if all are 1, as w of the labels that are absent.
        gamma: Exponent. 0 is ``torch.nn.functional.binary_cross_entropy_with_logits``, bit for bit.
    """
    if gamma == 0:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights, reduction="sum")
    losses = focal_loss(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"), gamma)
    return losses.sum() if weights is None else ((1 + (weights - 1) * labels) * losses).sum()


def focal_loss(losses: Tensor, gamma: float) -> Tensor:
    """Returns cross entropies -log(p) times (1 - p)^gamma.

    The derivative of a power below 1 is infinite at 0, so the smallest number replaces 0. The gradient is 0.
    """
    missing = -torch.expm1(-losses)  # 1 - p, exact also if p is almost 1
    return missing.clamp(min=torch.finfo(losses.dtype).tiny) ** gamma * losses

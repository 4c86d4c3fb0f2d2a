"""Class weights: given by the user, or balanced by the labels of the training rows."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal

from torch import Tensor

from bert_tasks.data.issues import counted
from bert_tasks.encoder import packing
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.settings import require

ClassWeights = Literal["balanced"] | tuple[float, ...] | None
REMEDY = 'class_weights = "balanced"'  # as a recipe has it


def check_class_weights(labels: Sequence[str], given: ClassWeights, balanced: tuple[float, ...]) -> None:
    """Raises ValueError for weights that do not fit the labels.

    Args:
        labels: The labels.
        given: The setting ``class_weights``.
        balanced: The fitted ``balanced_weights``.
    """
    require(
        not isinstance(given, str) or given == "balanced",
        f"class_weights is {given!r}, expected 'balanced' or one weight per label",
    )
    require(
        not balanced or given == "balanced",
        "balanced_weights are fitted to the training rows where class_weights = 'balanced'",
    )
    if isinstance(given, tuple):
        _check_weights("class_weights", given, labels)
    if balanced:
        _check_weights("balanced_weights", balanced, labels)


def _check_weights(name: str, weights: tuple[float, ...], labels: Sequence[str]) -> None:
    """Raises ValueError for weights that cannot be the weights of these labels, under the name of their setting."""
    if len(weights) != len(labels):
        raise ValueError(f"{name} holds {counted(len(weights), 'weight')} for {len(labels)} labels")
    are_finite = all(isfinite(weight) for weight in weights)
    if not are_finite or min(weights) < 0 or max(weights) == 0:
        raise ValueError(f"{name} must be finite numbers, none of them negative, and not all 0")


def label_weights(given: ClassWeights, balanced: tuple[float, ...]) -> tuple[float, ...] | None:
    """Returns the weight of each label. None if there are no weights.

    Raises:
        UsageError: The weights are ``balanced`` and were not computed yet.
    """
    if given is None:
        return None
    weights = balanced if given == "balanced" else given
    if not weights:
        raise UsageError("class_weights = 'balanced' needs the training rows. Call task.fit_rows(rows) first")
    return weights


def weights_like(weights: tuple[float, ...] | None, logits: Tensor) -> Tensor | None:
    """Returns weights ``[L]`` on the device of logits, or None without weights."""
    if weights is None:
        return None
    return packing.device_tensor(weights, logits.device, logits.dtype)


def balanced_weights(
    labels: Sequence[str], counts: Mapping[str, int], total: int, *, noun: str = "row", is_set: bool = False
) -> tuple[float, ...]:
    """Returns the weights that ``balanced`` comes to.

    They are n / (labels x n of the label), or for sets of labels negatives / positives.

    Args:
        labels: The labels.
        counts: The number of training examples with each label.
        total: The number of training examples with a label.
        noun: The word for an example in messages.
        is_set: True if an example has any number of labels.

    Raises:
        DataError: A label has no training example, so its weight would be infinite, or in sets of labels one is in all
            sets, so its weight would be 0.
    """
    weights = []
    for label in labels:
        count = counts.get(label, 0)
        if count == 0:
            raise _useless(label, "no", noun, "infinite", "with")
        if is_set and count == total:
            raise _useless(label, "every", noun, "0", "without")
        if is_set:
            weights.append((total - count) / count)  # what torch's documentation advises for pos_weight
        else:
            weights.append(total / len(labels) / count)  # scikit-learn's compute_class_weight
    return tuple(weights)


def _useless(label: str, share: str, noun: str, weight: str, remedy: str) -> DataError:
    """Returns the error for a label whose balanced weight would be infinite or 0.

    Args:
        label: The label.
        share: How many training examples have it, "no" or "every".
        noun: The word for an example.
        weight: What the weight would be.
        remedy: The rows that are missing, those "with" or "without" the label.
    """
    return DataError(
        f"class_weights = 'balanced': {share} training {noun} has the label {label!r}, so its weight would be "
        f"{weight}. Add rows {remedy} it, remove the label, or set class_weights to one number per label"
    )

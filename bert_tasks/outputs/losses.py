"""Cross entropies with class weights and the focal loss, as sums.

The focal loss multiplies the cross entropy of an example by (1 - p)^gamma, where p is the probability of its right
label, so examples that the model gets right count less (Lin et al., "Focal Loss for Dense Object Detection", 2017,
arXiv:1708.02002, equation 4). With class weights it is the paper's alpha-balanced loss (equation 5).

The count of the mean does not depend on gamma. It is the sum of the class weights of the examples, or their number
without weights, as in ``torch.nn.functional.cross_entropy``. (The paper divides by the number of boxes with an object,
which sentences and words do not have.)

Shape legend: R examples (rows or words), L labels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.outputs.settings import require


def check_focal_gamma(gamma: float) -> None:
    """Raises ValueError for an exponent that the focal loss cannot have."""
    require(0 <= gamma < float("inf"), f"focal_gamma is {gamma}, expected 0 (cross entropy) or more")


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
    # The weights are applied here, because p is a probability only without them.
    losses = focal_loss(F.cross_entropy(logits, labels, reduction="none"), gamma)  # [R]
    if weights is None:
        return losses.sum()
    return (weights.index_select(0, labels) * losses).sum()


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
    losses = focal_loss(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"), gamma)  # [R, L]
    if weights is None:
        return losses.sum()
    label_weights = 1 + (weights - 1) * labels  # w where the label is present, 1 where it is absent
    return (label_weights * losses).sum()


def focal_loss(losses: Tensor, gamma: float) -> Tensor:
    """Returns cross entropies -log(p) times (1 - p)^gamma.

    The derivative of a power below 1 is infinite at 0, so the smallest number replaces 0. The gradient is 0.
    """
    missing = -torch.expm1(-losses)  # 1 - p, exact also if p is almost 1
    return missing.clamp(min=torch.finfo(losses.dtype).tiny) ** gamma * losses

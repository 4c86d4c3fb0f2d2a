"""Dropout, which on a CPU draws 16 random bits per element (``encoder/cpu.py``).

Other devices and float16 use torch's dropout. Hidden states are dropped here in all layers and heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_tasks.encoder.cpu import keep_mask, keep_scale, random_bits, uses_random_bits


def drop(hidden: Tensor, p: float) -> Tensor:
    """Zeroes each element with probability ``p`` and scales the others by 1 / (1 - p).

    The scale keeps the expected value of an element, so that nothing has to change outside training.
    """
    if not uses_random_bits(hidden, p):
        return F.dropout(hidden, p)
    factors = keep_mask(random_bits(hidden.shape), p, out=torch.empty_like(hidden))
    if hidden.dtype == torch.bfloat16:  # its 8 bits would round the scale itself
        return hidden * factors * keep_scale(p)
    return hidden * factors.mul_(keep_scale(p))


class Dropout(nn.Module):
    """The module of ``drop``, which has no effect outside training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.p <= 0.0:
            return hidden
        return drop(hidden, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"

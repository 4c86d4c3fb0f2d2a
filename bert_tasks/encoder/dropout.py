"""Dropout from 16 random bits an element.

Owns the random words, what they keep, and the module that the other modules of the encoder use. torch's own dropout
makes one random float an element on a CPU, which costs several times as much as all the rest of dropout; here four
elements share one draw of torch's generator, so ``torch.manual_seed`` fixes the masks as it does there. A probability
is rounded to a multiple of 1/65536, and what is kept is scaled by exactly the rounded one. Other devices and half
precision use torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_RANGE = 2**16
_LOWEST = -(2**15)  # of an int16


def uses_random_bits(hidden: Tensor, p: float) -> bool:
    """Whether dropout of this tensor comes from random words."""
    return hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64) and 0 < _dropped(p) < _RANGE


def _dropped(p: float) -> int:
    """How many of the 65536 words drop an element."""
    return round(p * _RANGE)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by, so that the expected value stays."""
    return _RANGE / (_RANGE - _dropped(p))


def random_bits(shape: Sequence[int]) -> Tensor:
    """``int16`` words of the given shape from torch's CPU generator, every value equally likely."""
    count = torch.Size(shape).numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:count].view(shape)


def keep_mask(words: Tensor, p: float, *, out: Tensor) -> Tensor:
    """1 where a word keeps its element, else 0, written into ``out`` of any floating type."""
    return torch.ge(words, _dropped(p) + _LOWEST, out=out)


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, p: float) -> Tensor:
        factors = keep_mask(random_bits(hidden.shape), p, out=torch.empty_like(hidden)).mul_(keep_scale(p))
        ctx.save_for_backward(factors)
        return hidden * factors

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factors,) = ctx.saved_tensors
        return gradient * factors, None


class Dropout(nn.Module):
    """Each element is 0 with probability ``p`` while training, the others grow by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return hidden
        if not uses_random_bits(hidden, self.p):
            return F.dropout(hidden, self.p)
        dropped: Tensor = _DropoutFunction.apply(hidden, self.p)  # type: ignore[no-untyped-call]  # torch
        return dropped

    def extra_repr(self) -> str:
        return f"p={self.p}"

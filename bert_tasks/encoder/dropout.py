"""Dropout from 16 random bits per element.

On a CPU torch draws one random float per element, which costs several times as much as the rest of dropout. Here four
elements share one 64-bit draw of torch's generator, so ``torch.manual_seed`` fixes the masks as usual. A probability is
rounded to a multiple of 1/65536, and kept elements are scaled by exactly the rounded one. Other devices and float16 use
torch's own dropout.

Batches that are computed at the same time draw from generators of their own (``use_generator``), because the order in
which they would draw from torch's is left to chance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VALUES = 2**16  # of 16 bits
_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("_GENERATOR", default=None)  # None: torch's


@contextmanager
def use_generator(seed: int) -> Iterator[None]:
    """Meanwhile dropout on the CPU draws from a generator of its own."""
    token = _GENERATOR.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def uses_random_bits(hidden: Tensor, p: float) -> bool:
    """Whether dropout of this tensor with probability ``p`` draws random bits."""
    is_drawn = 0 < round(p * _VALUES) < _VALUES
    return is_drawn and hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64, torch.bfloat16)


def random_bits(shape: Sequence[int]) -> Tensor:
    """``int16`` numbers of the given shape from the CPU's generator, every value equally likely."""
    count = torch.Size(shape).numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=_GENERATOR.get())
    return draws.view(torch.int16)[:count].view(shape)


def keep_mask(bits: Tensor, p: float, *, out: Tensor) -> Tensor:
    """1 where the bits keep an element, else 0, written into ``out`` of any floating type."""
    return torch.ge(bits, round(p * _VALUES) - _VALUES // 2, out=out)


def keep_scale(p: float) -> float:
    """The factor of kept elements, which preserves the expected value."""
    return _VALUES / (_VALUES - round(p * _VALUES))


def drop(hidden: Tensor, p: float) -> Tensor:
    """The elements, each 0 with probability ``p``, the others scaled by 1 / (1 - p)."""
    if not uses_random_bits(hidden, p):
        return F.dropout(hidden, p)
    factors = keep_mask(random_bits(hidden.shape), p, out=torch.empty_like(hidden))
    if hidden.dtype == torch.bfloat16:  # its 8 bits would round the scale itself
        return hidden * factors * keep_scale(p)
    return hidden * factors.mul_(keep_scale(p))


class Dropout(nn.Module):
    """While training, sets each element to 0 with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        return drop(hidden, self.p) if self.training and self.p > 0.0 else hidden

    def extra_repr(self) -> str:
        return f"p={self.p}"

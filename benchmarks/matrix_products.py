"""The limit of a training step: its matrix products alone, recorded from a real run and repeated by themselves.

Must not know what is trained or how.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.baddbmm.default: torch.baddbmm,
}

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a tensor


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product: which, its operands' and its result's layout, and its multiply-adds."""

    function: Callable[..., Tensor]
    operands: tuple[Layout, ...]
    result: Layout

    @property
    def operations(self) -> int:
        """Floating point operations: two for each multiply-add."""
        inner = self.operands[-1][0][-2]
        return 2 * torch.Size(self.result[0]).numel() * inner


class Recorder(TorchDispatchMode):
    """Notes every matrix product that runs inside it, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **({} if kwargs is None else kwargs))
        if func in _PRODUCTS:
            operands = tuple(_layout(arg) for arg in args if isinstance(arg, Tensor))
            self.products.append(Product(function=_PRODUCTS[func], operands=operands, result=_layout(result)))
        return result


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


def seconds_of(products: Sequence[Product]) -> float:
    """How long the products take one after another, on operands and into results that exist already."""
    room = max(_extent(layout) for product in products for layout in (*product.operands, product.result))
    source, target = torch.randn(room) * 0.01, torch.empty(room)
    calls = [
        (
            product.function,
            [source.as_strided(*layout) for layout in product.operands],
            target.as_strided(*product.result),
        )
        for product in products
    ]
    started = time.perf_counter()
    for function, operands, result in calls:
        function(*operands, out=result)
    return time.perf_counter() - started


def _extent(layout: Layout) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))

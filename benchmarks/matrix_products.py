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
    """One matrix product: which, and its operands' and its result's layout."""

    function: Callable[..., Tensor]
    operands: tuple[Layout, ...]
    result: Layout
    dtype: torch.dtype

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
            product = Product(function=_PRODUCTS[func], operands=operands, result=_layout(result), dtype=result.dtype)
            self.products.append(product)
        return result


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


def seconds_of(products: Sequence[Product], device: torch.device) -> float:
    """How long the products take one after another, on operands and into results that exist already."""
    room = max(_extent(layout) for product in products for layout in (*product.operands, product.result))
    source = torch.randn(room, device=device) * 0.01
    sources = {dtype: source.to(dtype) for dtype in {product.dtype for product in products}}
    targets = {dtype: torch.empty_like(values) for dtype, values in sources.items()}
    calls = [
        (
            product.function,
            [sources[product.dtype].as_strided(*layout) for layout in product.operands],
            targets[product.dtype].as_strided(*product.result),
        )
        for product in products
    ]
    _wait(device)
    started = time.perf_counter()
    for function, operands, result in calls:
        function(*operands, out=result)
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _extent(layout: Layout) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))

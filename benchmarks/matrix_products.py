"""The lower bound of a training step: its matrix products alone, recorded from a real run and repeated by themselves.

Each product runs in the library that is faster for it, torch's own (MKL) or oneDNN. Must not know what is trained or
how.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm: torch.mm,
    torch.ops.aten.addmm: torch.addmm,
    torch.ops.aten.bmm: torch.bmm,
    torch.ops.aten.baddbmm: torch.baddbmm,
}
_TRIES = 3  # of a library for a product; the first one makes oneDNN's primitive

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a tensor
Call = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product: which, its factors (``alpha``, ``beta``), and its operands' and its result's layout."""

    function: Callable[..., Tensor]
    factors: tuple[tuple[str, float], ...]
    operands: tuple[Layout, ...]
    result: Layout
    dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Records every matrix product that torch runs inside the block, including those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {} if kwargs is None else kwargs
        result = func(*args, **named)
        function = _PRODUCTS.get(getattr(func, "overloadpacket", None))
        if function is not None:
            self.products.append(
                Product(
                    function=function,
                    factors=tuple((name, value) for name, value in named.items() if name in ("alpha", "beta")),
                    operands=tuple(_layout(arg) for arg in args if isinstance(arg, Tensor)),
                    result=_layout(result),
                    dtype=result.dtype,
                )
            )
        return result


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


class Products:
    """Recorded products on operands that exist already, each in its fastest library."""

    def __init__(self, products: Sequence[Product]) -> None:
        room = 0
        for product in products:
            room = max(room, *map(_extent, product.operands), _extent(product.result))
        source = torch.randn(room) * 0.01
        self._sources = {dtype: source.to(dtype) for dtype in {product.dtype for product in products}}
        self._targets = {dtype: torch.empty_like(values) for dtype, values in self._sources.items()}
        fastest = {product: self._fastest(product) for product in dict.fromkeys(products)}
        self._calls = [fastest[product] for product in products]

    def seconds(self) -> float:
        """Returns how long the products take one after another."""
        started = time.perf_counter()
        for call in self._calls:
            call()
        return time.perf_counter() - started

    def _fastest(self, product: Product) -> Call:
        """Returns a call of the product in the library that computes it faster."""
        operands = [self._sources[product.dtype].as_strided(*layout) for layout in product.operands]
        result = self._targets[product.dtype].as_strided(*product.result)
        calls: list[Call] = [partial(product.function, *operands, out=result, **dict(product.factors))]
        if product.function in (torch.mm, torch.addmm):
            *bias, rows, weight = operands
            added = bias[0] if bias else None
            with suppress(AttributeError):  # another version of torch
                in_onednn = torch.ops.mkldnn._linear_pointwise
                calls.append(partial(in_onednn, rows, weight.t(), added, "none", [], None))
        return min(calls, key=_seconds_of)


def _seconds_of(call: Call) -> float:
    """Returns the seconds of the fastest of a few calls."""
    times = []
    for _ in range(_TRIES):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def _extent(layout: Layout) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))

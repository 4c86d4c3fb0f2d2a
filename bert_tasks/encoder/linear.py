"""The encoder's linear layers and activations: the one place that chooses the library of a matrix product.

``F.linear`` takes MKL, whose code for processors of other makers than Intel stops at AVX2. oneDNN, which torch carries
too, uses AVX-512 there and is about twice as fast, with the same rounding error. ``environment.matmul_library`` decides
for float32 on the CPU. All else (other devices and types, autocast, export, torch.compile) takes ``F.linear``.

Shape legend: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.jit._trace import is_tracing
from torch.nn import functional as F

from bert_tasks.encoder.config import Activation
from bert_tasks.environment import matmul_library

# ``gelu`` is the exact (erf) form, ``gelu_new`` the tanh approximation that ALBERT was trained with.
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "relu": F.relu, "tanh": torch.tanh}
)
# Those that oneDNN applies to a product: its name and its form.
_FUSED: Mapping[Activation, tuple[str, str]] = MappingProxyType(
    {"gelu": ("gelu", "none"), "gelu_new": ("gelu", "tanh")}
)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``, as ``F.linear`` computes it.

    Args:
        rows: ``[..., I]``.
        weight: ``[O, I]``.
        bias: ``[O]``.

    Returns:
        ``[..., O]``.
    """
    return _onednn(rows, weight, bias) if _takes_onednn(rows, weight) else F.linear(rows, weight, bias)


class Linear(nn.Linear):
    """``nn.Linear`` whose product goes through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def activated(layer: nn.Module, rows: Tensor, activation: Activation) -> Tensor:
    """``activation(layer(rows))``; without gradients GELU is part of oneDNN's product, which saves a pass over memory.

    Args:
        layer: a ``Linear``, or what a library has put in its place.
        rows: ``[..., I]``.
        activation: a name of ``ACTIVATIONS``.

    Returns:
        ``[..., O]``.
    """
    is_fused = activation in _FUSED and not torch.is_grad_enabled()
    is_fused = is_fused and not layer._forward_hooks and not layer._forward_pre_hooks  # they are given the product
    if is_fused and type(layer) is Linear and _takes_onednn(rows, layer.weight):
        return _product(rows, layer.weight, layer.bias, *_FUSED[activation])
    return ACTIVATIONS[activation](layer(rows))


def _takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or is_tracing():  # type: ignore[no-untyped-call]  # torch
        return False
    is_float32 = rows.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_float32 and rows.device.type == "cpu" and rows.dim() > 1 and matmul_library() == "onednn"


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", form: str | None = None
) -> Tensor:
    """``[..., I], [O, I] -> [..., O]`` by oneDNN, which takes transposed views as well."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], form)
    return product


class _OneDNN(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        flat = gradient.flatten(0, -2)  # [N, O]
        return (
            _product(gradient, weight.t(), None) if of_rows else None,
            _product(flat.t(), rows.flatten(0, -2).t(), None) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


_onednn: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _OneDNN.apply

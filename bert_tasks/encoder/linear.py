"""The encoder's linear layers and activations: the one place that chooses the library of a matrix product.

``F.linear`` takes MKL, whose code for processors of other makers than Intel stops at AVX2. oneDNN, which torch carries
too, uses AVX-512 there and is up to twice as fast, with the same rounding error. ``environment.matmul_library`` decides
for float32 on the CPU. All else (other devices and types, export, torch.compile) takes ``F.linear``.

Under bfloat16 autocast on the CPU every product is oneDNN's, and two costs come close to that of the products. oneDNN
compiles code for each number of rows, which takes longer than running it: rows are cut into blocks of few sizes
(``_blocks``). And weights are converted: while ``constant_weights`` is open, each is converted once. The copies belong
to the open context and to no parameter, because optimizers change parameters without telling.

Shape legend: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
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
# Rows of a product in bfloat16: of a block, and what the rows of the last block are padded to a multiple of. With AMX
# there are fewer sizes, because compiling for one more takes many times as long as the product.
_BLOCK, _MULTIPLE = 512, 128 if torch.cpu.get_capabilities().get("amx_bf16") else 64
# id of a parameter -> its copy in bfloat16; None while weights may change.
_COPIES: ContextVar[dict[int, Tensor] | None] = ContextVar("_COPIES", default=None)
_copying = Lock()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``, as ``F.linear`` computes it.

    Args:
        rows: ``[..., I]``.
        weight: ``[O, I]``.
        bias: ``[O]``.

    Returns:
        ``[..., O]``.
    """
    if _takes_onednn(rows, weight):
        return _onednn(rows, weight, bias)
    if _takes_bfloat16(rows, weight):
        return _bfloat16(rows.bfloat16(), weight, bias, _bfloat16_copy(weight))
    return F.linear(rows, weight, bias)


@contextmanager
def constant_weights() -> Iterator[None]:
    """While this context is open, weights do not change, so that each is converted to bfloat16 once."""
    token = _COPIES.set({})
    try:
        yield
    finally:
        _COPIES.reset(token)


class Linear(nn.Linear):
    """``nn.Linear`` whose product goes through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def parts(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The outputs in parts, each of other rows.

        Args:
            inputs: for each part ``[N, I]``; each N may differ.
            sizes: outputs of each part, O in all.
        """
        # The gradient of a split is one concatenation, that of a slice is as large as the whole.
        weights, biases = torch.split(self.weight, list(sizes)), torch.split(self.bias, list(sizes))
        return [linear(rows, weight, bias) for rows, weight, bias in zip(inputs, weights, biases, strict=True)]


def linear_activation(layer: nn.Module, rows: Tensor, activation: Activation) -> Tensor:
    """``activation(layer(rows))``; without gradients GELU is part of oneDNN's product, or overwrites the product.

    Args:
        layer: a ``Linear``, or what a library has put in its place.
        rows: ``[..., I]``.
        activation: a name of ``ACTIVATIONS``.

    Returns:
        ``[..., O]``.
    """
    is_seen = bool(layer._forward_hooks or layer._forward_pre_hooks)  # by hooks, which are given the product
    if activation in _FUSED and type(layer) is Linear and not (torch.is_grad_enabled() or is_seen):
        name, form = _FUSED[activation]
        if _takes_onednn(rows, layer.weight):
            return _product(rows, layer.weight, layer.bias, name, form)
        if is_eager_on_cpu(rows):
            in_place: Tensor = torch.ops.aten.gelu_(layer(rows), approximate=form)
            return in_place
    return ACTIVATIONS[activation](layer(rows))


def _takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    is_float32 = rows.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    is_empty = 0 in (rows.numel(), weight.numel())  # oneDNN refuses products over nothing, here or in the gradient
    return is_float32 and not is_empty and is_eager_on_cpu(rows) and matmul_library() == "onednn"


def _takes_bfloat16(rows: Tensor, weight: Tensor) -> bool:
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return False
    is_cast = {rows.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
    return is_cast and is_eager_on_cpu(rows) and rows.numel() > 0


def is_eager_on_cpu(rows: Tensor) -> bool:
    """Whether the rows, a matrix on the CPU, are computed now, and neither traced nor compiled."""
    is_traced = torch.compiler.is_compiling() or is_tracing()  # type: ignore[no-untyped-call]  # torch
    return rows.device.type == "cpu" and rows.dim() > 1 and not is_traced


@torch.no_grad()
def _bfloat16_copy(weight: Tensor) -> Tensor:
    copies = _COPIES.get()
    if copies is None or not isinstance(weight, nn.Parameter):  # which lives longer than the context
        return weight.bfloat16()
    with _copying:  # batches that are computed at the same time need the same copies
        copy = copies.get(id(weight))
        if copy is None:
            copy = weight.bfloat16()
            copies.update({id(weight): copy})
        return copy


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
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)  # a frozen layer keeps no rows
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
            _weight_gradient(flat, rows.flatten(0, -2)) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """``[N, O], [N, I] -> [O, I]`` by oneDNN.

    The operator copies its first matrix where that is a transposed view, which takes up to a third of a product's time.
    So the first one is the gradient, or the rows, whose product is transposed: whichever copies less.
    """
    (count, outputs), inputs = gradient.shape, rows.shape[1]
    if count * outputs <= (count + outputs) * inputs:
        return _product(gradient.t(), rows.t(), None)
    return _product(rows.t(), gradient.t(), None).t()


_onednn: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _OneDNN.apply


class _BFloat16(torch.autograd.Function):
    """A linear layer whose three products are computed in bfloat16; the gradients of weight and bias keep their type.

    ``copy`` is the weight in the products. The weight itself is there for its gradient, summed over blocks in its type.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, copy)
        return _block_product(_blocks(rows), copy.t(), None if bias is None else bias.bfloat16(), rows.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight, copy = ctx.saved_tensors
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        blocks, weight_gradient = tuple(_blocks(gradient)), None
        if of_weight:
            products = (left.t() @ right for left, right in zip(blocks, _blocks(rows), strict=True))
            weight_gradient = next(products).to(weight.dtype)
            for product in products:
                weight_gradient += product
        return (
            _block_product(blocks, copy, None, gradient.shape[:-1]) if of_rows else None,
            weight_gradient,
            gradient.flatten(0, -2).sum(0).to(weight.dtype) if of_bias else None,
            None,
        )


def _block_product(blocks: Iterable[Tensor], matrix: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """Blocks of ``[..., I]``, ``[I, O] -> [..., O]``; ``shape``: the dimensions before O."""
    outputs, count = matrix.shape[1], shape.numel()
    product = matrix.new_empty(count + -count % _MULTIPLE, outputs)
    for block, out in zip(blocks, torch.split(product, _BLOCK), strict=True):
        if bias is None:
            torch.mm(block, matrix, out=out)
        else:
            torch.addmm(bias, block, matrix, out=out)
    return product[:count].view(*shape, outputs)


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Blocks of ``[..., I]``: ``[512, I]``, and a last one that is padded to a multiple of 64 rows, or of 128 with AMX.

    So the products of a layer have few shapes, whatever the lengths of the data.
    """
    *whole, last = torch.split(rows.flatten(0, -2), _BLOCK)
    yield from whole
    yield F.pad(last, (0, 0, 0, -len(last) % _MULTIPLE))


_bfloat16: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] = _BFloat16.apply

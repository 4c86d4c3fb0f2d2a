"""The linear layers of an encoder in int8, for prediction on a CPU.

Products of 8-bit integers are faster than those of float32 numbers on processors with VNNI or AMX. Embeddings, norms,
the products of queries, keys and values, softmax, residuals and heads stay in float32.

**Weights** are rounded to -127 to 127, with one scale for each output.

**Activations** are rounded to 0 to 255. Their scales are fixed, so the predictions of a row do not depend on the rows
around it. They follow from the lowest and the highest value of each input, which ``record_ranges`` finds for some
texts. Where activations are float32, each input has its own scale, and a part of it is moved into the weights, which
are rounded, too (SmoothQuant, Xiao et al. 2022, https://arxiv.org/abs/2211.10438).

**GELU** is computed by the operator of the first feed-forward product, which writes the rounded inputs of the second
with one scale for all. A few of these inputs are many times as large as the others, and the scale would be too coarse
for the rest. So they are computed in float32 (LLM.int8, Dettmers et al. 2022, https://arxiv.org/abs/2208.07339).

Shape legend: N rows, I inputs, O outputs, K inputs in float32.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from bert_tasks.encoder.cpu import gelu_linear_on_cpu, processor
from bert_tasks.encoder.layers import Layer, TransformerEncoder
from bert_tasks.encoder.linear import GELU_FORMS, Linear, linear
from bert_tasks.errors import NotFiniteScoresError
from bert_tasks.variables import limit_primitive_caches

_LARGEST_WEIGHT, _LARGEST_CODE = 127, 255
_MIDDLE = 128  # stands for the middle of the range of an input
_BALANCE = 0.7  # 1 moves all of a scale into the weights, 0 nothing. Both cost labels, see benchmarks/LOG.md
_FLOAT32_SHARE = 96  # one of so many inputs of the second feed-forward product stays in float32
_FLOAT32_OUTPUT = (1.0, 0, torch.float32)  # scale, zero and type
_TINY = 1e-5  # in place of 0, so that nothing is divided by it


@cache
def int8_obstacle() -> str | None:
    """Returns why this machine does not compute in int8, or None if it does.

    The first call limits oneDNN's caches.
    """
    capabilities = processor()
    if not capabilities:
        return f"it needs torch 2.11 or newer, and this is torch {torch.__version__}"
    if not any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
        return "this processor lacks the instructions for it (VNNI, AMX)"
    limit_primitive_caches()
    size = 64
    codes = torch.full((size, size), _LARGEST_CODE, dtype=torch.uint8)
    try:
        product = _Product(torch.ones(size, size), torch.zeros(size), scale=1.0, zero=0)(codes)
    except (AttributeError, NotImplementedError, RuntimeError):  # another version of torch, or one without oneDNN
        return f"torch {torch.__version__} lacks the operators for it"
    # Without the instructions oneDNN adds in 16 bits, where two of the largest products are too much.
    if not torch.allclose(product, torch.full_like(product, float(_LARGEST_CODE * size))):
        return "oneDNN does not use the instructions for it (VNNI, AMX). Unset ONEDNN_MAX_CPU_ISA"
    return None


@contextmanager
def record_ranges(encoder: TransformerEncoder) -> Iterator[dict[str, Tensor]]:
    """Records the inputs of all linear layers that ``int8_encoder`` replaces, in forward passes of all rows.

    Yields:
        The name of a layer -> ``[2, I]``, the lowest and the highest value of each input, which each pass extends.
    """
    ranges: dict[str, Tensor] = {}
    lock = Lock()  # two batches may run at the same time

    def record(module: nn.Module, inputs: tuple[Tensor, ...], *, name: str) -> None:
        rows = inputs[0].flatten(0, -2)
        extremes = torch.stack([rows.amin(0), rows.amax(0)])
        with lock:
            known = ranges.get(name)
            if known is not None:
                lowest, highest = torch.minimum(extremes[0], known[0]), torch.maximum(extremes[1], known[1])
                extremes = torch.stack([lowest, highest])
            ranges[name] = extremes

    handles = []
    for name, layer in _linear_layers(encoder):
        handles.append(layer.register_forward_pre_hook(partial(record, name=name)))
    try:
        yield ranges
    finally:
        for handle in handles:
            handle.remove()


def _linear_layers(encoder: TransformerEncoder) -> Iterator[tuple[str, Linear]]:
    """Yields the linear layers of attention and feed-forward with their names."""
    for index, layer in enumerate(encoder.layers):
        of_attention = (*cast("Layer", layer).attention.projections, "output")
        names = [*(f"attention.{name}" for name in of_attention), "intermediate", "output"]
        for name in names:
            module = layer.get_submodule(name)
            if isinstance(module, Linear):
                yield f"layers.{index}.{name}", module


def range_shapes(encoder: TransformerEncoder) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the ranges that ``int8_encoder`` needs, by the names of the layers."""
    return {name: (2, layer.in_features) for name, layer in _linear_layers(encoder)}


def int8_encoder(encoder: TransformerEncoder, ranges: Mapping[str, Tensor]) -> TransformerEncoder:
    """Returns a copy in evaluation mode whose linear layers are in int8.

    The copy shares the other weights. A forward pass raises NotFiniteScoresError for states that are not finite.

    Args:
        encoder: An encoder in float32 on the CPU.
        ranges: The result of ``record_ranges``.
    """
    # ``deepcopy`` takes the parameters that it finds here instead of copying them.
    shared: dict[int, Any] = {id(parameter): parameter for parameter in encoder.parameters()}
    quantized = copy.deepcopy(encoder, shared).eval()
    for index, layer in enumerate(cast("Iterable[Layer]", quantized.layers)):
        if not layer.is_gated and layer.activation in GELU_FORMS:
            of_layers = (ranges[f"layers.{index}.intermediate"], ranges[f"layers.{index}.output"])
            layer.int8_feed_forward = Int8FeedForward(layer, *of_layers)
            for name in ("intermediate", "output"):
                layer.set_submodule(name, nn.Identity())  # which frees the weights
        layer.register_forward_pre_hook(_check_states)
    for name, linear_layer in list(_linear_layers(quantized)):
        quantized.set_submodule(name, Int8Linear(linear_layer, ranges[name]))
    return quantized


def _check_states(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raises NotFiniteScoresError if a state is not finite, which rounding would turn into an ordinary number.

    States keep what is not finite in their residuals, so the states after the last layer need no check here.
    """
    if not inputs[0].sum().isfinite():  # much faster than a look at each number
        raise NotFiniteScoresError("the model's states are not finite numbers. Its weights or its precision are broken")


class _Product:
    """The product of inputs that are rounded to codes, and of a weight in int8.

    Args:
        weight: ``[O, I]``, the factors of the inputs ``(codes - zero) * scale``.
        bias: ``[O]``.
        scale, zero: Those of the codes.
    """

    def __init__(self, weight: Tensor, bias: Tensor, *, scale: float, zero: int) -> None:
        scales = weight.abs().amax(1).clamp_min(_TINY) / _LARGEST_WEIGHT  # [O]
        rounded = (weight / scales[:, None]).round()
        packed = torch.ops.onednn.qlinear_prepack(rounded.to(torch.int8).contiguous(), None)
        self._scale = scale
        self._weight = (packed, scales, torch.zeros(len(weight), dtype=torch.int32))
        # The part of the zero is the same for all rows, so it is subtracted once here, and the operator gets 0.
        self._bias = bias - scale * zero * scales * rounded.sum(1)

    def __call__(self, codes: Tensor) -> Tensor:
        """Computes ``[N, I]`` uint8 -> ``[N, O]`` float32."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, self._scale, 0, *self._weight, self._bias, *_FLOAT32_OUTPUT, "none", [], ""
        )
        return product

    def plus(self, codes: Tensor, added: Tensor) -> Tensor:
        """Computes the sum of the product and ``added``, ``[N, O]`` float32."""
        addition = (added, self._bias, *_FLOAT32_OUTPUT, 1.0, 0, "add", 1.0)
        total: Tensor = torch.ops.onednn.qlinear_pointwise.binary(
            codes, self._scale, 0, *self._weight, *addition, "none", [], ""
        )
        return total

    def gelu(self, codes: Tensor, *, form: str, scale: float, zero: int) -> Tensor:
        """Computes the GELU of the product as codes ``[N, O]`` uint8 with another scale and zero."""
        gelu: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, self._scale, 0, *self._weight, self._bias, scale, zero, torch.uint8, "gelu", [], form
        )
        return gelu


class Int8Linear(nn.Module):
    """A linear layer of float32 rows whose product is in int8.

    Args:
        layer: The layer in float32.
        ranges: ``[2, I]``, the lowest and the highest value of each input.

    Attributes:
        product: The product with ``codes``.
    """

    def __init__(self, layer: Linear, ranges: Tensor) -> None:
        super().__init__()
        self.out_features = layer.out_features
        weight = layer.weight.detach()
        middle = ranges.mean(0)  # [I]
        reach = ((ranges[1] - ranges[0]) / 2).clamp_min(_TINY)  # [I]
        largest_weights = weight.abs().amax(0).clamp_min(_TINY)  # [I]
        factors = reach**_BALANCE / largest_weights ** (1 - _BALANCE)  # [I]
        # An input is middle + (code - 128) * scale * factor. The weights take the factors, and the bias the middles.
        scale = float((reach / factors).max()) / _LARGEST_WEIGHT
        self._inverse = 1 / (scale * factors)  # [I]
        self._offset = _MIDDLE + 0.5 - middle * self._inverse  # [I], and 0.5 because a cast to integers rounds down
        self.product = _Product(weight * factors, _bias(layer) + weight @ middle, scale=scale, zero=_MIDDLE)

    def codes(self, rows: Tensor) -> Tensor:
        """Rounds ``[N, I]`` float32 to uint8."""
        codes = torch.addcmul(self._offset, rows, self._inverse).clamp_(0, _LARGEST_CODE)
        return codes.to(torch.int32).to(torch.uint8)  # one cast would take three times as long

    def forward(self, rows: Tensor) -> Tensor:
        return self.product(self.codes(rows))

    def parts(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See ``Linear.parts``. All outputs are computed, because the packed weight cannot be divided."""
        parts = []
        for number, rows in enumerate(inputs):
            outputs = self(rows).split(list(sizes), -1)
            parts.append(outputs[number])
        return parts


class Int8FeedForward(nn.Module):
    """Both linear layers of a feed-forward without a gate, and the GELU between them.

    Args:
        layer: The layer in float32.
        first_ranges, second_ranges: ``[2, I]``, the lowest and the highest value of each input of the linear layers.
    """

    def __init__(self, layer: Layer, first_ranges: Tensor, second_ranges: Tensor) -> None:
        super().__init__()
        first, second = layer.intermediate, layer.output
        lowest, highest = second_ranges
        # The inputs of the second layer that vary most, K of I.
        widest = (highest - lowest).topk(math.ceil(second.in_features / _FLOAT32_SHARE)).indices
        self._wide_weight = first.weight.detach().index_select(0, widest)  # [K, H]
        self._wide_bias = _bias(first).index_select(0, widest)
        self._second_wide_weight = second.weight.detach().index_select(1, widest)  # [H, K]
        is_other = torch.ones(second.in_features, dtype=torch.bool).index_fill(0, widest, False)
        low = min(0.0, float(lowest.masked_select(is_other).min()))
        high = max(_TINY, float(highest.masked_select(is_other).max()))
        scale = (high - low) / _LARGEST_CODE
        zero = round(-low / scale)
        self._first = Int8Linear(first, first_ranges)
        self._second = _Product(second.weight.detach() * is_other, _bias(second), scale=scale, zero=zero)
        self._form = GELU_FORMS[layer.activation]
        self._to_codes: dict[str, Any] = {"form": self._form, "scale": scale, "zero": zero}

    def forward(self, rows: Tensor) -> Tensor:
        """Computes ``[N, H] -> [N, H]``, both float32."""
        codes = self._first.codes(rows)
        inner = self._first.product.gelu(codes, **self._to_codes)  # [N, I] uint8
        wide = gelu_linear_on_cpu(rows, self._wide_weight, self._wide_bias, self._form)  # [N, K] float32
        of_wide = linear(wide, self._second_wide_weight, None)  # [N, H]
        return self._second.plus(inner, of_wide)


def _bias(layer: Linear) -> Tensor:
    """Returns ``[O]``, zeros if the layer has no bias."""
    if layer.bias is None:
        return layer.weight.new_zeros(layer.out_features)
    return layer.bias.detach()

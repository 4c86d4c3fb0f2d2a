"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) in an encoder.

An adapter adds ``alpha / rank * B A dropout(x)`` to a frozen linear layer. Queries, keys and values are one layer here,
but each of them has a separate adapter, so that results equal the library peft's on transformers' three layers. An
encoder has its adapters only while they are ``attached``. Otherwise it has the ordinary modules, whose weights
``merge`` sets to the sum of both, so that evaluation, saving and export know nothing of adapters.

Shape legend: N rows, I inputs, O outputs of a layer or of one of its blocks, R rank, H hidden.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_tasks.encoder.config import LoraTarget
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.layers import Layer, TransformerEncoder
from bert_tasks.encoder.linear import Linear, linear


class LoraLinear(Linear):
    """A linear layer with adapters that shares the weight and bias of ``layer``.

    Args:
        layer: The layer without adapters.
        blocks: Maps a name to the outputs that an adapter changes.
        rank: R.
        alpha: The factor of the change is ``alpha / rank``.
        dropout: Probability of dropping an input of an adapter. Each adapter draws a separate mask.
        generator: Generator on the CPU that draws A.

    Attributes:
        lora_A: Maps a block to ``[R, I]``, drawn as peft draws it.
        lora_B: Maps a block to ``[O, R]``, 0 at first, so that the output of the layer does not change.
    """

    def __init__(
        self,
        layer: Linear,
        blocks: Mapping[str, range],
        *,
        rank: int,
        alpha: float,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make weights
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.blocks, self.scale, self.dropout = blocks, alpha / rank, Dropout(dropout)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name, block in blocks.items():
            drawn = nn.init.kaiming_uniform_(torch.empty(rank, layer.in_features), math.sqrt(5), generator=generator)
            self.lora_A[name] = nn.Parameter(drawn.to(layer.weight))
            self.lora_B[name] = nn.Parameter(layer.weight.new_zeros(len(block), rank))

    def forward(self, input: Tensor) -> Tensor:
        return self._with_change(super().forward(input), input, range(self.out_features))

    def parts(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        ends = accumulate(sizes)
        outputs = []
        for output, rows, size, end in zip(super().parts(inputs, sizes), inputs, sizes, ends, strict=True):
            outputs.append(self._with_change(output, rows, range(end - size, end)))
        return outputs

    def merged(self) -> Tensor:
        """Returns ``[O, I]``, the weight with the adapters' change, in float32 at least."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        whole = self.weight.to(dtype, copy=True)
        for block, lora_a, lora_b in self.adapters():
            change = lora_b.to(dtype) @ lora_a.to(dtype)  # [O, I]
            whole.narrow(0, block.start, len(block)).add_(change, alpha=self.scale)
        return whole.to(self.weight.dtype)

    def adapters(self) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Yields block, A and B of each adapter."""
        yield from zip(self.blocks.values(), self.lora_A.values(), self.lora_B.values(), strict=True)

    def _with_change(self, output: Tensor, rows: Tensor, outputs: range) -> Tensor:
        """Returns ``[N, O]``, some outputs of the layer with the adapters' changes.

        One product with all matrices B side by side, 0 outside their blocks, computes the changes.
        """
        compact, expanding = [], []
        for block, lora_a, lora_b in self.adapters():
            if block.start in outputs:
                compact.append(linear(self.dropout(rows), lora_a, None))  # [N, R]
                padding = (0, 0, block.start - outputs.start, outputs.stop - block.stop)
                expanding.append(F.pad(lora_b, padding))  # [O, R]
        if not compact:
            return output
        return output + linear(torch.cat(compact, dim=-1) * self.scale, torch.cat(expanding, dim=1), None)


@dataclass(frozen=True, kw_only=True)
class _AdaptedLayer:
    """A layer whose ``parent.name`` is ``adapted`` when attached, else ``plain``."""

    parent: nn.Module
    name: str
    plain: Linear
    adapted: LoraLinear


class BlockMatrices(NamedTuple):
    """An adapter's outputs, A ``[R, I]`` and B ``[O, R]``, as copies on the CPU."""

    outputs: range
    lora_a: Tensor
    lora_b: Tensor


class LayerMatrices(NamedTuple):
    """The number of outputs of a layer, and its adapters."""

    outputs: int
    blocks: tuple[BlockMatrices, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterWeights:
    """The adapters of an encoder at one step, by weight without the prefix "encoder."."""

    rank: int
    alpha: float
    dropout: float
    matrices: Mapping[str, LayerMatrices]


class Adapters:
    """The adapters of an encoder.

    They share the encoder's weights. While they are not attached, the encoder has its original weights, or after
    ``merge`` the weights with the adapters' changes.

    Args:
        encoder: The encoder, on its device.
        rank, alpha, dropout: See ``LoraLinear``.
        targets: Names of the layers that have adapters, in every layer of the encoder.
        seed: Seed of the matrices A.
    """

    def __init__(
        self,
        encoder: TransformerEncoder,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        targets: Sequence[LoraTarget],
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._settings: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout}
        self._names = {module: name for name, module in encoder.named_modules()}
        self._layers: list[_AdaptedLayer] = []
        for layer in cast("Iterable[Layer]", encoder.layers):
            for parent, name, blocks in _targets(layer, targets):
                plain: Linear = getattr(parent, name)
                adapted = LoraLinear(plain, blocks, rank=rank, alpha=alpha, dropout=dropout, generator=generator)
                self._layers.append(_AdaptedLayer(parent=parent, name=name, plain=plain, adapted=adapted))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attaches the adapters to the encoder with its original weights, to train them."""
        for layer in self._layers:
            setattr(layer.parent, layer.name, layer.adapted)
        try:
            yield
        finally:
            for layer in self._layers:
                setattr(layer.parent, layer.name, layer.plain)

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the adapters' changes to the encoder's weights, and stores the originals."""
        for layer in self._layers:
            layer.plain.weight = nn.Parameter(layer.adapted.merged(), requires_grad=False)

    def weights(self) -> AdapterWeights:
        """Returns copies of the adapters."""
        matrices: dict[str, LayerMatrices] = {}
        for layer in self._layers:
            blocks = []
            for outputs, *pair in layer.adapted.adapters():
                lora_a, lora_b = [matrix.detach().to("cpu", copy=True) for matrix in pair]
                blocks.append(BlockMatrices(outputs, lora_a, lora_b))
            name = f"{self._names.get(layer.plain)}.weight"
            matrices[name] = LayerMatrices(layer.plain.out_features, tuple(blocks))
        return AdapterWeights(**self._settings, matrices=matrices)

    def remove(self) -> None:
        """Restores the encoder's original weights and frees the merged weights."""
        for layer in self._layers:
            layer.plain.weight = layer.adapted.weight


def _targets(layer: Layer, targets: Sequence[LoraTarget]) -> Iterator[tuple[nn.Module, str, dict[str, range]]]:
    """Yields module, attribute name and adapters of the adapted linear layers."""
    attention, width = layer.attention, layer.output.out_features
    for module, names in attention.projections.items():
        size = getattr(attention, module).out_features // len(names)
        blocks: dict[str, range] = {}
        for i, name in enumerate(names):
            if name in targets:
                blocks[name] = range(i * size, (i + 1) * size)
        if blocks:
            yield attention, module, blocks
    if "attention_output" in targets:
        yield attention, "output", {"attention_output": range(width)}
    if "intermediate" in targets:
        yield layer, "intermediate", {"intermediate": range(layer.intermediate.out_features)}
    if "output" in targets:
        yield layer, "output", {"output": range(width)}

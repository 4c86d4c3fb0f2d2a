"""The encoder's linear layers and activations.

On a CPU ``encoder/cpu.py`` computes their products. Other devices, export and torch.compile use ``F.linear``.

Shape legend: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_tasks.encoder.config import Activation
from bert_tasks.encoder.cpu import gelu_linear_on_cpu, is_eager_on_cpu, linear_on_cpu

# ``gelu`` is the exact (erf) form, ``gelu_new`` the tanh approximation that ALBERT was trained with.
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
    }
)
# The form of each GELU, as torch names it.
GELU_FORMS: Mapping[Activation, str] = MappingProxyType({"gelu": "none", "gelu_new": "tanh"})


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``rows @ weight.T + bias`` as ``F.linear`` does, on a CPU with the library that is fastest there.

    Args:
        rows: ``[..., I]``.
        weight: ``[O, I]``.
        bias: ``[O]``, or None.

    Returns:
        ``[..., O]``.
    """
    if is_eager_on_cpu(rows):
        return linear_on_cpu(rows, weight, bias)
    return F.linear(rows, weight, bias)


class Linear(nn.Linear):
    """``nn.Linear`` whose product goes through ``linear``.

    It stays a subclass, so that peft, export and torch's quantization find it.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def parts(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Returns the outputs in parts, each for other rows, for example queries of fewer tokens than keys.

        Args:
            inputs: ``[N, I]`` for each part. N may differ.
            sizes: Number of outputs of each part, O in all.
        """
        # The gradient of a split is one concatenation, the gradient of a slice is as large as the whole.
        weights = torch.split(self.weight, list(sizes))
        biases: Sequence[Tensor | None] = [None] * len(weights)
        if self.bias is not None:
            biases = torch.split(self.bias, list(sizes))
        return [linear(rows, weight, bias) for rows, weight, bias in zip(inputs, weights, biases, strict=True)]


def linear_activation(layer: nn.Module, rows: Tensor, activation: Activation) -> Tensor:
    """Computes ``activation(layer(rows))``, on a CPU without gradients as one operation for GELU.

    Args:
        layer: A ``Linear``, or the module with which a library replaced it.
        rows: ``[..., I]``.
        activation: A name of ``ACTIVATIONS``.

    Returns:
        ``[..., O]``.
    """
    # Gradients need the product before the activation, and hooks receive it, so it must exist.
    needs_product = torch.is_grad_enabled() or layer._forward_hooks or layer._forward_pre_hooks
    if activation in GELU_FORMS and type(layer) is Linear and is_eager_on_cpu(rows) and not needs_product:
        return gelu_linear_on_cpu(rows, layer.weight, layer.bias, GELU_FORMS[activation])
    return ACTIVATIONS[activation](layer(rows))

"""AdamW as BERT is fine-tuned with it: parameter groups, freezing, clipping of summed gradients.

Owns which parameter gets which learning rate and weight decay. Must not know about data, steps or processes;
a model says through ``parameter_depths`` where in the network a parameter stands.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert_tasks.errors import UsageError


class LayeredModel(Protocol):
    """An ``nn.Module`` that knows its depths: 0 embeddings, 1 to n the layers, n + 1 the head.

    A parameter that several layers share has the depth of the last of them.
    """

    def parameter_depths(self) -> dict[str, int]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def modules(self) -> Iterator[nn.Module]: ...


def parameter_groups(
    model: LayeredModel,
    *,
    learning_rate: float,
    weight_decay: float,
    head_learning_rate: float | None = None,
    layerwise_lr_decay: float | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters in groups of equal learning rate and weight decay.

    The rate falls by the factor ``layerwise_lr_decay`` with each step down from the head, whose own rate
    ``head_learning_rate`` replaces. Biases and layer norms do not decay.
    """
    depths = model.parameter_depths()
    top = max(depths.values())
    undecayed = _undecayed(model)
    factor = 1.0 if layerwise_lr_decay is None else layerwise_lr_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = learning_rate * factor ** (top - depths[name])
        if head_learning_rate is not None and depths[name] == top:
            rate = head_learning_rate
        decay = 0.0 if id(parameter) in undecayed else weight_decay
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items()]


def build_optimizer(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW, bias correction included, over groups that bring their own rates and decays."""
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=fused)


def clip_and_scale(parameters: Iterable[nn.Parameter], *, factor: Tensor, max_norm: float | None) -> Tensor:
    """Scale summed gradients by ``factor``, then down to ``max_norm`` if their global norm exceeds it.

    Both happen in one multiplication, and nothing waits for the device.

    Args:
        parameters: those without a gradient are left alone.
        factor: 0-dimensional, positive, on the gradients' device: one over the global count of labels.
        max_norm: None clips nothing.

    Returns:
        The norm after ``factor`` and before clipping; not finite if a gradient is not.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return factor.new_zeros(())
    norms = torch.stack(torch._foreach_norm(gradients))
    scale = factor.to(norms.dtype)
    norm: Tensor = torch.linalg.vector_norm(norms) * scale
    if max_norm is not None:
        scale = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm


def freeze(model: LayeredModel, *, embeddings: bool, layers: int) -> None:
    """Stop the embeddings or the first ``layers`` layers from being trained.

    Raises:
        UsageError: the model has fewer layers, or the last of these shares its weights with a later one.
    """
    depths = model.parameter_depths()
    ends = sorted(set(depths.values()) - {0, max(depths.values())})
    if layers != 0 and layers not in ends:
        choices = ", ".join(str(end) for end in ends)
        raise UsageError(
            f"Freezing the first {layers} layers: expected 0 or one of {choices} (shared layers go together)."
        )
    for name, parameter in model.named_parameters():
        if (embeddings and depths[name] == 0) or 1 <= depths[name] <= layers:
            parameter.requires_grad_(False)


def _undecayed(model: LayeredModel) -> set[int]:
    """Biases and layer-norm parameters, found by their modules: families name them differently."""
    return {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or parameter is getattr(module, "bias", None)
    }

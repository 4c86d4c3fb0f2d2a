"""A device other than the CPU: torch's ``meta``, whose tensors have shapes and no numbers.

An operation whose shape depends on numbers of the device is an error there. ``NoWaiting`` refuses the other operations
after which the host would wait for a GPU, and those on tensors of two devices.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert_tasks.training.optim import set_sparse_gradients
from bert_tasks.training.step import OptimizerSteps

META = torch.device("meta")


class NoWaiting(TorchDispatchMode):
    """Copies from the device to the host give zeros, and are errors where the host would wait for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device) != args[0].device:
            assert kwargs.get("non_blocking"), "the host waits for a copy"
            if args[0].device == META:
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
        if func is torch.ops.aten.copy_.default:
            assert args[0].device == args[1].device or any(args[2:]), "the host waits for a copy"
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        assert len({tensor.device for tensor in tensors}) <= 1, f"{func}: tensors on the host and on the device"
        return func(*args, **kwargs)


@contextmanager
def on_meta_device(steps: OptimizerSteps, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Moves the objective to the device, and follows what the context runs."""
    monkeypatch.setattr(steps.accelerator.state, "device", META)
    fused = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(fused, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # which it does not have
    before = list(steps.optimizer.wrapped_objective.parameters())
    steps.optimizer.wrapped_objective.to(META)
    set_sparse_gradients(steps.objective, False)  # as steps that are made on a device have them
    moved = dict(zip(before, steps.optimizer.wrapped_objective.parameters(), strict=True))
    vocabulary = steps.optimizer.vocabulary
    if vocabulary is not None:
        weight = torch.nn.Parameter(vocabulary.weight.to(META))
        moved |= {vocabulary.weight: weight}
        vocabulary.weight, vocabulary._places = weight, vocabulary._places.to(META)
    for group in steps.optimizer.accelerated.param_groups:
        group["params"] = [moved[parameter] for parameter in group["params"]]
    with NoWaiting():
        yield

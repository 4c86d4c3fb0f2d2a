"""Low-rank adapters in folders of the library peft, for writing and loading.

This module owns the names of the adapters' tensors, and adds them to the weights of their base on loading, so that the
rest of the package never sees a file of adapters. The format is documented at https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_tasks.checkpoints.adapter_config import (
    TASK_TYPES,
    base_folder,
    has_only_adapters,
    is_adapter,
    read_adapter_config,
)
from bert_tasks.checkpoints.files import checked_file, refuse
from bert_tasks.checkpoints.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, resolve
from bert_tasks.checkpoints.load import module_tensors, read_safetensors, read_weights
from bert_tasks.encoder.lora import AdapterWeights
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families.base import Family

_PREFIX = "base_model.model."
_LORA_A, _LORA_B = ".lora_A.weight", ".lora_B.weight"


def adapter_folder(name: str | Path, base: Path) -> Path:
    """Returns the folder of adapters for a base that the caller names.

    Raises:
        CheckpointError: The folder has no adapters.
        UsageError: The base is a folder of adapters, too.
    """
    if has_only_adapters(base):
        raise UsageError(f"{base} has adapters, too. Name the model that they were trained on, or no other adapters")
    folder = resolve(name)
    if not is_adapter(folder):
        raise CheckpointError(f"{name}: no {ADAPTER_CONFIG}. Name a folder of adapters, such as RUN/adapter")
    return folder


def model_weights(folder: Path, family: Family, base: Path | None = None) -> dict[str, Tensor]:
    """Returns the weights of a model's folder, or of an adapted base for adapters.

    Args:
        folder: The folder.
        family: Family of the model. Weights have the names of its modules in transformers.
        base: Base of the adapters. Default: the model that their configuration names.

    Raises:
        CheckpointError: A file is missing or damaged, or the adapters belong to another model.
    """
    if base is not None:
        return with_adapters(model_weights(base, family), folder, str(base))
    if not has_only_adapters(folder):
        return module_tensors(read_weights(folder), family)
    name = read_adapter_config(folder).base
    base_tensors = read_weights(base_folder(folder, name))
    return with_adapters(module_tensors(base_tensors, family), folder, name)


def with_adapters(weights: Mapping[str, Tensor], folder: Path, base: str) -> dict[str, Tensor]:
    """Returns the weights of a base with a folder's adapters and stored modules.

    Raises:
        CheckpointError: The adapters belong to another model, or a file is damaged.
    """
    config = read_adapter_config(folder)
    path = checked_file(folder, ADAPTER_WEIGHTS)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_safetensors(path).items()}
    merged = dict(weights)
    for module, (lora_a, lora_b) in _matrices(path, tensors).items():
        target = _key_of(f"{module}.weight", weights)
        if target is None or not _fit(lora_a, lora_b, weights[target]):
            refuse(path, f"{module}{_LORA_A} fits no weight of {base}, so it belongs to another model")
        rank = config.rank_of(module)
        if rank != len(lora_a):
            refuse(path, f"{module}{_LORA_A} has rank {len(lora_a)}, but {ADAPTER_CONFIG} says {rank}")
        whole = weights[target]
        # In float32, because the sum of products in half precision would lose digits before the result is rounded.
        change = config.scale_of(module) * (lora_b.float() @ lora_a.float())
        merged[target] = (whole.float() + change).to(whole.dtype)
    # peft stores the modules that were trained as a whole, such as a new head, beside the adapters. They replace those
    # of the base.
    for name, tensor in tensors.items():
        if name.endswith((_LORA_A, _LORA_B)):
            continue
        key = _key_of(name, weights)
        if key is None:
            key = name
        merged[key] = tensor
    return merged


def _matrices(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the name of each adapted module -> A and B.

    Raises:
        CheckpointError: There are none, a half is missing, or a matrix has no real numbers.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.endswith((_LORA_A, _LORA_B)):
            continue
        if not tensor.is_floating_point():
            refuse(path, f"{name} has dtype {tensor.dtype}, expected floating point numbers")
        module = name.removesuffix(_LORA_A).removesuffix(_LORA_B)
        lora_a, lora_b = module + _LORA_A, module + _LORA_B
        for half in (lora_a, lora_b):
            if half not in tensors:
                refuse(path, f"{name} is there, but {half} is missing. The file is incomplete. Save it again")
        pairs[module] = tensors[lora_a], tensors[lora_b]
    if not pairs:
        refuse(path, "it has no adapters, which would be called ...lora_A.weight and ...lora_B.weight")
    return pairs


def _fit(lora_a: Tensor, lora_b: Tensor, weight: Tensor) -> bool:
    """Returns True if B A has the shape of a weight."""
    are_matrices = lora_a.dim() == lora_b.dim() == 2 and len(lora_a) == lora_b.shape[1]
    return are_matrices and (len(lora_b), lora_a.shape[1]) == tuple(weight.shape)


def _key_of(name: str, weights: Mapping[str, Tensor]) -> str | None:
    """Returns the key of a parameter in a file with or without the family's prefix."""
    # A base model's file has no prefix such as "bert.", but adapters of a model with a head have it.
    for key in (name, name.partition(".")[2]):
        if key in weights:
            return key
    for key in weights:
        if key.partition(".")[2] == name:
            return key
    return None


def adapter_files(
    adapters: AdapterWeights,
    names: Mapping[str, tuple[str, ...]],
    head: Mapping[str, Tensor],
    *,
    prefix: str,
    head_kind: str,
    base: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the configuration and the tensors of a folder of peft.

    Args:
        adapters: The adapters.
        names: Parameter -> the names of its sources in transformers.
        head: The weights of the head, by the names of transformers.
        prefix: Prefix of the encoder's names in transformers.
        head_kind: Head of transformers.
        base: Name of the model that the adapters belong to.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for parameter, matrices in adapters.matrices.items():
        size = matrices.outputs // len(names[parameter])
        for number, name in enumerate(names[parameter]):
            start, end = number * size, (number + 1) * size
            blocks = [block for block in matrices.blocks if block.outputs.start < end and block.outputs.stop > start]
            if not blocks:
                continue
            # If transformers has one layer for several of ours, its adapter has the matrices B in blocks. If it
            # has several layers for one of ours, each layer has a piece of B.
            whole = torch.zeros(matrices.outputs, sum(len(block.lora_a) for block in blocks))
            column = 0
            for block in blocks:
                rows_of_block = whole.narrow(0, block.outputs.start, len(block.outputs))
                rows_of_block.narrow(1, column, len(block.lora_a)).copy_(block.lora_b)
                column += len(block.lora_a)
            lora_b = whole.narrow(0, start, size).contiguous()
            module = name.removesuffix(".weight")
            ranks[module] = column
            tensors[_PREFIX + module + _LORA_A] = torch.cat([block.lora_a for block in blocks])
            tensors[_PREFIX + module + _LORA_B] = lora_b
    # The file states one rank for all modules and the exceptions as patterns. A module that several blocks change has
    # the sum of their ranks. peft divides alpha by R, so alpha is larger there, too, and the scale is the same.
    usual, _ = Counter(ranks.values()).most_common(1)[0]
    scale = adapters.alpha / adapters.rank
    unusual = {module: rank for module, rank in ranks.items() if rank != usual}
    config = {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(head_kind),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": scale * usual,
        "lora_dropout": adapters.dropout,
        "rank_pattern": unusual,
        "alpha_pattern": {module: scale * rank for module, rank in unusual.items()},
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.removeprefix(prefix).partition(".")[0] for name in head}),
        "bias": "none",
    }
    return config, tensors | {_PREFIX + name: tensor for name, tensor in head.items()}


def no_adapters(task: str) -> UsageError:
    """Returns the error of a model that has no adapters which peft could open."""
    return UsageError(f"{task}: the model has no adapters to save. Train it with lora_rank, on a head of transformers")

"""The file beside the weights of a model with the ranges of its activations, which int8 needs.

It has a tensor ``[2, I]`` for each linear layer of the encoder, the lowest and the highest value of each of its I
inputs, and the digest of the weights that they belong to.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file, refuse
from bert_tasks.checkpoints.hub import ACTIVATION_RANGES
from bert_tasks.checkpoints.load import read_safetensors, tensors_digest
from bert_tasks.checkpoints.save import save_tensors
from bert_tasks.errors import CheckpointError
from bert_tasks.storage import atomic_files, weights_write_error

_DIGEST = "encoder_sha256"


def write_ranges(folder: Path, ranges: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Writes the ranges of an encoder with these weights to a model folder.

    Raises:
        CheckpointError: The folder is not writable.
    """
    try:
        with atomic_files(folder, first=".safetensors") as staging:
            save_tensors({**ranges, _DIGEST: _digest(weights)}, staging / ACTIVATION_RANGES)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in ranges.values())
        raise CheckpointError(f"{folder} cannot be written ({weights_write_error(error, folder, size)})") from error


def read_ranges(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Returns the ranges of an encoder with these weights, or None if the model folder has none.

    Args:
        folder: The folder.
        shapes: The shape of the ranges of each layer.
        weights: The weights of the encoder.

    Raises:
        CheckpointError: The file is damaged, or belongs to other weights.
    """
    if not (folder / ACTIVATION_RANGES).exists():
        return None
    path = checked_file(folder, ACTIVATION_RANGES)
    ranges = read_safetensors(path)
    digest = ranges.pop(_DIGEST, None)
    if digest is None or not torch.equal(digest, _digest(weights)):
        refuse(path, "it belongs to other weights than those of the model. Write it again with `bert-tasks quantize`")
    found = {name: tuple(tensor.shape) for name, tensor in ranges.items()}
    if found != dict(shapes) or not all(bool(tensor.isfinite().all()) for tensor in ranges.values()):
        refuse(path, "it does not hold finite ranges of all layers. Write it again with `bert-tasks quantize`")
    return ranges


def _digest(weights: Mapping[str, Tensor]) -> Tensor:
    """Returns the sha256 of weights as 32 numbers."""
    return torch.tensor(list(bytes.fromhex(tensors_digest(weights))), dtype=torch.uint8)

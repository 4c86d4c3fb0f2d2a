"""Writes a model folder that stock transformers opens.

Each file is written whole or not at all, with the mode of the umask. The module owns file names, their order and modes,
and the inverse of what loading does with the names of tensors.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file
from bert_tasks.checkpoints.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_model_file
from bert_tasks.checkpoints.load import DIGEST, read_safetensors, tensors_digest
from bert_tasks.checkpoints.tokenizers import save_tokenizer
from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import Family
from bert_tasks.storage import atomic_files, remove_unfinished_files, weights_write_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, HEAD = "model.safetensors", "task_head.safetensors"
# Weights that would contradict or outlive the new weights.
_STALE = re.compile(
    r"model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors|activation_ranges\.safetensors|"
    r"pytorch_model\.bin(\.index\.json)?|pytorch_model-\d{5}-of-\d{5}\.bin"
)


def hf_tensors(
    state_dict: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], *, strip_prefix: str = ""
) -> dict[str, Tensor]:
    """Renames our parameters to Hugging Face's names, the exact inverse of loading.

    Contiguous tensors on the CPU are not copied. Write them before the parameters change.

    Args:
        names: Our parameter name -> full HF names (``families.parameter_map``).
        strip_prefix: Prefix to remove from the names of base models.

    Raises:
        KeyError: A parameter has no name, or a name has no parameter, because the family's data has a defect.
    """
    if state_dict.keys() != names.keys():
        raise KeyError(f"parameters and names differ in {sorted(state_dict.keys() ^ names.keys())}")
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()  # safetensors does not write the same memory twice
    for parameter, tensor in state_dict.items():
        whole, count = tensor.detach().cpu().contiguous(), len(names[parameter])
        parts: tuple[Tensor, ...] = (whole,)
        if count > 1:  # else it may be a buffer of one number, which has no dimension to split
            parts = whole.tensor_split(count)
        storage = whole.untyped_storage().data_ptr()
        for name, piece in zip(names[parameter], parts, strict=True):
            if storage in storages:
                piece = piece.clone()
            tensors[name.removeprefix(strip_prefix)] = piece
        storages.add(storage)
    return tensors


def file_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Renames tensors to transformers' file names, the inverse of ``module_tensors``."""
    renamed = dict(tensors)
    for in_file, (first, *others) in family.file_names.items():
        for name in [name for name in renamed if first and first in name]:
            whole = renamed.pop(name)
            if others:
                pieces = [renamed.pop(name.replace(first, fragment)) for fragment in others]
                whole = torch.cat([whole, *pieces])
            renamed[name.replace(first, in_file)] = whole
    return renamed


def save_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    tokenizer: "PreTrainedTokenizerBase | None",
    head_tensors: Mapping[str, Tensor] | None = None,
    adapter_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json, the tokenizer and the weights of a model.

    Each file appears whole or not at all. The metadata of weights hold a digest of them, which reading compares.
    Weights under other names from an earlier save are removed.

    Args:
        folder: The folder. It may exist, and other files in it stay.
        config: Content of config.json. The dtype of the tensors is added.
        tensors: Weights by the names of transformers, or None for a folder whose weights lie elsewhere.
        tokenizer: The tokenizer, or None to write none.
        head_tensors: Weights of a head that transformers lacks, or None.
        adapter_config: The configuration of adapters. If it is set, ``tensors`` are adapters, which go to the files of
            peft.

    Raises:
        CheckpointError: The folder is not writable.
    """
    try:
        with atomic_files(folder, first=".safetensors") as staging:
            # The dtype of the loaded file may be another than that of these tensors, and the name would publish a path.
            not_kept = ("_name_or_path", "torch_dtype", "dtype")
            saved_config = {key: value for key, value in config.items() if key not in not_kept}
            if tensors is not None:
                dtypes = {str(tensor.dtype) for tensor in tensors.values()}
                if len(dtypes) == 1:
                    saved_config["dtype"] = dtypes.pop().removeprefix("torch.")
            _write_json(saved_config, staging / "config.json")
            weights_file = WEIGHTS
            if adapter_config is not None:
                weights_file = ADAPTER_WEIGHTS
            if tensors is not None:
                save_tensors(tensors, staging / weights_file)
            if adapter_config is not None:
                _write_json(adapter_config, staging / ADAPTER_CONFIG)
            if head_tensors is not None:
                save_tensors(head_tensors, staging / HEAD)
            if tokenizer is not None:
                save_tokenizer(tokenizer, staging)
        for file in folder.iterdir():
            if _STALE.fullmatch(file.name) or (file.name == HEAD and head_tensors is None):
                file.unlink()
    except (OSError, SafetensorError) as error:
        size = 0
        for group in (tensors, head_tensors):
            if group is not None:
                size += sum(tensor.nbytes for tensor in group.values())
        raise CheckpointError(f"{folder} cannot be written ({weights_write_error(error, folder, size)})") from error


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Replaces the config.json of a model. Raises CheckpointError if the folder is not writable."""
    try:
        with atomic_files(folder, first=".json") as staging:
            _write_json(config, staging / "config.json")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror})") from error


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes JSON with sorted keys, so that equal content gives equal bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def remove_saved(folder: Path) -> None:
    """Removes the files of ``save_folder``, and the folder if it has no others."""
    remove_unfinished_files(folder)
    for path in folder.iterdir():
        if is_model_file(path.name) and not path.is_dir():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def read_head_tensors(folder: Path) -> dict[str, Tensor] | None:
    """Returns the tensors of task_head.safetensors, or None if the folder has none.

    Raises:
        CheckpointError: The file is damaged.
    """
    if not os.path.lexists(folder / HEAD):  # a broken link is there, and reading reports it
        return None
    return read_safetensors(checked_file(folder, HEAD))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the digest of its tensors, always in equal bytes."""
    save_file(dict(tensors), path, metadata={"format": "pt", DIGEST: tensors_digest(tensors)})
    with path.open("r+b") as file:  # safetensors writes the metadata in another order each time
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
        # Spaces fill what is left of the header, so that the tensors behind it keep their places.
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))

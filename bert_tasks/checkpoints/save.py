"""Writes a model folder that stock transformers opens.

Each file is written whole or not at all, with the mode of the umask. The module owns file names, their order and modes.
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
    r"model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors|"
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
        parts = (whole,) if count == 1 else whole.tensor_split(count)  # a buffer may be one number, without dimensions
        storage = whole.untyped_storage().data_ptr()
        for name, piece in zip(names[parameter], parts, strict=True):
            tensors[name.removeprefix(strip_prefix)] = piece.clone() if storage in storages else piece
        storages.add(storage)
    return tensors


def file_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Renames tensors to transformers' file names, the inverse of ``module_tensors``."""
    renamed = dict(tensors)
    for in_file, (first, *others) in family.file_names.items():
        for name in [name for name in renamed if first and first in name]:
            pieces = [renamed.pop(name.replace(first, fragment)) for fragment in (first, *others)]
            renamed[name.replace(first, in_file)] = torch.cat(pieces) if others else pieces[0]
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
    """Writes config.json, the tokenizer and weights, also of heads that HF lacks.

    Each file appears whole or not at all. The metadata of weights hold a digest of them, which reading compares.
    Weights under other names from an earlier save are removed. ``tensors`` is None for a folder whose weights lie
    elsewhere. With ``adapter_config`` the tensors are adapters, which go to the files of peft.

    Raises:
        CheckpointError: The folder is not writable.
    """
    try:
        with atomic_files(folder, first=".safetensors") as staging:
            kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "torch_dtype", "dtype")}
            dtypes = {str(tensor.dtype) for tensor in ({} if tensors is None else tensors).values()}
            dtype = {"dtype": dtypes.pop().removeprefix("torch.")} if len(dtypes) == 1 else {}
            _write_json(kept | dtype, staging / "config.json")
            if tensors is not None:
                _save_tensors(tensors, staging / (WEIGHTS if adapter_config is None else ADAPTER_WEIGHTS))
            if adapter_config is not None:
                _write_json(adapter_config, staging / ADAPTER_CONFIG)
            if head_tensors is not None:
                _save_tensors(head_tensors, staging / HEAD)
            if tokenizer is not None:
                save_tokenizer(tokenizer, staging)
        for file in folder.iterdir():
            if _STALE.fullmatch(file.name) or (file.name == HEAD and head_tensors is None):
                file.unlink()
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for group in (tensors, head_tensors) if group is not None for tensor in group.values())
        raise CheckpointError(f"{folder} cannot be written ({weights_write_error(error, folder, size)})") from error


def _write_json(content: Mapping[str, Any], path: Path) -> None:
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
    return read_safetensors(checked_file(folder, HEAD)) if os.path.lexists(folder / HEAD) else None


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the digest of its tensors, always in equal bytes."""
    save_file(dict(tensors), path, metadata={"format": "pt", DIGEST: tensors_digest(tensors)})
    with path.open("r+b") as file:  # safetensors writes the metadata in another order each time
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))

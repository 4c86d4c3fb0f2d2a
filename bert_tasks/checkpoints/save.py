"""Writing a model folder that stock transformers opens: whole files or none, with the modes the umask asks for.

It owns file names, their order and modes. Tensors and the config are given ready to write.
"""

import json
import os
import re
import shutil
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
from bert_tasks.storage import flush_files, move, sync, weights_write_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, HEAD = "model.safetensors", "task_head.safetensors"
# Files are written here first, then renamed into the folder; a killed save leaves at most this one folder behind.
_STAGING = ".saving"
# Weights that would contradict or outlive the ones just written.
_STALE = re.compile(
    r"model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors|"
    r"pytorch_model\.bin(\.index\.json)?|pytorch_model-\d{5}-of-\d{5}\.bin"
)


def hf_tensors(
    state_dict: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], *, strip_prefix: str = ""
) -> dict[str, Tensor]:
    """Our parameters under Hugging Face's names: the inverse of loading, bit by bit.

    Contiguous tensors on the CPU are not copied: write them before the parameters change.

    Args:
        names: our parameter name -> full HF names (``registry.parameter_map``).
        strip_prefix: taken off the names where they have it, for base models.

    Raises:
        KeyError: a parameter without a name, or a name without a parameter: a defect of the family's data.
    """
    if state_dict.keys() != names.keys():
        raise KeyError(f"parameters and names differ in {sorted(state_dict.keys() ^ names.keys())}")
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()  # safetensors refuses to write the same memory twice
    for parameter, tensor in state_dict.items():
        whole, count = tensor.detach().cpu().contiguous(), len(names[parameter])
        parts = (whole,) if count == 1 else whole.tensor_split(count)  # a buffer may be one number, without dimensions
        storage = whole.untyped_storage().data_ptr()
        for name, piece in zip(names[parameter], parts, strict=True):
            tensors[name.removeprefix(strip_prefix)] = piece.clone() if storage in storages else piece
        storages.add(storage)
    return tensors


def file_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Returns tensors under the names of files, as transformers saves them: the inverse of ``module_tensors``."""
    renamed = dict(tensors)
    for in_file, (first, *others) in family.file_names.items():
        for name in [name for name in renamed if first and first in name]:
            pieces = [renamed.pop(name.replace(first, part)) for part in (first, *others)]
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
    """Writes config.json, model.safetensors, the tokenizer's files and, for heads that HF lacks, task_head.safetensors.

    Each file appears whole or not at all, and the metadata of weights hold a digest of them, which reading compares.
    Weights that an earlier save left under other names are removed. ``tensors``: None for a folder whose weights lie
    elsewhere. With ``adapter_config`` they are adapters, which go to the files of peft.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    staging = folder / _STAGING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
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
            flush_files(staging)  # only whole files get their names, the weights first
            files = filter(Path.is_file, staging.iterdir())
            for file in sorted(files, key=lambda file: (file.suffix != ".safetensors", file.name)):
                move(file, folder / file.name)
            sync(folder)
            for file in folder.iterdir():
                if _STALE.fullmatch(file.name) or (file.name == HEAD and head_tensors is None):
                    file.unlink()
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for part in (tensors, head_tensors) if part is not None for tensor in part.values())
        raise CheckpointError(f"{folder}: cannot be written: {weights_write_error(error, folder, size)}") from error


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def remove_saved(folder: Path) -> None:
    """Removes what ``save_folder`` wrote; other files stay, and the folder with them."""
    shutil.rmtree(folder / _STAGING, ignore_errors=True)
    for path in folder.iterdir():
        if is_model_file(path.name) and not path.is_dir():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def read_head_tensors(folder: Path) -> dict[str, Tensor] | None:
    """The tensors of task_head.safetensors; None if the folder has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    return read_safetensors(checked_file(folder, HEAD)) if os.path.lexists(folder / HEAD) else None


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file with the digest of its tensors; the same tensors give the same bytes."""
    save_file(dict(tensors), path, metadata={"format": "pt", DIGEST: tensors_digest(tensors)})
    with path.open("r+b") as file:  # safetensors writes the metadata in another order each time
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))

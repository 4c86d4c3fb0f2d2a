"""Reads a model folder and matches its keys with the model's parameters.

The files are not trusted. The module reads safetensors, ``pytorch_model.bin`` without running code, and the indexes of
sharded files. Matching handles prefixes, old names, heads that are dropped or new, and checks shapes and values. Every
failure names the file or the key and its problem.
"""

import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, refuse
from bert_tasks.errors import CheckpointError, is_out_of_memory
from bert_tasks.families import current_name, split_unused
from bert_tasks.families.base import Family
from bert_tasks.storage import sha256

# Key of ``tensors_digest`` in the metadata of a safetensors file that this package wrote.
DIGEST = "tensors_sha256"
# Errors of torch.load for a damaged pickle or archive, apart from UnpicklingError.
_BROKEN_PICKLE = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError),
    *(OverflowError, MemoryError, struct.error, zipfile.BadZipFile),
)
_NOT_FINITE = (
    "{name} holds NaN or infinite values, or values too large for {dtype}. The checkpoint is damaged or training "
    "diverged"
)
_OTHER_FORMATS = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.gguf")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder in their dtypes. If it has several formats, safetensors is read.

    Raises:
        CheckpointError: There are no weights, or a file is damaged, incomplete, larger than the memory or does not hold
            only tensors.
    """
    try:
        for name, read in _FORMATS.items():
            if os.path.lexists(folder / name):
                return read(checked_file(folder, name))
            if os.path.lexists(folder / f"{name}.index.json"):
                return _read_shards(folder, f"{name}.index.json", read)
    except (MemoryError, RuntimeError, OSError, SafetensorError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{folder}: out of memory while the weights were read ({reason}). Choose a smaller model or a larger "
            "machine. If the files are not that large, download them again, because they are damaged"
        ) from error
    if (folder / "export.json").exists():
        raise CheckpointError(
            f"{folder}: an exported model, which predict and evaluate run. It has no weights to train, inspect or "
            "export again. Use the model that it was made from"
        )
    looked_for = ", ".join(f"{name}, {name}.index.json" for name in _FORMATS)
    hint = ""
    for name in _OTHER_FORMATS:
        if (folder / name).exists():
            hint = f". Save the model with transformers first, because {name} is not supported"
            break
    raise CheckpointError(f"{folder}: no weights. Expected one of {looked_for}{hint}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, after comparing their digest if the file holds one.

    Raises:
        CheckpointError: The file is damaged, or holds other tensors than it was saved with.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        refuse(path, f"damaged or truncated ({error}). Download it again")
    digest = None  # as in files of other programs
    if metadata is not None:
        digest = metadata.get(DIGEST)
    if digest is not None and digest != tensors_digest(tensors):
        refuse(
            path,
            f"its tensors are not those that it was saved with (their sha256 is not {DIGEST} of its metadata). It is "
            "damaged, or was changed by a program that kept the metadata. Download or save it again",
        )
    return tensors


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of names, dtypes, shapes and values, whatever their order."""

    def chunks() -> Iterator[bytes | memoryview]:
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            yield json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
            # As bytes, because numpy has no bfloat16.
            yield tensor.reshape(-1).view(torch.uint8).numpy().data

    return sha256(chunks())


def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of an index's files, which must be inside the folder."""
    path = checked_file(folder, index)
    weight_map = read_json(path, max_bytes=MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        refuse(path, "expected `weight_map`, from tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        # An index could name a file anywhere on this machine, also with the separators of Windows.
        if shard != os.path.basename(shard) or shard in ("", ".", "..") or "\\" in shard or "\0" in shard:
            refuse(path, f"{shard!r} is not a plain file name. Shards must be in the folder of the index")
        root = Path(os.path.realpath(folder))
        if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
            root = root.parent.parent  # in the hub's cache, snapshots link to the model's ``blobs``
        if not Path(os.path.realpath(folder / shard)).is_relative_to(root):
            refuse(path, f"the shard {shard} is a link that leads out of the folder")
        part_tensors = read(checked_file(folder, shard))
        expected = {key for key, file in weight_map.items() if file == shard}
        if part_tensors.keys() != expected:
            key = min(part_tensors.keys() ^ expected)
            problem = "is not listed by the index but is in"
            if key in expected:
                problem = "is missing from"
            refuse(path, f"{key} {problem} {shard}")
        tensors |= part_tensors
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a ``pytorch_model.bin``, read with torch's restricted unpickler, which runs no code."""
    try:
        if zipfile.is_zipfile(path):
            # Zeros compress to almost nothing, so a small archive could expand to more than the memory.
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > path.stat().st_size:
                refuse(path, f"compressed, which torch.save never does. It expands to {size} bytes. Save it again")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's protocol, because the result is checked below
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        # torch's message advises to load without the restriction, so never pass it on.
        if "global" in str(error).lower():
            refuse(path, "it contains Python code, which is never run. Expected tensors only")
        refuse(path, "damaged, or it contains Python code, which is never run. Expected tensors only")
    except _BROKEN_PICKLE as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0][:160]
        refuse(path, f"damaged or truncated ({type(error).__name__}: {reason}). Download it again")
    if not isinstance(content, dict):
        refuse(path, f"expected a mapping from names to tensors, found a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            refuse(path, f"the entry {name!r} is a {type(value).__name__}. Expected tensors only")
        # ``map_location`` does not move tensors of the meta device, which have no numbers.
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            refuse(path, f"{name} is not a plain dense tensor")
    return {name: value.detach() for name, value in content.items()}


_FORMATS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": read_safetensors,
    "pytorch_model.bin": _read_pickle,
}


def module_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Renames the tensors of a file to the names of transformers' modules.

    Raises:
        CheckpointError: The file has a tensor under both names.
    """
    renamed = dict(tensors)
    for in_file, in_modules in family.file_names.items():
        for key in [key for key in renamed if in_file in key]:
            whole = renamed.pop(key)
            pieces: Sequence[Tensor] = [whole] * len(in_modules)
            if whole.dim() > 0:  # a number cannot be split. Matching reports its shape later
                pieces = whole.tensor_split(len(in_modules))
            for in_module, piece in zip(in_modules, pieces, strict=True):
                name = key.replace(in_file, in_module)
                if name in renamed:
                    raise CheckpointError(f"{name} appears twice, as {name} and in {key}")
                renamed[name] = piece
    return renamed


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The loader's action for each key of the file, in Hugging Face's names.

    Attributes:
        loaded: Keys of loaded tensors.
        renamed: Number of these keys that have another name in the file, such as ``gamma`` for the weight of a norm, or
            a name without the prefix.
        new: Freshly initialised parameters of the task head that are missing in the file or have another shape there.
        dropped: Keys of heads of another task or of pre-training.
        ignored: Buffers, and copies of tied tensors, that older versions saved.
        notes: Other information for the user (a head whose labels were reordered, ...).
    """

    loaded: tuple[str, ...]
    renamed: int
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Returns the report in a few sentences, for the log."""
        parts = [f"{len(self.loaded)} tensors loaded"]
        if self.new:
            parts.append(f"new head: {', '.join(self.new)}")
        if self.dropped:
            parts.append(f"dropped: {', '.join(self.dropped)}")
        return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in (*parts, *self.notes))


@dataclass(frozen=True, kw_only=True)
class CheckpointMatch:
    """The tensors of a checkpoint for a model.

    Attributes:
        tensors: Tensors by our parameter names, without the names in ``report.new``.
        report: Report of the loader for each key.
        problems: Messages about keys that do not fit the model. Empty if ``match_weights`` was strict.
    """

    tensors: dict[str, Tensor]
    report: LoadReport
    problems: tuple[str, ...] = ()


def match_weights(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, tuple[str, ...]],
    *,
    shapes: Mapping[str, torch.Size],
    family: Family,
    copies: Mapping[str, str] = MappingProxyType({}),
    head_may_be_new: bool = False,
    ignore_head: bool = False,
    dtype: torch.dtype = torch.float32,
    copy: bool = True,
    strict: bool = True,
) -> CheckpointMatch:
    """Finds the tensors of every parameter in a checkpoint.

    Args:
        tensors: The file's tensors by the file's names.
        names: Our parameter name -> full HF names (``families.parameter_map``).
        shapes: Shape of each of our parameters.
        copies: Copies of tied tensors that the file may hold -> the tensors that they must equal
            (``families.copies_of_tied``).
        head_may_be_new: Allow missing parameters of ``head.`` or other shapes (training). The report lists them.
        ignore_head: Drop the file's head, which belongs to another task, even if names and shapes fit.
        dtype: Dtype of the returned tensors, whatever the file's dtype.
        copy: Copy the returned tensors. Otherwise they may share memory with the file.
        strict: Raise an exception for problems. Otherwise the result lists them.

    Returns:
        Tensors of that dtype, query, key and value concatenated.

    Raises:
        CheckpointError: The message names every unknown key, missing tensor, wrong shape or tensor with NaN or
            infinity.
    """
    sources_read = set(chain.from_iterable(names.values()))
    keys: dict[str, str] = {}  # full HF name -> the file's key
    unused = set(tensors)
    problems: list[str] = []
    for key in tensors:
        full = current_name(family, key)
        if full not in sources_read:  # a base model's file, whose names have no prefix
            full = family.prefix + full
        if full in keys:
            problems.append(f"{full} appears twice, as {keys[full]} and as {key}")
            unused.remove(key)
        elif full in sources_read:
            keys[full] = key
    # transformers has saved tied decoders under their own name, too. A copy takes the place of a table that is missing.
    # If both are there and differ, it is not known which one the model was trained with.
    for key, name in copies.items():
        if key in tensors and keys.setdefault(name, key) != key:
            tied = tensors[keys[name]]
            if tensors[key].shape != tied.shape or not torch.equal(tensors[key].to(tied.dtype), tied):
                problems.append(f"{key} differs from {keys[name]}, to which the head's decoder is tied")
    tensors_found: dict[str, Tensor] = {}
    loaded: list[str] = []
    new: list[str] = []
    for parameter, sources in names.items():
        in_head = parameter.startswith("head.")
        is_ignored = ignore_head and in_head and not any(map(family.is_in_any_model, sources))
        shape = [shapes[parameter][0] // len(sources), *shapes[parameter][1:]]
        found: dict[str, Tensor] = {}
        if not is_ignored:
            found = {source: tensors[keys[source]] for source in sources if source in keys}
        faults = _faults(sources, found, shape)
        if faults and in_head and head_may_be_new:
            new += sources
            continue
        if not faults:
            parts = [found[source].to(dtype, copy=copy) for source in sources]
            # After the conversion, because a number may be finite in float32 and too large for float16.
            broken = [source for source, part in zip(sources, parts, strict=True) if not _is_finite(part)]
            faults = [_NOT_FINITE.format(name=source, dtype=dtype) for source in broken]
        problems += faults
        if not faults:
            tensors_found[parameter] = parts[0]
            if len(parts) > 1:  # such as queries, keys and values, which one layer makes here
                tensors_found[parameter] = torch.cat(parts)
            loaded += sources
        # The keys of a head that does not fit stay unused, so that the report lists them as dropped.
        if not faults or not in_head:
            unused -= {keys[source] for source in sources if source in keys}
    dropped, ignored, unknown = split_unused(family, unused - copies.keys())
    problems += [f"unknown key {key}" for key in unknown]
    if problems and strict:
        raise CheckpointError(_listing("the checkpoint does not fit the model", problems))
    report = LoadReport(
        loaded=tuple(sorted(loaded)),
        renamed=sum(keys[source] != source for source in loaded),
        new=tuple(new),
        dropped=dropped,
        ignored=(*ignored, *sorted(unused & copies.keys())),
    )
    return CheckpointMatch(tensors=tensors_found, report=report, problems=tuple(problems))


def _faults(sources: Sequence[str], found: Mapping[str, Tensor], shape: list[int]) -> list[str]:
    """Returns messages about the sources of a parameter that are missing or no floating point numbers of a shape."""
    faults = []
    for source in sources:
        if source not in found:
            faults.append(f"missing tensor {source}")
        elif list(found[source].shape) != shape:
            faults.append(f"{source} has shape {list(found[source].shape)}, expected {shape}")
        elif not found[source].is_floating_point():
            faults.append(f"{source} has dtype {found[source].dtype}, expected floating point numbers")
    return faults


def checked_tensors(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Checks and converts tensors of a head that has no names in transformers.

    Args:
        dtypes: New dtype of each tensor. A buffer of whole numbers must have its dtype in the file already.

    Raises:
        CheckpointError: A tensor does not fit its dtype, or holds NaN or infinity.
    """
    problems, converted = [], {}
    for name, tensor in tensors.items():
        dtype = dtypes[name]
        if dtype.is_floating_point and not tensor.is_floating_point():
            problems.append(f"{name} has dtype {tensor.dtype}, expected floating point numbers")
        elif not dtype.is_floating_point and tensor.dtype != dtype:
            problems.append(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        converted[name] = tensor.to(dtype, copy=True)
        if not _is_finite(converted[name]):
            problems.append(_NOT_FINITE.format(name=name, dtype=dtype))
    if problems:
        raise CheckpointError(_listing("task_head.safetensors cannot be used", problems))
    return converted


def _is_finite(tensor: Tensor) -> bool:
    """Returns True if all numbers are finite, without copies of a large table.

    Infinity is the least or the greatest number of a tensor, and NaN becomes both of them.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _listing(headline: str, problems: list[str], most: int = 8) -> str:
    """Returns a message with one problem on a line, and the number of those that are left out."""
    lines = [f"{headline}:", *problems[:most]]
    if len(problems) > most:
        lines.append(f"and {len(problems) - most} more")
    return "\n  ".join(lines)

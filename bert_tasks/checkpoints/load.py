"""Reading a model folder: config.json, the weights, and which of the model's parameters each key is.

The files are read without trusting them: safetensors, ``pytorch_model.bin`` without running code, and the indexes of
sharded files. Then keys are matched with parameters: prefixes, old names, heads that are dropped or new, and checks of
shapes and values. Every failure names the file or the key and says what is wrong with it.
"""

import json
import os
import pickle
import stat
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_tasks.errors import CheckpointError, PathError
from bert_tasks.families.base import BUFFERS, Family
from bert_tasks.families.registry import CONFIG_KEY, current_name, droppable_prefixes
from bert_tasks.paths import exists, is_file, is_link, lexists, resolved
from bert_tasks.storage import sha256

# In the metadata of a safetensors file that this package wrote: ``tensors_digest`` of what the file holds.
DIGEST = "tensors_sha256"
MAX_CONFIG_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
# What a damaged pickle or archive makes torch.load raise, apart from UnpicklingError.
_BROKEN_PICKLE = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError),
    *(OverflowError, MemoryError, struct.error),
)
_OTHER_FORMATS = ("tf_model.h5", "flax_model.msgpack", "model.ckpt.index", "rust_model.ot", "model.gguf")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json`` as it is; keys that name code (``auto_map``) are data like the others.

    Raises:
        CheckpointError: it is missing, too large or not a JSON object.
    """
    if not lexists(folder / "config.json"):
        inner = folder / "model"
        hint = f"; did you mean {inner}?" if is_file(inner / "config.json") else ""
        raise CheckpointError(f"{folder}: no config.json; expected a folder that `save_pretrained` wrote{hint}")
    return read_json(checked_file(folder, "config.json"), max_bytes=MAX_CONFIG_BYTES)


def label_names(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels under our key, else those of ``id2label`` in the order of their ids; empty if the config has none.

    Raises:
        CheckpointError: the ids are not numbers, or our labels are no list of texts.
    """
    entry = hf_config.get(CONFIG_KEY)
    if isinstance(entry, dict) and "labels" in entry:
        own = entry["labels"]
        if not isinstance(own, list) or not all(isinstance(label, str) for label in own):
            raise CheckpointError(f"config.json, key {CONFIG_KEY}: labels must be a list of texts")
        return tuple(own)
    names = hf_config.get("id2label")
    if not isinstance(names, dict):
        return ()
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except ValueError:
        raise CheckpointError("config.json: the keys of id2label are not numbers") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by the file's names, on the CPU, in the file's dtypes; safetensors win over ``.bin``.

    Raises:
        CheckpointError: there are none, or a file is damaged, incomplete or holds anything but tensors.
    """
    for name, read in _FORMATS.items():
        if lexists(folder / name):
            return read(checked_file(folder, name))
        if lexists(folder / f"{name}.index.json"):
            return _read_shards(folder, f"{name}.index.json", read)
    looked_for = ", ".join(file for name in _FORMATS for file in (name, f"{name}.index.json"))
    if lexists(folder / "model.onnx"):
        raise CheckpointError(
            f"{folder}: an exported model, which predict and evaluate run; it has no weights to train, inspect or "
            "export again: use the model that it was made from"
        )
    other = [name for name in _OTHER_FORMATS if exists(folder / name)]
    hint = f"; {other[0]} is not supported, save the model with transformers first" if other else ""
    raise CheckpointError(f"{folder}: no weights; looked for {looked_for}{hint}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, compared with the digest that this package stores in the files it writes.

    Raises:
        CheckpointError: it is damaged, or holds other tensors than it was saved with.
    """
    _refuse_other_content(path)
    stated = _checked_metadata(path).get(DIGEST)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        _refuse(path, f"damaged ({error}); download it again")
    if stated is not None and stated != tensors_digest(tensors):
        _refuse(
            path,
            f"its tensors are not those that it was saved with (their sha256 is not {DIGEST} of its metadata): it is "
            "damaged, or was changed by a program that kept the metadata; download or save it again",
        )
    return tensors


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 over names, dtypes, shapes and values of tensors, whatever their order."""

    def parts() -> Iterator[bytes | memoryview]:
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            yield json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
            yield tensor.reshape(-1).view(torch.uint8).numpy().data

    return sha256(parts())


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it is too large, cannot be read or holds something else.
    """
    _refuse_other_content(path)
    size = path.stat().st_size
    if size > max_bytes:
        _refuse(path, f"{size} bytes are too many, expected at most {max_bytes}")
    try:
        value = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"not valid JSON ({error})")
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    if not isinstance(value, dict):
        _refuse(path, f"expected a JSON object, found a {type(value).__name__}")
    return value


def checked_file(folder: Path, name: str) -> Path:
    """The path of a file that exists and is a regular one (opening a pipe would wait for ever).

    Raises:
        CheckpointError: it is none.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError as error:
        dangling = isinstance(error, FileNotFoundError) and is_link(path)
        _refuse(path, "a link to a file that does not exist" if dangling else f"{error.strerror}")
    if not stat.S_ISREG(mode):
        _refuse(path, "not a regular file")
    return path


def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    path = checked_file(folder, index)
    weight_map = read_json(path, max_bytes=MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        _refuse(path, "expected `weight_map`, from tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        found = read(_shard_file(folder, shard, index=path))
        expected = {key for key, file in weight_map.items() if file == shard}
        if found.keys() != expected:
            key = min(found.keys() ^ expected)
            problem = "is missing from" if key in expected else "is not listed by the index but is in"
            _refuse(path, f"{key} {problem} {shard}")
        tensors |= found
    return tensors


def _shard_file(folder: Path, shard: str, *, index: Path) -> Path:
    """The path of a file that an index names: inside the folder, also when links are followed."""
    if shard != os.path.basename(shard) or shard in ("", ".", "..") or "\\" in shard or "\0" in shard:
        _refuse(index, f"{shard!r} is not a plain file name; shards must be in the folder of the index")
    try:
        is_missing = not lexists(folder / shard)
        leads_out = not resolved(folder / shard).is_relative_to(_allowed_root(folder))
    except PathError as error:
        _refuse(index, f"a shard cannot be opened: {error}")
    if is_missing:
        _refuse(index, f"the shard {shard} is missing")
    if leads_out:
        _refuse(index, f"the shard {shard} is a link that leads out of the folder")
    return checked_file(folder, shard)


def _allowed_root(folder: Path) -> Path:
    """The folder itself; in the hub's cache the model's folder, where snapshots link to ``blobs``."""
    folder = resolved(folder)
    snapshots = folder.parent
    cached = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return snapshots.parent if cached else folder


def _checked_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a safetensors file, whose length is compared with the one that its header states."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            _refuse(path, "not a safetensors file, or truncated within its header; download it again")
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        metadata = dict(entries.get("__metadata__", {}))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        _refuse(path, "the safetensors header is damaged; download it again")
    if size < expected:
        _refuse(path, f"truncated: {size} of {expected} bytes; download it again")
    if size > expected:
        _refuse(path, f"{size - expected} bytes too many at the end; download it again")
    return metadata


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """A ``pytorch_model.bin``, read by torch's restricted unpickler: no code of the file ever runs."""
    _refuse_other_content(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's protocol; the outcome is judged below
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        # torch's own message advises to load without the restriction: never pass it on.
        if "global" in str(error).lower():
            _refuse(path, "refused to load: it contains Python code, not only tensors")
        _refuse(path, "refused to load: damaged, or it contains Python code; expected tensors only")
    except _BROKEN_PICKLE as error:
        reason = str(error).partition("\n")[0][:160]
        _refuse(path, f"damaged or truncated ({type(error).__name__}: {reason}); download it again")
    return _only_tensors(path, content)


def _only_tensors(path: Path, content: object) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        _refuse(path, f"expected a mapping from names to tensors, found a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            _refuse(path, f"the entry {name!r} is a {type(value).__name__}; expected tensors only")
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            _refuse(path, f"{name} is not a plain dense tensor")
    return {name: value.detach() for name, value in content.items()}


def _refuse_other_content(path: Path) -> None:
    """Refuses what is often found in place of a file: nothing, a git-lfs pointer, a web page."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    if start == b"":
        _refuse(path, "empty (0 bytes): a download or copy failed; download it again")
    if start.startswith(b"version https://git-lfs"):
        _refuse(path, "a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        _refuse(path, "a web page (HTML): a download failed; download it again")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: {reason}") from None


_FORMATS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": read_safetensors,
    "pytorch_model.bin": _read_pickle,
}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of each key of the file, in Hugging Face's names.

    Attributes:
        loaded: used; ``renamed`` of them under another name than the file's (gamma/beta, missing prefix).
        new: not in the file (or of another shape): freshly initialised parameters of the task head.
        dropped: heads of another task or of pre-training.
        ignored: buffers that older versions saved.
        notes: what else a user should know (a head whose labels were reordered, ...).
    """

    loaded: tuple[str, ...]
    renamed: int
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{len(self.loaded)} tensors loaded"]
        if self.new:
            parts.append(f"new head: {', '.join(self.new)}")
        if self.dropped:
            parts.append(f"dropped: {', '.join(self.dropped)}")
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Tensors by our parameter names (those in ``report.new`` are absent) and the report."""

    tensors: dict[str, Tensor]
    report: LoadReport


def match_weights(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, tuple[str, ...]],
    *,
    shapes: Mapping[str, torch.Size],
    family: Family,
    head_may_be_new: bool,
    ignore_head: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Matched:
    """Finds the tensors of every parameter in a checkpoint.

    Args:
        tensors: the file's tensors by the file's names.
        names: our parameter name -> full HF names (``registry.parameter_map``).
        shapes: the shape of each of our parameters.
        head_may_be_new: whether parameters of ``head.`` may be missing or of another shape (training); they are listed.
        ignore_head: the file's head belongs to another task: drop it even where names and shapes fit.
        dtype: of the tensors that are returned, whatever the file's is.

    Returns:
        Tensors of that dtype, query, key and value concatenated.

    Raises:
        CheckpointError: naming every unknown key, missing tensor, wrong shape or tensor with NaN or infinity.
    """
    matched, problems = compare_weights(
        tensors,
        names,
        shapes=shapes,
        family=family,
        head_may_be_new=head_may_be_new,
        ignore_head=ignore_head,
        dtype=dtype,
    )
    if problems:
        raise CheckpointError(_listing("the checkpoint does not fit the model", problems))
    return matched


def compare_weights(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, tuple[str, ...]],
    *,
    shapes: Mapping[str, torch.Size],
    family: Family,
    head_may_be_new: bool = False,
    ignore_head: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Matched, list[str]]:
    """What ``match_weights`` finds, with its problems as messages in place of an exception."""
    wanted = {source for sources in names.values() for source in sources}
    by_name, clashes = _full_names(tensors, wanted, family)
    problems = list(clashes.values())
    head = {ours for ours in names if ours.startswith("head.")}
    found: dict[str, Tensor] = {}
    new: list[str] = []
    for ours, sources in names.items():
        foreign = ignore_head and ours in head and not any(s.startswith(family.prefix) for s in sources)
        parts = {} if foreign else {s: tensors[by_name[s]] for s in sources if s in by_name}
        part_shape = [shapes[ours][0] // len(sources), *shapes[ours][1:]]
        misfits = [_misfit(source, parts.get(source), part_shape) for source in sources]
        faults = [fault for fault in misfits if fault is not None]
        if faults and head_may_be_new and ours in head:
            new += sources
            continue
        converted = {} if faults else {source: part.to(dtype, copy=True) for source, part in parts.items()}
        faults += [fault for source, part in converted.items() if (fault := _unusable(source, part)) is not None]
        problems += faults
        if not faults:
            found[ours] = torch.cat([converted[source] for source in sources])
    loaded = sorted(source for ours in found for source in names[ours])
    claimed = {by_name[s] for ours in names if ours not in head for s in names[ours] if s in by_name}
    unused = set(tensors) - claimed - clashes.keys() - {by_name[s] for s in loaded}
    dropped, ignored, unknown = _classify(unused, family)
    problems += [f"unknown key {name}" for name in unknown]
    report = LoadReport(
        loaded=tuple(loaded),
        renamed=sum(by_name[source] != source for source in loaded),
        new=tuple(new),
        dropped=dropped,
        ignored=ignored,
    )
    return Matched(tensors=found, report=report), problems


def _full_names(
    tensors: Mapping[str, Tensor], wanted: set[str], family: Family
) -> tuple[dict[str, str], dict[str, str]]:
    """Full HF name -> the file's key, with old names replaced and a missing base prefix added.

    And the keys whose full name another key has already -> that as a message.
    """
    names: dict[str, str] = {}
    clashes: dict[str, str] = {}
    for key in tensors:
        current = current_name(key)
        full = current if current in wanted else family.prefix + current
        if full in names:
            clashes[key] = f"{full} appears twice: as {names[full]} and as {key}"
        elif full in wanted:
            names[full] = key
    return names, clashes


def _classify(keys: set[str], family: Family) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Splits unused keys into dropped heads, ignored buffers and unknown ones."""
    prefixes = droppable_prefixes(family)
    dropped, ignored, unknown = [], [], []
    for key in sorted(keys):
        current = current_name(key)
        if current.endswith(BUFFERS):
            ignored.append(key)
        elif current.startswith(prefixes) or (family.prefix + current).startswith(prefixes):
            dropped.append(key)
        else:
            unknown.append(key)
    return tuple(dropped), tuple(ignored), tuple(unknown)


def _misfit(name: str, tensor: Tensor | None, expected: list[int]) -> str | None:
    """Why a tensor cannot be the parameter, as a message; values are not checked."""
    if tensor is None:
        return f"missing tensor {name}"
    if list(tensor.shape) != expected:
        return f"{name} has shape {list(tensor.shape)}, expected {expected}"
    if not tensor.is_floating_point():
        return f"{name} has dtype {tensor.dtype}, expected floating point numbers"
    return None


def _unusable(name: str, tensor: Tensor) -> str | None:
    if not torch.isfinite(tensor).all():
        return (
            f"{name} holds NaN or infinite values, or values too large for {tensor.dtype}: the checkpoint is damaged "
            "or training diverged"
        )
    return None


def checked_tensors(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Tensors as ``match_weights`` returns them, for a head that has no names in transformers.

    Args:
        dtypes: what each becomes. A buffer of whole numbers must have its dtype in the file already.

    Raises:
        CheckpointError: a tensor is of another kind than its dtype, or holds NaN or infinity.
    """
    whole = [name for name, dtype in dtypes.items() if not dtype.is_floating_point]
    faults = [_misfit(name, tensor, list(tensor.shape)) for name, tensor in tensors.items() if name not in whole]
    faults += [
        f"{name} has dtype {tensors[name].dtype}, expected {dtypes[name]}"
        for name in whole
        if tensors[name].dtype != dtypes[name]
    ]
    converted = {name: tensor.to(dtypes[name], copy=True) for name, tensor in tensors.items()}
    faults += [_unusable(name, tensor) for name, tensor in converted.items()]
    problems = [fault for fault in faults if fault is not None]
    if problems:
        raise CheckpointError(_listing("task_head.safetensors cannot be used", problems))
    return converted


def _listing(headline: str, problems: list[str], most: int = 8) -> str:
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "\n  ".join([f"{headline}:", *problems[:most], *more])

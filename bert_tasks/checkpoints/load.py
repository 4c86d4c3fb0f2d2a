"""A checkpoint's tensors under our names, and a report of what was done with every key.

Owns the matching of keys (prefixes, gamma/beta, heads that are dropped or new) and the checks on shape and value. Files
are read by weights.py; families.py owns the names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bert_tasks.checkpoints.families import Family, droppable_prefixes
from bert_tasks.errors import CheckpointError

# Names of TensorFlow's layer norm parameters, which transformers wrote until 2019 and writes again when a model loaded
# from such a file is saved.
_OLD_NORM_NAMES = {"gamma": "weight", "beta": "bias"}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of each key of the file, in Hugging Face's names.

    Attributes:
        loaded: used; ``renamed`` of them under another name than the file's (gamma/beta, missing prefix).
        new: not in the file (or of another shape): freshly initialised parameters of the task head.
        dropped: heads of another task or of pre-training.
        ignored: buffers that older versions saved.
        notes: what else a user should know (a head whose labels were re-ordered, ...).
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
        names: our parameter name -> full HF names (``families.parameter_map``).
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
    """What ``match_weights`` finds, and its problems in words instead of an exception."""
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
    """Full HF name -> the file's key, with gamma/beta renamed and a missing base prefix added.

    And keys that stand for a name which another key has taken -> that in words.
    """
    names: dict[str, str] = {}
    clashes: dict[str, str] = {}
    for key in tensors:
        current = current_name(key)
        full = current if current in wanted else family.prefix + current
        if full in names:
            clashes[key] = f"{full} is there twice: as {names[full]} and as {key}"
        elif full in wanted:
            names[full] = key
    return names, clashes


def current_name(key: str) -> str:
    """A key with the old layer norm names replaced."""
    return re.sub(r"\.(gamma|beta)$", lambda match: "." + _OLD_NORM_NAMES[match[1]], key)


def _classify(keys: set[str], family: Family) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Splits unused keys into dropped heads, ignored buffers and unknown ones."""
    prefixes = droppable_prefixes(family)
    dropped, ignored, unknown = [], [], []
    for key in sorted(keys):
        current = current_name(key)
        if current.endswith(_BUFFERS):
            ignored.append(key)
        elif current.startswith(prefixes) or (family.prefix + current).startswith(prefixes):
            dropped.append(key)
        else:
            unknown.append(key)
    return tuple(dropped), tuple(ignored), tuple(unknown)


def _misfit(name: str, tensor: Tensor | None, expected: list[int]) -> str | None:
    """Why a tensor cannot be the parameter, in words; values are not looked at."""
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

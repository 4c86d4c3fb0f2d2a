"""Writes the checkpoints of a run atomically, loads, verifies and removes them.

``checkpoints/ckpt-N`` is the run after N optimizer steps, with tensors in safetensors, everything else in JSON, and a
manifest with the sha256 of every file. There is no pickle, because loading one may execute code. A checkpoint is
complete or absent, whenever the process is killed, because it is written under another name and flushed, then renamed.
The pointers ``latest`` and ``best`` and the removal of older checkpoints come last.

The checksums detect accidental damage, but no tampering. Anyone who can write to the folder can also rewrite the
manifest.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file, read_json
from bert_tasks.checkpoints.load import read_safetensors
from bert_tasks.errors import CheckpointError, argument
from bert_tasks.storage import atomic_folder, atomic_path, is_temporary, move, sha256_file, weights_write_error
from bert_tasks.training.records import ManifestRecord

FOLDER = "checkpoints"
LATEST, BEST = "latest", "best"
MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_FILES = (_WEIGHTS, _OPTIMIZER, _STATE)
_NAME = re.compile(r"ckpt-([0-9]{1,18})")
# What a killed process may leave, half written (tmp), half removed (old), or moved aside for its successor (replaced).
_LEFTOVER = re.compile(r"ckpt-[0-9]+\.(tmp|old)-[0-9]+")
_REPLACED = re.compile(r"(ckpt-[0-9]+)\.replaced-[0-9]+")
_MOST_JSON_BYTES = 64 * 2**20  # far more than any run writes, so a larger file is not read into memory


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint holds of a run after ``step`` steps.

    Attributes:
        weights: The parameters by name.
        optimizer: The moments by ``name/key``, with the name of their parameter.
        progress: Everything else, as JSON.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    progress: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The newest intact checkpoint. ``skipped`` says why newer ones were not used."""

    path: Path
    state: RunState
    skipped: Sequence[str] = field(default_factory=tuple)


def save_checkpoint(
    folder: Path, state: RunState, *, metadata: Mapping[str, Any], best_step: int, keep_last: int
) -> Path:
    """Writes ``folder/ckpt-N`` and removes old checkpoints, but never the best one.

    Args:
        folder: The folder of all checkpoints of the run.
        state: The run as it is now.
        metadata: What the manifest says about the run. See ``ManifestRecord``.
        best_step: The step of the best model so far, whose checkpoint is kept. 0 if there is none yet.
        keep_last: Number of the newest checkpoints to keep.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be written. Those before it are not changed.
    """
    target = folder / f"ckpt-{state.step}"
    staging = folder / f"{target.name}.tmp-{os.getpid()}"
    # A folder that has the name already is damaged and was skipped, or was written before the evaluation of its step.
    replaced = folder / f"{target.name}.replaced-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(target, staging=staging, replaced=replaced):
            _write_json(staging / _STATE, state.progress)
            for name, tensors in ((_WEIGHTS, state.weights), (_OPTIMIZER, state.optimizer)):
                # No variable holds the copies, because those of a GPU's tensors would stay in memory after the writing.
                save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, staging / name)
            files: dict[str, dict[str, str | int]] = {}
            for name in _FILES:
                path = staging / name
                files[name] = {"sha256": sha256_file(path), "size": path.stat().st_size}
            manifest = ManifestRecord(step=state.step, **metadata, best_step=best_step, files=files)
            _write_json(staging / MANIFEST, manifest.to_json())
        # The pointers are for people and scripts. A run that resumes looks at the manifests instead.
        pointers = {LATEST: target.name}
        if (folder / f"ckpt-{best_step}").is_dir():
            pointers[BEST] = f"ckpt-{best_step}"
        for name, pointed in pointers.items():
            with atomic_path(folder / name) as temporary:
                temporary.write_text(f"{pointed}\n", encoding="utf-8")
        # All are removed but the newest, and those that the newest name as the best model so far. Otherwise a run that
        # has to resume from the second newest might lack its best model. Checkpoints after this step stay.
        earlier = [path for path in checkpoints(folder) if _step_of(path) <= state.step]
        best: set[str] = set()
        for path in earlier[-keep_last:]:
            with suppress(CheckpointError):
                best.add(f"ckpt-{_manifest(path).best_step}")
        for path in earlier[:-keep_last]:
            if path.name not in best:
                _remove(path)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in (*state.weights.values(), *state.optimizer.values()))
        reason, saved = weights_write_error(error, folder, size), checkpoints(folder)
        resumable = ""
        if saved:
            resumable = f". The run can be resumed from {saved[-1].name}"
        raise CheckpointError(f"{target} cannot be written ({reason}){resumable}") from error
    return target


def newest_checkpoint(folder: Path) -> LoadedCheckpoint | None:
    """Returns the newest intact checkpoint, or None if there is none at all.

    Raises:
        CheckpointError: There are checkpoints, and all of them are damaged.
    """
    skipped: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return LoadedCheckpoint(path=path, state=_verified(path), skipped=tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        reasons = ". ".join(skipped)
        raise CheckpointError(
            f"no checkpoint can be used. {reasons}. Restore one of them, or start again with {argument('overwrite')}"
        )
    return None


def checkpoints(folder: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=_step_of)


def remove_checkpoints(folder: Path, *, only_leftovers: bool = False) -> None:
    """Removes the checkpoints of a run, which has to be locked.

    The folder stays if it holds other files.

    Args:
        folder: The folder of all checkpoints of the run.
        only_leftovers: True to remove only what killed processes have left.
    """
    if not folder.is_dir():
        return
    # The run is locked, so no other process writes a checkpoint, and what looks half written is from a killed one.
    for path in folder.iterdir():
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            # The process was killed between two renames, so the successor never got the name. This one gets it back.
            move(path, folder / replaced[1])
        elif replaced or _LEFTOVER.fullmatch(path.name) or is_temporary(path.name, (LATEST, BEST)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    if only_leftovers:
        return
    for path in checkpoints(folder):
        _remove(path)
    for name in (LATEST, BEST):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()) and not folder.is_symlink():
        folder.rmdir()


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    return dict(_verified(folder / f"ckpt-{step}").weights)


def _step_of(path: Path) -> int:
    """Returns the number of steps in the name of a checkpoint."""
    return int(path.name.removeprefix("ckpt-"))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file of a checkpoint that is not visible yet, so it need not be atomic."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    """Renames a checkpoint and then removes it, so that a kill in between leaves no damaged one."""
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    move(path, doomed)
    shutil.rmtree(doomed)


def _manifest(path: Path) -> ManifestRecord:
    """Returns the manifest of a checkpoint. Raises CheckpointError if it is damaged or that of another one."""
    content = read_json(checked_file(path, MANIFEST), max_bytes=_MOST_JSON_BYTES)
    try:
        manifest = ManifestRecord.checked(content)
    except ValueError:
        manifest = None
    if manifest is None or path.name != f"ckpt-{manifest.step}":
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of {path.name}")
    return manifest


def _verified(path: Path) -> RunState:
    """Returns the content of a checkpoint. Raises CheckpointError if a file is not what the manifest says."""
    files = _manifest(path).files
    for name in _FILES:
        file = checked_file(path, name)
        try:
            is_intact = name in files and files[name].get("sha256") == sha256_file(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
        if not is_intact:
            raise CheckpointError(f"{file} is damaged. Its content is not what the manifest says")
    return RunState(
        step=_step_of(path),
        weights=read_safetensors(path / _WEIGHTS),
        optimizer=read_safetensors(path / _OPTIMIZER),
        progress=read_json(path / _STATE, max_bytes=_MOST_JSON_BYTES),
    )

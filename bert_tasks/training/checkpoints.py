"""Writes the checkpoints of a run atomically, loads, verifies and removes them.

``checkpoints/ckpt-N`` is the run after N optimizer steps, with tensors in safetensors, everything else in JSON (no
pickle), and a manifest with the sha256 of every file. A checkpoint is complete or absent, whenever the process is
killed, because it is written under another name and flushed, then renamed. The pointers ``latest`` and ``best`` and
removals come last.
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
_LEFTOVER = re.compile(r"ckpt-[0-9]+\.(tmp|old)-[0-9]+")
_REPLACED = re.compile(r"(ckpt-[0-9]+)\.replaced-[0-9]+")
_MOST_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run's tensors by ``name`` or ``name/key`` (optimizer), and its JSON."""

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
    """Writes ``folder/ckpt-N`` and removes old checkpoints, but never the best.

    Args:
        metadata: Facts about the run, for the manifest. See ``ManifestRecord``.
        best_step: The step of the best model so far, whose checkpoint is kept. 0 if there is none yet.
        keep_last: Number of the newest checkpoints to keep.

    Raises:
        CheckpointError: It cannot be written. The checkpoints before it are not changed.
    """
    target = folder / f"ckpt-{state.step}"
    # A folder that has the name is damaged and was skipped, or lacks the evaluation after its step.
    staging, replaced = (folder / f"{target.name}.{suffix}-{os.getpid()}" for suffix in ("tmp", "replaced"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(target, staging=staging, replaced=replaced):
            _write_json(staging / _STATE, state.progress)
            for name, tensors in ((_WEIGHTS, state.weights), (_OPTIMIZER, state.optimizer)):
                save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, staging / name)
            files: dict[str, dict[str, str | int]] = {}
            for name in _FILES:
                path = staging / name
                files[name] = {"sha256": sha256_file(path), "size": path.stat().st_size}
            manifest = ManifestRecord(step=state.step, **metadata, best_step=best_step, files=files)
            _write_json(staging / MANIFEST, manifest.to_json())
        pointers = {LATEST: target.name}  # for people and scripts, because resuming reads the manifests
        if (folder / f"ckpt-{best_step}").is_dir():
            pointers[BEST] = f"ckpt-{best_step}"
        for name, pointed in pointers.items():
            with atomic_path(folder / name) as temporary:
                temporary.write_text(f"{pointed}\n", encoding="utf-8")
        # All but the newest and the best of each are removed. Those after this step stay.
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
        resumable = f". The run can be resumed from {saved[-1].name}" if saved else ""
        raise CheckpointError(f"{target} cannot be written ({reason}){resumable}") from error
    return target


def newest_checkpoint(folder: Path) -> LoadedCheckpoint | None:
    """Returns the newest intact checkpoint. Raises CheckpointError if all are damaged."""
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
    """Returns the committed checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=_step_of)


def remove_checkpoints(folder: Path, *, only_leftovers: bool = False) -> None:
    """Removes checkpoints while the run is locked.

    The folder stays if it holds other files.

    Args:
        only_leftovers: True to remove only half-written checkpoints of killed runs.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            move(path, folder / replaced[1])  # killed between the two renames: its successor never got the name
        elif replaced or _LEFTOVER.fullmatch(path.name) or is_temporary(path.name, (LATEST, BEST)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if only_leftovers:
        return
    for path in checkpoints(folder):
        _remove(path)
    for name in (LATEST, BEST):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()) and not folder.is_symlink():
        folder.rmdir()


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Returns a checkpoint's weights. Raises CheckpointError if it is gone or damaged."""
    return dict(_verified(folder / f"ckpt-{step}").weights)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("ckpt-"))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    """Renames, then removes a checkpoint, so that a kill leaves no damaged one."""
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    move(path, doomed)
    shutil.rmtree(doomed)


def _manifest(path: Path) -> ManifestRecord:
    content = read_json(checked_file(path, MANIFEST), max_bytes=_MOST_JSON_BYTES)
    try:
        manifest = ManifestRecord.checked(content)
    except ValueError:
        manifest = None
    if manifest is None or path.name != f"ckpt-{manifest.step}":
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of {path.name}")
    return manifest


def _verified(path: Path) -> RunState:
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

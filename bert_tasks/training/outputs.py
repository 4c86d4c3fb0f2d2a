"""The output folder of a run: who may write there, and what the run writes.

Owns the names of the files and the rule about an existing folder: a run's own files may be gone on with or replaced,
files that are not a run's are never touched. What may be gone on with is in resuming.py.
"""

import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bert_tasks.checkpoints.durable import sync
from bert_tasks.checkpoints.save import remove_saved
from bert_tasks.data.checks import named_splits
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import RowTable
from bert_tasks.environment import cpu_name
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.locking import LOCK
from bert_tasks.paths import beside, exists, is_file, is_folder, is_link
from bert_tasks.training import checkpointing
from bert_tasks.training.signing import is_ours

MODEL, CARD = "model", "README.md"
EVENTS = "metrics.jsonl"
SUMMARY = "metrics.json"
RECIPE = "recipe.toml"
RUN = "run.json"
TRACKERS = "trackers.json"
TENSORBOARD = "tensorboard"
REPORT = "report.html"  # made from the others when the run is done
REJECTS = "rejects.jsonl"  # rows that were left out (data.on_error = "skip")
_TRACKED = (TENSORBOARD, "wandb")  # folders that trackers make
_OURS = (MODEL, EVENTS, SUMMARY, RECIPE, RUN, REPORT, REJECTS, LOCK, TRACKERS, *_TRACKED, checkpointing.FOLDER)
_LEFTOVER = re.compile(r"\.((metrics|rejects)\.jsonl?|(run|trackers)\.json|recipe\.toml|report\.html)\.tmp-[0-9]+")
_VERSIONED = ("bert-tasks", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What a finished run ended with; None if the run in the folder is not finished.

    Raises:
        UsageError: it is damaged.
    """
    path = folder / SUMMARY
    if not is_file(path):
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is damaged: choose another folder, or --overwrite to train again") from None
    return summary


def data_facts(splits: Splits) -> dict[str, dict[str, Any]]:
    """Where each split came from (with the hub's commit, if it did from there), its rows and their fingerprint."""
    return {name: _table_facts(table) for name, table in named_splits(splits)}


def _table_facts(table: RowTable) -> dict[str, Any]:
    facts: dict[str, Any] = {"source": table.source, "fingerprint": table.fingerprint, "rows": len(table)}
    facts |= {} if table.faults is None else {"rows_left_out": len(table.faults)}
    return facts if table.hub is None else {**facts, "hub": asdict(table.hub)}


def write_rejects(folder: Path, splits: Splits) -> None:
    """Writes the rows that were left out, each file's once; without any the file is not there."""
    tables = {table.source: table for _, table in named_splits(splits)}  # of rows set aside the source is the same
    text = "".join(line for table in tables.values() for line in table.reject_lines())
    if text:
        write_text(folder / REJECTS, text)
    else:
        (folder / REJECTS).unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Whether a run may be in the folder.

    Raises:
        UsageError: a file is in the way, the folder holds other files and no run, or it cannot be written.
    """
    if exists(folder) and not is_folder(folder):
        raise UsageError(f"{folder} is a file, expected a folder for the run's output")
    existing = sorted(path.name for path in folder.iterdir()) if is_folder(folder) else []
    existing = [name for name in existing if not _LEFTOVER.fullmatch(name)]
    foreign = [name for name in existing if name not in _OURS]
    if set(existing) - {LOCK} and RUN not in existing:
        raise UsageError(
            f"{folder} is not empty and holds no run ({', '.join(foreign[:3] or existing[:3])}): choose another folder"
        )
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if exists(path))
    if not is_folder(parent):
        raise UsageError(f"{parent} is a file, expected a folder: choose another output folder")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{parent} is not writable: choose another output folder")


def read_facts(folder: Path) -> dict[str, Any] | None:
    """What run.json says; None if there is no run in the folder.

    Raises:
        UsageError: it is damaged.
    """
    path = folder / RUN
    if not is_file(path):
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), dict) for key in ("settings", "metrics")):
        raise UsageError(f"{path} is damaged: choose another folder, or --overwrite to train again")
    return facts


def clear(folder: Path) -> None:
    """Removes what an earlier run made; foreign files stay.

    run.json stays too, and is replaced by the next run's: without it the folder would not count as a run's.
    """
    sweep(folder)
    (folder / SUMMARY).unlink(missing_ok=True)  # first: without it the run counts as unfinished
    _clear_model(folder / MODEL)
    for name in _TRACKED:
        if is_link(folder / name):
            (folder / name).unlink()
        elif exists(folder / name):
            shutil.rmtree(folder / name)
    checkpointing.remove_all(folder / checkpointing.FOLDER)
    for name in (EVENTS, RECIPE, TRACKERS, REPORT, REJECTS):
        (folder / name).unlink(missing_ok=True)


def _clear_model(folder: Path) -> None:
    """Removes the model and a card that nobody has changed; a licence beside them, or a card of a person, stays."""
    if is_link(folder):
        folder.unlink()
    elif is_folder(folder):
        card = folder / CARD
        if is_file(card) and is_ours(card.read_text(encoding="utf-8", errors="replace")):
            card.unlink()
        remove_saved(folder)


def remove(folder: Path) -> None:
    """Removes an earlier run; run.json only if no foreign file needs it as a sign that a run may be here."""
    if not is_file(folder / RUN):
        return
    clear(folder)
    if {path.name for path in folder.iterdir()} <= {RUN, LOCK}:
        (folder / RUN).unlink()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in their order; one that a kill left unfinished is no line."""
    path = folder / EVENTS
    if not is_file(path):
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a label may hold other line ends
    return [json.loads(line) for line in lines if _kind_and_step(line)[0]]


def cut_events(folder: Path, step: int, *, evaluated_step: int) -> None:
    """Takes from metrics.jsonl what came after the step, and a line that a kill left unfinished.

    ``evaluated_step``: evaluations after it are taken out too; the run will make them.
    """
    path = folder / EVENTS
    if not is_file(path):
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a label may hold other line ends
    ends = {"evaluation": evaluated_step}
    kept = [line for line in lines for kind, at in [_kind_and_step(line)] if at <= ends.get(kind, step)]
    write_text(path, "".join(f"{line}\n" for line in kept))


def sweep(folder: Path) -> None:
    """Removes what killed runs left half-written. Only for who holds the run's lock."""
    checkpointing.sweep(folder / checkpointing.FOLDER)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink()


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Adds a line to metrics.jsonl. Numbers that are not finite become null: JSON has none.

    Raises:
        CheckpointError: it cannot be written.
    """
    line = json.dumps(_finite(event), ensure_ascii=False, allow_nan=False) + "\n"
    with _told(folder / EVENTS), (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(line)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that appears whole or not at all."""
    write_text(path, json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file that appears whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = beside(path, before=".", after=f".tmp-{os.getpid()}")
    with _told(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def _kind_and_step(line: str) -> tuple[str, float]:
    """Of an event; a line that is none is beyond any step."""
    try:
        event = json.loads(line)
        return str(event["event"]), float(event["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", math.inf


def environment() -> dict[str, Any]:
    """What bit-equal results depend on: versions, machine, threads. No names, paths or variables of the user's."""
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu": f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in _VERSIONED},
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

"""The output folder of a run: the names of its files, and how they are read, written and removed.

Owns the rule about an existing folder: files of a run may be resumed or replaced, other files are never touched; and
which settings may differ when a run is resumed: some silently, some with a notice; all others are refused.
"""

import json
import math
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import torch

from bert_tasks.checkpoints.hub import RUN_GENERATOR, RUN_MODEL, RUN_SUMMARY
from bert_tasks.checkpoints.save import remove_saved
from bert_tasks.data.checks import named_splits
from bert_tasks.data.splits import Splits
from bert_tasks.encoder.cpu import matmul_library
from bert_tasks.environment import cpu_name, installed_version
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.recipe.schema import OptimSection, RunSection, resume_effects
from bert_tasks.storage import LOCK, atomic_path, check_writable, is_temporary, remove_temporaries, sha256
from bert_tasks.training import checkpoints as checkpointing
from bert_tasks.training.records import EventRecord, RunRecord, SummaryRecord, check_record, read_record

MODEL, CARD = RUN_MODEL, "README.md"
GENERATOR = RUN_GENERATOR
EVENTS = "metrics.jsonl"
SUMMARY = RUN_SUMMARY
RECIPE = "recipe.toml"
RUN = "run.json"
TRACKERS = "trackers.json"
TENSORBOARD = "tensorboard"
REPORT = "report.html"  # made from the others when the run is done
REJECTS = "rejects.jsonl"  # rows that were left out (data.on_error = "skip")
_TRACKED = (TENSORBOARD, "wandb")  # folders that trackers make
_OURS = (
    *(MODEL, GENERATOR, EVENTS, SUMMARY, RECIPE, RUN, REPORT, REJECTS, LOCK, TRACKERS, *_TRACKED),
    checkpointing.FOLDER,
)
WRITTEN = (EVENTS, SUMMARY, RECIPE, RUN, TRACKERS, REPORT, REJECTS)  # through a temporary file of the same name
_VERSIONED = ("bert-tasks", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
# What of run.json the bits depend on, besides versions, settings and data.
_ENVIRONMENT = (
    "python",
    "platform",
    "cpu",
    "threads",
    "matmul_library",
    "processes",
    "device",
    "device_name",
    "attention",
)
_SIGNED = re.compile(r"\n<!-- bert_tasks wrote this card \(sha256 of the above: ([0-9a-f]{64})\)\. [^\n]*-->\n\Z")


_ABSENT = "not set"
_REMEDY = "choose another folder, or --overwrite to train again"
_SHOWN = 6  # refused settings in a message


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The content of metrics.json; None if the run in the folder is not finished.

    Raises:
        UsageError: it is damaged.
    """
    path = folder / SUMMARY
    if not path.is_file():
        return None
    return read_record(path, SummaryRecord, remedy=_REMEDY)


def data_metadata(splits: Splits) -> dict[str, dict[str, Any]]:
    """For each split its source (with the commit of the hub, if it is from there), row count and fingerprint."""
    return {
        name: {
            "source": table.source,
            "fingerprint": table.fingerprint,
            "rows": len(table),
            **({} if table.errors is None else {"rows_left_out": len(table.errors)}),
            **({} if table.hub is None else {"hub": asdict(table.hub)}),
        }
        for name, table in named_splits(splits)
    }


def check_folder(folder: Path) -> None:
    """Checks that a run may use the folder.

    Raises:
        UsageError: a file is in the way, the folder holds other files and no run, or it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder for the run's output")
    existing = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    existing = [name for name in existing if not is_temporary(name, WRITTEN)]
    foreign = [name for name in existing if name not in _OURS]
    if set(existing) - {LOCK} and RUN not in existing:
        raise UsageError(
            f"{folder} is not empty and contains no run (it contains {', '.join(foreign[:3] or existing[:3])}): "
            "choose another folder"
        )
    check_writable(folder)


def read_run_metadata(folder: Path) -> dict[str, Any] | None:
    """The content of run.json; None if there is no run in the folder.

    Raises:
        UsageError: it is damaged.
    """
    path = folder / RUN
    if not path.is_file():
        return None
    return read_record(path, RunRecord, remedy=_REMEDY)


def clear(folder: Path) -> None:
    """Removes the files of an earlier run; other files stay, and so does a model card that a person has edited.

    run.json stays, too, and is replaced by the next run's: without it the folder would not count as a run's.
    """
    remove_temporaries(folder, WRITTEN)
    (folder / SUMMARY).unlink(missing_ok=True)  # first: without it the run counts as unfinished
    model, card = folder / MODEL, folder / MODEL / CARD
    if model.is_symlink():
        model.unlink()
    elif model.is_dir():
        if card.is_file() and is_autogenerated(card.read_text(encoding="utf-8", errors="replace")):
            card.unlink()
        remove_saved(model)
    if (folder / GENERATOR).is_dir() and not (folder / GENERATOR).is_symlink():
        remove_saved(folder / GENERATOR)
    for name in _TRACKED:
        if (folder / name).is_symlink():
            (folder / name).unlink()
        elif (folder / name).exists():
            shutil.rmtree(folder / name)
    checkpointing.remove_checkpoints(folder / checkpointing.FOLDER)
    for name in (EVENTS, RECIPE, TRACKERS, REPORT, REJECTS):
        (folder / name).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Removes an earlier run; run.json only if no other file is there, because it marks the folder as a run's."""
    if not (folder / RUN).is_file():
        return
    clear(folder)
    if {path.name for path in folder.iterdir()} <= {RUN, LOCK}:
        (folder / RUN).unlink()


def remove_weights(folder: Path, *, keep_model: bool = False) -> None:
    """Removes the checkpoints of a finished run and, unless it is to be kept, its model; all else stays."""
    checkpointing.remove_checkpoints(folder / checkpointing.FOLDER)
    for name in () if keep_model else (MODEL, GENERATOR):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            remove_saved(folder / name)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl in order; a line that a kill left unfinished does not count.

    Raises:
        UsageError: a record is damaged.
    """
    path = folder / EVENTS
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a label may hold other line ends
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if _kind_and_step(line)[0]:
            events.append(json.loads(line))
            try:
                check_record(events[-1], EventRecord)
            except ValueError as error:
                raise UsageError(f"{path}:{number} is damaged: {error}. Remove the line") from None
    return events


def cut_events(folder: Path, step: int, *, evaluated_step: int) -> None:
    """Removes the records of metrics.jsonl after a step, and a line that a kill left unfinished.

    ``evaluated_step``: evaluations after it are removed, too; the run will repeat them.
    """
    path = folder / EVENTS
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a label may hold other line ends
    ends = {"evaluation": evaluated_step, "agreement": -1}  # of the run's end, which is not reached yet
    remaining = [line for line in lines for kind, at in [_kind_and_step(line)] if at <= ends.get(kind, step)]
    write_text(path, "".join(f"{line}\n" for line in remaining))


def finite(value: Any) -> Any:
    """The value as JSON has it, with null for numbers that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Adds a record to metrics.jsonl. Numbers that are not finite become null, because JSON has none.

    Raises:
        CheckpointError: it cannot be written.
    """
    line = json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with (folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise CheckpointError(f"{folder / EVENTS}: cannot be written: {error.strerror}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically; see ``write_text``."""
    write_text(path, json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def _kind_and_step(line: str) -> tuple[str, float]:
    """The kind and step of a record; a line that is not a record is beyond any step."""
    try:
        event = json.loads(line)
        return str(event["event"]), float(event["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", math.inf


def environment(libraries: Iterable[str] = ()) -> dict[str, Any]:
    """What bit-equal results depend on: versions, machine, threads. No names, paths or variables of the user.

    Args:
        libraries: further ones, whose versions decide what a task's features are.
    """
    versions = {name: version(name) for name in _VERSIONED}
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu": f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "matmul_library": matmul_library(),
        "versions": versions | {name: installed_version(name) for name in libraries},
    }


def without_folders(value: Any) -> Any:
    """Settings in which each absolute path is replaced by its last name; a resolved recipe has absolute paths only."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    is_path = isinstance(value, str) and (PurePath(value).is_absolute() or PureWindowsPath(value).is_absolute())
    return PurePath(value.replace("\\", "/")).name if is_path else value


def signed(text: str) -> str:
    """The text of a model card with a line at its end that identifies it as written by this package."""
    digest = sha256(text)
    end = "Once it is edited, it is no longer replaced. -->"
    return f"{text}\n<!-- bert_tasks wrote this card (sha256 of the above: {digest}). {end}\n"


def is_autogenerated(text: str) -> bool:
    """Whether this package wrote the text of a model card and nobody has edited it since."""
    found = _SIGNED.search(text)
    return found is not None and sha256(text[: found.start()]) == found[1]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting, or a part of the environment, that differs from the run's."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.now)} (was {_shown(self.before)})"


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two run.json of what bit-equal results depend on, as far as both record it."""
    old, new = (
        {name: found[name] for name in _ENVIRONMENT if name in found}
        | {f"versions.{name}": version for name, version in found.get("versions", {}).items()}
        for found in (before, now)
    )
    return [
        Change(name=name, before=old[name], now=value)
        for name, value in new.items()
        if name in old and old[name] != value
    ]


def flat_settings(
    model: Mapping[str, Any], optim: OptimSection, run: RunSection, **found: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a run as flat JSON: ``section.name`` -> value.

    Args:
        model, optim, run: the sections of the recipe.
        found: more sections, which follow from model and data.
    """
    of_run = {key: value for key, value in run.model_dump().items() if key not in ("output_dir", "seeds")}
    sections = {"model": model, "optim": optim.model_dump(), "run": of_run, **found}
    flat = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    text = json.dumps(flat, default=lambda value: dict(value) if isinstance(value, Mapping) else str(value))
    settings: dict[str, Any] = json.loads(text)
    return settings


def changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, finished: bool) -> list[Change]:
    """Returns the settings that differ from the settings of the run in the folder, and may.

    `OnResume` marks in recipe/schema.py say which ones may differ. A finished run is not trained again with other
    settings, unless one of them extends it. An earlier version may have stored fewer settings: its options had today's
    defaults, and what it knew of the encoder followed from the model.

    Raises:
        UsageError: Settings differ that must not. The message names them.
    """
    effects = resume_effects()
    of_encoder = {name for name in {*before, *now} if name.startswith("encoder.")}
    before = flat_settings({}, OptimSection(), RunSection()) | dict(before)
    differing = [
        Change(name=name, before=before.get(name, _ABSENT), now=now.get(name, _ABSENT))
        for name in sorted({*before, *now} - (of_encoder - (before.keys() & now.keys())))
        if before.get(name) != now.get(name)  # a setting without a value is one that is not set
        and effects.get(name) != "silent"
    ]
    rejected = [change for change in differing if change.name not in effects]
    if finished and not any(effects.get(change.name) == "extending" for change in differing):
        rejected = differing
    if rejected:
        state = "a finished" if finished else "an unfinished"
        names = [
            f"the rows of {change.name.removeprefix('data.')} changed"
            if change.name.startswith("data.")
            else str(change)
            for change in rejected[:_SHOWN]
        ]
        names += [f"and {len(rejected) - _SHOWN} more"] if len(rejected) > _SHOWN else []
        raise UsageError(
            f"{folder} holds {state} run with other settings: {'; '.join(names)}. "
            "Choose another folder, or --overwrite to replace the run"
        )
    return differing


def _shown(value: Any) -> str:
    text = str(value) if value == _ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

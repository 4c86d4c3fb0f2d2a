"""The output folder of a run, with the names of its files.

This module reads, writes and removes these files, and decides whether a run in the folder may be resumed. The files of
a run may be resumed or replaced, but files that no run writes are never touched. A resumed run may change only those
settings that `OnResume` marks in the schema of recipes.
"""

import json
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import torch

from bert_tasks.checkpoints.hub import RUN_GENERATOR, RUN_METADATA, RUN_MODEL, RUN_SUMMARY
from bert_tasks.checkpoints.save import remove_saved
from bert_tasks.data.checks import named_splits
from bert_tasks.data.issues import shortened
from bert_tasks.data.splits import Splits
from bert_tasks.encoder.cpu import matmul_library
from bert_tasks.environment import cpu_name, installed_version
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.recipe.schema import OptimSection, RunSection, resume_effects
from bert_tasks.recipe.toml import EVALUATE_MODULE
from bert_tasks.storage import LOCK, atomic_path, check_writable, is_temporary, remove_temporaries, sha256
from bert_tasks.training import checkpoints as checkpointing
from bert_tasks.training.records import EventRecord, RecordT, RunRecord, SplitRecord, SummaryRecord, read_record

MODEL, CARD = RUN_MODEL, "README.md"
ADAPTER = "adapter"  # the folder of the best model's low-rank adapters, in the format of peft
GENERATOR = RUN_GENERATOR
EVENTS = "metrics.jsonl"
SUMMARY = RUN_SUMMARY
RECIPE = "recipe.toml"
RUN = RUN_METADATA
TRACKERS = "trackers.json"
TENSORBOARD = "tensorboard"
REPORT = "report.html"  # which is made from the other files after the run
REJECTS = "rejects.jsonl"  # the rows that were left out (data.on_error = "skip")
# The files that are written under a temporary name first, which a killed process may leave behind.
WRITTEN = (EVENTS, SUMMARY, RECIPE, RUN, TRACKERS, REPORT, REJECTS)
_VERSIONED = ("bert-tasks", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
# Fields of run.json that bits depend on, in addition to versions, settings and data.
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
_SHOWN = 6  # the most rejected settings that a message lists


def read_run_metadata(folder: Path) -> RunRecord | None:
    """Returns run.json, or None if the folder has no run. Raises UsageError if the file is damaged."""
    return _read(folder / RUN, RunRecord)


def read_summary(folder: Path) -> SummaryRecord | None:
    """Returns metrics.json, or None if the run is not finished. Raises UsageError if the file is damaged."""
    return _read(folder / SUMMARY, SummaryRecord)


def _read(path: Path, record: type[RecordT]) -> RecordT | None:
    """Returns the content of a file, or None if there is no such file."""
    if not path.is_file():
        return None
    remedy = f"Choose another folder, or {argument('overwrite')} to train again"
    return read_record(path, record, remedy=remedy)


def data_metadata(splits: Splits) -> dict[str, SplitRecord]:
    """Returns what run.json says of the rows of each split, by the name of the split."""
    records = {}
    for name, table in named_splits(splits):
        record = SplitRecord(source=table.source, fingerprint=table.fingerprint, rows=len(table))
        if table.errors is not None:
            record.rows_left_out = len(table.errors)
        if table.hub is not None:
            record.hub = dict(table.hub)
        records[name] = record
    return records


def check_folder(folder: Path) -> None:
    """Raises UsageError if the folder cannot be written, or holds files but no run."""
    check_writable(folder)
    names: set[str] = set()
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()} - {LOCK}
    # A process that was killed while it wrote run.json leaves only a temporary file.
    names = {name for name in names if not is_temporary(name, WRITTEN)}
    if names and RUN not in names:
        raise UsageError(
            f"{folder} is not empty and contains no run (it contains {', '.join(sorted(names)[:3])}). Choose another "
            "folder"
        )


def clear(folder: Path) -> None:
    """Removes the files of an earlier run.

    Other files stay, and also a model card that somebody has edited. run.json stays, too, until the next run replaces
    it, because it marks the folder as that of a run.
    """
    remove_temporaries(folder, WRITTEN)
    # The summary goes first. After a kill in the middle of this function the run then counts as unfinished.
    (folder / SUMMARY).unlink(missing_ok=True)
    # A link is removed, but not what it points to, which may belong to somebody else.
    for name in (MODEL, GENERATOR, ADAPTER, TENSORBOARD, "wandb"):
        if (folder / name).is_symlink():
            (folder / name).unlink()
    card = folder / MODEL / CARD
    if card.is_file() and is_autogenerated(card.read_text(encoding="utf-8", errors="replace")):
        card.unlink()
    remove_weights(folder)
    for name in (TENSORBOARD, "wandb"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (EVENTS, RECIPE, TRACKERS, REPORT, REJECTS):
        (folder / name).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Removes an earlier run, together with run.json if no other file is left in the folder."""
    if not (folder / RUN).is_file():
        return
    clear(folder)
    if {path.name for path in folder.iterdir()} <= {RUN, LOCK}:
        (folder / RUN).unlink()


def remove_weights(folder: Path, *, keep_model: bool = False) -> None:
    """Removes the checkpoints of a finished run and, unless ``keep_model``, also its model."""
    checkpointing.remove_checkpoints(folder / checkpointing.FOLDER)
    if keep_model:
        return
    for name in (MODEL, GENERATOR, ADAPTER):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            remove_saved(folder / name)


def read_events(folder: Path) -> list[EventRecord]:
    """Returns the complete records of metrics.jsonl.

    Raises:
        UsageError: A record is damaged, although its line is valid JSON.
    """
    path = folder / EVENTS
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    events: list[EventRecord] = []
    # Not by splitlines, because a label in a record may hold another line separator, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):  # the last line of a killed process may be half written
            continue
        try:
            events.append(EventRecord.checked(content))
        except ValueError as error:
            raise UsageError(f"{path}:{number} is damaged ({error}). Remove the line") from None
    return events


def cut_events(folder: Path, step: int, *, evaluated_step: int) -> None:
    """Removes the records after a step from metrics.jsonl, and the evaluations after ``evaluated_step``."""
    # The agreement with a teacher is measured at the end of a run, which a resumed run has not reached yet.
    ends = {"evaluation": evaluated_step, "agreement": -1}
    events = [event for event in read_events(folder) if event.step <= ends.get(event.event, step)]
    if events:
        write_text(folder / EVENTS, "".join(map(_line, events)))
    else:
        (folder / EVENTS).unlink(missing_ok=True)


def append_event(folder: Path, event: EventRecord) -> None:
    """Adds a record to metrics.jsonl. Raises CheckpointError if it cannot be written."""
    try:
        with (folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(_line(event))
    except OSError as error:
        raise CheckpointError(f"{folder / EVENTS} cannot be written ({error.strerror})") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically. See ``write_text``."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically. Raises CheckpointError if it cannot be written."""
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror})") from error


def _line(event: EventRecord) -> str:
    """Returns the line of a record in metrics.jsonl."""
    return json.dumps(event.to_json(), ensure_ascii=False, allow_nan=False) + "\n"


def environment(libraries: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the versions, the machine and the threads, on which bit-equal results depend."""
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
    """Returns settings in which each absolute path is replaced by its last name."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    module = EVALUATE_MODULE.fullmatch(value)  # a metric of one's own, whose path is a part of its name
    path = value if module is None else module["path"]
    if not PurePath(path).is_absolute() and not PureWindowsPath(path).is_absolute():
        return value
    last_name = PurePath(path.replace("\\", "/")).name
    return value.replace(path, last_name, 1)


def signed(text: str) -> str:
    """Returns the text of a model card with a line that marks it as autogenerated.

    The line is a comment with the digest of the text above it, so that any edit of a card shows.
    """
    digest = sha256(text)
    end = "Once it is edited, it is no longer replaced. -->"
    return f"{text}\n<!-- bert_tasks wrote this card (sha256 of the above: {digest}). {end}\n"


def is_autogenerated(text: str) -> bool:
    """Returns True if this package wrote a model card and nobody has edited it."""
    match = _SIGNED.search(text)
    return match is not None and sha256(text[: match.start()]) == match[1]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting, or a part of the environment, that differs from the run's."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.now)} (was {_shown(self.before)})"


def _shown(value: Any) -> str:
    """Returns a value as a message shows it, or the words for a value that is not set."""
    if value == _ABSENT:
        return _ABSENT
    return shortened(value)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the values that differ, in the order of their names. A setting that is missing equals None."""
    changes: list[Change] = []
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            changes.append(Change(name=name, before=before.get(name, _ABSENT), now=now.get(name, _ABSENT)))
    return changes


def environment_changes(before: RunRecord, now: RunRecord) -> list[Change]:
    """Returns what differs in the environments of two run.json. Values that one of them lacks do not count."""
    old, new = _flat_environment(before), _flat_environment(now)
    return [change for change in differences(old, new) if change.name in old and change.name in new]


def _flat_environment(run: RunRecord) -> dict[str, Any]:
    """Returns the environment in run.json as one mapping, without values that an older version did not write."""
    versions = {f"versions.{name}": version for name, version in run.versions.items()}
    return {**run.model_dump(include=set(_ENVIRONMENT), exclude_unset=True), **versions}


def flat_settings(
    model: Mapping[str, Any], optim: OptimSection, run: RunSection, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings of a run by ``section.name``, with values as JSON has them.

    They are compared with those in run.json, so tuples become lists, and numbers that are not finite become None.
    """
    # A run may be moved to another folder, and `seeds` are those of an experiment, of which this run has one.
    of_run = run.model_dump(exclude={"output_dir", "seeds"})
    flat: dict[str, Any] = {}
    for section, values in {"model": model, "optim": optim.model_dump(), "run": of_run, **sections}.items():
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    settings: dict[str, Any] = json.loads(json.dumps(flat, default=_json_value), parse_constant=lambda _: None)
    return settings


def _json_value(value: object) -> object:
    """Returns what stands for a value that JSON does not know, such as a path or a read-only mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, finished: bool) -> list[Change]:
    """Returns the permitted changes of settings since the run in the folder was written.

    A finished run is not trained again with other settings, unless one of them extends it, such as more epochs.

    Raises:
        UsageError: Settings differ that must not. The message lists them.
    """
    effects = resume_effects()
    differing = [change for change in differences(before, now) if effects.get(change.name) != "silent"]
    rejected = [change for change in differing if change.name not in effects]
    if finished and not any(effects.get(change.name) == "extending" for change in differing):
        rejected = differing
    if rejected:
        state = "a finished" if finished else "an unfinished"
        names: list[str] = []
        for change in rejected[:_SHOWN]:
            if change.name.startswith("data."):  # whose values are fingerprints, which tell a reader nothing
                names.append(f"the rows of {change.name.removeprefix('data.')}")
            else:
                names.append(str(change))
        if len(rejected) > _SHOWN:
            names.append(f"and {len(rejected) - _SHOWN} more")
        raise UsageError(
            f"{folder} holds {state} run that differs in {', '.join(names)}. "
            f"Choose another folder, or {argument('overwrite')} to replace the run"
        )
    return differing

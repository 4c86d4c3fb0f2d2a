"""The output folder of a run: who may write there, and what the run writes.

Owns the names of the files and the rule about an existing folder: a finished run is left alone, an unfinished one is
refused unless the user says ``overwrite``, and files that are not a run's are never touched.
"""

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bert_tasks.data.checks import named_splits
from bert_tasks.data.splits import Splits
from bert_tasks.errors import UsageError

MODEL = "model"
EVENTS = "metrics.jsonl"
SUMMARY = "metrics.json"
RECIPE = "recipe.toml"
RUN = "run.json"
_OURS = (MODEL, EVENTS, SUMMARY, RECIPE, RUN)
_VERSIONED = ("bert-tasks", "torch", "transformers", "accelerate", "datasets", "safetensors", "numpy")


def finished_summary(folder: Path, recipe: str) -> dict[str, Any] | None:
    """The summary of the run that this very recipe finished in the folder; None if there is none.

    Raises:
        UsageError: the summary is damaged.
    """
    path, stored = folder / SUMMARY, folder / RECIPE
    if not (path.is_file() and stored.is_file() and (folder / RUN).is_file()):
        return None
    if stored.read_text(encoding="utf-8") != recipe:
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UsageError(f"{path} is damaged: choose another folder, or --overwrite to train again") from None
    return summary


def data_facts(splits: Splits) -> dict[str, dict[str, str]]:
    """Where each split came from, and its fingerprint."""
    return {name: {"source": t.source, "fingerprint": t.fingerprint} for name, t in named_splits(splits)}


def changed_data(folder: Path, splits: Splits) -> list[str]:
    """Names of the splits whose rows are not those that the run in the folder had."""
    facts = json.loads((folder / RUN).read_text(encoding="utf-8"))
    stored, now = facts["data"], data_facts(splits)
    names = sorted({*stored, *now})
    return [name for name in names if stored.get(name, {}).get("fingerprint") != now.get(name, {}).get("fingerprint")]


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Whether a run may start in the folder.

    Raises:
        UsageError: a file is in the way, the folder holds an unfinished run or other files, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder for the run's output")
    existing = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in existing if name not in _OURS]
    if existing and not any(name in (RUN, SUMMARY) for name in existing):
        raise UsageError(
            f"{folder} is not empty and holds no run ({', '.join(foreign[:3] or existing[:3])}): choose another folder"
        )
    if existing and not overwrite:
        state = "a finished" if SUMMARY in existing else "an unfinished"
        raise UsageError(f"{folder} holds {state} run: choose another folder, or --overwrite to replace it")
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise UsageError(f"{parent} is a file, expected a folder: choose another output folder")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{parent} is not writable: choose another output folder")


def open_folder(folder: Path) -> None:
    """Makes the folder ready: an earlier run's own files go, foreign files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # first: without it the run counts as unfinished
    if (folder / MODEL).exists():
        shutil.rmtree(folder / MODEL)
    for name in (EVENTS, RECIPE, RUN):  # run.json last: without it the folder would not count as a run's
        (folder / name).unlink(missing_ok=True)


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Adds a line to metrics.jsonl. Numbers that are not finite become null: JSON has none."""
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(event), ensure_ascii=False, allow_nan=False) + "\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def environment() -> dict[str, Any]:
    """Versions and machine type: what bit-equal results depend on. No names, paths or variables of the user's."""
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
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

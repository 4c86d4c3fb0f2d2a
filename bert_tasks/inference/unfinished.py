"""What a prediction depends on, in short: the rows, the model, the settings and the versions.

Owns the fingerprints by which parts of an earlier attempt are known again. Must not know files.

A prediction that is not finished: its rows so far, in a folder beside the output.

Owns that folder: what is in it, whose it is, and what of it can be gone on with. Rows lie there as JSON lines, part by
part, each with its sha256. Must not know models or what rows mean.
"""

import hashlib
import json
import logging
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from bert_tasks.data.features_cache import tokenizer_content
from bert_tasks.data.table import digest
from bert_tasks.data.writers import write_failure
from bert_tasks.environment import installed_version
from bert_tasks.errors import DataError, UsageError
from bert_tasks.model.exported import ExportedModel
from bert_tasks.model.onnx import DType
from bert_tasks.model.predicting import tokenizer_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import beside, exists, is_folder
from bert_tasks.storage import LOCK, locked

_VERSIONED = ("bert-tasks", "torch", "transformers", "tokenizers", "onnxruntime")


def model_fingerprint(model: TaskModel) -> str:
    """A sha256 over weights or graph, task, configuration and tokenizer."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    if isinstance(model, ExportedModel):
        weights.update(model.graph_sha256.encode())
    task = model.task
    tuned = {name: getattr(task, name) for name in task.tuned}
    about = [f"{type(task).__module__}:{type(task).__qualname__}", task.labels, task.settings(), tuned]
    return digest(weights.hexdigest(), about, model.hf_config, tokenizer_content(tokenizer_of(model)))


def prediction_facts(model: TaskModel, rows: str, dtype: DType, **settings: Any) -> dict[str, Any]:
    """What must be equal for two attempts to write the same; the number of processes is not among it."""
    settings |= {"dtype": dtype, "device": model.device.type}
    versions = {name: installed_version(name) for name in _VERSIONED} | {"python": platform.python_version()}
    return {"input": rows, "model": model_fingerprint(model), "settings": settings, "versions": versions}


ROWS, LOG, MANIFEST = "rows.jsonl", "parts.jsonl", "manifest.json"
_LEFTOVER = re.compile(r"\..*\.tmp-[0-9]+")
_READ = 2**20

_log = logging.getLogger("bert_tasks")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The output of neighbouring rows as JSON lines: how many, and how many of the rows were cut, or left out."""

    content: bytes
    rows: int
    truncated: int
    rejected: int


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What is kept of a part, but for its content."""

    size: int
    sha256: str
    rows: int
    truncated: int
    rejected: int

    @classmethod
    def of(cls, part: Part) -> "_Note":
        counts = {name: value for name, value in vars(part).items() if name != "content"}
        return cls(size=len(part.content), sha256=hashlib.sha256(part.content).hexdigest(), **counts)


def parts_folder(output: Path) -> Path:
    return beside(output, after=".parts")


class Parts:
    """The finished parts of one output, in order."""

    def __init__(self, output: Path, notes: Sequence[_Note]) -> None:
        self.output = output
        self.lines = parts_folder(output) / ROWS
        self.resumed = sum(note.rows for note in notes)
        self._notes = list(notes)
        try:
            self._rows = _opened(self.lines, sum(note.size for note in notes))
            self._log = _opened(parts_folder(output) / LOG, sum(len(_line(note)) for note in notes))
        except OSError as error:
            raise write_failure(error, output, self.lines) from None

    def __len__(self) -> int:
        return len(self._notes)

    def total(self, name: str) -> int:
        """The sum of a count over all parts."""
        return sum(getattr(note, name) for note in self._notes)

    def append(self, parts: Sequence[Part]) -> None:
        """Raises UsageError if they cannot be written; those before them stay."""
        for part in parts:
            note = _Note.of(part)
            try:
                self._rows.write(part.content)
                self._rows.flush()
                self._log.write(_line(note))
                self._log.flush()
            except OSError as error:
                told = write_failure(error, self.output, self.lines)
                raise UsageError(f"{told}; the same command goes on with what is in {self.lines.parent}") from None
            self._notes.append(note)

    def close(self) -> None:
        for file in (self._rows, self._log):
            try:
                file.close()
            except OSError as error:  # what a full disk did not take, of a part that does not count
                _log.debug("%s: %s", self.output, error)


@contextmanager
def unfinished(output: Path, facts: Mapping[str, Any]) -> Iterator[Parts]:
    """The parts of an earlier attempt with the same facts, or none; the folder is held for this process.

    It is swept when the work ends well, when nothing was finished, and when the rows turn out to be unusable.

    Raises:
        UsageError: another process works there, the folder holds something else, or it cannot be written.
    """
    folder = parts_folder(output)
    try:
        with locked(folder):
            yield from _held(folder, output, facts)
    finally:
        with suppress(OSError):  # it is not empty, or another process has just come
            folder.rmdir()


def _held(folder: Path, output: Path, facts: Mapping[str, Any]) -> Iterator[Parts]:
    notes = _kept(folder, facts)
    if not notes:
        _remove(folder, ROWS, LOG)  # before a new manifest speaks for them
    _write_manifest(folder, facts, output)
    parts = Parts(output, notes)
    is_over = False
    try:
        yield parts
        is_over = True
    except DataError:  # other rows will come: nothing to go on with
        is_over = True
        raise
    finally:
        parts.close()
        if is_over or len(parts) == 0:
            _sweep(folder)


def _kept(folder: Path, facts: Mapping[str, Any]) -> list[_Note]:
    found = _manifest(folder)
    if found is None:
        names = {path.name for path in folder.iterdir()} - {LOCK}
        foreign = sorted(name for name in names if not _LEFTOVER.fullmatch(name))
        if foreign:
            raise UsageError(f"{folder} holds no unfinished prediction but {', '.join(foreign[:3])}: move it away")
        return []
    changed = [name for name in facts if found.get(name) != facts[name]]
    if changed:
        _log.warning("%s: other %s than in the parts there: beginning again", folder, " and ".join(changed))
        return []
    notes = _sound(folder)
    _log.warning("%s: going on after %d rows", folder, sum(note.rows for note in notes))
    return notes


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _sound(folder: Path) -> list[_Note]:
    """The first parts that are whole, as their sha256 says."""
    notes: list[_Note] = []
    try:
        with (folder / ROWS).open("rb") as rows, (folder / LOG).open("rb") as log:
            for line in log:
                note = _Note(**json.loads(line))
                if _digest(rows, note.size) != note.sha256:
                    break
                notes.append(note)
    except (OSError, ValueError, RecursionError, TypeError):  # the last line may be half a one
        return notes
    return notes


def _digest(rows: IO[bytes], size: int) -> str:
    found = hashlib.sha256()
    while size > 0 and (block := rows.read(min(size, _READ))):
        found.update(block)
        size -= len(block)
    return found.hexdigest()


def _opened(path: Path, size: int) -> IO[bytes]:
    """The file for writing at its end, cut to a size."""
    file = path.open("r+b" if exists(path) else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _line(note: _Note) -> bytes:
    return json.dumps(asdict(note)).encode() + b"\n"


def _write_manifest(folder: Path, facts: Mapping[str, Any], output: Path) -> None:
    temporary = folder / f".{MANIFEST}.tmp-0"
    try:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        temporary.replace(folder / MANIFEST)
    except OSError as error:
        raise write_failure(error, output, temporary) from None


def _sweep(folder: Path) -> None:
    """Removes what a prediction made there; foreign files stay."""
    if is_folder(folder):
        _remove(folder, *(path.name for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)))
        _remove(folder, ROWS, LOG, MANIFEST)  # the manifest last: it says that the others are ours


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)

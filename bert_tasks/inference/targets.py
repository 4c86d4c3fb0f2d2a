"""Where an output goes, checked before any work is done for it, and what became of it.

Owns what may be written where. Must not know how predictions are made.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bert_tasks.data.writers import DELIMITERS, FORMS, check_extension, check_place, is_special, linked
from bert_tasks.errors import UsageError
from bert_tasks.inference.rows_out import Writing
from bert_tasks.model.inputs import Data
from bert_tasks.paths import beside, exists, resolved
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task

STANDARD = "-"  # standard input, or standard output


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What became of a prediction.

    Attributes:
        rows: that were predicted; of ``truncated`` of them not all was read, as ``cuts`` tells people.
        rejected: rows that were left out; ``rejects`` is the file that says why.
        resumed: rows that an earlier attempt had finished.
        notes: what else was left out when the rows were read, and what of them the output's format cannot hold.
    """

    rows: int
    truncated: int
    rejected: int
    rejects: Path | None = None
    resumed: int = 0
    cuts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What to tell people beside the number of rows."""
        lines = list(self.notes)
        if self.resumed:
            lines.append(f"{self.resumed} of {self.rows} rows were finished by an earlier attempt")
        if self.rejects is not None:
            lines.append(f"{self.rejected} of {self.rows + self.rejected} rows were left out: {self.rejects}")
        return [*lines, *self.cuts]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file or an open stream.

    Attributes:
        form: jsonl, csv, tsv, parquet, or a task's own extension (``rendered``).
        rejects: the file for rows that are left out; None: none are.
    """

    path: Path | None
    stream: IO[bytes] | None
    form: str
    rendered: bool
    rejects: Path | None

    def check_places(self, data: Data) -> None:
        """Looks at the disk: only the process that writes can.

        Raises:
            UsageError: a file cannot be written, or would overwrite the input or another one.
        """
        if self.path is not None:
            check_place(self.path)
        if self.rejects is not None and not is_special(self.rejects):
            check_place(self.rejects)
        _check_apart([("output", self.path), ("input", _source(data)), ("rejects", self.rejects)])

    def check_task(self, task: Task, data: Data, *, logits: bool = False) -> None:
        """Raises UsageError if the extension is another task's or has no logits, or a file beside the output would
        overwrite one."""
        if self.path is None or not self.rendered:
            return
        if self.form not in task.file_formats:
            raise UsageError(f"{self.path}: {task.name} has no output format {self.form!r}; use {_names(FORMS)}")
        if logits:
            raise UsageError(f"{self.path}: {self.form} has no place for logits; use {_names(FORMS)}")
        for name in filter(None, task.render(self.form, [], [])):
            beside = beside_output(self.path, name)
            _check_apart([(f"{name} of the output", beside), ("input", _source(data)), ("rejects", self.rejects)])


def beside_output(path: Path, name: str) -> Path:
    """The place of a file that a task's format has beside the one asked for."""
    return beside(path.with_name(path.stem), after=f".{name}")


def target_of(output: str | Path | IO[bytes], data: Data, writing: Writing, task: type[Task] | None) -> Target:
    """The target of an output, from names alone.

    Args:
        task: one that is not in ``TASKS``, for its file formats.

    Raises:
        UsageError: what is asked for does not exist or does not go together.
    """
    if writing.on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {writing.on_error!r}, expected 'fail' or 'skip'")
    if writing.format is not None and writing.format not in FORMS:
        raise UsageError(f"there is no output format {writing.format!r}; choose {', '.join(FORMS)}")
    if output == STANDARD or not isinstance(output, str | Path):
        return _stream_target(sys.stdout.buffer if isinstance(output, str | Path) else output, data, writing)
    path = Path(output)
    kinds = [*TASKS.values(), *([] if task is None else [task])]
    known = sorted({extension for kind in kinds for extension in kind.file_formats})
    if writing.format is None:
        check_extension(path, others=known)
    rendered = writing.format is None and path.suffix in known
    form = path.suffix if rendered else path.suffix[1:] if writing.format is None else writing.format
    rejects = _rejects(beside(path, after=".rejects.jsonl"), data, writing)
    return Target(path=linked(path), stream=None, form=form, rendered=rendered, rejects=rejects)


def _stream_target(stream: IO[bytes], data: Data, writing: Writing) -> Target:
    form = "jsonl" if writing.format is None else writing.format
    if form not in ("jsonl", *DELIMITERS):
        raise UsageError(
            f"{form} cannot be written to a stream: give a file, or the format {_names(DELIMITERS)}, jsonl"
        )
    return Target(path=None, stream=stream, form=form, rendered=False, rejects=_rejects(None, data, writing))


def _rejects(usual: Path | None, data: Data, writing: Writing) -> Path | None:
    if writing.on_error == "fail":
        if writing.rejects is not None:
            raise UsageError("a file for rejects is written with on_error = 'skip' only (--on-error skip)")
        return None
    if not isinstance(data, str | Path):
        raise UsageError("on_error = 'skip' is for files; of rows in memory leave the bad ones out")
    chosen = usual if writing.rejects is None else writing.rejects
    if chosen is None:
        raise UsageError("say where the rows go that are left out: --rejects FILE")
    return linked(chosen)


def _source(data: Data) -> Path | None:
    return Path(data) if isinstance(data, str | Path) and data != STANDARD else None


def _check_apart(places: Sequence[tuple[str, Path | None]]) -> None:
    named = [(what, place) for what, place in places if place is not None]
    for number, (what, place) in enumerate(named):
        for other, second in named[:number]:
            if _same(place, second):
                raise UsageError(f"{place} is {other} and {what} at once: choose another name for the output")


def _same(left: Path, right: Path) -> bool:
    if exists(left) and exists(right):
        return os.path.samefile(left, right)
    return resolved(left) == resolved(right)


def _names(forms: Iterable[str]) -> str:
    return ", ".join(f".{form}" for form in forms)

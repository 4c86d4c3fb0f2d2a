"""Rows out: JSON Lines, and tables with one column per field made of them.

Owns the output formats of text, what a cell may hold, and that a file appears whole or not at all. Must not know what
the rows mean.
"""

import csv
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from bert_tasks.errors import UsageError
from bert_tasks.paths import beside, exists, is_file, is_folder, is_link, resolved

DELIMITERS = {"csv": ",", "tsv": "\t"}
FORMS = ("jsonl", *DELIMITERS, "parquet")

# What a spreadsheet may take for a formula (some read full-width signs as plain ones, and skip a leading tab or end of
# line), and the mark that says it is a text; so marked texts get one more.
_FORMULA = re.compile(
    "'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}]"
)
_MARK = "'"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def check_extension(path: Path, *, others: Sequence[str] = ()) -> None:
    """Raises UsageError for an extension that is neither one of ``FORMS`` nor of ``others``."""
    known = (*(f".{form}" for form in FORMS), *others)
    if path.suffix not in known:
        raise UsageError(f"{path}: the output's extension must be {', '.join(known[:-1])} or {known[-1]}")


def check_place(path: Path) -> None:
    """Refuses the place of a file before any work is done for it.

    Raises:
        UsageError: a folder, a device or a pipe is there, or the file's folder does not exist or cannot be written.
    """
    if is_folder(path):
        raise UsageError(f"{path} is a folder, expected the name of a file")
    if is_special(path):
        raise UsageError(f"{path} is a device or a pipe, which no file can replace; - writes to standard output")
    folder = path.absolute().parent
    if not is_folder(folder):
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path}: the folder {path.parent} is not writable")


def is_special(path: Path) -> bool:
    """Whether a device, a pipe or a socket is there."""
    return exists(path) and not is_file(path) and not is_folder(path)


def linked(path: Path) -> Path:
    """The file itself, where the path is a link to it: the link is to stay."""
    return resolved(path) if is_link(path) else path


def json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_table(lines: Path, target: Path, delimiter: str, *, raw: bool) -> None:
    """Makes a table of JSON lines; memory does not grow with them. Any row may bring a new column.

    Args:
        raw: texts that a spreadsheet would take for a formula stay as they are; see ``cell``.

    Raises:
        UsageError: the file cannot be written.
    """
    names = list(dict.fromkeys(name for row in read_lines(lines) for name in flat(row)))
    with whole_file(target, lines.parent) as file:
        table = TableWriter(file, names, delimiter, raw=raw)
        for row in read_lines(lines):
            table.write(flat(row))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


class TableWriter:
    """Rows of one table, whose columns are known."""

    def __init__(self, file: TextIO, names: Sequence[str], delimiter: str, *, raw: bool) -> None:
        self.names = list(names)
        self._raw = raw
        self._writer = csv.writer(_LineFeeds(file), delimiter=delimiter, lineterminator="\r\n")
        if self.names:
            self._writer.writerow([cell(name, raw=raw) for name in self.names])

    def write(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow([cell(row.get(name), raw=self._raw) for name in self.names])


class _LineFeeds:
    """Ends rows with LF; the writer must believe in CRLF, or it leaves cells that hold a CR without quotes."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as columns: an object of plain values becomes columns such as ``scores.positive``."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if (
            isinstance(value, Mapping)
            and value
            and not any(isinstance(part, Mapping | list) for part in value.values())
        ):
            columns |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            columns[name] = value
    return columns


def cell(value: Any, *, raw: bool) -> Any:
    """What stands in a table for a value: lists and objects as JSON, which our readers take back.

    Unless ``raw``, a text (not a number) that starts like a formula, or like one so marked, gets a ``'`` in front.
    """
    if isinstance(value, Mapping | list | bool):
        return json.dumps(value, ensure_ascii=False)
    if raw or not isinstance(value, str) or not _FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return _MARK + value


@contextmanager
def whole_file(path: Path, folder: Path | None = None) -> Iterator[TextIO]:
    """A text file that appears under its name when all of it is written and on the disk, or not at all.

    Args:
        folder: where it grows, on the same file system; default: where it will be.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = beside(path if folder is None else folder / path.name, before=".", after=f".tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise write_failure(error, path, temporary) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_failure(error: OSError, path: Path, partial: Path) -> UsageError:
    """Why a file cannot be written; of a full disk the bytes that were written and those that are free."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(f"{path}: cannot write the output ({error.strerror})")
    written = partial.stat().st_size if exists(partial) else 0
    free = shutil.disk_usage(path.absolute().parent).free
    return UsageError(
        f"{path}: cannot write the output (no space left: {written} bytes written, more needed, {free} bytes free)"
    )

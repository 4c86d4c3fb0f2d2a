"""Rows out: JSON Lines, a table with one column per field, or a text that somebody else made.

Owns the output formats and that a file appears whole or not at all. Must not know what the rows mean.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from bert_tasks.errors import UsageError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def checked_output(path: Path, *, others: Sequence[str] = ()) -> Path:
    """Refuses an output path before any work is done for it.

    Args:
        others: extensions that are written beside those of ``write_rows``.

    Raises:
        UsageError: an unknown extension, a folder, or a folder that does not exist.
    """
    known = (".jsonl", *_DELIMITERS, *others)
    if path.suffix not in known:
        raise UsageError(f"{path}: the output's extension must be {', '.join(known[:-1])} or {known[-1]}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    return path


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Writes rows as they come, in the format of the extension, and counts them; memory does not grow with them.

    In a table, nested fields become columns such as ``scores.positive``.

    Raises:
        UsageError: the file cannot be written.
    """
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            return _write_lines(rows, file)
        with TemporaryFile("w+", encoding="utf-8", dir=path.parent) as waiting:
            return _write_table(rows, file, _DELIMITERS[path.suffix], waiting)


def _write_lines(rows: Iterable[Mapping[str, Any]], file: TextIO) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        count += 1
    return count


def _write_table(rows: Iterable[Mapping[str, Any]], file: TextIO, delimiter: str, waiting: TextIO) -> int:
    """Any row may bring a new column, and the header comes first: so rows wait in a file without a name."""
    names: dict[str, None] = {}

    def flat_rows() -> Iterator[dict[str, Any]]:
        for row in rows:
            flat = dict(_flat(row))
            names.update(dict.fromkeys(flat))
            yield flat

    count = _write_lines(flat_rows(), waiting)
    waiting.seek(0)
    writer = csv.DictWriter(file, list(names), delimiter=delimiter, lineterminator="\n")
    if names:
        writer.writeheader()
    writer.writerows(map(json.loads, waiting))
    return count


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name when all of it is written, or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the output ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _cell(value)


def _cell(value: Any) -> Any:
    """Lists of plain values with ``;`` between them; as JSON where that would not be clear."""
    if not isinstance(value, list):
        return value
    if any(isinstance(part, Mapping | list) or ";" in str(part) for part in value):
        return json.dumps(value, ensure_ascii=False)
    return ";".join(map(str, value))

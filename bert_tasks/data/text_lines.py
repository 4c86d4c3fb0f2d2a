"""Texts, one a line, and what a stream holds whose format nobody stated.

Owns how both are told apart from tables and JSON. Must not know tasks or models.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from bert_tasks.data.records import Record, Records, json_content, open_text
from bert_tasks.errors import UsageError

TEXT = "text"  # the column that the lines are
_DELIMITERS = re.compile(r"[,;\t|]")


@contextmanager
def text_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """One row a line: its text, empty lines too, which then get a prediction as the others do."""
    with open_text(path, encoding=encoding, newline="\n") as lines:
        yield Records((TEXT,), _text_rows(lines))


@contextmanager
def detected_records(path: Path, *, encoding: str, headers: Collection[str], called: str) -> Iterator[Records]:
    """The rows of JSON or of texts, as the first line shows; see `detected_format`."""
    with open_text(path, encoding=encoding, newline="\n") as lines:
        first = next(lines, "")
        if _format_of(first, headers, called) == "jsonl":
            yield json_content(chain([first], lines), path)
        else:
            yield Records((TEXT,), _text_rows(chain([first] if first else [], lines)))


def detected_format(path: Path, *, encoding: str, headers: Collection[str], called: str) -> str:
    """jsonl or text, as the first line shows.

    Args:
        headers: names of columns; a first line with one of them is the header of a table.
        called: the file's name in messages.

    Raises:
        UsageError: it is a table or a parquet file, whose format must be stated.
    """
    with open_text(path, encoding=encoding, newline="\n") as lines:
        return _format_of(next(lines, ""), headers, called)


def _format_of(line: str, headers: Collection[str], called: str) -> str:
    if line.startswith("PAR1"):
        raise UsageError(f"{called}: a parquet file; add --format parquet")
    named = [cell for cell in map(_plain_cell, _DELIMITERS.split(line)) if cell in headers]
    if named:
        raise UsageError(
            f"{called}: the first line names the column {named[0]!r}, as the header of a table does; add --format csv, "
            "tsv, ..., or --format text if every line is a text"
        )
    return "jsonl" if _is_json(line) else "text"


def _plain_cell(cell: str) -> str:
    return cell.strip().strip('"')


def _is_json(line: str) -> bool:
    """Whether the line is an object, an array of objects, or begins one that goes over several lines."""
    start = line.strip()
    try:
        value = json.loads(start)
    except (ValueError, RecursionError):
        return start in ("{", "[", "[{") or start.startswith(('{"', '[{"'))
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _text_rows(lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        yield Record(number, {TEXT: line.removesuffix("\n").removesuffix("\r")})

"""Texts, one a line, and what a stream holds whose format nobody stated.

Owns how both are told apart from tables and JSON. Must not know tasks or models.

Parsing of delimited text: with csv's quoting rules, or plain as in the GLUE files.

Owns headers, ragged rows and line numbers. Must not know tasks, labels or canonical values.
"""

import csv
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from bert_tasks.data.formats import Format
from bert_tasks.data.records import Record, Records, is_encodable, json_content, open_text
from bert_tasks.errors import DataError, UsageError

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


_LARGEST_CELL = 2**31 - 1


@contextmanager
def quoted_records(path: Path, *, delimiter: str, encoding: str, header: bool) -> Iterator[Records]:
    """Rows of a csv file: quoted cells may hold delimiters, line ends and doubled quotes; CR ends a line too.

    Quoting is strict: text after a closing quote is a fault of the row instead of being glued to the cell. Without a
    header the columns are called by their number, from "0".
    """
    with open_text(path, encoding=encoding, newline="") as lines, _cells_of_any_size():
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            line, first = _first_row(reader)
        except csv.Error as error:
            raise DataError(f"{path}:1: the first line cannot be read: {error}") from error
        if header:
            columns = _header(first, path)
            yield Records(columns, _quoted_rows(reader, columns, delimiter))
        else:
            columns = _numbers(first, path)
            row = Record(line, dict(zip(columns, first, strict=True)))
            yield Records(columns, chain([row], _quoted_rows(reader, columns, delimiter)))


@contextmanager
def plain_records(path: Path, layout: Format, *, delimiter: str, encoding: str, header: bool) -> Iterator[Records]:
    """Rows of a file without quoting: a quote is a character like any other, only LF and CRLF end a line."""
    with open_text(path, encoding=encoding, newline="\n") as lines:
        numbered = ((number, _cells(line, delimiter)) for number, line in enumerate(lines, start=1))
        rows = ((number, cells) for number, cells in numbered if cells != [""])
        first = next(rows, None)
        if first is None:
            raise _empty(path)
        if layout.headless and first[1][0] != "index":
            columns, body = layout.headless, chain([first], rows)
        elif not header:
            columns, body = _numbers(first[1], path), chain([first], rows)
        else:
            columns, body = _header(first[1], path), chain(rows)
        yield Records(columns, (_plain_record(number, cells, columns, layout, delimiter) for number, cells in body))


def _first_row(reader: Any) -> tuple[int, list[str]]:
    """The first line that is not blank: the number it starts at, and its cells; none in an empty file."""
    while True:
        line = reader.line_num + 1
        cells = next(reader, None)
        if cells is None or cells:
            return line, [] if cells is None else cells


def _quoted_rows(reader: Any, columns: Sequence[str], delimiter: str) -> Iterator[Record]:
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Record(line, {}, _quoting_fault(error))
            continue
        if cells is None:
            return
        if cells:
            yield _record(line, cells, columns, delimiter)


def _plain_record(line: int, cells: list[str], columns: Sequence[str], layout: Format, delimiter: str) -> Record:
    if layout.skips_short_rows and len(cells) < len(columns):
        return Record(line, {}, skip=True)
    return _record(line, cells, columns, delimiter)


def _record(line: int, cells: list[str], columns: Sequence[str], delimiter: str) -> Record:
    if len(cells) == len(columns):
        return Record(line, dict(zip(columns, cells, strict=True)))
    widest = "first line" if tuple(columns) == _numbered_columns(len(columns)) else "header"
    fault = f"{len(cells)} cell{'s' if len(cells) != 1 else ''} where the {widest} has {len(columns)}"
    hint = f"; put a cell that holds {delimiter!r} in double quotes" if len(cells) > len(columns) else ""
    return Record(line, {}, fault + hint, raw=delimiter.join(cells))


def _quoting_fault(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a double quote that opens a cell here is never closed"
    return f"{error}; double the quotes inside a quoted cell, or read an unquoted tab file as 'tsv/plain'"


def _header(cells: list[str], path: Path) -> tuple[str, ...]:
    if not cells:
        raise _empty(path)
    undecodable = next((cell for cell in cells if not is_encodable(cell)), None)
    if undecodable is not None:
        raise DataError(
            f"{path}:1: the column name {undecodable!r} has bytes that the encoding does not know; state the file's "
            "encoding, e.g. encoding = 'latin-1' (--encoding)"
        )
    named = [cell for cell in cells if cell != ""]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}:1: the header names {', '.join(map(repr, twice))} twice; give each column its own name"
        )
    return tuple(cells)


def _numbers(first: list[str], path: Path) -> tuple[str, ...]:
    """The names of columns that no header names."""
    if not first:
        raise _empty(path)
    return _numbered_columns(len(first))


def _numbered_columns(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _cells(line: str, delimiter: str) -> list[str]:
    return line.removesuffix("\n").removesuffix("\r").split(delimiter)


def _empty(path: Path) -> DataError:
    return DataError(
        f"{path}: the file is empty; it needs a header line with the column names, then rows (or header = false)"
    )


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """csv's limit on a cell (128 KB) belongs to the whole process, so it is put back afterwards."""
    before = csv.field_size_limit(_LARGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)

"""A part of a data file, to see what it holds.

Owns the choice of the parser, an even sample of the rows, and what a recipe must state of a file beside its path. Must
not know tasks or recipes.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tasks.data.formats import FORMATS, Format, file_format
from bert_tasks.data.problems import did_you_mean, shortened
from bert_tasks.data.readers import Reading, file_records
from bert_tasks.data.records import Record, found_encoding, is_encodable
from bert_tasks.errors import DataError

_MOST_ROWS = 20_000
_LONGEST_HEADER = 5  # words
_MOST_ROWS_PER_CLASS = 100  # a name in fewer of them is no class
_DELIMITERS = (";", "\t", "|", ",")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data file as far as it was read.

    Attributes:
        rows: evenly drawn from all of the file's ``count`` rows, in order; ``faults`` could not be read.
        stated: what a recipe must say of the file beside its path.
        notes: why it must.
    """

    path: Path
    layout: Format
    rows: Sequence[Mapping[str, Any]]
    count: int
    faults: Sequence[str]
    stated: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_source(path: Path, *, format: str | None, encoding: str, delimiter: str | None) -> Source:
    """Reads a file once, keeping a sample; finds a csv file's delimiter and tab files without quoting.

    Raises:
        DataError: there is no such file, or most of it is not what its name says.
    """
    check_file(path)
    layout = file_format(format, path)
    stated = {} if format is None else {"format": format}
    found = None if layout.name == "parquet" else found_encoding(path, encoding)
    encoding = encoding if found is None else found
    stated |= {} if encoding == "utf-8" else {"encoding": encoding}
    stated |= {} if delimiter is None else {"delimiter": delimiter}
    source = _read(path, layout, encoding, stated)
    if layout.name in ("csv", "tsv") and format is None and delimiter is None:
        source = _with_header_note(_read_better(source, encoding))
    if source.count == 0 or len(source.faults) >= source.count:
        first = source.faults[0] if source.faults else "no rows"
        raise DataError(f"{path}: cannot be read as {layout.name}: {first}; state what it is with --format")
    _check_encoding(source, encoding)
    return source


def _read_better(source: Source, encoding: str) -> Source:
    """The file with another delimiter if that gives columns, or without quoting if that leaves fewer faults."""
    names = list(dict.fromkeys(name for row in source.rows for name in row))
    mark = next((mark for mark in _DELIMITERS if len(names) == 1 and mark in names[0]), None)
    if mark is not None:
        note = f"the columns are parted by {mark!r}"
        return replace(_read(source.path, source.layout, encoding, {**source.stated, "delimiter": mark}), notes=(note,))
    if source.layout.name != "tsv" or not source.faults:
        return source
    stated = {**source.stated, "format": "tsv/plain"}
    plain = _read(source.path, FORMATS["tsv/plain"], encoding, stated)
    note = "quotes are characters like any other (with csv's rules rows could not be read)"
    return replace(plain, notes=(note,)) if len(plain.faults) < len(source.faults) else source


def _with_header_note(source: Source) -> Source:
    """Notes a first line that looks like a row. Raises DataError where it is one for all that can be seen."""
    names = list(dict.fromkeys(name for row in source.rows for name in row))
    for name in names:
        count = sum(row.get(name) == name for row in source.rows)
        if count > 1 and count * _MOST_ROWS_PER_CLASS > len(source.rows):
            raise DataError(
                f"{source.path}: the first line should name the columns, but {shortened(name)} stands in {count} rows "
                "of its column too: add a line such as text,label on top, or state --format (GLUE's CoLA: glue/cola)"
            )
    odd = next((name for name in names if name.strip().isdecimal() or len(name.split()) > _LONGEST_HEADER), None)
    if odd is None:
        return source
    note = f"the first line gives the columns' names, but {shortened(odd)} looks like a value: is the header missing?"
    return replace(source, notes=(*source.notes, note))


def _read(path: Path, layout: Format, encoding: str, stated: Mapping[str, str]) -> Source:
    delimiter = stated.get("delimiter", layout.delimiter)
    faults: list[str] = []
    with file_records(path, layout, Reading(encoding=encoding, delimiter=delimiter)) as records:
        rows, count = _sample(records.rows, faults)
    return Source(path=path, layout=layout, rows=rows, count=count, faults=faults, stated=stated)


def _sample(records: Iterator[Record], faults: list[str]) -> tuple[list[Mapping[str, Any]], int]:
    """Up to ``_MOST_ROWS`` rows, each as likely as any other, in file order, and how many there are."""
    chance = random.Random(0)
    kept: list[tuple[int, Mapping[str, Any]]] = []
    count = 0
    for record in records:
        if record.skip:
            continue
        if record.fault is not None:
            faults.append(f"line {record.line}: {record.fault}")
            continue
        place = len(kept) if count < _MOST_ROWS else chance.randint(0, count)
        if place < _MOST_ROWS:
            kept[place : place + 1] = [(count, record.cells)]
        count += 1
    return [cells for _, cells in sorted(kept, key=lambda row: row[0])], count


def check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path}: a folder where a file was expected")
    if not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such file{did_you_mean(path.name, near)}")


def _check_encoding(source: Source, encoding: str) -> None:
    """Raises DataError for what the readers make of a byte that the encoding does not know."""
    for row in source.rows:
        for name, value in row.items():
            text = f"{name}{value}"
            if not is_encodable(text):
                raise DataError(
                    f"{source.path}: column {name!r} holds bytes that are not {encoding}; state the file's encoding, "
                    "such as --encoding latin-1"
                )

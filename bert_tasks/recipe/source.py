"""A sample of a data file, for `init`.

Owns the choice of the parser, an even sample of the rows, and the reading options that a recipe must state for a file.
"""

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tasks.data.columns import ENCODING_EXAMPLE
from bert_tasks.data.formats import FORMATS, Format, file_format
from bert_tasks.data.problems import shortened
from bert_tasks.data.readers import ReadOptions, existing_file, file_records
from bert_tasks.data.records import TEXT, found_encoding, is_encodable
from bert_tasks.errors import DataError

_MOST_ROWS = 20_000
_LONGEST_HEADER = 5  # words
_MOST_ROWS_PER_CLASS = 100  # a name in fewer of them is no class
_PLAIN = "quotes are ordinary characters (rows could not be read with csv's rules)"
_UNKNOWN_BYTE = re.compile("[\udc80-\udcff]")  # as surrogateescape decodes it
_DELIMITERS = (";", "\t", "|", ",")


Stated = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data file and a sample of its rows.

    Attributes:
        columns: the names in the header, or those of the first row.
        rows: evenly drawn from all of the file's ``count`` rows, in order; ``faults`` could not be read.
        stated: the reading options that a recipe must state.
        notes: the reasons for them.
        is_given: whether the caller named the format, whose columns are then those of the task.
    """

    path: Path
    layout: Format
    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    count: int
    faults: Sequence[str]
    stated: Stated
    notes: tuple[str, ...] = ()
    is_given: bool = False

    @property
    def reading(self) -> ReadOptions:
        """The options with which the readers give the same rows."""
        return ReadOptions(**{"format": self.layout.name, **self.stated})


def read_source(path: Path, given: ReadOptions) -> Source:
    """Reads a file once and keeps a sample; detects what is not given of a csv file.

    Args:
        path: The file.
        given: Known reading options. Delimiter, header and quoting are detected if they are not stated, and so is the
            encoding, from the first bytes of the file.

    Returns:
        The rows, and what a recipe must state.

    Raises:
        DataError: The file does not exist, or most of it is not in the format of its name.
    """
    existing_file(path)
    layout = file_format(given.format, path)
    found = None if layout.name == "parquet" else found_encoding(path, given.encoding)
    encoding = given.encoding if found is None else found
    options: dict[str, str | bool | None] = {"format": given.format, "delimiter": given.delimiter}
    options |= {"encoding": None if encoding == "utf-8" else encoding, "header": given.header}
    stated = {name: value for name, value in options.items() if value is not None}
    if layout.name in ("csv", "tsv") and given.header is None:
        source = _with_header(path, layout, stated)
    elif layout.name == "text":
        source = _with_documents(_read(path, layout, stated))
    else:
        source = _read_best(path, layout, stated)
    if source.count == 0 or len(source.faults) >= source.count:
        first = source.faults[0] if source.faults else "no rows"
        raise DataError(f"{path}: cannot be read as {layout.name}: {first}; name its format with --format")
    for row in source.rows:
        for name, value in row.items():
            if not is_encodable(name) or _UNKNOWN_BYTE.search(str(value)):
                raise DataError(
                    f"{path}: column {name!r} has bytes that are not {'utf-8' if encoding is None else encoding}; "
                    f"name the file's encoding with --encoding, {ENCODING_EXAMPLE}"
                )
    return replace(source, is_given=given.format is not None)


def _with_documents(source: Source) -> Source:
    """A file of text, with what its documents are: lines between blank lines, or each line where none is blank."""
    if any(not str(row[TEXT]).strip() for row in source.rows):
        return replace(source, notes=("blank lines separate documents",))
    note = "no line is blank, so each line is a document"
    return replace(source, stated={**source.stated, "document": "line"}, notes=(note,))


def _with_header(path: Path, layout: Format, stated: Stated) -> Source:
    """The file with its first line as the header, or as a row if it resembles the other rows."""
    notes = (
        'the first line is a row like the others, so there is no header and the columns are named "0", "1" and so on',
    )
    try:
        source = _read_best(path, layout, stated)
    except DataError:  # names that appear twice: is the first line a row?
        rows = _read_best(path, layout, {**stated, "header": False})
        if len(rows.rows) < 2 or not _is_row(rows.rows[0], rows.rows[1:]):
            raise
        return replace(rows, notes=(*rows.notes, *notes))
    names = {name: name for row in source.rows for name in row}
    # Names that count the columns, as pandas calls those without names; an index before them has no name.
    numbers = [name.strip() for name in names if name.strip()]
    if len(numbers) > 1 and numbers[0] in ("0", "1"):
        first = int(numbers[0])
        if numbers == [str(number) for number in range(first, first + len(numbers))]:
            return source
    if _is_row(names, source.rows):
        rows = _read_best(path, layout, {**stated, "header": False})
        return replace(rows, notes=(*rows.notes, *notes))
    odd = next((name for name in names if name.strip().isdecimal() or len(name.split()) > _LONGEST_HEADER), None)
    if odd is None:
        return source
    note = f"the first line gives the columns' names, but {shortened(odd)} looks like a value: is the header missing? "
    return replace(source, notes=(*source.notes, f"{note}Then add --no-header"))


def _is_row(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a value of the first line occurs in its column again as often as a class does."""
    for name, value in first.items():
        count = sum(row.get(name) == value for row in others) if str(value).strip() else 0
        if count > 1 and count * _MOST_ROWS_PER_CLASS > len(others):
            return True
    return False


def _read_best(path: Path, layout: Format, stated: Stated) -> Source:
    """The file, with another delimiter if that gives columns, or without quoting if that gives fewer faults."""
    try:
        source = _read(path, layout, stated)
    except DataError:  # the first line of a tab file may break csv's rules of quoting
        if layout.name != "tsv" or "format" in stated:
            raise
        source = replace(_read_plain(path, stated), notes=(_PLAIN,))
    if source.layout.name not in ("csv", "tsv"):
        return source
    if "delimiter" not in source.stated:
        source = _with_delimiter(source)
    wrapped = any("\n" in str(value) for row in source.rows for value in row.values())
    mark = source.stated.get("delimiter", source.layout.delimiter)
    if "format" in source.stated or mark != "\t" or not (source.faults or wrapped):
        return source
    plain = _read_plain(path, source.stated)
    is_better = len(plain.faults) < len(source.faults) or (wrapped and not plain.faults)
    return replace(plain, notes=(*source.notes, _PLAIN)) if is_better else source


def _with_delimiter(source: Source) -> Source:
    """The file with the delimiter of the fewest faults, if the usual one gives a single column or many faults."""
    first = source.rows[0].values() if source.rows else ()
    names = first if source.stated.get("header") is False else source.columns
    if len(names) != 1 and len(source.faults) * 10 <= source.count:
        return source
    usual = source.layout.delimiter
    line = str(usual).join(map(str, names))
    best: Source | None = None
    for mark in _DELIMITERS:
        if mark == usual or mark not in line:
            continue
        with suppress(DataError):  # by this mark the header has names that appear twice
            try:
                tried = _read(source.path, source.layout, {**source.stated, "delimiter": mark})
                is_broken = len(tried.faults) * 2 > tried.count
            except DataError:
                if mark != "\t":
                    raise
                is_broken = True
            if mark == "\t" and is_broken:  # it breaks csv's rules of quoting
                tried = _read_plain(source.path, source.stated)
            if tried.rows and len(tried.columns) > 1 and (best is None or len(tried.faults) < len(best.faults)):
                best = tried
    if best is None or (len(names) != 1 and len(best.faults) >= len(source.faults)):
        return source
    return replace(best, notes=(f"the delimiter is {best.stated.get('delimiter', best.layout.delimiter)!r}",))


def _read_plain(path: Path, stated: Stated) -> Source:
    """A file with tabs, in which quotes are ordinary characters."""
    return _read(path, FORMATS["tsv/plain"], {**stated, "format": "tsv/plain"})


def _read(path: Path, layout: Format, stated: Stated) -> Source:
    """The file, with a uniform sample of up to ``_MOST_ROWS`` rows in their order."""
    chance = random.Random(0)
    faults: list[str] = []
    kept: list[tuple[int, Mapping[str, Any]]] = []
    count = 0
    with file_records(path, layout, ReadOptions(**{**stated, "format": layout.name})) as records:
        for record in records.rows:
            if record.skip:
                continue
            if record.fault is not None:
                faults.append(f"line {record.line}: {record.fault}")
                continue
            place = len(kept) if count < _MOST_ROWS else chance.randint(0, count)
            if place < _MOST_ROWS:
                kept[place : place + 1] = [(count, record.cells)]
            count += 1
    rows = [cells for _, cells in sorted(kept, key=lambda row: row[0])]
    columns = (tuple(rows[0]) if rows else ()) if records.columns is None else records.columns
    return Source(path=path, layout=layout, columns=columns, rows=rows, count=count, faults=faults, stated=stated)

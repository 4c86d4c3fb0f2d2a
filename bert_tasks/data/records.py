"""What every reader yields: records as they stand in the file, before any value is judged.

Owns the type, the opening of text files (byte order marks, gzip), and the parsing of JSON and parquet files. Must not
know tasks, labels or canonical values.

What a table may carry beside the columns of its task: the row as it was given, and why it cannot be used.

Owns the two columns that do so, and how a row that was given becomes JSON. Must not know formats or tasks.

Texts, one a line, and what a stream holds whose format nobody stated.

Owns how both are told apart from tables and JSON. Must not know tasks or models.

Parsing of delimited text: with csv's quoting rules, or plain as in the GLUE files.

Owns headers, ragged rows and line numbers. Must not know tasks, labels or canonical values.

Parsing of SQuAD's nested JSON, versions 1.1 and 2.0, into one record a question.

Owns the nesting and what ``is_impossible`` says. Must not know tasks, nor judge whether answers stand in their
context.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from bert_tasks.errors import DataError, UsageError

if TYPE_CHECKING:
    from bert_tasks.data.formats import Format

_GZIP = b"\x1f\x8b"
_UTF8 = "utf-8-sig"  # it reads files without a mark, too
_LOOKED_AT = 400
_MANY_ZEROS, _FEW_ZEROS = 0.4, 0.1  # shares of zero bytes
# Longer marks first: that of UTF-32 begins as that of UTF-16 does.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, _UTF8),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Record(NamedTuple):
    """One row: its line in the file, its cells by column name, and what is wrong with it as a whole.

    A row to skip is counted and not read. ``name`` finds a row that has no line of its own, in messages. ``raw`` is the
    text of a row whose cells are not known.
    """

    line: int
    cells: Mapping[str, Any]
    fault: str | None = None
    skip: bool = False
    name: str | None = None
    raw: str | None = None


class Records(NamedTuple):
    """The rows of a source; ``columns`` is None where only the rows themselves tell."""

    columns: tuple[str, ...] | None
    rows: Iterator[Record]


@contextmanager
def open_text(path: Path, *, encoding: str, newline: str) -> Iterator[TextIO]:
    """The file as text without its byte order mark; undecodable bytes become surrogates, to be reported.

    A byte order mark decides the encoding, whatever ``encoding`` says. A file that is compressed with gzip is
    decompressed as it is read, whatever its name.
    """
    codec = _text_codec(path, encoding)
    try:
        with path.open("rb") as file, _decompressed(file) as content:
            marked = _marked_encoding(content.peek(4))
            codec = codec if marked is None else marked
            with io.TextIOWrapper(content, encoding=codec, errors="surrogateescape", newline=newline) as lines:
                yield lines
    except UnicodeError as error:
        raise DataError(f"{path}: not a text in {codec!r} ({error}); state the file's encoding") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data ({error}); compress the file again") from error


def _marked_encoding(start: bytes) -> str | None:
    """The encoding that the byte order mark at a file's start says; None without one."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), None)


def is_encodable(text: str) -> bool:
    """Whether the text has no bytes that the encoding did not know, and no half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def found_encoding(path: Path, stated: str) -> str | None:
    """The encoding that the first bytes of a file show, where it is not the stated one.

    Args:
        path: A text file; where it is compressed, its content is looked at.
        stated: A Python encoding.

    Returns:
        What a byte order mark says; or, of a file that is said to be utf-8, UTF-16 without such a mark, in which every
        second byte of Latin letters is zero.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file, _decompressed(file) as content:
            start = content.peek(_LOOKED_AT)[:_LOOKED_AT]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the file cannot be read: {error}") from error
    marked = _marked_encoding(start)
    if marked is not None or _text_codec(path, stated) != _UTF8:
        return marked
    zeros = [half.count(0) / max(len(half), 1) for half in (start[0::2], start[1::2])]
    if max(zeros) > _MANY_ZEROS and min(zeros) < _FEW_ZEROS:
        return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    return None


def is_utf8_beyond_ascii(path: Path) -> bool:
    """Whether all of a text file, decompressed where it is compressed, is valid utf-8, and some of it is not ASCII.

    Raises:
        DataError: The file cannot be read.
    """
    beyond = False
    with open_text(path, encoding="utf-8", newline="") as text:
        while part := text.read(2**20):
            if "\0" in part or not is_encodable(part):
                return False
            beyond = beyond or not part.isascii()
    return beyond


def _text_codec(path: Path, encoding: str) -> str:
    """Python's name of the encoding; utf-8 may or may not begin with a mark."""
    codec = _UTF8 if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        "".encode(codec)  # also refuses codecs that are none of texts, such as base64
    except (LookupError, ValueError) as error:
        raise DataError(
            f"{path}: {encoding!r} is no encoding of texts; state one of Python's, such as 'utf-8' or 'latin-1'"
        ) from error
    return codec


def _decompressed(file: io.BufferedReader) -> io.BufferedReader:
    """The file's content; it looks ahead instead of seeking, as standard input cannot."""
    if not file.peek(2).startswith(_GZIP):
        return file
    return io.BufferedReader(gzip.GzipFile(fileobj=file, mode="rb"))


@contextmanager
def json_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """One object a line, or a JSON array of objects, which are numbered from 1; the first character decides."""
    with open_text(path, encoding=encoding, newline="\n") as lines:
        yield json_content(lines, path)


def json_content(lines: Iterator[str], path: Path) -> Records:
    """The rows of a JSON file whose lines these are."""
    blank, first = 0, ""
    for line in lines:
        if not line.isspace():
            first = line
            break
        blank += 1
    if first.lstrip().startswith("["):
        return Records(None, _array_rows("\n" * blank + first + "".join(lines), path))
    return Records(None, _json_rows(chain([first], lines), start=blank + 1))


def _array_rows(text: str, path: Path) -> Iterator[Record]:
    try:
        array = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"a JSON array that is not valid at column {error.colno}: {error.msg}"
        hint = "; of rows in one object a line (jsonl), the file must begin with '{'"
        raise DataError(f"{path}:{error.lineno}: {what}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: a JSON array that cannot be read: {error}") from error
    for number, value in enumerate(array, start=1):
        if isinstance(value, dict):
            yield Record(number, value)
        else:
            yield Record(number, {}, f'expected an object such as {{"text": "..."}}, not {value!r:.60}', raw=str(value))


def _json_rows(lines: Iterable[str], *, start: int) -> Iterator[Record]:
    for number, line in enumerate(lines, start=start):
        if line == "" or line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Record(number, {}, f"not valid JSON: {error}", raw=line.removesuffix("\n"))
            continue
        if isinstance(value, dict):
            yield Record(number, value)
        else:
            yield Record(number, {}, 'expected an object such as {"text": "..."}', raw=line.removesuffix("\n"))


@contextmanager
def parquet_records(path: Path, *, wanted: Sequence[str] | None = None) -> Iterator[Records]:
    """Rows of a parquet file with the wanted columns, or all of them.

    Label ids become names where `datasets` wrote these into the file's metadata.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            present = [name for name in columns if wanted is None or name in wanted]
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1000, columns=present))
            yield Records(columns, _numbered(batches, _class_names(file.schema_arrow)))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read ({str(error).splitlines()[0]})") from error


def dataset_records(rows: Any) -> Records:
    """Rows of a `datasets.Dataset`; label ids become names."""
    batches = (rows_of(batch) for batch in rows.iter(batch_size=1000))
    return Records(tuple(rows.column_names), _numbered(batches, _feature_class_names(rows.features)))


def rows_of(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A batch of columns as a list of rows."""
    return [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def in_batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        yield batch


def _numbered(batches: Iterable[list[dict[str, Any]]], class_names: Mapping[str, list[str]]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for cells in batch:
            number += 1
            for column, names in class_names.items():
                if column in cells:
                    cells[column] = _named(cells[column], names)
            yield Record(number, cells)


def _named(value: Any, names: list[str]) -> Any:
    """The name of a class id, or of each id in a list; -1 says that the label is hidden."""
    if isinstance(value, list):
        return [_named(part, names) for part in value]
    if value is None or value == -1:
        return None
    return names[value] if 0 <= value < len(names) else value


def _class_names(schema: Any) -> Mapping[str, list[str]]:
    from datasets import Features

    metadata = schema.metadata
    if metadata is None or b"huggingface" not in metadata:
        return {}
    return _feature_class_names(Features.from_arrow_schema(schema))


def _feature_class_names(features: Mapping[str, Any]) -> Mapping[str, list[str]]:
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: list(feature.names) for name, feature in inner.items() if isinstance(feature, ClassLabel)}


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
def plain_records(path: Path, layout: "Format", *, delimiter: str, encoding: str, header: bool) -> Iterator[Records]:
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


def _plain_record(line: int, cells: list[str], columns: Sequence[str], layout: "Format", delimiter: str) -> Record:
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


# An object whose members before a list "data" of objects are plain values, as SQuAD's "version" is.
_START = re.compile(r'\s*\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*\[\s*\{')
_SQUAD_START_LENGTH = 4096


def looks_like_squad(path: Path) -> bool:
    """Whether a .json file begins as SQuAD's do; false for a file that cannot be read."""
    try:
        with open_text(path, encoding="utf-8", newline="\n") as file:
            start = file.read(_SQUAD_START_LENGTH)
    except (OSError, DataError):
        return False
    return _START.match(start) is not None


@contextmanager
def squad_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """One record a question: id, title, question, context and answers, numbered from 1 in file order.

    Questions without ``answers`` (test data) have none. Those that are impossible have an empty list.

    Raises:
        DataError: naming the place in the file where the nesting is not SQuAD's.
    """
    with open_text(path, encoding=encoding, newline="\n") as file:
        try:
            content = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}") from error
        except RecursionError as error:
            raise DataError(f"{path}: nested too deeply to be SQuAD's JSON") from error
    yield Records(None, _questions(content, str(path)))


def _questions(content: Any, path: str) -> Iterator[Record]:
    number = 0
    for article, place in _members(content, "data", path, ""):
        title = {"title": article["title"]} if "title" in article else {}
        for paragraph, inside in _members(article, "paragraphs", path, place):
            shared = title | ({"context": paragraph["context"]} if "context" in paragraph else {})
            for question, _ in _members(paragraph, "qas", path, inside):
                number += 1
                yield _question(number, question, shared)


def _members(parent: Any, name: str, path: str, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects in a list of the parent, each with its place, such as ``data[0].paragraphs[3]``."""
    inside = f"{place}.{name}" if place else name
    if not isinstance(parent, dict) or not isinstance(parent.get(name), list):
        hint = "" if place else "; read one object a line, such as {\"question\": ...}, as format = 'jsonl'"
        raise DataError(f"{path}: no list {inside!r}, which SQuAD's JSON has{hint}")
    for number, member in enumerate(parent[name]):
        if not isinstance(member, dict):
            raise DataError(f"{path}: {inside}[{number}]: expected an object, not {member!r:.60}")
        yield member, f"{inside}[{number}]"


def _question(number: int, question: dict[str, Any], shared: dict[str, Any]) -> Record:
    cells = shared | {name: question[name] for name in ("question", "answers") if name in question}
    name = str(question["id"]) if "id" in question else None
    if name is not None:
        cells["id"] = name
    if question.get("is_impossible") is True:
        if cells.get("answers"):
            return Record(number, {}, "it has answers, but is_impossible is true; correct one of them", name=name)
        cells["answers"] = []
    return Record(number, cells, name=name)

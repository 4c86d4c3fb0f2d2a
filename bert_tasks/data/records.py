"""What every reader yields: records as they stand in the file, before any value is judged.

Owns the type, the opening of text files (byte order marks, gzip), and the parsing of JSON and parquet files. Must not
know tasks, labels or canonical values.

What a table may carry beside the columns of its task: the row as it was given, and why it cannot be used.

Owns the two columns that do so, and how a row that was given becomes JSON. Must not know formats or tasks.
"""

import codecs
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from bert_tasks.errors import DataError

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


KEPT, FAULT = "given row", "fault of the row"  # columns of the table; no task can have these names

PassthroughColumns = Literal["all", "none"] | Sequence[str]


def is_kept(column: str, keep: PassthroughColumns) -> bool:
    return keep == "all" or (keep != "none" and column in keep)


def kept_cells(cells: Mapping[str, Any], keep: PassthroughColumns) -> str:
    """The cells to keep, as a JSON object."""
    chosen = {name: value for name, value in cells.items() if is_kept(name, keep)}
    try:
        text = json.dumps(chosen, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError):  # UnicodeError is a ValueError
        text = json.dumps(plain(chosen), ensure_ascii=False)
    return text


def fault_of(record: Record, reasons: Sequence[str]) -> str:
    """A line of a reject file, in ASCII: the record's place, what is wrong with it, and all of it as it stands."""
    raw = record.raw if record.raw is not None else dict(record.cells)
    name = {} if record.name is None else {"id": record.name}
    return json.dumps({"line": record.line, **name, "reason": "; ".join(reasons), "raw": raw}, default=str)


def plain(value: Any) -> Any:
    """The value in types that JSON has: a number that is none becomes None, half a character U+FFFD."""
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    text = value if isinstance(value, str) else str(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

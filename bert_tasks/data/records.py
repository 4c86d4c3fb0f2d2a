"""Records, the rows of a source before any value is validated.

Owns the parsers of csv, tsv, text, JSON and SQuAD files (``conll`` and ``formats`` have the others). It opens text
files with byte order marks, encodings and gzip, and limits their rows as they are read.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from bert_tasks.data import limits
from bert_tasks.data.cells import ENCODING_EXAMPLE
from bert_tasks.data.limits import check_column_count, too_large
from bert_tasks.data.problems import counted
from bert_tasks.errors import DataError, argument

Document = Literal["blank-line", "line", "file"]  # a document in a file of text
GZIP = b"\x1f\x8b"
_UTF8 = "utf-8-sig"  # which reads files without a mark, too
_LOOKED_AT = 400
_SHORTEST_LINE = 16  # characters that a line counts as at least
# First bytes of files that are no text -> what they are, and what to do.
_NO_TEXT = {
    b"PK\x03\x04": "a zip file or a spreadsheet. Unpack it, or name it .xlsx",
    b"PAR1": "a parquet file. Name it .parquet, or set format = 'parquet'",
    b"%PDF-": "a PDF document. Save its text as .txt",
    bytes.fromhex("d0cf11e0a1b11ae1"): "an old document of Microsoft Office. Save it as .xlsx or .csv",
    b"version https://git-lfs": "a pointer of Git LFS instead of the file. Run `git lfs pull` where it comes from",
    b"BZh": "a file that bzip2 compressed. Unpack it, or compress it with gzip",
    bytes.fromhex("fd377a585a00"): "a file that xz compressed. Unpack it, or compress it with gzip",
    bytes.fromhex("28b52ffd"): "a file that zstd compressed. Unpack it, or compress it with gzip",
}
# Longer marks come first, because UTF-32's begins like UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, _UTF8),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MARKS_AND_BLANKS = b"".join(mark for mark, _ in MARKS) + b" \t\r\n"


class Record(NamedTuple):
    """One row of a source.

    Attributes:
        line: Line in the file, or number, from 1.
        cells: Values by column name.
        fault: Error of the row as a whole.
        skip: Reason why the row is counted and not read. None means that it is read.
        name: Identifies a row without a separate line in messages.
        raw: Text of a row whose cells are not known.
        file: File of the line, from the folder of the source, if the source has several files.
    """

    line: int
    cells: Mapping[str, Any]
    fault: str | None = None
    skip: str | None = None
    name: str | None = None
    raw: str | None = None
    file: str | None = None


class Records(NamedTuple):
    """The rows of a source.

    Attributes:
        columns: Names of the columns, or None if each row names its columns.
        rows: The rows.
        notes: Notes for people on the place of the rows, such as the sheet of a workbook.
    """

    columns: tuple[str, ...] | None
    rows: Iterator[Record]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParseOptions:
    """Options to parse a file. ``ReadOptions`` describes the attributes."""

    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    document: Document | None = None

    def __post_init__(self) -> None:
        if self.delimiter == "\\t":  # neither a shell nor a literal string of TOML makes a tab of it
            object.__setattr__(self, "delimiter", "\t")
        if self.document is not None and self.document not in get_args(Document):
            raise DataError(f"document = {self.document!r} is not one of {', '.join(map(repr, get_args(Document)))}")


class RowLines(Iterator[str]):
    """The lines of a text file, which end in an error where one row has too many characters.

    A row may have many lines, for example because a quote is never closed. So a row is what a parser reads for one
    record, and the lines are counted together until ``rows`` has yielded it. A short line counts as 16 characters,
    because parsers need far more memory and time for a line of two characters than for the characters.

    Args:
        file: The text, from its first line.
        path: Name of the file in messages.
        limit: Characters of the first row. ``limits.LARGEST_WHOLE`` lets it be a whole file of JSON.

    Raises:
        DataError: While lines are read, a row is larger than its limit. It is raised before the row is in memory.
    """

    def __init__(self, file: "io.TextIOWrapper[io.BufferedReader]", path: Path, limit: int) -> None:
        self._file, self._path = file, path
        self._line = 1
        self._begin_row(limit)

    def _begin_row(self, limit: int) -> None:
        self._first_line, self._limit, self._room = self._line, limit, limit

    def __next__(self) -> str:
        line = self._file.readline(self._room + 1)
        if line == "":
            raise StopIteration
        self._room -= max(len(line), _SHORTEST_LINE)
        if self._room < 0:
            raise self._too_large()
        self._line += 1
        return line

    def rest(self) -> str:
        """Returns the rest of the file, of which no line is left then."""
        text = self._file.read(self._room + 1)
        self._room -= len(text)
        if self._room < 0:
            raise self._too_large()
        return text

    def _too_large(self) -> DataError:
        if self._limit == limits.LARGEST_WHOLE:
            return too_large(f"{self._path}: the file", self._limit)
        return too_large(f"{self._path}:{self._first_line}: the row that begins here", self._limit)

    def rows(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records that a parser reads from the lines."""
        for record in records:
            self._begin_row(limits.LARGEST_ROW)
            yield record


def with_first_line(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Returns the first line of a text, which is empty if there is none, and all of its lines."""
    first = next(lines, "")
    if first == "":
        return first, lines
    return first, chain([first], lines)


def joined(lines: Iterator[str]) -> str:
    """Returns the rest of a text. That of a file is read at once, because it may have millions of short lines."""
    if isinstance(lines, RowLines):
        return lines.rest()
    return "".join(lines)


def begins_array(file: "io.TextIOWrapper[io.BufferedReader]") -> bool:
    """Returns True if a text, of which nothing has been read, begins as an array of JSON does."""
    start = file.buffer.peek(_LOOKED_AT)
    return start.lstrip(_MARKS_AND_BLANKS).startswith(b"[")


def check_is_text(start: bytes, path: Path) -> None:
    """Raises `DataError` if a file begins as another kind of file does."""
    kind = next((kind for mark, kind in _NO_TEXT.items() if start.startswith(mark)), None)
    if kind is not None:
        raise DataError(f"{path}: {kind}")


@contextmanager
def open_text(path: Path, *, encoding: str | None, newline: str) -> Iterator["io.TextIOWrapper[io.BufferedReader]"]:
    """Yields the file as text without its byte order mark. ``RowLines`` reads lines that may be too large.

    Undecodable bytes become surrogates, to be reported. A byte order mark takes precedence over ``encoding``. Without
    both it is utf-8. A file that is compressed with gzip is decompressed as it is read, whatever its name.
    """
    codec = _UTF8 if encoding is None or encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        "".encode(codec)  # also rejects codecs that are not for text, such as base64
    except (LookupError, ValueError) as error:
        raise DataError(
            f"{path}: {encoding!r} is not a text encoding. Choose one of Python's, such as 'utf-8' or 'cp1252'"
        ) from error
    try:
        with path.open("rb") as file:
            content = file  # it looks ahead instead of seeking, as standard input cannot
            if file.peek(2).startswith(GZIP):
                content = io.BufferedReader(gzip.GzipFile(fileobj=file, mode="rb"))
            start = content.peek(_LOOKED_AT)
            check_is_text(start, path)
            codec = next((name for mark, name in MARKS if start.startswith(mark)), codec)
            with io.TextIOWrapper(content, encoding=codec, errors="surrogateescape", newline=newline) as text:
                yield text
    except UnicodeError as error:
        raise DataError(f"{path}: not a text in {codec!r} ({error}). Set the file's encoding") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data ({error}). Compress the file again") from error


def is_encodable(text: str) -> bool:
    """Returns True if the text has no undecodable bytes and no half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_rows(lines: Iterator[str], path: Path) -> Iterator[Record]:
    """Yields the rows of JSON, of one object a line or of an array, from number 1.

    The first character decides. Lines between objects may be blank.
    """
    blank = 0
    first = next(lines, "")
    while first.isspace():
        blank, first = blank + 1, next(lines, "")
    if first.lstrip().startswith("["):
        try:
            array = json.loads("\n" * blank + first + joined(lines))
        except json.JSONDecodeError as error:
            problem = f"a JSON array that is not valid at column {error.colno} ({error.msg})"
            hint = ". A file with one object per line (jsonl) must begin with '{'"
            raise DataError(f"{path}:{error.lineno}: {problem}{hint}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: a JSON array that cannot be read ({error})") from error
        for number, value in enumerate(array, start=1):
            yield _object_record(number, value, str(value))
        return
    for number, line in enumerate(chain([first], lines), start=blank + 1):
        if line == "" or line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Record(number, {}, f"not valid JSON ({error})", raw=line.removesuffix("\n"))
        else:
            yield _object_record(number, value, line.removesuffix("\n"))


def _object_record(number: int, value: Any, raw: str) -> Record:
    if isinstance(value, dict):
        return Record(number, value)
    return Record(number, {}, f'expected an object such as {{"text": "..."}}, not {value!r:.60}', raw=raw)


def dataset_records(rows: Any) -> Records:
    """Returns the rows of a ``datasets.Dataset`` with names for label ids."""
    tables = rows.with_format("arrow").iter(batch_size=1000)
    batches = chain.from_iterable(map(row_lists, tables))
    return Records(tuple(rows.column_names), numbered(batches, _class_names(rows.features)))


def arrow_records(table: Any) -> Records:
    """Returns the rows of a ``pyarrow.Table``, with names from its metadata if any."""
    batches = chain.from_iterable(map(row_lists, table.to_batches(max_chunksize=1000)))
    return Records(tuple(table.column_names), numbered(batches, schema_class_names(table.schema)))


def row_lists(rows: Any) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of an Arrow table or batch, one by one if they are large together.

    Raises:
        DataError: A row is too large.
    """
    if _expanded_size(rows) <= limits.LARGEST_WHOLE:
        yield rows.to_pylist()
        return
    for index in range(len(rows)):
        row = rows.slice(index, 1)
        if _expanded_size(row) > limits.LARGEST_WHOLE:
            raise too_large("a row", limits.LARGEST_WHOLE, "bytes")
        yield row.to_pylist()


def _expanded_size(rows: Any) -> int:
    """Returns an upper limit of the bytes of some rows, each with its own copy of a value in a dictionary."""
    size: int = rows.nbytes
    for column in rows.columns:
        for chunk in getattr(column, "chunks", [column]):
            if hasattr(chunk, "dictionary"):
                size += chunk.dictionary.nbytes * len(chunk)
    return size


def numbered(batches: Iterable[list[dict[str, Any]]], class_names: Mapping[str, list[str]]) -> Iterator[Record]:
    """Yields the rows of all batches as records from 1, with the names of the class ids of some columns."""
    for number, cells in enumerate(chain.from_iterable(batches), start=1):
        named = {name: _named(cells[name], names) for name, names in class_names.items() if name in cells}
        yield Record(number, cells | named)


def _named(value: Any, names: list[str]) -> Any:
    """Returns the names of class ids, or None for a hidden label (-1)."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if value is None or value == -1:
        return None
    return names[value] if 0 <= value < len(names) else value


def schema_class_names(schema: Any) -> Mapping[str, list[str]]:
    """Returns the columns of class ids -> their names, if ``datasets`` wrote them into an Arrow schema."""
    if schema.metadata is None or b"huggingface" not in schema.metadata:
        return {}
    from datasets import Features

    return _class_names(Features.from_arrow_schema(schema))


def _class_names(features: Mapping[str, Any]) -> Mapping[str, list[str]]:
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: list(feature.names) for name, feature in inner.items() if isinstance(feature, ClassLabel)}


TEXT, SENTENCES = "text", "sentences"  # the columns that the lines are


def text_rows(lines: Iterable[str], document: Document | None = None) -> Iterator[Record]:
    """Yields the rows of a file of text.

    Args:
        lines: Lines of the file.
        document: None makes each line a text, also an empty line, because predictions are read beside the lines.
            Otherwise the rows are the documents of a corpus, which are the lines that are not blank ("line"), the
            blocks between blank lines ("blank-line"), or the whole file. Documents of several lines have their lines as
            ``sentences``.
    """
    if document is None:
        for number, line in enumerate(lines, start=1):
            yield Record(number, {TEXT: line.removesuffix("\n").removesuffix("\r")})
        return
    first, sentences = 1, list[str]()
    for number, line in enumerate(lines, start=1):
        sentence = line.strip()
        if sentence and document == "line":
            yield Record(number, {TEXT: sentence})
        elif sentence:
            first = first if sentences else number
            sentences.append(sentence)
        elif sentences and document == "blank-line":
            yield Record(first, {TEXT: "\n".join(sentences), SENTENCES: sentences})
            sentences = []
    if sentences:
        yield Record(first, {TEXT: "\n".join(sentences), SENTENCES: sentences})


def table_records(
    lines: Iterable[str],
    path: Path,
    *,
    delimiter: str,
    header: bool,
    quoted: bool = True,
    headless: tuple[str, ...] = (),
    skips_short_rows: bool = False,
) -> Records:
    """Returns the rows of a csv file, or of a file without quoting.

    A quote is then an ordinary character. Without a header the columns are called "0", "1" and so on.

    Args:
        lines: Lines of the file, with their ends.
        path: Name of the file in messages.
        delimiter: Separator of cells.
        header: The first line names the columns.
        quoted, headless, skips_short_rows: See ``Format``.

    Raises:
        DataError: The file is empty, or its first line cannot name columns.
    """
    rows = _quoted_rows(lines, delimiter) if quoted else _plain_rows(lines, delimiter)
    first = next(rows, None)
    if first is None:
        raise DataError(
            f"{path}: the file is empty. It needs a header line with the column names, then rows (or header = false)"
        )
    _, cells, error = first
    if error is not None:
        raise DataError(f"{path}:1: the first line cannot be read ({error})") from error
    check_column_count(len(cells), f"{path}:1")
    has_names = header and (not headless or cells[0] == "index")
    if has_names:
        columns = tuple(cells)
        undecodable = next((cell for cell in cells if not is_encodable(cell)), None)
        if undecodable is not None:
            raise DataError(
                f"{path}:1: the column name {undecodable!r} has bytes that are not valid in the encoding. Set the "
                f"file's encoding ({argument('encoding', 'cp1252')}), {ENCODING_EXAMPLE}"
            )
        twice = sorted(repr(name) for name, count in Counter(cells).items() if name != "" and count > 1)
        if twice:
            names = ", ".join(twice)
            raise DataError(f"{path}:1: the header names {names} more than once. Use each name for one column")
    else:
        columns = headless if headless else tuple(map(str, range(len(cells))))
        rows = chain([first], rows)
    widest = "header" if has_names or headless else "first line"
    return Records(columns, _table_rows(rows, columns, delimiter, widest, skips_short_rows=skips_short_rows))


_TableRow = tuple[int, list[str], csv.Error | None]  # its line, and its cells or the error


def _quoted_rows(lines: Iterable[str], delimiter: str) -> Iterator[_TableRow]:
    """Yields rows whose quoted cells may hold delimiters, line ends and quotes.

    CR ends a line, too. Blank lines are no rows. Quoting is strict, so text after a closing quote is a fault of the row
    instead of a part of the cell.
    """
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield line, [], error
            continue
        if cells is None:
            return
        if cells:
            yield line, cells, None


def _plain_rows(lines: Iterable[str], delimiter: str) -> Iterator[_TableRow]:
    """Yields rows of lines that only LF and CRLF end. Blank lines are no rows."""
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix("\n").removesuffix("\r")
        if text != "":
            yield number, text.split(delimiter), None


def _table_rows(
    rows: Iterable[_TableRow], columns: tuple[str, ...], delimiter: str, widest: str, *, skips_short_rows: bool
) -> Iterator[Record]:
    """Yields the rows as records. ``widest`` names the source of the column count."""
    for line, cells, error in rows:
        if len(cells) == len(columns):
            yield Record(line, dict(zip(columns, cells, strict=True)))
        elif error is not None and "unexpected end of data" in str(error):
            yield Record(line, {}, "a double quote that opens a cell here is never closed")
        elif error is not None:
            hint = "Double the quotes inside a quoted cell, or read an unquoted tab file as 'tsv/plain'"
            yield Record(line, {}, f"{error}. {hint}")
        elif skips_short_rows and len(cells) < len(columns):
            yield Record(line, {}, skip="too few cells")
        else:
            fault = f"{counted(len(cells), 'cell')} where the {widest} has {len(columns)}"
            hint = f". Put a cell that holds {delimiter!r} in double quotes" if len(cells) > len(columns) else ""
            yield Record(line, {}, fault + hint, raw=delimiter.join(cells))


def read_json(lines: Iterator[str], path: Path) -> Any:
    """Returns the value that the lines of a file hold as JSON.

    Raises:
        DataError: The file does not hold JSON. The message names the line.
    """
    try:
        return json.loads(joined(lines))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON at column {error.colno} ({error.msg})") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}: JSON that cannot be read ({error})") from error


def squad_rows(lines: Iterator[str], path: Path) -> Iterator[Record]:
    """Yields one record a question, with id, title, question, context and answers.

    They are numbered from 1 in file order. A member of ``data`` without paragraphs is a row. Questions without
    ``answers`` (test data) have no answers. Impossible questions have an empty list.

    Raises:
        DataError: The message names the position in the file at which the nesting is not SQuAD's.
    """
    content = read_json(lines, path)
    number = 0
    for article, location in _members(content, "data", path, ""):
        if "paragraphs" not in article:
            number += 1
            yield Record(number, article)
            continue
        for paragraph, inside in _members(article, "paragraphs", path, location):
            for question, _ in _members(paragraph, "qas", path, inside):
                number += 1
                sources = {"title": article, "context": paragraph, "question": question, "answers": question}
                cells = {column: source[column] for column, source in sources.items() if column in source}
                name = str(question["id"]) if "id" in question else None
                cells |= {} if name is None else {"id": name}
                if question.get("is_impossible") is not True:
                    yield Record(number, cells, name=name)
                elif cells.get("answers"):
                    fault = "is_impossible is true, so correct it or remove the answers"
                    yield Record(number, {}, fault, name=name)
                else:
                    yield Record(number, {**cells, "answers": []}, name=name)


def _members(parent: Any, name: str, path: Path, location: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the objects in a list with locations such as ``data[0].paragraphs[3]``."""
    inside = f"{location}.{name}" if location else name
    if not isinstance(parent, dict) or not isinstance(parent.get(name), list):
        hint = "" if location else ". Read one object a line, such as {\"question\": ...}, as format = 'jsonl'"
        raise DataError(f"{path}: no list {inside!r}, which SQuAD's JSON has{hint}")
    for number, member in enumerate(parent[name]):
        if not isinstance(member, dict):
            raise DataError(f"{path}: expected an object at {inside}[{number}], not {member!r:.60}")
        yield member, f"{inside}[{number}]"

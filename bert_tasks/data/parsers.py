"""Parsers of csv, tsv, text, JSON and SQuAD files, and of Arrow tables (``conll`` and ``formats`` have the others).

They yield rows before any value is checked. This module also opens text files with byte order marks, encodings and
gzip, whose rows are limited as they are read, because a quote that is never closed makes one row of the rest of a file.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bert_tasks.data import limits
from bert_tasks.data.batch import MISSING, MOST_ROWS, Batch, Batches, Record, largest_size
from bert_tasks.data.cells import ENCODING_EXAMPLE, is_encodable
from bert_tasks.data.issues import RowIssue, counted
from bert_tasks.data.limits import check_column_count, too_large
from bert_tasks.data.options import Document
from bert_tasks.errors import DataError, argument

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
        self._ahead = ""  # the line that was looked at
        self.begin_row(limit)

    def begin_row(self, limit: int | None = None) -> None:
        """Counts the characters of a new row. The parser of a table calls it after each row."""
        if limit is None:
            limit = limits.LARGEST_ROW
        self._first_line, self._limit, self._room = self._line, limit, limit

    def __next__(self) -> str:
        if self._ahead:
            line, self._ahead = self._ahead, ""
            return line
        line = self._file.readline(self._room + 1)  # one character more tells a line that is too long
        if line == "":
            raise StopIteration
        self._room -= max(len(line), _SHORTEST_LINE)
        if self._room < 0:
            raise self._too_large()
        self._line += 1
        return line

    def peek(self) -> str:
        """Returns the next line, which stays the next one. It is empty at the end of the file."""
        if not self._ahead:
            self._ahead = next(self, "")
        return self._ahead

    def rest(self) -> str:
        """Returns the rest of the file, of which no line is left then."""
        text = self._file.read(self._room + 1)
        self._room -= len(text)
        if self._room < 0:
            raise self._too_large()
        text, self._ahead = self._ahead + text, ""
        return text

    def _too_large(self) -> DataError:
        """Returns the error of a file or of a row that is larger than its limit."""
        if self._limit == limits.LARGEST_WHOLE:
            return too_large(f"{self._path}: the file", self._limit)
        return too_large(f"{self._path}:{self._first_line}: the row that begins here", self._limit)

    def rows(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records that a parser reads from the lines."""
        for record in records:
            self.begin_row()
            yield record


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
    for mark, kind in _NO_TEXT.items():
        if start.startswith(mark):
            raise DataError(f"{path}: {kind}")


@contextmanager
def open_text(path: Path, *, encoding: str | None, newline: str) -> Iterator["io.TextIOWrapper[io.BufferedReader]"]:
    """Yields the file as text without its byte order mark. ``RowLines`` reads lines that may be too large.

    Undecodable bytes become surrogates, to be reported. A byte order mark takes precedence over ``encoding``. Without
    both it is utf-8. A file that is compressed with gzip is decompressed as it is read, whatever its name.
    """
    codec = _UTF8
    if encoding is not None and encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        codec = encoding
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
            # The blank lines are put back, so that an error has the right number of its line.
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
            yield Record.unusable(number, f"not valid JSON ({error})", raw=line.removesuffix("\n"))
        else:
            yield _object_record(number, value, line.removesuffix("\n"))


def _object_record(number: int, value: Any, raw: str) -> Record:
    """Returns the row of a JSON value, which must be an object."""
    if isinstance(value, dict):
        return Record(number, value)
    return Record.unusable(number, f'expected an object such as {{"text": "..."}}, not {value!r:.60}', raw=raw)


def dataset_batches(rows: Any) -> Batches:
    """Returns the rows of a ``datasets.Dataset`` with names for label ids."""
    tables = rows.with_format("arrow").iter(batch_size=MOST_ROWS)
    return Batches(tuple(rows.column_names), column_batches(tables, _class_names(rows.features)))


def arrow_batches(table: Any) -> Batches:
    """Returns the rows of a ``pyarrow.Table``, with names from its metadata if any."""
    tables = table.to_batches(max_chunksize=MOST_ROWS)
    return Batches(tuple(table.column_names), column_batches(tables, schema_class_names(table.schema)))


def column_batches(tables: Iterable[Any], class_names: Mapping[str, list[str]]) -> Iterator[Batch]:
    """Yields the rows of Arrow tables or batches, numbered from 1, with the names of the class ids of some columns.

    Raises:
        DataError: A row is too large.
    """
    first = 1
    for table in chain.from_iterable(map(_in_memory_parts, tables)):
        cells = table.to_pydict()
        for name, names in class_names.items():
            if name in cells:
                cells[name] = [_named(value, names) for value in cells[name]]
        yield Batch(lines=range(first, first + len(table)), cells=cells)
        first += len(table)


def _in_memory_parts(rows: Any) -> Iterator[Any]:
    """Yields an Arrow table or batch, or its rows one by one if they are large together.

    Raises:
        DataError: A row is too large.
    """
    if _expanded_size(rows) <= limits.LARGEST_WHOLE:
        yield rows
        return
    for index in range(len(rows)):
        row = rows.slice(index, 1)
        if _expanded_size(row) > limits.LARGEST_WHOLE:
            raise too_large("a row", limits.LARGEST_WHOLE, "bytes")
        yield row


def _expanded_size(rows: Any) -> int:
    """Returns an upper limit of the bytes of some rows, each with its own copy of a value in a dictionary."""
    # Python has a copy of a value for each row, but Arrow stores a value of a dictionary once.
    size: int = rows.nbytes
    for column in rows.columns:
        for chunk in getattr(column, "chunks", [column]):
            if hasattr(chunk, "dictionary"):
                size += chunk.dictionary.nbytes * len(chunk)
    return size


def _named(value: Any, names: list[str]) -> Any:
    """Returns the names of class ids, or None for a hidden label (-1)."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if value is None or value == -1:
        return None
    if not 0 <= value < len(names):
        return value
    return names[value]


def schema_class_names(schema: Any) -> Mapping[str, list[str]]:
    """Returns the columns of class ids -> their names, if ``datasets`` wrote them into an Arrow schema."""
    if schema.metadata is None or b"huggingface" not in schema.metadata:
        return {}
    from datasets import Features  # here, because the import takes more than a second

    return _class_names(Features.from_arrow_schema(schema))


def _class_names(features: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """Returns the columns of class ids -> their names, also of lists of ids."""
    from datasets import ClassLabel

    names = {}
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature)  # the feature of a list's items
        if isinstance(inner, ClassLabel):
            names[name] = list(inner.names)
    return names


TEXT, SENTENCES = "text", "sentences"  # the columns that the lines are
_TableRow = tuple[int, list[str], csv.Error | None]  # the line of a row, and its cells or the error


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
            if not sentences:
                first = number
            sentences.append(sentence)
        elif sentences and document == "blank-line":
            yield Record(first, {TEXT: "\n".join(sentences), SENTENCES: sentences})
            sentences = []
    if sentences:
        yield Record(first, {TEXT: "\n".join(sentences), SENTENCES: sentences})


@dataclass(frozen=True, kw_only=True)
class Table:
    """The parser of a table in a text file.

    Attributes:
        path: Name of the file in messages.
        delimiter: Separator of cells.
        header: The first line names the columns. Otherwise they are called "0", "1" and so on.
        quoted: The cells follow csv's quoting rules. Otherwise a quote is an ordinary character.
        headless, skips_short_rows: See ``TableFormat``.
    """

    path: Path
    delimiter: str
    header: bool = True
    quoted: bool = True
    headless: tuple[str, ...] = ()
    skips_short_rows: bool = False

    def batches(self, lines: RowLines, most: int = MOST_ROWS, *, first_line: int = 1) -> Batches:
        """Returns the rows of a file.

        Args:
            lines: Lines of the file, with their ends.
            most: The largest number of rows of a batch.
            first_line: Number of the next line.

        Raises:
            DataError: The file is empty, or its first line cannot name columns.
        """
        rows = self._plain_rows(lines, first_line)
        if self.quoted:
            rows = self._quoted_rows(lines, first_line)
        first = next(rows, None)
        if first is None:
            raise DataError(
                f"{self.path}: the file is empty. It needs a header line with the column names, then rows (or header = "
                "false)"
            )
        _, cells, error = first
        if error is not None:
            raise DataError(f"{self.path}:1: the first line cannot be read ({error})") from error
        check_column_count(len(cells), f"{self.path}:1")
        has_names = self.header and (not self.headless or cells[0] == "index")
        widest = "header"
        if has_names:
            self._check_header(cells)
            columns = tuple(cells)
        else:
            columns = self.headless
            if not columns:
                columns, widest = tuple(map(str, range(len(cells)))), "first line"
            rows = chain([first], rows)  # the first line is a row, too
        return Batches(columns, self._batches(lines, rows, columns, widest, most))

    def _check_header(self, cells: Sequence[str]) -> None:
        """Raises DataError if a first line cannot name columns."""
        for cell in cells:
            if not is_encodable(cell):
                raise DataError(
                    f"{self.path}:1: the column name {cell!r} has bytes that are not valid in the encoding. Set the "
                    f"file's encoding ({argument('encoding', 'cp1252')}), {ENCODING_EXAMPLE}"
                )
        twice = sorted(repr(name) for name, count in Counter(cells).items() if name != "" and count > 1)
        if twice:
            names = ", ".join(twice)
            raise DataError(f"{self.path}:1: the header names {names} more than once. Use each name for one column")

    def _quoted_rows(self, lines: Iterable[str], first_line: int) -> Iterator[_TableRow]:
        """Yields rows whose quoted cells may hold delimiters, line ends and quotes.

        CR ends a line, too. Blank lines are no rows. Quoting is strict, so text after a closing quote is a fault of the
        row instead of a part of the cell.
        """
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        while True:  # a loop over the reader would end at the first error
            line = reader.line_num + first_line
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield line, [], error
                continue
            if cells is None:
                return
            if cells:
                yield line, cells, None

    def _plain_rows(self, lines: Iterable[str], first_line: int) -> Iterator[_TableRow]:
        """Yields rows of lines that only LF and CRLF end. Blank lines are no rows."""
        for number, line in enumerate(lines, start=first_line):
            text = line.removesuffix("\n").removesuffix("\r")
            if text != "":
                yield number, text.split(self.delimiter), None

    def _batches(
        self, lines: RowLines, rows: Iterable[_TableRow], columns: tuple[str, ...], widest: str, most: int
    ) -> Iterator[Batch]:
        """Yields the rows by column. ``widest`` names the source of the column count."""
        width, absent = len(columns), [MISSING] * len(columns)
        numbers, waiting, faulty, size = list[int](), list[list[Any]](), dict[int, Record](), 0
        row: list[Any]
        for line, cells, error in rows:
            lines.begin_row()  # the reader has taken the lines of this row, and those of the next one follow
            if len(cells) != width:
                faulty[len(numbers)] = self._faulty(line, cells, error, columns, widest)
                row = absent
            else:
                row = cells
                size += sum(map(len, cells))
            numbers.append(line)
            waiting.append(row)
            if len(numbers) >= most or size > largest_size():
                yield _table_batch(numbers, waiting, columns, faulty)
                numbers, waiting, faulty, size = [], [], {}, 0
        if numbers:
            yield _table_batch(numbers, waiting, columns, faulty)

    def _faulty(
        self, line: int, cells: list[str], error: csv.Error | None, columns: tuple[str, ...], widest: str
    ) -> Record:
        """Returns the record of a row that does not have one cell for each column."""
        if error is not None and "unexpected end of data" in str(error):
            return Record.unusable(line, "a double quote that opens a cell here is never closed")
        if error is not None:
            hint = "Double the quotes inside a quoted cell, or read an unquoted tab file as 'tsv/plain'"
            return Record.unusable(line, f"{error}. {hint}")
        if self.skips_short_rows and len(cells) < len(columns):
            return Record.skipped(line, "too few cells")
        fault = f"{counted(len(cells), 'cell')} where the {widest} has {len(columns)}"
        if len(cells) > len(columns):
            fault += f". Put a cell that holds {self.delimiter!r} in double quotes"
        return Record.unusable(line, fault, raw=self.delimiter.join(cells))


def _table_batch(
    numbers: list[int], rows: list[list[Any]], columns: tuple[str, ...], faulty: Mapping[int, Record]
) -> Batch:
    """Returns the batch of some rows. The cells of faulty rows are missing."""
    # The rows are turned into columns in one call, which is much faster than a dict for each row.
    cells = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    if not faulty:
        return Batch(lines=numbers, cells=cells)
    records = []
    for row, line in enumerate(numbers):
        record = faulty.get(row)
        if record is None:
            record = Record(line, dict(zip(columns, rows[row], strict=True)))
        records.append(record)
    issues = {row: record.issue for row, record in faulty.items() if record.issue is not None}
    return Batch(lines=numbers, cells=cells, issues=issues, records=records)


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
                name = None
                if "id" in question:
                    name = cells["id"] = str(question["id"])
                # SQuAD 2.0 has plausible answers to impossible questions under another name. ``answers`` is empty then.
                if question.get("is_impossible") is not True:
                    yield Record(number, cells, name=name)
                elif cells.get("answers"):
                    problem = "is_impossible is true, so correct it or remove the answers"
                    yield Record(number, cells, RowIssue(what=problem, line=number), name=name)
                else:
                    yield Record(number, {**cells, "answers": []}, name=name)


def _members(parent: Any, name: str, path: Path, location: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the objects in a list with locations such as ``data[0].paragraphs[3]``."""
    inside, hint = name, ". Read one object a line, such as {\"question\": ...}, as format = 'jsonl'"
    if location:
        inside, hint = f"{location}.{name}", ""  # deeper in the file it surely is SQuAD's nesting
    if not isinstance(parent, dict) or not isinstance(parent.get(name), list):
        raise DataError(f"{path}: no list {inside!r}, which SQuAD's JSON has{hint}")
    for number, member in enumerate(parent[name]):
        if not isinstance(member, dict):
            raise DataError(f"{path}: expected an object at {inside}[{number}], not {member!r:.60}")
        yield member, f"{inside}[{number}]"

"""File formats: how files are named, opened and parsed, and how the published GLUE files differ from plain ones.

To add a format, derive a class from ``Format`` and call ``register_format`` with an instance.
"""

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from bert_tasks.data.columns import Column, first_column
from bert_tasks.data.conll import conll_rows, conllu_rows
from bert_tasks.data.problems import did_you_mean
from bert_tasks.data.records import (
    SENTENCES,
    TEXT,
    BoundedText,
    ParseOptions,
    Records,
    json_rows,
    open_text,
    parquet_records,
    squad_rows,
    table_records,
    text_rows,
)
from bert_tasks.errors import DataError, UsageError

GZIP_EXTENSION = ".gz"
_LARGEST_CELL = 2**31 - 1  # characters; the limit of a row is lower
_START_LENGTH = 4096  # characters that tell formats with the same extension apart


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format. A subclass implements ``records`` (for text) or ``open``.

    Attributes:
        name: Value of the option ``format``.
        extensions: Extensions of the files, the usual one first. If formats share an extension, the format that was
            registered first reads the file, unless ``matches`` of another one is true.
        file_names: Other file names of a split. ``{split}`` is train, dev and so on, ``*`` is any text.
        delimiter: Separator of cells; None if the format has no cells.
        quoted: Whether the cells follow csv's quoting rules.
        columns, hub_columns: The task's columns -> the columns of the files, and of the hub's data set.
        label_names: Label ids in the files -> label names, in the order of the hub's data set.
        default_passthrough: Columns that prediction keeps by default; empty: all columns.
        validation, hub_validation: Names of several validation sets -> the file in a folder, and the split on the hub.
        is_text: Whether files are text, which may be compressed with gzip.
        can_stream: Whether rows can be read before the file is complete.
        has_documents: Whether the option ``document`` applies.

    Example:
        >>> class KeyValues(Format):
        ...     def records(self, lines, path, options):
        ...         cells = (dict(pair.split("=") for pair in line.split()) for line in lines)
        ...         return Records(None, (Record(number, row) for number, row in enumerate(cells, start=1)))
        >>> register_format(KeyValues(name="kv", extensions=(".kv",)))
    """

    name: str
    extensions: tuple[str, ...]
    file_names: tuple[str, ...] = ()
    delimiter: str | None = None
    quoted: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    hub_columns: Mapping[str, str] = field(default_factory=dict)
    label_names: Mapping[str, str] = field(default_factory=dict)
    default_passthrough: tuple[str, ...] = ()
    validation: Mapping[str, str] = field(default_factory=dict)
    hub_validation: Mapping[str, str] = field(default_factory=dict)

    is_text: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True
    has_documents: ClassVar[bool] = False

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        """Parses the lines of a text file.

        Args:
            lines: Lines of the file, with their ends.
            path: File name in messages.
            options: How to read the file.
        """
        raise NotImplementedError

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        """Returns True if this format reads a file instead of the first registered format with the same extension.

        Args:
            start: First characters of the file; empty if it cannot be read.
            columns: Columns of the task; None if the task is not known.
        """
        return False

    @contextmanager
    def open(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        """Opens a file and parses it row by row.

        Args:
            path: The file.
            options: How to read the file.
            columns_to_read: Columns to read, for formats that store columns; None: all.

        Raises:
            DataError: The options do not fit the format, or the file cannot be read.
        """
        self.check_header(path, options)
        with open_text(path, encoding=options.encoding, newline="" if self.quoted else "\n") as lines:
            records = self.records(lines, path, options)
            yield records._replace(rows=lines.rows(records.rows))

    def check_header(self, path: Path, options: ParseOptions) -> None:
        """Raises `DataError` if the option ``header`` does not apply."""
        if options.header is False and self.delimiter is None:
            raise DataError(f"{path}: header = false is for csv and tsv files; {self.name} has no header line")


@dataclass(frozen=True, kw_only=True)
class TableFormat(Format):
    """Lines of cells.

    Attributes:
        headless: Columns of files without a header line (GLUE's test files have one, whose first cell is "index").
        skips_short_rows: Whether rows with too few cells are skipped and counted, as other tools do.
    """

    headless: tuple[str, ...] = ()
    skips_short_rows: bool = False

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        delimiter = self.delimiter if options.delimiter is None else options.delimiter
        if delimiter is None or len(delimiter) != 1 or delimiter in '"\r\n':
            raise DataError(
                f"{path}: delimiter = {delimiter!r}: expected one character that is neither a quote nor a line end"
            )
        return table_records(
            lines,
            path,
            delimiter=delimiter,
            header=options.header is not False,
            quoted=self.quoted,
            headless=self.headless,
            skips_short_rows=self.skips_short_rows,
        )

    @contextmanager
    def open(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        limit = csv.field_size_limit(_LARGEST_CELL)  # it belongs to the whole process, so it is put back afterwards
        try:
            with super().open(path, options, columns_to_read=columns_to_read) as records:
                yield records
        finally:
            csv.field_size_limit(limit)


class JsonFormat(Format):
    """One JSON object per line, or an array of objects."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return re.match(r'\s*(\{\s*("|$)|\[\s*(\{|$))', start) is not None

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        return Records(None, json_rows(lines, path))


class SquadFormat(Format):
    """JSON in the nesting of SQuAD."""

    can_stream = False
    # An object whose members before a list "data" of objects are plain values, as the "version" of SQuAD is.
    _START = re.compile(r'\s*\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*\[\s*\{')

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return self._START.match(start) is not None

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        return Records(None, squad_rows(lines, path))


class TextFormat(Format):
    """Lines of text, or documents of several lines."""

    has_documents = True

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        columns = (TEXT, SENTENCES) if options.document in ("blank-line", "file") else (TEXT,)
        return Records(columns, text_rows(lines, options.document))


class ConllFormat(Format):
    """One word per line, with its tag in the last column."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        """True for a task that reads words. Without a task: the lines have the same number of columns, two or more."""
        if columns is not None:
            return first_column(columns, lambda column_type: column_type.is_pretokenized) is not None
        rows = [
            cells for cells in map(str.split, start.split("\n")[:-1]) if cells and cells[0] not in ("#", "-DOCSTART-")
        ]
        return len(rows) > 1 and len({len(cells) for cells in rows}) == 1 and len(rows[0]) > 1

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        return Records(None, conll_rows(lines))


class ConlluFormat(Format):
    """Universal Dependencies."""

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        return Records(None, conllu_rows(lines))


class ParquetFormat(Format):
    """Apache Parquet."""

    is_text = False
    can_stream = False

    @contextmanager
    def open(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        self.check_header(path, options)
        with parquet_records(path, columns_to_read=columns_to_read) as records:
            yield records


@dataclass(frozen=True, kw_only=True)
class StreamFormat(Format):
    """JSON or lines of text, as the first line shows: standard input without the option ``format``.

    Attributes:
        name: The source in messages.
        headers: Names of columns. A first line with one of them is the header of a table.
    """

    extensions: tuple[str, ...] = ()
    headers: Collection[str] = ()

    def detect(self, line: str) -> Format:
        """Returns the format of a stream with this first line.

        Raises:
            UsageError: It is a table or a parquet file, whose format must be stated.
        """
        if line.startswith("PAR1"):
            raise UsageError(f"{self.name} is a parquet file: add --format parquet")
        cells = (cell.strip().strip('"') for cell in re.split(r"[,;\t|]", line))
        header = next((cell for cell in cells if cell in self.headers), None)
        if header is not None:
            raise UsageError(
                f"{self.name}: the first line names the column {header!r}, as the header of a table does; add --format "
                "csv, tsv, ..., or --format text if every line is a text"
            )
        return FORMATS["jsonl" if FORMATS["jsonl"].matches(line, None) else "text"]

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        return self.detect(lines.peek_line()).records(lines, path, options)


_FORMATS: dict[str, Format] = {}
FORMATS: Mapping[str, Format] = MappingProxyType(_FORMATS)


def register_format(format: Format) -> None:
    """Adds a format, which files with its extensions and the option ``format`` then have."""
    _FORMATS[format.name] = format


_ENTAILMENT = ("entailment", "neutral", "contradiction")
# Name, columns of the files (the text or the two texts of a pair, and the label), columns on the hub if they differ,
# and labels in the order of their ids.
_GLUE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("sst2", "sentence|label", "", ("negative", "positive")),
    ("cola", "sentence|label", "", ("unacceptable", "acceptable")),
    ("mrpc", "#1 String|#2 String|Quality", "sentence1|sentence2|label", ("not_equivalent", "equivalent")),
    ("stsb", "sentence1|sentence2|score", "sentence1|sentence2|label", ()),
    ("qqp", "question1|question2|is_duplicate", "question1|question2|label", ("not_duplicate", "duplicate")),
    ("mnli", "sentence1|sentence2|gold_label", "premise|hypothesis|label", _ENTAILMENT),
    ("qnli", "question|sentence|label", "", ("entailment", "not_entailment")),
    ("rte", "sentence1|sentence2|label", "", ("entailment", "not_entailment")),
    ("wnli", "sentence1|sentence2|label", "", ("not_entailment", "entailment")),
    ("ax", "sentence1|sentence2|label", "premise|hypothesis|label", _ENTAILMENT),
)


def _glue(name: str, columns: str, hub_columns: str, labels: Sequence[str]) -> TableFormat:
    names, hub_names = columns.split("|"), (hub_columns if hub_columns else columns).split("|")
    ours = ("text", "label") if len(names) == 2 else ("text", "text_pair", "label")
    sets = ("matched", "mismatched") if name == "mnli" else ()
    return TableFormat(
        name=f"glue/{name}",
        extensions=(".tsv",),
        delimiter="\t",
        headless=("source", "label", "mark", "sentence") if name == "cola" else (),
        skips_short_rows=name == "qqp",
        columns=dict(zip(ours, names, strict=True)),
        hub_columns=dict(zip(ours, hub_names, strict=True)),
        label_names={str(number): label for number, label in enumerate(labels)},
        validation={part: f"dev_{part}.tsv" for part in sets},
        hub_validation={part: f"validation_{part}" for part in sets},
    )


for _format in (
    TableFormat(name="csv", extensions=(".csv",), delimiter=",", quoted=True),
    TableFormat(name="tsv", extensions=(".tsv",), delimiter="\t", quoted=True),
    TableFormat(name="tsv/plain", extensions=(".tsv",), delimiter="\t"),
    JsonFormat(name="jsonl", extensions=(".jsonl", ".json")),
    TextFormat(name="text", extensions=(".txt", ".text")),
    ParquetFormat(name="parquet", extensions=(".parquet",)),
    ConllFormat(
        name="conll",
        extensions=(".conll", ".txt", ".bio", ".iob"),
        hub_columns={"words": "tokens", "tags": "ner_tags"},
        default_passthrough=("words", "tags", "document"),
    ),
    ConlluFormat(
        name="conllu",
        extensions=(".conllu",),
        file_names=("*-ud-{split}.conllu",),
        columns={"words": "form", "tags": "upos"},
        hub_columns={"words": "tokens", "tags": "upos"},
    ),
    SquadFormat(name="squad", extensions=(".json",), file_names=("{split}-v*.json",)),
    *(_glue(*row) for row in _GLUE),
):
    register_format(_format)


def named_format(name: str) -> Format:
    if name not in FORMATS:
        raise DataError(f"unknown format {name!r}{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def file_format(name: str | None, path: Path, columns: Sequence[Column] | None = None) -> Format:
    """Returns the format with a name, or else the format of the file's extension.

    Args:
        name: Name of the format; None: the extension decides, and ``Format.matches`` among formats that share it.
        path: The file.
        columns: Columns of the task; None if the task is not known.

    Raises:
        DataError: There is no such format, or none has the extension.
    """
    if name is not None:
        return named_format(name)
    extension = uncompressed(path).suffix.lower()
    candidates = [format for format in FORMATS.values() if extension in format.extensions]
    if not candidates:
        raise DataError(f"{path}: no format belongs to the extension {extension!r}; state one of {', '.join(FORMATS)}")
    if len(candidates) == 1:
        return candidates[0]
    try:
        with open_text(path, encoding=None, newline="\n") as file:
            start = file.read(_START_LENGTH)
    except (OSError, DataError):  # the reader reports it
        start = ""
    return next((format for format in candidates[1:] if format.matches(start, columns)), candidates[0])


def uncompressed(path: Path) -> Path:
    """The path without ``.gz``, the extension of a compressed text file."""
    return path.with_suffix("") if path.suffix.lower() == GZIP_EXTENSION else path


def _names_of_split(split: str, format: str | None) -> tuple[list[str], list[str]]:
    """The names that the files of a split may have, also compressed."""
    formats = list(FORMATS.values()) if format is None else [named_format(format)]
    names = [f"{split}{extension}" for row in formats for extension in row.extensions]
    packed = [f"{split}{extension}{GZIP_EXTENSION}" for row in formats if row.is_text for extension in row.extensions]
    return [*names, *(pattern.format(split=split) for row in formats for pattern in row.file_names)], packed


def files_of_split(folder: Path, split: str, format: str | None) -> list[Path]:
    """The files in a folder that may hold a split, of the format or of any."""
    names, packed = _names_of_split(split, format)
    paths = (path for name in [*names, *packed] for path in sorted(folder.glob(name)))
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def expected_files(split: str, format: str | None) -> str:
    """The names that ``files_of_split`` looks for, in words."""
    return " or ".join(dict.fromkeys(_names_of_split(split, format)[0]))

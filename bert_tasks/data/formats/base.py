"""The class of file formats, and the registry of formats.

To add a format, derive a class from ``Format`` and call ``register_format`` with an instance.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from bert_tasks.data import limits
from bert_tasks.data.batch import MOST_ROWS, Batch, Batches, Record, Records
from bert_tasks.data.columns import Column
from bert_tasks.data.issues import did_you_mean, end_sentence
from bert_tasks.data.limits import check_column_count, check_row_size, size_of
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import RowLines, begins_array, open_text
from bert_tasks.errors import BertTasksError, DataError

_LONGEST_REASON = 200  # characters
_DAMAGE_ADVICE = "Check that the file is complete and has this format, then save or download it again"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format. A subclass implements ``records`` (for text), ``batches`` (for text by column) or ``parse``.

    Attributes:
        name: Value of the option ``format``.
        extensions: Extensions of the files, the usual extension first. If formats share an extension, the format that
            was registered first reads the file, unless ``matches`` of another format is true.
        file_names: Other file names of a split. ``{split}`` is train, dev and so on, ``*`` is any text.
        delimiter: Separator of cells. None if the format has no cells.
        quoted: The cells follow csv's quoting rules.
        columns, hub_columns: The task's columns -> the columns of the files, and of the hub's data set.
        label_names: Label ids in the files -> label names, in the order of the hub's data set.
        default_passthrough: Columns that prediction keeps by default. Empty means all columns.
        validation, hub_validation: Names of several validation sets -> the file in a folder, and the split on the hub.
        is_text: Files are text, which may be compressed with gzip.
        can_stream: Rows can be read before the file is complete.
        has_documents: The option ``document`` applies.

    Examples:
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

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        """Parses the lines of a text file.

        Args:
            lines: Lines of the file, with their ends.
            path: File name in messages.
            options: Options of the parser.
        """
        raise NotImplementedError

    def batches(self, lines: RowLines, path: Path, options: ReadOptions, most: int) -> Batches:
        """Parses the lines of a text file into batches. Default: the rows of ``records``.

        Args:
            lines, path, options: See ``records``.
            most: The largest number of rows of a batch.
        """
        records = self.records(lines, path, options)
        return records._replace(rows=lines.rows(records.rows)).in_batches(most)

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        """Returns True if this format reads a file, and not the first with its extension.

        Args:
            start: First characters of the file. Empty if it is not readable.
            columns: Columns of the task, or None if the task is not known.
        """
        return False

    def files(self, path: Path) -> tuple[Path, ...]:
        """Returns the files that are read for a path. Default: the file itself."""
        return (path,)

    def reads_folder(self, path: Path) -> bool:
        """Returns True if the folder as a whole is a source of this format."""
        return False

    def part(self, name: str) -> "Format | None":
        """Returns the format of a part of the files, called ``FORMAT/name``, or None if the files have no parts."""
        return None

    @contextmanager
    def open(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        """Opens a file, whose rows are parsed while they are read.

        Whatever a parser raises about the content of the file, now or at a later row, is a `DataError` with the
        file's name. Rows and headers have the limits of ``limits``.

        Args:
            path: The file.
            options: Options of the parser.
            columns_to_read: Columns to read, for formats that store columns. None means all.

        Raises:
            DataError: The options do not fit the format, or the file cannot be read.
        """
        self.check_header(path, options)
        # The stack keeps the file open while rows are read, but outside of the block that translates errors. An error
        # of the caller between two rows is no damage of the file.
        with ExitStack() as stack:
            with self._named_damage(path), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opened = stack.enter_context(self.parse(path, options, columns_to_read=columns_to_read))
            if opened.columns is not None:
                check_column_count(len(opened.columns), str(path))
            yield opened._replace(batches=self._limited(opened.batches, path))

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        """Opens a file for ``open``, which translates errors. Formats that are not text override it."""
        with self.open_text(path, options) as batches:
            yield batches

    @contextmanager
    def open_text(self, path: Path, options: ReadOptions, *, most: int = MOST_ROWS) -> Iterator[Batches]:
        """Opens a file of text, or a stream.

        Args:
            path: The file.
            options: Options of the parser.
            most: The largest number of rows of a batch. A stream whose rows are needed as they come has batches of one.
        """
        newline = "\n"
        if self.quoted:
            newline = ""  # csv.reader must see line ends as they are, because a quoted cell may hold them
        with open_text(path, encoding=options.encoding, newline=newline) as file:
            limit = limits.LARGEST_ROW
            if not self.can_stream or begins_array(file):  # which is parsed as a whole
                limit = limits.LARGEST_WHOLE
            yield self.batches(RowLines(file, path, limit), path, options, most)

    def _limited(self, batches: Iterator[Batch], path: Path) -> Iterator[Batch]:
        """Yields the batches. What the reader of the batches raises does not pass through here."""
        with self._named_damage(path):
            for batch in batches:
                if len(batch.cells) > limits.MOST_COLUMNS:
                    for row, line in enumerate(batch.lines):
                        check_column_count(len(batch.record(row).cells), f"{path}:{line}")
                if not self.is_text:  # the lines of a text are limited as they are read
                    _check_row_sizes(batch, path)
                yield batch

    @contextmanager
    def _named_damage(self, path: Path) -> Iterator[None]:
        """Names the file in the errors of a parser.

        Each library raises other errors about a damaged file, and even a UnicodeError or a KeyError may be one. So all
        of them count as damage here, and only here.
        """
        try:
            yield
        except (BertTasksError, MemoryError):
            raise
        except Exception as error:  # outer boundary: the parser of a file
            if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the content
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise DataError(f"{path}: cannot be read as {self.name} ({_reason(error)}). {_DAMAGE_ADVICE}") from error

    def check_header(self, path: Path, options: ReadOptions) -> None:
        """Raises `DataError` if the option ``header`` does not apply."""
        if options.header is False and self.delimiter is None:
            raise DataError(f"{path}: header = false is for csv and tsv files, but {self.name} has no header line")


def _check_row_sizes(batch: Batch, path: Path) -> None:
    """Raises `DataError` if the values of a row have too many characters."""
    if sum(map(size_of, batch.cells.values())) > limits.LARGEST_ROW:
        for row, line in enumerate(batch.lines):
            check_row_size(batch.record(row).cells, f"{path}: row {line}")


def without_warnings(records: Iterator[Record]) -> Iterator[Record]:
    """Yields the records of a library that warns about what it leaves out, such as the styles of a workbook."""
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = next(records, None)
        if record is None:
            return
        yield record


def _reason(error: Exception) -> str:
    """Returns the first line of a library's error, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    if not lines or isinstance(error, LookupError):
        return " ".join([type(error).__name__, *lines[:1]])[:_LONGEST_REASON]
    return lines[0][:_LONGEST_REASON]


_FORMATS: dict[str, Format] = {}
FORMATS: Mapping[str, Format] = MappingProxyType(_FORMATS)


def register_format(format: Format) -> None:
    """Registers a format for the option ``format`` and its extensions."""
    _FORMATS[format.name] = format


def named_format(name: str) -> Format:
    """Returns a registered format, or the part of one that its name states, such as a sheet in ``xlsx/Reviews``.

    Raises:
        DataError: No format has the name.
    """
    if name in FORMATS:
        return FORMATS[name]
    whole, _, part = name.partition("/")
    format = None
    if whole in FORMATS and part:
        format = FORMATS[whole].part(part)
    if format is None:
        unknown = end_sentence(f"unknown format {name!r}{did_you_mean(name, FORMATS)}")
        raise DataError(f"{unknown} The formats are {', '.join(FORMATS)}")
    return format

"""How a model's training rows were read and what their columns were called, for rows that are read later.

A user who trained on ``data.csv`` with semicolons and a column ``review`` evaluates the model on ``test.csv`` without
saying so again. The model stores both in its config.json.
"""

import codecs
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from bert_tasks.data import limits
from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.columns import Column, Columns, source_columns
from bert_tasks.data.formats import file_format, named_format, uncompressed
from bert_tasks.data.layouts import holders, unread_columns
from bert_tasks.data.options import Document, ReadOptions
from bert_tasks.data.parsers import RowLines, open_text
from bert_tasks.data.reading import column_names, existing_file
from bert_tasks.errors import DataError

_DEFAULTS = {"encoding": "utf-8", "header": True, "label_separator": LABEL_SEPARATOR, "document": "blank-line"}


@dataclass(frozen=True, kw_only=True)
class TrainedReading:
    """The options with which the file of a model's training rows was read.

    The model stores them, and a file with the same extension is read in the same way. None stands for the default.

    Attributes:
        extension: The extension of the first file, without ``.gz``. None for rows of the hub or in memory.
        format, delimiter, encoding, header, label_separator, document: See `ReadOptions`.
        on_error: "skip" if training skipped rows that cannot be used.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    extension: str | None = None
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    label_separator: str | None = None
    document: Document | None = None
    on_error: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter {self.delimiter!r} is not one character")
        if self.label_separator == "":
            raise ValueError("label_separator is empty")
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}, expected 'fail' or 'skip'")
        if self.document is not None and self.document not in get_args(Document):
            raise ValueError(f"document is {self.document!r}")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except (LookupError, ValueError):  # also a name with a null character
                raise ValueError(f"there is no encoding {self.encoding!r}") from None

    @classmethod
    def of(cls, options: ReadOptions, train: str | Path | None, on_error: Literal["fail", "skip"]) -> Self:
        """Returns the options of a training file that differ from the defaults.

        Args:
            options: The options that read the file.
            train: The first file of training rows. None for rows of the hub or in memory.
            on_error: What training did with rows that cannot be used.
        """
        if train is None:
            return cls(on_error=on_error)
        # Defaults are not stored, so that a later version may change them, and config.json shows what is special.
        stated = {name: getattr(options, name) for name in _NAMES if name != "format"}
        changed = {name: value for name, value in stated.items() if value != _DEFAULTS.get(name)}
        path, format = Path(train), options.format
        if format == _usual_format(path):  # the extension says the same
            format = None
        return cls(extension=extension_of(path), format=format, on_error=on_error, **changed)

    def stored(self) -> dict[str, Any]:
        """Returns the content of config.json, without defaults."""
        default = TrainedReading()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    def missing_options(self, options: ReadOptions, path: Path) -> dict[str, Any]:
        """Returns the stored options that apply to a file and that ``options`` leave open.

        None apply to a file with another extension, or with another format that ``options`` set.
        """
        # The semicolons of a csv file say nothing about a file of JSON lines.
        is_other_format = options.format not in (None, self.format)
        if self.extension is None or extension_of(path) != self.extension or is_other_format:
            return {}
        stored = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in stored.items() if value is not None and getattr(options, name) is None}

    def without_document(self) -> Self:
        """Returns the options for a file whose lines are texts to predict, each of them alone."""
        return replace(self, document=None)


_NAMES = tuple(field.name for field in fields(TrainedReading) if field.name not in ("extension", "on_error"))


def extension_of(path: Path) -> str:
    """Returns the extension of a file in lower case, without ``.gz``."""
    return uncompressed(path).suffix.lower()


def _usual_format(path: Path) -> str | None:
    """Returns the format that a file is read in by default. None if there is none."""
    try:
        return file_format(None, path).name
    except DataError:
        return None


def names_column(options: ReadOptions, column: str) -> bool:
    """Returns True if the options or the format name a column of the task."""
    is_of_format = options.format is not None and column in named_format(options.format).columns
    return is_of_format or (options.columns is not None and column in options.columns)


def training_names(options: ReadOptions, train: str | Path | None, columns: Columns | None = None) -> dict[str, str]:
    """Returns the training data's names of the task's columns, for the model.

    Args:
        options: Options with which the training data were read.
        train: File with the training rows. None if they came from the hub or from memory.
        columns: The columns that are read. Several tasks have their names in ``HeadColumns``.
    """
    if isinstance(columns, Mapping):
        return {}
    # Formats such as conll and glue have names of their own, which the model must know for a file of another format.
    usual: Mapping[str, str] = {}
    if train is not None:
        usual = file_format(options.format, Path(train), columns).columns
    elif options.format is not None:
        usual = named_format(options.format).hub_columns
    names = dict(usual)
    if options.columns is not None:
        names |= options.columns
    return {task: name for task, name in names.items() if task != name}


def with_names(
    options: ReadOptions, names: Mapping[str, str], columns: Sequence[Column], present: Collection[str]
) -> ReadOptions:
    """Returns the options with the model's remembered names that they do not set.

    Args:
        options: Options of the caller.
        names: The task's columns -> the names of the training data. Names that are not present are skipped.
        columns: The columns that the task reads.
        present: The columns of the data.
    """
    stated: Mapping[str, Any] = {}
    if options.columns is not None:
        stated = options.columns
    remembered = {column.name: names[column.name] for column in columns if column.name in names}
    unread = unread_columns(columns, stated, remembered)
    fitting: dict[str, str] = {}
    for column in columns:
        name = remembered.get(column.name)
        if name is not None and column.name not in unread and holders(column, name, present):
            fitting[column.name] = name
    if not fitting and not stated:
        return replace(options, columns=None)
    return replace(options, columns={**fitting, **stated})


def options_for_file(options: ReadOptions, path: str | Path, names: Mapping[str, str], columns: Columns) -> ReadOptions:
    """Returns the options for a file. See ``with_names``."""
    try:
        for_table = _for_table(options, Path(path), names, columns)
        if isinstance(columns, Mapping) or not names:
            return for_table
        return with_names(for_table, names, columns, column_names(Path(path), for_table, columns))
    except DataError:  # reading the file reports it, with the name that the caller gives the file
        return options


def _for_table(options: ReadOptions, path: Path, names: Mapping[str, str], columns: Columns) -> ReadOptions:
    """Returns options for a table if the first line of a text file names a column."""
    if options.format is not None or not file_format(None, existing_file(path), columns).has_documents:
        return options
    headers = {*names.values(), *(column.name for column in source_columns(columns))}
    with open_text(path, encoding=options.encoding, newline="\n") as file:
        lines = RowLines(file, path, limits.LARGEST_ROW)
        line = next(lines, "").rstrip("\r\n")
    for mark in "\t;|,":
        if mark in line and not headers.isdisjoint(line.split(mark)):
            if mark == "\t":
                return replace(options, format="tsv")
            return replace(options, format="csv", delimiter=mark)
    return options

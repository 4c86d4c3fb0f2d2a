"""How a model's training data were read, and which of it applies to data that are read later.

Owns what a model folder stores of `ReadOptions`, and in which order given, stored and usual options count.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import FORMATS, Format, file_format, named_format, uncompressed
from bert_tasks.data.readers import ReadOptions, column_names, existing_file
from bert_tasks.data.records import is_utf8_beyond_ascii
from bert_tasks.errors import DataError


def training_reading(given: ReadOptions, train: str | Path | None) -> ReadOptions:
    """The options that a model stores of how its training data were read.

    The format is that of the file. The columns are all whose names differ from the task's, with those that the format
    implies, so that they are found in files of other formats, too.

    Args:
        given: the options that were stated.
        train: the file with the training rows; None: they came from the hub or from memory.
    """
    if train is None:
        layout = None if given.format is None else named_format(given.format)
        usual: Mapping[str, str] = {} if layout is None else layout.hub_columns
    else:
        layout = file_format(given.format, Path(train))
        usual = layout.columns
    stated = {} if given.columns is None else given.columns
    columns = {task: name for task, name in {**usual, **stated}.items() if task != name}
    name = None if layout is None else layout.name
    plain = None if given.encoding is None else given.encoding.lower().replace("_", "-").removesuffix("-sig")
    # Files in these begin with a mark that says so, or are read so by default: other files may have another encoding.
    is_usual = plain in ("utf-8", "utf8", "utf-16", "utf16", "utf-32", "utf32")
    encoding = None if is_usual else given.encoding
    return replace(given, columns=columns if columns else None, format=name, encoding=encoding)


def stored_options(reading: ReadOptions) -> dict[str, Any]:
    """The options that differ from their defaults, as plain values for config.json."""
    plain = replace(reading, columns=None if reading.columns is None else dict(reading.columns))
    defaults = {field.name: field.default for field in fields(ReadOptions)}
    return {name: value for name, value in asdict(plain).items() if value != defaults[name]}


def loaded_options(stored: object) -> ReadOptions:
    """The inverse of `stored_options`, for values that are not trusted.

    Raises:
        ValueError: an unknown option, or one with an invalid value.
    """
    try:
        reading = TypeAdapter(ReadOptions).validate_python(stored)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(['reading', *map(str, first['loc'])])}: {first['msg']}") from None
    if reading.format is not None and reading.format not in FORMATS:
        raise ValueError(f"reading.format: unknown format {reading.format!r}; there are {', '.join(FORMATS)}")
    return reading


def reading_of_file(given: ReadOptions, stored: ReadOptions, path: Path, columns: Sequence[Column]) -> ReadOptions:
    """The options for a file: each as given, else as stored if it fits the file, else the usual one.

    Stored columns fit if the file has them. The other stored options fit files of the same format as the training
    file's; but not a delimiter that leaves a single column where the usual one gives several, nor an encoding where the
    file is utf-8 beyond ASCII, which text in another encoding practically never is.

    Args:
        columns: those that the task reads.
    """
    how = _as_the_file_shows(with_file_options(given, stored, path), given, path)
    names = known_names(stored, columns)
    if not names:
        return how
    try:
        present = column_names(path, how)
    except DataError:  # reading the file reports it, with the name that the caller gives the file
        return how
    return with_columns(how, stored, columns, present)


def _as_the_file_shows(how: ReadOptions, given: ReadOptions, path: Path) -> ReadOptions:
    """The options without a stored delimiter or encoding that the file contradicts."""
    usual = [
        name
        for name, contradicted in (("encoding", _is_utf8), ("delimiter", _has_the_usual_delimiter))
        if getattr(given, name) is None and getattr(how, name) is not None and contradicted(path, how)
    ]
    return replace(how, **dict.fromkeys(usual)) if usual else how


def _is_utf8(path: Path, how: ReadOptions) -> bool:
    try:
        return file_format(how.format, path).name != "parquet" and is_utf8_beyond_ascii(existing_file(path))
    except DataError:  # reading the file reports it
        return False


def _has_the_usual_delimiter(path: Path, how: ReadOptions) -> bool:
    try:
        if len(column_names(path, how)) > 1:
            return False
        return len(column_names(path, replace(how, delimiter=None))) > 1
    except DataError:  # reading the file reports it
        return False


def with_columns(
    given: ReadOptions, stored: ReadOptions, columns: Sequence[Column], present: Collection[str]
) -> ReadOptions:
    """The given options, with the stored columns that are present and not given."""
    fitting = {task: name for task, name in known_names(stored, columns).items() if name in present}
    names = {**fitting, **({} if given.columns is None else given.columns)}
    return replace(given, columns=names if names else None)


def known_names(stored: ReadOptions, columns: Sequence[Column]) -> dict[str, str]:
    """The stored names of the columns that the task has."""
    known = {column.name for column in columns}
    return {} if stored.columns is None else {task: name for task, name in stored.columns.items() if task in known}


def _fits(stored: ReadOptions, path: Path) -> bool:
    """Whether the format of the training file may be that of another file."""
    if stored.format is None:
        return False
    try:
        usual = file_format(None, path)
    except DataError:  # the extension says nothing
        return True
    return _has_extension(named_format(stored.format), path) and (usual.name != "squad" or stored.format == "squad")


def with_file_options(given: ReadOptions, stored: ReadOptions, path: Path | None) -> ReadOptions:
    """The given options, with the stored ones that are not given if the stored format is that of the file.

    Args:
        path: None for a stream, whose format must be given.
    """
    fits = given.format == stored.format if given.format is not None or path is None else _fits(stored, path)
    if not fits or stored.format is None:
        return given
    defaults = {field.name: field.default for field in fields(ReadOptions) if field.name != "columns"}
    missing = {name: getattr(stored, name) for name, value in defaults.items() if getattr(given, name) == value}
    return replace(given, **missing)


def _has_extension(layout: Format, path: Path) -> bool:
    return uncompressed(path).suffix.lower() in layout.extensions

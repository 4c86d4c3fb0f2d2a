"""File formats with their names, extensions and parsers."""

from collections.abc import Sequence
from pathlib import Path

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import annotations, excel, plain, stored
from bert_tasks.data.formats.base import FORMATS, Format, named_format, register_format
from bert_tasks.data.formats.plain import StreamFormat, TableFormat
from bert_tasks.data.records import open_text
from bert_tasks.errors import DataError

GZIP_EXTENSION = ".gz"
_START_LENGTH = 4096  # characters that tell formats with the same extension apart

for _format in (*plain.ALL, *annotations.ALL, *excel.ALL, *stored.ALL):
    register_format(_format)


def file_format(name: str | None, path: Path, columns: Sequence[Column] | None = None) -> Format:
    """Returns the format with a name, or else the format of the file's extension.

    Args:
        name: Name of the format. None means by extension, and by ``Format.matches`` for a shared extension.
        path: The file.
        columns: Columns of the task, or None if the task is not known.

    Raises:
        DataError: No format has the name or the extension.
    """
    if name is not None:
        return named_format(name)
    if path.is_dir():
        return named_format("datasets")
    extension = uncompressed(path).suffix.lower()
    candidates = [format for format in FORMATS.values() if extension in format.extensions]
    if not candidates:
        raise DataError(f"{path}: no format belongs to the extension {extension!r}. Choose one of {', '.join(FORMATS)}")
    if len(candidates) == 1:
        return candidates[0]
    try:
        with open_text(path, encoding=None, newline="\n") as file:
            start = file.read(_START_LENGTH)
    except (OSError, DataError):  # the reader reports it
        start = ""
    return next((format for format in candidates[1:] if format.matches(start, columns)), candidates[0])


def uncompressed(path: Path) -> Path:
    """Returns the path without ``.gz``, the extension of a compressed text file."""
    return path.with_suffix("") if path.suffix.lower() == GZIP_EXTENSION else path


def _names_of_split(split: str, format: str | None) -> tuple[list[str], list[str]]:
    """Returns possible names of a split's files, also compressed."""
    formats = list(FORMATS.values()) if format is None else [named_format(format)]
    names = [f"{split}{extension}" for row in formats for extension in row.extensions]
    packed = [f"{split}{extension}{GZIP_EXTENSION}" for row in formats if row.is_text for extension in row.extensions]
    return [*names, *(pattern.format(split=split) for row in formats for pattern in row.file_names)], packed


def files_of_split(folder: Path, split: str, format: str | None) -> list[Path]:
    """Returns the files in a folder that may hold a split, in the format or any."""
    names, packed = _names_of_split(split, format)
    paths = [path for name in [*names, *packed] for path in sorted(folder.glob(name))]
    inside = folder / split
    if is_dataset(inside):
        return [inside]
    if inside.is_dir():
        extensions = tuple(extension for row in FORMATS.values() for extension in row.extensions)
        paths += [path for path in sorted(inside.iterdir()) if uncompressed(path).suffix.lower() in extensions]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def is_dataset(path: Path) -> bool:
    """Returns True for a folder that ``save_to_disk`` of a ``datasets.Dataset`` wrote."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def expected_files(split: str, format: str | None) -> str:
    """Returns the names that ``files_of_split`` looks for, in words."""
    return " or ".join(dict.fromkeys(_names_of_split(split, format)[0]))


__all__ = [
    "FORMATS",
    "GZIP_EXTENSION",
    "Format",
    "StreamFormat",
    "TableFormat",
    "expected_files",
    "file_format",
    "files_of_split",
    "is_dataset",
    "named_format",
    "register_format",
    "uncompressed",
]

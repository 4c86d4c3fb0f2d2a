"""File formats with their names, extensions and parsers.

The extension of a file names its format. Where formats share one, such as .json, the first characters decide. This
module also finds the files of a split in a folder, by the names that each format has for them.
"""

from pathlib import Path

from bert_tasks.data.columns import Columns, source_columns
from bert_tasks.data.formats import annotations, excel, objects, plain, stored, text_folder
from bert_tasks.data.formats.base import FORMATS, Format, named_format, register_format
from bert_tasks.data.formats.plain import StreamFormat, TableFormat
from bert_tasks.data.parsers import open_text
from bert_tasks.errors import DataError, argument
from bert_tasks.storage import check_path

GZIP_EXTENSION = ".gz"
_NAMES_SHOWN = 4
_ARCHIVE = "It is an archive. Unpack it, and name the file inside (gzip alone is read as it is)"
_DOCUMENT = "Save its text as .txt, or its table as .csv"
# Extensions of files that are not read -> what to do.
_OTHER_FILES = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar"), _ARCHIVE),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".html", ".htm", ".xml"), _DOCUMENT),
    **dict.fromkeys((".xls", ".xlsb", ".ods"), "It is a workbook of another kind. Save it as .xlsx or .csv"),
    **dict.fromkeys((".pkl", ".pickle", ".arrow", ".feather", ".h5"), "Write the table to .parquet or .jsonl instead"),
}
_START_LENGTH = 4096  # characters that tell formats with the same extension apart

for _format in (*plain.ALL, *annotations.ALL, *objects.ALL, *excel.ALL, *stored.ALL, *text_folder.ALL):
    register_format(_format)


def file_format(name: str | None, path: Path, columns: Columns | None = None) -> Format:
    """Returns the format with a name, or else the format of the file's extension.

    Args:
        name: Name of the format. None means by extension, and by ``Format.matches`` for a shared extension.
        path: The file.
        columns: Columns of the task or of several tasks, or None if the task is not known.

    Raises:
        DataError: No format has the name or the extension.
    """
    if name is not None:
        return named_format(name)
    check_path(path, DataError)
    if path.is_dir():
        format = folder_format(path)
        if format is None:
            format = named_format("datasets")  # whose reader says what the folder lacks
        return format
    extension = uncompressed(path).suffix.lower()
    candidates = [format for format in FORMATS.values() if extension in format.extensions]
    if not candidates:
        advice = _OTHER_FILES.get(extension)
        if advice is None:
            option = argument("format", "csv")
            advice = f"If it is a table in text, set {option}. The formats are {', '.join(FORMATS)}"
        raise DataError(f"{path}: no format belongs to the extension {extension!r}. {advice}")
    if len(candidates) == 1:
        return candidates[0]
    # The first candidate is the usual format of the extension, which reads what no other format claims.
    try:
        with open_text(path, encoding=None, newline="\n") as file:
            start = file.read(_START_LENGTH)
    except (OSError, DataError):  # the reader reports it
        start = ""
    read = None
    if columns is not None:
        read = source_columns(columns)
    for format in candidates[1:]:
        if format.matches(start, read):
            return format
    return candidates[0]


def uncompressed(path: Path) -> Path:
    """Returns the path without ``.gz``, the extension of a compressed text file."""
    if path.suffix.lower() != GZIP_EXTENSION:
        return path
    return path.with_suffix("")


def _names_of_split(split: str, format: str | None) -> tuple[list[str], list[str]]:
    """Returns possible names of a split's files, also compressed."""
    formats = list(FORMATS.values())
    if format is not None:
        formats = [named_format(format)]
    names, patterns, packed = list[str](), list[str](), list[str]()
    for each in formats:
        files = [f"{split}{extension}" for extension in each.extensions]
        names += files
        patterns += [pattern.format(split=split) for pattern in each.file_names]
        if each.is_text:
            packed += [f"{name}{GZIP_EXTENSION}" for name in files]
    return [*names, *patterns], packed


def files_of_split(folder: Path, split: str, format: str | None) -> list[Path]:
    """Returns the files in a folder that may hold a split, in the format or any.

    They are the files called so, such as train.csv, or all files of a folder with the name of the split.
    """
    names, packed = _names_of_split(split, format)
    paths: list[Path] = []
    for name in [*names, *packed]:
        paths += sorted(folder.glob(name))
    inside = folder / split
    if folder_format(inside) is not None:
        return [inside]
    if inside.is_dir():
        extensions: set[str] = set()
        for each in FORMATS.values():
            extensions.update(each.extensions)
        paths += [path for path in sorted(inside.iterdir()) if uncompressed(path).suffix.lower() in extensions]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def folder_format(path: Path) -> Format | None:
    """Returns the format of which the folder as a whole is a source, such as a saved data set, or None."""
    if not path.is_dir():
        return None
    return next((format for format in FORMATS.values() if format.reads_folder(path)), None)


def expected_files(split: str, format: str | None) -> str:
    """Returns the names that ``files_of_split`` looks for, or a few of them, in words."""
    names = list(dict.fromkeys(_names_of_split(split, format)[0]))
    if len(names) <= _NAMES_SHOWN:
        return " or ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} or the like"


__all__ = [
    "FORMATS",
    "GZIP_EXTENSION",
    "Format",
    "StreamFormat",
    "TableFormat",
    "expected_files",
    "file_format",
    "files_of_split",
    "folder_format",
    "named_format",
    "register_format",
    "uncompressed",
]

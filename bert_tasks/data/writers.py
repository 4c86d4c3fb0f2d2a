"""Writes rows as JSON Lines, and makes csv, tsv and parquet files of them.

Predictions are first written as JSON lines, which can be continued after an interruption. A table needs the names of
all columns in its first line, and parquet their types, so both are made of the finished lines. A file appears complete
or not at all. Vectors are base64 in JSON lines that become a file of another format, which is exact and a quarter of
the size of decimal numbers.
"""

import base64
import csv
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from bert_tasks.errors import UsageError
from bert_tasks.storage import atomic_path

_BLOCK_ROWS, _BLOCK_BYTES = 4096, 2**24

Row = dict[str, Any]


Vectors = NDArray[np.float32]


def vector_text(vector: Vectors) -> str:
    """Encodes a vector as base64 of its little-endian float32 numbers."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _stacked(texts: Sequence[str], width: int) -> Vectors:
    """Returns the vectors of some rows, ``[R, width]``."""
    return np.frombuffer(b"".join(map(base64.b64decode, texts)), dtype="<f4").reshape(len(texts), width)


def write_npy(lines: Path, target: Path, column: str, width: int) -> None:
    """Writes vectors as NumPy's float32 array ``[rows, width]``, in constant memory.

    Args:
        lines: File of JSON lines.
        target: The file of the array.
        column: The column of the vectors (``vector_text``).
        width: Number of components of a vector.

    Raises:
        UsageError: The file is not writable.
    """
    try:
        with lines.open("rb") as file:
            rows = sum(1 for _ in file)
        with atomic_path(target, folder=lines.parent) as temporary, temporary.open("wb") as file:
            # The header of the format .npy states the number of rows, so the lines are counted before they are written.
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
            np.lib.format.write_array_header_1_0(file, header)
            for block in _blocks(lines):
                file.write(_stacked([row[column] for row in block], width).tobytes())
    except OSError as error:
        raise write_failure(error, target) from None


def write_parquet(lines: Path, target: Path, *, vectors: Mapping[str, int] = MappingProxyType({})) -> None:
    """Converts JSON lines to a parquet file, in one pass for types and one for rows.

    Memory does not grow. Numbers, texts, lists and objects keep their type. A column with values of several types, for
    example numbers and texts, becomes a text column, in which all values that are not texts are JSON.

    Args:
        lines: File of JSON lines.
        target: Parquet file.
        vectors: Columns of vectors (``vector_text``) -> their width. They become lists of fixed size of float32.

    Raises:
        UsageError: The file is not writable, or a column has whole numbers above 2^53 and, far below, fractions.
    """
    types = {name: pyarrow.list_(pyarrow.float32(), width) for name, width in vectors.items()}
    schema = pyarrow.schema([*_column_types(lines, vectors).items(), *types.items()])
    try:
        with atomic_path(target, folder=lines.parent) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
            for block in _blocks(lines):
                columns = [_column(block, field.name, field.type) for field in schema]
                writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    except OSError as error:
        raise write_failure(error, target) from None
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{target}: a column has no common type for parquet ({error}). Write a .jsonl file") from None


def _column_types(lines: Path, vectors: Collection[str]) -> dict[str, pyarrow.DataType]:
    """Returns the Arrow type of each column, text if parquet has no common type."""
    types: dict[str, pyarrow.DataType] = {}
    for block in _blocks(lines):
        for name in _names(block):
            if name in vectors:
                continue
            values = [row.get(name) for row in block]
            try:
                block_type = pyarrow.array(values).type
                # unify_schemas takes schemas only, and "permissive" lets whole numbers become fractions.
                common = [pyarrow.schema([("", t)]) for t in (types.get(name, block_type), block_type)]
                types[name] = pyarrow.unify_schemas(common, promote_options="permissive").field(0).type
            except (pyarrow.ArrowException, OverflowError):
                types[name] = pyarrow.string()
    for name, arrow_type in types.items():
        if pyarrow.types.is_null(arrow_type) or "struct<>" in str(arrow_type):  # parquet cannot store empty objects
            types[name] = pyarrow.string()
    return types


def _names(rows: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Returns the names of the columns of all rows, in the order in which they appear first."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return names


def _column(block: list[Row], name: str, arrow_type: pyarrow.DataType) -> pyarrow.Array:
    """Returns a column of some rows with a type that all rows have in common."""
    values = [row.get(name) for row in block]
    if pyarrow.types.is_fixed_size_list(arrow_type):  # inference makes none, so it is a column of vectors
        vectors = _stacked([row[name] for row in block], arrow_type.list_size)
        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), arrow_type.list_size)
    if pyarrow.types.is_string(arrow_type):
        for index, value in enumerate(values):
            if value is not None and not isinstance(value, str):
                values[index] = json.dumps(value, ensure_ascii=False)
    return pyarrow.array(values, arrow_type)


def _blocks(lines: Path) -> Iterator[list[Row]]:
    """Yields the rows of a file of JSON lines, in blocks that fit into the memory."""
    block: list[Row] = []
    size = 0
    with lines.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            block.append(json.loads(line))
            size += len(line)  # a row may have vectors or long texts, so a number of rows alone limits no memory
            if len(block) == _BLOCK_ROWS or size >= _BLOCK_BYTES:
                yield block
                block, size = [], 0
    if block:
        yield block


DELIMITERS = {"csv": ",", "tsv": "\t"}
FORMS = ("jsonl", *DELIMITERS, "parquet")

# Text like a formula in a spreadsheet (some read full-width signs as plain ones, and skip a leading tab or end of
# line), and the mark of a text, so that marked texts get one more mark.
_FORMULA = re.compile(
    "'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}]"
)
_MARK = "'"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def check_place(path: Path) -> None:
    """Rejects a path at which no file can be written, before any work is done.

    Raises:
        UsageError: A folder, a device or a pipe is at the path, or the file's folder does not exist or is not writable.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder, expected the name of a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is a device or a pipe, which no file can replace. Use - for standard output")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path}: the folder {path.parent} is not writable")


def is_special(path: Path) -> bool:
    """Returns True if the path is a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON lines, with characters of all scripts as they are."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_table(lines: Path, target: Path, delimiter: str, *, raw: bool) -> None:
    """Makes a table of JSON lines with the columns of all rows, in constant memory.

    Args:
        lines: File of JSON lines, which is read twice, because the first line of a table names all columns.
        target: The file of the table.
        delimiter: Separator of the cells.
        raw: Do not mark texts that a spreadsheet would interpret as a formula. See ``cell``.

    Raises:
        UsageError: The file is not writable.
    """
    names: dict[str, None] = {}
    for block in _blocks(lines):
        names |= _names(map(flat, block))
    with whole_file(target, lines.parent) as file:
        table = TableWriter(file, list(names), delimiter, raw=raw)
        for block in _blocks(lines):
            for row in block:
                table.write(flat(row))


class TableWriter:
    """Rows of one table, whose columns are known."""

    def __init__(self, file: TextIO, names: Sequence[str], delimiter: str, *, raw: bool) -> None:
        self.names = list(names)
        self._raw = raw
        self._writer = csv.writer(_LineFeeds(file), delimiter=delimiter, lineterminator="\r\n")
        if self.names:
            self._writer.writerow([cell(name, raw=raw) for name in self.names])

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes a row. A column that it lacks is an empty cell."""
        self._writer.writerow([cell(row.get(name), raw=self._raw) for name in self.names])


class _LineFeeds:
    """A stream that turns CRLF into LF, because only CRLF makes the writer quote CR."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields as columns, objects of plain values as ``scores.positive`` etc."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        is_object = isinstance(value, Mapping) and len(value) > 0
        if is_object and not any(isinstance(inner, Mapping | list) for inner in value.values()):
            columns |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            columns[name] = value
    return columns


def cell(value: Any, *, raw: bool) -> Any:
    """Returns the cell of a value in a table, with lists and objects as JSON.

    Unless ``raw``, a text (not a number) that starts like a formula, or like a marked formula, gets a ``'`` in front.
    """
    if isinstance(value, Mapping | list | bool):  # true and false as JSON, not as Python's True and False
        return json.dumps(value, ensure_ascii=False)
    # A cell such as =HYPERLINK(...) runs when a spreadsheet opens the file. Texts to predict may come from strangers
    # (https://owasp.org/www-community/attacks/CSV_Injection).
    if raw or not isinstance(value, str) or not _FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return _MARK + value


@contextmanager
def whole_file(path: Path, folder: Path | None = None) -> Iterator[TextIO]:
    """Yields a text file that appears complete and flushed to the disk, or not at all.

    Args:
        folder: Folder of the file while it grows, on the same file system. Default: the final folder.

    Raises:
        UsageError: The file is not writable.
    """
    try:
        with atomic_path(path, folder=folder) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise write_failure(error, path) from None


def write_failure(error: OSError, path: Path) -> UsageError:
    """Returns the error for the user if an output file is not writable."""
    return UsageError(f"{path}: cannot write the output ({error.strerror})")

"""Rows of parquet files, read in batches that fit into the memory.

A parquet file stores a value once in a dictionary, however many rows have it, and compresses what is left. So gigabytes
fit into a kilobyte, and the number of rows in a batch follows from the largest value that a column can have.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow import compute, parquet

from bert_tasks.data import limits
from bert_tasks.data.batch import Batches
from bert_tasks.data.limits import too_large
from bert_tasks.data.parsers import column_batches, schema_class_names

_MOST_ROWS = 1000  # of a batch
_BATCH_BYTES = 2**25  # of a batch, of which Arrow needs a multiple while it decodes
_NUMBER_BYTES = 16  # of the largest number
_ODD_RATIO = 100  # a column that shrinks more may be made of equal values, so their mean size says nothing

Struct = dict[int, Any]  # numbers of fields -> values
# Numbers of https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
_ROW_GROUPS = 4
_GROUP_COLUMNS, _GROUP_ROWS = 1, 3
_CHUNK_METADATA = 3
_TYPE, _ENCODINGS, _PATH, _VALUES, _SIZE, _COMPRESSED = 1, 2, 3, 5, 6, 7
_BYTE_ARRAY, _FIXED_BYTE_ARRAY = 6, 7  # types
# Bytes of a number with 64 bits, of which each byte has 7. Without a limit, the time would grow with the square of the
# length.
_LONGEST_VARINT = 10
_DELTA_BYTE_ARRAY = 7  # an encoding, in which a value shares its beginning with the one before


@contextmanager
def parquet_batches(path: Path, *, columns_to_read: Sequence[str] | None = None) -> Iterator[Batches]:
    """Opens a parquet file and reads its rows, with some columns if the file has all of these.

    Label ids become names if ``datasets`` wrote the names into the file's metadata.

    Raises:
        DataError: A row is too large.
    """
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = tuple(file.schema_arrow.names)
        present: Sequence[str] = columns
        if columns_to_read is not None and set(columns_to_read) <= set(columns):
            # Otherwise a column that is missing may follow from any other.
            present = [name for name in columns if name in columns_to_read]
        sizes = _batch_sizes(path, present, _footer(path, file.metadata.serialized_size))
        tables = _tables(file, present, sizes)
        yield Batches(columns, column_batches(tables, schema_class_names(file.schema_arrow)))


def _footer(path: Path, size: int) -> bytes:
    """Returns the metadata at the end of a file, before their size and the mark of the format."""
    with path.open("rb") as file:
        file.seek(-size - 8, os.SEEK_END)  # 4 bytes with the size and the 4 bytes "PAR1" are the end of the file
        return file.read(size)


def _tables(file: parquet.ParquetFile, columns: Sequence[str], sizes: Sequence[int]) -> Iterator[pyarrow.RecordBatch]:
    """Yields the rows of each row group, in batches of its size."""
    for number, size in enumerate(sizes):
        yield from file.iter_batches(batch_size=size, row_groups=[number], columns=columns)


def _batch_sizes(path: Path, columns: Sequence[str], metadata: bytes) -> list[int]:
    """Returns how many rows of each row group surely fit into a batch.

    Raises:
        DataError: The rows of a group are too large on average.
    """
    groups = ThriftReader(metadata).struct().get(_ROW_GROUPS, [])
    return [_batch_rows(group, path, number, columns) for number, group in enumerate(groups)]


def _batch_rows(group: Struct, path: Path, number: int, columns: Sequence[str]) -> int:
    """Returns how many rows of a row group surely fit into a batch.

    Args:
        group: Its metadata.
        path: The file.
        number: Number of the row group.
        columns: Columns to read.
    """
    rows = max(1, group[_GROUP_ROWS])
    chunks = [chunk[_CHUNK_METADATA] for chunk in group[_GROUP_COLUMNS]]
    read = [_Chunk.of(chunk) for chunk in chunks if chunk[_PATH][0].decode() in columns]
    mean_size = sum(max(chunk.size, chunk.values) // rows for chunk in read)
    if mean_size > limits.LARGEST_ROW:
        raise too_large(f"{path}: a row of the parquet file", limits.LARGEST_ROW)
    longest = _longest_entries(path, number, [chunk.path for chunk in read if chunk.is_worth_a_look])
    largest_size = 1
    for chunk in read:
        values = max(1, chunk.values // rows)  # of one row, which are several in lists
        largest_size += values * chunk.largest_value(longest.get(chunk.path), rows)
    return max(1, min(_MOST_ROWS, _BATCH_BYTES // largest_size))


class _Chunk(NamedTuple):
    """A column of a row group.

    Attributes:
        path: Names from the column to the values, with dots between them.
        values: Number of values, with those of lists.
        size, compressed: Bytes of the pages.
    """

    path: str
    type: int
    encodings: Sequence[int]
    values: int
    size: int
    compressed: int

    @classmethod
    def of(cls, metadata: Struct) -> "_Chunk":
        """Returns the column that the metadata of a column chunk describe."""
        path = ".".join(name.decode() for name in metadata[_PATH])
        return cls(path, *(metadata[field] for field in (_TYPE, _ENCODINGS, _VALUES, _SIZE, _COMPRESSED)))

    @property
    def is_worth_a_look(self) -> bool:
        """True if the values of a dictionary say more about the size of a value than the metadata."""
        is_odd = self.size > _ODD_RATIO * self.compressed
        is_small = self.size * _MOST_ROWS <= _BATCH_BYTES
        return self.type == _BYTE_ARRAY and not (is_odd or is_small or _DELTA_BYTE_ARRAY in self.encodings)

    def largest_value(self, longest: int | None, rows: int) -> int:
        """Returns an upper limit of the bytes of a value. ``longest`` is that of the dictionary, if it is known."""
        if self.type not in (_BYTE_ARRAY, _FIXED_BYTE_ARRAY):
            return _NUMBER_BYTES
        if longest is None:
            return self.size  # all bytes of the column may be those of one value
        return max(longest, self.size // rows)


def _longest_entries(path: Path, number: int, names: Sequence[str]) -> dict[str, int]:
    """Returns the columns of a row group that have a dictionary -> the bytes of its longest value."""
    if not names:
        return {}
    with parquet.ParquetFile(path, read_dictionary=list(names)) as file:
        row = next(file.iter_batches(batch_size=1, row_groups=[number], columns=list(names)), None)
    if row is None:
        return {}
    found: dict[str, int] = {}
    arrays = dict(zip(row.schema.names, row.columns, strict=True))
    while arrays:
        name, array = arrays.popitem()
        if pyarrow.types.is_dictionary(array.type):
            longest = compute.max(compute.binary_length(array.dictionary)).as_py()
            found[name] = 0
            if longest is not None:  # the dictionary has an entry
                found[name] = longest
        elif pyarrow.types.is_struct(array.type):
            for index, field in enumerate(array.type):
                arrays[f"{name}.{field.name}"] = array.field(index)
        elif pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
            arrays[f"{name}.list.{array.type.value_field.name}"] = array.flatten()
    return found


class ThriftReader:
    """Reads metadata in thrift's compact protocol, as dicts of field numbers.

    pyarrow shows the same metadata, but ends the process if those of a column are damaged. Source:
    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0

    def struct(self) -> Struct:
        """Returns the fields of the struct that begins here."""
        fields: Struct = {}
        number = 0
        while (header := self._byte()) != 0:
            # The upper 4 bits are the distance from the field before. If it is larger than 15, they are 0 and the
            # number follows. The lower 4 bits are the type.
            distance = header >> 4
            if distance:
                number += distance
            else:
                number = self._integer()
            fields[number] = self._value(header & 15, is_field=True)
        return fields

    def _value(self, kind: int, *, is_field: bool = False) -> Any:
        """Returns the value of a type that begins here."""
        if kind in (1, 2) and is_field:  # the type of a field says if it is true
            return kind == 1
        if kind in (1, 2):  # an item of a list is a byte
            return self._byte() == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            return self._integer()
        if kind == 7:
            return self._bytes(8)  # a double, of which only the length matters here
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):  # a list or a set
            header = self._byte()
            length = header >> 4
            if length == 15:  # too large for 4 bits
                length = self._varint()
            return [self._value(header & 15) for _ in range(length)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"thrift's type {kind} is not one of parquet's metadata")

    def _byte(self) -> int:
        """Returns the next byte and moves behind it."""
        return self._bytes(1)[0]

    def _bytes(self, length: int) -> bytes:
        """Returns the next bytes and moves behind them. Damaged metadata may ask for more than there are."""
        content = self._content[self._position : self._position + length]
        if len(content) < length:
            raise ValueError("the metadata end too early")
        self._position += length
        return content

    def _varint(self) -> int:
        """Returns a number of up to 64 bits, 7 in each byte, the lowest first. The eighth bit says that more follow.

        The encoding is called LEB128.
        """
        number = 0
        for index in range(_LONGEST_VARINT):
            byte = self._byte()
            number |= (byte & 127) << (7 * index)
            if byte < 128:
                return number
        raise ValueError("a number in the metadata has more than 64 bits")

    def _integer(self) -> int:
        """Returns a number with a sign, which zigzag encoding stores as 0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

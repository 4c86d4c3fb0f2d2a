"""TensorFlow's checkpoint format (tensor bundle, V2).

The index ``NAME.index`` is a LevelDB table whose values are protobuf messages. ``NAME.data-00000-of-00001`` (one or
several) hold the raw values. Nothing in these files is executed. The reader compares the checksum (CRC-32C) of each
block of the index and of each tensor, and checks every length before it uses it.

Sources: ``tensor_bundle.h`` and ``tensor_bundle.proto`` of TensorFlow, and LevelDB's ``table_format.md``.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file, refuse

INDEX = ".index"
_MAX_INDEX_BYTES = 16 * 2**20  # the index of BERT-large with its optimizer has 0.1 MiB
_MAX_KEY_BYTES = 4096
_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
# TensorFlow's numbers of types (types.proto). Other types occur in checkpoints of other programs only.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    9: torch.int64,
    14: torch.bfloat16,
    19: torch.float16,
}
_AGAIN = "The file is damaged. Copy or download it again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The location, TensorFlow type number and masked checksum of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_partitioned: bool


@dataclass(frozen=True, kw_only=True)
class TensorBundle:
    """The index of a checkpoint at ``path``, with entries by names of variables."""

    path: Path
    num_shards: int
    entries: Mapping[str, Entry]

    def read(self, name: str) -> Tensor:
        """Reads a tensor and compares its checksum.

        Raises:
            CheckpointError: A data file is missing, truncated or damaged, or the tensor has an unknown type.
        """
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            refuse(self.path, f"the variable {name} has TensorFlow's type {entry.dtype}, expected numbers")
        if entry.is_partitioned:
            refuse(self.path, f"the variable {name} is partitioned, which is not supported. Save it in one part")
        dtype = _DTYPES[entry.dtype]
        if math.prod(entry.shape) * dtype.itemsize != entry.size:
            refuse(self.path, f"the variable {name} has the shape {list(entry.shape)} but {entry.size} bytes. {_AGAIN}")
        stem = self.path.name.removesuffix(INDEX)
        path = checked_file(self.path.parent, f"{stem}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        end, size = entry.offset + entry.size, path.stat().st_size
        if size < end:
            refuse(path, f"truncated to {size} bytes, but {name} ends at byte {end}. Copy or download it again")
        content = torch.empty(entry.size, dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(content.numpy().data)
        if crc32c(content.numpy().data) != _unmasked(entry.checksum):
            refuse(path, f"the checksum of {name} (bytes {entry.offset} to {end}) is not the stored one. {_AGAIN}")
        return content.view(dtype).reshape(entry.shape)


def open_bundle(path: Path) -> TensorBundle:
    """Reads ``NAME.index``. The data files are not read.

    Raises:
        CheckpointError: The index is truncated, damaged, too large or of another format.
    """
    path = checked_file(path.parent, path.name)
    size = path.stat().st_size
    if size > _MAX_INDEX_BYTES:
        refuse(path, f"{size} bytes are too many for the index of a checkpoint, expected at most {_MAX_INDEX_BYTES}")
    try:
        entries = dict(_table(memoryview(path.read_bytes())))
        header = _message(entries.pop(b"", memoryview(b"")))  # BundleHeaderProto
        num_shards = _number(header, 1)
        if not 1 <= num_shards <= 99_999 or _number(header, 2) != 0:
            raise ValueError(f"its header states {num_shards} data files, or big-endian numbers")
        named = {key.decode(): _entry(value, num_shards) for key, value in entries.items()}
    except (ValueError, IndexError) as error:
        refuse(path, f"not the index of a TensorFlow checkpoint, or damaged ({error}). Copy or download it again")
    return TensorBundle(path=path, num_shards=num_shards, entries=named)


def _table(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yields keys and values. Raises ValueError or IndexError for another format."""
    if len(content) < _FOOTER_BYTES or content[-8:] != _MAGIC:
        raise ValueError("it does not end with a table's footer, so that it is truncated or something else")
    blocks, footer = content[:-_FOOTER_BYTES], content[-_FOOTER_BYTES:-8]
    _, position = _varint(footer, 0)  # offset and size of the meta index, which is empty
    _, position = _varint(footer, position)
    offset, position = _varint(footer, position)
    size, _ = _varint(footer, position)
    end = 0
    for _, handle in _block(blocks, offset, size):
        offset, position = _varint(handle, 0)
        size, _ = _varint(handle, position)
        if offset < end:
            raise ValueError(f"its blocks overlap at byte {offset}")
        end = offset + size
        yield from _block(blocks, offset, size)


def _block(blocks: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yields the keys and values of a block, in which keys share prefixes."""
    end = offset + size
    if end + _TRAILER_BYTES > len(blocks) or size < 4:
        raise ValueError(f"a block at byte {offset} of {size} bytes is not inside the file")
    stored = int.from_bytes(blocks[end + 1 : end + _TRAILER_BYTES], "little")
    if crc32c(blocks[offset : end + 1]) != _unmasked(stored):
        raise ValueError(f"the checksum of its block at byte {offset} is not the stored one")
    if blocks[end] != 0:
        raise ValueError(f"its block at byte {offset} is compressed, which TensorFlow does not do")
    restarts = int.from_bytes(blocks[end - 4 : end], "little")
    content, position, key = blocks[offset : max(offset, end - 4 - 4 * restarts)], 0, b""
    while position < len(content):
        shared, position = _varint(content, position)
        unshared, position = _varint(content, position)
        length, position = _varint(content, position)
        if shared > len(key) or shared + unshared > _MAX_KEY_BYTES or unshared + length > len(content) - position:
            raise ValueError(f"its block at byte {offset} holds an entry that is too long")
        key = key[:shared] + bytes(content[position : position + unshared])
        yield key, content[position + unshared : position + unshared + length]
        position += unshared + length


def _entry(content: memoryview, num_shards: int) -> Entry:
    """Reads dtype 1, shape 2, shard 3, offset 4, size 5, crc32c 6 and slices 7."""
    message = _message(content)
    shape = [
        _number(_message(dimension), 1)
        for field, value in message
        if field == 2 and isinstance(value, memoryview)
        for inner, dimension in _message(value)
        if inner == 2 and isinstance(dimension, memoryview)
    ]
    # A tensor without elements may have any other dimensions, so that its size in bytes does not bound them.
    if math.prod(max(1, dimension) for dimension in shape) >= 1 << 63:
        raise ValueError(f"a variable has the shape {shape}")
    if _number(message, 3) >= num_shards:
        raise ValueError(f"a variable is in data file {_number(message, 3)} of {num_shards}")
    return Entry(
        dtype=_number(message, 1),
        shape=tuple(shape),
        shard=_number(message, 3),
        offset=_number(message, 4),
        size=_number(message, 5),
        checksum=_number(message, 6),
        is_partitioned=any(field == 7 for field, _ in message),
    )


def _message(content: memoryview) -> list[tuple[int, int | memoryview]]:
    """Returns each field's number and value, an integer or bytes, of a message."""
    fields: list[tuple[int, int | memoryview]] = []
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        if tag & 7 == 0:
            value, position = _varint(content, position)
            fields.append((tag >> 3, value))
            continue
        if tag & 7 not in (1, 2, 5):
            raise ValueError(f"it has a field of the unknown type {tag & 7}")
        size, position = _varint(content, position) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], position)
        if size > len(content) - position:
            raise ValueError("it has a field that is longer than its message")
        piece = content[position : position + size]
        fields.append((tag >> 3, piece if tag & 7 == 2 else int.from_bytes(piece, "little")))
        position += size
    return fields


def _number(message: list[tuple[int, int | memoryview]], field: int) -> int:
    """Returns the last integer of a field, or 0 if the message lacks the field."""
    return next((value for name, value in reversed(message) if name == field and isinstance(value, int)), 0)


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    """Returns an unsigned integer, seven bits in each byte, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128 and value < 1 << 64:
            return value, position
    raise ValueError("it has a number of more than 64 bits")


_LANES = 2**12  # words of a row, which stays in the processor's cache
_POLYNOMIAL = 0x82F63B78  # of CRC-32C. As everywhere here, the lowest bit belongs to the highest power


def crc32c(content: bytes | memoryview) -> int:
    """Returns the CRC-32C (Castagnoli) of bytes.

    400 MB take about a second. A CRC is the remainder of a polynomial division. The words of a row are divided side by
    side, which makes a row with the same remainder, until one row is left for a loop over its bytes.
    """
    whole = memoryview(content).cast("B")
    rows = len(whole) // (4 * _LANES)
    remainder, position = 0xFFFFFFFF, 0
    if rows > 1:
        low, high = _row_tables()
        words = np.frombuffer(whole, "<u4", rows * _LANES).reshape(rows, _LANES)
        row = words[0].copy()
        row[0] ^= 0xFFFFFFFF  # the remainder with which a CRC begins
        for following in words[1:]:
            halves = row.view(np.uint16)
            row = low.take(halves[0::2]) ^ high.take(halves[1::2]) ^ following
        remainder, position = _advanced(0, row.tobytes()), 4 * words.size
    return _advanced(remainder, bytes(whole[position:])) ^ 0xFFFFFFFF


@cache
def _byte_table() -> list[int]:
    """Returns the remainder of each byte."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return table


def _advanced(remainder: int, content: bytes) -> int:
    table = _byte_table()
    for byte in content:
        remainder = remainder >> 8 ^ table[(remainder ^ byte) & 255]
    return remainder


@cache
def _row_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns the remainders of the low and the high 16 bits after a row of zeros."""
    columns = [_advanced(1 << bit, bytes(4 * _LANES)) for bit in range(32)]
    tables = []
    for half in (columns[:16], columns[16:]):
        table = np.zeros(1, np.uint32)
        for column in half:
            table = np.concatenate([table, table ^ np.uint32(column)])
        tables.append(table)
    return tables[0], tables[1]


def _unmasked(checksum: int) -> int:
    """Returns the CRC, which LevelDB stores rotated, plus a constant."""
    rotated = (checksum - 0xA282EAD8) % 2**32
    return (rotated >> 17 | rotated << 15) % 2**32

"""TensorFlow's checkpoint format (tensor bundle, V2), read without TensorFlow: ``NAME.index`` and its data files.

The index is a LevelDB table whose values are protobuf messages; ``NAME.data-00000-of-00001`` (one or several) hold the
raw values. Nothing in these files is executed. Each block of the index and each tensor has a checksum (CRC-32C), which
is compared, and every length is checked before it is used.

Sources: ``tensor_bundle.h`` and ``tensor_bundle.proto`` of TensorFlow, and LevelDB's ``table_format.md``.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file, refuse
from bert_tasks.checkpoints.protobuf import fields, varint

INDEX = ".index"
DATA_FILE = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")
_MAX_INDEX_BYTES = 16 * 2**20  # that of BERT-large with its optimizer has 0.1
_MAX_KEY_BYTES = 4096
_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_VERSION = 1  # of the reader that a bundle may ask for
# TensorFlow's numbers of types (types.proto); others occur in checkpoints of other programs only.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    9: torch.int64,
    14: torch.bfloat16,
    19: torch.float16,
}
_AGAIN = "it is damaged; copy or download it again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor is, and what it must be. ``dtype``: TensorFlow's number; ``checksum``: masked."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_partitioned: bool


@dataclass(frozen=True, kw_only=True)
class TensorBundle:
    """The index of a checkpoint. ``path``: of the index; ``entries``: by the names of the variables."""

    path: Path
    num_shards: int
    entries: Mapping[str, Entry]

    def shard(self, number: int) -> Path:
        """The path of a data file."""
        stem = self.path.name.removesuffix(INDEX)
        return self.path.with_name(f"{stem}.data-{number:05d}-of-{self.num_shards:05d}")

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers.

        Raises:
            CheckpointError: it holds something else.
        """
        number = self.entries[name].dtype
        if number not in _DTYPES:
            refuse(self.path, f"the variable {name} has TensorFlow's type {number}, expected numbers")
        return _DTYPES[number]

    def read(self, name: str) -> Tensor:
        """A tensor, after comparing its checksum.

        Raises:
            CheckpointError: a data file is missing, truncated or damaged, or the tensor is of an unknown kind.
        """
        entry, dtype = self.entries[name], self.dtype(name)
        if entry.is_partitioned:
            refuse(self.path, f"the variable {name} is partitioned, which is not supported: save it in one part")
        if math.prod(entry.shape) * dtype.itemsize != entry.size:
            refuse(self.path, f"the variable {name} has the shape {list(entry.shape)} but {entry.size} bytes; {_AGAIN}")
        path = self.shard(entry.shard)
        if not os.path.lexists(path):
            refuse(path, f"missing; {self.path.name} names it, and it must be in the same folder")
        path = checked_file(path.parent, path.name)
        expected = max(one.offset + one.size for one in self.entries.values() if one.shard == entry.shard)
        found = path.stat().st_size
        if found < expected:
            refuse(path, f"truncated: {found} of {expected} bytes; copy or download it again")
        content = torch.empty(entry.size, dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(entry.offset)
            count = file.readinto(content.numpy().data)
        if count != entry.size or crc32c(content.numpy().data) != _unmasked(entry.checksum):
            last = entry.offset + entry.size
            refuse(path, f"the checksum of {name} (bytes {entry.offset} to {last}) is not the stored one: {_AGAIN}")
        return content.view(dtype).reshape(entry.shape)


def open_bundle(path: Path) -> TensorBundle:
    """Reads ``NAME.index``; the data files are not touched.

    Raises:
        CheckpointError: it is truncated, damaged, too large or of another format.
    """
    path = checked_file(path.parent, path.name)
    size = path.stat().st_size
    if size > _MAX_INDEX_BYTES:
        refuse(path, f"{size} bytes are too many for the index of a checkpoint, expected at most {_MAX_INDEX_BYTES}")
    try:
        entries = dict(_table(memoryview(path.read_bytes())))
        num_shards = _num_shards(entries.pop(b"", None))
        bundle = TensorBundle(
            path=path,
            num_shards=num_shards,
            entries={key.decode(): _entry(value, num_shards) for key, value in entries.items()},
        )
    except ValueError as error:
        refuse(path, f"not the index of a TensorFlow checkpoint, or damaged: {error}. Copy or download it again")
    return bundle


def crc32c(content: bytes | memoryview) -> int:
    """The CRC-32C (Castagnoli) of bytes; 400 MB take about a second.

    A CRC is the remainder of a polynomial division. The words of a row of ``lanes`` words are divided side by side,
    which gives a row with the same remainder, until so little is left that a loop over its bytes takes no time.
    """
    whole = memoryview(content).cast("B")
    words = np.frombuffer(whole, "<u4", len(whole) // 4)
    row = _folded(words, _WIDE if len(words) > 4 * _WIDE else _NARROW, before=_BEFORE)
    if len(row) > _NARROW:
        row = _folded(row, _NARROW, before=0)
    return _advanced(0, row.tobytes() + bytes(whole[4 * len(words) :])) ^ 0xFFFFFFFF


_WIDE, _NARROW = 2**14, 2**6  # lanes: a wide row stays in the processor's cache
_POLYNOMIAL = 0x82F63B78  # of CRC-32C; as everywhere here, the lowest bit belongs to the highest power
_BEFORE = 0x641F6454  # the word that makes a remainder of 0 one of 0xFFFFFFFF, with which a CRC begins


@cache
def _byte_table() -> list[int]:
    """The remainder of each byte."""
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
def _row_tables(lanes: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What the low and the high 16 bits of a remainder become when a row of ``lanes`` zeros follows them.

    Args:
        lanes: a power of two.
    """
    columns = [_advanced(1 << bit, bytes(4)) for bit in range(32)]  # of each bit, when one word of zeros follows
    for _ in range(lanes.bit_length() - 1):  # twice as many words each time
        columns = [_sum(columns, column) for column in columns]
    tables = []
    for half in (columns[:16], columns[16:]):
        table = np.zeros(1, np.uint32)
        for column in half:
            table = np.concatenate([table, table ^ np.uint32(column)])
        tables.append(table)
    return tables[0], tables[1]


def _sum(columns: list[int], bits: int) -> int:
    """The sum (exclusive or) of the columns whose bits are set."""
    total = 0
    for bit, column in enumerate(columns):
        total ^= column if bits >> bit & 1 else 0
    return total


def _folded(words: NDArray[np.uint32], lanes: int, *, before: int) -> NDArray[np.uint32]:
    """A row of so many words that has the same remainder as ``before`` and the words."""
    low, high = _row_tables(lanes)
    first = len(words) % lanes
    row = np.zeros(lanes, np.uint32)  # zeros in front change no remainder
    row[lanes - first :] = words[:first]
    row[lanes - first - 1] = before
    for following in words[first:].reshape(-1, lanes):
        halves = row.view(np.uint16)
        row = low.take(halves[0::2]) ^ high.take(halves[1::2]) ^ following
    return row


def _unmasked(checksum: int) -> int:
    """The CRC of which LevelDB stores a rotated one plus a constant."""
    rotated = (checksum - 0xA282EAD8) % 2**32
    return (rotated >> 17 | rotated << 15) % 2**32


def _table(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The keys and values of a LevelDB table, in the order of the keys.

    Raises:
        ValueError: it is truncated, damaged or something else.
    """
    if len(content) < _FOOTER_BYTES or content[-8:] != _MAGIC:
        raise ValueError("it does not end with a table's footer, so that it is truncated or something else")
    blocks, footer = content[:-_FOOTER_BYTES], content[-_FOOTER_BYTES:-8]
    *metaindex, place = _handle(footer, 0)
    *index, place = _handle(footer, place)
    if any(footer[place:]):
        raise ValueError("its footer holds other bytes than expected")
    for _ in _block(blocks, *metaindex):  # empty; its checksum is compared
        pass
    end, previous = 0, None
    for _, handle in _block(blocks, *index):
        offset, size, _ = _handle(handle, 0)
        if offset < end:
            raise ValueError(f"its blocks overlap at byte {offset}")
        end = offset + size
        for key, value in _block(blocks, offset, size):
            if previous is not None and key <= previous:
                raise ValueError("its keys are not in order")
            previous = key
            yield key, value


def _handle(content: memoryview, place: int) -> tuple[int, int, int]:
    """The offset and size of a block, and the position after them."""
    numbers = []
    for _ in range(2):
        start = place
        number, place = varint(content, place)
        if place - start > 1 and content[place - 1] == 0:
            raise ValueError("it states the place of a block with more bytes than needed")
        numbers.append(number)
    return numbers[0], numbers[1], place


def _block(blocks: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
    """The keys and values of a block, whose keys leave out what they share with the key before."""
    end = offset + size
    if end + _TRAILER_BYTES > len(blocks) or size < 4:
        raise ValueError(f"a block at byte {offset} of {size} bytes is not inside the file")
    stored = int.from_bytes(blocks[end + 1 : end + _TRAILER_BYTES], "little")
    if crc32c(blocks[offset : end + 1]) != _unmasked(stored):
        raise ValueError(f"the checksum of its block at byte {offset} is not the stored one")
    if blocks[end] != 0:
        raise ValueError(f"its block at byte {offset} is compressed, which TensorFlow does not do")
    restarts = int.from_bytes(blocks[end - 4 : end], "little")
    if 4 * restarts > size - 4:
        raise ValueError(f"its block at byte {offset} has {restarts} restart points")
    content, place, key = blocks[offset : end - 4 - 4 * restarts], 0, b""
    while place < len(content):
        shared, place = varint(content, place)
        own, place = varint(content, place)
        length, place = varint(content, place)
        if shared > len(key) or shared + own > _MAX_KEY_BYTES or own + length > len(content) - place:
            raise ValueError(f"its block at byte {offset} holds an entry that is too long")
        key = key[:shared] + bytes(content[place : place + own])
        yield key, content[place + own : place + own + length]
        place += own + length


def _num_shards(header: memoryview | None) -> int:
    """The number of data files that the header (BundleHeaderProto) states."""
    if header is None:
        raise ValueError("it has no header")
    found = _numbers(header, (1, 2))
    version = next((value for number, value in fields(header) if number == 3), None)
    wanted = _numbers(version, (2,))[2] if isinstance(version, memoryview) else 0
    if found[2] != 0:
        raise ValueError("its numbers are big-endian")
    if wanted > _VERSION:
        raise ValueError(f"it needs a reader of version {wanted}")
    if not 1 <= found[1] <= 99_999:
        raise ValueError(f"it states {found[1]} data files")
    return found[1]


def _entry(message: memoryview, num_shards: int) -> Entry:
    """What a message (BundleEntryProto) says about a tensor."""
    found = _numbers(message, (1, 3, 4, 5, 6))
    content = [(number, value) for number, value in fields(message) if isinstance(value, memoryview)]
    dimensions = [
        _numbers(dimension, (1,))[1]
        for number, shape in content
        for inner, dimension in fields(shape)
        if number == inner == 2 and isinstance(dimension, memoryview)
    ]
    # A tensor without elements may have any other dimensions, so that its size in bytes does not bound them.
    if math.prod(max(1, dimension) for dimension in dimensions) >= 1 << 63:
        raise ValueError(f"a variable has the shape {dimensions}")
    if found[3] >= num_shards:
        raise ValueError(f"a variable is in data file {found[3]} of {num_shards}")
    return Entry(
        dtype=found[1],
        shape=tuple(dimensions),
        shard=found[3],
        offset=found[4],
        size=found[5],
        checksum=found[6],
        is_partitioned=any(number == 7 for number, _ in content),
    )


def _numbers(message: memoryview, wanted: tuple[int, ...]) -> dict[int, int]:
    """The values of these fields of a message, 0 where it does not state them."""
    found = dict.fromkeys(wanted, 0)
    for number, value in fields(message):
        if number in found and not isinstance(value, memoryview):
            found[number] = value if isinstance(value, int) else int.from_bytes(value, "little")
    return found

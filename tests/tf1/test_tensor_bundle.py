"""TensorFlow's checkpoint format: what TensorFlow wrote is read bit by bit, and no damaged file is."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.errors import CheckpointError
from bert_tasks.tensorflow.tensor_bundle import crc32c, open_bundle
from support.tf1_checkpoints import FIXTURES, FOLDER, values

SQUAD = FOLDER / "bert_squad" / "model.ckpt-7.index"
INDEX = SQUAD.read_bytes()
DATA = SQUAD.with_suffix(".data-00000-of-00001").read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this one and the following are those of RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_checksums(content: bytes, expected: int) -> None:
    assert crc32c(content) == expected


def plain_crc32c(content: bytes) -> int:
    """Byte by byte."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
        table.append(remainder)
    remainder = 0xFFFFFFFF
    for byte in content:
        remainder = remainder >> 8 ^ table[(remainder ^ byte) & 255]
    return remainder ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [*range(12), 255, 256, 257, 259, 260, 2**15 - 1, 2**15, 2**15 + 5, 100_003])
def test_checksum_of_any_length(size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    assert crc32c(content) == plain_crc32c(content)
    assert crc32c(memoryview(bytes(3) + content)[3:]) == crc32c(content)


@pytest.mark.parametrize("folder", FIXTURES)
def test_what_tensorflow_wrote(folder: str) -> None:
    name, shapes = FIXTURES[folder]
    bundle = open_bundle(FOLDER / folder / f"{name}.index")
    assert {name: entry.shape for name, entry in bundle.entries.items()} == shapes
    for variable, shape in shapes.items():
        expected = torch.tensor(12) if variable == "global_step" else torch.from_numpy(values(variable, shape))
        value = bundle.read(variable)
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def copied(folder: Path, *, index: bytes = INDEX, data: bytes = DATA) -> Path:
    (folder / SQUAD.with_suffix(".data-00000-of-00001").name).write_bytes(data)
    path = folder / SQUAD.name
    path.write_bytes(index)
    return path


def read_all(index: Path) -> None:
    bundle = open_bundle(index)
    for name in bundle.entries:
        bundle.read(name)


def flipped(content: bytes, index: int, bits: int = 1) -> bytes:
    return content[:index] + bytes([content[index] ^ bits]) + content[index + 1 :]


@pytest.mark.parametrize("bits", [1, 0x80])
def test_a_changed_byte_of_the_index_is_rejected(bits: int, tmp_path: Path) -> None:
    """The footer has no checksum: a change there is rejected, or it changes nothing that is read."""
    footer = len(INDEX) - 48
    entries = open_bundle(SQUAD).entries
    for index in (*range(0, footer, 37), *range(footer, len(INDEX))):
        path = copied(tmp_path, index=flipped(INDEX, index, bits))
        try:
            assert (index >= footer, open_bundle(path).entries) == (True, entries)
        except CheckpointError as error:
            assert "download it again" in str(error)  # noqa: PT017  # a table of outcomes


def test_a_changed_byte_of_the_data_is_refused_with_its_tensor(tmp_path: Path) -> None:
    entries = open_bundle(SQUAD).entries
    for index in range(0, len(DATA), 613):
        bundle = open_bundle(copied(tmp_path, data=flipped(DATA, index)))
        for name, entry in entries.items():
            if entry.offset <= index < entry.offset + entry.size:
                with pytest.raises(CheckpointError, match=rf"checksum of {name} \(bytes {entry.offset} to"):
                    bundle.read(name)
            elif index % 5 == 0:
                bundle.read(name)


def test_a_truncated_index_is_refused(tmp_path: Path) -> None:
    for size in (*range(1, len(INDEX), 61), len(INDEX) - 1):
        with pytest.raises(CheckpointError, match=r"truncated or something else|is damaged|damaged:"):
            open_bundle(copied(tmp_path, index=INDEX[:size]))


def test_a_data_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for path in (FOLDER / "bert").glob("*.ckpt.*"):
        if "00001-of" not in path.name:
            shutil.copy(path, tmp_path)
    bundle = open_bundle(tmp_path / "bert_model.ckpt.index")
    shards = [entry.shard for entry in bundle.entries.values()]
    assert set(shards) == {0, 1}
    with pytest.raises(CheckpointError, match=r"data-00001-of-00002: No such file"):
        read_all(bundle.path)


# Indexes whose checksums are right, so that only the other checks can refuse them.


def varint(number: int) -> bytes:
    rest = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in rest[:-1]), rest[-1]])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A block without shared keys, with its trailer."""
    body = b"".join(varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    content = body + bytes(4) + (1).to_bytes(4, "little") + b"\0"
    checksum = crc32c(content)
    masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32
    return content + masked.to_bytes(4, "little")


def table(entries: Sequence[tuple[bytes, bytes]], *, blocks: int = 1, repeated: bool = False) -> bytes:
    """A table of blocks. ``repeated``: its index names the first block twice."""
    size = -(-len(entries) // blocks)
    parts = [block(entries[start : start + size]) for start in range(0, len(entries), size)]
    handles, offset = [], 0
    for content in parts:
        handles.append((b"~", varint(offset) + varint(len(content) - 5)))
        offset += len(content)
    metaindex, index = block([]), block(handles * (1 + repeated))
    footer = varint(offset) + varint(len(metaindex) - 5)
    footer += varint(offset + len(metaindex)) + varint(len(index) - 5)
    return b"".join([*parts, metaindex, index, footer.ljust(40, b"\0"), 0xDB4775248B80FB57.to_bytes(8, "little")])


HEADER = (b"", field(1, 1) + field(3, field(1, 1)))
SHAPE = field(2, field(2, field(1, 2)) + field(2, field(1, 3)))
CHECKSUM = b"\x35" + (((crc32c(bytes(24)) >> 15 | crc32c(bytes(24)) << 17) + 0xA282EAD8) % 2**32).to_bytes(4, "little")
NOTHING = 0xA282EAD8.to_bytes(4, "little")  # the masked checksum of no bytes
GOOD = field(1, 1) + SHAPE + field(5, 24) + CHECKSUM


def shaped(*dimensions: int) -> bytes:
    """An entry without data."""
    return field(1, 1) + field(2, b"".join(field(2, field(1, size)) for size in dimensions)) + b"\x35" + NOTHING


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    path = copied(tmp_path, index=table([HEADER, (b"a", shaped(3, 0, 2**61))]), data=bytes(24))
    assert open_bundle(path).read("a").shape == (3, 0, 2**61)


@pytest.mark.parametrize("blocks", [1, 2])
def test_index_of_the_tests_own(blocks: int, tmp_path: Path) -> None:
    path = copied(tmp_path, index=table([HEADER, (b"a", GOOD), (b"b", GOOD)], blocks=blocks), data=bytes(24))
    assert torch.equal(open_bundle(path).read("b"), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (table([(b"a", GOOD)]), "states 0 data files"),
        (table([(b"", field(1, 10**6))]), "states 1000000 data files"),
        (table([(b"", field(1, 1) + field(2, 1))]), "big-endian"),
        (table([HEADER, (b"a", field(3, 1))]), "data file 1 of 1"),
        (table([HEADER, (b"a", GOOD)], repeated=True), "blocks overlap"),
        (table([HEADER, (b"a" * 5000, GOOD)]), "entry that is too long"),
        (table([HEADER, (b"a", b"\x0b")]), "unknown type 3"),
        (table([HEADER, (b"\xff", GOOD)]), "can't decode"),
        (table([HEADER, (b"a", shaped(2**63, 2**63))]), "has the shape"),
        (table([HEADER, (b"a", shaped(0, 2**64 - 1))]), r"has the shape \[0, 18446744073709551615\]"),
        (table([HEADER, (b"a", shaped(2**62, 0, 2))]), "has the shape"),
        (table([HEADER, (b"a", field(5, 2**64))]), "more than 64 bits"),
    ],
)
def test_index_that_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_bundle(copied(tmp_path, index=content))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (field(1, 7) + SHAPE + field(5, 24), "type 7, expected numbers"),
        (GOOD + field(7, b""), "is partitioned"),
        (field(1, 2) + SHAPE + field(5, 24), r"shape \[2, 3\] but 24 bytes"),
        (field(1, 1) + field(2, field(2, field(1, 2**31)) * 2) + field(5, 24), "but 24 bytes"),
        (GOOD + field(4, 8), "truncated to 24 bytes"),
        (GOOD + field(4, 2**62), "truncated"),
        (field(1, 1) + field(2, field(2, field(1, 2**40))) + field(5, 2**42), "truncated"),
        (field(1, 1) + SHAPE + field(5, 24), "checksum of a"),
    ],
)
def test_entry_that_is_refused(entry: bytes, reason: str, tmp_path: Path) -> None:
    bundle = open_bundle(copied(tmp_path, index=table([HEADER, (b"a", entry)]), data=bytes(24)))
    with pytest.raises(CheckpointError, match=reason):
        bundle.read("a")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_index_is_read_or_refused(data: st.DataObject) -> None:
    """A file that lies with right checksums: every outcome but an answer or the one error is a defect."""
    parts = st.one_of(st.binary(max_size=12), st.builds(field, st.integers(1, 8), st.integers(0, 2**64 - 1)))
    message = st.lists(parts, max_size=6).map(b"".join)
    entries = data.draw(st.lists(st.tuples(st.binary(max_size=3), message), max_size=3, unique_by=lambda pair: pair[0]))
    content = table(sorted([HEADER, *[entry for entry in entries if entry[0]]]))
    path = Path(os.environ["HF_HOME"]) / "fuzzed.index"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        read_all(path)
    except CheckpointError as error:
        assert str(path.parent) in str(error)  # noqa: PT017  # any other exception fails the test

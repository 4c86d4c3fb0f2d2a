"""The bytes of an ONNX file, searched for references to other files before a runtime sees them.

Owns the few fields of the ONNX messages that this needs, read from protobuf's wire format: running a graph needs
onnxruntime only, which would read external data from any path that the file states. Must not know what a graph
computes.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

# Message -> its fields that lead to a tensor, by number (onnx.proto of ONNX 1.22); the other fields are passed over.
_MESSAGES: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "model": {7: "graph", 20: "training", 25: "function"},
        "training": {1: "graph", 2: "graph"},
        "function": {7: "node", 11: "attribute"},
        "graph": {1: "node", 5: "tensor", 15: "sparse_tensor"},
        "node": {5: "attribute"},
        "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse_tensor", 23: "sparse_tensor"},
        "sparse_tensor": {1: "tensor", 2: "tensor"},
        "tensor": {},
    }
)
_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14  # fields of a tensor
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; groups (3 and 4) occur in no ONNX message


def external_tensor(content: bytes) -> str | None:
    """The name of a tensor whose values are outside the file, wherever in the graph it is; None if there is none.

    Args:
        content: an ONNX file.

    Raises:
        ValueError: it is no ONNX model: cut, damaged or something else.
    """
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        name, is_external = "", False
        for number, value in _fields(message):
            if isinstance(value, memoryview) and number in _MESSAGES[kind]:
                waiting.append((_MESSAGES[kind][number], value))
            elif kind == "tensor" and isinstance(value, memoryview):
                name = bytes(value).decode("utf-8", errors="replace") if number == _NAME else name
                is_external |= number == _EXTERNAL_DATA
            elif kind == "tensor":
                is_external |= number == _DATA_LOCATION and value != 0
        if is_external:
            return name
    return None


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message by their numbers: integers, and the bytes of what has a length; fixed ones as 0."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if number == 0 or tag >= 1 << 32:
            raise ValueError(f"a field with the tag {tag}")
        size = 0
        if wire == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if wire == _BYTES:
            size, place = _varint(message, place)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"a field of the unknown type {wire}")
        if size > len(message) - place:
            raise ValueError("a field that is longer than its message")
        yield number, message[place : place + size] if wire == _BYTES else 0
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number of at most ten bytes, seven bits in each, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it ends within a number")
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number of more than ten bytes")

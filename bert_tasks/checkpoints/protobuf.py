"""The fields of a message in protobuf's wire format, for the few formats whose generated classes are not needed.

A message of ONNX, SentencePiece or TensorFlow is read from an untrusted file: every length is checked first.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; groups (3 and 4) occur in none of these formats


def fields(message: memoryview) -> Iterator[tuple[int, int | bytes | memoryview]]:
    """The number and value of each field of a message.

    Returns:
        A memoryview for texts, messages and packed lists; an unsigned integer below 2**64; or the 4 or 8 bytes, little
        end first, of a number of fixed size, which may be a floating point number.

    Raises:
        ValueError: the message is truncated, damaged or something else.
    """
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        number, wire = tag >> 3, tag & 7
        if number == 0 or tag >= 1 << 32:
            raise ValueError(f"it has a field with the tag {tag}")
        size = 0
        if wire == _VARINT:
            value, place = varint(message, place)
            yield number, value
            continue
        if wire == _BYTES:
            size, place = varint(message, place)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"it has a field of the unknown type {wire}")
        if size > len(message) - place:
            raise ValueError("it has a field that is longer than its message")
        content = message[place : place + size]
        yield number, content if wire == _BYTES else bytes(content)
        place += size


def varint(message: memoryview, place: int) -> tuple[int, int]:
    """An unsigned integer of at most 64 bits, of which each byte holds seven, and the position after it.

    Raises:
        ValueError: the message ends within it, or it is longer.
    """
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it ends within a number")
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128 and value < 1 << 64:
            return value, place
    raise ValueError("it has a number of more than 64 bits")

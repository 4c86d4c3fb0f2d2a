"""A SentencePiece model (``.model``) without the sentencepiece library: its pieces and its table of characters.

Source: ``sentencepiece_model.proto`` of SentencePiece.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from bert_tasks.checkpoints.files import checked_file, refuse
from bert_tasks.checkpoints.protobuf import fields
from bert_tasks.data.problems import counted

_MAX_BYTES = 64 * 2**20
_UNIGRAM = 1
_USER_DEFINED = 4


@dataclass(frozen=True, kw_only=True)
class SentencePieces:
    """A Unigram model.

    Attributes:
        pieces: each with its score, in the order of their ids.
        unknown_id: of the piece for what no other piece covers.
        user_defined: the ids of the pieces that are found in a text before it is cut into others.
        characters: the compiled rules by which characters are replaced first; None: there are none.
    """

    pieces: tuple[tuple[str, float], ...]
    unknown_id: int
    user_defined: tuple[int, ...]
    characters: bytes | None


def read_sentencepiece(path: Path) -> SentencePieces:
    """Reads a SentencePiece model.

    Raises:
        CheckpointError: it is damaged, or not a Unigram model.
    """
    path = checked_file(path.parent, path.name)
    size = path.stat().st_size
    if size > _MAX_BYTES:
        refuse(path, f"{size} bytes are too many for a vocabulary, expected at most {_MAX_BYTES}")
    try:
        found, pieces, user_defined = _pieces(memoryview(path.read_bytes()))
    except ValueError as error:
        refuse(path, f"not a SentencePiece model, or damaged: {error}. Copy or download it again")
    kind, unknown, characters = found.get("kind", _UNIGRAM), found.get("unk_id", 0), found.get("characters")
    if not isinstance(kind, int) or not isinstance(unknown, int):
        refuse(path, "damaged: one of its numbers has another type. Copy or download it again")
    if kind != _UNIGRAM:
        refuse(path, f"a SentencePiece model of type {kind}; supported is 1 (Unigram)")
    if unknown >= len(pieces):
        refuse(
            path, f"a SentencePiece model of {counted(len(pieces), 'piece')}, whose unknown piece has the id {unknown}"
        )
    content = bytes(characters) if isinstance(characters, memoryview) and characters else None
    return SentencePieces(
        pieces=tuple(pieces), unknown_id=unknown, user_defined=tuple(user_defined), characters=content
    )


def _pieces(model: memoryview) -> tuple[dict[str, int | bytes | memoryview], list[tuple[str, float]], list[int]]:
    """What the parts of a model (ModelProto) say, its pieces, and the ids of those that users defined."""
    known = {(2, 3): "kind", (2, 40): "unk_id", (3, 2): "characters"}
    found: dict[str, int | bytes | memoryview] = {}
    pieces: list[tuple[str, float]] = []
    user_defined: list[int] = []
    for number, message in fields(model):
        if not isinstance(message, memoryview):
            continue
        content = fields(message)
        if number == 1:
            piece = dict(content)
            text, score = piece.get(1, memoryview(b"")), piece.get(2, bytes(4))
            if not isinstance(text, memoryview) or not isinstance(score, bytes) or len(score) != 4:
                raise ValueError(f"piece {len(pieces)} is not a text with a score")
            (probability,) = struct.unpack("<f", score)
            if not math.isfinite(probability):
                raise ValueError(f"piece {len(pieces)} has the score {probability}")
            if piece.get(3) == _USER_DEFINED:
                user_defined.append(len(pieces))
            pieces.append((bytes(text).decode(), probability))
        elif number in (2, 3):
            found |= {known[number, inner]: value for inner, value in content if (number, inner) in known}
    return found, pieces, user_defined

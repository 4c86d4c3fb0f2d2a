"""Tag schemes: how the tags of words mark where entities begin and end.

Owns what IOB1, IOB2, BIOES (also spelt BILOU or BMES) and raw tags mean, and the ways between them. Chunk tags are
``O`` and ``PREFIX-TYPE``; the type may hold hyphens. A sentence with any other tag (parts of speech; a prefix without
a type, since ``B`` and ``I`` are parts of speech somewhere) is raw and comes back as it is. Must not know files,
models or metrics, and imports nothing heavy.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Scheme = Literal["IOB1", "IOB2", "BIOES", "raw"]

# What a prefix says of its word: begins, is inside, ends an entity, or is one alone.
_ROLES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
# The prefixes that may say a role, best first: own spelling, then what reads as the same entities where possible.
_SPELLINGS = {"B": "BIM", "I": "IM", "E": "ELIM", "S": "SUBELIM"}


@dataclass(frozen=True, kw_only=True)
class Entity:
    """Words ``start`` to ``end - 1`` of a sentence, and what they are."""

    type: str
    start: int
    end: int


class _Piece(NamedTuple):
    """One chunk tag, read after the tags before it; ``starts``: an entity begins here."""

    role: str
    type: str
    starts: bool


_OUTSIDE = _Piece("O", "", False)


def is_chunk_tag(tag: str) -> bool:
    """Whether the tag says where an entity begins, goes on or ends: ``O`` or ``PREFIX-TYPE``."""
    prefix, _, kind = tag.partition("-")
    return tag == "O" or (prefix in _ROLES and kind != "")


def detect_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme that the tags of a file are written in.

    Any other tag makes the whole file raw; E-, S-, L- or U- make it BIOES. It is IOB1 if some entity starts with I-
    while B- only parts neighbours of one type, else IOB2, in which an I- that starts an entity is a fault. Only ``O``,
    or nothing at all, is IOB2: chunk tags in which no entity happens to stand.
    """
    prefixed, started_inside, began_afresh = False, False, False
    for tags in sentences:
        pieces = _pieces(tags)
        if pieces is None:
            return "raw"
        prefixed |= any(piece.role in "ES" for piece in pieces)
        started_inside |= any(piece.role == "I" and piece.starts for piece in pieces)
        began_afresh |= _fresh_begins(pieces) > 0
    if prefixed:
        return "BIOES"
    return "IOB1" if started_inside and not began_afresh else "IOB2"


def label_scheme(labels: Sequence[str]) -> Scheme:
    """The scheme that a model's set of labels speaks.

    IOB1 if some type has I- without B-, as in files whose entities of that type never touch. A set with both reads as
    IOB2: which of the two a model was trained on cannot be seen, and ``to_iob2`` reads either.
    """
    if not all(is_chunk_tag(label) for label in labels):
        return "raw"
    parts = {_split(label) for label in labels}
    if any(role in "ES" for role, _ in parts):
        return "BIOES"
    return "IOB1" if any(role == "I" and ("B", kind) not in parts for role, kind in parts) else "IOB2"


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The sentence in IOB2, from any scheme; what is IOB2 stays as it is.

    An entity starts at B- and S-, and at an I- or E- that has nothing of its type to continue, as conlleval counts.
    """
    pieces = _pieces(tags)
    return list(tags) if pieces is None else [_iob2_tag(piece) for piece in pieces]


def from_iob2(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The sentence in ``scheme``, with the letters B, I, O, E and S."""
    pieces = _pieces(to_iob2(tags))
    if pieces is None or scheme == "raw":
        return list(tags)
    roles = {"IOB1": _iob1_roles, "IOB2": _iob2_roles, "BIOES": _bioes_roles}[scheme](pieces)
    return [_tag(role, piece.type) for role, piece in zip(roles, pieces, strict=True)]


def to_labels(tags: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The IOB2 sentence in the words of a label set: its scheme and its letters (BIOES, BILOU, BMES).

    Where a type lacks a label of its scheme the next best is taken, say I- for B- where no B- exists; neighbours of one
    type then run together. A tag that no label can say stays as ``from_iob2`` has it, for the caller to report.
    """
    known = set(labels)
    return [_known_label(tag, known) for tag in from_iob2(tags, label_scheme(labels))]


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence in any scheme, in order; none where the tags are raw. Counts as conlleval does."""
    pieces = _pieces(tags)
    if pieces is None:
        return []
    starts = [place for place, piece in enumerate(pieces) if piece.starts]
    stops = [place for place, piece in enumerate(pieces) if piece.starts or piece.role == "O"] + [len(pieces)]
    ends = {start: stop for start, stop in pairwise(stops) if pieces[start].starts}
    return [Entity(type=pieces[start].type, start=start, end=ends[start]) for start in starts]


def invalid_transitions(tags: Sequence[str], scheme: Scheme = "IOB2") -> int:
    """How many steps from tag to tag, both ends of the sentence included, the scheme forbids.

    IOB2: an I- with nothing of its type before it. IOB1: a B- with nothing of its type before it. BIOES: also an
    entity that is not closed by E- or S-. Raw tags follow each other freely.
    """
    pieces = _pieces(tags)
    if pieces is None or scheme == "raw":
        return 0
    if scheme == "IOB1":
        return _fresh_begins(pieces)
    if scheme == "IOB2":
        return sum(piece.starts and piece.role in "IE" for piece in pieces)
    steps = pairwise([_OUTSIDE, *pieces, _OUTSIDE])
    return sum(not _fits_bioes(before, after) for before, after in steps)


def forbidden_steps(labels: Sequence[str]) -> list[list[int]]:
    """``[L + 2, L]`` which labels may not begin a chain, follow each label, or end a chain."""
    scheme = label_scheme(labels)

    def faults(*tags: str) -> int:
        return invalid_transitions(tags, scheme)

    # A label is followed by whatever it allows, so that only its own start is counted; what is left is its end.
    starts = {label: min(faults(label, "O"), faults(label, f"E-{label[2:]}")) for label in labels}
    ends = {label: faults(label) - starts[label] for label in labels}
    within = [[faults(before, after) - starts[before] - ends[after] for after in labels] for before in labels]
    return [[starts[label] for label in labels], *within, [ends[label] for label in labels]]


def continuation_label(label: str, labels: Container[str]) -> str:
    """The label of a word's later sub-words: ``I-X`` (``M-X`` in BMES) for ``B-X``; itself where there is none."""
    inside = (f"{letter}-{label[2:]}" for letter in _SPELLINGS["I"] if label.startswith("B-") and is_chunk_tag(label))
    return next((other for other in inside if other in labels), label)


def _split(tag: str) -> tuple[str, str]:
    """Role and type of a chunk tag; ``("O", "")`` outside of entities."""
    prefix, _, kind = tag.partition("-")
    return _ROLES.get(prefix, "O"), kind


def _tag(role: str, kind: str) -> str:
    return "O" if role == "O" else f"{role}-{kind}"


def _pieces(tags: Sequence[str]) -> list[_Piece] | None:
    """The tags as read from left to right; None for a raw sentence."""
    if not all(is_chunk_tag(tag) for tag in tags):
        return None
    pieces = []
    before = ("O", "")
    for part in map(_split, tags):
        role, kind = part
        goes_on = role in "IE" and before in (("B", kind), ("I", kind))
        pieces.append(_Piece(role, kind, role != "O" and not goes_on))
        before = part
    return pieces


def _iob2_tag(piece: _Piece) -> str:
    if piece.role == "O":
        return "O"
    return _tag("B" if piece.starts else "I", piece.type)


def _iob2_roles(pieces: Sequence[_Piece]) -> list[str]:
    return [piece.role for piece in pieces]


def _iob1_roles(pieces: Sequence[_Piece]) -> list[str]:
    steps = pairwise([_OUTSIDE, *pieces])
    return ["I" if after.role == "B" and before.type != after.type else after.role for before, after in steps]


def _bioes_roles(pieces: Sequence[_Piece]) -> list[str]:
    last_role = {"B": "S", "I": "E", "O": "O"}
    steps = pairwise([*pieces, _OUTSIDE])
    return [piece.role if after.role == "I" else last_role[piece.role] for piece, after in steps]


def _known_label(tag: str, known: set[str]) -> str:
    role, kind = _split(tag)
    spelt = (f"{letter}-{kind}" for letter in _SPELLINGS.get(role, ""))
    return next((label for label in spelt if label in known), tag)


def _fresh_begins(pieces: Sequence[_Piece]) -> int:
    """How many B- follow nothing of their type."""
    return sum(after.role == "B" and before.type != after.type for before, after in pairwise([_OUTSIDE, *pieces]))


def _fits_bioes(before: _Piece, after: _Piece) -> bool:
    is_open, goes_on = before.role in "BI", after.role in "IE"
    return is_open == goes_on and (not is_open or before.type == after.type)

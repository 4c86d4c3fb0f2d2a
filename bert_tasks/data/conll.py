"""Parses CoNLL and CoNLL-U files, one word per line, and schemes of tags.

Owns the meaning of IOB1, IOB2, BIOES (also spelt BILOU or BMES) and raw tags, the conversions between them, and the
parsing of sentences, documents and comments. Chunk tags are ``O`` and ``PREFIX-TYPE``, and the type may hold hyphens. A
sentence with any other tag is raw and is not changed. Examples are parts of speech and a prefix without a type, since
``B`` and ``I`` are parts of speech in some tag sets. Imports nothing heavy.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

from bert_tasks.data.batch import Record
from bert_tasks.data.issues import counted, shortened

Scheme = Literal["IOB1", "IOB2", "BIOES", "raw"]

# The role of a word by its prefix. It begins, is inside or ends an entity, or is a whole entity.
_ROLES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
# Prefixes for a role, best first. After the usual spelling come prefixes that mean the same entities if possible.
_SPELLINGS = {"B": "BIM", "I": "IM", "E": "ELIM", "S": "SUBELIM"}


@dataclass(frozen=True, kw_only=True)
class Entity:
    """Words ``start`` to ``end - 1`` of a sentence, and their type."""

    type: str
    start: int
    end: int


class _Piece(NamedTuple):
    """A chunk tag, read after the tags before it. ``starts`` marks a new entity."""

    role: str
    type: str
    starts: bool


_OUTSIDE = _Piece("O", "", False)


def is_chunk_tag(tag: str) -> bool:
    """Returns True for ``O`` and ``PREFIX-TYPE``, the tags of entities."""
    prefix, _, entity_type = tag.partition("-")
    return tag == "O" or (prefix in _ROLES and entity_type != "")


def detect_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """Returns the scheme of the tags in a file.

    Any other tag makes the whole file raw. E-, S-, L- or U- make it BIOES. It is IOB1 if some entity starts with I-
    while B- only separates neighbours of one type. Otherwise it is IOB2, in which an I- that starts an entity is a
    fault. A file of ``O`` only, or without tags, is IOB2 without entities.
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
    """Returns the scheme of a model's set of labels.

    It is IOB1 if some type has I- without B-, as in files whose entities of that type never touch. A set with both
    reads as IOB2. The set does not tell which of the two a model was trained on, but ``to_iob2`` reads either.
    """
    if not all(is_chunk_tag(label) for label in labels):
        return "raw"
    parts = {_split(label) for label in labels}
    if any(role in "ES" for role, _ in parts):
        return "BIOES"
    return "IOB1" if any(role == "I" and ("B", entity_type) not in parts for role, entity_type in parts) else "IOB2"


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Converts a sentence from any scheme to IOB2.

    An entity starts at B- and S-, and at an I- or E- that has nothing of its type to continue, as conlleval counts.
    """
    pieces = _pieces(tags)
    if pieces is None:
        return list(tags)
    return ["O" if piece.role == "O" else f"{'B' if piece.starts else 'I'}-{piece.type}" for piece in pieces]


def from_iob2(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Converts a sentence to ``scheme``, with the letters B, I, O, E and S."""
    pieces = _pieces(to_iob2(tags))
    if pieces is None or scheme == "raw":
        return list(tags)
    roles = [piece.role for piece in pieces]
    if scheme == "IOB1":
        steps = pairwise([_OUTSIDE, *pieces])
        roles = ["I" if after.role == "B" and before.type != after.type else after.role for before, after in steps]
    elif scheme == "BIOES":
        last_role = {"B": "S", "I": "E", "O": "O"}
        steps = pairwise([*pieces, _OUTSIDE])
        roles = [piece.role if after.role == "I" else last_role[piece.role] for piece, after in steps]
    return [role if role == "O" else f"{role}-{piece.type}" for role, piece in zip(roles, pieces, strict=True)]


def to_labels(tags: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Converts an IOB2 sentence to the scheme and letters of a set of labels.

    The letters come from BIOES, BILOU or BMES. If a type lacks a label of its scheme, the next best label is used, for
    example I- if there is no B-. Neighbours of one type then merge. A tag that no label can express is returned as from
    ``from_iob2``, for the caller to report.
    """
    label_set = set(labels)
    spelt = []
    for tag in from_iob2(tags, label_scheme(labels)):
        role, entity_type = _split(tag)
        spellings = (f"{letter}-{entity_type}" for letter in _SPELLINGS.get(role, ""))
        spelt.append(next((label for label in spellings if label in label_set), tag))
    return spelt


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence in order, as conlleval counts them."""
    pieces = _pieces(tags)
    if pieces is None:
        return []
    starts = [index for index, piece in enumerate(pieces) if piece.starts]
    stops = [index for index, piece in enumerate(pieces) if piece.starts or piece.role == "O"] + [len(pieces)]
    ends = {start: stop for start, stop in pairwise(stops) if pieces[start].starts}
    return [Entity(type=pieces[start].type, start=start, end=ends[start]) for start in starts]


def invalid_transitions(tags: Sequence[str], scheme: Scheme = "IOB2") -> int:
    """Counts the steps between tags, including both ends, that the scheme forbids.

    IOB2 forbids an I- with nothing of its type before it. IOB1 forbids a B- with nothing of its type before it. BIOES
    also forbids an entity that is not closed by E- or S-. Raw tags may follow each other freely.
    """
    pieces = _pieces(tags)
    if pieces is None or scheme == "raw":
        return 0
    if scheme == "IOB1":
        return _fresh_begins(pieces)
    if scheme == "IOB2":
        return sum(piece.starts and piece.role in "IE" for piece in pieces)
    faults = 0
    for before, after in pairwise([_OUTSIDE, *pieces, _OUTSIDE]):
        is_open = before.role in "BI"
        faults += is_open != (after.role in "IE") or (is_open and before.type != after.type)
    return faults


def forbidden_steps(labels: Sequence[str]) -> list[list[int]]:
    """Returns ``[L + 2, L]``, labels forbidden first, after each label, and last."""
    scheme = label_scheme(labels)

    def faults(*tags: str) -> int:
        return invalid_transitions(tags, scheme)

    # A label is followed by whatever it allows, so that only its start is counted. The rest is its end.
    starts = {label: min(faults(label, "O"), faults(label, f"E-{label[2:]}")) for label in labels}
    ends = {label: faults(label) - starts[label] for label in labels}
    within = [[faults(before, after) - starts[before] - ends[after] for after in labels] for before in labels]
    return [[starts[label] for label in labels], *within, [ends[label] for label in labels]]


def continuation_label(label: str, labels: Container[str]) -> str:
    """Returns a word's label for later sub-words, for example ``I-X`` for ``B-X``."""
    inside = (f"{letter}-{label[2:]}" for letter in _SPELLINGS["I"] if label.startswith("B-") and is_chunk_tag(label))
    return next((other for other in inside if other in labels), label)


def _split(tag: str) -> tuple[str, str]:
    """Returns role and type of a chunk tag, or ``("O", "")`` outside of entities."""
    prefix, _, entity_type = tag.partition("-")
    return _ROLES.get(prefix, "O"), entity_type


def _pieces(tags: Sequence[str]) -> list[_Piece] | None:
    """Reads the tags from left to right. Returns None for a raw sentence."""
    if not all(is_chunk_tag(tag) for tag in tags):
        return None
    pieces = []
    before = ("O", "")
    for role_and_type in map(_split, tags):
        role, entity_type = role_and_type
        goes_on = role in "IE" and before in (("B", entity_type), ("I", entity_type))
        pieces.append(_Piece(role, entity_type, role != "O" and not goes_on))
        before = role_and_type
    return pieces


def _fresh_begins(pieces: Sequence[_Piece]) -> int:
    """Counts the B- that follow nothing of their type."""
    return sum(after.role == "B" and before.type != after.type for before, after in pairwise([_OUTSIDE, *pieces]))


_DOCUMENT = re.compile(r"-DOCSTART-(?![^ \t])")
_NEW_DOCUMENT = re.compile(r"#\s*newdoc\b")
_BLANK = " \t"
_UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_CHUNK_TAG = re.compile(r"O|[BIESLUM]-\D.*")
_WORD_ID = re.compile(r"\d+")
_OTHER_ID = re.compile(r"\d+-\d+|\d+\.\d+")


def _sentences(
    lines: Iterable[str],
    document: re.Pattern[str],
    read: Callable[[str, bool], list[str] | str | None],
    cells_of: Callable[[list[list[str]]], dict[str, Any]],
) -> Iterator[Record]:
    """Yields a record for each sentence, or for each fault the whole sentence.

    Args:
        lines: The lines of the file.
        document: Matches a line that begins a document.
        read: Returns the cells of a line. They are empty if the line is no separate word, a text if it is invalid, and
            None for a comment. The second argument is True within a sentence.
        cells_of: Returns the cells of the record from the columns.

    A record has its comments in a cell ``comments``, among them the one that begins a document.
    """
    start, documents = 0, 0
    rows, texts, faults, comments = list[list[str]](), list[str](), list[Record](), list[str]()
    for number, text in enumerate(chain(lines, [""]), start=1):
        line = text.removesuffix("\n").removesuffix("\r")
        begins_document = document.match(line) is not None
        if begins_document or line.strip(_BLANK) == "":
            yield from (fault._replace(raw="\n".join(texts)) for fault in faults)
            if rows and not faults:
                cells = cells_of([list(column) for column in zip(*rows, strict=True)])
                if documents:
                    cells["document"] = str(documents - 1)
                if comments:
                    cells["comments"] = comments
                yield Record(start, cells)
            rows, texts, faults, comments = [], [], [], []
            if begins_document and line.startswith("#"):
                comments.append(line)
            documents += begins_document
            continue
        parts = read(line, len(texts) > 0)
        if parts is None:
            comments.append(line)
            continue
        texts.append(line)
        if isinstance(parts, str):
            faults.append(Record.unusable(number, f"{parts}: {shortened(line)}"))
        elif parts:
            start = start if rows else number
            rows.append(parts)


def conll_rows(lines: Iterable[str]) -> Iterator[Record]:
    """Yields the sentences of a file with the word first and the tag last.

    A row's cells are ``words`` (the first column), ``tags`` (the last, missing in files of words alone), each column by
    its number as text, the word being ``"0"``, ``document``, the number of the document, after a -DOCSTART- line, and
    ``comments``.

    The first word decides on the separator of the columns. It is a tab, if its line has a tab, else any number of
    spaces or tabs.

    A line that starts with "# " or "#" and a tab is a comment if its number of columns is not the file's. Otherwise it
    is a word within a sentence and in a file with tabs. Before the first word of a sentence, in a file with spaces, it
    is a word if its last column is a chunk tag, "#" (Penn's tag of "#"), or a tag of an earlier word.
    """
    width, has_tabs, tags = 0, False, set[str]()

    def read(line: str, is_inside: bool) -> list[str] | str | None:
        nonlocal width, has_tabs
        is_tabbed = has_tabs if width else "\t" in line
        cells = re.split(r"[ \t]+", line.strip(_BLANK))
        if is_tabbed:
            cells = [cell.strip(" ") for cell in line.split("\t")]
        if line.startswith(("# ", "#\t")):
            is_tag = cells[-1] == "#" or cells[-1] in tags or _CHUNK_TAG.fullmatch(cells[-1]) is not None
            expected = width if width else len(cells) if is_tabbed else 2
            if len(cells) != expected or not (is_inside or is_tabbed or is_tag):
                return None
        if not width:
            width, has_tabs = len(cells), is_tabbed
        if len(cells) != width:
            separator = "tabs" if has_tabs else "spaces"
            first = f"the file's first word has {counted(width, 'column')}, separated by {separator}"
            return f"{counted(len(cells), 'column')} where {first}"
        tags.add(cells[-1])
        return cells

    def cells_of(columns: list[list[str]]) -> dict[str, Any]:
        cells = {str(number): column for number, column in enumerate(columns)}
        return cells | {"words": columns[0]} | ({"tags": columns[-1]} if len(columns) > 1 else {})

    return _sentences(lines, _DOCUMENT, read, cells_of)


def conllu_rows(lines: Iterable[str]) -> Iterator[Record]:
    """Yields the sentences of a CoNLL-U file with ``form``, ``upos``, ``xpos`` etc.

    ``document`` follows after a "# newdoc", and ``comments`` are the lines with "#" of a sentence. Words are the
    syntactic words, so the surface form of a range (1-2) and empty nodes (1.1) are skipped. A column that holds "_" for
    every word of a sentence is missing there.
    """

    def read(line: str, is_inside: bool) -> list[str] | str | None:
        if line.startswith("#"):
            return None
        cells = line.split("\t")
        if len(cells) != len(_UNIVERSAL):
            return f"{counted(len(cells), 'column')} where CoNLL-U has {len(_UNIVERSAL)}, separated by tabs"
        if _WORD_ID.fullmatch(cells[0]):
            return cells
        if _OTHER_ID.fullmatch(cells[0]):
            return []
        return f"the id {cells[0]!r} where CoNLL-U has 1, a range such as 1-2, or an empty node such as 1.1"

    def cells_of(columns: list[list[str]]) -> dict[str, Any]:
        named = zip(_UNIVERSAL, columns, strict=True)
        return {name: column for name, column in named if set(column) != {"_"} or name == "form"}

    return _sentences(lines, _NEW_DOCUMENT, read, cells_of)

"""Parses CoNLL and CoNLL-U files, one word per line, and schemes of tags.

A scheme says how tags of single words make entities of several words. In IOB2 each entity begins with B- and goes on
with I-. IOB1 writes B- only where two entities of one type touch. BIOES (also spelt BILOU or BMES) marks the last word
and single words, too. The formats are described at https://www.clips.uantwerpen.be/conll2003/ner/ and
https://universaldependencies.org/format.html.

This module owns the meaning of the schemes, the conversions between them, and the parsing of sentences, documents and
comments. Chunk tags are ``O`` and ``PREFIX-TYPE``, and the type may hold hyphens. A sentence with any other tag is raw
and is not changed. Examples are parts of speech and a prefix without a type, since ``B`` and ``I`` are parts of speech
in some tag sets. It imports nothing heavy.
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
_LAST_ROLES = {"B": "S", "I": "E", "O": "O"}  # of a word in IOB2 -> the same for the last word of an entity in BIOES


@dataclass(frozen=True, kw_only=True)
class Entity:
    """Words ``start`` to ``end - 1`` of a sentence, and their type."""

    type: str
    start: int
    end: int


class _Piece(NamedTuple):
    """A chunk tag, which was read after the tags before it. ``starts`` marks a new entity."""

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
    # IOB1 and IOB2 differ only in entities that do not follow one of their own type. IOB1 never begins them with B-,
    # but IOB2 always does.
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
    if started_inside and not began_afresh:
        return "IOB1"
    return "IOB2"


def label_scheme(labels: Sequence[str]) -> Scheme:
    """Returns the scheme of a model's set of labels.

    It is IOB1 if some type has I- without B-, as in files whose entities of that type never touch. A set with both
    reads as IOB2. The set does not tell which of the two a model was trained on, but ``to_iob2`` reads either.
    """
    if not all(is_chunk_tag(label) for label in labels):
        return "raw"
    parts = set(map(_split, labels))
    for role, _ in parts:
        if role in "ES":
            return "BIOES"
    for role, entity_type in parts:
        if role == "I" and ("B", entity_type) not in parts:
            return "IOB1"
    return "IOB2"


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Converts a sentence from any scheme to IOB2.

    An entity starts at B- and S-, and at an I- or E- that has nothing of its type to continue, as conlleval counts.
    """
    pieces = _pieces(tags)
    if pieces is None:
        return list(tags)
    converted = []
    for piece in pieces:
        if piece.role == "O":
            converted.append("O")
        elif piece.starts:
            converted.append(f"B-{piece.type}")
        else:
            converted.append(f"I-{piece.type}")
    return converted


def from_iob2(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Converts a sentence to ``scheme``, with the letters B, I, O, E and S."""
    pieces = _pieces(to_iob2(tags))
    if pieces is None or scheme == "raw":
        return list(tags)
    converted = []
    for index, piece in enumerate(pieces):
        before, after = _OUTSIDE, _OUTSIDE
        if index > 0:
            before = pieces[index - 1]
        if index + 1 < len(pieces):
            after = pieces[index + 1]
        role = piece.role
        # IOB1 needs B- only if the word before is of the same type, with which the entity would otherwise merge.
        if scheme == "IOB1" and role == "B" and before.type != piece.type:
            role = "I"
        if scheme == "BIOES" and after.role != "I":  # the entity ends here
            role = _LAST_ROLES[role]
        if role == "O":
            converted.append("O")
        else:
            converted.append(f"{role}-{piece.type}")
    return converted


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
    found = []
    start: int | None = None
    for index, piece in enumerate([*pieces, _OUTSIDE]):
        # An entity ends at a word outside of entities, at the start of another one, and with the sentence.
        if start is not None and (piece.starts or piece.role == "O"):
            found.append(Entity(type=pieces[start].type, start=start, end=index))
            start = None
        if piece.starts:
            start = index
    return found


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
        is_open = before.role in "BI"  # the entity must go on, and it must go on only then
        faults += is_open != (after.role in "IE") or (is_open and before.type != after.type)
    return faults


def forbidden_steps(labels: Sequence[str]) -> list[list[int]]:
    """Returns ``[L + 2, L]``, the labels that are forbidden first, after each of the L labels, and last.

    1 stands for forbidden. The numbers follow from ``invalid_transitions``, so that what a decoder avoids is exactly
    what the report counts as a fault.
    """
    scheme = label_scheme(labels)

    def faults(*tags: str) -> int:
        return invalid_transitions(tags, scheme)

    # A label is followed by whatever it allows, so that only its start is counted. The rest is its end.
    starts = [min(faults(label, "O"), faults(label, f"E-{label[2:]}")) for label in labels]
    ends = [faults(label) - start for label, start in zip(labels, starts, strict=True)]
    # The faults of two words are those of the start, of the step between them, and of the end.
    steps = []
    for before, start in zip(labels, starts, strict=True):
        steps.append([faults(before, after) - start - end for after, end in zip(labels, ends, strict=True)])
    return [starts, *steps, ends]


def continuation_label(label: str, labels: Container[str]) -> str:
    """Returns a word's label for later sub-words, for example ``I-X`` for ``B-X``."""
    if not label.startswith("B-") or not is_chunk_tag(label):
        return label
    for letter in _SPELLINGS["I"]:
        inside = f"{letter}-{label[2:]}"
        if inside in labels:
            return inside
    return label


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
    """Counts the B- that follow nothing of their type, for which IOB1 would write I-."""
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
    for number, text in enumerate(chain(lines, [""]), start=1):  # a blank line ends the last sentence, too
        line = text.removesuffix("\n").removesuffix("\r")
        begins_document = document.match(line) is not None
        if begins_document or line.strip(_BLANK) == "":
            # A sentence without one of its words would teach wrong neighbours, so that all of it is rejected.
            for fault in faults:
                yield fault._replace(raw="\n".join(texts))
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
        # The text of the whole sentence is known only at its end, so that the faults wait until then.
        if isinstance(parts, str):
            faults.append(Record.unusable(number, f"{parts}: {shortened(line)}"))
        elif parts:
            if not rows:
                start = number
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
        """Returns the cells of a line, None for a comment, or a text on what is wrong with the line."""
        nonlocal width, has_tabs
        is_first = width == 0
        is_tabbed = has_tabs
        if is_first:
            is_tabbed = "\t" in line
        cells = re.split(r"[ \t]+", line.strip(_BLANK))
        if is_tabbed:
            cells = [cell.strip(" ") for cell in line.split("\t")]
        if line.startswith(("# ", "#\t")):
            is_tag = cells[-1] == "#" or cells[-1] in tags or _CHUNK_TAG.fullmatch(cells[-1]) is not None
            expected = width
            if is_first:
                expected = len(cells) if is_tabbed else 2
            if len(cells) != expected or not (is_inside or is_tabbed or is_tag):
                return None
        if is_first:
            width, has_tabs = len(cells), is_tabbed
        if len(cells) != width:
            separator = "tabs" if has_tabs else "spaces"
            first = f"the file's first word has {counted(width, 'column')}, separated by {separator}"
            return f"{counted(len(cells), 'column')} where {first}"
        tags.add(cells[-1])
        return cells

    def cells_of(columns: list[list[str]]) -> dict[str, Any]:
        cells = {str(number): column for number, column in enumerate(columns)}
        cells["words"] = columns[0]
        if len(columns) > 1:
            cells["tags"] = columns[-1]
        return cells

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

"""Sentences with one word per line: CoNLL columns, CoNLL-U (Universal Dependencies), and the schemes of their tags.

Owns what IOB1, IOB2, BIOES (also spelt BILOU or BMES) and raw tags mean, the conversions between them, and the parsing
of the files: where sentences and documents begin and end, and what is a comment. Chunk tags are ``O`` and
``PREFIX-TYPE``; the type may hold hyphens. A sentence with any other tag (parts of speech; a prefix without a type,
since ``B`` and ``I`` are parts of speech in some tag sets) is raw and stays as it is. Imports nothing heavy.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_tasks.data.problems import counted, shortened
from bert_tasks.data.records import Record, open_text

Scheme = Literal["IOB1", "IOB2", "BIOES", "raw"]

# What a prefix says of its word: it begins, is inside or ends an entity, or is one alone.
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
    """Whether the tag says where an entity begins, continues or ends: ``O`` or ``PREFIX-TYPE``."""
    prefix, _, entity_type = tag.partition("-")
    return tag == "O" or (prefix in _ROLES and entity_type != "")


def detect_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme that the tags of a file are written in.

    Any other tag makes the whole file raw; E-, S-, L- or U- make it BIOES. It is IOB1 if some entity starts with I-
    while B- only separates neighbours of one type, else IOB2, in which an I- that starts an entity is a fault. Only
    ``O``, or nothing at all, is IOB2: chunk tags without any entity.
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
    """The scheme of a model's set of labels.

    IOB1 if some type has I- without B-, as in files whose entities of that type never touch. A set with both reads as
    IOB2: which of the two a model was trained on cannot be seen, and ``to_iob2`` reads either.
    """
    if not all(is_chunk_tag(label) for label in labels):
        return "raw"
    parts = {_split(label) for label in labels}
    if any(role in "ES" for role, _ in parts):
        return "BIOES"
    return "IOB1" if any(role == "I" and ("B", entity_type) not in parts for role, entity_type in parts) else "IOB2"


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The sentence in IOB2, from any scheme; what is IOB2 stays as it is.

    An entity starts at B- and S-, and at an I- or E- that has nothing of its type to continue, as conlleval counts.
    """
    pieces = _pieces(tags)
    if pieces is None:
        return list(tags)
    return ["O" if piece.role == "O" else f"{'B' if piece.starts else 'I'}-{piece.type}" for piece in pieces]


def from_iob2(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The sentence in ``scheme``, with the letters B, I, O, E and S."""
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
    """The IOB2 sentence in the labels of a set: its scheme and its letters (BIOES, BILOU, BMES).

    Where a type lacks a label of its scheme the next best is taken, say I- for B- where no B- exists; neighbours of one
    type then run together. A tag that no label can express stays as ``from_iob2`` has it, for the caller to report.
    """
    label_set = set(labels)
    spelt = []
    for tag in from_iob2(tags, label_scheme(labels)):
        role, entity_type = _split(tag)
        spellings = (f"{letter}-{entity_type}" for letter in _SPELLINGS.get(role, ""))
        spelt.append(next((label for label in spellings if label in label_set), tag))
    return spelt


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence in any scheme, in order; none where the tags are raw. Counts as conlleval does."""
    pieces = _pieces(tags)
    if pieces is None:
        return []
    starts = [index for index, piece in enumerate(pieces) if piece.starts]
    stops = [index for index, piece in enumerate(pieces) if piece.starts or piece.role == "O"] + [len(pieces)]
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
    faults = 0
    for before, after in pairwise([_OUTSIDE, *pieces, _OUTSIDE]):
        is_open = before.role in "BI"
        faults += is_open != (after.role in "IE") or (is_open and before.type != after.type)
    return faults


def forbidden_steps(labels: Sequence[str]) -> list[list[int]]:
    """``[L + 2, L]`` which labels may not begin a sequence, follow each label, or end a sequence."""
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
    prefix, _, entity_type = tag.partition("-")
    return _ROLES.get(prefix, "O"), entity_type


def _pieces(tags: Sequence[str]) -> list[_Piece] | None:
    """The tags as read from left to right; None for a raw sentence."""
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
    """How many B- follow nothing of their type."""
    return sum(after.role == "B" and before.type != after.type for before, after in pairwise([_OUTSIDE, *pieces]))


_DOCUMENT = re.compile(r"-DOCSTART-(?![^ \t])")
_BLANK = " \t"
_UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_CHUNK_TAG = re.compile(r"O|[BIESLUM]-\D.*")
_WORD_ID = re.compile(r"\d+")
_OTHER_ID = re.compile(r"\d+-\d+|\d+\.\d+")


@dataclass
class _Sentence:
    """The words since the last border: the line of the first one, each line's cells, and all lines unchanged."""

    line: int = 0
    rows: list[list[str]] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, line: int, cells: list[str]) -> None:
        if not self.rows:
            self.line = line
        self.rows.append(cells)

    def records(self, cells_of: Callable[[list[list[str]]], dict[str, Any]], documents: int) -> Iterator[Record]:
        """The faults of its lines, each with the whole sentence, which cannot be used; or its one record.

        Args:
            cells_of: makes the cells of the record from the columns.
            documents: how many documents have begun.
        """
        if self.faults:
            for line, fault in self.faults:
                yield Record(line, {}, fault, raw="\n".join(self.texts))
        elif self.rows:
            cells = cells_of([list(column) for column in zip(*self.rows, strict=True)])
            yield Record(self.line, cells | ({"document": str(documents - 1)} if documents else {}))


def conll_rows(lines: Iterable[str], path: Path, encoding: str | None) -> Iterator[Record]:
    """Sentences of a file with 1 column or more: the word first, the tag last, between them whatever there is.

    A row's cells: ``words`` (the first column), ``tags`` (the last; not there in files of words alone), each column by
    its number as text, the word being ``"0"``, and ``document``, the number of the document, once a -DOCSTART- line
    has started one.

    The first word decides what separates the columns: a tab, if its line has one, else any number of spaces or tabs.

    A line that starts with "# " or "#" and a tab is a comment if its number of columns is not the file's. Otherwise it
    is a word within a sentence and in a file with tabs. Before the first word of a sentence, in a file with spaces, it
    is a word if its last column is a tag: a chunk tag, "#" (Penn's tag of "#"), or a tag of another word of the file.

    Args:
        lines: the lines of the file.
        path: the file, which is read ahead at the first line that may be a comment; a pipe cannot be read twice: there
            the tags so far have to do.
        encoding: see ``open_text``.
    """

    def certain() -> _Columns:
        columns = _Columns()
        if path.is_file():
            with open_text(path, encoding=encoding, newline="\n") as lines:
                for _ in lines.rows(columns.records(lines)):
                    pass
        return columns

    return _Columns(certain).records(lines)


class _Columns:
    """What is known of a CoNLL file while its lines are read.

    Args:
        certain: reads the file ahead, for the columns and tags of the lines that can only be words; it is called at the
            first line that may be a comment. None: this is that reading, which leaves such lines out.
    """

    def __init__(self, certain: "Callable[[], _Columns] | None" = None) -> None:
        self.certain = certain
        self.ahead: _Columns | None = None
        self.width: int | None = None
        self.tabs = False
        self.tags: set[str] = set()

    def records(self, lines: Iterable[str]) -> Iterator[Record]:
        sentence, documents = _Sentence(), 0
        for number, text in enumerate(lines, start=1):
            line = text.removesuffix("\n").removesuffix("\r")
            starts_document = _DOCUMENT.match(line) is not None
            if starts_document or line.strip(_BLANK) == "":
                yield from sentence.records(_conll_cells, documents)
                sentence = _Sentence()
                documents += starts_document
            elif not line.startswith(("# ", "#\t")) or self._is_word(line, inside=bool(sentence.texts)):
                self._read(sentence, number, line)
        yield from sentence.records(_conll_cells, documents)

    def _read(self, sentence: _Sentence, number: int, line: str) -> None:
        cells = self._cells(line)
        sentence.texts.append(line)
        if self.width is None:
            self.width, self.tabs = len(cells), "\t" in line
        if len(cells) == self.width:
            self.tags.add(cells[-1])
            sentence.add(number, cells)
            return
        separator = "tabs" if self.tabs else "spaces"
        width = counted(self.width, "column")
        widths = f"{counted(len(cells), 'column')} where the file's first word has {width}, separated by {separator}"
        sentence.faults.append((number, f"{widths}: {shortened(line)}"))

    def _cells(self, line: str) -> list[str]:
        if self.tabs or (self.width is None and "\t" in line):
            return [cell.strip(" ") for cell in line.split("\t")]
        return re.split(r"[ \t]+", line.strip(_BLANK))

    def _is_word(self, line: str, *, inside: bool) -> bool:
        """Whether a line that starts like a comment is a word, ``inside`` a sentence or before its first word."""
        if not inside and self.certain is None:
            return False
        if self.certain is not None and self.ahead is None:
            self.ahead = self.certain()
        if self.width is None and self.ahead is not None:
            self.width, self.tabs = self.ahead.width, self.ahead.tabs
        cells = self._cells(line)
        if len(cells) != self.width if self.width is not None else len(cells) == 1:
            return False
        tags = self.tags if self.ahead is None else self.tags | self.ahead.tags
        is_tag = cells[-1] == "#" or _CHUNK_TAG.fullmatch(cells[-1]) is not None  # whatever tags the file has
        return inside or self.tabs or cells[-1] in tags or is_tag


def _conll_cells(columns: list[list[str]]) -> dict[str, Any]:
    cells = {str(number): column for number, column in enumerate(columns)}
    return cells | {"words": columns[0]} | ({"tags": columns[-1]} if len(columns) > 1 else {})


def conllu_rows(lines: Iterable[str]) -> Iterator[Record]:
    """Sentences of a CoNLL-U file: ``form``, ``upos``, ``xpos`` and so on, and ``document`` after a "# newdoc".

    Words are the syntactic ones: the surface form of a range (1-2) and empty nodes (1.1) are left out. A column that
    holds "_" for every word of a sentence is missing there.
    """

    def cells_of(columns: list[list[str]]) -> dict[str, Any]:
        named = zip(_UNIVERSAL, columns, strict=True)
        return {name: column for name, column in named if set(column) != {"_"} or name == "form"}

    sentence, documents = _Sentence(), 0
    for number, text in enumerate(lines, start=1):
        line = text.removesuffix("\n").removesuffix("\r")
        cells = line.split("\t")
        if line.strip(_BLANK) == "":
            yield from sentence.records(cells_of, documents)
            sentence = _Sentence()
            continue
        if line.startswith("#"):
            documents += re.match(r"#\s*newdoc\b", line) is not None
            continue
        sentence.texts.append(line)
        if len(cells) != len(_UNIVERSAL):
            widths = f"{counted(len(cells), 'column')} where CoNLL-U has {len(_UNIVERSAL)}, separated by tabs"
            fault = f"{widths}: {shortened(line)}; read other columns as format = 'conll'"
            sentence.faults.append((number, fault))
        elif _WORD_ID.fullmatch(cells[0]):
            sentence.add(number, cells)
        elif not _OTHER_ID.fullmatch(cells[0]):
            fault = f"the id {cells[0]!r}: expected 1, a range such as 1-2, or an empty node such as 1.1"
            sentence.faults.append((number, fault))
    yield from sentence.records(cells_of, documents)

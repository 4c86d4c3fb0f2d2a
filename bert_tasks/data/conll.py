"""Parsing of sentences with one word a line: CoNLL columns and CoNLL-U (Universal Dependencies).

Owns where sentences and documents begin and end, what is a comment, and line numbers. Must not know tasks, tags or
tag schemes.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bert_tasks.data.problems import shortened
from bert_tasks.data.records import Record, Records, open_text
from bert_tasks.paths import is_file

_DOCUMENT = re.compile(r"-DOCSTART-(?![^ \t])")
_BLANK = " \t"
_UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_CHUNK_TAG = re.compile(r"O|[BIESLUM]-\D.*")
_WORD_ID = re.compile(r"\d+")
_OTHER_ID = re.compile(r"\d+-\d+|\d+\.\d+")


@dataclass
class _Sentence:
    """The words read since the last border: the line of the first, each line's cells, and all lines as they stand."""

    line: int = 0
    rows: list[list[str]] = field(default_factory=list)
    faults: list[Record] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, line: int, cells: list[str]) -> None:
        if not self.rows:
            self.line = line
        self.rows.append(cells)

    def fault(self, line: int, what: str) -> None:
        self.faults.append(Record(line, {}, what))

    def faulty(self) -> list[Record]:
        """The faults of its lines, each with the whole sentence: with one of them it cannot be used."""
        return [fault._replace(raw="\n".join(self.texts)) for fault in self.faults]

    def columns(self) -> list[list[str]]:
        return [list(column) for column in zip(*self.rows, strict=True)]


@contextmanager
def conll_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """Sentences of a file with 1 column or more: the word first, the tag last, between them whatever there is.

    A row's cells: ``words`` (the first column), ``tags`` (the last; not there in files of words alone), each column by
    its number as text, the word being ``"0"``, and ``document``, the number of the document, once a -DOCSTART- line
    has started one.

    The first word decides what parts the columns: a tab, if its line has one, else spaces or tabs in any number.

    A line that starts with "# " or "#" and a tab is a comment if its number of columns is not the file's. Otherwise it
    is a word within a sentence and in a file with tabs. Before the first word of a sentence, in a file with spaces, it
    is a word if its last column is a tag: a chunk tag, "#" (Penn's tag of "#"), or a tag of another word of the file.
    """

    def certain() -> _Columns:
        found = _Columns()
        if is_file(path):  # a pipe cannot be read twice: there the tags so far have to do
            with open_text(path, encoding=encoding, newline="\n") as lines:
                for _ in found.records(lines):
                    pass
        return found

    with open_text(path, encoding=encoding, newline="\n") as lines:
        yield Records(None, _Columns(certain).records(lines))


@contextmanager
def conllu_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """Sentences of a CoNLL-U file: ``form``, ``upos``, ``xpos`` and so on, and ``document`` after a "# newdoc".

    Words are the syntactic ones: the surface form of a range (1-2) and empty nodes (1.1) are left out. A column that
    holds "_" for every word of a sentence is not told, and so not there.
    """
    with open_text(path, encoding=encoding, newline="\n") as lines:
        yield Records(None, _universal_records(lines))


class _Columns:
    """What is known of a CoNLL file as its lines go by.

    Args:
        certain: reads the file ahead, for the columns and tags of the lines that can only be words; it is called at the
            first line that may be a comment. None: this is that reading, which leaves such lines out.
    """

    def __init__(self, certain: "Callable[[], _Columns] | None" = None) -> None:
        self.certain = certain
        self.ahead: _Columns | None = None
        self.width: int | None = None
        self.tabs = False
        self.documents = 0
        self.tags: set[str] = set()

    def records(self, lines: Iterable[str]) -> Iterator[Record]:
        sentence = _Sentence()
        for number, line in _numbered(lines):
            starts_document = _DOCUMENT.match(line) is not None
            if starts_document or line.strip(_BLANK) == "":
                yield from self._finished(sentence)
                sentence = _Sentence()
                self.documents += starts_document
            else:
                self._read(sentence, number, line)
        yield from self._finished(sentence)

    def _read(self, sentence: _Sentence, number: int, line: str) -> None:
        if line.startswith(("# ", "#\t")) and not self._is_word(line, inside=bool(sentence.texts)):
            return
        cells = self._cells(line)
        sentence.texts.append(line)
        if self.width is None:
            self.width, self.tabs = len(cells), "\t" in line
        if len(cells) == self.width:
            self.tags.add(cells[-1])
            sentence.add(number, cells)
            return
        parted = "tabs" if self.tabs else "spaces"
        sentence.fault(
            number,
            f"{_counted(len(cells))} where the file's first word has {_counted(self.width)}, separated by {parted}: "
            f"{shortened(line)}",
        )

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
        return inside or self.tabs or cells[-1] in tags or _is_tag(cells[-1])

    def _finished(self, sentence: _Sentence) -> Iterator[Record]:
        yield from sentence.faulty()
        if not sentence.rows or sentence.faults:
            return
        columns = sentence.columns()
        cells: dict[str, object] = {str(number): column for number, column in enumerate(columns)}
        cells["words"] = columns[0]
        if len(columns) > 1:
            cells["tags"] = columns[-1]
        if self.documents:
            cells["document"] = str(self.documents - 1)
        yield Record(sentence.line, cells)


def _is_tag(cell: str) -> bool:
    """Whether a cell is a tag whatever tags the file has."""
    return cell == "#" or _CHUNK_TAG.fullmatch(cell) is not None


def _universal_records(lines: Iterable[str]) -> Iterator[Record]:
    sentence = _Sentence()
    documents = 0
    for number, line in _numbered(lines):
        if line.strip(_BLANK) == "":
            yield from _universal_sentence(sentence, documents)
            sentence = _Sentence()
        elif line.startswith("#"):
            documents += re.match(r"#\s*newdoc\b", line) is not None
        else:
            _read_universal(sentence, number, line)
    yield from _universal_sentence(sentence, documents)


def _read_universal(sentence: _Sentence, number: int, line: str) -> None:
    cells = line.split("\t")
    sentence.texts.append(line)
    if len(cells) != len(_UNIVERSAL):
        what = f"{_counted(len(cells))} where CoNLL-U has {len(_UNIVERSAL)}, separated by tabs"
        sentence.fault(number, f"{what}: {shortened(line)}; read other columns as format = 'conll'")
    elif _WORD_ID.fullmatch(cells[0]):
        sentence.add(number, cells)
    elif not _OTHER_ID.fullmatch(cells[0]):
        sentence.fault(number, f"the id {cells[0]!r}: expected 1, a range such as 1-2, or an empty node such as 1.1")


def _universal_sentence(sentence: _Sentence, documents: int) -> Iterator[Record]:
    yield from sentence.faulty()
    if not sentence.rows or sentence.faults:
        return
    named = zip(_UNIVERSAL, sentence.columns(), strict=True)
    cells: dict[str, object] = {name: column for name, column in named if set(column) != {"_"} or name == "form"}
    if documents:
        cells["document"] = str(documents - 1)
    yield Record(sentence.line, cells)


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in enumerate(lines, start=1))


def _counted(columns: int) -> str:
    return f"{columns} column{'' if columns == 1 else 's'}"

"""Files of annotation tools and of fastText, as rows with entities or labels.

Sources: https://prodi.gy/docs/api-interfaces, https://labelstud.io/guide/export, https://spacy.io/api/data-formats,
https://brat.nlplab.org/standoff.html and https://fasttext.cc/docs/en/supervised-tutorial.html. The lines of doccano
need no format.
"""

import codecs
import gc
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bert_tasks.data import limits
from bert_tasks.data.batch import Batches, Record, Records
from bert_tasks.data.columns import Column
from bert_tasks.data.formats.base import Format, without_warnings
from bert_tasks.data.limits import too_large
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import RowLines, json_rows, open_text, read_json
from bert_tasks.errors import DataError

_IS_LIST = re.compile(r"\s*\[\s*[\[{]")  # of objects or of lists
_DOCBIN_ADVICE = "Write its documents into several files"
# Pairs of two texts are no pairs of a text and its annotations.
_IS_LIST_OF_TEXTS = re.compile(r'\s*\[\s*\[\s*"(?:[^"\\]|\\.)*"\s*,\s*[^{\s]')
_MOST_VALUES = 2**23  # of all lists and objects of a DocBin, of which the strings of its words are most
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def _label_cells(names: Sequence[str]) -> dict[str, Any]:
    """Returns the cells of labels, for tasks with one label and with several."""
    cells: dict[str, Any] = {"labels": list(names)}
    if len(names) == 1:
        cells["label"] = names[0]
    return cells


class AnnotatedJson(Format, ABC):
    """A list in JSON, whose items become rows by ``cells``."""

    can_stream: ClassVar[bool] = False

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        items = read_json(lines, path)
        if not isinstance(items, list):
            raise DataError(f"{path}: not a list, which {self.name} writes")
        return Records(None, (self.record(number, item) for number, item in enumerate(items, start=1)))

    def record(self, number: int, item: Any) -> Record:
        """Returns the row of an item, which is skipped or reported if it has no cells."""
        try:
            cells = self.cells(item)
        except _MALFORMED:
            return Record.unusable(number, f"not an item as {self.name} writes it", raw=str(item))
        if isinstance(cells, str):
            return Record.skipped(number, cells)
        return Record(number, cells)

    @abstractmethod
    def cells(self, item: Any) -> Mapping[str, Any] | str:
        """Returns the cells of an item, or the reason to skip it."""


class ProdigyFormat(AnnotatedJson):
    """The lines of JSON that Prodigy writes. Examples that were not accepted are skipped and counted."""

    can_stream: ClassVar[bool] = True

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return '"_task_hash"' in start

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        return Records(None, self._answered(json_rows(lines, path)))

    def _answered(self, rows: Iterable[Record]) -> Iterator[Record]:
        """Yields the rows of the lines that are JSON, and the others as they are."""
        for row in rows:
            if row.issue is not None:
                yield row
            else:
                yield self.record(row.line, row.cells)

    def cells(self, item: Any) -> Mapping[str, Any] | str:
        answer = item.get("answer", "accept")
        if answer != "accept":
            return f"the answer is {answer!r:.20}"
        labels = {}
        if isinstance(item.get("accept"), list):  # the options that were chosen, in the interface "choice"
            labels = _label_cells(item["accept"])
        return {**labels, **item}


class LabelStudioFormat(AnnotatedJson):
    """The export of Label Studio, with the spans or the choices of each task's first annotation."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return _IS_LIST.match(start) is not None and '"annotations"' in start and '"result"' in start

    def cells(self, item: Any) -> Mapping[str, Any] | str:
        used = next((annotation for annotation in item["annotations"] if not annotation.get("was_cancelled")), None)
        if used is None:
            return "not annotated"
        choices, spans = [], []
        for region in used["result"]:
            if "value" not in region:  # a relation between two regions
                continue
            if region["type"] == "choices":
                choices += region["value"]["choices"]
            elif region["type"] == "labels":
                spans.append(region["value"])
        annotated: dict[str, Any] = {"entities": spans}
        if choices:
            annotated = _label_cells(choices)
        return {"id": item.get("id"), **item["data"], **annotated}


class SpacyFormat(AnnotatedJson):
    """JSON of spaCy's ``Doc.to_json()``, or pairs of a text and ``{"entities": ...}``."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        if _IS_LIST.match(start) is None or _IS_LIST_OF_TEXTS.match(start) is not None:
            return False
        return re.search(r'"ents"\s*:|\[\s*\[\s*"', start) is not None

    def cells(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, list):  # spaCy's training data, version 2
            text, notes = item
        else:
            text, notes = item["text"], item
        key = "ents" if isinstance(item, dict) else "entities"
        return {"text": text, "entities": notes.get(key, []), **_scored_labels(notes.get("cats", {}))}


def _scored_labels(scores: Mapping[str, float]) -> dict[str, Any]:
    """Returns the cells of the categories of a document. spaCy counts a category from a score of 0.5."""
    if not scores:
        return {}
    return _label_cells([name for name, score in scores.items() if score >= 0.5])


class DocBinFormat(Format):
    """The binary documents that ``spacy convert`` writes. Reading them needs spaCy."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        try:
            from spacy import blank
            from spacy.tokens import DocBin
        except ImportError as error:
            raise DataError(f"{path}: reading it needs spaCy. Run `pip install spacy`") from error
        content = _decompressed(path)
        was_collecting = gc.isenabled()
        try:
            _check_object_count(content, path)
            documents = DocBin().from_bytes(zlib.compress(content, level=0))
        finally:
            if was_collecting:
                gc.enable()  # the reader of srsly leaves it off after an error
        # Both are msgpack inside msgpack, and no row has them.
        documents.user_data = []
        documents.span_groups = [b""] * len(documents)
        rows = (_document_cells(document, path) for document in documents.get_docs(blank("xx").vocab))
        records = (Record(number, cells) for number, cells in enumerate(rows, start=1))
        yield Records(None, without_warnings(records)).in_batches()


def _decompressed(path: Path) -> bytes:
    """Returns the content of a file that is compressed with zlib.

    Raises:
        DataError: The content is too large or incomplete.
    """
    stream = zlib.decompressobj()
    with path.open("rb") as file:
        content = stream.decompress(file.read(limits.LARGEST_WHOLE), limits.LARGEST_WHOLE + 1)
    if len(content) > limits.LARGEST_WHOLE:
        raise too_large(f"{path}: the decompressed file", limits.LARGEST_WHOLE, "bytes", advice=_DOCBIN_ADVICE)
    if not stream.eof:
        raise DataError(f"{path}: the compressed data have no end. Save or download the file again")
    return content


def _check_object_count(content: bytes, path: Path) -> None:
    """Raises `DataError` if msgpack has more values than fit into the memory, each of which may be a single byte."""
    from srsly.msgpack import unpackb

    # The hooks are called as each list or object is complete, so the count ends the parser before the memory is full.
    count = 0

    def add(values: Sequence[Any]) -> None:
        nonlocal count
        count += len(values)
        if count > _MOST_VALUES:
            raise too_large(f"{path}: the file", _MOST_VALUES, "values", advice=_DOCBIN_ADVICE)

    unpackb(content, list_hook=add, object_pairs_hook=add, max_array_len=_MOST_VALUES, max_map_len=_MOST_VALUES)


def _document_cells(document: Any, path: Path) -> dict[str, Any]:
    """Returns the cells of a document of spaCy.

    Raises:
        DataError: The text is too large. It is made of the vocabulary's strings, which may occur many times.
    """
    if sum(map(len, document)) > limits.LARGEST_ROW:
        raise too_large(f"{path}: a document", limits.LARGEST_ROW)
    names: dict[int, str] = {}  # spaCy makes a new string at each look-up
    entities = []
    for span in document.ents:
        name = names.get(span.label)
        if name is None:
            name = names[span.label] = span.label_
        entities.append([span.start_char, span.end_char, name])
    return {"text": document.text, "entities": entities, **_scored_labels(document.cats)}


class BratEntity(NamedTuple):
    """An entity of a brat file, with the text that the line repeats, and True if it has gaps."""

    start: int
    end: int
    label: str
    text: str | None
    has_gaps: bool


class BratFormat(Format):
    """The .ann file of brat, or a folder of them. Each line of its .txt file is a row of one document."""

    can_stream: ClassVar[bool] = False

    def files(self, path: Path) -> tuple[Path, ...]:
        annotations = [path]
        if path.is_dir():
            annotations = sorted(path.rglob("*.ann"))
        files: list[Path] = []
        for each in annotations:
            files += [each, each.with_suffix(".txt")]
        return tuple(files)

    def reads_folder(self, path: Path) -> bool:
        return any(path.glob("*.ann")) and any(path.glob("*.txt"))

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        yield Records(("text", "entities", "document"), self._document_rows(path, options)).in_batches()

    def _document_rows(self, path: Path, options: ReadOptions) -> Iterator[Record]:
        """Yields the lines of all documents with their entities."""
        for annotations in self.files(path)[::2]:  # every second file is a text
            beside = annotations.with_suffix(".txt")
            if not beside.is_file():
                raise DataError(f"{annotations}: no text beside it, {beside.name}")
            with open_text(beside, encoding=options.encoding, newline="") as file:
                text = RowLines(file, beside, limits.LARGEST_ROW).rest()
            with open_text(annotations, encoding=options.encoding, newline="\n") as file:
                lines = RowLines(file, annotations, limits.LARGEST_ROW)
                entities = list(_brat_entities(lines, annotations))
            if _counts_mark(beside, text, entities):
                entities = [each._replace(start=each.start - 1, end=each.end - 1) for each in entities]
            name = str(beside.relative_to(path.parent))
            for record in _lines_with_entities(text, entities, annotations.stem):
                yield record._replace(file=name)


def _brat_entities(lines: Iterable[str], path: Path) -> Iterator[BratEntity]:
    """Yields the entities of an .ann file, whose lines are an id, a label with offsets, and the text."""
    for number, line in enumerate(lines, start=1):
        if not line.startswith("T"):  # other letters mean relations, events, attributes, notes
            continue
        cells = line.rstrip("\r\n").split("\t")
        try:
            label, *places = re.split("[ ;]", cells[1])  # an entity with a gap is "PER 0 5;8 12"
            start, end = int(places[0]), int(places[-1])
        except (IndexError, ValueError) as error:
            raise DataError(f"{path}:{number}: expected a line such as 'T1<tab>PER 0 5<tab>Alice'") from error
        text = None
        if len(cells) > 2:
            text = cells[2]
        yield BratEntity(start, end, label, text, has_gaps=len(places) > 2)


def _counts_mark(path: Path, text: str, entities: Sequence[BratEntity]) -> bool:
    """Returns True if all entities are one character too late, because brat counted the file's byte order mark."""
    with path.open("rb") as file:
        has_mark = file.read(3) == codecs.BOM_UTF8
    repeated = [each for each in entities if each.text is not None]
    if not has_mark or not repeated:
        return False
    return all(text[each.start - 1 : each.end - 1] == each.text for each in repeated)


class FastTextFormat(Format):
    """The lines of fastText, which have labels such as ``__label__sports`` before or behind the text."""

    _LABEL: ClassVar[re.Pattern[str]] = re.compile(r"(?:^|(?<=\s))__label__\S+\s*")

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return self._LABEL.search(start.lstrip().partition("\n")[0]) is not None

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        return Records(None, (Record(number, self._cells(line)) for number, line in filled))

    def _cells(self, line: str) -> dict[str, Any]:
        """Returns the text of a line without its labels, and the labels."""
        text = self._LABEL.sub("", line)
        names = [label.strip().removeprefix("__label__").rstrip(",") for label in self._LABEL.findall(line)]
        return {"text": text.strip(), **_label_cells(names)}


def _lines_with_entities(text: str, entities: Sequence[BratEntity], document: str) -> Iterator[Record]:
    """Yields the lines of a text that are not blank."""
    end = 0
    for number, line in enumerate(text.split("\n"), start=1):
        start, end = end, end + len(line) + 1  # with the end of the line, which brat counts as a character
        inside = [entity for entity in entities if start <= entity.start < end]
        if any(entity.end >= end or entity.has_gaps for entity in inside):
            yield Record.unusable(number, "an entity with gaps, or over several lines", raw=line)
        elif line.strip():
            spans = [
                {"start": each.start - start, "end": each.end - start, "label": each.label, "text": each.text}
                for each in inside
            ]
            yield Record(number, {"text": line.rstrip("\r"), "entities": spans, "document": document})


ALL: tuple[Format, ...] = (
    ProdigyFormat(name="prodigy", extensions=(".jsonl",), columns={"entities": "spans"}),
    LabelStudioFormat(name="label-studio", extensions=(".json",)),
    SpacyFormat(name="spacy", extensions=(".json",)),
    DocBinFormat(name="docbin", extensions=(".spacy",)),
    BratFormat(name="brat", extensions=(".ann",)),
    FastTextFormat(name="fasttext", extensions=(".txt",)),
)

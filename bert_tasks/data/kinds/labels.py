"""Kinds of columns to learn, as labels, sets of labels, tags, entities or numbers."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow

from bert_tasks.data.cells import label_name, label_parts, label_value, list_in_cell, parse_text
from bert_tasks.data.conll import is_chunk_tag, to_iob2
from bert_tasks.data.kinds.base import KINDS, REMARKS, Column, ColumnKind
from bert_tasks.data.kinds.texts import TextList
from bert_tasks.data.problems import RowError, counted, first_few, suggestion
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import place_words

_TENTHS = 10


class Label(ColumnKind):
    """The name of a class."""

    name = "label"
    is_label = True
    has_classes = True
    is_single_class = True
    strata_name = "labels"

    def _parse(self, value: Any, separator: str) -> Any:
        names = list_in_cell(value) if isinstance(value, str) else value
        if isinstance(names, list | tuple):
            if len(names) > 1:
                hint = 'Write one, or set problem_type = "multi_label_classification".'
                raise RowError(f"{len(names)} labels where one is expected", hint)
            value = names[0] if names else None
        return None if value is None or value == "" else label_name(value)

    def remark(self, cell: Any) -> str | None:
        parts = cell if isinstance(cell, list | tuple) else [cell]
        has_spaces = any(name != name.strip() for name in parts if isinstance(name, str))
        return "had white space around a label, which was removed" if has_spaces else None

    def labels_of(self, value: Any) -> Sequence[str]:
        return (value,)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return label(value)

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        yield from (unknown_name("label", name, labels) for name in names if name not in labels)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        return [self.labels_of(value) if value else ("",) for value in values]


class Labels(Label):
    """A set of names of classes, as a list or as names with a separator in one cell.

    A column of 0 and 1 for each class, which has the name of the class, works, too.
    """

    name = "labels"
    is_single_class = False
    is_set = True
    is_joined = True
    strata_name = "sets of labels"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = label_parts(value, separator)
        if isinstance(value, bool | int | float):  # pandas reads a column of cells with one number each as numbers
            value = [value]
        if not isinstance(value, list | tuple):
            raise RowError("not a list of label names", f"Write names with {separator!r} between them.")
        names = [label_name(name) for name in value if name is not None and name != ""]
        if len(names) < len(value):
            raise RowError("empty label name", f"Write one {separator!r} between two names.")
        if len(set(names)) < len(names):
            raise RowError("repeated label", "Write each label once.")
        return names

    def join(self, cells: Mapping[str, Any]) -> list[str] | None:
        if all(value is None or value == "" for value in cells.values()):
            return None
        numbers = {name: None if value is None else label_value(str(value)) for name, value in cells.items()}
        wrong = next((name for name, number in numbers.items() if number not in (0.0, 1.0)), None)
        if wrong is not None:
            raise RowError("neither 0 nor 1", "Write 1 where the label applies, and 0 elsewhere.").at(
                wrong, cells[wrong]
            )
        return [name for name, number in numbers.items() if number]

    def arrow_type(self) -> Any:
        return KINDS["texts"].arrow_type()

    def labels_of(self, value: Any) -> Sequence[str]:
        return tuple(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return [label(name) for name in value]


class Tags(TextList, Labels):
    """One tag for each of the row's words. Chunk tags are counted in IOB2."""

    name = "tags"
    item = "tag"
    is_set = False
    is_joined = False
    is_open = True
    group_column = "document"
    group_noun = "sentence"
    strata_name = ""

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        parts = self._list_or_names(value)
        # A class id below 0 means "hidden" on the hub. Readers pass it on as None if the ids have names.
        hidden = [label is None or (isinstance(label, int) and label < 0) for label in parts]
        if len(parts) > 0 and all(hidden):
            return None
        if any(hidden):
            problem = f"hidden tag (tag {hidden.index(True) + 1} of {len(parts)})"
            raise RowError(problem, "Give all tags of a sentence or none.")
        return self._parts(parts, self._tag)

    def remark(self, cell: Any) -> str | None:
        return None

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Spans)), None)

    def _tag(self, value: Any) -> str:
        tag = value.strip() if isinstance(value, str) else value
        if tag == "":
            raise RowError("empty tag", "Write 'O' for a word that is part of nothing.")
        if isinstance(tag, float):
            raise RowError("not a tag name", "Write a text or a whole number.")
        return label_name(tag)

    def texts(self, value: Any) -> Sequence[str]:
        return ()

    def normalized(self, value: Any) -> Sequence[str]:
        return to_iob2(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return value

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        """Yields tags that the labels cannot express, of unknown types only if ``strict``."""
        if strict:
            names_known = known_tags(list(labels))
            yield from (unknown_name("tag", name, names_known) for name in names if name not in names_known)
            return
        unclear = [name for name in dict.fromkeys(names) if not is_chunk_tag(name)]
        if unclear and all(map(is_chunk_tag, labels)):
            yield from (RowError("unknown tag", "Expected O or a tag such as B-TYPE.", value=name) for name in unclear)

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        for column in columns:
            words = row.get(column.name) if column.type.is_pretokenized else None
            if words is not None and len(words) != len(value):
                problem = f"{counted(len(words), 'word')} and {counted(len(value), 'tag')}"
                start = " ".join(words[:5]) + (" ..." if len(words) > 5 else "")
                hint = f"Give each word of the sentence {start!r} one tag."
                raise RowError(problem, hint, value=" ".join(value))
        return value


class Spans(ColumnKind):
    """Entities by characters of the row's text, as ``[[0, 5, "PER"]]``.

    ``parse_spans`` lists the other forms. They become tags of the row's words. If a row has both, the spans are read.
    """

    name = "spans"
    is_label = True

    def _parse(self, value: Any, separator: str) -> None:
        """Returns no value, because ``complete`` has made tags of it."""

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with the words of the text and their tags.

        Without a text the spans count the characters of all words with a space between them.
        """
        name = names.get(column.name, column.name)
        if cells.get(name) in (None, ""):
            return cells
        sources = {other.kind: names.get(other.name, other.name) for other in columns}
        text, tags = cells.get(sources["text"]), cells.get(sources["tags"])
        try:
            spans, words = parse_spans(cells[name]), KINDS["words"].parse(cells.get(sources["words"]))
            text = " ".join(words) if text is None else parse_text(text)
            places = place_words(words, text)
            if places is None:
                raise RowError("spans of a text that does not have the row's words")
            span_tags, moved = word_tags(spans, places, text)
        except RowError as error:
            raise error.at(name, cells[name]) from None
        remarks = list(cells.get(REMARKS, ()))
        remarks += ["had spans that begin or end within a word, which were moved to its borders"] if moved else []
        if tags is not None and to_iob2(KINDS["tags"].parse(tags)) != span_tags:
            remarks.append("had other tags, which the spans replaced")
        return {**cells, sources["words"]: words, sources["tags"]: span_tags, REMARKS: remarks}


class Number(ColumnKind):
    """A finite number."""

    name = "number"
    is_label = True
    strata_name = "tenths of the numbers"

    def _parse(self, value: Any, separator: str) -> float | None:
        if value is None or value == "":
            return None
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            hint = "Write a decimal point." if isinstance(value, str) and value.count(",") == 1 else ""
            raise RowError("not a number", hint) from None
        if not math.isfinite(number):
            raise RowError("not a finite number")
        return number

    def arrow_type(self) -> Any:
        return pyarrow.float64()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        """Returns the tenth of the numbers that holds each number."""
        numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        bounds = np.nanquantile(numbers, np.linspace(0, 1, _TENTHS + 1)[1:-1])
        return [(str(tenth),) for tenth in np.searchsorted(bounds, numbers, side="right")]


def unknown_name(noun: str, name: str, names: Collection[str]) -> RowError:
    """Returns the error of an unknown label, with a suggestion."""
    meant = suggestion(name, names)
    hint = f"Expected one of {first_few(names, 10)}." if meant is None else f"Did you mean {meant!r}?"
    return RowError(f"unknown {noun}", hint, value=name)


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels, and their types in IOB2, whatever the scheme is."""
    if not all(map(is_chunk_tag, labels)):
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{entity}" for entity in types for prefix in "BI")]))

"""Kinds of columns with a label, which is a class, a set of classes, tags, spans or a number.

The labels of questions, which are answers and right choices, are in ``answers``.

A missing label is None, never a name, because a row without a label may still be predicted. Many data sets of the hub
hide the labels of their test rows as -1. ``Tags`` reads such ids as missing, but ``Label`` keeps -1 as a name, because
it may be a class. If the classes are known, ``KnownLabels`` decides later.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow

from bert_tasks.data.cells import LABEL_SEPARATOR, label_name, label_parts, list_in_cell
from bert_tasks.data.issues import CellError, RowIssue
from bert_tasks.data.kinds.base import ClassKind, LabelKind
from bert_tasks.data.kinds.texts import TextList

_STRATA_OF_NUMBERS = 10
_STRATUM_WITHOUT_LABEL = ("",)  # which no label can be, because ``label_name`` rejects an empty name
_WHITE_SPACE = "had white space around a label, which was removed"


class Label(ClassKind):
    """The name of the one class of a row.

    A list with a single name is accepted, too. An empty text or list is a missing label.
    """

    name = "label"

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        # A file has few different labels, so each of them is parsed only once. This is limited to texts, because 1 and
        # True are the same key of a dict, but different labels, and a list is no key at all.
        if all(type(cell) is str for cell in cells):
            distinct = list(dict.fromkeys(cells))
            values, issues = self._convert_each(distinct, separator)
            if not issues:
                value_of = dict(zip(distinct, values, strict=True))
                return [value_of[cell] for cell in cells], []
            # The issues count the distinct cells, but each needs the number of its row, so all cells are converted.
        return self._convert_each(cells, separator)

    def _convert_each(self, cells: Sequence[Any], separator: str) -> tuple[list[Any], list[RowIssue]]:
        """Converts the cells one by one. The issues include the notes on white space around labels."""
        values, issues = super().convert(cells, separator)
        return values, [*issues, *_white_space_notes(cells)]

    def _parse(self, value: Any, separator: str) -> str | None:
        names = value
        if isinstance(value, str):
            names = list_in_cell(value)  # None if the text is a name and not a list
        if isinstance(names, list | tuple):
            value = _single_name(names)
        if value is None or value == "":
            return None
        return label_name(value)

    def classes(self, value: Any) -> Sequence[str]:
        return (value,)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        strata: list[Sequence[str]] = []
        for value in values:
            if value:
                strata.append((value,))
            else:
                strata.append(_STRATUM_WITHOUT_LABEL)
        return strata


def _single_name(names: Sequence[Any]) -> Any:
    """Returns the only name of a list, or None if the list is empty.

    Raises:
        CellError: The list has several names.
    """
    if len(names) > 1:
        hint = 'Write one, or set problem_type = "multi_label_classification".'
        raise CellError(f"{len(names)} labels where one is expected", hint)
    if not names:
        return None
    return names[0]


def _white_space_notes(cells: Sequence[Any]) -> list[RowIssue]:
    """Returns a note on each cell that has white space around it or around a name of its list.

    White space inside a text, such as that behind the separator in ``a; b``, is not noted.
    """
    notes = []
    for row, cell in enumerate(cells):
        names = cell
        if not isinstance(cell, list | tuple):
            names = [cell]
        if any(isinstance(name, str) and name != name.strip() for name in names):
            notes.append(RowIssue(what=_WHITE_SPACE, row=row, severity="note"))
    return notes


class Labels(ClassKind):
    """The names of all classes that apply to a row, as a list without repetitions in the order of the cell.

    A cell is a list, or a text with a separator between the names. Instead of one column, a source may have a column of
    0 and 1 for each class, whose name is that of the class (``layouts.several_columns``). An empty text or list says
    that no class applies, which is a label to learn from. Only None is a missing label.
    """

    name = "labels"

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        values, issues = super().convert(cells, separator)
        return values, [*issues, *_white_space_notes(cells)]

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = label_parts(value, separator)
        # If no cell of a column has more than one number, pandas reads the column as numbers instead of texts.
        if isinstance(value, bool | int | float):
            value = [value]
        if not isinstance(value, list | tuple):
            raise CellError("not a list of label names", f"Write names with {separator!r} between them.")
        names = [label_name(name) for name in value if name is not None and name != ""]
        if len(names) < len(value):  # two separators in a row, or one at the end
            raise CellError("empty label name", f"Write one {separator!r} between two names.")
        if len(set(names)) < len(names):
            raise CellError("repeated label", "Write each label once.")
        return names

    def arrow_type(self) -> Any:
        return pyarrow.list_(pyarrow.string())

    def classes(self, value: Any) -> Sequence[str]:
        return tuple(value)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        # Rows to which no class applies share a stratum with rows without a label.
        strata: list[Sequence[str]] = []
        for names in values:
            if names:
                strata.append(tuple(names))
            else:
                strata.append(_STRATUM_WITHOUT_LABEL)
        return strata


class Tags(TextList, ClassKind):
    """A list with one tag for each word of the row, in the scheme of the cell.

    ``relations`` compares the number of tags with that of words. Code that infers labels or computes metrics converts
    the chunk tags of other schemes, such as IOB1 and BIOES, to IOB2 first (``conll.to_iob2``).
    """

    name = "tags"
    _item = "tag"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        tags = self._list_or_names(value)
        # A class id below 0 means "hidden" on the hub. If the data set names its ids, the reader has already replaced
        # -1 by None.
        is_hidden = [tag is None or (isinstance(tag, int) and tag < 0) for tag in tags]
        if any(is_hidden):
            if all(is_hidden):
                return None
            number = is_hidden.index(True) + 1
            raise CellError(f"hidden tag (tag {number} of {len(tags)})", "Give all tags of a sentence or none.")
        return self._parts(tags, _tag_name)

    def classes(self, value: Any) -> Sequence[str]:
        return tuple(value)


def _tag_name(value: Any) -> str:
    """Returns the name of one tag, which is a text or an int.

    Raises:
        CellError: The tag is empty, or a float. Unlike a label, it may not be a whole float such as 1.0.
    """
    tag = value
    if isinstance(tag, str):
        tag = tag.strip()
    if tag == "":
        raise CellError("empty tag", "Write 'O' for a word that is part of nothing.")
    if isinstance(tag, float):
        raise CellError("not a tag name", "Write a text or a whole number.")
    return label_name(tag)


class Spans(LabelKind):
    """Entities as spans of characters of the row's text, such as ``[[0, 5, "PER"]]``.

    A task never sees spans. Before the columns are converted, ``layouts.entity_tags`` turns the spans of a row into the
    tags of its words, so every value of this column is None, and nothing is checked here. If a row has spans and tags,
    the spans replace the tags. ``spans.parse_spans`` lists the forms of a cell.
    """

    name = "spans"

    def _parse(self, value: Any, separator: str) -> None:
        return None


class Number(LabelKind):
    """A finite number, which regression learns to predict.

    A cell is a number, or a text that Python's ``float`` reads and that has no ``_``. A decimal comma is an error.
    """

    name = "number"

    def _parse(self, value: Any, separator: str) -> float | None:
        if value is None or value == "":
            return None
        number = _float_or_none(value)
        if number is None:
            hint = ""
            if isinstance(value, str) and value.count(",") == 1:
                hint = "Write a decimal point."
            raise CellError("not a number", hint)
        if not math.isfinite(number):
            raise CellError("not a finite number")
        return number

    def arrow_type(self) -> Any:
        return pyarrow.float64()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        """Returns for each number the tenth of the sorted numbers that it is in, from "0" to "9".

        A split that spreads the tenths evenly has small and large numbers in every part. A missing number counts as
        one of the largest.
        """
        # nanquantile leaves out nan, which stands for a missing number. searchsorted sorts it behind all others.
        numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)  # [rows]
        fractions = np.linspace(0, 1, _STRATA_OF_NUMBERS + 1)[1:-1]  # 0.1, 0.2, ... 0.9
        bounds = np.nanquantile(numbers, fractions)
        tenths = np.searchsorted(bounds, numbers, side="right")  # [rows]
        return [(str(tenth),) for tenth in tenths]


def _float_or_none(value: Any) -> float | None:
    """Returns the number that a cell is or spells, which may be infinite or nan, or None if there is none."""
    # float() takes True as 1 and "1_5" as 15, which are mistakes in a file.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        if "_" in str(value):
            return None
        return float(value)
    except (ValueError, OverflowError):  # a text that is no number, or an int that is too large
        return None

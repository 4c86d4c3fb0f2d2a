"""Kinds of columns to learn, as labels, sets of labels, tags, entities or numbers.

A missing label is None, never a name, because a row without a label may still be predicted. Many data sets of the hub
hide the labels of their test rows as -1.
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

_TENTHS = 10
_SPACES = "had white space around a label, which was removed"


class Label(ClassKind):
    """The name of one class, also from a list that holds a single name."""

    name = "label"

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        # A file has few different labels, so that each text is parsed once. With an issue the cells are converted one
        # by one, because each row has its own line.
        if all(type(cell) is str for cell in cells):
            distinct = list(dict.fromkeys(cells))
            values, issues = self._converted(distinct, separator)
            if not issues:
                by_cell = dict(zip(distinct, values, strict=True))
                return [by_cell[cell] for cell in cells], []
        return self._converted(cells, separator)

    def _converted(self, cells: Sequence[Any], separator: str) -> tuple[list[Any], list[RowIssue]]:
        """Converts each cell, and notes the white space around labels."""
        values, issues = super().convert(cells, separator)
        return values, [*issues, *white_space_notes(cells)]

    def _parse(self, value: Any, separator: str) -> Any:
        names = value
        if isinstance(value, str):
            names = list_in_cell(value)
        if isinstance(names, list | tuple):
            if len(names) > 1:
                hint = 'Write one, or set problem_type = "multi_label_classification".'
                raise CellError(f"{len(names)} labels where one is expected", hint)
            value = None
            if names:
                value = names[0]
        if value is None or value == "":
            return None
        return label_name(value)

    def classes(self, value: Any) -> Sequence[str]:
        return (value,)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        return [(value,) if value else ("",) for value in values]


def white_space_notes(cells: Sequence[Any]) -> list[RowIssue]:
    """Returns a note on each cell with white space around a label."""
    notes = []
    for row, cell in enumerate(cells):
        parts = cell
        if not isinstance(parts, list | tuple):
            parts = [parts]
        if any(isinstance(name, str) and name != name.strip() for name in parts):
            notes.append(RowIssue(what=_SPACES, row=row, severity="note"))
    return notes


class Labels(ClassKind):
    """A set of names of classes, as a list or as names with a separator in one cell.

    A column of 0 and 1 for each class, which has the name of the class, works, too (``layouts.several_columns``).
    """

    name = "labels"

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        values, issues = super().convert(cells, separator)
        return values, [*issues, *white_space_notes(cells)]

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = label_parts(value, separator)
        if isinstance(value, bool | int | float):  # pandas reads a column of cells with one number each as numbers
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
        return [tuple(value) if value else ("",) for value in values]


class Tags(TextList, ClassKind):
    """One tag for each of the row's words. Chunk tags are counted in IOB2."""

    name = "tags"
    _item = "tag"

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
            raise CellError(problem, "Give all tags of a sentence or none.")
        return self._parts(parts, _tag_name)

    def classes(self, value: Any) -> Sequence[str]:
        return tuple(value)


def _tag_name(value: Any) -> str:
    """Returns the name of one tag, which may be a whole number but no fraction."""
    tag = value
    if isinstance(tag, str):
        tag = tag.strip()
    if tag == "":
        raise CellError("empty tag", "Write 'O' for a word that is part of nothing.")
    if isinstance(tag, float):
        raise CellError("not a tag name", "Write a text or a whole number.")
    return label_name(tag)


class Spans(LabelKind):
    """Entities by characters of the row's text, as ``[[0, 5, "PER"]]``.

    ``parse_spans`` lists the other forms. They become tags of the row's words (``layouts.entity_tags``), so that the
    column itself has no values. If a row has both, the spans are read.
    """

    name = "spans"

    def _parse(self, value: Any, separator: str) -> None:
        return None


class Number(LabelKind):
    """A finite number, with a decimal point. It is the target of regression."""

    name = "number"

    def _parse(self, value: Any, separator: str) -> float | None:
        if value is None or value == "":
            return None
        try:
            # Python reads True as 1 and "1_5" as 15, which are mistakes in a file.
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            hint = ""
            if isinstance(value, str) and value.count(",") == 1:
                hint = "Write a decimal point."
            raise CellError("not a number", hint) from None
        if not math.isfinite(number):
            raise CellError("not a finite number")
        return number

    def arrow_type(self) -> Any:
        return pyarrow.float64()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        """Returns the tenth of the numbers that holds each number."""
        # [R]. The quantiles leave out nan, which stands for no number and is sorted into the last tenth.
        numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        bounds = np.nanquantile(numbers, np.linspace(0, 1, _TENTHS + 1)[1:-1])
        return [(str(tenth),) for tenth in np.searchsorted(bounds, numbers, side="right")]

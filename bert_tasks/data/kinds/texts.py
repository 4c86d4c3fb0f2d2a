"""Kinds of columns with texts, as a text, an id, a list of texts, or words.

Texts are neither stripped nor normalised here, because the tokenizer of the model does what its vocabulary expects, and
positions of words and answers count the characters of the file.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pyarrow

from bert_tasks.data.cells import LABEL_SEPARATOR, is_encodable, list_in_cell, parse_text
from bert_tasks.data.issues import CellError, RowIssue
from bert_tasks.data.kinds.base import ColumnKind, TextKind

_C1 = re.compile("[\x80-\x9f]")  # controls that nobody writes. Windows has quotes and dashes at these bytes
_CONTROLS = "hold control characters from U+0080 to U+009F, so the encoding may be 'cp1252'"


class Text(TextKind):
    """A text of any length, which may be empty. It must be encodable as UTF-8."""

    name = "text"

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        # Nearly all columns are texts of plain characters, which are checked together. A call for each cell would take
        # most of the time of reading.
        if all(type(cell) is str for cell in cells):
            together = "".join(cells)
            if together.isascii() or (is_encodable(together) and _C1.search(together) is None):
                return list(cells), []
        values, issues = super().convert(cells, separator)
        for row, value in enumerate(values):
            if value is not None and _C1.search(value) is not None:
                issues.append(RowIssue(what=_CONTROLS, row=row, severity="note"))
        return values, issues

    def _parse(self, value: Any, separator: str) -> str:
        return parse_text(value)

    def texts(self, value: Any) -> Sequence[str]:
        return (value,)


class Id(ColumnKind):
    """A text or a whole number that names something, as a text. A row need not have it."""

    name = "id"

    def _parse(self, value: Any, separator: str) -> str | None:
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise CellError("not an id", "Write a text or a whole number.")
        return parse_text(str(value))


class TextList(ColumnKind):
    """A list of texts, such as the words of a sentence."""

    _item: ClassVar[str]
    _first: ClassVar[int] = 1  # the number of the first part in messages

    def arrow_type(self) -> Any:
        return pyarrow.list_(pyarrow.string())

    def _parts(self, values: Iterable[Any], convert: Callable[[Any], str]) -> list[str]:
        """Converts the parts of a list. An error says which of them is wrong."""
        parts = []
        for number, value in enumerate(values, start=self._first):
            try:
                parts.append(convert(value))
            except CellError as error:
                raise CellError(f"{error.issue.what} ({self._item} {number})", error.issue.hint) from None
        return parts

    def _list_or_names(self, value: Any) -> list[Any]:
        """Returns the parts of a list, also from a cell of names with spaces between them."""
        if isinstance(value, str):
            names = list_in_cell(value)
            if names is None and value.startswith("["):
                raise CellError("not a JSON list", f'Write the {self.noun} as ["a", "b"].')
            if names is None:
                names = value.split()
            value = names
        if not isinstance(value, list | tuple):
            raise CellError(f"not a list of {self.noun}", f'Write the {self.noun} as ["a", "b"].')
        return list(value)


class Texts(TextList):
    """A list of texts, such as the sentences of a text. A model reads the text itself, so they are not read twice."""

    name = "texts"
    _item = "text"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        parts = value
        if isinstance(value, str):
            parts = list_in_cell(value)
        if not isinstance(parts, list | tuple):
            raise CellError("not a list of texts", 'Write a list such as ["...", "..."].')
        return self._parts(parts, parse_text)


class Words(TextList, TextKind):
    """The words of a sentence, as a list or as names with spaces between them."""

    name = "words"
    _item = "word"

    def _parse(self, value: Any, separator: str) -> list[str]:
        if value is None:
            raise CellError("missing words", "Write an empty sentence as [].")
        return self._parts(self._list_or_names(value), parse_text)

    def texts(self, value: Any) -> Sequence[str]:
        return tuple(value)

"""Kinds of columns with texts, as a text, an id, a list of texts, or words."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import pyarrow
from pydantic import Field

from bert_tasks.data.cells import list_in_cell, parse_text
from bert_tasks.data.kinds.base import KINDS, Column, ColumnKind
from bert_tasks.data.problems import RowError
from bert_tasks.data.words import word_spans

_C1 = re.compile("[\x80-\x9f]")  # controls that nobody writes. Windows has quotes and dashes at these bytes


class Text(ColumnKind):
    """A text."""

    name = "text"
    has_texts = True
    is_text = True

    def _parse(self, value: Any, separator: str) -> str:
        return parse_text(value)

    def texts(self, value: Any) -> Sequence[str]:
        return (value,)

    def remark(self, cell: Any) -> str | None:
        if isinstance(cell, str) and _C1.search(cell) is not None:
            return "hold control characters from U+0080 to U+009F, so the encoding may be 'cp1252'"
        return None

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Joins the words of a column that is named as the text, as in ``columns = {text = "words"}``."""
        name = names.get(column.name, column.name)
        words: Any = cells.get(name)
        if hasattr(words, "tolist"):
            words = words.tolist()
        is_list = isinstance(words, list | tuple) and len(words) > 0
        if name != column.name and is_list and all(isinstance(word, str) for word in words):
            return {**cells, name: " ".join(words)}
        return super().complete(cells, column, columns, names)

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Texts)), None)

    def derive(self, value: Any) -> str | None:
        """Returns the text that sentences form, one on each line."""
        try:
            sentences = KINDS["texts"].parse(value)
        except RowError:  # reading the column of sentences reports it
            return None
        return None if sentences is None else "\n".join(sentences)


class Id(ColumnKind):
    """A text or a whole number that names something, as a text."""

    name = "id"
    may_be_missing = True

    def _parse(self, value: Any, separator: str) -> str | None:
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RowError("not an id", "Write a text or a whole number.")
        return parse_text(str(value))

    def request_type(self, most: int) -> Any:
        return super().request_type(most) | int


class TextList(ColumnKind):
    """A list of texts, such as the words of a sentence."""

    item: ClassVar[str]
    first: ClassVar[int] = 1  # the number of the first part in messages
    least: ClassVar[int] = 0  # the least number of parts

    def arrow_type(self) -> Any:
        return pyarrow.list_(pyarrow.string())

    def request_type(self, most: int) -> Any:
        text: Any = super().request_type(most)
        return Annotated[list[text], Field(min_length=self.least, max_length=most)]

    def texts(self, value: Any) -> Sequence[str]:
        return tuple(value)

    def _parts(self, values: Iterable[Any], convert: Callable[[Any], str]) -> list[str]:
        parts = []
        for number, value in enumerate(values, start=self.first):
            try:
                parts.append(convert(value))
            except RowError as error:
                raise RowError(f"{error.what} ({self.item} {number})", error.hint) from None
        return parts

    def _list_or_names(self, value: Any) -> list[Any]:
        """Returns the parts of a list, also from a cell of names with spaces between them."""
        if isinstance(value, str):
            names = list_in_cell(value)
            if names is None and value.startswith("["):
                raise RowError("not a JSON list", f'Write the {self.noun} as ["a", "b"].')
            value = value.split() if names is None else names
        if not isinstance(value, list | tuple):
            raise RowError(f"not a list of {self.noun}", f'Write the {self.noun} as ["a", "b"].')
        return list(value)


class Texts(TextList):
    """A list of texts, such as the sentences of a text, which is not read twice."""

    name = "texts"
    item = "text"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        parts = list_in_cell(value) if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise RowError("not a list of texts", 'Write a list such as ["...", "..."].')
        return self._parts(parts, parse_text)

    def texts(self, value: Any) -> Sequence[str]:
        return ()


class Words(TextList):
    """The words of a sentence, as a list or as names with spaces between them."""

    name = "words"
    item = "word"
    has_texts = True
    is_text = True
    is_pretokenized = True

    def _parse(self, value: Any, separator: str) -> list[str]:
        if value is None:
            raise RowError("missing words", "Write an empty sentence as [].")
        return self._parts(self._list_or_names(value), parse_text)

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Text)), None)

    def derive(self, value: Any) -> list[str] | None:
        """Returns the words of a text."""
        return [value[start:end] for start, end in word_spans(value)] if isinstance(value, str) else None

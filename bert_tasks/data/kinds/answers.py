"""Kinds of columns that answer a row's question, as texts or by choices."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import pyarrow

from bert_tasks.data.cells import list_in_cell, numbered_columns, parse_text
from bert_tasks.data.kinds.base import Column, ColumnKind
from bert_tasks.data.kinds.texts import TextList
from bert_tasks.data.problems import RowError, counted, shortened

CONTEXT = "context"  # the column that answers and choices are about
UNKNOWN_START = -1  # of an answer whose start the source does not say
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LARGEST_START = 2**31


class AnswerTexts(TypedDict):
    """The answers to one question, as in SQuAD's data sets on the hub.

    Empty lists mean that it has no answer. ``answer_start`` counts characters of the row's context from 0.
    """

    text: list[str]
    answer_start: list[int]


class Answers(ColumnKind):
    """The texts that answer the row's question, and their starts in its ``context``.

    A value is an ``AnswerTexts``, a list of such objects or of texts, or in one cell the same as JSON or the text
    itself. An answer without a start is at its first occurrence in the context.
    """

    name = "answers"
    is_label = True
    needed_label = "answerable"
    group_column = CONTEXT
    group_noun = "context"
    article_column = "title"  # SQuAD's name of the article that a question is about
    strata_name = "questions with and without an answer"
    _example: ClassVar[str] = 'Write answers such as {"text": ["Paris"], "answer_start": [17]}.'

    def _parse(self, value: Any, separator: str) -> AnswerTexts | None:
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.startswith(("[", "{")) else [value]
            except (ValueError, RecursionError):
                raise RowError("not JSON", self._example) from None
        if not isinstance(value, Mapping | list | tuple):
            raise RowError("not a list of answers", self._example)
        pairs = [pair for answer in ([value] if isinstance(value, Mapping) else value) for pair in self._pairs(answer)]
        if [text for text, _ in pairs] == [""]:
            pairs = []
        for number, (text, start) in enumerate(pairs, start=1):
            if not isinstance(text, str) or text.strip() == "":
                raise RowError(f"answer {number} is not a text", "Write an empty list if there is no answer.")
            if isinstance(start, bool) or not isinstance(start, int) or not UNKNOWN_START <= start < _LARGEST_START:
                raise RowError(f"answer_start that is not a whole number from 0 (answer {number})", self._example)
        return AnswerTexts(text=[parse_text(text) for text, _ in pairs], answer_start=[start for _, start in pairs])

    def _pairs(self, item: Any) -> list[tuple[Any, Any]]:
        """Returns texts with their starts, from a text, an answer, or an object of lists."""
        if not isinstance(item, Mapping):
            return [(item, UNKNOWN_START)]
        if "text" not in item:
            raise RowError("no 'text' in answers", self._example)
        texts = item["text"] if isinstance(item["text"], list | tuple) else [item["text"]]
        starts = item.get("answer_start")
        starts = [UNKNOWN_START] * len(texts) if starts is None else starts
        starts = starts if isinstance(starts, list | tuple) else [starts]
        if len(texts) != len(starts):
            problem = f"{counted(len(texts), 'answer')} and {len(starts)} answer_start"
            raise RowError(problem, "Give each answer a text and a start.")
        return list(zip(texts, starts, strict=True))

    def arrow_type(self) -> Any:
        starts = pyarrow.list_(pyarrow.int64())
        return pyarrow.struct({"text": pyarrow.list_(pyarrow.string()), "answer_start": starts})

    def labels_of(self, value: Any) -> Sequence[str]:
        return ("answerable" if value["text"] else "unanswerable",)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        return [self.labels_of(value) for value in values]

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        if all(column.name != CONTEXT for column in columns):
            raise RowError("answers without a context", f"Add a column {CONTEXT!r}.")
        context = row.get(CONTEXT)
        if context is None:
            return value
        starts = []
        for text, position in zip(value["text"], value["answer_start"], strict=True):
            start = context.find(text) if position == UNKNOWN_START else position
            if start < 0 or not context.startswith(text, start):
                raise RowError("misplaced answer", _misplaced(text, position, context), value=text)
            starts.append(start)
        return AnswerTexts(text=list(value["text"]), answer_start=starts)


def _misplaced(text: str, start: int, context: str) -> str:
    """Returns a sentence on the true position of an answer with a wrong start."""
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    if places:
        return f"The text is at {min(places, key=lambda position: abs(position - start))}."
    folded = context.lower().find(text.lower())
    there = shortened(context[folded : folded + len(text)])
    return "Copy the text from the context exactly." if folded < 0 else f"At {folded} the context has {there}."


class Choices(TextList):
    """Two or more texts, one of them right.

    A value is a list, or an object with the list as ``text`` and the choices' names as ``label``. A row may have a
    column for each choice instead, choice0, choice1, ..., choice_a, choice_b, ... or columns that the user names. Empty
    columns at the end are no choices.
    """

    name = "choices"
    item = "choice"
    first = 0
    least = 2
    has_texts = True
    is_numbered = True
    is_joined = True
    group_column = CONTEXT
    group_noun = "question"

    def _parse(self, value: Any, separator: str) -> list[str]:
        parts = value.get("text") if isinstance(value, Mapping) else value
        parts = list_in_cell(parts) if isinstance(parts, str) else parts
        if not isinstance(parts, list | tuple):
            raise RowError("not a list of choices", 'Write a list such as ["...", "..."].')
        choices = self._parts(parts, parse_text)
        if len(choices) < self.least:
            raise RowError(counted(len(choices), "choice"), "Give at least 2.")
        return choices

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with an object of the choices if each choice has a column.

        Raises:
            RowError: The columns are not called 0, 1, 2, ... or 1, 2, 3, ... or a, b, c, ... after their name.
        """
        name = names.get(column.name, column.name)
        numbered = [] if cells.get(name) is not None else numbered_columns(name, cells)
        if not numbered:
            return cells
        ends = [re.findall(r"[0-9]+$|[A-Za-z]$", column_name)[0].upper() for column_name in numbered]
        count = len(ends)
        if ends not in ([*map(str, range(count))], [*map(str, range(1, count + 1))], list(_LETTERS[:count])):
            columns_shown, hint = ", ".join(map(repr, numbered)), "Number them 0, 1, 2, ... or 1, 2, 3, ..."
            raise RowError(f"the columns of single choices are {columns_shown}", hint)
        choices = self.join({column_name: cells[column_name] for column_name in numbered})
        return {**cells, name: choices} if choices["text"] else cells

    def join(self, cells: Mapping[str, Any]) -> dict[str, list[Any]]:
        filled = [number for number, value in enumerate(cells.values(), start=1) if value not in (None, "")]
        names = list(cells)[: max(filled, default=0)]
        return {"text": [cells[name] for name in names], "label": names}


class Choice(ColumnKind):
    """The index from 0 of the right choice, from its number, text, letter or column."""

    name = "choice"
    is_label = True
    base: ClassVar[int] = 0  # the number of the first choice

    def _parse(self, value: Any, separator: str) -> int | str | None:
        if value is None or value in ("", -1, "-1", "-1.0"):
            return None
        if isinstance(value, float) and value.is_integer():  # tables with hidden labels have no whole numbers
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise RowError("not a choice", "Write its number, its text, its letter or its column.")
        return value if isinstance(value, int) else parse_text(value)

    def arrow_type(self) -> Any:
        return pyarrow.int64()

    def labels_of(self, value: Any) -> Sequence[str]:
        return (f"choice {value}",)

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        for column in columns:
            if isinstance(column.type, Choices):
                choices, cell = row.get(column.name), cells.get(column.name)
                called = cell.get("label") if isinstance(cell, Mapping) else ()
                called = list(map(str, called)) if isinstance(called, list | tuple) else ()
                return None if choices is None else self.index(value, choices, called)
        return value

    def index(self, value: int | str, choices: Sequence[str], names: Sequence[str] = ()) -> int:
        """Returns the index of the right choice, from 0.

        Args:
            value: Number, text or letter of a choice, or its name in the row.
            choices: The texts.
            names: Names of the choices in the row, such as the columns that hold them.

        Raises:
            RowError: No choice has the value, or several do.
        """
        count, places = len(choices), set[int]()
        if isinstance(value, int):
            places = {value - self.base}
        else:
            text = value.strip()
            if re.fullmatch(r"-?[0-9]+\.0", text) and text not in {*names, *map(str.strip, choices)}:
                text = text.removesuffix(".0")  # how pandas writes whole numbers of a column with empty cells
            places = {index for index, name in enumerate(names[:count]) if name == text}
            if not places and len(text) == 1 and text.upper() in _LETTERS[:count]:
                places = {_LETTERS.index(text.upper())}
            elif not places and re.fullmatch(r"-?[0-9]{1,3}", text):
                places = {int(text) - self.base}
            places |= {index for index, choice in enumerate(choices) if choice.strip() == text}
        inside = sorted(places.intersection(range(count)))
        if len(inside) == 1:
            return inside[0]
        last = self.base + count - 1
        if inside:
            meanings = " or ".join(str(index + self.base) for index in inside)
            hint = f"Write the number without quotes, or the letter (A is {self.base})."
            raise RowError(f"ambiguous choice ({meanings})", hint)
        raise RowError("no such choice", f"Write a number from {self.base} to {last}, or the text of a choice.")


class ChoiceFromOne(Choice):
    """``Choice`` whose numbers begin at 1."""

    name = "choice from 1"
    noun = "choice"
    base = 1

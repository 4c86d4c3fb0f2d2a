"""Kinds of columns that answer a row's question, as texts or by choices."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import pyarrow

from bert_tasks.data.cells import list_in_cell, parse_text
from bert_tasks.data.issues import CellError, counted
from bert_tasks.data.kinds.base import LabelKind, TextKind
from bert_tasks.data.kinds.texts import TextList

CONTEXT = "context"  # the column that answers and choices are about
UNKNOWN_START = -1  # of an answer whose start the source does not say
LEAST_CHOICES = 2
_LARGEST_START = 2**31


class AnswerTexts(TypedDict):
    """The answers to one question, as in SQuAD's data sets on the hub.

    Empty lists mean that it has no answer. ``answer_start`` counts characters of the row's context from 0.
    """

    text: list[str]
    answer_start: list[int]


class Answers(LabelKind):
    """The texts that answer the row's question, and their starts in its ``context``.

    A value is an ``AnswerTexts``, a list of such objects or of texts, or in one cell the same as JSON or the text
    itself. An answer without a start is at its first occurrence in the context.
    """

    name = "answers"
    _example: ClassVar[str] = 'Write answers such as {"text": ["Paris"], "answer_start": [17]}.'

    def _parse(self, value: Any, separator: str) -> AnswerTexts | None:
        if value is None:
            return None
        if isinstance(value, str) and not value.startswith(("[", "{")):
            value = [value]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise CellError("not JSON", self._example) from None
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, list | tuple):
            raise CellError("not a list of answers", self._example)
        pairs: list[tuple[Any, Any]] = []
        for answer in value:
            pairs += self._pairs(answer)
        if len(pairs) == 1 and pairs[0][0] == "":  # an empty cell of a csv file means that there is no answer
            pairs = []
        for number, (text, start) in enumerate(pairs, start=1):
            if not isinstance(text, str) or text.strip() == "":
                raise CellError(f"answer {number} is not a text", "Write an empty list if there is no answer.")
            if isinstance(start, bool) or not isinstance(start, int) or not UNKNOWN_START <= start < _LARGEST_START:
                raise CellError(f"answer_start that is not a whole number from 0 (answer {number})", self._example)
        return AnswerTexts(text=[parse_text(text) for text, _ in pairs], answer_start=[start for _, start in pairs])

    def _pairs(self, item: Any) -> list[tuple[Any, Any]]:
        """Returns texts with their starts, from a text, an answer, or an object of lists."""
        if not isinstance(item, Mapping):
            return [(item, UNKNOWN_START)]
        if "text" not in item:
            raise CellError("no 'text' in answers", self._example)
        texts, starts = item["text"], item.get("answer_start")
        if not isinstance(texts, list | tuple):  # one object for each answer, as in the files of SQuAD
            texts = [texts]
        if starts is None:
            starts = [UNKNOWN_START] * len(texts)
        if not isinstance(starts, list | tuple):
            starts = [starts]
        if len(texts) != len(starts):
            problem = f"{counted(len(texts), 'answer')} and {len(starts)} answer_start"
            raise CellError(problem, "Give each answer a text and a start.")
        return list(zip(texts, starts, strict=True))

    def arrow_type(self) -> Any:
        starts = pyarrow.list_(pyarrow.int64())
        return pyarrow.struct({"text": pyarrow.list_(pyarrow.string()), "answer_start": starts})

    def classes(self, value: Any) -> Sequence[str]:
        if not value["text"]:
            return ("unanswerable",)
        return ("answerable",)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        return [self.classes(value) for value in values]


class Choices(TextList, TextKind):
    """Two or more texts, one of them right.

    A value is a list, or an object with the list as ``text`` and the choices' names as ``label``. A row may have a
    column for each choice instead, choice0, choice1, ..., choice_a, choice_b, ... or columns that the user names
    (``layouts.numbered_choices``). Empty columns at the end are no choices.
    """

    name = "choices"
    _item = "choice"
    _first = 0

    def _parse(self, value: Any, separator: str) -> list[str]:
        parts = value
        if isinstance(parts, Mapping):  # the form of ARC on the hub
            parts = parts.get("text")
        if isinstance(parts, str):
            parts = list_in_cell(parts)
        if not isinstance(parts, list | tuple):
            raise CellError("not a list of choices", 'Write a list such as ["...", "..."].')
        choices = self._parts(parts, parse_text)
        if len(choices) < LEAST_CHOICES:
            raise CellError(counted(len(choices), "choice"), "Give at least 2.")
        return choices

    def texts(self, value: Any) -> Sequence[str]:
        return tuple(value)


class Choice(LabelKind):
    """The index from 0 of the right choice, from its number, text, letter or column (``relations.right_choice``)."""

    name = "choice"

    def _parse(self, value: Any, separator: str) -> int | str | None:
        if value is None or value in ("", -1, "-1", "-1.0"):
            return None
        if isinstance(value, float) and value.is_integer():  # tables with hidden labels have no whole numbers
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise CellError("not a choice", "Write its number, its text, its letter or its column.")
        if isinstance(value, int):
            return value
        return parse_text(value)

    def arrow_type(self) -> Any:
        return pyarrow.int64()

    def classes(self, value: Any) -> Sequence[str]:
        return (f"choice {value}",)


class ChoiceFromOne(Choice):
    """The right choice as ``Choice`` reads it, but with numbers that begin at 1."""

    name = "choice from 1"
    noun = "choice"

"""Relations, which are what must hold between the columns of a row.

This module has one function for each relation. It runs after all columns are converted, on the rows that have a value
in each of its columns, and may replace the values. To add a relation, write such a function and name the kinds of its
columns in ``RELATIONS``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bert_tasks.data.batch import Cells
from bert_tasks.data.issues import CellError, RowIssue, counted, shortened
from bert_tasks.data.kinds import (
    CONTEXT,
    UNKNOWN_START,
    Answers,
    AnswerTexts,
    Choice,
    ChoiceFromOne,
    Choices,
    Column,
    ColumnKind,
    Tags,
    Text,
    Words,
)

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# Returns what is stored for a value, given the value that it must fit, and the cell of the latter in the source.
Check = Callable[[Any, Any, Any], Any]


class Relation(NamedTuple):
    """A column whose values must fit those of another column, and the function that checks a pair of values."""

    column: Column
    other: Column
    check: Check

    def apply(self, values: Cells, cells: Cells, names: Mapping[str, str]) -> list[RowIssue]:
        """Replaces the values of the column, with None where they do not fit, and returns the issues.

        Args:
            values: Converted columns by the task's names.
            cells: The columns as the source has them.
            names: The task's columns -> the source's.
        """
        if self.column.name not in values or self.other.name not in values:
            return []
        issues: list[RowIssue] = []
        checked = values[self.column.name]
        others = values[self.other.name]
        raw = cells.get(names[self.other.name], others)
        for row, (value, other) in enumerate(zip(checked, others, strict=True)):
            if value is None or other is None:
                continue
            try:
                checked[row] = self.check(value, other, raw[row])
            except CellError as error:
                checked[row] = None
                issue = error.issue.at(names[self.column.name], value)
                issues.append(replace(issue, row=row))
        return issues


def one_tag_for_each_word(tags: Sequence[str], words: Sequence[str], cell: Any) -> Sequence[str]:
    """Returns the tags, which must be as many as the words."""
    if len(words) == len(tags):
        return tags
    problem = f"{counted(len(words), 'word')} and {counted(len(tags), 'tag')}"
    start = " ".join(words[:5])
    if len(words) > 5:
        start += " ..."
    hint = f"Give each word of the sentence {start!r} one tag."
    raise CellError(problem, hint, value=" ".join(tags))


def answers_in_context(answers: AnswerTexts, context: str, cell: Any) -> AnswerTexts:
    """Returns the answers with the place of each in the context, which is the first if the row does not say it."""
    starts = []
    for text, position in zip(answers["text"], answers["answer_start"], strict=True):
        start = position
        if position == UNKNOWN_START:
            start = context.find(text)
        if start < 0 or not context.startswith(text, start):
            raise CellError("misplaced answer", _true_place(text, position, context), value=text)
        starts.append(start)
    return AnswerTexts(text=list(answers["text"]), answer_start=starts)


def _refuse_answers(answers: AnswerTexts, context: Any, cell: Any) -> AnswerTexts:
    """Raises CellError, because a model reads answers out of a context."""
    raise CellError("answers without a context", f"Add a column {CONTEXT!r}.")


def _true_place(text: str, start: int, context: str) -> str:
    """Returns a sentence on the true position of an answer with a wrong start."""
    # The lookahead consumes nothing, so that overlapping occurrences are found, too.
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    if places:
        # Offsets are usually wrong by a few characters, because the context was cleaned after they were counted.
        return f"The text is at {min(places, key=lambda position: abs(position - start))}."
    folded = context.lower().find(text.lower())
    if folded < 0:
        return "Copy the text from the context exactly."
    return f"At {folded} the context has {shortened(context[folded : folded + len(text)])}."


def right_choice(value: int | str, choices: Sequence[str], cell: Any, *, base: int = 0) -> int:
    """Returns the index of the right choice, from 0.

    Args:
        value: Number, text or letter of a choice, or its name in the row.
        choices: The texts.
        cell: The choices in the row, which may have names, such as the columns that hold them.
        base: The number of the first choice.

    Raises:
        CellError: No choice has the value, or several do.
    """
    names: list[str] = []
    if isinstance(cell, Mapping) and isinstance(cell.get("label"), list | tuple):
        names = list(map(str, cell["label"]))
    count = len(choices)
    inside = sorted(_meant_choices(value, choices, names, base).intersection(range(count)))
    if len(inside) == 1:
        return inside[0]
    if inside:
        meanings = " or ".join(str(index + base) for index in inside)
        hint = f"Write the number without quotes, or the letter (A is {base})."
        raise CellError(f"ambiguous choice ({meanings})", hint)
    raise CellError("no such choice", f"Write a number from {base} to {base + count - 1}, or the text of a choice.")


def _meant_choices(value: int | str, choices: Sequence[str], names: Sequence[str], base: int) -> set[int]:
    """Returns the indices of the choices that a value may mean, which may be outside of the choices."""
    if isinstance(value, int):
        return {value - base}
    text = value.strip()
    if re.fullmatch(r"-?[0-9]+\.0", text) and text not in {*names, *map(str.strip, choices)}:
        text = text.removesuffix(".0")  # how pandas writes whole numbers of a column with empty cells
    # The name of a column wins over a letter or a number. What the text of a choice says counts in any case, so that a
    # value with two meanings is reported instead of guessed.
    places = {index for index, name in enumerate(names[: len(choices)]) if name == text}
    if not places and len(text) == 1 and text.upper() in _LETTERS[: len(choices)]:
        places = {_LETTERS.index(text.upper())}
    elif not places and re.fullmatch(r"-?[0-9]{1,3}", text):
        places = {int(text) - base}
    return places | {index for index, choice in enumerate(choices) if choice.strip() == text}


# The kind of the column that is checked, the kind of the other column, and the check.
RELATIONS: list[tuple[type[ColumnKind], type[ColumnKind], Check]] = [
    (Tags, Words, one_tag_for_each_word),
    (Answers, Text, answers_in_context),
    (ChoiceFromOne, Choices, partial(right_choice, base=1)),
    (Choice, Choices, right_choice),
]


def relations_of(columns: Sequence[Column]) -> list[Relation]:
    """Returns the relations between the columns that a task reads."""
    found = []
    for column in columns:
        for kind, other_kind, check in RELATIONS:
            is_other_base = kind is Choice and isinstance(column.type, ChoiceFromOne)  # which has a check of its own
            if not isinstance(column.type, kind) or is_other_base:
                continue
            others = [other for other in columns if isinstance(other.type, other_kind)]
            if kind is Answers:  # which are about the context, and not about the question, another text
                others = [other for other in others if other.name == CONTEXT]
            if others:
                found.append(Relation(column, others[0], check))
            elif kind is Answers:
                found.append(Relation(column, column, _refuse_answers))
    return found

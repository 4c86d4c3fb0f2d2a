"""Detects rows of choices, with the right one of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from bert_tasks.data.cells import numbered_columns
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile, percentile, pieces
from bert_tasks.data.validator import RowValidator
from bert_tasks.tasks.detection.base import (
    COMPARED_ROWS,
    LABEL_NAMES,
    QUESTION_NAMES,
    TaskGuess,
    UserHints,
    count_pieces,
    other_columns,
)

# Names that people give to columns, in lower case.
_CHOICES = ("choices", "choice", "options", "option", "endings", "ending", "answers", "answer", "candidates")
_CONTEXTS = ("context", "ctx", "article", "passage", "premise", "sent1", "startphrase", "paragraph", "story")
_QUESTIONS = (*QUESTION_NAMES, "sent2")
_RIGHT = (*LABEL_NAMES, "answer", "answerkey", "correct", "gold")


def choice_guess(
    task: str,
    columns_of_base: Mapping[int, Sequence[Column]],
    profiles: Sequence[ColumnProfile],
    rows: Sequence[Row],
    hints: UserHints,
) -> TaskGuess | None:
    """Returns the columns and settings with which rows fit multiple choice, or None if they do not fit.

    Args:
        task: The name of the task.
        columns_of_base: The task's columns by the number that labels give to the first choice, 0 and 1.
        profiles: Content of each column.
        rows: A sample of the rows, as the file has them.
        hints: The user's options for the columns.
    """
    compared = rows[:COMPARED_ROWS]
    fitting: list[tuple[dict[str, str], int]] = []
    for columns in _choice_columns(profiles, hints):
        for base in _label_bases(profiles, columns):
            if _read_choices(compared, columns, columns_of_base[base]):
                fitting.append((columns, base))
    if not fitting:
        return None
    columns, base = fitting[0]
    others = [other for other, _ in fitting[1:]]
    read = _read_choices(rows, columns, columns_of_base[base])
    counts = sorted({len(choices) for choices in read})
    several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    texts = [columns[name] for name in ("context", "question") if name in columns]
    longest = [max(map(pieces, choices)) for choices in read]
    counting, settings = "", {}
    if base:
        counting, settings = ", counted from 1", {"label_base": base}
    return TaskGuess(
        task=task,
        columns=columns,
        words=percentile([count_pieces(row, texts) for row in rows]) + percentile(longest),
        precedence=3,
        settings=settings,
        reasons=(
            f"{columns['choices']}: {several} choices in a row, and {columns['label']} names the right one{counting}",
            f"{', '.join(texts)}: what the choices are about",
        ),
        alternatives=other_columns(columns, others, profiles),
    )


def _choice_columns(profiles: Sequence[ColumnProfile], hints: UserHints) -> Iterator[dict[str, str]]:
    """Columns that may be context, question, choices and label, likeliest first."""
    for choices, parts in _choice_sources(profiles):
        others = [column for column in profiles if column.name not in (choices, *parts)]
        for label in _label_columns(others, parts, hints):
            texts = [column for column in others if column is not label and not column.is_number and not column.nested]
            context, question = _context_and_question(texts, hints)
            if context is None:
                continue
            if question is None:
                yield {"context": context, "choices": choices, "label": label.name}
            else:
                yield {"context": context, "question": question, "choices": choices, "label": label.name}


def _label_columns(profiles: Sequence[ColumnProfile], parts: Sequence[str], hints: UserHints) -> list[ColumnProfile]:
    """Returns columns of labels, by their names or by names of the choices' columns."""
    if hints.label is not None:
        return [column for column in profiles if column.name == hints.label]
    labels = sorted((c for c in profiles if c.known in _RIGHT), key=lambda column: _RIGHT.index(column.known))
    for column in profiles:
        names_a_part = bool(_values(column)) and _values(column) <= set(parts)
        if column not in labels and names_a_part:
            labels.append(column)
    return labels


def _values(column: ColumnProfile) -> set[str]:
    return {value for value, _ in column.common}


def _label_bases(profiles: Sequence[ColumnProfile], columns: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the numbers of the first choice to try, likeliest first."""
    label = next(column for column in profiles if column.name == columns["label"])
    return (1, 0) if label.is_number and label.low == 1 else (0,)


def _context_and_question(texts: Sequence[ColumnProfile], hints: UserHints) -> tuple[str | None, str | None]:
    """Returns the columns of the hints, else of such names, else of the longest texts.

    A question alone is the context.
    """
    context, question = (*hints.texts, None, None)[:2]
    free = [column for column in texts if column.name not in hints.texts]
    if question is None:
        question = next((column.name for column in free if column.known in _QUESTIONS), None)
    if context is None:
        left = [column for column in free if column.name != question]
        named = sorted((c for c in left if c.known in _CONTEXTS), key=lambda column: _CONTEXTS.index(column.known))
        longest = sorted((c for c in left if c.is_text), key=lambda column: -column.words)
        context = next((column.name for column in (*named, *longest)), None)
    if context is None:
        return question, None
    if question == context:
        return context, None
    return context, question


def _choice_sources(profiles: Sequence[ColumnProfile]) -> Iterator[tuple[str, list[str]]]:
    """Returns columns of lists, and the names without numbers of columns of choices."""
    for column in profiles:
        if column.known in _CHOICES and column.filled and (column.nested == 1 or column.lists == 1):
            yield column.name, []
    names = [column.name for column in profiles]
    for stem in dict.fromkeys(re.sub(r"[ _]?([0-9]+|[A-Z])$|[ _][a-z]$", "", name) for name in names):
        parts = numbered_columns(stem, names)
        if parts and stem.strip().lower() in _CHOICES:
            name = "choices" if stem == "choice" else stem  # the task itself finds choice0, choice1, ...
            yield name, parts
    letters = list(takewhile(names.__contains__, "ABCDEFGH"))
    for values in (set(letters), *map(_values, profiles)):  # a column's values may be the names of others
        parts = [name for name in names if name in values]
        if len(parts) == len(values) > 1:
            yield ",".join(parts), parts


def _read_choices(rows: Sequence[Row], names: Mapping[str, str], columns: Sequence[Column]) -> list[list[str]]:
    """Returns the choices of labelled rows, or none if one of the rows is unreadable.

    Args:
        rows: The rows.
        names: The task's columns -> columns of the rows.
        columns: The task's columns.
    """
    validator = RowValidator(columns, names)
    read = []
    for row in rows:
        values, errors = validator.validate(row)
        if any(error.column in (names["choices"], names["label"]) for error in errors):
            return []
        if "label" in values:
            read.append(values["choices"])
    return read

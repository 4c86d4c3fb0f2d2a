"""Detects rows of questions with a context that holds their answers."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.data.profile import ColumnProfile, percentile
from bert_tasks.tasks.detection.base import (
    COMPARED_ROWS,
    QUESTION_NAMES,
    TaskGuess,
    UserHints,
    cell_value,
    count_pieces,
    other_columns,
)

_LEAST_CONTEXT = 10  # words on average
_SHARE = 0.9  # share of answers that must be in their context
_SHARE_IF_NAMED = 0.3  # if the columns have usual names
_EQUAL = 0.02  # columns whose shares differ less are as good

# Column names that people use, in lower case.
_CONTEXTS = ("context", "passage", "paragraph")
_ANSWERS = ("answers", "answer", "answer_text")
_ANSWER_WORDS = frozenset(("answers", "answer", "ans"))  # in other names

_Spans = tuple[ColumnProfile, ColumnProfile, ColumnProfile]  # question, context, answers


def span_guess(task: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
    """Returns the columns and settings with which rows fit span extraction, or None if they do not fit.

    Args:
        task: The name of the task.
        profiles: Content of each column.
        rows: A sample of the rows, as the file has them.
        hints: The user's options for the columns.
    """
    compared = rows[:COMPARED_ROWS]
    candidates = list(_span_columns(profiles, compared, hints))
    if not candidates:
        return None
    copied = {(spans[1].name, spans[2].name) for spans in candidates}
    positioned = {pair for pair in copied if _has_positions(*pair, profiles, compared)}
    ranks = {spans: _rank(spans, positioned) for spans in candidates}
    best, *others = sorted(candidates, key=ranks.__getitem__, reverse=True)
    # Where names or positions decide between answers, there is no doubt.
    others = [other for other in others if ranks[other][:-1] == ranks[best][:-1] or other[2] is best[2]]
    alike = [other for other in others if _is_alike(other, best, rows)]
    columns = _names(best)
    cells = [cell_value(row, columns["answers"], "answers") for row in rows]
    without_answer = sum(cell is not None and not cell["text"] for cell in cells)
    return TaskGuess(
        task=task,
        columns=columns,
        words=percentile([count_pieces(row, (columns["question"], columns["context"])) for row in rows]),
        precedence=1,
        settings={"version_2_with_negative": without_answer > 0},
        reasons=_reasons(columns, rows, cells, without_answer),
        alternatives=other_columns(columns, map(_names, alike), profiles),
    )


def _reasons(
    columns: Mapping[str, str], rows: Sequence[Row], cells: Sequence[Any], without_answer: int
) -> tuple[str, ...]:
    """Returns what was seen in the columns.

    Args:
        columns: question, context and answers -> columns of the rows.
        rows: The rows.
        cells: The answers of each row, or None if a cell cannot be read.
        without_answer: The number of questions without an answer.
    """
    question, context, answers = columns["question"], columns["context"], columns["answers"]
    not_copied = 0
    for row, cell in zip(rows, cells, strict=True):
        passage = str(row.get(context))
        not_copied += cell is not None and any(text not in passage for text in cell["text"])
    amount = "the answers" if not_copied == 0 else "most answers"
    reasons = [f"{context}, {answers}: {amount} are copied from the texts, so spans of {context} answer {question}"]
    if not_copied:
        share = f"{not_copied} of {len(rows)} rows ({not_copied / len(rows):.0%})"
        reasons.append(f"{answers}: in {share} the answer is not in {context} letter for letter")
    if without_answer:
        reasons.append(f"{answers}: {without_answer} of {len(rows)} are empty, for questions without an answer")
    return tuple(reasons)


def _is_alike(other: _Spans, best: _Spans, rows: Sequence[Row]) -> bool:
    """Returns True if another reading is as good as the best one.

    Readings with equally usual names are as good. Among contexts without a usual name the longest is better.
    """
    usual = _usual(best)
    if _usual(other) == usual and (other[1] is best[1] or usual[1]):
        return True
    if other[:2] != best[:2]:
        return False
    return abs(_copied(*best[1:], rows) - _copied(*other[1:], rows)) <= _EQUAL


def _names(spans: _Spans) -> dict[str, str]:
    return dict(zip(("question", "context", "answers"), (column.name for column in spans), strict=True))


def _usual(spans: _Spans) -> list[bool]:
    """Returns the columns with usual names."""
    return [column.known in names for column, names in zip(spans, (QUESTION_NAMES, _CONTEXTS, _ANSWERS), strict=True)]


def _rank(spans: _Spans, positioned: Collection[tuple[str, str]]) -> tuple[int, bool, bool, float]:
    """Rates a reading by its usual names, a column of the answers' positions, the answers' name, and their length.

    Other copied words, such as the aspect that a question is about, have no positions and are short.

    Args:
        spans: The reading.
        positioned: Contexts and answers with a column that says where the answers begin.
    """
    _, context, answers = spans
    words = re.findall(r"[a-z]+", answers.known)
    is_named = not _ANSWER_WORDS.isdisjoint(words)
    return sum(_usual(spans)), (context.name, answers.name) in positioned, is_named, answers.words


def _has_positions(context: str, answers: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row]) -> bool:
    """Returns True if another column, such as ``12`` or ``(12, 20)``, says where almost all answers begin."""
    cells = [(row, cell_value(row, answers, "answers")) for row in rows]
    answered = [(row, cell["text"][0]) for row, cell in cells if cell is not None and cell["text"]]
    for column in profiles:
        starts = [re.search(r"\d+", str(row.get(column.name))) for row, _ in answered]
        found = sum(
            start is not None and str(row.get(context)).startswith(text, int(start[0]))
            for (row, text), start in zip(answered, starts, strict=True)
        )
        if column.name not in (context, answers) and found >= _SHARE * len(answered) > 0:
            return True
    return False


def _span_columns(profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> Iterator[_Spans]:
    """Columns that may be question, context and answers, best first."""
    asked, read = hints.texts if len(hints.texts) == 2 else (None, *hints.texts, None)[:2]
    longest = sorted(profiles, key=lambda column: (column.known not in _CONTEXTS, -column.words))
    contexts = [c for c in longest if c.name == read or (read is None and (c.is_text or c.known in _CONTEXTS))]
    for context in contexts:
        others = [column for column in profiles if column is not context]
        asking = [c for c in others if c.name == asked or (asked is None and (c.is_text or c.known in QUESTION_NAMES))]
        questions = sorted(asking, key=lambda column: column.known not in QUESTION_NAMES)
        learnt = [column for column in others if hints.label in (None, column.name)]
        for answers in sorted(learnt, key=lambda column: column.known not in _ANSWERS):
            asked_by = [column for column in questions if column is not answers]
            if asked_by and _is_answered(context, answers, rows, hints):
                yield from ((question, context, answers) for question in asked_by)


def _is_answered(context: ColumnProfile, answers: ColumnProfile, rows: Sequence[Row], hints: UserHints) -> bool:
    is_stated = hints.task is not None and hints.label is not None
    named = is_stated or (context.known in _CONTEXTS and answers.known in _ANSWERS)
    plain = context.words >= _LEAST_CONTEXT and not answers.is_classes and answers.words < context.words / 2
    if not (named or (plain and answers.distinct > 1 and not answers.is_number)):
        return False
    least = _SHARE
    if is_stated:
        least = 0.0
    elif named and not answers.is_classes:
        least = _SHARE_IF_NAMED
    copied = _copied(context, answers, rows)
    return copied > 0 and copied >= least


def _copied(context: ColumnProfile, answers: ColumnProfile, rows: Sequence[Row]) -> float:
    """Returns the share of the answers that are in their context."""
    copied = []
    for row in rows:
        passage = str(row.get(context.name))
        cell = cell_value(row, answers.name, "answers")
        if cell is not None:
            copied += [text in passage for text in cell["text"]]
    return sum(copied) / len(copied) if copied else 0.0

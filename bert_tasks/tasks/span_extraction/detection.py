"""Whether rows seem to be questions with a context that holds their answers."""

from collections.abc import Iterator, Sequence

from bert_tasks.data.columns import Row
from bert_tasks.data.profile import ColumnProfile, percentile
from bert_tasks.tasks.shared.detection import (
    COMPARED_ROWS,
    QUESTION_NAMES,
    TaskGuess,
    UserHints,
    cell_value,
    count_pieces,
    other_columns,
)

_LEAST_CONTEXT = 10  # words on average
_FOUND = 0.9  # share of the answers that must be in their context
_FOUND_IF_NAMED = 0.3  # where the columns are called so
_FOUND_IF_STATED = 0.0  # where the user says so; one at least

# Column names that people use, in lower case.
_CONTEXTS = ("context", "passage", "paragraph")
_ANSWERS = ("answers", "answer", "answer_text")

_Spans = tuple[ColumnProfile, ColumnProfile, ColumnProfile]  # question, context, answers


def detect_spans(
    name: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
) -> TaskGuess | None:
    """Returns a guess if there is a question and a context, and the answers are copied from the context.

    Args:
        name: of the task.
    """
    candidates = list(_span_columns(profiles, rows[:COMPARED_ROWS], hints))
    if not candidates:
        return None
    best, *others = candidates
    columns = _names(best)
    question, context, answers = columns.values()
    texts = [cell_value(row, answers, "answers") for row in rows]
    none = sum(given is not None and not given["text"] for given in texts)
    bad = sum(
        given is not None and any(text not in str(row.get(context)) for text in given["text"])
        for row, given in zip(rows, texts, strict=True)
    )
    where = "the answers are copied from the texts" if bad == 0 else "most answers are copied from the texts"
    reasons = [
        f"{context}, {answers}: {where} -> spans of {context} that answer {question}",
    ]
    if bad:
        share = f"{bad} of {len(rows)} rows ({bad / len(rows):.0%})"
        reasons.append(f"{answers}: in {share} the answer is not in {context} letter for letter")
    reasons += [f"{answers}: {none} of {len(rows)} are empty -> questions without an answer"] if none else []
    return TaskGuess(
        task=name,
        columns=columns,
        words=percentile([count_pieces(row, (question, context)) for row in rows]),
        precedence=1,
        settings={"version_2_with_negative": none > 0},
        reasons=tuple(reasons),
        alternatives=other_columns(columns, [_names(o) for o in others if _matches_as_well(o, best)], profiles),
    )


def _names(spans: _Spans) -> dict[str, str]:
    return dict(zip(("question", "context", "answers"), (column.name for column in spans), strict=True))


def _matches_as_well(other: _Spans, best: _Spans) -> bool:
    """Returns True if neither has more usual names; of contexts without one the longest matches best."""
    usual = (QUESTION_NAMES, _CONTEXTS, _ANSWERS)
    other_named, best_named = (
        [column.known in names for column, names in zip(spans, usual, strict=True)] for spans in (other, best)
    )
    return other_named == best_named and (other[1] is best[1] or best_named[1])


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
    given = [(row.get(context.name), cell_value(row, answers.name, "answers")) for row in rows]
    found = [text in str(place) for place, cell in given if cell is not None for text in cell["text"]]
    least = _FOUND_IF_STATED if is_stated else _FOUND_IF_NAMED if named and not answers.is_classes else _FOUND
    return any(found) and sum(found) >= least * len(found)

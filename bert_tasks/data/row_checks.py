"""What only the values of a row together can show: one tag for each word, and answers that stand in their context.

Owns these checks and the filling in of answer starts that the source does not give. Must not know files or tasks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bert_tasks.data.columns import Column, column_of
from bert_tasks.data.problems import shortened
from bert_tasks.data.values import UNKNOWN_START, Answers

CONTEXT = "context"
_WORDS_SHOWN = 5


class RowFault(NamedTuple):
    column: str
    value: str
    what: str


def checked_together(row: Mapping[str, Any], columns: Sequence[Column]) -> tuple[dict[str, Any], list[RowFault]]:
    """The row of canonical values with answer starts filled in, and what is wrong with it.

    An answer without a start gets the first place where the context holds it. A value that is None, because it is
    not there or was refused before, is not checked.
    """
    checked = dict(row)
    words, tags, answers = (column_of(columns, kind) for kind in ("words", "tags", "answers"))
    faults: list[RowFault] = []
    if words is not None and tags is not None:
        faults += _tag_faults(tags.name, row.get(words.name), row.get(tags.name))
    if answers is not None and row.get(answers.name) is not None:
        checked[answers.name], found = _placed(answers.name, row[answers.name], row.get(CONTEXT), CONTEXT in row)
        faults += found
    return checked, faults


def _tag_faults(column: str, words: list[str] | None, tags: list[str] | None) -> list[RowFault]:
    if words is None or tags is None or len(words) == len(tags):
        return []
    start = " ".join(words[:_WORDS_SHOWN]) + (" ..." if len(words) > _WORDS_SHOWN else "")
    counts = f"{_counted(len(words), 'word')} and {_counted(len(tags), 'tag')}"
    return [RowFault(column, " ".join(tags), f"{counts} in the sentence {start!r}; give each word one tag")]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _placed(column: str, answers: Answers, context: str | None, has_context: bool) -> tuple[Answers, list[RowFault]]:
    if not has_context:
        return answers, [RowFault(column, str(answers), f"answers need the text they stand in: a column {CONTEXT!r}")]
    if context is None:
        return answers, []
    faults: list[RowFault] = []
    starts: list[int] = []
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        place = context.find(text) if start == UNKNOWN_START else start
        starts.append(place)
        if place < 0 or not context.startswith(text, place):
            faults.append(RowFault(column, text, _misplaced(text, start, context)))
    return Answers(text=list(answers["text"]), answer_start=starts), faults


def _misplaced(text: str, start: int, context: str) -> str:
    """Why an answer does not stand where it should, and where it does."""
    known = start != UNKNOWN_START
    at = f"at answer_start {start} the context has {_there(context, start, len(text))}; " if known else ""
    places = _places(text, context)
    if places:
        nearest = min(places, key=lambda place: abs(place - start))
        off = start - nearest
        return f"{at}the text stands at {nearest}, answer_start is {abs(off)} too {'large' if off > 0 else 'small'}"
    lower = text.lower()
    if known and context[start : start + len(text)].lower() == lower:
        return f"{at}the letter case differs"
    folded = context.lower().find(lower)
    if folded >= 0 and len(context.lower()) == len(context):
        there = shortened(context[folded : folded + len(text)])
        return f"{at}{there} stands at {folded}, the letter case differs"
    return f"{at}the context does not hold this text; copy it from the context, letter for letter"


def _there(context: str, start: int, length: int) -> str:
    if start >= len(context):
        return f"its end ({len(context)} characters)"
    return shortened(context[start : start + length])


def _places(text: str, context: str) -> list[int]:
    places: list[int] = []
    place = context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    return places

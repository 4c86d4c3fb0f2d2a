"""Checks on the values of a row together; their messages are in messages.txt."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.batch import Batch, Record
from bert_tasks.data.columns import Column
from bert_tasks.data.conversion import Conversion

TAGGED = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))
ASKED = (
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)
CONTEXT = "He went to Paris. Paris is in France."


def validate(row: dict[str, Any], columns: tuple[Column, ...]) -> tuple[dict[str, Any], list[str]]:
    converted = Conversion(columns).convert(Batch.of([Record(1, row)]))
    return converted.row(0), [issue.message for issue in converted.problems.get(0, [])]


def answered(*texts: str, starts: list[int], context: str = CONTEXT) -> tuple[Any, list[str]]:
    row = {"question": "?", "context": context, "answers": {"text": list(texts), "answer_start": starts}}
    checked, errors = validate(row, ASKED)
    assert row["answers"]["answer_start"] is starts  # the caller's row is not changed
    return checked.get("answers"), errors


def test_answers_without_a_start_get_the_first_place() -> None:
    assert answered("Paris", "France", starts=[-1, -1]) == (
        {"text": ["Paris", "France"], "answer_start": [11, 30]},
        [],
    )
    assert answered("Paris", starts=[18])[0]["answer_start"] == [18]
    assert answered(starts=[]) == ({"text": [], "answer_start": []}, [])


@given(
    context=st.text("ab\U0001f600é ", max_size=12), start=st.integers(-1, 12), text=st.text("ab\U0001f600é", min_size=1)
)
def test_an_answer_that_passes_is_cut_out_of_its_context(context: str, start: int, text: str) -> None:
    answers, errors = answered(text, starts=[start], context=context)
    position = context.find(text) if start == -1 else start
    stands_there = position >= 0 and context[position : position + len(text)] == text
    assert stands_there == (errors == [])
    assert not stands_there or answers["answer_start"] == [position]


def test_what_is_not_there_is_not_checked() -> None:
    for row in ({"words": ["a"], "tags": None}, {"words": [], "tags": []}):
        values = {name: value for name, value in row.items() if value is not None}
        assert validate(row, TAGGED) == (values, [])
    assert validate({"words": None, "tags": ["O"]}, TAGGED)[1] == ["missing words. Write an empty sentence as []."]
    row = {"question": "?", "context": None, "answers": {"text": ["a"], "answer_start": [0]}}
    assert validate(row, ASKED)[1] == ['missing text. Write an empty text as "".']

"""Checks on the values of a row together."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.columns import Column
from bert_tasks.data.problems import BadRowsError
from bert_tasks.data.table import RowTable
from bert_tasks.data.validator import Fault, RowValidator, make_column_mapping

TAGGED = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))
ASKED = (
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)
CONTEXT = "He went to Paris. Paris is in France."


def validate(row: dict[str, Any], columns: tuple[Column, ...]) -> tuple[dict[str, Any], list[Fault]]:
    return RowValidator(make_column_mapping(columns)).validate(row)


def answered(*texts: str, starts: list[int], context: str = CONTEXT) -> tuple[Any, list[str]]:
    row = {"question": "?", "context": context, "answers": {"text": list(texts), "answer_start": starts}}
    checked, faults = validate(row, ASKED)
    assert row["answers"]["answer_start"] is starts  # the caller's row stays as it is
    return checked["answers"], [fault.what for fault in faults]


def test_answers_without_a_start_get_the_first_place() -> None:
    assert answered("Paris", "France", starts=[-1, -1]) == (
        {"text": ["Paris", "France"], "answer_start": [11, 30]},
        [],
    )
    assert answered("Paris", starts=[18])[0]["answer_start"] == [18]
    assert answered(starts=[]) == ({"text": [], "answer_start": []}, [])


@pytest.mark.parametrize(
    ("text", "start", "said"),
    [
        (
            "Paris",
            12,
            "at answer_start 12 the context has 'aris.'; the text is at 11, answer_start is 1 too large",
        ),
        ("Paris", 17, "at answer_start 17 the context has ' Pari'; the text is at 18, answer_start is 1 too small"),
        ("Paris", 99, "at answer_start 99 the context has its end (37 characters); the text is at 18"),
        ("paris", 11, "at answer_start 11 the context has 'Paris'; the letter case differs"),
        (
            "paris IS",
            0,
            "at answer_start 0 the context has 'He went '; 'Paris is' is at 18, the letter case differs",
        ),
        ("Rome", -1, "the context does not contain this text; copy it from the context"),
        ("PARIS IS", -1, "'Paris is' is at 18, the letter case differs"),
    ],
)
def test_answers_that_do_not_stand_there(text: str, start: int, said: str) -> None:
    (what,) = answered(text, starts=[start])[1]
    assert what.startswith(said)


@given(
    context=st.text("ab\U0001f600é ", max_size=12), start=st.integers(-1, 12), text=st.text("ab\U0001f600é", min_size=1)
)
def test_an_answer_that_passes_is_cut_out_of_its_context(context: str, start: int, text: str) -> None:
    answers, faults = answered(text, starts=[start], context=context)
    place = answers["answer_start"][0]
    stands_there = place >= 0 and context[place : place + len(text)] == text
    assert stands_there == (faults == [])
    if start == -1:
        assert stands_there == (text in context)


def test_answers_need_a_context() -> None:
    columns = (Column(name="text", kind="text"), ASKED[2])
    row = {"text": "a", "answers": {"text": ["a"], "answer_start": [0]}}
    (fault,) = validate(row, columns)[1]
    assert fault.what == "answers need the text that contains them: a column 'context'"


@pytest.mark.parametrize(
    ("words", "tags", "said"),
    [
        (["a", "b"], ["O"], "2 words and 1 tag in the sentence 'a b'; give each word one tag"),
        (list("abcdef"), [], "6 words and 0 tags in the sentence 'a b c d e ...'"),
        ([], ["O"], "0 words and 1 tag in the sentence ''"),
    ],
)
def test_each_word_needs_one_tag(words: list[str], tags: list[str], said: str) -> None:
    (fault,) = validate({"words": words, "tags": tags}, TAGGED)[1]
    assert fault.what.startswith(said)
    assert (fault.column, fault.value) == ("tags", " ".join(tags))


def test_what_is_not_there_is_not_checked() -> None:
    for row in ({"words": ["a"], "tags": None}, {"words": [], "tags": []}):
        given = {name: value for name, value in row.items() if value is not None}
        assert validate(row, TAGGED) == (given, [])
    (fault,) = validate({"words": None, "tags": ["O"]}, TAGGED)[1]
    assert fault == Fault("missing words; write an empty sentence as []", "words")
    row = {"question": "?", "context": None, "answers": {"text": ["a"], "answer_start": [0]}}
    (fault,) = validate(row, ASKED)[1]
    assert fault.column == "context"


def test_rows_in_memory_are_checked() -> None:
    table = RowTable.from_rows(
        [
            {"question": "?", "context": CONTEXT, "answers": "France"},
            {"question": "?", "context": CONTEXT, "answers": ""},
            {"question": "?", "context": CONTEXT},
        ],
        columns=ASKED,
    )
    assert [row["answers"] for row in table] == [
        {"text": ["France"], "answer_start": [30]},
        {"text": [], "answer_start": []},
        None,
    ]
    with pytest.raises(BadRowsError) as error:
        RowTable.from_rows([{"words": ["a"], "tags": ["O", "O"]}, {"words": "a b", "tags": "O O"}], "mine", TAGGED)
    assert str(error.value).splitlines()[1:] == [
        "  mine:1: column 'tags': 'O O': 1 word and 2 tags in the sentence 'a'; give each word one tag"
    ]


def test_rows_of_files_are_checked(read: Callable[..., RowTable]) -> None:
    content = "question,context,answer\nWhere?,To Paris.,Paris\nWho?,To Paris.,\nWhy?,To Paris.,Rome\n"
    with pytest.raises(BadRowsError) as error:
        read(content, columns=ASKED, names={"answers": "answer"})
    assert str(error.value).splitlines()[1:] == [
        "  rows.csv:4: column 'answer': 'Rome': the context does not contain this text; copy it from the "
        "context exactly"
    ]
    table = read(content.replace("Rome", "[]"), columns=ASKED, names={"answers": "answer"})
    assert [row["answers"]["answer_start"] for row in table] == [[3], [], []]
    tagged = read("words,tags\nEU rejects,B-ORG O\n,\n", columns=TAGGED)
    assert list(tagged) == [
        {"words": ["EU", "rejects"], "tags": ["B-ORG", "O"], "line": 2},
        {"words": [], "tags": [], "line": 3},
    ]

"""Words, tags and answers in every spelling that a cell may have."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.cells import list_in_cell
from bert_tasks.data.columns import Column, as_rows
from bert_tasks.data.issues import CellError
from bert_tasks.data.kinds import KINDS

PARIS = {"text": ["Paris"], "answer_start": [17]}
BOTH = {"text": ["Paris", "in Paris"], "answer_start": [17, 14]}
NO_ANSWER: dict[str, list[Any]] = {"text": [], "answer_start": []}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (PARIS, PARIS),
        ({**BOTH, "answer_end": [22, 22]}, BOTH),
        ({"text": ("Paris",), "answer_start": (17,)}, PARIS),
        ({"text": "Paris", "answer_start": 17}, PARIS),
        ([{"text": "Paris", "answer_start": 17}, {"text": "in Paris", "answer_start": 14}], BOTH),
        ({"text": ["Paris", "in Paris"]}, {**BOTH, "answer_start": [-1, -1]}),
        (["Paris", "in Paris"], {**BOTH, "answer_start": [-1, -1]}),
        ("Paris", {**PARIS, "answer_start": [-1]}),
        (' "a" {b} ', {"text": [' "a" {b} '], "answer_start": [-1]}),
        ('["Paris"]', {**PARIS, "answer_start": [-1]}),
        ('{"text": ["Paris"], "answer_start": [17]}', PARIS),
        ('[{"text": "Paris", "answer_start": 17}]', PARIS),
        (NO_ANSWER, NO_ANSWER),
        ([], NO_ANSWER),
        ("", NO_ANSWER),
        ([""], NO_ANSWER),
        ("[]", NO_ANSWER),
        ({"text": [""], "answer_start": [-1]}, NO_ANSWER),
        (None, None),
    ],
)
def test_answers(value: Any, expected: dict[str, list[Any]] | None) -> None:
    assert KINDS["answers"].parse(value) == expected


@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.text(st.characters(codec="utf-8"))), starts=st.lists(st.integers(0, 99), min_size=9))
def test_canonical_values_stay_as_they_are(words: list[str], starts: list[int]) -> None:
    assert KINDS["words"].parse(KINDS["words"].parse(words)) == words
    texts = [word for word in words if word.strip() != ""][: len(starts)]
    answers = KINDS["answers"].parse({"text": texts, "answer_start": starts[: len(texts)]})
    assert KINDS["answers"].parse(answers) == answers
    assert answers["text"] == texts


def test_a_label_that_every_row_must_have_is_an_input() -> None:
    assert Column(name="x", kind="tags", required=False).is_label
    assert not Column(name="x", kind="tags").is_label
    assert not Column(name="x", kind="text", required=False).is_label
    with pytest.raises(ValueError, match="unknown kind 'lable'"):
        Column(name="x", kind="lable")


TEXTS = st.lists(st.text(max_size=6), max_size=5)


@given(names=TEXTS)
def test_python_lists_are_read_as_json_lists_are(names: list[str]) -> None:
    assert list_in_cell(repr(names)) == list_in_cell(json.dumps(names)) == names


@pytest.mark.parametrize(
    "cell", ["['a' 'b']", "[a, b]", "['a'", "['\\d']", "['\\U00110000']", "[f'a']", "[None]", "a", ""]
)
def test_other_cells_hold_no_list(cell: str) -> None:
    assert list_in_cell(cell) is None


@given(cell=st.text("[]'\"\\,ab1 ux{}", max_size=20).map(lambda text: f"[{text}"))
def test_no_cell_of_a_list_is_an_internal_error(cell: str) -> None:
    assert list_in_cell(cell) is None or isinstance(list_in_cell(cell), list)
    for column_kind in KINDS.values():
        with suppress(CellError):
            column_kind.parse(cell)


PAIR = [
    Column(name="text", kind="text"),
    Column(name="text_pair", kind="text"),
    Column(name="label", kind="label", required=False),
]


@pytest.mark.parametrize(
    ("data", "columns", "expected"),
    [
        ("a", PAIR[:1], [{"text": "a"}]),
        (("a", "b"), PAIR[:1], [{"text": "a"}, {"text": "b"}]),
        (("a", "b"), PAIR, [{"text": "a", "text_pair": "b"}]),
        ([("a", "b"), ("c", "d")], PAIR, [{"text": "a", "text_pair": "b"}, {"text": "c", "text_pair": "d"}]),
        ({"text": "a"}, PAIR[:1], [{"text": "a"}]),
    ],
)
def test_a_tuple_of_as_many_texts_as_a_row_has_is_one_row(
    data: Any, columns: list[Column], expected: list[dict[str, str]]
) -> None:
    assert list(as_rows(data, columns)) == expected

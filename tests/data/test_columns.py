"""Words, tags and answers in every spelling that a cell may have."""

import json
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.columns import BadValueError, Column, Kind, as_rows, canonical, column_of, list_in_cell


@pytest.mark.parametrize(("value", "expected"), [("56be4db0", "56be4db0"), (12, "12"), (0, "0"), ("", "")])
def test_ids(value: Any, expected: str) -> None:
    assert canonical(value, "id") == expected


@pytest.mark.parametrize("value", [None, 1.5, True, ["a"]])
def test_ids_that_are_none(value: Any) -> None:
    with pytest.raises(BadValueError, match=r"missing text|expected a text, not"):
        canonical(value, "id")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["New York", "", "\u200b"], ["New York", "", "\u200b"]),
        (("a",), ["a"]),
        ([], []),
        ("", []),
        ("EU rejects\tGerman  call", ["EU", "rejects", "German", "call"]),
        ('["New York", "\\u00e9", ""]', ["New York", "é", ""]),
        ("NA null", ["NA", "null"]),
    ],
)
def test_words(value: Any, expected: list[str]) -> None:
    assert canonical(value, "words") == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"missing words; write an empty sentence as \[\]"),
        (3, "expected a list of words, not a number"),
        ({"a": 1}, "expected a list of words, not an object"),
        (["a", 3], "word 2: expected a text, not a number"),
        (["a", None], "word 2: missing text"),
        (["\ud800"], r"word 1: half a character \(surrogate U\+D800\)"),
        ("['a' 'b']", r"a cell that starts with '\[' must be JSON"),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_words_that_are_none(value: Any, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        canonical(value, "words")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["B-PER", " O "], ["B-PER", "O"]),
        ("B-PER O", ["B-PER", "O"]),
        ('["B-PER", "O"]', ["B-PER", "O"]),
        ([0, 3], ["0", "3"]),
        ("[0, 3]", ["0", "3"]),
        ([], []),
        (None, None),
        ([None, None], None),
        ([-1, -1], None),
        ("[-1]", None),
        ([-100, None], None),
    ],
)
def test_tags(value: Any, expected: list[str] | None) -> None:
    assert canonical(value, "tags") == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["O", ""], "tag 2: empty; each word needs a tag"),
        (["O", " "], "tag 2: empty"),
        (["O", 1.0], "tag 2: a number, not a tag name"),
        (["O", ["O"]], "tag 2: expected a label name, not a list"),
        ([-1, "O"], r"tag 1 of 2 is hidden \(-1\); give all or none"),
        (["O", "O", None], r"tag 3 of 3 is hidden \(None\)"),
        (True, "expected a list of tags, not true/false"),
    ],
)
def test_tags_that_are_none(value: Any, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        canonical(value, "tags")


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
    assert canonical(value, "answers") == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "expected answers such as .*, not a number"),
        ({"answer": "Paris"}, "'text' is missing, there is 'answer'"),
        ({}, "'text' is missing, there is nothing"),
        ({"text": ["a", "b"], "answer_start": [1]}, "2 answer texts and 1 value of answer_start"),
        ({"text": ["a"], "answer_start": ["1"]}, "the answer_start of answer 1 is '1', expected a whole number"),
        ({"text": ["a"], "answer_start": [True]}, "the answer_start of answer 1 is True"),
        ({"text": ["a"], "answer_start": [-2]}, "the answer_start of answer 1 is -2"),
        ({"text": ["a"], "answer_start": [2**63]}, "the answer_start of answer 1 is 9223372036854775808"),
        (["a", ""], "answer 2 is '', expected a text; no answer at all is an empty list"),
        ([" "], "answer 1 is ' '"),
        ([7], "answer 1 is 7"),
        ("[citation needed]", r"a cell that starts with '\[' must be JSON"),
        ("{x", "a cell that starts with '{' must be JSON"),
        (["\udce9"], "byte 0xE9 is not valid here"),
    ],
)
def test_answers_that_are_none(value: Any, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        canonical(value, "answers")


@given(words=st.lists(st.text(st.characters(codec="utf-8"))), starts=st.lists(st.integers(0, 99), min_size=9))
def test_canonical_values_stay_as_they_are(words: list[str], starts: list[int]) -> None:
    assert canonical(canonical(words, "words"), "words") == words
    texts = [word for word in words if word.strip() != ""][: len(starts)]
    answers = canonical({"text": texts, "answer_start": starts[: len(texts)]}, "answers")
    assert canonical(answers, "answers") == answers
    assert answers["text"] == texts


@pytest.mark.parametrize(
    ("kind", "is_label"),
    [
        ("text", False),
        ("words", False),
        ("label", True),
        ("labels", True),
        ("number", True),
        ("tags", True),
        ("answers", True),
    ],
)
def test_which_columns_are_targets(kind: Kind, is_label: bool) -> None:
    assert Column(name="x", kind=kind, required=False).is_label == is_label
    assert not Column(name="x", kind=kind).is_label


def test_the_first_column_of_some_kinds() -> None:
    columns = [Column(name=name, kind=kind) for name, kind in (("a", "text"), ("b", "words"), ("c", "text"))]  # type: ignore[arg-type]  # a str, one of Kind
    assert column_of(columns, "words", "text") == columns[0]
    assert column_of(columns, "tags") is None


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
    for kind in get_args(Kind):
        with suppress(BadValueError):
            canonical(cell, kind)


def test_words_and_tags_may_be_python_lists() -> None:
    assert canonical("['EU', \"it's\"]", "words") == ["EU", "it's"]
    assert canonical("['B-ORG', 'O']", "tags") == ["B-ORG", "O"]
    with pytest.raises(BadValueError, match="must be JSON"):
        canonical("['EU' 'UN']", "words")


PAIR = [
    Column(name="text", kind="text"),
    Column(name="text_pair", kind="text"),
    Column(name="label", kind="label", required=False),
]


@pytest.mark.parametrize(
    ("given", "columns", "expected"),
    [
        ("a", PAIR[:1], [{"text": "a"}]),
        (("a", "b"), PAIR[:1], [{"text": "a"}, {"text": "b"}]),
        (("a", "b"), PAIR, [{"text": "a", "text_pair": "b"}]),
        ([("a", "b"), ("c", "d")], PAIR, [{"text": "a", "text_pair": "b"}, {"text": "c", "text_pair": "d"}]),
        ({"text": "a"}, PAIR[:1], [{"text": "a"}]),
    ],
)
def test_a_tuple_of_as_many_texts_as_a_row_has_is_one_row(
    given: Any, columns: list[Column], expected: list[dict[str, str]]
) -> None:
    assert list(as_rows(given, columns)) == expected

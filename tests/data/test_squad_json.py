"""SQuAD's nested JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import file_format
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError

COLUMNS = (
    Column(name="id", kind="id", required=False),
    Column(name="title", kind="text", required=False),
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)
Read = Callable[..., Rows]


def question(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"q{number}", "question": f"Question {number}?", **fields}


def squad(*questions: dict[str, Any], context: str = "To Paris, twice to Paris.") -> str:
    paragraphs = [{"context": context, "qas": list(questions)}]
    return json.dumps({"version": "v2.0", "data": [{"title": "Trips", "paragraphs": paragraphs}]})


PARIS = {"text": "Paris", "answer_start": 3}


def test_both_versions(read: Read) -> None:
    content = squad(
        question(1, answers=[PARIS, {"text": "Paris", "answer_start": 19}]),
        question(2, answers=[], is_impossible=True, plausible_answers=[PARIS]),
        question(3, answers=[PARIS], is_impossible=False),
        question(4, is_impossible=True),
    )
    table = read(content, "dev-v2.0.json", columns=COLUMNS)
    assert table[0] == {
        "id": "q1",
        "title": "Trips",
        "question": "Question 1?",
        "context": "To Paris, twice to Paris.",
        "answers": {"text": ["Paris", "Paris"], "answer_start": [3, 19]},
        "line": 1,
    }
    assert [len(row["answers"]["text"]) for row in table] == [2, 0, 1, 0]
    assert [row["line"] for row in table] == [1, 2, 3, 4]


def test_questions_without_answers_are_for_prediction(read: Read) -> None:
    content = squad(question(1), {"id": 7, "question": "?"})
    table = read(content, "test.json", columns=COLUMNS, require_labels=False)
    assert [row["id"] for row in table] == ["q1", "7"]
    assert "answers" not in table[0]
    with pytest.raises(DataError, match=r"test.json: no column 'answers'"):
        read(content, "test.json", columns=COLUMNS)


def test_problems_name_the_question(read: Read) -> None:
    content = squad(
        question(1, answers=[{"text": "Paris", "answer_start": 4}]),
        question(2, answers=[PARIS], is_impossible=True),
        question(3),
        {"answers": []},
        question(5, answers=[PARIS]),
    )
    with pytest.raises(RowIssues) as error:
        read(content, "train.json", columns=COLUMNS)
    assert str(error.value).splitlines()[1:] == [
        "  train.json:1: misplaced answer (question 'q1') in column 'answers': 'Paris'. The text is at 3.",
        "  train.json:2: is_impossible is true, so correct it or remove the answers (question 'q2')",
        "  train.json:3: missing answers (question 'q3') in column 'answers'. The row has 'title', 'context', "
        "'question', 'id'.",
        "  train.json:4: missing text in column 'question'. The row has 'title', 'context', 'answers'.",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"data": [{"paragraphs": [{]}]}', r"a.json:1: not valid JSON at column 28 \("),
        ('{"data": [\n{"paragraphs": [', r"a.json:2: not valid JSON at column 17 \("),
        ("", r"a.json:1: not valid JSON at column 1 \("),
        ('{"data": 5}', "a.json: no list 'data', which SQuAD's JSON has. Read one object a line"),
        ("[]", "a.json: no list 'data'"),
        ('{"data": [5]}', r"a.json: expected an object at data\[0\], not 5"),
        ('{"data": [{"paragraphs": 1}]}', r"a.json: no list 'data\[0\].paragraphs', which SQuAD's JSON has$"),
        ('{"data": [{"paragraphs": [{"qas": []}, {}]}]}', r"a.json: no list 'data\[0\].paragraphs\[1\].qas'"),
        ('{"data": []}', "a.json: no rows$"),
        ("[" * 100_000, r"a.json: JSON that cannot be read \(maximum recursion depth"),
    ],
)
def test_other_json(read: Read, content: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(content, "a.json", columns=COLUMNS, format="squad")


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (squad(question(1)), True),
        (json.dumps(json.loads(squad(question(1))), indent=2), True),
        ('\ufeff{"version": "1.1", "data": [{', True),
        ('{"name": "my \u00e9 set", "count": 3, "final": true, "data": [\n {', True),
        ('{"question": "?", "context": "c", "answers": []}', False),
        ('{"text": "a"}\n{"data": [{}]}', False),
        ('{"data": []}', False),
        ('[{"data": [{}]}]', False),
        ("", False),
    ],
)
def test_what_looks_like_squad(tmp_path: Path, start: str, expected: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text(start, encoding="utf-8")
    assert (file_format(None, path).name == "squad") is expected

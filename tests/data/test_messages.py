"""What is said of rows and files that cannot be used: each case of messages.txt."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError

TABLE = "messages.txt"
NOTES = "notes: "  # before each note on a table that was read
OF_PYTHON_3_13 = "'utf-16' codec can't decode bytes in position 0-1: Stream does not start with BOM"
# What a row has beside the value: the columns that a kind is read with.
BESIDE: dict[str, dict[str, Any]] = {
    "tags": {"words": ["a", "b"]},
    "spans": {"text": "Ada Bob"},
    "answers": {"context": "He went to Paris. Paris is in France."},
    "choice": {"choices": ["dry", "same", "same"]},
    "choice from 1": {"choices": ["dry", "same", "same"]},
}
# Further columns that a kind is read with, and that a row need not have.
UNFILLED: dict[str, tuple[tuple[str, str], ...]] = {"spans": (("words", "words"), ("tags", "tags"))}
KINDS = {"context": "text"}  # of columns that are not called as their kind is


def test_values(read: Callable[..., Rows], value_case: tuple[str, str, str]) -> None:
    kind, value, message = value_case
    beside = BESIDE.get(kind, {})
    columns = [Column(name=name, kind=KINDS.get(name, name)) for name in beside]
    columns += [Column(name=name, kind=other, required=False) for name, other in UNFILLED.get(kind, ())]
    columns.append(Column(name="x", kind=kind, required=kind not in UNFILLED))
    with pytest.raises(DataError) as error:
        read(json.dumps({**beside, "x": json.loads(value)}) + "\n", "rows.jsonl", columns=columns)
    heading, line = str(error.value).splitlines()
    assert heading.startswith("1 problem in the data. ")
    assert line == f"  rows.jsonl:1: {message}"


def test_files(read_case: Callable[..., Any], case: Any) -> None:
    if case.result[0].startswith(NOTES):
        assert [f"{NOTES}{note}" for note in read_case(case)[1]] == list(case.result)
        return
    with pytest.raises(DataError) as error:
        read_case(case)
    message = str(error.value).replace(OF_PYTHON_3_13, "UTF-16 stream does not start with BOM")
    assert message == "\n".join(case.result)
    assert error.value.exit_code == 3


def test_a_message_is_in_the_table_once(request: pytest.FixtureRequest) -> None:
    """A second case with the same input would say the same."""
    table = request.path.with_name(TABLE)
    heads = [line for line in table.read_text("utf-8").split("\n") if line and line[0] not in " #"]
    assert len(heads) == len(set(heads))

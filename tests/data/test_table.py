"""Tables from rows in memory."""

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

COLUMNS = (
    Column(name="text", kind="text"),
    Column(name="label", kind="label", required=False),
)


def test_rows_are_numbered_and_keep_their_values() -> None:
    table = RowTable.from_rows([{"text": "a"}, {"text": "NA"}])
    assert list(table) == [{"text": "a", "line": 1}, {"text": "NA", "line": 2}]
    assert len(table) == 2
    assert table.fingerprint != RowTable.from_rows([{"text": "a"}, {"text": "b"}]).fingerprint


def test_rows_with_columns_are_canonical() -> None:
    table = RowTable.from_rows([{"text": "a", "label": 1, "more": 2}, {"text": "b"}], columns=COLUMNS)
    assert list(table) == [{"text": "a", "label": "1", "line": 1}, {"text": "b", "label": None, "line": 2}]
    assert list(RowTable.from_rows([{"text": "a"}], columns=COLUMNS)) == [{"text": "a", "line": 1}]
    assert len(RowTable.from_rows([], columns=COLUMNS)) == 0


def test_something_else_than_a_row() -> None:
    with pytest.raises(DataError, match="rows:2: expected a dict"):
        RowTable.from_rows([{"text": "a"}, "b"])  # type: ignore[list-item]  # the wrong type is the point

"""Rows in memory, and the columns of all rows that were read."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column, Columns, HeadColumns
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows

COLUMNS = (
    Column(name="text", kind="text"),
    Column(name="label", kind="label", required=False),
)


def test_rows_are_numbered_and_keep_their_values() -> None:
    table = Rows.unchecked([{"text": "a"}, {"text": "NA"}])
    assert list(table) == [{"text": "a", "line": 1}, {"text": "NA", "line": 2}]
    assert len(table) == 2
    assert table.fingerprint != Rows.unchecked([{"text": "a"}, {"text": "b"}]).fingerprint


@pytest.mark.parametrize("source", ["file", "memory"])
@pytest.mark.parametrize(
    ("columns", "stored"),
    [(COLUMNS, {"text", "label"}), ({"topic": HeadColumns(columns=COLUMNS)}, {"_task.topic"})],
    ids=["one task", "several tasks"],
)
def test_no_column_has_a_space_in_its_name(source: str, columns: Columns, stored: set[str], tmp_path: Path) -> None:
    data: Any = [{"text": "a", "label": "x", "more words": 1}, {"text": 7, "label": "y"}]
    if source == "file":
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data), "utf-8")
        data = path
    table = read(data, columns, passthrough="all", skip_errors=True, cache_dir=tmp_path / "cache")
    names = set(table.rows.column_names)
    assert names == stored | {"line", "_record", "_reject"}
    assert [name for name in names if " " in name] == []

"""The rows that files and rows in memory become: each case of canonical_rows.txt."""

import json
from collections.abc import Callable
from typing import Any

TABLE = "canonical_rows.txt"
NOTES = "notes: "  # before each note on the table
EMPTY = "no rows"


def in_order(row: Any) -> str:
    """Returns a row as JSON, in which 1, 1.0 and true differ, with its columns by name."""
    return json.dumps(row, sort_keys=True)


def test_rows(read_case: Callable[..., Any], case: Any) -> None:
    rows, notes = read_case(case)
    expected = [line for line in case.result if not line.startswith(NOTES) and line != EMPTY]
    assert [in_order(row) for row in rows] == [in_order(json.loads(line)) for line in expected]
    assert [f"{NOTES}{note}" for note in notes] == [line for line in case.result if line.startswith(NOTES)]

"""Batches of rows: what a row says does not depend on the rows beside it, nor memory on their names."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bert_tasks.data.batch import MISSING, Batch, Batches, Record, in_batches
from bert_tasks.data.columns import Column, HeadColumns
from bert_tasks.data.conversion import Conversion
from bert_tasks.data.issues import RowIssue, RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.reading import valid_rows
from bert_tasks.data.shared_conversion import SharedConversion
from bert_tasks.data.split_column import of_split
from bert_tasks.errors import DataError

TEXT, LABEL = Column(name="text", kind="text"), Column(name="label", kind="label", required=False)
LABELS = Column(name="labels", kind="labels", required=False)


def records(rows: Sequence[dict[str, Any]]) -> Iterator[Record]:
    return (Record(number, row) for number, row in enumerate(rows, start=1))


def test_a_missing_cell_is_no_cell_without_a_value() -> None:
    batch = Batch.of(list(records([{"a": None}, {"b": 1}])))
    assert batch.cells == {"a": [None, MISSING], "b": [MISSING, 1]}
    assert batch.record(1).cells == {"b": 1}


def test_rows_with_names_of_their_own_end_a_batch_early() -> None:
    rows = [{"text": "a", **{f"key {number} {key}": key for key in range(60)}} for number in range(120)]
    batches = list(in_batches(records(rows)))
    assert sum(map(len, batches)) == 120
    assert all(len(batch) * len(batch.cells) < 250_000 for batch in batches)
    assert [row["text"] for row in valid_rows(rows, [TEXT])] == ["a"] * 120


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_row_does_not_depend_on_the_rows_of_its_batch(size: int) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "toxic": 1, "insult": 0},
        {"text": "b", "toxic": 0, "insult": 1},
        {"text": "c", "toxic,insult": "other"},
        {"text": "d", "toxic": 1},
        {"text": "own", "toxic,insult": "other", "toxic": 1, "insult": 1},
        {"sentences": ["e", "f"]},
    ]
    columns = [TEXT, Column(name="sentences", kind="texts", required=False), LABELS]
    conversion = Conversion(columns, ReadOptions(columns={"labels": "toxic,insult"}))
    found: list[dict[str, Any]] = []
    for batch in in_batches(records(rows), size):
        converted = conversion.convert(batch)
        found += map(converted.row, range(len(batch)))
    assert [row.get("labels") for row in found] == [["toxic"], ["insult"], ["other"], None, ["other"], None]
    assert [row["text"] for row in found] == ["a", "b", "c", "d", "own", "e\nf"]


def test_rows_outside_a_split_have_no_columns_in_it() -> None:
    rows = [{"text": "a", "label": "x", "split": "train"}, {"text": "b", "split": "test"}]
    split = of_split(Batches(None, in_batches(records(rows))), "split", "test", "rows")
    (batch,) = split.batches
    assert batch.cells == {"text": ["b"], "split": ["test"]}
    assert list(batch.lines) == [2]
    with pytest.raises(DataError, match="no column 'label'"):
        read_rows(rows, [TEXT, LABEL], ReadOptions(split_column="split"))


@pytest.mark.parametrize("order", [("mood", "topic"), ("topic", "mood")])
def test_labels_of_a_row_that_cannot_be_used_are_not_looked_at(order: tuple[str, str]) -> None:
    heads = {
        "mood": HeadColumns(columns=(TEXT, LABEL), labels=("x", "y")),
        "topic": HeadColumns(columns=(TEXT, LABEL), names={"text": "title", "label": "topic"}),
    }
    rows = [{"text": "a", "label": "x", "title": "b"}, {"text": "c", "label": "unknown", "title": 7}]
    conversion = SharedConversion({name: heads[name] for name in order}, skip_errors=True)
    (columns,) = conversion.checked(Batches(None, in_batches(records(rows))), "rows")
    assert columns["_reject"][0] is None
    assert "not a text in column 'title': 7" in columns["_reject"][1]


def test_skipped_rows_are_no_usable_rows() -> None:
    conversion = Conversion([TEXT, LABEL], require_labels=True, skip_errors=True)
    rows = [Record.skipped(1, "too few cells"), Record(2, {"text": 7, "label": "x"})]
    with pytest.raises(RowIssues, match="not a text"):
        list(conversion.checked(Batches(None, in_batches(rows)), "rows"))


def test_equal_problems_of_two_files_are_counted_together() -> None:
    both = RowIssues()
    for _ in range(2):
        one = RowIssues()
        one.add("rows.csv", RowIssue(what="torn", line=4))
        both.extend(one)
    assert str(both).splitlines()[1:] == ["  rows.csv:4: torn (2 times)"]


@pytest.mark.parametrize("rows", [[{1: "z"}], [{"text": "c", "label": "x", 1: "z"}, {"label": "x"}]])
def test_names_that_are_no_texts(rows: list[dict[Any, Any]]) -> None:
    with pytest.raises(DataError, match="text"):
        read_rows(rows, [TEXT, LABEL])

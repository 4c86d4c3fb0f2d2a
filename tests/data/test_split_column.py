"""A column with the split of each row: which rows training, evaluation and prediction read."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read
from bert_tasks.data.split_column import count_splits, is_split_column, rows_of_split, split_name
from bert_tasks.data.splits import DataSpec, Splits, load_splits, unread_splits
from bert_tasks.errors import DataError

COLUMNS = (Column(name="text", kind="text"), Column(name="label", kind="label"))
ROWS = ("a,x,train", "b,y,Train ", "c,x,dev", "d,,test", "e,y,train", "f,x,test")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Splits]:
    monkeypatch.chdir(tmp_path)

    def write_and_load(rows: Sequence[str] = ROWS, **fields: Any) -> Splits:
        Path("rows.csv").write_text("\n".join(["text,label,split", *rows, ""]))
        spec = DataSpec(**{"train": "rows.csv", "split_column": "split", **fields})
        return load_splits(spec, columns=COLUMNS, seed=1, cache_dir=tmp_path / "cache")

    return write_and_load


def texts(rows: Sequence[Any]) -> str:
    return "".join(row["text"] for row in rows)


def test_training_rows_validation_rows_and_no_test_rows(load: Callable[..., Splits]) -> None:
    splits = load()  # a test row lacks its label
    assert texts(list(splits.train)) == "abe"
    assert texts(list(splits.validation[""])) == "c"
    assert [row["line"] for row in splits.train] == [2, 3, 6]
    assert splits.train.notes == (
        "2 test rows (by the column 'split') left out of training. Evaluate the model on the same file with "
        "split_column='split'",
    )
    table = read("rows.csv", COLUMNS[:1], ReadOptions(split_column="split"))
    assert texts(list(table)) == "df"


def test_without_validation_rows_a_share_of_the_training_rows_validates(load: Callable[..., Splits]) -> None:
    train = [f"{letter},{'xy'[number % 2]},train" for number, letter in enumerate("abcdefgh")]
    rows = [*train, "i,x,test", "j,y,test"]
    splits = load(rows, validation_share=0.25)
    assert sorted(texts([*splits.train, *splits.validation[""]])) == list("abcdefgh")
    assert len(splits.validation[""]) == 2


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (ROWS, {"train": ("rows.csv", "more.csv")}, "divides the rows of one file, but train names 2 files"),
        ((*ROWS, "g,,train"), {}, "rows.csv:8: missing label"),
    ],
)
def test_columns_that_cannot_divide(
    rows: Sequence[str], fields: dict[str, Any], message: str, load: Callable[..., Splits]
) -> None:
    with pytest.raises(DataError, match=message):
        load(rows, **fields)


@pytest.mark.parametrize("fields", [{"train": "a.csv", "validation": "b.csv"}, {"dir": "a"}, {"dataset": "a"}])
def test_splits_belong_to_a_training_file(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="split_column divides the rows of train, but "):
        DataSpec(split_column="split", **fields)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("split", ("train", "dev", "test"), True),
        ("which", ("Training", "TESTING"), True),
        ("Set", ("val", "test"), True),
        ("which", ("val", "test"), False),
        ("split", ("train",), False),
        ("split", ("train", "other"), False),
        ("fold", ("0", "1"), False),
        ("transport", ("train", "bus"), False),
    ],
)
def test_which_columns_divide_rows(name: str, values: Sequence[str], expected: bool) -> None:
    assert is_split_column(name, values) is expected


def test_names_of_splits() -> None:
    assert [split_name(cell) for cell in ("TRAIN", "valid", " Dev ", "test", "trial", None, 1)] == [
        *("train", "validation", "validation", "test", None, None, None)
    ]
    assert count_splits(["dev", "train", "val", "train"], "split", "rows") == Counter(train=2, validation=2)


def test_rows_in_memory() -> None:
    rows = [{"text": "a", "split": "train"}, {"text": "b", "split": "dev"}]
    assert rows_of_split(rows, "split", "validation", "rows") == rows[1:]
    with pytest.raises(DataError, match="rows:3: no column 'split'"):
        rows_of_split([*rows, {"text": "c"}], "split", "train", "rows")


@pytest.mark.parametrize(
    ("column", "cells", "note"),
    [
        (
            "split",
            ("train", "test"),
            "rows.csv: the column 'split' divides the rows (test, train), but training",
        ),
        ("Fold", ("0", "1"), "rows.csv: the column 'Fold' seems to number folds, but it is not read"),
        ("split", ("even", "odd"), None),
        ("part", ("train", "test"), None),
        ("label", ("train", "test"), None),
    ],
)
def test_a_column_that_nothing_reads_is_noted(
    column: str, cells: Sequence[str], note: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text(f"text,{column}\na,{cells[0]}\nb,{cells[1]}\n")
    notes = unread_splits(DataSpec(train="rows.csv"))
    assert [text[: len(note)] for text in notes] == [note] if note is not None else notes == []
    assert unread_splits(DataSpec(train="rows.csv", columns={"label": column})) == []
    assert unread_splits(DataSpec(train="rows.csv", split_column=column)) == []

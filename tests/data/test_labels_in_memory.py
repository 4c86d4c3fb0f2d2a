"""Labels of DataFrames and of other rows in memory: those of the csv file that pandas read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

from bert_tasks.data.columns import Column
from bert_tasks.data.reading import read

TEXT = Column(name="text", kind="text")
LABEL = Column(name="label", kind="label", required=False)
LABELS = Column(name="labels", kind="labels", required=False)

FORMS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "frame": lambda frame: frame,
    "records": lambda frame: frame.to_dict("records"),
    "numpy": lambda frame: [dict(zip(frame, row, strict=True)) for row in frame.astype(object).to_numpy()],
    "dataset": lambda frame: Dataset.from_pandas(frame, preserve_index=False),
    "arrow": lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
}


def in_memory(data: Any, labels: tuple[str, ...] = (), column: Column = LABEL) -> list[Any]:
    return [row[column.name] for row in read(data, [TEXT, column], labels=labels)]


def csv_file(folder: Path, labels: list[str], name: str = "label") -> Path:
    path = folder / "rows.csv"
    path.write_text(f"text,{name}\n" + "".join(f"t{number},{label}\n" for number, label in enumerate(labels)))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("labels", "change"),
    [
        (["True", "False", "True"], None),
        (["2", "0", "2"], "float64"),
        (["2", "0", "2"], "Int64"),
        (["True", "False", "True"], "category"),
        (["2", "", "0", "2"], "dropna"),
    ],
)
def test_labels_are_those_of_the_file(form: str, labels: list[str], change: str | None, tmp_path: Path) -> None:
    frame = pd.read_csv(csv_file(tmp_path, labels))
    if change == "dropna":
        frame = frame.dropna()
    elif change is not None:
        frame["label"] = frame["label"].astype(change)  # type: ignore[call-overload]  # a name of any type
    path = csv_file(tmp_path, [label for label in labels if label])
    table = read(path, [TEXT, LABEL], labels=(), cache_dir=tmp_path)
    assert in_memory(FORMS[form](frame)) == [row["label"] for row in table]


@pytest.mark.parametrize(
    ("form", "labels", "spelled", "label"),
    [
        ("frame", ("true", "false"), "false", "false"),
        ("records", ("FALSE", "TRUE"), "TRUE", "TRUE"),
        ("numpy", ("0", "1"), "True", "1"),  # of a model that learned numbers
        ("dataset", ("1.0", "2.0"), "2.0", "2.0"),
        ("arrow", ("1", "2"), "2.0", "2"),
        ("frame", ("01", "02"), "02", "02"),
        ("dataset", ("0.50", "1"), "0.50", "0.50"),
    ],
)
def test_a_number_is_the_known_label_that_spells_it(
    form: str, labels: tuple[str, ...], spelled: str, label: str, tmp_path: Path
) -> None:
    path = csv_file(tmp_path, [spelled])
    assert in_memory(FORMS[form](pd.read_csv(path)), labels) == [label]
    assert [row["label"] for row in read(path, [TEXT, LABEL], labels=labels, cache_dir=tmp_path)] == [label]


@pytest.mark.parametrize("form", FORMS)
def test_sets_of_one_number_each(form: str, tmp_path: Path) -> None:
    path = csv_file(tmp_path, ["1", "0", "1"], "labels")
    table = read(path, [TEXT, LABELS], labels=(), cache_dir=tmp_path)
    labels = in_memory(FORMS[form](pd.read_csv(path)), column=LABELS)
    assert labels == [row["labels"] for row in table] == [["1"], ["0"], ["1"]]


def test_ids_beside_missing_ones_are_whole_numbers() -> None:
    rows = [{"text": "a", "label": 7.0}]
    assert in_memory(rows, column=Column(name="label", kind="id")) == ["7"]

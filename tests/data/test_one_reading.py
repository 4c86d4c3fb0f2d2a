"""A DataFrame, the files it is written to, and its rows as dicts are the same rows, or have the same faults."""

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import pytest

from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from bert_tasks.model.inputs import load_table
from bert_tasks.tasks import SequenceClassification, Task

# What a column of labels may hold; None: a missing cell.
LABELS: Mapping[str, list[Any]] = {
    "booleans": [True, False, True, False],
    "whole numbers": [1, 0, 1, -2],
    "floats of whole numbers": [1.0, 0.0, 1.0, -2.0],
    "floats": [1.5, 0.25, 1.0, 2.0],
    "whole numbers and a missing cell": [1, None, 0, 1],
    "names": ["NA", "null", "a", "b"],
    "names and a missing cell": ["a", None, "a", "b"],
    "names and an empty one": ["a", "", "a", "b"],
    "numbers as texts": ["1.0", "2.0", "1", "007"],
    "categories": pandas.Categorical(["x", "y", "x", "y"]),
}
TASKS: Mapping[str, Task] = {
    "label": SequenceClassification.of(),
    "number": SequenceClassification.of(problem_type="regression"),
}


def forms(frame: pandas.DataFrame, folder: Path, task: Task) -> dict[str, Callable[[], Rows]]:
    frame.to_csv(folder / "rows.csv", index=False)
    frame.to_parquet(folder / "rows.parquet")
    frame.to_json(folder / "rows.jsonl", orient="records", lines=True)
    frame.to_excel(folder / "rows.xlsx", index=False)
    files = [folder / f"rows.{extension}" for extension in ("csv", "parquet", "jsonl", "xlsx")]
    reading = {path.suffix: lambda path=path: read_rows(path, task.columns) for path in files}
    return {
        **reading,
        "frame": lambda: load_table(frame, task.columns),
        "rows": lambda: load_table(frame.to_dict("records"), task.columns),
    }


def outcome(read: Callable[[], Rows], first_line: int) -> list[Any]:
    """The rows, or the faults by their row: the kind of value, without what tells the types of cells apart."""
    try:
        return [{name: value for name, value in row.items() if name != "line"} for row in read()]
    except DataError as error:
        message = str(error)
    faults = re.findall(r":(\d+): (.*?) in column 'label'(?:: '?(.*?)'?\.|\.)", message)
    assert faults, message
    empty = ("nan", "None")
    return [(int(line) - first_line, reason, "" if value in empty else value) for line, reason, value in faults]


# Each kind of cells with one task. The other half of the product is slow.
PAIRS = [
    pytest.param(labels, task, marks=() if (row + column) % 2 == 0 else pytest.mark.slow)
    for (row, labels), (column, task) in product(enumerate(LABELS), enumerate(TASKS))
]


@pytest.mark.parametrize(("labels", "task"), PAIRS)
def test_a_frame_is_its_files(labels: str, task: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["w x", "y", "z", "NA"], "label": LABELS[labels]})
    by_source = {
        name: outcome(read, 2 if name in (".csv", ".xlsx") else 1)
        for name, read in forms(frame, tmp_path, TASKS[task]).items()
    }
    assert all(rows == by_source["frame"] for rows in by_source.values()), by_source

"""Rows out: what a table's cells hold, that readers take them back, and that a file appears whole or not at all."""

import csv
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from bert_tasks.data import writers as parquet_out
from bert_tasks.data.columns import Column
from bert_tasks.data.reading import read
from bert_tasks.data.writers import cell, json_line, vector_text, whole_file, write_npy, write_parquet, write_table
from bert_tasks.errors import UsageError

FORMULAS = ("=1+1", "+49 170", "-x", "@SUM(A1)", "\tx", "\rx", "'=1", "''-x", "-1+1", "-")
FORMULAS += ("\nx", "\n=1", "\uff1d1+1", "\uff0b1", "\uff0dx", "\uff20SUM(A1)", "'\uff1d1", "'\n")
PLAIN = ("-1.5", "+2", "1e-3", "-.5", "'tis", "a=b", "", " =1", "café")


def lines_of(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(map(json_line, rows)), "utf-8")
    return path


def table(folder: Path, rows: list[dict[str, Any]], *, raw: bool = False, delimiter: str = ",") -> list[list[str]]:
    write_table(lines_of(folder, rows), folder / "out.csv", delimiter, raw=raw)
    with (folder / "out.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_cells_of_a_table(tmp_path: Path) -> None:
    entities = [{"entity_group": "PER", "word": "Zoë; Ann", "start": 0}]
    row = {"labels": ["x", "y"], "scores": {"a": 0.5}, "entities": entities, "none": [], "null": None, "yes": True}
    names, values = table(tmp_path, [row])
    cells = dict(zip(names, values, strict=True))
    assert json.loads(cells["entities"]) == entities
    assert "Zoë" in cells["entities"]
    del cells["entities"]
    assert cells == {"labels": '["x", "y"]', "scores.a": "0.5", "none": "[]", "null": "", "yes": "true"}


def test_rows_with_different_fields(tmp_path: Path) -> None:
    answers = [
        {"label": "a", "scores": {"x": 0.5}},
        {"label": 'b,"c"\nd', "labels": ["x", "y"], "scores": {"x": 0.25, "y": 0.75}},
    ]
    assert table(tmp_path, answers) == [
        ["label", "scores.x", "labels", "scores.y"],
        ["a", "0.5", "", ""],
        ['b,"c"\nd', "0.25", '["x", "y"]', "0.75"],
    ]
    assert table(tmp_path, []) == []


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_formulas_are_marked_and_numbers_are_not(delimiter: str, tmp_path: Path) -> None:
    rows = [{"=name": text, "score": -0.5} for text in (*FORMULAS, *PLAIN)]
    header, *cells = table(tmp_path, rows, delimiter=delimiter)
    assert header == ["'=name", "score"]
    assert [text for text, _ in cells] == [*(f"'{text}" for text in FORMULAS), *PLAIN]
    assert {score for _, score in cells} == {"-0.5"}
    assert [text for text, _ in table(tmp_path, rows, raw=True, delimiter=delimiter)[1:]] == [*FORMULAS, *PLAIN]


def test_marks_can_be_taken_off_again() -> None:
    """The rule of the documentation: a text that begins with marks and a formula sign loses one mark."""
    for text in (*FORMULAS, *PLAIN):
        written = cell(text, raw=False)
        bare = written.lstrip("'")
        marked = written.startswith("'") and bare != "" and bare[0] in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"
        assert (written[1:] if marked else written) == text


@pytest.mark.parametrize("raw", [False, True])
def test_our_readers_take_lists_back(raw: bool, tmp_path: Path) -> None:
    rows = [
        {"words": ["=1", "a;b", "c d", "x,y", '"', "é"], "tags": ["O", "B-x", "O", "O", "O", "O"], "labels": ["p;q"]},
        {"words": [], "tags": [], "labels": []},
        {"words": ["one"], "tags": ["O"], "labels": ["p", "q"]},
    ]
    write_table(lines_of(tmp_path, rows), tmp_path / "out.csv", ",", raw=raw)
    columns = [Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False)]
    columns += [Column(name="labels", kind="labels", required=False)]
    records = list(read(tmp_path / "out.csv", columns))
    assert [{name: row[name] for name in rows[0]} for row in records] == rows


def test_parquet_keeps_kinds(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "mixed": 1, "label": "a", "scores": {"x": 0.5}, "words": ["a"], "none": None, "empty": {}, "n": 1},
        {
            "id": 2,
            "mixed": "two",
            "label": "=b",
            "scores": {"x": 1.0},
            "words": [],
            "none": None,
            "empty": {},
            "n": 1.5,
        },
        {"id": 3, "new": True, "huge": 2**70},
    ]
    write_parquet(lines_of(tmp_path, rows), tmp_path / "out.parquet")
    records = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in records] == [1, 2, 3]
    assert [row["mixed"] for row in records] == ["1", "two", None]
    assert [row["label"] for row in records] == ["a", "=b", None]
    assert [row["scores"] for row in records] == [{"x": 0.5}, {"x": 1.0}, None]
    assert [row["words"] for row in records] == [["a"], [], None]
    assert [row["n"] for row in records] == [1.0, 1.5, None]
    assert (records[2]["new"], records[2]["huge"], records[0]["none"]) == (True, str(2**70), None)


def test_parquet_rounds_no_whole_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of two blocks may have a common type that cannot hold all of them."""
    monkeypatch.setattr(parquet_out, "_BLOCK_ROWS", 1)
    write_parquet(lines_of(tmp_path, [{"n": 1}, {"n": 1.5}, {}]), tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [{"n": 1.0}, {"n": 1.5}, {"n": None}]
    with pytest.raises(UsageError, match=r"out\.parquet: a column has no common type .*Write a \.jsonl file"):
        write_parquet(lines_of(tmp_path, [{"n": 2**60 + 1}, {"n": 0.5}]), tmp_path / "out.parquet")


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "answers.csv"
    output.write_text("an earlier result")
    told = r"answers\.csv: cannot write the output \(No such device\)"
    with pytest.raises(UsageError, match=told), whole_file(output):
        raise OSError(19, "No such device")
    assert output.read_text() == "an earlier result"
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process may have so many bytes, as after ``ulimit -f``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_text(lines: Path, target: Path) -> None:
    with whole_file(target) as file:
        file.write(lines.read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_text),
        ("rows.parquet", write_parquet),
        ("rows.csv", lambda lines, target: write_table(lines, target, ",", raw=False)),
        ("rows.npy", lambda lines, target: write_npy(lines, target, "vector", 100)),
    ],
)
def test_a_limit_of_the_size_of_files_is_told(name: str, write: Callable[[Path, Path], None], tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal((1000, 100)).astype(np.float32)
    lines = lines_of(tmp_path, [{"vector": vector_text(row)} for row in numbers])
    told = rf"{name}: cannot write the output \(files may not be larger here \(ulimit -f, .*\) after \d+ bytes\)"
    with pytest.raises(UsageError, match=told), largest_file(2**17):
        write(lines, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [lines.name]

"""Rows that several tasks read together: one table with the columns of each, and what each task finds in it."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column, HeadColumns
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read, valid_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits, row_keys, sampled, train_validation_split

TOPIC = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
SLOTS = (Column(name="words", kind="words"), Column(name="text", kind="text", required=False))
SLOTS += (Column(name="tags", kind="tags", required=False),)
SETS = (Column(name="text", kind="text"), Column(name="labels", kind="labels", required=False))
HEADS = {
    "slots": HeadColumns(columns=SLOTS, names={"tags": "slots"}),
    "topic": HeadColumns(columns=TOPIC, names={"text": "body", "label": "topic"}),
}
ALONE: Mapping[str, tuple[Sequence[Column], Mapping[str, str]]] = {
    name: (head.columns, head.names) for name, head in HEADS.items()
}


def made_rows(count: int) -> list[dict[str, Any]]:
    """Rows that have all columns, or lack the label or all columns of a task in turn."""
    rows = []
    for i in range(count):
        row = {"body": f"text {i}", "topic": f"t{i % 3}", "words": ["w", str(i)], "slots": ["O", f"B-{i % 2}"]}
        absent = [(), ("topic",), ("body", "topic"), ("words", "slots"), ("slots",)][i % 5]
        rows.append({name: value for name, value in row.items() if name not in absent})
    return rows


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return path
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            cells = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            writer.writerow(cells)
    return path


def without_none(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize("count", [5, 2503])  # of one and of several batches of the file
def test_each_task_has_the_rows_that_it_reads_alone(count: int, tmp_path: Path) -> None:
    rows = made_rows(count)
    table = read(written(tmp_path / "a.jsonl", rows), HEADS)
    assert len(table) == count
    for name, needed in (("slots", "words"), ("topic", "body")):
        numbers = [number for number, row in enumerate(rows, start=1) if needed in row]
        own = written(tmp_path / f"{name}.jsonl", [row for row in rows if needed in row])
        columns, names = ALONE[name]
        alone = read(own, columns, ReadOptions(columns=names), require_labels=False)
        of_head = table.of_head(name)
        assert [{**row, "line": line} for row, line in zip(alone, numbers, strict=True)] == list(of_head)
        label = HEADS[name].names["tags" if name == "slots" else "label"]
        labelled = [number for number in numbers if label in rows[number - 1]]
        assert of_head.labelled(columns).rows.values("line") == labelled
        assert of_head.source == table.source


def test_parts_of_a_table_have_the_rows_of_their_tasks() -> None:
    table = read(made_rows(40), HEADS, require_labels=False)
    part = table.select([7, 3, 1, 2, 30])
    assert part.of_head("topic").rows.values("line") == [4, 2, 31]  # 8 and 3 have no text
    assert part.of_head("slots").rows.values("line") == [8, 2, 3, 31]
    joined = Rows.joined([part, read(made_rows(2), {"topic": HEADS["topic"]}, require_labels=False)])
    assert joined.of_head("topic").rows.values("text") == ["text 3", "text 1", "text 30", "text 0", "text 1"]
    fingerprints = {each.fingerprint for each in (table, part, *(each.of_head("topic") for each in (table, part)))}
    assert len(fingerprints) == 4


def test_a_task_that_no_row_has_the_columns_of_has_no_rows() -> None:
    table = read([{"body": "a", "topic": "b"}], HEADS, require_labels=False)
    assert len(table.of_head("slots")) == len(table.of_head("slots").labelled(SLOTS)) == 0


def test_rows_are_divided_once_for_all_tasks() -> None:
    rows = made_rows(60)
    rows += [{"body": row["body"]} for row in rows if "body" in row][:9]  # texts that occur twice
    table = read(rows, HEADS, require_labels=False)
    train, validation = train_validation_split(table, HEADS, 0.3, seed=1)
    lines = [set(part.rows.values("line")) for part in (train, validation)]
    assert lines[0] | lines[1] == set(range(1, len(rows) + 1))
    assert not lines[0] & lines[1]
    for name in HEADS:
        of_head = [set(part.of_head(name).rows.values("line")) for part in (train, validation)]
        assert all(own <= of_all for own, of_all in zip(of_head, lines, strict=True))
    few = sampled(table, HEADS, 10)
    assert len(few) == 10
    labelled = Splits(train=train, validation={"": validation}).labelled("topic", HEADS["topic"])
    assert "label" in labelled.train.rows.column_names
    assert None not in labelled.validation[""].rows.values("label")


def test_rows_are_the_same_if_all_tasks_read_the_same_texts() -> None:
    rows = [{"body": "A", "words": ["x"]}, {"body": " a ", "words": ["X"], "topic": "b"}, {"body": "a"}, {"body": " "}]
    keys = row_keys(read(rows, HEADS, require_labels=False), HEADS)
    assert keys["text"][0] == keys["text"][1]
    assert len(set(keys["text"].tolist())) == 3
    assert keys["empty"].tolist() == [False, False, False, True]


def test_a_separator_is_that_of_all_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,labels\na,x|y\n", "utf-8")
    heads = {"kinds": HeadColumns(columns=SETS)}
    table = read(tmp_path / "a.csv", heads, ReadOptions(label_separator="|"))
    assert table.of_head("kinds").rows.values("labels") == [["x", "y"]]


def test_notes_on_rows_are_kept_and_stand_once(tmp_path: Path) -> None:
    rows = [{"body": "a\x92s", "words": ["a"]}, {"body": "b", "text": "a\x92s"}]
    heads = {**HEADS, "again": HEADS["topic"]}
    notes = read(written(tmp_path / "a.jsonl", rows), heads, require_labels=False).notes
    (note,) = notes
    assert "2 of 2 rows hold control characters" in note
    assert "(line 1, 2)" in note


def test_an_unknown_label_of_a_task_is_never_skipped(tmp_path: Path) -> None:
    heads = {"topic": HeadColumns(columns=TOPIC, labels=("low", "high")), "slots": HEADS["slots"]}
    rows = [{"text": "a", "label": "low"}, {"text": "b", "label": "hihg"}, {"text": 3, "label": "low"}]
    with pytest.raises(RowIssues, match=r"a\.jsonl:2: unknown label in column 'label': 'hihg'") as caught:
        read(written(tmp_path / "a.jsonl", rows), heads, skip_errors=True)
    assert caught.value.count == 1
    skipped = read(written(tmp_path / "b.jsonl", [rows[0], rows[2]]), heads, skip_errors=True)
    assert len(skipped.without_errors()) == 1


def test_labels_of_a_task_may_be_hidden_or_spelt_as_numbers() -> None:
    """As for one task whose labels are known."""
    heads = {"topic": HeadColumns(columns=TOPIC, labels=("0", "1"))}
    rows = [{"text": "a", "label": 1.0}, {"text": "b", "label": "-"}, {"text": "c", "label": False}]
    labels = read(rows, heads, require_labels=False).of_head("topic").rows.values("label")
    assert labels == ["1", None, "0"]


def test_rows_of_a_table_are_rows_of_its_tasks() -> None:
    rows = made_rows(10)
    table = read(rows, HEADS, require_labels=False)
    again = read(without_none(list(table)), HEADS, require_labels=False)
    assert list(again) == list(table)
    assert list(valid_rows(rows, HEADS)) == list(valid_rows(table, HEADS))

"""A kind, a format, a layout and a relation are one class or function each: toys of them pass through ``read``."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from bert_tasks.data import layouts, relations
from bert_tasks.data.batch import Batch, Batches, Cells
from bert_tasks.data.checks import check_splits, data_report
from bert_tasks.data.columns import Column
from bert_tasks.data.formats import Format, base, register_format
from bert_tasks.data.issues import CellError, RowIssue, RowIssues
from bert_tasks.data.kinds import KINDS, LabelKind, Number, Words
from bert_tasks.data.layouts import Names, Step
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import RowLines
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits, row_strata, train_validation_split
from bert_tasks.errors import DataError

Read = Callable[..., Rows]
TEXT, LABEL = Column(name="text", kind="text"), Column(name="label", kind="label", required=False)

SIZES = "S", "M", "L"


@pytest.fixture
def sized() -> Iterator[tuple[Column, ...]]:
    """The columns of a task that learns a kind of its own."""

    class Size(LabelKind):
        """A size of clothes, stored as a number."""

        name = "size"

        def _parse(self, value: Any, separator: str) -> int | None:
            if value is None or value == "":
                return None
            if str(value).upper() not in SIZES:
                raise CellError("not a size", f"Write one of {', '.join(SIZES)}.")
            return SIZES.index(str(value).upper())

        def arrow_type(self) -> Any:
            return pyarrow.int64()

        def classes(self, value: Any) -> Sequence[str]:
            return (SIZES[value],)

        def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
            return [self.classes(value) for value in values]

    yield TEXT, Column(name="size", kind="size", required=False)
    del KINDS["size"]


def test_a_kind(read: Read, sized: tuple[Column, ...]) -> None:
    content = "text,size\n" + "".join(f"text {number},{'sml'[number % 3]}\n" for number in range(60))
    table = read(content, columns=sized)
    assert table[2] == {"text": "text 2", "size": 2, "line": 4}
    assert str(table.rows.table().schema.field("size").type) == "int64"
    assert row_strata(table, sized)[:3] == [("S",), ("M",), ("L",)]
    train, validation = train_validation_split(table, sized, 0.2, seed=1)
    assert {row["size"] for row in validation} == {0, 1, 2}
    splits = Splits(train=train, validation={"": validation})
    assert check_splits(splits, columns=sized) == ()
    assert sum(data_report(splits, columns=sized).splits[0].label_counts.values()) == len(train)


def test_messages_of_a_kind(read: Read, sized: tuple[Column, ...]) -> None:
    with pytest.raises(RowIssues) as error:
        read("text,size\na,s\nb,XL\nc,\n", columns=sized)
    assert str(error.value).splitlines()[1:] == [
        "  rows.csv:3: not a size in column 'size': 'XL'. Write one of S, M, L.",
        "  rows.csv:4: missing size in column 'size': ''.",
    ]
    with pytest.raises(DataError, match="no column 'size'"):
        read("text\na\n", columns=sized)
    assert list(read("text\na\n", columns=sized, require_labels=False)) == [{"text": "a", "line": 2}]


class ColumnLines(Format):
    """Lines such as ``text|fine|poor``, each of which is a column."""

    def batches(self, lines: RowLines, path: Path, options: ReadOptions, most: int) -> Batches:
        cells: Cells = {}
        for line in lines:
            name, *values = line.rstrip("\n").split("|")
            cells[name] = list(values)
        count = max(map(len, cells.values()))
        return Batches(tuple(cells), iter([Batch(lines=range(1, count + 1), cells=cells)]))


@pytest.fixture
def column_lines() -> Iterator[None]:
    register_format(ColumnLines(name="columns", extensions=(".columns",), columns={"text": "review"}))
    yield
    del base._FORMATS["columns"]


@pytest.mark.usefixtures("column_lines")
def test_a_format(read: Read) -> None:
    expected = [{"text": "fine", "label": "good", "line": 1}, {"text": "poor", "label": "bad", "line": 2}]
    assert list(read("review|fine|poor\nlabel|good|bad\n", "rows.columns")) == expected
    assert list(read("review|fine|poor\nlabel|good|bad\n", "rows.data", format="columns")) == expected
    with pytest.raises(RowIssues, match=r"rows\.columns:2: missing label in column 'label': ''"):
        read("review|fine|poor\nlabel|good|\n", "rows.columns")
    with pytest.raises(DataError, match=r"rows\.columns: no column 'review'"):
        read("text|fine\nlabel|good\n", "rows.columns")


def names_in_capitals(names: Names, present: Collection[str]) -> Iterator[Step]:
    """Reads a column whose name the source has in capitals."""
    for column in names.columns:
        name = names.source_of(column)
        if name not in present and name.upper() in present:
            yield partial(_move, name.upper(), name)


def _move(old: str, new: str, cells: Cells) -> list[RowIssue]:
    cells[new] = cells.pop(old)
    shouted = [row for row, cell in enumerate(cells[new]) if cell == cell.upper()]
    return [RowIssue(what="were all in capitals", row=row, severity="note") for row in shouted]


@pytest.fixture
def capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LAYOUTS", [*layouts.LAYOUTS, names_in_capitals])


@pytest.mark.usefixtures("capitals")
def test_a_layout_of_a_label(read: Read) -> None:
    table = read("text,LABEL\na,x\nb,Y\n", require_labels=False)
    assert [row["label"] for row in table] == ["x", "Y"]
    assert table.notes == ("1 of 2 rows were all in capitals (line 3)",)


@pytest.mark.usefixtures("capitals")
def test_a_layout_of_columns_that_every_row_needs(read: Read, tmp_path: Path) -> None:
    expected = [("a", "x"), ("b", "Y")]
    for content, name in [
        ("TEXT,LABEL\na,x\nb,Y\n", "rows.csv"),
        ('{"TEXT": "a", "LABEL": "x"}\n{"TEXT": "b", "LABEL": "Y"}\n', "rows.jsonl"),
    ]:
        assert [(row["text"], row["label"]) for row in read(content, name)] == expected
    parquet.write_table(pyarrow.table({"TEXT": ["a", "b"], "LABEL": ["x", "Y"]}), tmp_path / "rows.parquet")
    table = read_rows(tmp_path / "rows.parquet", (TEXT, LABEL), cache_dir=tmp_path / "cache")
    assert [(row["text"], row["label"]) for row in table] == expected


def count_of_words(count: float, words: Sequence[str], cell: Any) -> float:
    """Returns the count, which must be that of the words."""
    if count != len(words):
        raise CellError("a wrong count", f"Write {len(words)}.")
    return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Column, ...]:
    """The columns of a task that checks a number against its words."""
    monkeypatch.setattr(relations, "RELATIONS", [*relations.RELATIONS, (Number, Words, count_of_words)])
    return Column(name="words", kind="words"), Column(name="count", kind="number", required=False)


def test_a_relation(read: Read, counted: tuple[Column, ...]) -> None:
    table = read("words,count\na b,2\n,0\n", columns=counted)
    assert [(row["words"], row["count"]) for row in table] == [(["a", "b"], 2.0), ([], 0.0)]
    with pytest.raises(RowIssues) as error:
        read("words,count\na b,2\na b c,2\na,x\n", columns=counted)
    assert str(error.value).splitlines()[1:] == [
        "  rows.csv:3: a wrong count in column 'count': 2.0. Write 3.",
        "  rows.csv:4: not a number in column 'count': 'x'.",
    ]

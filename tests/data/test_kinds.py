"""A column kind is one class: a toy kind passes through reading, validation, table, split and messages."""

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import bert_tasks
from bert_tasks.data.checks import check_splits, data_report
from bert_tasks.data.columns import Column
from bert_tasks.data.kinds import KINDS, ColumnKind
from bert_tasks.data.problems import RowError, RowErrors
from bert_tasks.data.splits import Splits, row_strata, train_validation_split
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

SIZES = "S", "M", "L"
CONTENT = "text,size\n" + "".join(f"text {number},{'sml'[number % 3]}\n" for number in range(60))


@pytest.fixture
def columns() -> Iterator[tuple[Column, ...]]:
    class Size(ColumnKind):
        """A size of clothes, stored as a number."""

        name = "size"
        is_label = True
        strata_name = "sizes"

        def _parse(self, value: Any, separator: str) -> int | None:
            if value is None or value == "":
                return None
            if str(value).upper() not in SIZES:
                raise RowError("not a size", f"Write one of {', '.join(SIZES)}.")
            return SIZES.index(str(value).upper())

        def arrow_type(self) -> Any:
            return KINDS["choice"].arrow_type()

        def labels_of(self, value: Any) -> Sequence[str]:
            return (SIZES[value],)

        def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
            return [self.labels_of(value) for value in values]

    yield Column(name="text", kind="text"), Column(name="size", kind="size", required=False)
    del KINDS["size"]


def test_a_toy_kind_needs_no_other_edit(read: Callable[..., RowTable], columns: tuple[Column, ...]) -> None:
    table = read(CONTENT, columns=columns)
    assert table[2] == {"text": "text 2", "size": 2, "line": 4}
    assert str(table.rows.table().schema.field("size").type) == "int64"
    assert row_strata(table, columns)[:3] == [("S",), ("M",), ("L",)]
    train, validation = train_validation_split(table, columns, 0.2, seed=1)
    assert {row["size"] for row in validation} == {0, 1, 2}
    splits = Splits(train=train, validation={"": validation})
    assert check_splits(splits, columns=columns) == ()
    assert sum(data_report(splits, columns=columns).splits[0].label_counts.values()) == len(train)
    with pytest.raises(RowErrors) as error:
        read("text,size\na,s\nb,XL\nc,\n", columns=columns)
    assert str(error.value).splitlines()[1:] == [
        "  rows.csv:3: not a size in column 'size': 'XL'. Write one of S, M, L.",
        "  rows.csv:4: missing size in column 'size': ''.",
    ]
    with pytest.raises(DataError, match="no column 'size'"):
        read("text\na\n", columns=columns)


def test_no_other_module_compares_names_of_kinds() -> None:
    folder = Path(bert_tasks.__file__).parent
    compared = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            texts = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)} if parts else set()
            asks = any(isinstance(operand, ast.Attribute) and operand.attr == "kind" for operand in parts)
            if asks and texts & set(KINDS):
                compared.append(f"{path.relative_to(folder)}:{node.lineno}")
    assert compared == []


@pytest.mark.parametrize(
    ("name", "cells"), [("label", ["x ", "\tx", "x"]), ("labels", [["x", " y"], " x;y ", ["x", "y"]])], ids=str
)
def test_white_space_around_labels_is_removed_and_counted(
    read: Callable[..., RowTable], name: str, cells: list[Any]
) -> None:
    content = "".join(json.dumps({"text": "a", name: cell}) + "\n" for cell in cells)
    table = read(content, "rows.jsonl", columns=(Column(name="text", kind="text"), Column(name=name, kind=name)))
    assert [row[name] for row in table] == [table[2][name]] * 3
    assert table.notes == ("2 of 3 rows had white space around a label, which was removed (line 1, 2)",)


def test_texts_that_were_decoded_wrongly_are_counted(read: Callable[..., RowTable]) -> None:
    """Windows has quotes and dashes at bytes that are controls in latin-1."""
    content = b"text\nit\x92s\nplain\n"
    columns = (Column(name="text", kind="text"),)
    assert read(content, columns=columns, encoding="cp1252").notes == ()
    remark = "hold control characters from U+0080 to U+009F, so the encoding may be 'cp1252'"
    assert read(content, columns=columns, encoding="latin-1").notes == (f"1 of 2 rows {remark} (line 2)",)

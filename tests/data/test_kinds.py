"""Kinds of columns: what their classes have, and what is noted on the cells (``test_toys`` adds a kind)."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bert_tasks
from bert_tasks.data.columns import Column
from bert_tasks.data.kinds import KINDS
from bert_tasks.data.rows import Rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_small_class_without_flags(kind: str) -> None:
    """What is true of some kinds alone is a class of its own, such as ``LabelKind``."""
    members = {name: getattr(KINDS[kind], name) for name in dir(KINDS[kind])}
    assert [name for name, value in members.items() if isinstance(value, bool)] == []
    public = [name for name in members if not name.startswith("_")]
    assert len(public) <= 8, public


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
    read: Callable[..., Rows], name: str, cells: list[Any]
) -> None:
    content = "".join(json.dumps({"text": "a", name: cell}) + "\n" for cell in cells)
    table = read(content, "rows.jsonl", columns=(Column(name="text", kind="text"), Column(name=name, kind=name)))
    assert [row[name] for row in table] == [table[2][name]] * 3
    assert table.notes == ("2 of 3 rows had white space around a label, which was removed (line 1, 2)",)


def test_texts_that_were_decoded_wrongly_are_counted(read: Callable[..., Rows]) -> None:
    """Windows has quotes and dashes at bytes that are controls in latin-1."""
    content = b"text\nit\x92s\nplain\n"
    columns = (Column(name="text", kind="text"),)
    assert read(content, columns=columns, encoding="cp1252").notes == ()
    remark = "hold control characters from U+0080 to U+009F, so the encoding may be 'cp1252'"
    assert read(content, columns=columns, encoding="latin-1").notes == (f"1 of 2 rows {remark} (line 2)",)

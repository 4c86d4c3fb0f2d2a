"""Kinds of columns: what their classes have, and what is noted on the cells (``test_toys`` adds a kind)."""

import ast
from pathlib import Path

import bert_tasks
from bert_tasks.data.kinds import KINDS


def test_no_other_module_compares_names_of_kinds() -> None:
    folder = Path(bert_tasks.__file__).parent
    compared = []
    for path in folder.rglob("*.py"):
        text = path.read_text("utf-8")
        if ".kind" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            texts = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)} if parts else set()
            asks = any(isinstance(operand, ast.Attribute) and operand.attr == "kind" for operand in parts)
            if asks and texts & set(KINDS):
                compared.append(f"{path.relative_to(folder)}:{node.lineno}")
    assert compared == []

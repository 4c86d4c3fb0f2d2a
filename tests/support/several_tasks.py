"""Owns tasks for models of several tasks, and rows that hold the inputs and the labels of all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from support.task_examples import CLASSES, LABELS, SENTENCES

Rows = list[dict[str, Any]]

TOPIC: dict[str, Any] = {"task": "sequence-classification", "labels": ["low", "mid", "high"], "max_length": 32}
SLOTS: dict[str, Any] = {"task": "token-classification", "labels": list(LABELS), "max_length": 32, "doc_stride": 6}
TASKS: dict[str, dict[str, Any]] = {
    "topic": {**TOPIC, "columns": {"label": "topic"}},
    "slots": {**SLOTS, "columns": {"tags": "slots"}},
}


def renamed(rows: Sequence[Mapping[str, Any]], **names: str) -> Rows:
    return [{names.get(name, name): value for name, value in row.items()} for row in rows]


def together(*tables: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows with the cells of a row of each table."""
    return [{name: value for row in rows for name, value in row.items()} for rows in zip(*tables, strict=True)]


ROWS = together(renamed(CLASSES, label="topic"), renamed(SENTENCES, tags="slots"))

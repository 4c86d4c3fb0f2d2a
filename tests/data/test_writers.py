"""Rows out: what a table's cells hold."""

import csv
import json
from pathlib import Path

from bert_tasks.data.writers import write_rows


def test_cells_of_a_table(tmp_path: Path) -> None:
    entities = [{"entity_group": "PER", "word": "Zoë; Ann", "start": 0}]
    row = {"labels": ["x", "y"], "scores": {"a": 0.5}, "entities": entities, "none": []}
    write_rows([row], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (cells,) = csv.DictReader(file)
    assert json.loads(cells["entities"]) == entities
    assert "Zoë" in cells["entities"]
    assert (cells["labels"], cells["scores.a"], cells["none"]) == ("x;y", "0.5", "")

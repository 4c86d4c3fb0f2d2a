"""The notebooks run from the first cell to the last one, and show what they are stored with.

`jupyter nbconvert --to notebook --execute --inplace notebooks/first_model.ipynb` stores the outputs of a notebook.
"""

import ast
import html
import json
import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from support.documents import agrees

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IDS = [path.name for path in NOTEBOOKS]


def cells(notebook: Path, cell_type: str) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == cell_type]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def stored(cell: dict[str, Any]) -> str:
    """The HTML that a cell is stored with: that of its last expression."""
    return "".join(cell["outputs"][-1]["data"]["text/html"])


def headings(report: str) -> list[str]:
    return re.findall(r"<h2.*?</h2>", html.unescape(report))


def run_cell(code: str, name: str, module: types.ModuleType) -> str:
    """Runs a cell, and returns the HTML of its last expression. Raises what the cell raises."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), vars(module))
    if last is None:
        return ""
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval"), vars(module))
    return str(value._repr_html_())


def test_the_first_notebook_is_tested() -> None:
    assert IDS == ["first_model.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=IDS)
def test_notebook_was_run_in_order_and_has_few_cells(notebook: Path) -> None:
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(stored(cell) for cell in code)
    assert 8 <= len(code) + len(cells(notebook, "markdown")) <= 10


@pytest.mark.slow
def test_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ROOT / "notebooks" / "first_model.ipynb"
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__notebook__")
    code = cells(notebook, "code")
    outputs = [run_cell(source(cell), notebook.name, module) for cell in code]
    rows, metrics, predictions, report, explanation = outputs
    stored_rows, stored_metrics, stored_predictions, stored_report, stored_explanation = map(stored, code)
    assert rows == stored_rows
    assert re.sub(r"[\d.]+", "0", metrics) == re.sub(r"[\d.]+", "0", stored_metrics)  # seconds and steps differ
    assert agrees(predictions, stored_predictions)
    assert headings(report) == headings(stored_report)
    assert agrees(explanation, stored_explanation)
    assert "<table" in rows
    assert "accuracy" in metrics
    assert vars(module)["result"].metrics["accuracy"] > 0.85
    assert predictions.count("<tr>") == 4  # the names of the columns, and three texts
    assert report.startswith("<iframe")
    assert "Confusion matrix" in report
    assert "nobody" in explanation

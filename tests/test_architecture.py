"""docs/architecture.md names files and definitions that exist, and its table those that are in the files it names."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.documents import inline_code
from support.sources import PACKAGE

ROOT = PACKAGE.parent
PAGE = ROOT / "docs" / "architecture.md"
HEAD = "| question | file | definition |"
MEMBER = re.compile(r"[A-Z]\w*\.[a-z_]\w*")  # ``Task.features``, no file and no call


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the table that begins with ``HEAD``."""
    table = text.partition(f"{HEAD}\n")[2].partition("\n\n")[0]
    for line in table.splitlines()[1:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def files_of(pattern: str) -> list[Path]:
    """The modules of the package that a cell means: one file, ``tasks/*.py``, or all of a folder."""
    if pattern.endswith("/"):
        return sorted(PACKAGE.glob(f"{pattern}*.py"))
    return sorted(PACKAGE.glob(pattern))


@cache
def definitions_of(file: Path) -> frozenset[str]:
    """The functions and classes of a module, and the members of the classes as ``Class.member``."""
    found = set[str]()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                found |= {f"{node.name}.{member}" for member in members(statement)}
    return frozenset(found)


def definitions(files: Iterable[Path]) -> set[str]:
    return set().union(*map(definitions_of, files))


def members(statement: ast.stmt) -> list[str]:
    """The names that a statement of a class defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def table_problems(text: str) -> Iterator[str]:
    for question, file_cell, definition_cell in table_rows(text):
        files: list[Path] = []
        for pattern in inline_code(file_cell):
            found = files_of(pattern)
            if not found:
                yield f"{question} {pattern} does not exist"
            files += found
        known = definitions(files)
        for name in inline_code(definition_cell):
            if name not in known:
                yield f"{question} {name} is in none of these files"


def page_problems(text: str) -> Iterator[str]:
    """Files, and members of classes, that do not exist."""
    known = definitions(PACKAGE.rglob("*.py"))
    for code in inline_code(text):
        if MEMBER.fullmatch(code) and code not in known:
            yield f"{code} does not exist"
        is_file = code.endswith(".py") and "*" not in code
        if is_file and not any((folder / code).is_file() for folder in (PACKAGE, ROOT)):
            yield f"{code} does not exist"


def test_the_table_of_what_is_where_names_what_is_there() -> None:
    text = PAGE.read_text("utf-8")
    assert len(list(table_rows(text))) > 20
    assert list(table_problems(text)) == []


def test_the_page_names_files_and_members_that_exist() -> None:
    assert list(page_problems(PAGE.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "row",
    [
        "| Which predictions rank? | `outputs/classes.py` | `Classes.can_rank` |",
        "| Which predictions rank? | `outputs/classes.py` | `RankedClasses.can_rank` |",
        "| Which columns? | `outputs/*.py` | `Output.columns` |",
        "| Which formula? | `metrics/` | `tune_limits` |",
        "| Which formula? | `metrics/*.py`, `metrics/limits.py` | `tune_thresholds` |",
        "| Which formula? | `formulas/` | |",
    ],
)
def test_a_wrong_row_is_found(row: str) -> None:
    right = "| Which formula? | `metrics/`, `outputs/label_set.py` | `LabelSet.tune` by `tune_thresholds` |"
    text = "\n".join(["A page.", "", HEAD, "|---|---|---|", right, row, "", "The end."])
    assert len(list(table_problems(text))) == 1


@pytest.mark.parametrize("code", ["Task.loss", "outputs/regression.py"])
def test_a_wrong_name_on_the_page_is_found(code: str) -> None:
    assert list(page_problems(f"See `{code}`, `Output.loss`, `outputs/number.py` and `Task.of(max_length=64)`.")) == [
        f"{code} does not exist"
    ]

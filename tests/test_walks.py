"""The package stays easy to follow: short walks of rows through it, and few expressions folded into statements.

Each figure is that of the present code. A change may exceed it by 3 %, so that an honest correction or the split of a
long function passes. A figure is lowered when the code has become simpler, and raised only together with what needs it.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.sources import Source, package_sources
from support.walks import WALKS, Walk, follow

SLACK = 1.03

LIMITS = {
    "train": Walk(functions=581, files=100, lines=2947),
    "row": Walk(functions=339, files=59, lines=1464),
    "predict": Walk(functions=451, files=86, lines=2324),
    "model.predict": Walk(functions=155, files=37, lines=698),
    "load": Walk(functions=155, files=42, lines=864),
}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_walk_is_short(name: str, tmp_path: Path, repository: Path) -> None:
    walks = follow(name, tmp_path, repository / "recipes" / "data" / "feedback")
    assert len(walks) > 0
    for part, walk in walks.items():
        limit = LIMITS[part]
        assert 10 < walk.functions <= limit.functions * SLACK, (part, walk)
        assert 5 < walk.files <= limit.files * SLACK, (part, walk)
        assert 50 < walk.lines <= limit.lines * SLACK, (part, walk)


@cache
def nodes_of(source: Source) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(source.tree))


def statements(source: Source) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes_of(source))


def classes(source: Source) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in nodes_of(source))


def conditionals(source: Source) -> int:
    return sum(isinstance(node, ast.IfExp) for node in nodes_of(source))


def comprehensions(source: Source) -> int:
    return sum(isinstance(node, COMPREHENSIONS) for node in nodes_of(source))


def folding_calls(source: Source) -> int:
    """Counts what stands in for comprehensions."""
    return sum(isinstance(node, ast.Lambda) or is_folding_call(node) for node in nodes_of(source))


def is_folding_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("map", "filter")


def hidden_conditionals(source: Source) -> int:
    """Counts conditional expressions in the arguments of a call, behind a star and in the head of a loop."""
    return sum(isinstance(part, ast.IfExp) for node in nodes_of(source) for part in hiding_places(node))


def hiding_places(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node, ast.Starred):
        return [node.value]
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return [node.iter]
    return []


def nested_comprehensions(source: Source) -> int:
    """Counts comprehensions with two ``for``."""
    return sum(isinstance(node, COMPREHENSIONS) and len(node.generators) > 1 for node in nodes_of(source))


def late_imports(source: Source) -> int:
    """Counts imports inside functions, which only the command line needs, to answer quickly."""
    if source.name.startswith("cli"):
        return 0
    found: set[int] = set()
    for function in nodes_of(source):
        if isinstance(function, FUNCTIONS):
            found |= {node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
    return len(found)


def untyped_names(source: Source) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes_of(source))


# What is counted -> how often it may stand in the package.
COUNTS: dict[Callable[[Source], int], int] = {
    statements: 30335,
    classes: 432,
    conditionals: 1267,
    comprehensions: 2258,
    folding_calls: 266,
    hidden_conditionals: 183,
    nested_comprehensions: 133,
    late_imports: 35,
    untyped_names: 1057,
}
# What is counted for 1,000 statements, because a larger package may have more of it.
DENSITIES: dict[Callable[[Source], int], float] = {conditionals: 41.8, comprehensions: 74.5}


@cache
def sources() -> tuple[Source, ...]:
    return tuple(package_sources())


def total(count: Callable[[Source], int]) -> int:
    return sum(count(source) for source in sources())


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.__name__)
def test_package_has_no_more_than(count: Callable[[Source], int]) -> None:
    assert 0 < total(count) <= COUNTS[count] * SLACK


@pytest.mark.parametrize("count", DENSITIES, ids=lambda count: count.__name__)
def test_statements_do_not_become_denser(count: Callable[[Source], int]) -> None:
    density = 1000 * total(count) / total(statements)
    assert 0 < density <= DENSITIES[count] * SLACK

"""Owns reading the package's source files as syntax trees, for the tests of layers, style and packaging."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "bert_tasks"


@dataclass(frozen=True)
class Source:
    """A module: its dotted name below ``bert_tasks`` ("" for the package itself), and its text."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, in the order of ``ast.walk``."""
        return tuple(ast.walk(self.tree))


@dataclass(frozen=True)
class Import:
    """``from module import name`` or ``import module`` (name None), with its line."""

    module: str
    name: str | None
    line: int


@cache
def package_sources() -> list[Source]:
    """Returns every module of the package. The list and its trees are made once, so leave them as they are."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [_source(file) for file in files]


def _source(file: Path) -> Source:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Source(".".join(parts[:-1] if is_package else parts), file.read_text("utf-8"), is_package)


def imports(source: Source) -> Iterator[Import]:
    """Every import, also inside functions, under TYPE_CHECKING and by ``import_module`` with a literal."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
            literal = node.args[0] if node.args else None
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                yield Import(literal.value, None, node.lineno)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module if node.module is not None else ""
    path = f"bert_tasks.{source.name}".rstrip(".").split(".")
    up = node.level - 1 if source.is_package else node.level
    package = path[: len(path) - up]
    return ".".join([*package, node.module] if node.module is not None else package)


def _called_name(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None

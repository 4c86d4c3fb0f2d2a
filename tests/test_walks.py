"""The package stays easy to follow: short walks of rows through it, few expressions folded into statements, and
comments that say why.

The tables below hold the figures of the present code. A change may miss one by 3 %, so that an honest correction or the
split of a long function passes. Tighten a figure when the code has become simpler, and relax it only together with what
needs it.
"""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

from bert_tasks import TaskModel
from support.sources import Source, package_sources
from support.walks import MODEL, WALKS, Walk, follow

SLACK = 1.03

# At most this much runs on the way of a row.
WALK_LIMITS = {
    "train": Walk(functions=593, files=102, lines=3344),
    "row": Walk(functions=345, files=61, lines=1700),
    "predict": Walk(functions=459, files=88, lines=2613),
    "model.predict": Walk(functions=159, files=38, lines=808),
    "load": Walk(functions=160, files=42, lines=987),
}
# At most this often in the package. Functions below have these names.
COUNT_LIMITS = {
    "classes": 432,
    "folding_calls": 195,
    "hidden_conditionals": 0,
    "nested_comprehensions": 0,
    "late_imports": 37,
    "untyped_names": 1119,
}
# At most this often in 1,000 statements, because a larger package may have more of it.
DENSITY_LIMITS = {"conditionals": 27, "comprehensions": 62}
# At least this often in 100 lines of code.
COMMENTS_AT_LEAST = 6.0

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "model"
    model = TaskModel.from_pretrained(MODEL, task="sequence-classification", labels=["bad", "good"])
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_walk_is_short(name: str, tmp_path: Path, repository: Path, classifier: Path) -> None:
    walks = follow(name, tmp_path, repository / "recipes" / "data" / "feedback", classifier)
    assert len(walks) > 0
    for part, walk in walks.items():
        limit = WALK_LIMITS[part]
        assert 10 < walk.functions <= limit.functions * SLACK, (part, walk)
        assert 5 < walk.files <= limit.files * SLACK, (part, walk)
        assert 50 < walk.lines <= limit.lines * SLACK, (part, walk)


def statements(source: Source) -> int:
    return sum(isinstance(node, ast.stmt) for node in source.nodes)


def classes(source: Source) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in source.nodes)


def conditionals(source: Source) -> int:
    return sum(isinstance(node, ast.IfExp) for node in source.nodes)


def comprehensions(source: Source) -> int:
    return sum(isinstance(node, COMPREHENSIONS) for node in source.nodes)


def folding_calls(source: Source) -> int:
    """Counts what stands in for comprehensions."""
    return sum(isinstance(node, ast.Lambda) or is_folding_call(node) for node in source.nodes)


def is_folding_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("map", "filter")


def hidden_conditionals(source: Source) -> int:
    """Counts conditional expressions in the arguments of a call, behind a star and in the head of a loop."""
    return sum(isinstance(part, ast.IfExp) for node in source.nodes for part in hiding_places(node))


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
    return sum(isinstance(node, COMPREHENSIONS) and len(node.generators) > 1 for node in source.nodes)


def late_imports(source: Source) -> int:
    """Counts imports inside functions, which only the command line needs, to answer quickly."""
    if source.name.startswith("cli"):
        return 0
    found: set[int] = set()
    for function in source.nodes:
        if isinstance(function, FUNCTIONS):
            found |= {node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
    return len(found)


def untyped_names(source: Source) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in source.nodes)


@cache
def comments_and_code(source: Source) -> tuple[int, int]:
    """Returns the lines with a comment and the lines of code. Docstrings and directives to tools are neither."""
    comments, code = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            if is_alone or not ("noqa" in token.string or "type:" in token.string):
                comments.add(token.start[0])
        elif token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(comments), len(code - docstring_lines(source))


def docstring_lines(source: Source) -> set[int]:
    lines = set[int]()
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


COUNTERS = (
    statements,
    classes,
    conditionals,
    comprehensions,
    folding_calls,
    hidden_conditionals,
    nested_comprehensions,
    late_imports,
    untyped_names,
)


@cache
def totals() -> dict[str, int]:
    sources = package_sources()
    return {count.__name__: sum(count(source) for source in sources) for count in COUNTERS}


@pytest.mark.parametrize("name", COUNT_LIMITS)
def test_package_has_no_more_than(name: str) -> None:
    assert 0 <= totals()[name] <= COUNT_LIMITS[name] * SLACK


@pytest.mark.parametrize("name", DENSITY_LIMITS)
def test_statements_do_not_become_denser(name: str) -> None:
    density = 1000 * totals()[name] / totals()["statements"]
    assert 0 < density <= DENSITY_LIMITS[name] * SLACK


def test_comments_say_why() -> None:
    counts = [comments_and_code(source) for source in package_sources()]
    comments, code = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert 100 * comments / code >= COMMENTS_AT_LEAST / SLACK


def test_what_is_counted() -> None:
    text = """\"\"\"Docstring
of a module.\"\"\"
# why
import os  # noqa: F401
x = f(a if b else c)  # why, too
y = [z for w in x for z in w]


def f(a: Any) -> Any:
    import re
    return lambda: map(re, [*(a if a else ())])
"""
    source = Source("model.x", text)
    counted = {count.__name__: count(source) for count in COUNTERS}
    assert counted == {
        "statements": 7,
        "classes": 0,
        "conditionals": 2,
        "comprehensions": 1,
        "folding_calls": 2,
        "hidden_conditionals": 2,
        "nested_comprehensions": 1,
        "late_imports": 1,
        "untyped_names": 2,
    }
    assert comments_and_code(source) == (2, 6)
    assert late_imports(Source("cli.x", text)) == 0

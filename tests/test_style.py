"""The rules of style that ruff and mypy do not know, each with a snippet that breaks it."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeGuard

import pytest

from support.sources import Source, imports, package_sources

MAX_FILE_LINES = 800
MAX_OUTPUT_LINES = 500  # of a file of outputs/, which is read as a whole
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 8
FORBIDDEN_MODULES = {"utils", "util", "helpers", "helper", "common", "misc"}
FORBIDDEN_CLASS = re.compile(r"Manager$|Helper$|^Base|Base$|Utils?$")
# Modules and functions that storage alone uses. ``x.replace(y)`` and ``x.rename(y)`` are those of paths: of texts
# ``replace`` takes two arguments.
STORAGE_MODULES = {"hashlib", "filelock"}
STORAGE_FUNCTIONS = {"os.replace", "os.rename", "os.renames", "os.fsync", "Path.replace", "Path.rename", "shutil.move"}
STORAGE_METHODS = {name.rpartition(".")[2] for name in STORAGE_FUNCTIONS}
# Methods through which gradients flow, outside of encoder/, where every function counts.
DIFFERENTIATED = re.compile(r"^(forward|_?loss\w*|\w+_loss|\w*divergence)$")
# No gradient flows through them: the first forms layouts from Python lists on the host, the second only predicts.
WITHOUT_GRADIENTS = {"encoder.packing", "encoder.int8"}
# Indexing that the rule cannot tell from a gather of rows, and why it is none.
EXEMPT = {
    ("encoder.layers", "self.layers[index]"): "one module of a list",
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> Iterator[FunctionNode]:
    yield from (node for node in source.nodes if isinstance(node, FunctionNode))


def short_files(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    limit = MAX_OUTPUT_LINES if source.name.startswith("outputs.") else MAX_FILE_LINES
    if lines > limit:
        yield f"{source.name}: {lines} lines, at most {limit}"


def short_functions(source: Source) -> Iterator[str]:
    """Statements count; signature and docstring do not, because public functions name and describe every argument."""
    for node in functions(source):
        statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
        last = node.end_lineno
        lines = 0 if last is None or not statements else last - statements[0].lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{source.name}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def few_constructor_arguments(source: Source) -> Iterator[str]:
    for node in functions(source):
        arguments = node.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
        if node.name == "__init__" and count > MAX_CONSTRUCTOR_ARGUMENTS:
            yield f"{source.name}:{node.lineno}: {count} arguments, at most {MAX_CONSTRUCTOR_ARGUMENTS}"


def storage_only(source: Source) -> Iterator[str]:
    """Files are renamed, flushed, hashed and locked in ``storage`` only."""
    if source.name == "storage":
        return
    for statement in imports(source):
        if statement.module in STORAGE_MODULES:
            yield f"{source.name}:{statement.line}: imports {statement.module}, use bert_tasks.storage"
    for node in source.nodes:
        if is_storage_function(node) or is_path_method(node):
            yield f"{source.name}:{node.lineno}: {ast.unparse(node)}, use bert_tasks.storage"


def is_storage_function(node: ast.AST) -> TypeGuard[ast.Attribute]:
    is_named = isinstance(node, ast.Attribute) and node.attr in STORAGE_METHODS
    return is_named and ast.unparse(node) in STORAGE_FUNCTIONS


def is_path_method(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call is that of ``replace`` or ``rename`` with one argument, as of a path."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    has_one_argument = (len(node.args), len(node.keywords)) == (1, 0)
    return node.func.attr in {"replace", "rename"} and has_one_argument and not is_storage_function(node.func)


def good_names(source: Source) -> Iterator[str]:
    if source.name.split(".")[-1] in FORBIDDEN_MODULES:
        yield f"{source.name}: a module's name says what it owns"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and FORBIDDEN_CLASS.search(node.name):
            yield f"{source.name}:{node.lineno}: class {node.name}"


def no_differentiated_advanced_indexing(source: Source) -> Iterator[str]:
    """Rows are gathered by index_select, F.embedding or a permutation whose backward is a gather.

    The backward of ``x[rows]`` with repeated rows is not deterministic on two threads.
    """
    for line, code in advanced_indexing(source):
        if (source.name, code) not in EXEMPT:
            yield f"{source.name}:{line}: advanced indexing {code}"


def advanced_indexing(source: Source) -> Iterator[tuple[int, str]]:
    layer = source.name.split(".")[0]
    if layer not in {"encoder", "outputs", "tasks"} or source.name in WITHOUT_GRADIENTS:
        return
    for function in functions(source):
        if layer == "encoder" or DIFFERENTIATED.match(function.name):
            scalars = _scalar_names(function)
            for node in _body_subscripts(function):
                if not _is_basic_index(node.slice, scalars):
                    yield node.lineno, ast.unparse(node)


def _body_subscripts(function: FunctionNode) -> Iterator[ast.Subscript]:
    """Subscripts that read a value, without annotations and nested functions (visited by themselves)."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, FunctionNode | ast.ClassDef):
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not _is_type(node.value):
            yield node
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting.extend(child for child in ast.iter_child_nodes(node) if child is not annotation)


def _is_type(node: ast.expr) -> bool:
    """``list[Tensor]`` in an expression, and tables in capitals, which are keyed by names."""
    return isinstance(node, ast.Name) and (node.id in {"list", "tuple", "dict", "set", "type"} or node.id.isupper())


def _scalar_names(function: FunctionNode) -> set[str]:
    """Names that are integers or strings for sure: annotated so, or counted by range or enumerate."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = {
        argument.arg
        for argument in arguments
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id in {"int", "str"}
    }
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
            names |= _counted_names(node.target, node.iter)
    return names


def _counted_names(target: ast.expr, call: ast.Call) -> set[str]:
    called = call.func.id if isinstance(call.func, ast.Name) else ""
    if called == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    return {target.id} if called in {"range", "enumerate"} and isinstance(target, ast.Name) else set()


def _is_basic_index(index: ast.expr, scalars: set[str]) -> bool:
    if isinstance(index, ast.Tuple):
        return all(_is_basic_index(element, scalars) for element in index.elts)
    if isinstance(index, ast.UnaryOp):
        return _is_basic_index(index.operand, scalars)
    if isinstance(index, ast.BinOp):
        return _is_basic_index(index.left, scalars) and _is_basic_index(index.right, scalars)
    if isinstance(index, ast.Name):
        return index.id in scalars
    return isinstance(index, ast.Constant | ast.Slice)


def no_or_default(source: Source) -> Iterator[str]:
    """``x or ()`` stands for the default where x is empty or 0, too: ``if x is None`` says what is meant."""
    for node in source.nodes:
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            last = node.values[-1]
            is_empty = isinstance(last, ast.Tuple | ast.List | ast.Dict)
            if is_empty or (isinstance(last, ast.Constant) and not isinstance(last.value, bool)):
                yield f"{source.name}:{node.lineno}: {ast.unparse(node)}"


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)
ARGUMENTS = ", ".join(f"a{number}" for number in range(MAX_CONSTRUCTOR_ARGUMENTS + 1))
BROKEN: list[tuple[Callable[[Source], Iterator[str]], str, str]] = [
    (short_files, "model.x", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (short_files, "outputs.x", "x = 1\n" * (MAX_OUTPUT_LINES + 1)),
    (short_functions, "model.x", LONG_FUNCTION),
    (few_constructor_arguments, "model.x", f"class A:\n    def __init__(self, *, {ARGUMENTS}): ..."),
    (storage_only, "model.x", "import hashlib"),
    (storage_only, "model.x", "from hashlib import sha256"),
    (storage_only, "model.x", "def f():\n    import filelock"),
    (storage_only, "model.x", "def f(path, target):\n    path.replace(target)"),
    (storage_only, "model.x", "def f(path, target):\n    (path / 'x').rename(target)"),
    (storage_only, "model.x", "def f(path, target):\n    os.replace(path, target)"),
    (storage_only, "model.x", "def f(paths, targets):\n    return list(map(os.rename, paths, targets))"),
    (storage_only, "model.x", "def f(file):\n    os.fsync(file.fileno())"),
    (good_names, "model.utils", "x = 1"),
    (good_names, "model.x", "class ModelManager: ..."),
    (good_names, "model.x", "class BaseTask: ..."),
    (good_names, "model.x", "class LoadHelper: ..."),
    (no_or_default, "model.x", "def f(x):\n    return x or ()"),
    (no_or_default, "model.x", "def f(x, y):\n    return [z for z in x.y or y or [1]]"),
    (no_or_default, "model.x", "def f(x):\n    return g(x or 1)"),
    (no_or_default, "model.x", "def f(x):\n    return (x or {}).get('y')"),
    (no_differentiated_advanced_indexing, "encoder.x", "def f(hidden, rows):\n    return hidden[rows]"),
    (no_differentiated_advanced_indexing, "encoder.x", "def f(hidden, rows):\n    return hidden[:, rows]"),
    (no_differentiated_advanced_indexing, "encoder.x", "def f(x):\n    return x.hidden[x.mask > 0]"),
    (no_differentiated_advanced_indexing, "encoder.x", "def f(x):\n    return x[[0, 0]]"),
    (
        no_differentiated_advanced_indexing,
        "encoder.x",
        "def f(x, i):\n    def g():\n        return x[i]\n    return g",
    ),
    (
        no_differentiated_advanced_indexing,
        "tasks.x",
        "class A:\n    def loss(self, x, y):\n        return x[y.rows]",
    ),
    (no_differentiated_advanced_indexing, "tasks.x", "def forward(x, rows):\n    return x[rows.long()]"),
]
ALLOWED: list[tuple[Callable[[Source], Iterator[str]], str, str]] = [
    (short_files, "model.x", "x = 1\n" * MAX_FILE_LINES),
    (storage_only, "storage", "import hashlib\nos.replace('a', 'b')"),
    (
        storage_only,
        "model.x",
        "def f(text, row):\n    return text.replace('a', 'b'), replace(row, x=1), row.replace(x=1)",
    ),
    (no_or_default, "model.x", "def f(x, y):\n    return x or y or x.startswith('a') or x[0] == 1 or x in ('b',)"),
    (
        no_differentiated_advanced_indexing,
        "encoder.x",
        "def f(x, n: int):\n    return x[0], x[:, 1:n], x[..., -1], x[n]",
    ),
    (
        no_differentiated_advanced_indexing,
        "encoder.x",
        "def f(xs):\n    return [xs[i + 1] for i in range(3)]",
    ),
    (
        no_differentiated_advanced_indexing,
        "encoder.x",
        "def f(x, y):\n    z: list[y] = list[int]()\n    return TABLE[x]",
    ),
    (no_differentiated_advanced_indexing, "tasks.x", "def decode(names, i):\n    return names[i]"),
    (no_differentiated_advanced_indexing, "data.x", "def forward(x, rows):\n    return x[rows]"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BROKEN))


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    sources = package_sources()
    assert len(sources) > 5
    assert [problem for source in sources for problem in rule(source)] == []


@pytest.mark.parametrize(("rule", "name", "text"), BROKEN)
def test_broken_rule_is_found(rule: Callable[[Source], Iterator[str]], name: str, text: str) -> None:
    assert len(list(rule(Source(name, text)))) == 1


@pytest.mark.parametrize(("rule", "name", "text"), ALLOWED)
def test_allowed_code_passes(rule: Callable[[Source], Iterator[str]], name: str, text: str) -> None:
    assert list(rule(Source(name, text))) == []


VERBS = "check|count|decode|encode|fit|load|open|parse|pack|read|render|run|save|split|validate|with|write"
FUNCTION_NAME = re.compile(rf"``((?:{VERBS})_[a-z\d_]+)``")


def unknown_functions(sources: list[Source]) -> Iterator[str]:
    """Names of functions in docstrings that no code of the sources has. Columns of a file are no functions."""
    known, named = set[str](), list[tuple[str, str]]()
    for source in sources:
        named += [(source.name, name) for name in FUNCTION_NAME.findall(source.text)]
        known |= set(re.findall(r"\w+", re.sub(r'""".*?"""', "", source.text, flags=re.DOTALL)))
    yield from (f"{module}: {name}" for module, name in named if name not in known)


def test_docstrings_name_functions_that_exist() -> None:
    sources = package_sources()
    assert list(unknown_functions(sources)) == []
    renamed = Source(
        "tasks.x", 'def f():\n    """See ``check_renders``, ``with_segments`` and a column ``created_at``."""'
    )
    assert list(unknown_functions([*sources, renamed])) == ["tasks.x: check_renders"]


def test_no_exemption_is_left_over() -> None:
    pairs = {(source.name, code) for source in package_sources() for _, code in advanced_indexing(source)}
    assert set(EXEMPT) - pairs == set()

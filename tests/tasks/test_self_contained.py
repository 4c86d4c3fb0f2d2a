"""Everything the package knows about a task is in ``bert_tasks/tasks``. Other code names no task and asks for none."""

import ast
import re
from collections.abc import Iterator

import pytest

from bert_tasks.tasks import TASK_NAMES, TASKS
from support.sources import Source, imports, package_sources

CLASSES = {task.__name__ for task in TASKS.values()}
ALIASES = set(TASK_NAMES) - set(TASKS)
NAMED = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, TASKS))})(?![\w-])")
# The module of a task, or its folder.
HOMES = {
    module.rpartition(".")[0] if module.count(".") > 2 else module
    for module in (task.__module__ for task in TASKS.values())
}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of the texts that stand alone as statements."""
    expressions = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(node.value) for node in expressions if isinstance(node.value, ast.Constant)}


def violations(source: Source) -> Iterator[str]:
    if source.name.split(".")[0] == "tasks":
        return
    tree = source.tree
    documentation = docstrings(tree)
    for statement in imports(source):
        if any(statement.module == home or statement.module.startswith(f"{home}.") for home in HOMES):
            yield f"{source.name}:{statement.line}: imports {statement.module}"
        elif statement.name in CLASSES:
            yield f"{source.name}:{statement.line}: imports {statement.name}"
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in CLASSES:
            yield f"{source.name}:{node.lineno}: names {name}"
        if isinstance(node, ast.Compare) and any(
            isinstance(child, ast.Name) and child.id in ("TASKS", "TASK_NAMES")
            for operand in (node.left, *node.comparators)
            for child in ast.walk(operand)
        ):
            yield f"{source.name}:{node.lineno}: asks whether a task is in the registry"
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documentation else None
        if isinstance(text, str) and (text in ALIASES or NAMED.search(text)):
            yield f"{source.name}:{node.lineno}: names the task of {text!r}"


def test_tasks_are_named_only_where_they_are_defined() -> None:
    sources = package_sources()
    assert len(sources) > 50
    assert [violation for source in sources for violation in violations(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "from bert_tasks.tasks import SpanExtraction",
        "from bert_tasks.tasks.span_extraction.task import SpanPrediction",
        "def late():\n    from bert_tasks.tasks.pair_classification import GROUP",
        "import bert_tasks.tasks.token_classification.task as tokens",
        "isinstance(task, tasks.TokenClassification)",
        "if task.name == 'span-extraction': pass",
        "raise ValueError(f'pass task=sequence-classification, not {name}')",
        "NAMES = {'ner': 1}",
        "is_known = type(model.task) in TASKS.values()",
        "if name not in TASK_NAMES: pass",
    ],
)
def test_a_task_named_elsewhere_is_found(text: str) -> None:
    assert len(list(violations(Source("report.build", text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Such as sequence-classification."""',
        "from bert_tasks.tasks import TASK_NAMES, TASKS, Task\nfrom bert_tasks.tasks.base import Feature",
        "ARCHITECTURE = 'BertForTokenClassification'",
        "name = 'word-span-extraction-2'",
    ],
)
def test_what_names_no_task_passes(text: str) -> None:
    assert list(violations(Source("report.build", text))) == []


def test_tasks_may_name_themselves() -> None:
    assert list(violations(Source("tasks.span_extraction.task", "name = 'span-extraction'"))) == []

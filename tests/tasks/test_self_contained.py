"""Everything the package knows about a task is in ``bert_tasks/tasks``, and about an output in ``bert_tasks/outputs``.

Other code names neither and asks for none. Outputs name no task.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from bert_tasks.tasks import TASK_NAMES, TASKS
from support.sources import Source, imports, package_sources

OUTPUTS = {output for task in TASKS.values() for output in task.outputs}
TASK_CLASSES = {task.__name__ for task in TASKS.values()}
OUTPUT_CLASSES = {output.__name__ for output in OUTPUTS}
ALIASES = set(TASK_NAMES) - set(TASKS)
NAMED = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, TASKS))})(?![\w-])")
TASK_HOMES = {task.__module__ for task in TASKS.values()}
OUTPUT_HOMES = {output.__module__ for output in OUTPUTS}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of the texts that stand alone as statements."""
    expressions = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(node.value) for node in expressions if isinstance(node.value, ast.Constant)}


def pipeline_tags(tree: ast.AST) -> set[int]:
    """The ids of the names that the hub has for outputs, which are names of our tasks, too."""
    fields = (node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    return {id(node.value) for node in fields if ast.unparse(node.target) == "pipeline_tag"}


def violations(source: Source) -> Iterator[str]:
    unit = source.name.split(".")[0]
    if unit == "tasks":
        return
    imported, homes = TASK_CLASSES, TASK_HOMES
    if unit != "outputs":
        imported, homes = imported | OUTPUT_CLASSES, homes | OUTPUT_HOMES
    tree = source.tree
    allowed = docstrings(tree)
    if unit == "outputs":
        allowed |= pipeline_tags(tree)
    for statement in imports(source):
        reached = {statement.module, f"{statement.module}.{statement.name}"}
        if reached & homes or any(statement.module.startswith(f"{home}.") for home in homes):
            yield f"{source.name}:{statement.line}: imports {statement.module}"
        elif statement.name in imported and statement.module.startswith(("bert_tasks.tasks", "bert_tasks.outputs")):
            yield f"{source.name}:{statement.line}: imports {statement.name}"
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in TASK_CLASSES:  # other classes are called as outputs are, such as a Number of a column
            yield f"{source.name}:{node.lineno}: names {name}"
        if isinstance(node, ast.Compare) and any(
            isinstance(child, ast.Name) and child.id in ("TASKS", "TASK_NAMES")
            for operand in (node.left, *node.comparators)
            for child in ast.walk(operand)
        ):
            yield f"{source.name}:{node.lineno}: asks whether a task is in the registry"
        text = node.value if isinstance(node, ast.Constant) and id(node) not in allowed else None
        if isinstance(text, str) and (text in ALIASES or NAMED.search(text)):
            yield f"{source.name}:{node.lineno}: names the task of {text!r}"


def test_tasks_and_outputs_are_named_only_where_they_are_defined() -> None:
    sources = package_sources()
    assert len(sources) > 50
    assert [violation for source in sources for violation in violations(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "from bert_tasks.tasks import SpanExtraction",
        "from bert_tasks.tasks.span_extraction import spans",
        "def late():\n    from bert_tasks.tasks.pair_classification import GROUP",
        "import bert_tasks.tasks.token_classification as tokens",
        "from bert_tasks.outputs.answer import SpanPrediction",
        "import bert_tasks.outputs.tags as tags",
        "def late():\n    from bert_tasks.outputs import answer",
        "from bert_tasks.tasks.text_classification import Number",
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


def test_tasks_and_outputs_may_name_themselves() -> None:
    assert list(violations(Source("tasks.span_extraction", "name = 'span-extraction'"))) == []
    assert list(violations(Source("tasks.span_extraction", "from bert_tasks.outputs.answer import Answer"))) == []
    assert list(violations(Source("outputs.answer_report", "from bert_tasks.outputs.answer import Answer"))) == []


def test_outputs_say_what_the_hub_calls_them() -> None:
    text = "pipeline_tag: ClassVar[str | None] = 'multiple-choice'"
    assert list(violations(Source("outputs.choice", text))) == []
    assert len(list(violations(Source("report.build", text)))) == 1


@pytest.mark.parametrize("text", ["if task.name == 'span-extraction': pass", "isinstance(task, SpanExtraction)"])
def test_outputs_name_no_task(text: str) -> None:
    assert len(list(violations(Source("outputs.answer", text)))) == 1

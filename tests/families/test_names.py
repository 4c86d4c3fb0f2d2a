"""Only families/ knows families and Hugging Face's names of parameters."""

import ast
import re
from collections.abc import Iterator

import pytest

from bert_tasks.families import FAMILIES
from support.sources import Source, package_sources


def parameter_names() -> set[str]:
    """Names of Hugging Face's modules that are no plain words: with a dot, an underscore or a capital letter inside."""
    names: set[str] = set()
    for family in FAMILIES.values():
        rows = [*family.keys, *(row for head in family.heads.values() for row in head)]
        names |= {name.rpartition("{i}.")[2] for row in rows for name in row.hf_modules}
        names |= {family.prefix, *family.pretraining, *filter(None, [family.pooler])}
    return {name for name in names if re.search(r"[._A-Z]", name.rstrip("."))}


PARAMETERS = sorted(parameter_names())
NAMES = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, PARAMETERS)) + r")(?!\w)")


def family_knowledge(source: Source) -> Iterator[str]:
    """Where a module outside families/ tests the family of a model or knows a parameter of Hugging Face's."""
    if source.name.split(".")[0] == "families":
        return
    tree = source.tree
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare | ast.Constant):
            continue
        where = f"{source.name}:{node.lineno}"
        if isinstance(node, ast.Compare) and any(
            (isinstance(child, ast.Attribute) and child.attr == "model_type")
            or (isinstance(child, ast.Constant) and child.value == "model_type")
            for side in (node.left, *node.comparators)
            for child in ast.walk(side)
        ):
            yield f"{where}: tests model_type"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in FAMILIES:
                yield f"{where}: names the family {node.value}"
            if any(name in node.value for name in PARAMETERS):  # which is faster than the expression
                match = NAMES.search(node.value)
                if match is not None:
                    yield f"{where}: knows {match[0]}"


def test_nothing_else_knows_families() -> None:
    assert [message for source in package_sources() for message in family_knowledge(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        'def f(family):\n    return family.model_type == "mine"',
        'def f(config):\n    return config.get("model_type") in KNOWN',
        'def f(kind):\n    return {"roberta": 1}.get(kind, 0)',
        'KEY = "bert.encoder.layer.0.attention.self.query.weight"',
        'KEY = "encoder.layer.0.attention.output.LayerNorm"',
        'HEADS = ("qa_outputs.weight", "classifier.weight")',
        'PRETRAINING = ("cls.", "lm_head.")',
    ],
)
def test_knowledge_of_a_family_is_found(text: str) -> None:
    assert list(family_knowledge(Source("model.x", text)))
    assert not list(family_knowledge(Source("families.x", text)))


@pytest.mark.parametrize(
    "text",
    [
        'TYPES = {"model_type": "a table"}',
        'def f(family):\n    return {"family": family.model_type}',
        'def f():\n    """As in bert.pooler.dense."""\n    return "encoder.layers.0.attention.output.weight"',
    ],
)
def test_other_words_pass(text: str) -> None:
    assert list(family_knowledge(Source("model.x", text))) == []

"""The package imports only downwards, and each library only where it belongs."""

import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from support.sources import Import, Source, imports, package_sources

# From top to bottom. A unit is a folder or a top-level module; units of one layer do not import each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli"}),
    frozenset({""}),  # bert_tasks/__init__.py, which names the public objects of all below
    frozenset({"api"}),
    frozenset({"report", "cards", "serving", "glue_submission"}),
    frozenset({"experiments"}),
    frozenset({"training"}),
    frozenset({"inference"}),
    frozenset({"init"}),
    frozenset({"recipe"}),
    frozenset({"export"}),
    frozenset({"model"}),
    frozenset({"tasks"}),
    frozenset({"outputs"}),
    frozenset({"checkpoints"}),
    frozenset({"families"}),
    frozenset({"metrics", "data"}),
    frozenset({"distributed", "environment"}),
    frozenset({"encoder"}),
    frozenset({"storage"}),
    frozenset({"tables", "terminal", "variables"}),
    frozenset({"errors"}),
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

# Libraries that only the modules named here may import (a folder stands for all of its modules).
CONFINED: dict[str, tuple[str, ...]] = {
    "accelerate": ("training", "inference", "distributed"),
    "huggingface_hub": ("checkpoints.hub", "data.formats.hub", "cards"),
    "onnxruntime": ("model.exported",),
    "ctypes": (),  # a library does not change the allocator or the threads of its host process
}
TOKENIZER_NAMES = {
    "AutoTokenizer",
    "CONFIG_MAPPING",  # AutoTokenizer chooses a class by the class of a configuration
    "BatchEncoding",
    "PreTrainedConfig",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "BertTokenizer",
    "RobertaTokenizer",
    "AlbertTokenizer",
}


def unit_of(module: str) -> str:
    """The unit of a module below the package."""
    return module.split(".")[0]


def within(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def imported_unit(statement: Import, submodules: set[str]) -> str | None:
    """The unit that an import reaches (``from bert_tasks import x`` may name one), or None for a library."""
    if statement.module.split(".")[0] != "bert_tasks":
        return None
    below = statement.module.removeprefix("bert_tasks").removeprefix(".")
    if below == "" and statement.name in submodules:
        return unit_of(str(statement.name))
    return unit_of(below)


def violations(sources: list[Source]) -> Iterator[str]:
    submodules = {source.name.split(".")[0] for source in sources}
    for source in sources:
        if unit_of(source.name) not in RANK:
            yield f"{source.name}: not in LAYERS, say where it belongs"
            continue
        for statement in imports(source):
            where = f"{source.name}:{statement.line}: imports {statement.module}"
            unit = imported_unit(statement, submodules)
            if unit is not None:
                yield from layer_violations(where, unit_of(source.name), unit)
            else:
                yield from library_violations(where, source.name, statement)


def layer_violations(where: str, importer: str, imported: str) -> Iterator[str]:
    if imported not in RANK:
        yield f"{where}: not in LAYERS, say where it belongs"
    elif imported != importer and RANK[imported] <= RANK[importer]:
        yield f"{where}: {importer!r} must not import {imported!r}"


def library_violations(where: str, module: str, statement: Import) -> Iterator[str]:
    library = statement.module.split(".")[0]
    if library in CONFINED and not within(module, CONFINED[library]):
        yield f"{where}: only in {', '.join(CONFINED[library]) or 'no module'}"
    if library == "transformers" and (statement.module != "transformers" or statement.name not in TOKENIZER_NAMES):
        yield f"{where}: only {sorted(TOKENIZER_NAMES)} of transformers"
    if unit_of(module) == "encoder" and library != "torch" and library not in sys.stdlib_module_names:
        yield f"{where}: encoder imports torch and the standard library only"


def test_package_imports_only_downwards() -> None:
    sources = package_sources()
    assert len(sources) > 5
    assert list(violations(sources)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("encoder.stack", "from bert_tasks.tasks.base import Task"),
        ("encoder.stack", "from ..tasks import base"),
        ("encoder.stack", "from bert_tasks import tasks"),
        ("encoder.stack", "import bert_tasks.tasks.base"),
        ("encoder.stack", "import numpy"),
        ("encoder.stack", "from safetensors.torch import load_file"),
        ("tasks.base", "def late():\n    from bert_tasks.training.loop import fit"),
        ("tasks.base", "import importlib\nimportlib.import_module('bert_tasks.recipe.schema')"),
        ("tasks.base", "from bert_tasks.recipe.errors import x"),
        ("tasks.base", "from bert_tasks import TaskModel"),
        ("outputs.tags", "from bert_tasks.tasks.base import Task"),
        ("outputs.tags", "from bert_tasks.model.heads import Heads"),
        ("checkpoints.load", "from bert_tasks.outputs.hf_config import label_places"),
        ("data.reading", "from bert_tasks.metrics import classification"),
        ("errors", "from bert_tasks.encoder import config"),
        ("data.rows", "from accelerate import Accelerator"),
        ("checkpoints.load", "from huggingface_hub import snapshot_download"),
        ("model.encoder", "from transformers import BertModel"),
        ("model.encoder", "import transformers"),
        ("model.encoder", "from transformers.models.bert import BertModel"),
        ("surprise", "import json"),
        ("model.encoder", "from bert_tasks.surprise import x"),
        ("model.inputs", "from bert_tasks.export.graph import exported_graph"),
        ("export.graph", "def late():\n    import onnxruntime"),
        ("environment", "import ctypes"),
    ],
)
def test_forbidden_import_is_found(name: str, text: str) -> None:
    assert len(list(violations([Source(name, text), Source("tasks", "", is_package=True)]))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cli", "from bert_tasks import train"),
        (
            "encoder.stack",
            "from bert_tasks.encoder.attention import attend\nfrom .config import EncoderConfig",
        ),
        ("encoder.stack", "import math\nimport torch\nfrom bert_tasks.errors import CheckpointError"),
        ("training.loop", "from accelerate.utils import set_seed"),
        ("inference", "import accelerate"),
        ("checkpoints.hub", "import huggingface_hub"),
        ("tasks.base", "from transformers import AutoTokenizer, PreTrainedTokenizerBase"),
        ("tasks.base", "from bert_tasks.outputs.base import Output"),
        ("recipe.errors", "from bert_tasks.recipe.schema import Recipe"),
    ],
)
def test_allowed_import_passes(name: str, text: str) -> None:
    assert list(violations([Source(name, text)])) == []


def import_cycle(sources: list[Source]) -> list[str]:
    """Modules that import each other in a circle, by any import: inside functions and under TYPE_CHECKING too."""
    modules = {f"bert_tasks.{source.name}".rstrip("."): source for source in sources}
    graph: dict[str, set[str]] = {}
    for name, source in modules.items():
        reached = {
            f"{statement.module}.{statement.name}" if statement.name else statement.module
            for statement in imports(source)
        }
        reached |= {
            statement.module for statement in imports(source) if f"{statement.module}.{statement.name}" not in modules
        }
        graph[name] = (reached & modules.keys()) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert import_cycle(package_sources()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from bert_tasks.model import b",
        "from bert_tasks.model.b import x",
        "def late():\n    import bert_tasks.model.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bert_tasks.model.b import x",
    ],
)
def test_a_circle_is_found(text: str) -> None:
    sources = [
        Source("model.a", text),
        Source("model.b", "from bert_tasks.model.a import y"),
        Source("model", "", True),
    ]
    assert sorted(set(import_cycle(sources))) == ["bert_tasks.model.a", "bert_tasks.model.b"]


def test_relative_imports_of_a_package_start_at_itself() -> None:
    inside = Source("tasks", "from .base import Task\nfrom ..encoder import config", is_package=True)
    assert [statement.module for statement in imports(inside)] == ["bert_tasks.tasks.base", "bert_tasks.encoder"]

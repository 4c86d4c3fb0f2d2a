"""The public names that the pages in docs/reference document.

Owns how a directive of mkdocstrings is read: ``::: module.name``, with an option ``members`` for some of the methods.
Must not know which names there are.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

_DIRECTIVE = re.compile(
    r"^::: (bert_tasks[\w.]*)\.(\w+)$(?:\n +options:(?:\n +.*)*?\n +members: \[(.*)\])?", re.MULTILINE
)


def documented(folder: Path) -> dict[str, Any]:
    """Returns the documented functions and classes by their names with the module."""
    return {f"{module}.{name}": getattr(import_module(module), name) for module, name, _ in _directives(folder)}


def documented_methods(folder: Path) -> dict[str, Any]:
    """Returns the documented methods of these classes by their names with the class."""
    found: dict[str, Any] = {}
    for module, name, members in _directives(folder):
        value = getattr(import_module(module), name)
        if inspect.isclass(value):
            methods = members.split(", ") if members else _own_methods(value)
            found |= {f"{module}.{name}.{method}": getattr(value, method) for method in methods}
    return found


def _directives(folder: Path) -> list[tuple[str, str, str]]:
    texts = [page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md"))]
    return [found for text in texts for found in _DIRECTIVE.findall(text)]


def _own_methods(owner: type) -> list[str]:
    members = {name: getattr(member, "__func__", member) for name, member in vars(owner).items()}
    return [name for name, member in members.items() if inspect.isfunction(member) and not name.startswith("_")]

"""Writes the reference of commands and recipe keys, the recipes' JSON schema and the arguments of `fit`.

Owns how options and fields become Markdown. `make docs` runs it; tests/test_docs.py compares its result with the files
of the repository. The pages of the Python API are made by mkdocstrings when the site is built (`make site`).
"""

import dataclasses
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, WithJsonSchema

import bert_tasks
from bert_tasks.cli.app import GROUPS, app
from bert_tasks.data.splits import DataSpec
from bert_tasks.recipe.json_schema import recipe_schema, schema_text, setting_descriptions
from bert_tasks.recipe.schema import (
    FoldsSection,
    ModelSection,
    OptimSection,
    Recipe,
    RunSection,
    TeacherSection,
    fit_keys,
    resume_effects,
)
from bert_tasks.recipe.search import SearchSection, Space
from bert_tasks.tasks import TASKS, task_names
from bert_tasks.tasks.base import Task

ARGUMENTS_HEAD = '''"""The arguments of `fit` that are keys of a recipe, so that editors complete them.

Written by `make docs` from the sections in schema.py, which describe them. Change the sections, not this file.
"""

from typing import Literal

from bert_tasks.data.options import ReadingArguments


class FitArguments(ReadingArguments, total=False):
    """The keyword arguments of `fit` that are keys of a recipe."""
'''
SECTIONS: Mapping[str, Any] = {
    "model": ModelSection,
    "data": DataSpec,
    "optim": OptimSection,
    "run": RunSection,
    "teacher": TeacherSection,
    "folds": FoldsSection,
    "search": SearchSection,
}
KEY_HEAD = ("key", "value", "default", "limits", "description")
SETTING_HEAD = ("key", "value", "default", "description")
OPTION_HEAD = ("argument or option", "value", "default", "description")
NO_LABELS = "None. Do not set them."
COMMON_OPTIONS = "Several commands share these options. Each command lists the ones that it accepts."
# What a key's text says of a run that is resumed with another value.
RESUMED = {
    "silent": "A resumed run may change it.",
    "noted": "A resumed run may change it, with a notice.",
    "extending": "A resumed run may change it, with a notice; it also continues a finished run.",
}
FOLDER = Path("docs") / "reference"
WRITTEN = "Written by `make docs` from the package; change the docstrings, not this page."
MASKS = "[`MaskingRule`](tasks.md#masked-language-modelling) explains the settings of masks, with their sources."


def spelt(annotation: Any) -> str:
    """A type as a reader of a recipe or a signature wants it."""
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(spelt(member) for member in get_args(annotation) if member is not type(None))
    if hasattr(annotation, "__metadata__"):
        marks = [mark for mark in annotation.__metadata__ if isinstance(mark, WithJsonSchema)]
        if any(mark.json_schema == {"type": "string"} for mark in marks):
            return "text"
        return spelt(annotation.__origin__)
    if get_origin(annotation) is tuple:
        return f"list of {spelt(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"table of {spelt(get_args(annotation)[1])}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def limits(schema: Mapping[str, Any]) -> str:
    """The limits of a JSON schema in words."""
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:.10g}" for name, sign in signs.items() if name in schema]
    parts = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return ", ".join([*bounds, *filter(None, map(limits, parts))])


def toml_value(value: Any) -> str:
    if value is None or value is dataclasses.MISSING or value in ((), {}, ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def cli_page() -> str:
    group = typer.main.get_command(app)
    parts = ["# Command line", "", WRITTEN, ""]
    parts += [
        "Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 data, 4 model or checkpoint, 5 diverged, 143 or"
    ]
    parts += [
        "130 stopped by SIGTERM or SIGINT after saving. If memory is used up, the code is 4.",
        "",
        "Results go to standard output, everything else to standard error. Output to a pipe has no colours and no",
        "control characters. `NO_COLOR=1` disables colours.",
    ]
    parts += ["", "## bert-tasks", "", f"{group.help}", ""]
    parts += [_parameters(group), ""]
    parts += [f"- {panel}: {', '.join(f'`{name}`' for name in names)}" for panel, names in GROUPS.items()]
    by_name = commands(group)
    shared = shared_rows(map(_rows, by_name.values()), least=4)
    parts += [
        "",
        "## Common options",
        "",
        COMMON_OPTIONS,
        "",
        table(("option", "value", "default", "description"), shared),
    ]
    for name, command in by_name.items():
        rows = _rows(command)
        common = ", ".join(row[0] for row in rows if row in shared)
        parts += ["", f"## bert-tasks {name}", "", _command_text(command.help), ""]
        parts.append(table(OPTION_HEAD, [row for row in rows if row not in shared]))
        parts += ["", f"[Common options](#common-options): {common}"] if common else []
    return "\n".join(parts) + "\n"


def shared_rows(tables: Iterable[Sequence[tuple[str, ...]]], least: int) -> list[tuple[str, ...]]:
    """The rows of options and settings that this number of tables has at least."""
    counts = Counter(row for rows in tables for row in rows if row[0].startswith(("`-", "`settings.")))
    return [row for row, count in counts.items() if count >= least]


def commands(group: Any) -> dict[str, Any]:
    """Every command that is shown, those of groups with the group's name before theirs."""
    result: dict[str, Any] = {}
    for name in group.list_commands(None):
        command = group.commands[name]
        if command.hidden:
            continue
        below = commands(command) if hasattr(command, "commands") else {}
        result |= {f"{name} {inner}": value for inner, value in below.items()} if below else {name: command}
    return result


def _command_text(text: str) -> str:
    """Examples as code."""
    plain = inspect.cleandoc(text).replace("\b\n", "")
    return re.sub(r"^(Examples?:) (.*)$", r"\1 `\2`", plain, flags=re.MULTILINE)


def _parameters(command: Any) -> str:
    return table(OPTION_HEAD, _rows(command))


def _rows(command: Any) -> list[tuple[str, ...]]:
    return [_parameter(item) for item in command.params if not getattr(item, "hidden", False) and item.name != "help"]


def _parameter(item: Any) -> tuple[str, ...]:
    is_option = item.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in [*item.opts, *item.secondary_opts])
    if not is_option:
        metavar = item.metavar if item.metavar is not None else item.name.upper()
        return f"`{metavar}`", "", "*required*" if item.required else "", _text(item.help)
    value = "" if getattr(item, "is_flag", False) else _value(item)
    default = "*required*" if item.required else toml_value(getattr(item, "default", None) or None)
    is_told = re.search("repeated|twice", item.help) is not None
    return names, value, default, _text(item.help) + (" May be repeated." if item.multiple and not is_told else "")


def _text(text: str | None) -> str:
    return "" if text is None else " ".join(text.split())


def _value(item: Any) -> str:
    annotation = item.type_descriptor.annotation
    if item.metavar is not None:
        return f"`{item.metavar}`"
    return {Path: "path"}.get(annotation, spelt(annotation))


def recipe_page() -> str:
    parts = [
        "# Recipe",
        "",
        WRITTEN,
        "",
        "A recipe is a TOML file. bert_tasks rejects unknown keys. Keys marked *required* must be set, and all others",
        "are optional. Paths start at the recipe's folder.",
        "",
    ]
    parts.append(table(KEY_HEAD, list(_top_rows())))
    for name in ("model", "data"):
        parts += ["", f"## [{name}]", "", *_section(name, SECTIONS[name])]
    shared = shared_rows(map(setting_rows, TASKS.values()), least=3)
    parts += [
        "",
        "## [settings]",
        "",
        "The settings of the task and of its output, in one list. Several tasks have these:",
        "",
        table(SETTING_HEAD, shared),
    ]
    for name, task in TASKS.items():
        rows = setting_rows(task)
        common = ", ".join(row[0].replace("settings.", "") for row in rows if row in shared)
        _, *aliases = task_names(task)
        also = [f"`task` may also be {' or '.join(f'`{alias}`' for alias in aliases)}.", ""] if aliases else []
        parts += [
            "",
            f"### {name}",
            "",
            *also,
            *([MASKS, ""] if "mlm_probability" in task.settings_by_name() else []),
            table(SETTING_HEAD, [row for row in rows if row not in shared]),
            *(["", f"[Common settings](#settings): {common}"] if common else []),
        ]
    for name in ("optim", "run", "teacher", "folds", "search"):
        parts += ["", f"## [{name}]", "", *_section(name, SECTIONS[name])]
    parts += ["", "The values of a key that is searched:", ""]
    parts.append(table(KEY_HEAD, field_rows("search.KEY.", Space)))
    return "\n".join(parts) + "\n"


def _top_rows() -> Iterator[tuple[str, ...]]:
    rows = field_rows("", Recipe)
    yield next(row for row in rows if row[0] == "`task`")


def _section(name: str, section: Any) -> Iterator[str]:
    yield from (" ".join(inspect.cleandoc(section.__doc__).replace("``", "`").split()), "")
    yield table(KEY_HEAD, field_rows(f"{name}.", section))


def field_rows(prefix: str, section: Any) -> list[tuple[str, ...]]:
    """One row for each field of a section."""
    whole = Recipe.model_json_schema()
    schema = whole if section is Recipe else whole["$defs"][section.__name__]
    hints = get_type_hints(section, include_extras=True)
    rows = []
    for name, entry in schema["properties"].items():
        default = _default(section, name)
        shown = "*required*" if name in schema.get("required", ()) else toml_value(default)
        resumed = RESUMED.get(resume_effects().get(f"{prefix}{name}", ""), "")
        text = " ".join(filter(None, (_text(entry.get("description")), resumed)))
        rows.append((f"`{prefix}{name}`", spelt(hints[name]), shown, limits(entry), text))
    return rows


def _default(section: Any, name: str) -> Any:
    if issubclass(section, BaseModel):
        return section.model_fields[name].default
    return next(field.default for field in dataclasses.fields(section) if field.name == name)


def setting_rows(task: type[Task]) -> list[tuple[str, ...]]:
    """One row for each setting of a task and its outputs."""
    rows = []
    for name, setting in task.stated_settings().items():
        meaning = meaning_of(task, name)
        if meaning != NO_LABELS:
            rows.append((f"`settings.{name}`", spelt(setting.hint), toml_value(setting.default), meaning))
    return rows


def meaning_of(task: type[Task], name: str) -> str:
    """What the task says of a setting, or another task that has the same one."""
    for task_class in (task, *TASKS.values()):
        text = setting_descriptions(task_class).get(name)
        if text is not None:
            return text[0].upper() + text[1:]
    return ""


def arguments_module() -> str:
    """The source of bert_tasks/recipe/arguments.py: the types of the arguments of `fit` that are keys of a recipe."""
    hints = {section: get_type_hints(section_class) for section, section_class in SECTIONS.items()}
    lines = [
        f"    {name}: {_type_text(hints[section][key])}"
        for name, (section, key) in fit_keys().items()
        if name not in inspect.signature(bert_tasks.fit).parameters
    ]
    return "\n".join([ARGUMENTS_HEAD, *lines]) + "\n"


def _type_text(annotation: Any) -> str:
    """The annotation of a type."""
    if get_origin(annotation) is Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in get_args(annotation)) + "]"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(_type_text(member) for member in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"tuple[{', '.join(map(_type_text, get_args(annotation)))}]"
    return {type(None): "None", Ellipsis: "..."}.get(annotation, getattr(annotation, "__name__", str(annotation)))


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "recipe.md": recipe_page,
}


def main() -> None:
    """Writes the pages, and the schema that describes the same keys, below the folder given or in the repository."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (root / FOLDER / name).write_text(page(), encoding="utf-8")
    (root / "bert_tasks" / "recipe" / "arguments.py").write_text(arguments_module(), encoding="utf-8")
    (root / "recipes" / "recipe.schema.json").write_text(schema_text(recipe_schema()), encoding="utf-8")


if __name__ == "__main__":
    main()

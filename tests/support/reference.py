"""Writes docs/reference and the recipes' JSON schema from the package: public names, commands, recipe keys.

Owns how docstrings, options and fields become Markdown. `make docs` runs it; tests/test_docs.py compares its result
with the files of the repository.
"""

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Never, Union, Unpack, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel

import bert_tasks
import bert_tasks.errors as errors
from bert_tasks.cli.app import GROUPS, app
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.splits import DataSpec
from bert_tasks.recipe.arguments import FitArguments
from bert_tasks.recipe.json_schema import field_descriptions, recipe_schema, schema_text
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
from bert_tasks.tasks.base import Feature, LossTerm, Part, Prediction, Task
from bert_tasks.tasks.multiple_choice import ChoicePrediction
from bert_tasks.tasks.sequence_classification.task import SequencePrediction
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.detection import Detection
from bert_tasks.tasks.shared.explanation import Explainable
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.report import Report
from bert_tasks.tasks.shared.windows import Windows
from bert_tasks.tasks.span_extraction.search import Span
from bert_tasks.tasks.span_extraction.task import SpanPrediction
from bert_tasks.tasks.token_classification.task import EntitySpan, TokenPrediction

ARGUMENTS_HEAD = '''"""The arguments of `fit` that are keys of a recipe, so that editors complete them.

Written by `make docs` from the sections in schema.py, which describe them; change the sections, not this file.
"""

from typing import Literal

from bert_tasks.data.readers import ReadingArguments


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
KEY_HEAD = ("key", "value", "default", "limits", "what")
# What a key's text says of a run that is resumed with another value.
RESUMED = {
    "silent": "A resumed run may change it.",
    "noted": "A resumed run may change it, with a notice.",
    "extending": "A resumed run may change it, with a notice; it also continues a finished run.",
}
FOLDER = Path("docs") / "reference"
HEADINGS = ("Args", "Attributes", "Returns", "Yields", "Raises")
PREDICTIONS = (SequencePrediction, TokenPrediction, EntitySpan, SpanPrediction, Span, ChoicePrediction)
PARTS: tuple[type[Part], ...] = (Report, Detection, Rendering, Card, Fitting, HFConfig, Windows, Explainable)
WRITTEN = "Written by `make docs` from the package; change the docstrings, not this page."
# What signatures would say at length.
DATA = "str | Path | RowTable | Sequence[Mapping[str, Any]] | Sequence[str] | Sequence[tuple[str, ...]] | Frame"
# Public methods of the public classes, beside what a reader finds in the class itself.
METHODS = ("from_pretrained", "forward", "embed", "predict", "save_pretrained")


def rendered(text: str | None) -> str:
    """A Google docstring as Markdown: its sections become lists."""
    lines = [] if text is None else inspect.cleandoc(text).splitlines()
    parts: list[str] = []
    for line in lines:
        heading = re.fullmatch(rf"({'|'.join(HEADINGS)}):", line)
        entry = re.fullmatch(r"    (\S[^:]*): (.*)", line)
        if heading:
            parts += [f"**{heading[1]}**", ""]
        elif entry and not line.startswith(" " * 5):
            parts.append(f"- {_names(entry[1])}: {entry[2]}")
        elif line.startswith("    "):
            parts.append(f"  {line.strip()}")
        else:
            parts.append(line)
    return "\n".join(parts).replace("``", "`").strip()


def _names(text: str) -> str:
    return ", ".join(f"`{name.strip('` ')}`" for name in text.split(","))


def spelt(kind: Any) -> str:
    """A type as a reader of a recipe or a signature wants it."""
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(spelt(part) for part in get_args(kind) if part is not type(None))
    if hasattr(kind, "__metadata__"):
        return spelt(kind.__origin__)
    if get_origin(kind) is tuple:
        return f"list of {spelt(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"table of {spelt(get_args(kind)[1])}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(kind, getattr(kind, "__name__", str(kind)))


def limits(schema: Mapping[str, Any]) -> str:
    """The limits of a JSON schema in words."""
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    own = [f"{sign} {schema[name]:.10g}" for name, sign in signs.items() if name in schema]
    parts = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return ", ".join([*own, *filter(None, map(limits, parts))])


def toml_value(value: Any) -> str:
    if value is None or value is dataclasses.MISSING or value in ((), {}, ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def signature(of: Callable[..., Any], name: str) -> str:
    """Its signature over several lines where it is long."""
    shown = inspect.signature(of)
    given = [part for part in shown.parameters.values() if part.name != "self" and part.annotation is not Never]
    parts = [text for part in given for text in _parameter_texts(part)]
    keywords = [i for i, part in enumerate(given) if part.kind is part.KEYWORD_ONLY]
    if keywords and not any(part.kind is part.VAR_POSITIONAL for part in given):
        parts.insert(keywords[0], "*")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"


def _parameter_texts(part: inspect.Parameter) -> list[str]:
    """The parameter, or the keys of the TypedDict that it unpacks."""
    if get_origin(part.annotation) is not Unpack:
        return [_parameter_text(part)]
    if get_args(part.annotation)[0] is FitArguments:  # a table of them follows
        return [f"**{part.name}"]
    hints = get_type_hints(get_args(part.annotation)[0])
    return [
        _parameter_text(inspect.Parameter(name, part.KEYWORD_ONLY, default=None, annotation=kind))
        for name, kind in hints.items()
    ]


def _parameter_text(part: inspect.Parameter) -> str:
    """The parameter without the modules and type variables of its annotation."""
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", str(part)).replace("[~PredictionT]", "")
    for union in re.findall(r"Union\[(?:[^\[\]]|\[[^\[\]]*\])*\]", text):
        text = text.replace(union, union[len("Union[") : -1].replace(", ", " | "))
    return text.replace(DATA, "Data").replace("NoneType", "None")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def api_page() -> str:
    parts = ["# Python API", "", WRITTEN, "", "`from bert_tasks import " + ", ".join(bert_tasks.__all__) + "`", ""]
    parts += ["`Data` is the path of a file, rows as mappings, or a table of rows that was read before.", ""]
    for name in sorted(bert_tasks.__all__, key=str.lower):
        parts += _public(name, getattr(bert_tasks, name))
    parts += ["## Reading options", "", rendered(ReadOptions.__doc__), ""]
    parts += [
        "## Predictions",
        "",
        "What `predict` gives for a row: frozen dataclasses; `to_json()` gives plain values.",
    ]
    for kind in PREDICTIONS:
        parts += _fields_of(kind)
    parts += ["", "## The task contract", "", "`bert_tasks.tasks.base`; a task of your own derives from `Task`."]
    parts += _contract()
    parts += ["", "## Errors", "", "`bert_tasks.errors`; the command line ends with their exit code.", ""]
    return "\n".join([*parts, table(("error", "exit code", "when"), list(_errors()))]) + "\n"


def _public(name: str, value: Any) -> Iterator[str]:
    yield from (f"## {name}", "")
    if not inspect.isclass(value):
        yield from ("```text", signature(value, name), "```", "", rendered(value.__doc__), "")
        if value is bert_tasks.fit:
            yield from ("**settings**", "", table(KEY_HEAD, list(_fit_rows())), "")
        return
    yield from (rendered(value.__doc__), "")
    for method in METHODS:
        if method in vars(value):
            made = getattr(value, method)
            yield from (f"### {name}.{method}", "", "```text", signature(made, f"{name}.{method}"), "```", "")
            yield from (rendered(made.__doc__), "")


def _fit_rows() -> Iterator[tuple[str, ...]]:
    """The keys of a recipe that `fit` takes, under the names of its arguments."""
    rows = {row[0].strip("`"): row for section, kind in SECTIONS.items() for row in field_rows(f"{section}.", kind)}
    for name, (section, key) in fit_keys().items():
        if name not in inspect.signature(bert_tasks.fit).parameters:
            yield f"`{name}`", *rows[f"{section}.{key}"][1:]


def _fields_of(kind: type) -> Iterator[str]:
    shown = ", ".join(kind.__annotations__) if not hasattr(kind, "__dataclass_fields__") else None
    names = [field.name for field in dataclasses.fields(kind)] if shown is None else shown.split(", ")
    yield from ("", f"### {kind.__name__}", "", rendered(kind.__doc__), "", f"Fields: {_names(','.join(names))}.")


def _contract() -> Iterator[str]:
    for kind in (Task, Feature, LossTerm, Prediction):
        yield from ("", f"### {kind.__name__}", "", rendered(kind.__doc__))
    yield from ("", "### What a task defines", "", _members(Task))
    for part in PARTS:
        yield from ("", f"### {part.__name__}", "", rendered(part.__doc__), "", _members(part))


def _members(owner: type) -> str:
    rows = []
    for name, member in vars(owner).items():
        made = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(made) or made.__doc__ is None:
            continue
        owed = "must" if getattr(made, "__isabstractmethod__", False) else "may"
        kind = "property" if isinstance(member, property) else "method"
        rows.append((f"`{name}`", kind, owed, " ".join(rendered(made.__doc__).split())))
    return table(("name", "", "defined", "what"), rows)


def _errors() -> Iterator[tuple[str, ...]]:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.BertTasksError):
            code = "128 + signal" if kind is errors.StoppedError else str(kind.exit_code)
            first = rendered(kind.__doc__).partition("\n\n")[0]
            yield f"`{name}`", code, " ".join(re.sub(r" \(exit code \d\)", "", first).split())


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
    for name, command in commands(group).items():
        parts += ["", f"## bert-tasks {name}", "", _command_text(command.help), ""]
        parts.append(_parameters(command))
    return "\n".join(parts) + "\n"


def commands(group: Any) -> dict[str, Any]:
    """Every command that is shown, those of groups with the group's name before theirs."""
    found: dict[str, Any] = {}
    for name in group.list_commands(None):
        command = group.commands[name]
        if command.hidden:
            continue
        below = commands(command) if hasattr(command, "commands") else {}
        found |= {f"{name} {inner}": value for inner, value in below.items()} if below else {name: command}
    return found


def _command_text(text: str) -> str:
    """Examples as code."""
    plain = inspect.cleandoc(text).replace("\b\n", "")
    return re.sub(r"^(Examples?:) (.*)$", r"\1 `\2`", plain, flags=re.MULTILINE)


def _parameters(command: Any) -> str:
    rows = [_parameter(item) for item in command.params if not getattr(item, "hidden", False) and item.name != "help"]
    return table(("argument or option", "value", "default", "what"), rows)


def _parameter(item: Any) -> tuple[str, ...]:
    is_option = item.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in [*item.opts, *item.secondary_opts])
    if not is_option:
        metavar = item.metavar if item.metavar is not None else item.name.upper()
        return f"`{metavar}`", "", "needed" if item.required else "", _text(item.help)
    value = "" if getattr(item, "is_flag", False) else _value(item)
    default = "needed" if item.required else toml_value(getattr(item, "default", None) or None)
    is_told = re.search("repeated|twice", item.help) is not None
    return names, value, default, _text(item.help) + (" May be repeated." if item.multiple and not is_told else "")


def _text(text: str | None) -> str:
    return "" if text is None else " ".join(text.split())


def _value(item: Any) -> str:
    kind = item.type_descriptor.annotation
    if item.metavar is not None:
        return f"`{item.metavar}`"
    return {Path: "path"}.get(kind, spelt(kind))


def recipe_page() -> str:
    parts = [
        "# Recipe",
        "",
        WRITTEN,
        "",
        "A recipe is a TOML file. Unknown keys are refused. A key without a default may",
    ]
    parts += ["be left out unless it is needed. Paths start at the recipe's folder.", ""]
    parts.append(table(KEY_HEAD, list(_top_rows())))
    for name in ("model", "data"):
        parts += ["", f"## [{name}]", "", *_section(name, SECTIONS[name])]
    parts += ["", "## [settings]", "", "The fields of the task."]
    for name, task in TASKS.items():
        _, *aliases = task_names(task)
        also = [f"`task` may also be {' or '.join(f'`{alias}`' for alias in aliases)}.", ""] if aliases else []
        parts += ["", f"### {name}", "", *also, _settings(task)]
    for name in ("optim", "run", "teacher", "folds", "search"):
        parts += ["", f"## [{name}]", "", *_section(name, SECTIONS[name])]
    parts += ["", "The values of a key that is searched:", ""]
    parts.append(table(KEY_HEAD, field_rows("search.KEY.", Space)))
    return "\n".join(parts) + "\n"


def _top_rows() -> Iterator[tuple[str, ...]]:
    rows = field_rows("", Recipe)
    yield next(row for row in rows if row[0] == "`task`")


def _section(name: str, kind: Any) -> Iterator[str]:
    yield from (" ".join(rendered(kind.__doc__).split()), "")
    yield table(KEY_HEAD, field_rows(f"{name}.", kind))


def field_rows(prefix: str, kind: Any) -> list[tuple[str, ...]]:
    """One row for each field of a section."""
    whole = Recipe.model_json_schema()
    schema = whole if kind is Recipe else whole["$defs"][kind.__name__]
    hints = get_type_hints(kind, include_extras=True)
    rows = []
    for name, entry in schema["properties"].items():
        default = _default(kind, name)
        shown = "needed" if name in schema.get("required", ()) else toml_value(default)
        resumed = RESUMED.get(resume_effects().get(f"{prefix}{name}", ""), "")
        text = " ".join(filter(None, (_text(entry.get("description")), resumed)))
        rows.append((f"`{prefix}{name}`", spelt(hints[name]), shown, limits(entry), text))
    return rows


def _default(kind: Any, name: str) -> Any:
    if issubclass(kind, BaseModel):
        return kind.model_fields[name].default
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)


def _settings(task: type[Task]) -> str:
    hints = get_type_hints(task, include_extras=True)
    rows = [
        (f"`settings.{field.name}`", spelt(hints[field.name]), toml_value(field.default), meaning_of(task, field.name))
        for field in dataclasses.fields(task)
        if field.init and field.name not in Fitting.of(task).fields
    ]
    return table(("key", "value", "default", "what"), rows)


def meaning_of(task: type[Task], name: str) -> str:
    """What the task says of a setting, or another task that has the same one."""
    for kind in (task, *TASKS.values()):
        text = field_descriptions(kind).get(name)
        if text is not None:
            return text[0].upper() + text[1:]
    return ""


def arguments_module() -> str:
    """The source of bert_tasks/recipe/arguments.py: the types of the arguments of `fit` that are keys of a recipe."""
    hints = {section: get_type_hints(kind) for section, kind in SECTIONS.items()}
    lines = [
        f"    {name}: {_type_text(hints[section][key])}"
        for name, (section, key) in fit_keys().items()
        if name not in inspect.signature(bert_tasks.fit).parameters
    ]
    return "\n".join([ARGUMENTS_HEAD, *lines]) + "\n"


def _type_text(kind: Any) -> str:
    """The annotation of a type."""
    if get_origin(kind) is Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in get_args(kind)) + "]"
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"tuple[{', '.join(map(_type_text, get_args(kind)))}]"
    return {type(None): "None", Ellipsis: "..."}.get(kind, getattr(kind, "__name__", str(kind)))


PAGES: Mapping[str, Callable[[], str]] = {"api.md": api_page, "cli.md": cli_page, "recipe.md": recipe_page}


def main() -> None:
    """Writes the pages, and the schema that describes the same keys, below the folder given or in the repository."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (root / FOLDER / name).write_text(page(), encoding="utf-8")
    (root / "bert_tasks" / "recipe" / "arguments.py").write_text(arguments_module(), encoding="utf-8")
    (root / "recipes" / "recipe.schema.json").write_text(schema_text(recipe_schema()), encoding="utf-8")


if __name__ == "__main__":
    main()

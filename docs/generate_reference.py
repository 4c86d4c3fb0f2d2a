"""Writes docs/reference and the recipes' JSON schema from the package: public names, commands, recipe keys.

Owns how docstrings, options and fields become Markdown. `make docs` runs it; tests/test_docs.py compares its result
with the files of the repository.
"""

import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, WithJsonSchema

import bert_tasks
import bert_tasks.errors as errors
from bert_tasks.cards.card import write_card
from bert_tasks.cards.push import push
from bert_tasks.cli.app import GROUPS, app
from bert_tasks.data.columns import Column
from bert_tasks.data.splits import DataSpec
from bert_tasks.encoder.heads import PerTokenHead, SequenceHead
from bert_tasks.experiments.folds import train_folds
from bert_tasks.experiments.search import search
from bert_tasks.experiments.seeds import train_seeds
from bert_tasks.export import export
from bert_tasks.inference import quantize
from bert_tasks.metrics.classification import pearson
from bert_tasks.model.encoder_with_heads import EncoderWithHeads
from bert_tasks.outputs.base import LossTerm, Output, labelled, no_loss
from bert_tasks.outputs.explanation import ExplainedLogit, TokenSpan
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.hf_config import label_config
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.samples import labelled_samples, row_logits, shown_logits
from bert_tasks.outputs.sections import ReportSections, RowResult
from bert_tasks.outputs.settings import fitted, per_label
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
from bert_tasks.report import make_report
from bert_tasks.tasks import TASKS, task_names
from bert_tasks.tasks.base import FeatureKeys, Task
from bert_tasks.tasks.masking import MaskingRule
from bert_tasks.tasks.settings import TaskSettings
from bert_tasks.tasks.windows.texts import EncodedText, truncated_texts
from bert_tasks.tasks.windows.words import WindowRules, document_windows, split_words
from bert_tasks.training.state import FitResult

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
KEY_HEAD = ("key", "value", "default", "limits", "what")
SETTING_HEAD = ("key", "value", "default", "what")
OPTION_HEAD = ("argument or option", "value", "default", "what")
NO_LABELS = "None. Do not set them."
COMMON_OPTIONS = "Several commands share these options. Each command lists the ones that it accepts."
# What a key's text says of a run that is resumed with another value.
RESUMED = {
    "silent": "A resumed run may change it.",
    "noted": "A resumed run may change it, with a notice.",
    "extending": "A resumed run may change it, with a notice; it also continues a finished run.",
}
FOLDER = Path("docs") / "reference"
HEADINGS = ("Args", "Attributes", "Returns", "Yields", "Raises")
# The module from which a user imports them -> public functions and classes.
API: Mapping[str, tuple[Any, ...]] = {
    "bert_tasks": tuple(getattr(bert_tasks, name) for name in sorted(bert_tasks.__all__, key=str.lower)),
    "bert_tasks.cards.card": (write_card,),
    "bert_tasks.cards.push": (push,),
    "bert_tasks.experiments.folds": (train_folds,),
    "bert_tasks.experiments.search": (search,),
    "bert_tasks.experiments.seeds": (train_seeds,),
    "bert_tasks.export": (export,),
    "bert_tasks.inference": (quantize,),
    "bert_tasks.report": (make_report,),
    "bert_tasks.tasks": tuple(TASKS.values()),
    "bert_tasks.tasks.masking": (MaskingRule,),
    "bert_tasks.training.state": (FitResult,),
}


def built_in_outputs() -> dict[str, tuple[type[Output], ...]]:
    """The outputs of the tasks, by the module from which a user imports them."""
    by_module: dict[str, tuple[type[Output], ...]] = {}
    for task in TASKS.values():
        for output in task.outputs:
            others = by_module.get(output.__module__, ())
            if output not in others:
                by_module[output.__module__] = (*others, output)
    return by_module


OUTPUTS = built_in_outputs()
# What the page of the contract describes, in its order.
DESCRIBED: Mapping[str, tuple[Any, ...]] = {
    "bert_tasks.tasks.settings": (TaskSettings,),
    "bert_tasks.tasks.base": (Task, FeatureKeys),
    "bert_tasks.outputs.base": (Output, LossTerm, no_loss, labelled),
    "bert_tasks.outputs.features": (Feature,),
    "bert_tasks.outputs.prediction": (Prediction,),
    "bert_tasks.outputs.settings": (fitted, per_label),
    "bert_tasks.outputs.samples": (labelled_samples, row_logits, shown_logits),
    "bert_tasks.outputs.sections": (ReportSections, RowResult),
    "bert_tasks.outputs.explanation": (TokenSpan, ExplainedLogit),
    "bert_tasks.outputs.files": (FileFormat,),
    "bert_tasks.outputs.hf_config": (label_config,),
    "bert_tasks.data.columns": (Column,),
    "bert_tasks.encoder.heads": (SequenceHead, PerTokenHead),
    "bert_tasks.metrics.classification": (pearson,),
    "bert_tasks.tasks.windows.texts": (truncated_texts, EncodedText),
    "bert_tasks.tasks.windows.words": (WindowRules, split_words, document_windows),
    **OUTPUTS,
}
# Classes that are shown with the arguments of their constructor, because their docstrings do not list all of them.
CONSTRUCTED = (ReportSections, RowResult, TokenSpan, ExplainedLogit, EncodedText)
WITHOUT_EXAMPLE = (TaskSettings, labelled_samples, row_logits, shown_logits, *CONSTRUCTED)
# The described values with an Example, which the tests run.
CONTRACT: Mapping[str, tuple[Any, ...]] = {
    module: tuple(value for value in values if value not in WITHOUT_EXAMPLE) for module, values in DESCRIBED.items()
}
# The classes of the contract whose members are shown, and which ones if not all.
MEMBERS: Mapping[type, tuple[str, ...] | None] = {
    TaskSettings: ("of", "output_class", "choice_of", "settings", "with_settings"),
    Task: None,
    FeatureKeys: None,
    Output: None,
    EncodedText: None,
}
TOKEN_SPANS = """\
`Task.token_spans` returns `TokenSpans`. They hold a `TokenSpan` for each token of each feature, and None for a special
token."""
WRITTEN = "Written by `make docs` from the package; change the docstrings, not this page."
API_HEAD = """\
Examples use `base`, which is "google-bert/bert-base-uncased", a `TaskModel` `model`, the models of pairs `reranker`
and `nli`, and the folder `runs/first` of a finished run. A name of a model is a folder, a hub id or
`package:NAME/PATH`. The classes of a task of your own are in the [task contract](task_contract.md)."""
TASKS_HEAD = """
The settings of each task are in the [recipe reference](recipe.md#settings). `predict` returns frozen dataclasses, whose
`to_json()` returns plain values."""
CONTRACT_HEAD = """\
A [task of your own](../how_to/own_task.md) has two halves. The task derives from `Task` and makes windows and logits
from rows. Its output derives from `Output` and makes everything else from the logits: the loss, the predictions, the
metrics and the report. The members with "(must)" have no default. A task of your own can also use one of the
[outputs of the tasks](#outputs-of-the-tasks). In the examples `task` is a `SequenceClassification`, `model` its model,
and `tokenizer` the model's tokenizer. In shapes, B is the number of windows (sequences), S of samples (rows), R of
labelled samples or of the tokens that a head reads, and L of labels."""
OUTPUTS_HEAD = """\
The attributes of these classes are settings. A recipe sets them under `[settings]`, together with those of the task.
Training computes the values that are fitted."""
MASKS = "[`MaskingRule`](api.md#maskingrule) explains the settings of masks, with their sources."
# Public methods of the public classes, beside what a reader finds in the class itself.
METHODS = ("from_pretrained", "from_config", "forward", "embed", "predict", "rank", "zero_shot", "with_layers")
METHODS += ("save_pretrained", "save_adapter", "train")


def prediction_classes(task: type[Task]) -> tuple[type, ...]:
    """What `predict` returns for a row of a task, with the dataclasses inside of it."""
    found: dict[type, None] = {}
    for output in task.outputs:
        found[output.prediction] = None
        hints = get_type_hints(output.prediction)
        for name in output.written_fields():
            found |= dict.fromkeys(dataclasses_in(hints[name]))
    return tuple(found)


def dataclasses_in(annotation: Any) -> Iterator[type]:
    """The dataclasses that an annotation names."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from dataclasses_in(argument)


PREDICTIONS = {name: prediction_classes(task) for name, task in TASKS.items()}


def rendered(text: str | None) -> str:
    """A Google docstring as Markdown: its sections become lists, its Example a block."""
    described, _, example = ("" if text is None else inspect.cleandoc(text)).partition("\nExample:\n")
    parts: list[str] = []
    for line in described.splitlines():
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
    block = f"\n\n```pycon\n{inspect.cleandoc(example)}\n```" if example else ""
    return "\n".join(parts).replace("``", "`").strip() + block


def without_attributes(text: str | None) -> str:
    """A docstring without its list of attributes."""
    return re.sub(r"\nAttributes:\n(?:    .*\n|\n(?=    ))*", "", inspect.cleandoc("" if text is None else text) + "\n")


def _names(text: str) -> str:
    return ", ".join(f"`{name.strip('` ')}`" for name in text.split(","))


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


def signature(of: Callable[..., Any], name: str) -> str:
    """The names and defaults of its arguments, over several lines if they are long."""
    parameters = [each for each in inspect.signature(of).parameters.values() if each.annotation is not Never]
    plain = [each.replace(annotation=each.empty) for each in parameters if each.name != "self"]
    line = f"{name}{inspect.Signature(plain)}".replace("mappingproxy({})", "{}").replace("<factory>", "{}")
    return "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ", break_long_words=False))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def api_page() -> str:
    parts = ["# Python API", "", WRITTEN, "", API_HEAD]
    for module, values in API.items():
        parts += ["", f"## {module}"]
        parts += [TASKS_HEAD] if module == "bert_tasks.tasks" else []
        for value in values:
            parts += ["", *_public(value)]
    parts += ["", "## bert_tasks.errors", "", "The command line ends with the exit code in brackets.", "", *_errors()]
    return "\n".join(parts) + "\n"


def _public(value: Any) -> Iterator[str]:
    """The section of a function or a class, with the dataclass that it returns, or its methods."""
    name = value.__name__
    yield from (f"### {name}", "")
    if not inspect.isclass(value):
        yield from _call(name, value)
        result = inspect.signature(value).return_annotation
        if result is FitResult:
            yield from ("", "Returns a [`FitResult`](#fitresult).")
        elif dataclasses.is_dataclass(result):
            yield from _result(result)
    elif value in TASKS.values():
        yield rendered(without_attributes(value.__doc__))
        for prediction in PREDICTIONS[value.name]:
            first = next(task for task in TASKS.values() if prediction in PREDICTIONS[task.name])
            text = rendered(prediction.__doc__) if first is value else f"See `{first.__name__}`."
            yield from ("", f"**`{prediction.__name__}`**: {text}")
    else:
        yield rendered(value.__doc__)
        if value in (bert_tasks.MultiTaskModel, bert_tasks.Trainer):
            yield from ("", *_call(name, value.__init__))
        if value is bert_tasks.TrainerCallback:
            yield from ("", "**Hooks**", "", _members(value))
        yield from (line for method in methods_of(value) for line in _method(value, method))


def methods_of(owner: type) -> list[str]:
    """The methods of a class that its page shows: its own, and those that models of one task share with others."""
    own = set(vars(owner))
    if owner is bert_tasks.TaskModel:
        own |= set(vars(EncoderWithHeads))
    if owner is bert_tasks.MultiTaskModel:
        own.discard("save_adapter")  # it only raises an error
    return [method for method in METHODS if method in own]


def _call(name: str, function: Callable[..., Any]) -> Iterator[str]:
    call = signature(function, name)
    docstring = inspect.getdoc(function)  # of the base class, if an override has none
    yield from (f"```text\n{call}\n```" if "\n" in call else f"`{call}`", "", rendered(docstring))


def _method(owner: type, name: str) -> Iterator[str]:
    yield from ("", f"#### {owner.__name__}.{name}", "", *_call(f"{owner.__name__}.{name}", getattr(owner, name)))


def _result(result_class: type) -> Iterator[str]:
    """The attributes of what a function returns."""
    yield from ("", f"**`{result_class.__name__}`**: {rendered(result_class.__doc__)}")
    for name, member in vars(result_class).items():
        if isinstance(member, property) and member.fget is not None and member.fget.__doc__ is not None:
            yield f"- `{name}`: {rendered(member.fget.__doc__)}"


def contract_page() -> str:
    parts = ["# Task contract", "", WRITTEN, "", CONTRACT_HEAD, ""]
    for module, values in DESCRIBED.items():
        if module == next(iter(OUTPUTS)):
            parts += ["## Outputs of the tasks", "", OUTPUTS_HEAD, ""]
        parts += [f"## {module}", ""]
        for value in values:
            parts += [f"### {value.__name__}", ""]
            if inspect.isclass(value) and value not in CONSTRUCTED:
                parts += [rendered(value.__doc__), ""]
            else:
                parts += [*_call(value.__name__, value), ""]
            if value is TokenSpan:
                parts += [TOKEN_SPANS, ""]
            if value in MEMBERS:
                parts += [_members(value, MEMBERS[value]), ""]
    return "\n".join(parts)


def _members(owner: type, shown: tuple[str, ...] | None = None) -> str:
    """What a class defines, or some of it."""
    lines = []
    for name, member in vars(owner).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_hidden = name.startswith("_") or isinstance(member, staticmethod)
        if is_hidden or not inspect.isfunction(function) or function.__doc__ is None:
            continue
        if shown is not None and name not in shown:
            continue
        must = " (must)" if getattr(function, "__isabstractmethod__", False) else ""
        paragraphs = inspect.cleandoc(function.__doc__).split("\n\n")
        arguments = [_argument(parameter) for parameter in inspect.signature(function).parameters.values()][1:]
        call = name if isinstance(member, property) else f"{name}({', '.join(arguments)})"
        lines.append(f"- `{call}`{must}: {_joined(paragraphs[0])}")
        for text in paragraphs[1:]:
            if text.startswith(("Raises:", "Example:")):
                continue
            sections = rendered("\n" + text).replace("**Args**\n\n", "").replace("**Returns**\n\n", "- Returns: ")
            if sections.startswith("- "):
                lines += [f"  - {_joined(entry)}" for entry in sections.removeprefix("- ").split("\n- ")]
            else:
                lines[-1] += f" {_joined(sections)}"
    return "\n".join(lines)


def _argument(parameter: inspect.Parameter) -> str:
    return f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name


def _joined(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _errors() -> Iterator[str]:
    for name, error_class in vars(errors).items():
        if inspect.isclass(error_class) and issubclass(error_class, errors.BertTasksError):
            code = "128 + signal" if error_class is errors.StoppedError else str(error_class.exit_code)
            first = rendered(error_class.__doc__).partition("\n\n")[0]
            yield f"- `{name}` ({code}): {_joined(re.sub(r' .exit code [^)]*.', '', first))}"


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
    parts += ["", "## Common options", "", COMMON_OPTIONS, "", table(("option", "value", "default", "what"), shared)]
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
        return f"`{metavar}`", "", "needed" if item.required else "", _text(item.help)
    value = "" if getattr(item, "is_flag", False) else _value(item)
    default = "needed" if item.required else toml_value(getattr(item, "default", None) or None)
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
        "A recipe is a TOML file. bert_tasks rejects unknown keys. A key without a default may",
    ]
    parts += ["be left out unless it is needed. Paths start at the recipe's folder.", ""]
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
    yield from (" ".join(rendered(section.__doc__).split()), "")
    yield table(KEY_HEAD, field_rows(f"{name}.", section))


def field_rows(prefix: str, section: Any) -> list[tuple[str, ...]]:
    """One row for each field of a section."""
    whole = Recipe.model_json_schema()
    schema = whole if section is Recipe else whole["$defs"][section.__name__]
    hints = get_type_hints(section, include_extras=True)
    rows = []
    for name, entry in schema["properties"].items():
        default = _default(section, name)
        shown = "needed" if name in schema.get("required", ()) else toml_value(default)
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
    "api.md": api_page,
    "task_contract.md": contract_page,
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

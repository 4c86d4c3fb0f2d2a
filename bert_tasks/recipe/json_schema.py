"""The JSON schema (draft 2020-12, https://json-schema.org) with which editors complete and check recipes.

pydantic makes the schema of the sections. The settings depend on the task, so each task has a schema of its settings,
which a condition on the key ``task`` selects.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from bert_tasks.recipe.schema import Recipe, load_task_class
from bert_tasks.tasks import TASK_NAMES, TASKS, task_names
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.settings import required_settings

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_OWN_TASK = {"pattern": r"^\w+(\.\w+)*:\w+$"}
_SOURCES = ("dataset", "dir", "train")


def recipe_schema(task: str | None = None) -> Schema:
    """Returns the schema of recipes of one task, or of all tasks and of your own.

    A task is a name of ``TASKS`` or ``module:Class``.

    Raises:
        RecipeError: There is no such task.
    """
    schema = _without_null(Recipe.model_json_schema())
    title = "A recipe of bert-tasks"
    if task is not None:
        title = f"A recipe for {task}"
    del schema["$defs"]["DataSpec"]["properties"]["tasks"]  # in a recipe these are sections of the tasks
    schema["$defs"]["DataSpec"]["oneOf"] = [{"required": [name]} for name in _SOURCES]
    properties = schema["properties"]
    if task is not None:
        task_class = load_task_class(task)
        if ":" in task:
            properties["task"] = {"const": task}
        else:
            properties["task"] = {"enum": list(task_names(task_class))}
        properties["settings"] = _settings(task_class)
        if properties["settings"].get("required"):
            schema["required"].append("settings")
    else:
        properties["task"] = {"anyOf": [{"enum": list(TASK_NAMES)}, _OWN_TASK]}
        properties["settings"] = {"type": "object"}
        schema["required"].remove("task")
        schema["oneOf"] = [{"required": ["task"]}, {"required": ["tasks"]}]
        schema["allOf"] = []
        for name, each in TASKS.items():
            schema["$defs"][f"settings of {name}"] = _settings(each)
            names = {"properties": {"task": {"enum": list(task_names(each))}}}
            settings = {"properties": {"settings": {"$ref": f"#/$defs/settings of {each.name}"}}}
            schema["allOf"].append({"if": names, "then": settings})
    del schema["title"]  # which is the name of the class
    return {"$schema": _DIALECT, "title": title, **schema}


def schema_text(schema: Mapping[str, Any]) -> str:
    """Returns the schema as the text of a file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _settings(task_class: type[Task]) -> Schema:
    """Returns the settings of a task in a recipe, described by docstrings."""
    descriptions = setting_descriptions(task_class)
    properties: Schema = {}
    for name, setting in task_class.stated_settings().items():
        properties[name] = _without_null(TypeAdapter[Any](setting.hint).json_schema())
        if name in descriptions:
            properties[name]["description"] = descriptions[name]
        if setting.default not in (dataclasses.MISSING, None):
            properties[name]["default"] = json.loads(json.dumps(setting.default))  # tuples become lists
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    required = required_settings(task_class)
    if required:
        schema["required"] = required
    return schema


def setting_descriptions(task_class: type[Task]) -> dict[str, str]:
    """Returns the text of each setting of a task and of its outputs, of the first output that describes it."""
    descriptions: dict[str, str] = {}
    # In reverse order, so that the first output that describes a setting is the last to write.
    for output in reversed(task_class.outputs):
        descriptions |= _attribute_descriptions(output)
    return descriptions | _attribute_descriptions(task_class)


def _attribute_descriptions(owner: type) -> dict[str, str]:
    """Returns attribute -> its text under ``Attributes:`` of the class or nearest parent."""
    descriptions: dict[str, str] = {}
    for parent in reversed(owner.__mro__):
        if parent.__module__ == "builtins" or parent.__doc__ is None:
            continue
        _, _, attributes = inspect.cleandoc(parent.__doc__).partition("Attributes:\n")
        # An entry is indented by 4, and the lines that continue it by 8 or more.
        for entry in re.finditer(r"^    (\w[\w, ]*): (.*(?:\n {8,}.*)*)", attributes, flags=re.MULTILINE):
            words = " ".join(entry[2].split()).replace("``", "`")
            descriptions |= {name.strip(): words for name in entry[1].split(",")}
    return descriptions


def _without_null(schema: Any) -> Any:
    """Removes null, which TOML lacks. A recipe leaves the key out."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_null(value) for key, value in schema.items() if not (key == "default" and value is None)}
    options = plain.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        rest = [option for option in options if option != {"type": "null"}]
        del plain["anyOf"]  # the key goes to the end, where those of a single option are
        if len(rest) == 1:
            plain |= rest[0]
        else:
            plain["anyOf"] = rest
    return plain

"""The tasks, one file each, ``TASKS``, the one registry, and the names that users may write for them."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.masked_language_modeling.task import MaskedLanguageModeling
from bert_tasks.tasks.multiple_choice import MultipleChoice
from bert_tasks.tasks.pair_classification import PairClassification
from bert_tasks.tasks.replaced_token_detection import ReplacedTokens
from bert_tasks.tasks.sequence_classification.task import SequenceClassification
from bert_tasks.tasks.span_extraction.task import SpanExtraction
from bert_tasks.tasks.token_classification.task import TokenClassification

_ALL: tuple[type[Task], ...] = (
    SequenceClassification,
    PairClassification,
    TokenClassification,
    SpanExtraction,
    MultipleChoice,
    MaskedLanguageModeling,
    ReplacedTokens,
)
TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in _ALL})
TASK_NAMES: Mapping[str, type[Task]] = MappingProxyType(
    {name: task for task in _ALL for name in (task.name, *task.aliases)}
)


def tasks_with_head(head: str | None) -> tuple[type[Task], ...]:
    """The built-in tasks that read transformers' folders with this head; the first is the one that they are taken for.

    Args:
        head: a ``HeadKind``; no task has another one.
    """
    return tuple(task for task in _ALL if head is not None and task.default_head == head)


def named_task(name: str) -> type[Task]:
    """The built-in task of this name; the names of the hub's pipelines are accepted too.

    Raises:
        UsageError: there is none; the message names the nearest and all of them.
    """
    if name in TASK_NAMES:
        return TASK_NAMES[name]
    close = get_close_matches(name.lower().replace("_", "-"), TASK_NAMES, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    known = [task.name + (f" (or {', '.join(task.aliases)})" if task.aliases else "") for task in _ALL]
    raise UsageError(f"unknown task {name!r}{hint} known: {', '.join(known)}")


def typed_setting(kind: type[Task], name: str, value: Any) -> Any:
    """A value as the type of the field wants it, say a list as a tuple.

    Raises:
        pydantic.ValidationError: it is of another type; nothing is converted between texts, numbers and booleans.
    """
    adapter = TypeAdapter[Any](get_type_hints(kind, include_extras=True)[name], config=ConfigDict(allow_inf_nan=False))
    return adapter.validate_json(json.dumps(value, default=str), strict=True)


__all__ = [
    "TASKS",
    "TASK_NAMES",
    "MaskedLanguageModeling",
    "MultipleChoice",
    "PairClassification",
    "ReplacedTokens",
    "SequenceClassification",
    "SpanExtraction",
    "Task",
    "TokenClassification",
    "named_task",
    "tasks_with_head",
    "typed_setting",
]

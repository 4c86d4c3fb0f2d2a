"""The tasks, one file each, their registry ``TASKS``, and their names for users."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.masked_language_modeling import MaskedLanguageModeling
from bert_tasks.tasks.multiple_choice import MultipleChoice
from bert_tasks.tasks.pair_classification import PairClassification
from bert_tasks.tasks.replaced_token_detection import ReplacedTokens
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.tasks.span_extraction import SpanExtraction
from bert_tasks.tasks.token_classification import TokenClassification

_ALL: tuple[type[Task], ...] = (
    SequenceClassification,
    PairClassification,
    TokenClassification,
    SpanExtraction,
    MultipleChoice,
    MaskedLanguageModeling,
    ReplacedTokens,
)
# The names of transformers' pipelines, and of tasks on the Hugging Face Hub.
_ALIASES: Mapping[str, type[Task]] = {
    "text-classification": SequenceClassification,
    "sentiment-analysis": SequenceClassification,
    "question-answering": SpanExtraction,
    "ner": TokenClassification,
    "fill-mask": MaskedLanguageModeling,
}
TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in _ALL})
TASK_NAMES: Mapping[str, type[Task]] = MappingProxyType({**TASKS, **_ALIASES})


def tasks_with_head(head: str | None) -> tuple[type[Task], ...]:
    """Returns the tasks that read transformers' folders with this head, default first.

    Args:
        head: A ``HeadKind``. No task has another one.
    """
    if head is None:  # tasks without a head of transformers have None, too
        return ()
    return tuple(task for task in _ALL if task.outputs[0].head_kind == head)


def task_names(task_class: type[Task]) -> tuple[str, ...]:
    """Returns a task's names for users, its own before the hub's pipelines."""
    return (task_class.name, *(alias for alias, task in _ALIASES.items() if task is task_class))


def stored_name(task_class: type[Task]) -> str:
    """Returns a task's name in config.json, from ``TASKS`` or as ``module:Class``."""
    # By identity, because a class of one's own may have the name of a task in the registry.
    if TASKS.get(task_class.name) is task_class:
        return task_class.name
    return f"{task_class.__module__}:{task_class.__qualname__}"


def named_task(name: str) -> type[Task]:
    """Returns the task of this name in the registry, or of a pipeline of the hub.

    Raises:
        UsageError: There is none. The message has the nearest name and all names.
    """
    if name in TASK_NAMES:
        return TASK_NAMES[name]
    close = get_close_matches(name.lower().replace("_", "-"), TASK_NAMES, n=1)
    hint = "."
    if close:
        hint = f", did you mean {close[0]!r}?"
    known: list[str] = []
    for task in _ALL:
        own_name, *aliases = task_names(task)
        if aliases:
            known.append(f"{own_name} (or {', '.join(aliases)})")
        else:
            known.append(own_name)
    raise UsageError(f"unknown task {name!r}{hint} Known names are {', '.join(known)}")


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
    "stored_name",
    "task_names",
    "tasks_with_head",
]

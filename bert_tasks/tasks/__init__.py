"""The tasks, one file each, and ``TASKS``, the one registry."""

from collections.abc import Mapping
from types import MappingProxyType

from bert_tasks.tasks.base import Task
from bert_tasks.tasks.sequence_classification import SequenceClassification

TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in (SequenceClassification,)})

__all__ = ["TASKS", "SequenceClassification", "Task"]

"""The tasks, one file each, and ``TASKS``, the one registry."""

from collections.abc import Mapping
from types import MappingProxyType

from bert_tasks.tasks.base import Task
from bert_tasks.tasks.pair_classification import PairClassification
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.tasks.span_extraction import SpanExtraction
from bert_tasks.tasks.token_classification import TokenClassification

_ALL: tuple[type[Task], ...] = (SequenceClassification, PairClassification, TokenClassification, SpanExtraction)
TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in _ALL})

__all__ = [
    "TASKS",
    "PairClassification",
    "SequenceClassification",
    "SpanExtraction",
    "Task",
    "TokenClassification",
]

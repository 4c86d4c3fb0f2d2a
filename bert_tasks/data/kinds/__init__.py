"""Column kinds: what a column holds, and everything that the package knows about it.

Owns one class for each kind. A class says how a cell is parsed, how it is stored, which of its parts a model reads,
which labels it has, and what a split spreads evenly or keeps together. No other module lists kinds: a new kind is one
class here. Imports nothing heavy.
"""

from bert_tasks.data.kinds import answers, labels, texts
from bert_tasks.data.kinds.answers import CONTEXT, UNKNOWN_START, AnswerTexts, Choice
from bert_tasks.data.kinds.base import KINDS, REMARKS, Column, ColumnKind
from bert_tasks.data.kinds.labels import known_tags, unknown_name

__all__ = [
    "CONTEXT",
    "KINDS",
    "REMARKS",
    "UNKNOWN_START",
    "AnswerTexts",
    "Choice",
    "Column",
    "ColumnKind",
    "answers",
    "known_tags",
    "labels",
    "texts",
    "unknown_name",
]

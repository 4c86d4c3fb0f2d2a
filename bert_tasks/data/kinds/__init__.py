"""Kinds of columns, with everything that the package knows about their values.

Owns one class for each kind. A class parses and stores a cell, returns the parts that a model reads and the labels, and
tells what a split spreads evenly or keeps together. No other module lists kinds, so a new kind is one class here.
Imports nothing heavy.
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

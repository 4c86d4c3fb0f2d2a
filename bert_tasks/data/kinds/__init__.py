"""Kinds of columns, with what the package knows about the values of one cell.

There is one class for each kind. A class converts and stores cells, and returns the texts that a model reads, the
classes and what a split spreads evenly. What concerns several columns is in ``layouts`` (where a column comes from) and
in ``relations`` (what must hold between columns).
"""

from bert_tasks.data.kinds.answers import (
    CONTEXT,
    LEAST_CHOICES,
    UNKNOWN_START,
    Answers,
    AnswerTexts,
    Choice,
    ChoiceFromOne,
    Choices,
)
from bert_tasks.data.kinds.base import KINDS, ClassKind, Column, ColumnKind, LabelKind, TextKind
from bert_tasks.data.kinds.labels import Label, Labels, Number, Spans, Tags
from bert_tasks.data.kinds.texts import Id, Text, Texts, Words

__all__ = [
    "CONTEXT",
    "KINDS",
    "LEAST_CHOICES",
    "UNKNOWN_START",
    "AnswerTexts",
    "Answers",
    "Choice",
    "ChoiceFromOne",
    "Choices",
    "ClassKind",
    "Column",
    "ColumnKind",
    "Id",
    "Label",
    "LabelKind",
    "Labels",
    "Number",
    "Spans",
    "Tags",
    "Text",
    "TextKind",
    "Texts",
    "Words",
]

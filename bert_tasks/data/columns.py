"""What a row is and what its columns hold.

Owns the two types that readers, tasks and callers share. Must not know how files are read or what a task does
with the values, and imports nothing heavy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
Kind = Literal["text", "id", "label", "labels", "number", "words", "tags", "answers"]

TARGET_KINDS: frozenset[Kind] = frozenset({"label", "labels", "number", "tags", "answers"})


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column a task reads. ``kind`` tells the data layer what a valid value is.

    text: a string. id: a string or whole number that names something, as a string. label: one of the task's label
    names. labels: a list of them (a csv cell separates them by ``;``). number: a finite number. words: a list of
    strings. tags: one tag name for each of the row's words. answers: the texts that answer the row's question and
    where they start in its ``context``; none where it cannot be answered. `data.values` says which spellings a cell
    may use.

    ``required`` columns must be in every file; the others are targets, which may be missing when only predictions
    are wanted. Texts, ids and words that are not required may always be missing.
    """

    name: str
    kind: Kind
    required: bool = True

    @property
    def is_target(self) -> bool:
        return not self.required and self.kind in TARGET_KINDS


def column_of(columns: Iterable[Column], *kinds: Kind) -> Column | None:
    """The first column of one of the kinds."""
    return next((column for column in columns if column.kind in kinds), None)

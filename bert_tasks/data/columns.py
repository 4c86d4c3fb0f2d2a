"""What a row is and what its columns hold.

Owns the two types that readers, tasks and callers share. Must not know how files are read or what a task does
with the values, and imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column a task reads. ``kind`` tells the data layer what a valid value is.

    text: a string. label: one of the task's label names. labels: a list of them (a csv cell separates them by
    ``;``). number: a finite number. ``required`` columns must be in every file; the others are targets, which
    may be missing when only predictions are wanted. A text that is not required may always be missing.
    """

    name: str
    kind: Literal["text", "label", "labels", "number"]
    required: bool = True

    @property
    def is_target(self) -> bool:
        return not self.required and self.kind != "text"

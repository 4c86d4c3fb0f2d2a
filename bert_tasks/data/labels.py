"""A census of the labels in a column, from which unknown, misspelt and mixed labels are reported.

Owns the counting and the wording. Must not know how files are read.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bert_tasks.data.columns import Column, Kind
from bert_tasks.data.problems import SHOWN, Problems, suggestion
from bert_tasks.data.tags import label_scheme, to_iob2

LABEL_KINDS: tuple[Kind, ...] = ("label", "labels", "tags")
MOST_LABELS = 1000
_MOST_COUNTED = 100_000


def is_integer(value: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", value) is not None


@dataclass
class LabelCensus:
    """How often each label value stands, and the first lines where it does; bounded in memory.

    Tags count for each word, in IOB2 whatever scheme they are written in.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[int]] = field(default_factory=dict)
    rows: int = 0

    def add(self, value: Any, line: int, column: Column) -> None:
        if column.kind not in LABEL_KINDS or value is None:
            return
        self.rows += 1
        for name in _names(value, column):
            if name not in self.counts and len(self.counts) >= _MOST_COUNTED:
                continue
            self.counts[name] += 1
            lines = self.lines.setdefault(name, [])
            if len(lines) < SHOWN and line not in lines[-1:]:
                lines.append(line)

    def report(self, problems: Problems, column: str, labels: Sequence[str]) -> None:
        """Adds rows whose label is none of ``labels``; without labels, numbers among names or the reverse.

        For tags, ``labels`` are `known_tags`.
        """
        odd = self._mixed() if len(labels) == 0 else self._unknown(labels)
        for value, what in odd.items():
            for line in self.lines[value]:
                problems.add(line, what, column=column, value=value)
            problems.count += self.counts[value] - len(self.lines[value])

    def _unknown(self, labels: Sequence[str]) -> dict[str, str]:
        odd = {}
        for value in self.counts:
            if value not in labels:
                meant = suggestion(value, labels)
                others = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
                odd[value] = f"expected one of {others}" if meant is None else f"{value!r} -> {meant!r}?"
        return odd

    def _mixed(self) -> dict[str, str]:
        numbers = {value for value in self.counts if is_integer(value)}
        words = set(self.counts) - numbers
        if not numbers or not words:
            return {}
        number_rows, word_rows = (sum(self.counts[value] for value in group) for group in (numbers, words))
        odd, what = (numbers, "a number among names") if number_rows <= word_rows else (words, "a name among numbers")
        return dict.fromkeys(sorted(odd), f"{what}; mend it, or state the labels in settings.labels")


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """The tags that a set of labels can express: itself, and its types in IOB2 whatever scheme the set speaks."""
    if label_scheme(labels) == "raw":
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))


def _names(value: Any, column: Column) -> Sequence[str]:
    if column.kind == "label":
        return [value]
    return to_iob2(value) if column.kind == "tags" else value

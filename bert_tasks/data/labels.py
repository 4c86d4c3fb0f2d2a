"""A census of the labels in a column, from which unknown, misspelt and mixed labels are reported.

Owns the counting and the wording. Must not know how files are read.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bert_tasks.data.columns import Column, Kind
from bert_tasks.data.conll import is_chunk_tag, label_scheme, to_iob2
from bert_tasks.data.problems import SHOWN, Problems, suggestion

LABEL_KINDS: tuple[Kind, ...] = ("label", "labels", "tags")
MOST_LABELS = 1000
_MOST_COUNTED = 100_000
_IMBALANCED = 5  # times as many rows as the rarest label
_FEW = 10  # one odd tag in so many is taken for a mistake


def imbalance_hint(counts: Mapping[str, int]) -> str | None:
    """What to do about one label per row of which some are rare; None where none is.

    Args:
        counts: The rows of each label.

    Returns:
        The most frequent label and the rarest, the setting that weighs them, and the metric that counts them alike.
    """
    seen = {label: count for label, count in counts.items() if count > 0}
    if len(seen) < 2:
        return None
    most, least = max(seen, key=lambda label: seen[label]), min(seen, key=lambda label: seen[label])
    if seen[most] < _IMBALANCED * seen[least]:
        return None
    return (
        f"imbalanced: {most!r} has {seen[most]} rows, {least!r} {seen[least]}; consider settings.class_weights = "
        '"balanced" and run.metric_for_best_model = "macro_f1", which counts every label alike'
    )


def is_integer(value: str) -> bool:
    """Whether a label is a whole number; one of more digits than Python converts is a name."""
    return re.fullmatch(r"[+-]?\d{1,4300}", value) is not None


@dataclass
class _Tally:
    """How often each name stands, and the first lines where it does; bounded in memory."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[int]] = field(default_factory=dict)

    def add(self, names: Sequence[str], line: int) -> None:
        for name in names:
            if name not in self.counts and len(self.counts) >= _MOST_COUNTED:
                continue
            self.counts[name] += 1
            lines = self.lines.setdefault(name, [])
            if len(lines) < SHOWN and line not in lines[-1:]:
                lines.append(line)

    def report(self, odd: Mapping[str, str], problems: Problems, column: str) -> None:
        """Adds the rows of names that are ``odd``: name -> what is wrong with it."""
        for value, what in odd.items():
            lines = self.lines[value]
            problems.add(lines[0], what, column=column, value=value, times=self.counts[value] - len(lines) + 1)
            for line in lines[1:]:
                problems.add(line, what, column=column, value=value)


@dataclass
class LabelCensus:
    """How often each label stands, and where.

    Tags count for each word: in IOB2 whatever chunk scheme they are written in, and as they are written, which is what
    counts where any of them is no chunk tag.
    """

    written: _Tally = field(default_factory=_Tally)
    chunks: _Tally = field(default_factory=_Tally)  # of tags only
    rows: int = 0

    @property
    def counts(self) -> Counter[str]:
        are_chunks = len(self.chunks.counts) > 0 and all(map(is_chunk_tag, self.written.counts))
        return self.chunks.counts if are_chunks else self.written.counts

    def add(self, value: Any, line: int, column: Column) -> None:
        if column.kind not in LABEL_KINDS or value is None:
            return
        self.rows += 1
        self.written.add([value] if column.kind == "label" else value, line)
        if column.kind == "tags":
            self.chunks.add(to_iob2(value), line)

    def report(self, problems: Problems, column: str, labels: Sequence[str]) -> None:
        """Adds rows whose label is none of ``labels``; without labels, what does not belong among the others.

        For tags, ``labels`` are `known_tags`.
        """
        if len(labels) == 0:
            self.written.report(self._mixed(), problems, column)
            return
        tally = self.chunks if self.chunks.counts and label_scheme(labels) != "raw" else self.written
        tally.report(_unknown(tally.counts, labels), problems, column)

    def report_no_chunks(self, problems: Problems, column: str) -> None:
        """Adds rows with a tag of which no chunk scheme knows whether it begins, continues or ends an entity."""
        odd = [tag for tag in self.written.counts if not is_chunk_tag(tag)]
        self.written.report(dict.fromkeys(odd, "expected O or a tag such as B-TYPE"), problems, column)

    def _mixed(self) -> dict[str, str]:
        counts = self.written.counts
        numbers = {value for value in counts if is_integer(value)}
        names = set(counts) - numbers
        if numbers and names:
            few = min(numbers, names, key=lambda group: sum(counts[value] for value in group))
            what = "a number among names" if few is numbers else "a name among numbers"
            return dict.fromkeys(sorted(few), f"{what}; mend it, or state the labels in settings.labels")
        if not self.chunks.counts:
            return {}
        plain = {value for value in counts if not is_chunk_tag(value)}
        prefixed = sum(count for value, count in counts.items() if value != "O" and value not in plain)
        if sum(counts[value] for value in plain) * _FEW > prefixed:
            return {}  # they are not chunk tags but classes of words
        return dict.fromkeys(
            sorted(plain), "expected O or a tag such as B-TYPE, as almost all are; or state them in settings.labels"
        )


def _unknown(counts: Mapping[str, int], labels: Sequence[str]) -> dict[str, str]:
    odd = {}
    for value in counts:
        if value not in labels:
            meant = suggestion(value, labels)
            others = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
            odd[value] = f"expected one of {others}" if meant is None else f"{value!r} -> {meant!r}?"
    return odd


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """The tags that a set of labels can express: itself, and its types in IOB2 whatever scheme the set speaks."""
    if label_scheme(labels) == "raw":
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))

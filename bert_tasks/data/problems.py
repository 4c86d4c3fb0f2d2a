"""Problems found in rows, collected so that one report names them all.

Owns the wording ``file:line: column 'x': value: what is wrong``, the limit on how many are shown, and small helpers of
messages: counts, lists, suggestions.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from bert_tasks.errors import DataError

SHOWN = 20
SKIP_HINT = 'data.on_error = "skip" leaves such rows out'
_VALUE_WIDTH = 60
_LINES_SHOWN = 5


@dataclass(kw_only=True)
class Problem:
    """One fault, of one row or the same one of several rows.

    Attributes:
        line: the line of the first row.
        count: how many rows have it; ``others``: the next few of their lines.
    """

    source: str
    line: int
    what: str
    column: str | None = None
    value: str | None = None
    count: int = 0
    others: list[int] = field(default_factory=list)

    def add(self, line: int, times: int) -> None:
        self.count += times
        lines = sorted({*self.others, line} | ({self.line} if self.count > times else set()))
        self.line, self.others = lines[0], lines[1:_LINES_SHOWN]

    def __str__(self) -> str:
        parts = [f"{self.source}:{self.line}"]
        if self.column is not None:
            parts.append(f"column {self.column!r}")
        if self.value is not None:
            parts.append(shortened(self.value))
        text = ": ".join([*parts, self.what])
        if self.count < 2:
            return text
        more = ", ..." if self.count > len(self.others) + 1 else ""
        also = f", also in line {', '.join(map(str, self.others))}{more}" if self.others else ""
        return f"{text} ({self.count} times{also})"


@dataclass(kw_only=True)
class Problems:
    """The problems of one file: equal ones are one, the earliest few are kept and the others counted."""

    source: str
    count: int = 0
    groups: dict[tuple[str, str | None, str | None], Problem] = field(default_factory=dict)

    @property
    def first(self) -> list[Problem]:
        """The problems that are kept, by the line of the first row that has each."""
        return sorted(self.groups.values(), key=lambda problem: problem.line)

    def add(self, line: int, what: str, *, column: str | None = None, value: object = None, times: int = 1) -> None:
        self.count += times
        shown = None if value is None else str(value)
        key = (what, column, shown)
        if key not in self.groups:
            if len(self.groups) >= SHOWN:
                last = max(self.groups, key=lambda other: self.groups[other].line)
                if line > self.groups[last].line:
                    return
                del self.groups[last]
            self.groups[key] = Problem(source=self.source, line=line, what=what, column=column, value=shown)
        self.groups[key].add(line, times)


class BadRowsError(DataError):
    """Rows that cannot be used, of one or more files.

    Args:
        found: the problems of each file.
        hint: what can be done other than to fix the rows.
    """

    def __init__(self, found: Iterable[Problems], hint: str | None = None) -> None:
        self.found = tuple(found)
        count = sum(problems.count for problems in self.found)
        first = [problem for problems in self.found for problem in problems.first][:SHOWN]
        listed = sum(problem.count for problem in first)
        heading = f"{counted(count, 'problem')} in the data. Fix these rows and run the command again"
        heading += "." if hint is None else f", or {hint}."
        more = [f"... and {count - listed} more"] if count > listed else []
        super().__init__("\n".join([heading, *(f"  {line}" for line in [*map(str, first), *more])]))


def suggestion(value: str, known: Iterable[str]) -> str | None:
    """The known value that was probably meant, or None: first by spaces and letter case, then by spelling."""
    by_folded = {name.strip().casefold(): name for name in known}
    folded = value.strip().casefold()
    if folded in by_folded:
        return by_folded[folded]
    close = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """A clause to append to a message, empty when nothing is close."""
    meant = suggestion(value, known)
    return "" if meant is None else f", did you mean {meant!r}?"


def missing_path(path: Path, kind: Literal["file", "folder"] = "file", *, pattern: str = "*") -> str:
    """The message for a path that does not exist: its folder does not exist either, or another name was meant.

    Args:
        path: the path, with a name at its end.
        kind: what was expected there, and is suggested.
        pattern: a pattern of the names to suggest.

    Returns:
        A message such as ``no such file, did you mean 'dev.csv'?``, without the path.
    """
    try:
        if path.parent.is_dir():
            return f"no such {kind}{did_you_mean(path.name, _names_in(path.parent, kind, pattern))}"
        outer = path.parent.parent
        near = did_you_mean(path.parent.name, _names_in(outer, "folder", "*")) if outer.is_dir() else ""
    except OSError:  # a folder that may not be listed: nothing to suggest
        return f"no such {kind}"
    return f"no such {kind}: there is no folder {path.parent}{near}"


def _names_in(folder: Path, kind: str, pattern: str) -> list[str]:
    return sorted(entry.name for entry in folder.glob(pattern) if entry.is_dir() == (kind == "folder"))


def counted(count: int, noun: str) -> str:
    """A count with its noun, such as ``1 row`` and ``2 rows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_or_are(count: int) -> str:
    """The verb of a counted subject."""
    return "is" if count == 1 else "are"


def first_few(items: Iterable[str], most: int) -> str:
    """The first items, separated by commas, and ``...`` if there are more."""
    shown = list(islice(items, most + 1))
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def shortened(value: object) -> str:
    """A value as Python writes it, of which the end is left out where it is long."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _VALUE_WIDTH:
        return repr(value)
    start = text[:_VALUE_WIDTH]
    return (
        f"{start!r}... ({len(text)} characters)" if isinstance(value, str) else f"{start}... ({len(text)} characters)"
    )

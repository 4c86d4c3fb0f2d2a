"""Problems found in rows, collected so that one report names them all.

Owns the wording `file:line: column 'x': value: what is wrong` and the limit on how many are shown. Must not
know file formats or what the values mean.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bert_tasks.errors import DataError

SHOWN = 20
_VALUE_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class Problem:
    source: str
    line: int
    what: str
    column: str | None = None
    value: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.source}:{self.line}"]
        if self.column is not None:
            parts.append(f"column {self.column!r}")
        if self.value is not None:
            parts.append(shortened(self.value))
        return ": ".join([*parts, self.what])


@dataclass(kw_only=True)
class Problems:
    """The problems of one file: the earliest few in full, the others counted, so that memory stays flat."""

    source: str
    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, line: int, what: str, *, column: str | None = None, value: object = None) -> None:
        self.count += 1
        if len(self.first) >= SHOWN and line > self.first[-1].line:
            return
        shown = None if value is None else str(value)
        self.first.append(Problem(source=self.source, line=line, what=what, column=column, value=shown))
        self.first.sort(key=lambda problem: problem.line)
        del self.first[SHOWN:]


class BadRowsError(DataError):
    """Rows that cannot be used, over one or more files; ``found`` keeps them apart by file."""

    def __init__(self, found: Iterable[Problems]) -> None:
        self.found = tuple(found)
        super().__init__(_report(self.found))


def raise_problems(found: Sequence[Problems]) -> None:
    if any(problems.count > 0 for problems in found):
        raise BadRowsError(found)


def suggestion(value: str, known: Iterable[str]) -> str | None:
    """The known value that was probably meant, or None: spaces and letter case first, then spelling."""
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


def shortened(value: str) -> str:
    if len(value) <= _VALUE_WIDTH:
        return repr(value)
    return f"{value[:_VALUE_WIDTH]!r}... ({len(value)} characters)"


def _report(found: Sequence[Problems]) -> str:
    count = sum(problems.count for problems in found)
    shown = [str(problem) for problems in found for problem in problems.first][:SHOWN]
    heading = f"{count} problem{'s' if count != 1 else ''} in the data; mend the rows and start again"
    if count > len(shown):
        shown.append(f"... and {count - len(shown)} more")
    return "\n".join([heading, *(f"  {line}" for line in shown)])

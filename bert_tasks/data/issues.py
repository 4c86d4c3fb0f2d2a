"""The record of a problem of a row, the collection of these records, and functions for messages.

All problems of a file are reported at once, because a user who corrects a file does not want to run the command once
for each of its lines. This module owns the wording ``file:line: what in column 'x': value. What to do.``, the limit on
shown errors, and the wording of counts, lists and suggestions.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from bert_tasks.errors import DataError

Severity = Literal["note", "skip", "error", "unknown label"]

SHOWN = 20
SKIP_HINT = 'set data.on_error = "skip" to skip such rows'
_VALUE_WIDTH = 60
_LINES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RowIssue:
    """The record of a problem of one row, or of a note on it.

    Attributes:
        what: Description without the value, such as ``not a number``.
        hint: Sentence on what to do.
        value: Value, if it helps the user.
        column: Column in the source. None if the row as a whole is meant.
        line: Line in the source, from 1.
        row: Number of the row in its batch, from 0.
        severity: "error" if the row cannot be used. "unknown label" is an error whose row is never skipped, "skip" the
            reason to count the row and not read it, and "note" a note on a row that is read.

    Examples:
        >>> RowIssue(what="not a number", hint="Did you mean '1.5'?", column="score", value="1,5").text
        "not a number in column 'score': '1,5'. Did you mean '1.5'?"
    """

    what: str
    hint: str = ""
    value: object = None
    column: str | None = None
    line: int = 0
    row: int = 0
    severity: Severity = "error"

    def at(self, column: str, value: object) -> "RowIssue":
        """Returns the issue with a column and a value, unless it has a column. A value that it has stays."""
        if self.column is not None:
            return self
        if self.value is not None:
            value = self.value
        return replace(self, column=column, value=value)

    @property
    def message(self) -> str:
        """The issue without its column and value, for a caller who knows them."""
        return _with_hint(end_sentence(self.what), self.hint)

    @property
    def text(self) -> str:
        """The issue with its column and value."""
        if self.column is None and not self.hint:
            return self.what
        problem = self.what
        if self.column is not None:
            problem += f" in column {self.column!r}"
        if self.value is not None:
            problem += f": {shortened(self.value)}"
        return _with_hint(end_sentence(problem), self.hint)


def _with_hint(sentence: str, hint: str) -> str:
    """Returns a sentence with the hint behind it, if there is one."""
    if not hint:
        return sentence
    return f"{sentence} {hint}"


class CellError(ValueError):
    """A cell that does not hold a value of its kind.

    Args:
        what, hint, value: See ``RowIssue``.
    """

    def __init__(self, what: str, hint: str = "", *, value: object = None) -> None:
        super().__init__(what, hint)
        self.issue = RowIssue(what=what, hint=hint, value=value)

    def __str__(self) -> str:
        return self.issue.text


class RowIssues(DataError):  # noqa: N818  (a collection)
    """The issues of rows in one or more files. As an error, it shows the first 20 different problems.

    Attributes:
        count: Number of problems.
        never_skipped: Number of problems, such as unknown labels, whose rows are never skipped.
        advice: Advice, shown if it helps against some problem, other than to fix the rows, such as
            ``set data.on_error = "skip" to skip such rows``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.never_skipped, self.advice = 0, 0, ""
        # (source, problem) -> the number of rows that have it, and the first of their lines
        self._entries: dict[tuple[str, str], tuple[int, tuple[int, ...]]] = {}
        self._notes: dict[str, tuple[int, tuple[int, ...]]] = {}  # the same for notes and reasons to skip

    def add(self, source: str, issue: RowIssue) -> None:
        """Adds an issue of a source, or counts it if it is like one that was added before."""
        if issue.severity == "note":
            self._notes[issue.what] = _counted_line(self._notes.get(issue.what), issue.line)
            return
        if issue.severity == "skip":
            reason = f"skipped: {issue.what}"
            self._notes[reason] = _counted_line(self._notes.get(reason), issue.line)
            return
        self.count += 1
        if issue.severity == "unknown label":
            self.never_skipped += 1
        key = (source, issue.text)
        # A file whose every line is wrong must not fill the memory with messages, so the rest is only counted.
        if key in self._entries or len(self._entries) < SHOWN:
            self._entries[key] = _counted_line(self._entries.get(key), issue.line)

    def extend(self, others: "RowIssues") -> None:
        """Adds the problems of other files, but not their notes, which belong to the rows of these files."""
        self.count += others.count
        self.never_skipped += others.never_skipped
        for key, (count, lines) in others._entries.items():
            # The same file is read twice if it has training and validation rows. The lines of the first are enough.
            if key in self._entries:
                known_count, known_lines = self._entries[key]
                self._entries[key] = (known_count + count, known_lines)
            elif len(self._entries) < SHOWN:
                self._entries[key] = (count, lines)

    def notes(self, rows: int) -> tuple[str, ...]:
        """Returns the notes on a source with so many rows, each with the first of its lines."""
        notes = []
        for text, (count, lines) in self._notes.items():
            listed = ", ".join(map(str, lines))
            if count > len(lines):
                listed += ", ..."
            notes.append(f"{count} of {counted(rows, 'row')} {text} (line {listed})")
        return tuple(notes)

    def raise_if_any(self) -> None:
        """Raises itself if it holds a problem."""
        if self.count > 0:
            raise self

    def __str__(self) -> str:
        heading = f"{counted(self.count, 'problem')} in the data. Fix these rows and run the command again"
        if self.advice and self.never_skipped < self.count:
            heading += f", or {self.advice}"
        lines = [f"{heading}."]
        shown = 0
        for (source, text), (count, entry_lines) in self._entries.items():
            shown += count
            lines.append(f"  {source}:{entry_lines[0]}: {text}{_repetitions(count, entry_lines[1:])}")
        if self.count > shown:
            lines.append(f"  ... and {self.count - shown} more")
        return "\n".join(lines)


def _counted_line(entry: tuple[int, tuple[int, ...]] | None, line: int) -> tuple[int, tuple[int, ...]]:
    """Returns the number of rows of an entry and its first lines, with one more row."""
    if entry is None:
        return 1, (line,)
    count, lines = entry
    if len(lines) < _LINES_SHOWN and line not in lines:
        lines = (*lines, line)
    return count + 1, lines


def _repetitions(count: int, other_lines: Sequence[int]) -> str:
    """Returns how often a problem occurs, and the lines behind its first, such as ``(3 times, also in line 7)``."""
    if count == 1:
        return ""
    if not other_lines:
        return f" ({count} times)"
    noun = "line" if len(other_lines) == 1 else "lines"
    listed = ", ".join(map(str, other_lines))
    if count > len(other_lines) + 1:
        listed += ", ..."
    return f" ({count} times, also in {noun} {listed})"


def end_sentence(text: str) -> str:
    """Returns the text with a full stop, unless it ends with a mark."""
    if text.endswith((".", "?")):
        return text
    return f"{text}."


def suggestion(value: str, names: Iterable[str]) -> str | None:
    """Returns the known value closest in letter case, spaces, then spelling, or None."""
    # Without the folding, difflib would find "positive" closer to "negative" than to "POSITIVE".
    by_folded = {name.strip().casefold(): name for name in names}
    folded = value.strip().casefold()
    if folded in by_folded:
        return by_folded[folded]
    close = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    if not close:
        return None
    return by_folded[close[0]]


def did_you_mean(value: str, names: Iterable[str]) -> str:
    """Returns a clause to append to a message, empty if no name is close."""
    meant = suggestion(value, names)
    if meant is None:
        return ""
    return f", did you mean {meant!r}?"


def nearest_or_all(word: str, names: Iterable[str]) -> str:
    """Returns the end of a message, with the most similar known word or all known words."""
    names = list(names)
    nearest = did_you_mean(word, names)
    if nearest or not names:
        return nearest
    return f". Known names are {', '.join(names)}"


def missing_path(path: Path, noun: Literal["file", "folder"] = "file", *, pattern: str = "*") -> str:
    """Returns the message for a missing path, with its missing folder or a suggestion.

    Args:
        path: The path, with a name at its end.
        noun: Noun for the expected and the suggested path.
        pattern: Pattern of the names to suggest.

    Returns:
        A message such as ``no such file, did you mean 'dev.csv'?``, without the path.
    """
    try:
        if path.parent.is_dir():
            names = (entry.name for entry in path.parent.glob(pattern) if entry.is_dir() == (noun == "folder"))
            return f"no such {noun}{did_you_mean(path.name, sorted(names))}"
        folders: list[str] = []
        outer = path.parent.parent
        if outer.is_dir():
            folders = sorted(entry.name for entry in outer.iterdir() if entry.is_dir())
    except OSError:  # a folder that may not be listed has nothing to suggest
        return f"no such {noun}"
    return f"no such {noun}. There is no folder {path.parent}{did_you_mean(path.parent.name, folders)}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as ``1 row`` and ``2 rows``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def first_few(items: Iterable[str], most: int) -> str:
    """Returns the first items, separated by commas, and ``...`` if there are more."""
    shown = list(islice(items, most + 1))  # one more tells that there are more, without reading all of them
    if len(shown) > most:
        shown[most] = "..."
    return ", ".join(shown)


def shortened(value: object) -> str:
    """Returns a value as Python prints it, without its end if it is long."""
    if not isinstance(value, str):
        text = repr(value)
        if len(text) <= _VALUE_WIDTH:
            return text
        return f"{text[:_VALUE_WIDTH]}... ({len(text)} characters)"
    if len(value) <= _VALUE_WIDTH:
        return repr(value)
    # A text is cut before it is printed, so that no escape such as \n is cut in two.
    return f"{value[:_VALUE_WIDTH]!r}... ({len(value)} characters)"

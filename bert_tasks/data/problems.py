"""Errors of rows, collected in one report, and functions for messages.

Owns the wording ``file:line: what in column 'x': value. What to do.``, the limit on shown errors, and the wording of
counts, lists and suggestions.
"""

import difflib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Literal, Self

from bert_tasks.errors import DataError

SHOWN = 20
SKIP_HINT = 'set data.on_error = "skip" to skip such rows'
_VALUE_WIDTH = 60
_LINES_SHOWN = 5


class RowError(ValueError):
    """The error of a value of a row, or of the row as a whole.

    Args:
        what: Description without the value, such as ``not a number``.
        hint: Sentence on what to do.
        column: Column in the source. None if the row as a whole is wrong, or until the validator knows it.
        value: Value, if it helps the user.

    Example:
        >>> print(RowError("not a number", "Did you mean '1.5'?", column="score", value="1,5"))
        not a number in column 'score': '1,5'. Did you mean '1.5'?
    """

    def __init__(self, problem: str, hint: str = "", *, column: str | None = None, value: object = None) -> None:
        super().__init__(problem, hint)
        self.what, self.hint, self.column, self.value = problem, hint, column, value

    def at(self, column: str, value: object) -> Self:
        """Returns the error with its column, and with the cell's value if it has none."""
        return type(self)(self.what, self.hint, column=column, value=value if self.value is None else self.value)

    @property
    def message(self) -> str:
        """Returns the error without its column and value, for a caller who knows them."""
        return end_sentence(self.what) + (f" {self.hint}" if self.hint else "")

    def __str__(self) -> str:
        if self.column is None and not self.hint:
            return self.what
        where = "" if self.column is None else f" in column {self.column!r}"
        value = "" if self.value is None else f": {shortened(self.value)}"
        return end_sentence(f"{self.what}{where}{value}") + (f" {self.hint}" if self.hint else "")


class RowErrors(DataError):  # noqa: N818  (a collection)
    """Errors of rows in one or more files. The first 20 different errors are shown.

    Attributes:
        count: Number of errors.
        never_skipped: Number of errors, such as unknown labels, whose rows are never skipped.
        advice: Advice, shown if it helps against some error, other than to fix the rows, such as
            ``set data.on_error = "skip" to skip such rows``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.never_skipped, self.advice = 0, 0, ""
        # (source, error) -> the number of rows that have it, and the first of their lines
        self._entries: dict[tuple[str, str], tuple[int, tuple[int, ...]]] = {}

    def add(self, source: str, line: int, error: RowError) -> None:
        """Adds an error of the row at a line of a source."""
        self.count += 1
        key = (source, str(error))
        if key in self._entries or len(self._entries) < SHOWN:
            count, lines = self._entries.get(key, (0, ()))
            is_shown = len(lines) < _LINES_SHOWN and line not in lines
            self._entries[key] = (count + 1, (*lines, line) if is_shown else lines)

    def extend(self, others: "RowErrors") -> None:
        """Adds the errors of other files."""
        self.count += others.count
        self.never_skipped += others.never_skipped
        self._entries |= dict(islice(others._entries.items(), SHOWN - len(self._entries)))

    def raise_if_any(self) -> None:
        """Raises itself if it holds an error."""
        if self.count > 0:
            raise self

    def __str__(self) -> str:
        heading = f"{counted(self.count, 'problem')} in the data. Fix these rows and run the command again"
        advice = "" if self.never_skipped == self.count else self.advice
        lines = [f"{heading}, or {advice}." if advice else f"{heading}."]
        for (source, error), (count, (first, *others)) in self._entries.items():
            lines.append(f"  {source}:{first}: {error}")
            if count > 1:
                more = ", ..." if count > len(others) + 1 else ""
                plural = "s" if len(others) > 1 else ""
                also = f", also in line{plural} {', '.join(map(str, others))}{more}" if others else ""
                lines[-1] += f" ({count} times{also})"
        hidden = self.count - sum(count for count, _ in self._entries.values())
        return "\n".join([*lines, *([f"  ... and {hidden} more"] if hidden else [])])


def end_sentence(text: str) -> str:
    """Returns the text with a full stop, unless it ends with a mark."""
    return text if text.endswith((".", "?")) else f"{text}."


def suggestion(value: str, names: Iterable[str]) -> str | None:
    """Returns the known value closest in letter case, spaces, then spelling, or None."""
    by_folded = {name.strip().casefold(): name for name in names}
    folded = value.strip().casefold()
    if folded in by_folded:
        return by_folded[folded]
    close = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(value: str, names: Iterable[str]) -> str:
    """Returns a clause to append to a message, empty if no name is close."""
    meant = suggestion(value, names)
    return "" if meant is None else f", did you mean {meant!r}?"


def nearest_or_all(word: str, names: Iterable[str]) -> str:
    """Returns the end of a message, with the most similar known word or all known words."""
    names = list(names)
    nearest = did_you_mean(word, names)
    return f". Known names are {', '.join(names)}" if names and not nearest else nearest


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
        outer = path.parent.parent
        folders = sorted(entry.name for entry in outer.iterdir() if entry.is_dir()) if outer.is_dir() else []
    except OSError:  # a folder that may not be listed has nothing to suggest
        return f"no such {noun}"
    return f"no such {noun}. There is no folder {path.parent}{did_you_mean(path.parent.name, folders)}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as ``1 row`` and ``2 rows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_few(items: Iterable[str], most: int) -> str:
    """Returns the first items, separated by commas, and ``...`` if there are more."""
    shown = list(islice(items, most + 1))
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def shortened(value: object) -> str:
    """Returns a value as Python prints it, without its end if it is long."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _VALUE_WIDTH:
        return repr(value)
    start = repr(text[:_VALUE_WIDTH]) if isinstance(value, str) else text[:_VALUE_WIDTH]
    return f"{start}... ({len(text)} characters)"

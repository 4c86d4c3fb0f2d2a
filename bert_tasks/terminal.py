"""Messages without control characters, with paths in one form, and without errors if writing fails.

A control sequence in a file or a message of others could change what a terminal shows, or the terminal itself. A
message that cannot be written must not end a run.
"""

import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

_NOT_PLAIN = re.compile(r"[^\n\t -~]")  # not printable ASCII. What of it may be shown, Unicode's tables say
_JOINERS = "\u200c\u200d"  # not printable by themselves, but parts of words and emoji


def printable(text: str) -> str:
    r"""Escapes control and invisible characters and lone surrogates, as in ``\x1b``.

    Line feeds and tabs are not escaped.
    """
    return _escaped(text, lambda character: character.encode("unicode_escape").decode("ascii"))


def printable_json(text: str) -> str:
    r"""Escapes in JSON strings what ``printable`` escapes, for example as ``\u001b``."""
    return _escaped(text, lambda character: json.dumps(character)[1:-1])


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    """Escapes each character that a reader would not see."""

    def replacement(match: re.Match[str]) -> str:
        character = match[0]
        # "Zs" are the spaces of other scripts. Python calls them not printable.
        if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
            return character
        return escape(character)

    return _NOT_PLAIN.sub(replacement, text)


def message_text(text: str) -> str:
    """Returns a message as it is shown, escaped, with paths below the current folder relative to it.

    A recipe makes its paths absolute, and a user types relative ones. Shown in one form, a path can be compared with
    another, and typed again.
    """
    return printable(_with_relative_paths(text))


def _with_relative_paths(text: str) -> str:
    """Removes the current folder from the beginning of the paths in a text."""
    try:
        folder = Path.cwd()
    except OSError:  # the folder has been removed
        return text
    if folder == folder.parent:  # below the root are all files of the system, so that their paths stay absolute
        return text
    # A path that goes on in front of the folder is another one, and the folder alone is not below itself.
    return re.sub(rf"(?<![\w./\\~-]){re.escape(f'{folder}{os.sep}')}(?=[^\s'\"),;:])", "", text)


class BestEffortStream:
    """A text stream, or None, whose errors of writing are ignored."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # a full disk, another encoding, a closed pipe or stream
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def message_stream(stream: TextIO | None = None) -> TextIO:
    """Returns a stream for messages that never fails. Default: standard error."""
    if stream is None:
        stream = sys.stderr
    if isinstance(stream, BestEffortStream):
        return cast(TextIO, stream)
    return cast(TextIO, BestEffortStream(stream))


def write_message(text: str, *, stream: TextIO | None = None) -> None:
    """Writes an escaped line to standard error or another stream. Errors are ignored."""
    stream = message_stream(stream)
    stream.write(message_text(text) + "\n")
    stream.flush()

"""What is written for people: without characters that act on a terminal, and without failing where nobody can read it.

Owns both rules for messages. Files and results in a machine's format are written elsewhere. Must not know what is said.
"""

import json
import re
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO, cast

_NOT_PLAIN = re.compile(r"[^\n\t -~]")
_JOINERS = "\u200c\u200d"  # not printable by themselves, but part of words and of emoji


def printable(text: str) -> str:
    r"""The text with control characters, invisible formats (bidirectional ones too) and lone surrogates as ``\x1b``.

    Line feeds and tabs stay: messages are laid out by them. A carriage return does not: what follows it would be shown
    in place of what was before it.
    """
    return _NOT_PLAIN.sub(_as_python, text)


def printable_json(text: str) -> str:
    r"""JSON of the same content, with ``\u001b`` for what ``printable`` escapes: it is inside strings only."""
    return _NOT_PLAIN.sub(_as_json, text)


def _as_python(found: re.Match[str]) -> str:
    return found[0] if _is_shown(found[0]) else found[0].encode("unicode_escape").decode("ascii")


def _as_json(found: re.Match[str]) -> str:
    return found[0] if _is_shown(found[0]) else json.dumps(found[0])[1:-1]


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


class BestEffortStream:
    """A text stream for messages: where they cannot be written, they are lost, and nothing is raised.

    Everything else is the stream's own, or that of no stream at all (standard error may be closed: None).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # a closed pipe, a full disk, a closed stream
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    self._stream.write(text.encode("ascii", errors="backslashreplace").decode("ascii"))
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
    """A stream, by default standard error as it is now, that takes messages and never fails."""
    stream = sys.stderr if stream is None else stream
    return cast(TextIO, stream if isinstance(stream, BestEffortStream) else BestEffortStream(stream))


def write_message(text: str, *, stream: TextIO | None = None) -> None:
    """Writes a line on standard error (or another stream), escaped; it is lost where it cannot be written."""
    stream = message_stream(stream)
    stream.write(printable(text) + "\n")
    stream.flush()

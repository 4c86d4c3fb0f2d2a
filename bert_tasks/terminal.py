"""Messages for people: without characters that control a terminal, and without errors if they cannot be written."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

_NOT_PLAIN = re.compile(r"[^\n\t -~]")
_JOINERS = "\u200c\u200d"  # not printable by themselves, but parts of words and emoji


def printable(text: str) -> str:
    r"""The text with control characters, invisible format characters and lone surrogates escaped, as in ``\x1b``.

    Line feeds and tabs are not escaped.
    """
    return _escaped(text, lambda character: character.encode("unicode_escape").decode("ascii"))


def printable_json(text: str) -> str:
    r"""The same JSON, in which escapes such as ``\u001b`` stand for what ``printable`` escapes: parts of strings."""
    return _escaped(text, lambda character: json.dumps(character)[1:-1])


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        character = match[0]
        is_shown = character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"
        return character if is_shown else escape(character)

    return _NOT_PLAIN.sub(replacement, text)


class BestEffortStream:
    """A text stream (None: a closed one) for messages, which are lost without an error if they cannot be written."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # a closed pipe, a full disk, a closed stream, another encoding
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
    """A stream for messages that never fails; by default the current standard error."""
    stream = sys.stderr if stream is None else stream
    return cast(TextIO, stream if isinstance(stream, BestEffortStream) else BestEffortStream(stream))


def write_message(text: str, *, stream: TextIO | None = None) -> None:
    """Writes an escaped line to standard error or another stream; it is lost if it cannot be written."""
    stream = message_stream(stream)
    stream.write(printable(text) + "\n")
    stream.flush()

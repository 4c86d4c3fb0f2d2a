"""Messages for people: without characters that control a terminal, and without errors if they cannot be written.

Files and results in a machine-readable format are written elsewhere.
"""

import json
import re
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO, cast

_NOT_PLAIN = re.compile(r"[^\n\t -~]")
_JOINERS = "\u200c\u200d"  # not printable by themselves, but parts of words and emoji


def printable(text: str) -> str:
    r"""The text with control characters, invisible format characters and lone surrogates escaped, as in ``\x1b``.

    Line feeds and tabs stay, because messages are laid out by them. A carriage return does not: the text after it would
    overwrite the text before it.
    """
    return _NOT_PLAIN.sub(lambda match: _shown(match[0], match[0].encode("unicode_escape").decode("ascii")), text)


def printable_json(text: str) -> str:
    r"""The same JSON, in which escapes such as ``\u001b`` stand for what ``printable`` escapes: parts of strings."""
    return _NOT_PLAIN.sub(lambda match: _shown(match[0], json.dumps(match[0])[1:-1]), text)


def _shown(character: str, escaped: str) -> str:
    is_shown = character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"
    return character if is_shown else escaped


class BestEffortStream:
    """A text stream for messages, which are lost without an error if they cannot be written.

    All other attributes come from the wrapped stream; None stands for a standard error that is closed.
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
    """A stream for messages that never fails; by default the current standard error."""
    stream = sys.stderr if stream is None else stream
    return cast(TextIO, stream if isinstance(stream, BestEffortStream) else BestEffortStream(stream))


def write_message(text: str, *, stream: TextIO | None = None) -> None:
    """Writes an escaped line to standard error or another stream; it is lost if it cannot be written."""
    stream = message_stream(stream)
    stream.write(printable(text) + "\n")
    stream.flush()

"""Text that others wrote, inside Markdown: it stays text, on one line, whatever it holds.

Owns escaping, tables and code blocks. Must not know what is written.
"""

import re
from collections.abc import Iterable, Sequence

_LONGEST = 200  # characters of one piece of text
_MARKS = re.compile(r"([\\`*_\[\]|~#$!])")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def visible(text: str) -> str:
    """The text on one line: line ends, control characters and marks of direction as their escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def plain(value: object) -> str:
    """Text that Markdown and HTML show as it is; not for the start of a line, where other characters count too."""
    return _MARKS.sub(r"\\\1", visible(str(value)).translate(_HTML))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, whatever its cells hold."""
    lines = [header, ["---"] * len(header), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(language: str, text: str) -> str:
    """A block that the text cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"

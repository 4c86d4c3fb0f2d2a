"""How results are shown, with one table for terminals and notebooks, and the base of what commands return."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any


class Html(str):
    """A cell that is HTML already."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    Attributes:
        columns: The header.
        rows: The cells of each row.
        has_numbers: True to align all columns but the first one to the right in a terminal.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_numbers: bool = False

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        table = [self.columns, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
        align = str.rjust if self.has_numbers else str.ljust
        lines = []
        for first, *others in table:  # the first column has the names of the rows
            cells = [first.ljust(widths[0])]
            for cell, width in zip(others, widths[1:], strict=True):
                cells.append(align(cell, width))
            lines.append("  ".join(cells).rstrip())
        return lines

    def html(self) -> str:
        """Returns the table for a notebook."""
        head = "".join(f'<th style="text-align: left">{_html(name)}</th>' for name in self.columns)
        lines = [f"<tr>{head}</tr>"]
        for row in self.rows:
            cells = "".join(f'<td style="text-align: left">{_html(cell)}</td>' for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        return f"<table>{''.join(lines)}</table>"


def _html(cell: str) -> str:
    """Returns a cell as HTML, in which texts are escaped."""
    if isinstance(cell, Html):
        return cell
    return escape(cell)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command returns. A terminal shows its lines, and ``--json`` its content."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""

    def to_json(self) -> dict[str, Any]:
        """Returns the content as one JSON object, by default the fields."""
        return json_fields(self)


def json_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON has them, with texts for paths."""
    return asdict(record, dict_factory=_with_text_paths)


def _with_text_paths(items: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {}
    for name, value in items:
        if isinstance(value, Path):
            value = str(value)
        fields[name] = value
    return fields

"""Batches of rows as a source has them, by column, before any value is checked.

A parser yields rows one by one (``Record``) or by column (``Batch``). Columns are faster, because a column of plain
texts is checked with a few calls for a thousand rows. Both know the difference between a row without a column
(``MISSING``) and a row whose cell is empty (None).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import Any, NamedTuple

from bert_tasks.data import limits
from bert_tasks.data.issues import RowIssue

MOST_ROWS = 1000  # of a batch
_MOST_CELLS = 200_000  # of a batch whose rows name their columns
_NUMBER_SIZE = 16  # of a value in a batch, in characters


class Missing(Enum):
    """The type of ``MISSING``, the cell of a row that does not have the column. A cell without a value is None."""

    MISSING = "missing"

    def __bool__(self) -> bool:
        return False


MISSING = Missing.MISSING
Cells = dict[str, list[Any]]  # names of columns -> the cells of all rows


class Record(NamedTuple):
    """One row of a source as a parser yields it.

    Attributes:
        line: Line in the file, or number, from 1.
        cells: Values by column name.
        issue: Why the row as a whole cannot be used ("error"), or is counted and not read ("skip").
        name: Identifies a row without a separate line in messages.
        raw: Text of a row whose cells are not known.
        file: File of the line, from the folder of the source, if the source has several files.
    """

    line: int
    cells: Mapping[str, Any]
    issue: RowIssue | None = None
    name: str | None = None
    raw: str | None = None
    file: str | None = None

    @classmethod
    def unusable(cls, line: int, problem: str, **fields: Any) -> "Record":
        """Returns a row that cannot be used as a whole."""
        return cls(line, {}, RowIssue(what=problem, line=line), **fields)

    @classmethod
    def skipped(cls, line: int, reason: str) -> "Record":
        """Returns a row that is counted and not read."""
        return cls(line, {}, RowIssue(what=reason, line=line, severity="skip"))

    def reject(self, reason: str) -> dict[str, Any]:
        """Returns the content of a line in a file of rejects, with position, reason and the row itself."""
        content: dict[str, Any] = {}
        if self.file is not None:
            content["file"] = self.file
        content["line"] = self.line
        if self.name is not None:
            content["id"] = self.name
        content["reason"] = reason
        content["raw"] = self.raw
        if self.raw is None:
            content["raw"] = dict(self.cells)
        return content


@dataclass(kw_only=True)
class Batch:
    """At most 1,000 rows of a source, by column.

    Attributes:
        lines: Line of each row in the file, or its number, from 1.
        cells: Names of columns -> the cells of the rows. A row without the column has ``MISSING``.
        issues: Numbers of rows, from 0 -> why the row as a whole cannot be used or is not read.
        records: The rows as the source has them. None if they are what the cells say.
    """

    lines: Sequence[int]
    cells: Cells
    issues: dict[int, RowIssue] = field(default_factory=dict)
    records: Sequence[Record] | None = None

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Batch":
        """Returns the batch of some rows, by column. A row has ``MISSING`` in the columns that only others have."""
        names: dict[str, None] = {}  # in the order in which the rows name them first
        for record in records:
            names.update(dict.fromkeys(record.cells))
        cells = {name: [record.cells.get(name, MISSING) for record in records] for name in names}
        issues = {row: record.issue for row, record in enumerate(records) if record.issue is not None}
        return cls(lines=[record.line for record in records], cells=cells, issues=issues, records=records)

    def __len__(self) -> int:
        return len(self.lines)

    def record(self, row: int) -> Record:
        """Returns a row as the source has it."""
        if self.records is not None:
            return self.records[row]
        cells = {name: column[row] for name, column in self.cells.items() if column[row] is not MISSING}
        return Record(self.lines[row], cells, self.issues.get(row))

    def where(self, kept: Sequence[bool]) -> "Batch":
        """Returns the rows for which ``kept`` is true, with the columns that they have."""
        numbers = list(compress(range(len(self)), kept))
        moved = {number: new for new, number in enumerate(numbers)}
        cells: Cells = {}
        for name, column in self.cells.items():
            left = list(compress(column, kept))
            # A column that none of the rows has would be one that the source has, with other layouts and messages.
            if any(cell is not MISSING for cell in left):
                cells[name] = left
        issues = {moved[number]: issue for number, issue in self.issues.items() if number in moved}
        records = None
        if self.records is not None:
            records = [self.records[number] for number in numbers]
        return Batch(lines=[self.lines[number] for number in numbers], cells=cells, issues=issues, records=records)


class Records(NamedTuple):
    """The rows of a source, which a parser yields one by one. The attributes are those of ``Batches``."""

    columns: tuple[str, ...] | None
    rows: Iterator[Record]
    notes: tuple[str, ...] = ()

    def in_batches(self, most: int = MOST_ROWS) -> "Batches":
        """Returns the same rows in batches of at most ``most`` rows."""
        return Batches(self.columns, in_batches(self.rows, most), self.notes)


class Batches(NamedTuple):
    """The rows of a source.

    Attributes:
        columns: Names of the columns, or None if each row names its columns.
        batches: The rows.
        notes: Notes for people on the place of the rows, such as the sheet of a workbook.
    """

    columns: tuple[str, ...] | None
    batches: Iterator[Batch]
    notes: tuple[str, ...] = ()


def in_batches(records: Iterable[Record], most: int = MOST_ROWS) -> Iterator[Batch]:
    """Yields batches of records, with fewer of them if they are large.

    Args:
        records: The rows.
        most: The largest number of rows of a batch.
    """
    waiting, names, size = list[Record](), set[str](), 0
    for record in records:
        waiting.append(record)
        names.update(record.cells)
        size += _size(record.cells)
        # Each row has a cell in the column of each name, so rows without a common name would need much memory.
        is_full = len(waiting) >= most or len(waiting) * len(names) > _MOST_CELLS
        if is_full or size > largest_size():
            yield Batch.of(waiting)
            waiting, names, size = [], set(), 0
    if waiting:
        yield Batch.of(waiting)


def largest_size() -> int:
    """Returns the number of characters at which a batch ends."""
    return limits.LARGEST_ROW // 4


def _size(value: Any) -> int:
    """Returns the size of a value in characters, as many for a number as it needs memory for.

    ``limits.size_of`` counts characters alone, because a limit is stated in these.
    """
    if isinstance(value, str | bytes):
        return len(value) + _NUMBER_SIZE
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return _NUMBER_SIZE

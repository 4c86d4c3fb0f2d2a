"""The checked rows of one source.

``Rows`` is what reading returns and what every later step takes: columns with the task's names, values that are checked
and converted, and where each row comes from. The values stay in a memory-mapped file until they are asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from bert_tasks.data.arrow import ArrowRows, read_batches
from bert_tasks.data.columns import REJECT, Column, Columns, head_column
from bert_tasks.data.issues import counted, first_few
from bert_tasks.storage import sha256_json

_LINES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows with the task's column names, and ``line``, their line in the source.

    In a table of several tasks, the values of each task are one column, in which a row may have no value (``of_head``).

    Attributes:
        rows: The rows. A label column that the source does not have is absent. A single missing label is None.
        source: Name of the source in messages.
        fingerprint: A sha256 of the contents and the reading options.
        notes: Notes for people on the reading, such as skipped rows.
        file: Arrow file that holds only these rows, or None. Reading them in order then leaves no pages of it in
            memory.
        hub: The dataset, config, split, commit and licence (from its page) of rows of the hub.
        errors: The column ``REJECT`` of rows that were skipped (``without_errors``). Each is a JSON object with its
            line, its error, and the row itself.
        part: The table that contains these rows, and their numbers in it, if they share its features.
        joined_sources: Source and number of rows of each joined table, in order.
        sample: A sentence on the sample that these rows are. Empty if they are all rows.
    """

    rows: ArrowRows
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    file: Path | None = None
    hub: Mapping[str, str | None] | None = None
    errors: ArrowRows | None = None
    part: "tuple[Rows, NDArray[np.int64]] | None" = None
    joined_sources: tuple[tuple[str, int], ...] = ()
    sample: str = ""

    @classmethod
    def unchecked(cls, rows: Sequence[Mapping[str, Any]], source: str = "rows") -> "Rows":
        """Returns rows in memory as they are, under the task's names. They may have a ``line`` of their own."""
        numbered = [{"line": number, **row} for number, row in enumerate(rows, start=1)]
        names: dict[str, None] = {}  # in the order in which the rows name them first
        for row in numbered:
            names |= dict.fromkeys(row)
        stored = ArrowRows.from_columns({name: [row.get(name) for row in numbered] for name in names})
        return cls(rows=stored, source=source, fingerprint=sha256_json(numbered))

    @classmethod
    def joined(cls, tables: Sequence["Rows"]) -> "Rows":
        """Joins the rows of several tables, one table after another."""
        if len(tables) == 1:
            return tables[0]
        notes: list[str] = []
        for table in tables:
            notes += table.notes
        errors = None
        tables_of_errors = [table.errors for table in tables if table.errors is not None]
        if tables_of_errors:
            errors = ArrowRows.joined(tables_of_errors)
        return cls(
            rows=ArrowRows.joined([table.rows for table in tables]),
            source=f"{tables[0].source} and {counted(len(tables) - 1, 'other file')}",
            fingerprint=sha256_json([table.fingerprint for table in tables]),
            notes=tuple(notes),
            errors=errors,
            joined_sources=tuple((table.source, len(table)) for table in tables),
            sample=", ".join(table.sample for table in tables if table.sample),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # The file is read anew instead of through its mapping, whose pages would fill the memory.
        if self.file is not None and self.file.exists():
            for batch in read_batches(self.file, self.rows.column_names):
                yield from batch
        else:
            for table in self.rows.tables():
                yield from table.to_pylist()

    def without_errors(self) -> "Rows":
        """Returns the rows without errors and ``REJECT``. A note counts the others."""
        if REJECT not in self.rows.column_names:
            return self
        # A reject is the whole row as JSON. The usable rows do not carry that column along.
        faulty = [fault is not None for fault in self.rows.values(REJECT)]
        names = [name for name in self.rows.column_names if name != REJECT]
        table = replace(self, rows=self.rows.select_columns(names))
        if not any(faulty):
            return table
        bad = [index for index, is_bad in enumerate(faulty) if is_bad]
        lines = first_few(map(str, self.rows.select(bad[: _LINES_SHOWN + 1]).values("line")), _LINES_SHOWN)
        note = f"{len(bad)} of {counted(len(faulty), 'row')} cannot be used and were left out (line {lines})"
        usable = table.select([index for index, is_bad in enumerate(faulty) if not is_bad])
        return replace(usable, notes=(*self.notes, note), errors=self.rows.select(bad).select_columns([REJECT]))

    def of_head(self, name: str) -> "Rows":
        """Returns the rows that have the columns of one of several tasks, under the task's names."""
        column = head_column(name)
        table = self.rows.select_columns(["line", column]).table()
        rows = table.filter(table.column(column).is_valid()).flatten()  # a struct becomes columns ``column.field``
        values = [n for n in rows.column_names if n == "line" or rows.column(n).null_count < len(rows)]
        named = rows.select(values).rename_columns([n.removeprefix(f"{column}.") for n in values])
        return Rows(rows=ArrowRows(named), source=self.source, fingerprint=sha256_json(self.fingerprint, name))

    def labelled(self, columns: Sequence[Column]) -> "Rows":
        """Returns the rows that have a label in one of the columns of labels."""
        has_label = np.zeros(len(self), dtype=bool)  # [R]
        for column in columns:
            if column.is_label and column.name in self.rows.column_names:
                has_label |= self.rows.column(column.name).is_valid().to_numpy()
        rows = ArrowRows(self.rows.table().filter(pyarrow.array(has_label)))
        return Rows(rows=rows, source=self.source, fingerprint=sha256_json(self.fingerprint, "labelled"))

    def select(self, indices: Sequence[int]) -> "Rows":
        """Returns the rows with these numbers, in this order, as a part of the whole."""
        numbers = list(map(int, indices))
        fingerprint = sha256_json(self.fingerprint, numbers)
        part = None
        if self.part is not None:
            whole, numbers_in_whole = self.part
            part = (whole, numbers_in_whole[numbers])
        rows = self.rows.select(numbers)
        return replace(self, rows=rows, fingerprint=fingerprint, file=None, part=part, joined_sources=())

    def select_part(self, indices: Sequence[int]) -> "Rows":
        """Does as ``select``, for a table that is tokenised once for all of its parts."""
        return replace(self.select(indices), part=(self, np.asarray(indices, dtype=np.int64)))


def row_schema(columns: Columns, texts: Sequence[str] = ()) -> pyarrow.Schema:
    """Returns the types of the columns of rows and of further text columns, ``texts``."""
    # The types are stated and not inferred, because a column whose first rows are empty would have the type null.
    types: dict[str, Any] = {}
    if isinstance(columns, Mapping):
        for name, head in columns.items():
            fields = [(column.name, column.type.arrow_type()) for column in head.columns]
            types[head_column(name)] = pyarrow.struct(fields)
    else:
        types = {column.name: column.type.arrow_type() for column in columns}
    return pyarrow.schema(types | {"line": pyarrow.int64()} | dict.fromkeys(texts, pyarrow.string()))


def without_absent(rows: ArrowRows, columns: Columns) -> ArrowRows:
    """Returns the rows without the optional columns that hold no value at all."""
    if isinstance(columns, Mapping):
        return rows
    optional = {column.name for column in columns if not column.required}
    names = rows.column_names
    return rows.select_columns([n for n in names if n not in optional or rows.column(n).null_count < len(rows)])

"""The conversion of rows that several tasks share.

A row of a data set with several tasks is stored once, with one column for each task that holds the values of its
columns (``columns.head_column``). Tasks may read the same column of the source, or different ones, and a row need not
have all of them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bert_tasks.data.batch import MISSING, Batch, Cells, Record
from bert_tasks.data.columns import HeadColumns, head_column
from bert_tasks.data.conversion import Conversion, Converted, Field
from bert_tasks.data.formats import Format
from bert_tasks.data.issues import RowIssue
from bert_tasks.data.options import ReadOptions


class SharedConversion(Conversion):
    """Converts each row of a source to the rows of several tasks, one value for each task.

    A row may lack the columns of a task, or its label. A value that cannot be used makes the row unusable for all
    tasks, because they read it together.

    Args:
        heads: The name of each task -> the columns that it reads.
        require_labels: The rows are for training or evaluation, so ``notes`` name tasks that no row has the columns of.
        options, format, how: See ``Conversion``.

    Raises:
        DataError: See ``Conversion``.
    """

    def __init__(
        self,
        heads: Mapping[str, HeadColumns],
        options: ReadOptions | None = None,
        *,
        require_labels: bool = False,
        format: Format | None = None,
        **how: Any,
    ) -> None:
        if options is None:
            options = ReadOptions()
        options = replace(options, columns=None)  # each task has the names of its columns
        super().__init__((), options, format=format, **how)
        self._heads = self.read_columns = heads
        self._expects_all = require_labels
        self._without_input = dict.fromkeys(heads)  # the tasks that no row so far has the columns of
        self._conversions: dict[str, Conversion] = {}
        fields: list[Field] = []
        for name, head in heads.items():
            # A row may have an input under the task's own name.
            own = {column.name: column.name for column in head.columns if not column.is_label}
            conversion = Conversion(
                head.columns,
                replace(options, columns=head.names),
                others=own,
                format=format,
                labels=head.labels,
            )
            self._conversions[name] = conversion
            for field in conversion.fields:
                fields.append(replace(field, needed=False))
                if field.column.name in own and field.name != field.column.name:
                    fields.append(replace(field, needed=False, name=field.column.name))
        self.fields = tuple(fields)

    def convert(self, batch: Batch) -> Converted:
        """Converts a batch to the rows of each task, in a column for each task (``head_column``)."""
        present = _without_null(batch)
        issues = [replace(issue, row=row) for row, issue in batch.issues.items()]
        values: Cells = {head_column(name): [None] * len(batch) for name in self._conversions}
        failed = {issue.row for issue in issues}
        has_input: set[int] = set(failed)
        for name, conversion in self._conversions.items():
            of_head = self._batch_of(name, present)
            kept = [has_columns and row not in failed for row, has_columns in enumerate(self._has_input(name, of_head))]
            numbers = [row for row, is_kept in enumerate(kept) if is_kept]
            if not numbers:
                continue
            self._without_input.pop(name, None)
            has_input.update(numbers)
            # The task converts only the rows that have its columns, so their numbers are not those of the batch.
            converted = conversion.convert(of_head.where(kept))
            for number, row in enumerate(numbers):
                values[head_column(name)][row] = converted.row(number)
            for issue in converted.issues:
                row = numbers[issue.row]
                if issue.severity != "error":
                    issues.append(replace(issue, row=row))
                elif row not in failed:
                    failed.add(row)
                    issues.append(replace(issue, row=row))
        issues += [self._no_input(row) for row in range(len(batch)) if row not in has_input]
        for column in values.values():
            for row in failed:
                column[row] = None
        # The labels of a row that cannot be used are not looked at, whatever the order of the tasks.
        issues = [issue for issue in issues if issue.severity != "unknown label" or issue.row not in failed]
        return Converted(values=values, issues=self._placed(issues, batch))

    def _no_input(self, row: int) -> RowIssue:
        """Returns the issue of a row that has what none of the tasks reads."""
        reads = ", ".join(f"{conversion.reads} ({name})" for name, conversion in self._conversions.items())
        return RowIssue(what="no input of any task", hint=f"The tasks read {reads}.", row=row)

    def _has_input(self, name: str, batch: Batch) -> Iterator[bool]:
        """Yields for each row whether it has the columns that a task needs."""
        known: dict[tuple[str, ...], bool] = {}  # most rows of a batch have the same columns
        for row in range(len(batch)):
            names = tuple(column for column, cells in batch.cells.items() if cells[row] is not MISSING)
            if names not in known:
                known[names] = self._conversions[name].has_input(names)
            yield known[names]

    def _batch_of(self, name: str, batch: Batch) -> Batch:
        """Returns the batch for a task. Rows of a table of these tasks have the values of each task in one column."""
        of_table = batch.cells.get(head_column(name))
        if of_table is None:
            return batch
        names = self._conversions[name].names
        records = []
        for row, given in enumerate(of_table):
            cells = batch.record(row).cells
            if isinstance(given, Mapping):
                cells = {names.get(key, str(key)): value for key, value in given.items() if value is not None}
            records.append(Record(batch.lines[row], cells))
        return Batch.of(records)

    def check_columns(self, present: Collection[str], source: str) -> None:
        """Checks the columns to keep, and adds a note on each task that no row has had the columns of."""
        super().check_columns(present, source)
        if not self._expects_all:
            return
        columns = ", ".join(map(repr, sorted(map(str, present))))
        for name in self._without_input:
            problem = no_input(name, self._heads[name])
            note = f"{problem} (the columns are {columns}, the task reads {self._conversions[name].reads})"
            self.notes = (*self.notes, note)


def _without_null(batch: Batch) -> Batch:
    """Returns the batch with missing cells where they have no value.

    A table must have a cell in each column, so an empty cell is the only way to say that a row is not for a task.
    """
    cells: Cells = {}
    for name, column in batch.cells.items():
        cells[name] = [MISSING if cell is None else cell for cell in column]
    return Batch(lines=batch.lines, cells=cells)


def no_input(name: str, head: HeadColumns) -> str:
    """Returns the message that no row has what one of several tasks reads."""
    nouns = dict.fromkeys(column.type.noun for column in head.columns if column.required)
    return f"no row has the {' and '.join(nouns)} of the task {name}"

"""The conversion of a source's batches to the columns of a task, with every value checked.

Every row passes through ``Conversion``, from files, data sets of the hub, tables and lists in memory,
``TaskModel.predict`` and the requests of the server. So an error has the same words everywhere, except for the position
that it names. Rows that several tasks share pass through ``shared_conversion``, which has a conversion for each task.

A batch is converted in four stages. Layouts find the task's columns in those of the source, kinds convert each column,
labels get the spelling of the known labels, and relations check what must hold between columns.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.data.batch import MISSING, Batch, Batches, Cells
from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts
from bert_tasks.data.columns import FOLD_GROUP, RECORD, REJECT, Column, Columns, PassthroughColumns, Row
from bert_tasks.data.formats import Format
from bert_tasks.data.issues import (
    CellError,
    RowIssue,
    RowIssues,
    did_you_mean,
    end_sentence,
    first_few,
    shortened,
)
from bert_tasks.data.kinds import Choices, ClassKind, Id
from bert_tasks.data.known_labels import KnownLabels
from bert_tasks.data.layouts import Names, derived_from, holders, steps_of, unread_columns
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.relations import relations_of
from bert_tasks.errors import DataError, argument

_COLUMNS_SHOWN = 10
_STEPS_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of the task, its name in the source, and True if every row needs it."""

    column: Column
    name: str
    needed: bool


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A batch in the columns of a task.

    Attributes:
        values: The task's columns -> the values of the rows. None stands for no value, or for a wrong one.
        issues: The issues of the rows, in the order of rows and columns.
    """

    values: Cells
    issues: Sequence[RowIssue]

    @cached_property
    def problems(self) -> Mapping[int, list[RowIssue]]:
        """The rows that cannot be used -> why."""
        problems: dict[int, list[RowIssue]] = {}
        for issue in self.issues:
            if issue.severity == "error":
                problems.setdefault(issue.row, []).append(issue)
        return problems

    def row(self, number: int) -> dict[str, Any]:
        """Returns the values that a row has."""
        return {name: column[number] for name, column in self.values.items() if column[number] is not None}


def unknown_column(name: str, names: Sequence[str]) -> str:
    """Returns the message for a column name that the task does not have."""
    return f"the task reads the columns {', '.join(names)}, not {name!r}{did_you_mean(name, names)}"


class Conversion:
    """Converts the rows of a source to the columns of a task.

    ``convert`` converts one batch. ``checked`` converts all batches of a source, and collects the issues.

    Args:
        columns: Columns that the task reads.
        options: The names of columns in the source, as set by the caller, and the separator of several labels in one
            cell.
        others: The task's columns -> another name, which rows may have instead.
        format: Format of the source.
        require_labels: Every row needs its label. Default: labels may be missing, as in files for prediction.
        labels: Known labels, which every label must be. Default: labels are not checked.
        passthrough: Columns of the source that each row carries along in a column ``RECORD``.
        skip_errors: Rows that cannot be used become rows without values that have the reason in ``REJECT``.

    Raises:
        DataError: ``options`` name a column that the task does not read, or the separator is blank.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        options: ReadOptions | None = None,
        *,
        others: Mapping[str, str] = MappingProxyType({}),
        format: Format | None = None,
        require_labels: bool = False,
        labels: Sequence[str] | None = None,
        passthrough: PassthroughColumns = "none",
        skip_errors: bool = False,
    ) -> None:
        if options is None:
            options = ReadOptions()
        self._separator = LABEL_SEPARATOR
        if options.label_separator is not None:
            self._separator = options.label_separator
        if self._separator.strip() == "":
            separator = f"label_separator = {self._separator!r}"
            raise DataError(f"{separator} is blank. Expected one or more visible characters, such as '|'")
        usual: Mapping[str, str] = {}
        self.passthrough = passthrough
        names_of_ids: Mapping[str, str] = {}
        if format is not None:
            usual = format.columns
            names_of_ids = format.label_names
            if passthrough == "all" and format.default_passthrough:
                self.passthrough = format.default_passthrough
        fields = self._fields(columns, options.columns, usual, require_labels=require_labels)
        # Their order is that of the issues of a row, and of the first column that a message names as missing.
        self.fields = tuple(fields)
        read = [field.column for field in fields]
        self.read_columns: Columns = read
        self.names = {field.column.name: field.name for field in fields}
        self._to_keep: Sequence[str] = ()  # which a source must have, because the caller names them
        if not isinstance(passthrough, str):
            self._to_keep = passthrough
        self.skip_errors = skip_errors
        self.notes: tuple[str, ...] = ()
        if labels is None:
            labels = ()
        self._known = KnownLabels(labels, names_of_ids)
        # A name that is already the column's own would be read twice.
        own_names = {name: other for name, other in others.items() if self.names.get(name, other) != other}
        self._names = Names(columns=read, names=self.names, others=own_names)
        self._relations = relations_of(read)
        # Rows of a stream may have any number of sets of columns, so only the last ones are kept.
        self._steps = lru_cache(_STEPS_KEPT)(partial(steps_of, self._names))

    def _fields(
        self,
        columns: Sequence[Column],
        names: Mapping[str, str] | None,
        usual: Mapping[str, str],
        *,
        require_labels: bool,
    ) -> list[Field]:
        """Returns the columns that are read, with the names that the caller, else the format, else the task has."""
        if names is None:
            names = {}
        task_columns = [column.name for column in columns]
        for name in names:
            if name not in task_columns:
                raise DataError(unknown_column(name, task_columns))
        unread = unread_columns(columns, names, usual)
        sources = [derived_from(column, columns) for column in columns]
        fields: list[Field] = []
        for column in columns:
            # Spans are labels, but tags may replace them.
            is_needed_label = column.is_label and require_labels and column not in sources
            needed = column.required or is_needed_label
            name = names.get(column.name, usual.get(column.name, column.name))
            if needed or column.name not in unread:
                fields.append(Field(column=column, name=name, needed=needed))
        return fields

    def convert(self, batch: Batch) -> Converted:
        """Converts a batch, and checks each value."""
        cells = dict(batch.cells)  # the steps change it, but not the batch, which messages and rejects show
        issues = [replace(issue, row=row) for row, issue in batch.issues.items()]
        for step in self._steps(tuple(cells)):
            issues += step(cells)
        # A row has one problem at a time. What follows from a wrong cell would only hide it.
        failed = {issue.row for issue in issues if issue.severity != "note"}
        values: Cells = {}
        for field in self.fields:
            values[field.column.name], found = self._column(field, batch, cells, failed)
            issues += found
        # Only converted values can be compared, for example the number of words with the number of tags.
        for relation in self._relations:
            issues += relation.apply(values, cells, self.names)
        if self._known.labels:
            issues += self._unknown_labels(values)
        if issues:
            issues = self._placed(issues, batch)
        return Converted(values=values, issues=issues)

    def _placed(self, issues: Sequence[RowIssue], batch: Batch) -> list[RowIssue]:
        """Returns the issues with their lines, sorted by row and column. A note on a row stands once."""
        order = {field.name: number for number, field in enumerate(self.fields)}
        placed: list[RowIssue] = []
        noted: set[tuple[int, str]] = set()
        for issue in issues:
            if issue.severity == "note":
                if (issue.row, issue.what) in noted:
                    continue
                noted.add((issue.row, issue.what))
            placed.append(replace(issue, line=batch.lines[issue.row]))
        return sorted(placed, key=lambda issue: (issue.row, order.get(str(issue.column), -1)))

    def _column(
        self, field: Field, batch: Batch, cells: Cells, failed: Collection[int]
    ) -> tuple[list[Any], list[RowIssue]]:
        """Converts the column of a field, except for the rows that have failed."""
        kind = field.column.type
        needed = field.needed and not isinstance(kind, Id)
        column = cells.get(field.name)
        if column is None:
            column = [MISSING] * len(batch)
        elif not failed and all(type(cell) is str for cell in column):
            # The usual case is a column of texts without a fault, which needs no look at each cell here.
            values, issues = self._values(field, column)
            if needed and None in values:
                issues += self._missing(field, values, issues, column)
            return values, issues
        issues = []
        rows = []  # the numbers of the rows whose cells are converted
        for row, cell in enumerate(column):
            if row in failed:
                continue
            # A row without the column and a row with an empty cell have different messages, because the first is
            # usually a wrong name and the second a hole in the data.
            if cell is MISSING and needed:
                issues.append(self._absent(field, batch, row))
            elif cell is not MISSING and (cell is not None or needed):
                rows.append(row)
        present = [column[row] for row in rows]
        values, found = self._values(field, present)
        if needed:
            found += self._missing(field, values, found, present)
        spread: list[Any] = [None] * len(batch)  # the values at the places of their rows
        for row, value in zip(rows, values, strict=True):
            spread[row] = value
        issues += [replace(issue, row=rows[issue.row]) for issue in found]
        return spread, issues

    def _values(self, field: Field, cells: Sequence[Any]) -> tuple[list[Any], list[RowIssue]]:
        """Converts cells of a column, with labels in their known spelling."""
        kind = field.column.type
        values, issues = kind.convert(cells, self._separator)
        if isinstance(kind, ClassKind) and self._known.may_be_spelled_otherwise:
            issues += self._spell(kind, values)
        return values, [issue.at(field.name, cells[issue.row]) for issue in issues]

    def _spell(self, kind: ClassKind, values: list[Any]) -> list[RowIssue]:
        """Replaces labels by those in the known spelling."""
        issues = []
        for row, value in enumerate(values):
            if value is None:
                continue
            try:
                values[row] = self._known.spelled(kind, value)
            except CellError as error:
                values[row] = None
                issues.append(replace(error.issue, row=row))
        return issues

    def _missing(
        self, field: Field, values: Sequence[Any], issues: Sequence[RowIssue], cells: Sequence[Any]
    ) -> list[RowIssue]:
        """Returns an issue for each cell without a value that has none yet."""
        wrong = {issue.row for issue in issues if issue.severity != "note"}
        missing = []
        for row, value in enumerate(values):
            if value is None and row not in wrong:
                issue = RowIssue(what=f"missing {field.column.type.noun}", row=row)
                missing.append(issue.at(field.name, cells[row]))
        return missing

    def _absent(self, field: Field, batch: Batch, row: int) -> RowIssue:
        """Returns the issue of a row that does not have a needed column."""
        present = batch.record(row).cells
        listed = "no columns"
        if present:
            listed = first_few((shortened(str(name)) for name in present), _COLUMNS_SHOWN)
        hint = f"The row has {listed}."
        return RowIssue(what=f"missing {field.column.type.noun}", hint=hint, column=field.name, row=row)

    def _unknown_labels(self, values: Cells) -> Iterator[RowIssue]:
        """Yields an issue for each label that is not known."""
        for field in self.fields:
            kind = field.column.type
            if not isinstance(kind, ClassKind):
                continue
            column = values[field.column.name]
            names: set[str] = set()
            for value in column:
                if value is not None:
                    names.update(kind.classes(value))
            if not any(self._known.unknown(kind, names)):  # a batch has few different labels, and nearly always known
                continue
            for row, value in enumerate(column):
                if value is not None:
                    for issue in self._known.unknown(kind, kind.classes(value)):
                        yield replace(issue, row=row, column=field.name)

    @property
    def reads(self) -> str:
        """The columns that a row needs, for messages."""
        needed = []
        for field in self.fields:
            if field.column.required:
                names = [self.names[column.name] for column in self._alternatives(field)]
                needed.append(" or ".join(map(repr, names)))
        return " and ".join(needed)

    def columns_from(self, present: Collection[str]) -> set[str]:
        """Returns the columns that the layouts make of a source with these columns, among them its own.

        The steps run on columns without rows, so that what they make is stated in one place only.
        """
        cells: Cells = {name: [] for name in present}
        for step in self._steps(tuple(cells)):
            step(cells)
        return set(cells)

    def has_input(self, present: Collection[str]) -> bool:
        """Returns True if a row with these columns has those that it needs, or those from which they follow."""
        found = self.columns_from(present)
        return all(field.name in found for field in self.fields if field.column.required)

    def source_columns(self, present: Collection[str]) -> set[str]:
        """Returns those columns of a source that are read."""
        read: set[str] = set()
        for field in self.fields:
            read.update(holders(field.column, field.name, present))
        return read

    def checked(self, batches: Batches, source: str) -> Iterator[Cells]:
        """Yields the converted batches of a source with their ``line``, and sets ``notes`` at the end.

        Raises:
            RowIssues: Some rows cannot be used. The error has all of them and is raised at the end. Rows with a
                ``REJECT`` count only if no row is left.
            DataError: There are no rows, or a column is missing.
        """
        issues, unknown_labels = RowIssues(), RowIssues()
        present: dict[str, None] = {}
        if batches.columns:
            # A header tells before the first row that a column is missing, so no large file is read in vain.
            present = dict.fromkeys(batches.columns)
            self.check_columns(batches.columns, source)
        count = bad = skipped = 0
        for batch in batches.batches:
            count += len(batch)
            if not batch.cells.keys() <= present.keys():  # rarely, and a test costs less than an update
                present |= dict.fromkeys(batch.cells)
            converted = self.convert(batch)
            for issue in converted.issues:
                place, issue = _named_place(source, issue, batch)
                issues.add(place, issue)
                if issue.severity == "unknown label":
                    unknown_labels.add(place, issue)
            bad += len(converted.problems)
            stored = self._stored(batch, converted)
            if stored["line"]:
                yield stored
            skipped += sum(issue.severity == "skip" for issue in batch.issues.values())
        self.notes = issues.notes(count)
        if count == skipped:
            problem = f"{source}: no rows"
            if present and not skipped:
                problem += ". It has a header or blank lines only"
            raise DataError(". ".join([problem, *self.notes]))
        # Rows that name their columns have shown all of them only now. A missing column explains more than its rows.
        if present:
            self.check_columns(present, source)
        has_usable_rows = bad < count - skipped
        if self.skip_errors and has_usable_rows:
            unknown_labels.raise_if_any()  # which are never skipped
        else:
            issues.raise_if_any()

    def check_columns(self, present: Collection[str], source: str) -> None:
        """Checks that a source has the needed columns, and columns set by name.

        Raises:
            DataError: A column is missing. The message names the columns of the source.
        """
        found = self.columns_from(present)
        present = list(map(str, present))
        columns = ", ".join(map(repr, sorted(present)))
        for name in self._to_keep:
            if name not in present:
                message = f"{source}: no column {name!r} to keep{did_you_mean(name, present)}"
                raise DataError(f"{end_sentence(message)} The columns are {columns}")
        missing = [field for field in self.fields if field.needed and field.name not in found]
        if not missing:
            return
        # With a wrong delimiter the whole header is one name, and every column would count as missing.
        if len(present) == 1:
            for mark in (";", "\t", ",", "|"):
                if mark in present[0]:
                    message = f"{source}: there is only one column, {present[0]!r}"
                    raise DataError(f"{message}. If {mark!r} separates columns, set {argument('delimiter', mark)}")
        lines = [f"{source}: {self._missing_column(field, present)}" for field in missing]
        lines += [f"  the columns are: {columns}", f"  say which one to read: {self._naming(missing[0])}"]
        raise DataError("\n".join(lines))

    def _alternatives(self, field: Field) -> list[Column]:
        """Returns the column of a field, and the column from which it may follow."""
        other = derived_from(field.column, [each.column for each in self.fields])
        if other is None:
            return [field.column]
        return [field.column, other]

    def _missing_column(self, field: Field, present: Collection[str]) -> str:
        """Returns the message that the column of a field is missing."""
        parts = column_parts(field.name)
        absent = next(column for column in (*parts, field.name) if column not in present)
        others = self._alternatives(field)[1:]
        hint = "".join(f", nor {self.names[other.name]!r}" for other in others)
        # Choices are often in columns of their own, which did_you_mean cannot know from the name "choices".
        if isinstance(field.column.type, Choices) and len(parts) == 1:
            stem = field.name.removesuffix("s")
            hint = f", nor columns of single choices such as '{stem}0' and '{stem}1'"
        return f"no column {absent!r}{did_you_mean(absent, present)}{hint}"

    def _naming(self, field: Field) -> str:
        """Returns how the user names the column of a field."""
        names = [column.name for column in self._alternatives(field)]
        if names[0] == FOLD_GROUP:
            return 'folds.group = "NAME"'
        keys = " or ".join(f'{name} = "NAME"' for name in names)
        arguments = [argument("columns", {name: "NAME"}) for name in names]
        return f"[data.columns] {keys}, or {' or '.join(arguments)}"

    def _stored(self, batch: Batch, converted: Converted) -> Cells:
        """Returns the columns that a table stores of a batch, without rows that are not read."""
        problems = converted.problems
        kept = []
        for row in range(len(batch)):
            is_unread = row in batch.issues and batch.issues[row].severity == "skip"
            if not is_unread and (self.skip_errors or row not in problems):
                kept.append(row)
        columns: Cells = {"line": [batch.lines[row] for row in kept]}
        for name, values in converted.values.items():
            if problems:
                values = [None if row in problems else value for row, value in enumerate(values)]
            columns[name] = [values[row] for row in kept]
        if self.passthrough != "none":
            records: list[str | None] = []
            for row in kept:
                record = None
                if row not in problems:
                    record = self._record(batch, row)
                records.append(record)
            columns[RECORD] = records
        if self.skip_errors:
            rejects: list[str | None] = []
            for row in kept:
                reject = None
                if row in problems:
                    reject = _reject(batch, row, problems[row])
                rejects.append(reject)
            columns[REJECT] = rejects
        return columns

    def _record(self, batch: Batch, row: int) -> str:
        """Returns the columns that a row carries along, as JSON."""
        cells = batch.record(row).cells
        if self.passthrough != "all":
            cells = {name: value for name, value in cells.items() if name in self.passthrough}
        return _to_json(cells)


def _named_place(source: str, issue: RowIssue, batch: Batch) -> tuple[str, RowIssue]:
    """Returns the file of an issue, and the issue with the name of its row, such as the id of a question."""
    if batch.records is None:
        return source, issue
    record = batch.records[issue.row]
    if record.file is not None:
        source = str(Path(source).parent / record.file)
    if record.name is not None and issue.severity == "error":
        issue = replace(issue, what=f"{issue.what} (question {record.name!r})")
    return source, issue


def _to_json(cells: Row) -> str:
    """Returns the cells as JSON that UTF-8 can encode."""
    # Nearly all rows are JSON already. The others, with dates or nan, are converted value by value.
    try:
        text = json.dumps(cells, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError):  # UnicodeError is a ValueError
        return json.dumps(plain(cells), ensure_ascii=False)
    return text


def _reject(batch: Batch, row: int, issues: Sequence[RowIssue]) -> str:
    """Returns an ASCII line for a file of rejects, with position, reason and record."""
    texts = [_named_place("", issue, batch)[1].text for issue in issues]
    return json.dumps(batch.record(row).reject(" ".join(texts)), default=str)


def plain(value: Any) -> Any:
    """Returns the value in JSON types, with None for nan and U+FFFD for surrogates."""
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):  # JSON has neither nan nor infinity
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    if not isinstance(value, str):
        value = str(value)
    # In UTF-16 two surrogates that belong together are one character, and only single ones are replaced.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

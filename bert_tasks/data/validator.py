"""The row validator, which finds a task's columns and checks each value.

Every row passes through ``RowValidator``, from files, hub data sets, tables in memory, ``TaskModel.predict``, and the
server's requests. So an error has the same message everywhere, except for the position that it names. Rows of several
tasks pass through ``SharedValidator``, which has a validator for each task.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.data.cells import HIDDEN_LABELS, LABEL_SEPARATOR, column_parts, label_value
from bert_tasks.data.columns import (
    FOLD_GROUP,
    PASSTHROUGH,
    ROW_ERROR,
    Column,
    Columns,
    HeadColumns,
    PassthroughColumns,
    Row,
    as_row,
    complete_row,
    head_column,
    read_for_others,
    rename_row,
)
from bert_tasks.data.formats import Format
from bert_tasks.data.kinds import REMARKS
from bert_tasks.data.problems import RowError, RowErrors, counted, did_you_mean, end_sentence, first_few, shortened
from bert_tasks.data.records import Record, Records
from bert_tasks.errors import DataError, argument

_COLUMNS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of the task, its name in the source, and True if every row needs it."""

    column: Column
    name: str
    needed: bool


def unknown_column(name: str, names: Sequence[str]) -> str:
    """Returns the message for a column name that the task does not have."""
    return f"the task reads the columns {', '.join(names)}, not {name!r}{did_you_mean(name, names)}"


class RowValidator:
    """Converts rows of a source to the task's names and canonical values.

    ``validate`` checks one row. ``rows`` checks all rows of a source, and collects the errors.

    Args:
        columns: Columns that the task reads.
        names: The task's columns -> the source's columns, as set by the caller.
        layout: Format of the source.
        require_labels: Every row needs its label. Default: labels may be missing, as in files for prediction.
        labels: Known labels, which every label must be. Default: labels are not checked.
        passthrough: Columns of the source that each row carries along in a column ``PASSTHROUGH``.
        skip_errors: Rows that cannot be used become rows without values that have the error in ``ROW_ERROR``.
        label_separator: Separator of several labels in one cell.

    Raises:
        DataError: ``names`` has a column that the task does not read, or the separator is blank.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        names: Mapping[str, str] | None = None,
        *,
        layout: Format | None = None,
        require_labels: bool = False,
        labels: Sequence[str] | None = None,
        passthrough: PassthroughColumns = "none",
        skip_errors: bool = False,
        label_separator: str = LABEL_SEPARATOR,
    ) -> None:
        if label_separator.strip() == "":
            separator = f"label_separator = {label_separator!r}"
            raise DataError(f"{separator} is blank. Expected one or more visible characters, such as '|'")
        column_names = {} if names is None else names
        usual: Mapping[str, str] = {} if layout is None else layout.columns
        task_columns = [column.name for column in columns]
        unknown = next((name for name in column_names if name not in task_columns), None)
        if unknown is not None:
            raise DataError(unknown_column(unknown, task_columns))
        unread = read_for_others(columns, column_names, usual)
        # Spans are labels, but tags may replace them.
        sources = [column.type.replacement(columns) for column in columns]
        needed = [c for c in columns if c.required or (c.is_label and require_labels and c not in sources)]
        self.fields = tuple(
            Field(
                column=column,
                name=column_names.get(column.name, usual.get(column.name, column.name)),
                needed=column in needed,
            )
            for column in columns
            if column.name not in unread or column in needed
        )
        usual_columns = () if layout is None else layout.default_passthrough
        self.passthrough = usual_columns if passthrough == "all" and usual_columns else passthrough
        self._to_keep = () if isinstance(passthrough, str) else passthrough
        self.skip_errors = skip_errors
        self.notes: tuple[str, ...] = ()
        self._separator = label_separator
        self._remarks: Sequence[str] = ()  # notes for people on the row that was validated last
        self._label_names = {} if layout is None else layout.label_names
        self._columns = [field.column for field in self.fields]
        self.read_columns: Columns = self._columns
        self.names = {field.column.name: field.name for field in self.fields}
        self._labels = dict.fromkeys(() if labels is None else labels)
        # Labels that spell a number which no other label spells, such as true and 1, 2.0 and 2.
        values = Counter(map(label_value, self._labels))
        self._by_value = {label_value(label): label for label in self._labels if values[label_value(label)] == 1}

    def validate(self, cells: Mapping[str, Any]) -> tuple[dict[str, Any], list[RowError]]:
        """Checks one row.

        Args:
            cells: The row under the source's names.

        Returns:
            The values by the task's names, without missing and wrong values, and the errors.
        """
        row: dict[str, Any] = {}
        errors: list[RowError] = []
        self._remarks = ()
        try:
            cells = complete_row(cells, self._columns, self.names)
        except RowError as error:
            return row, [error]
        self._remarks = cells.get(REMARKS, ())
        for field in self.fields:
            column_type, raw = field.column.type, cells.get(field.name)
            needed = field.needed and not column_type.may_be_missing
            if raw is None and not needed:
                continue
            try:
                if field.name not in cells:
                    present = first_few((shortened(str(name)) for name in cells), _COLUMNS_SHOWN)
                    raise RowError(f"missing {column_type.noun}", f"The row has {present if cells else 'no columns'}.")
                value = column_type.parse(raw, self._separator)
                value = None if value is None else column_type.rename(value, self._label)
                if column_type.is_single_class and self._is_hidden(value):
                    value = None
                if value is None and needed:
                    raise RowError(f"missing {column_type.noun}")
            except RowError as error:
                errors.append(error.at(field.name, raw))
                continue
            if value is not None:
                row[field.column.name] = value
        raw_values = {field.column.name: cells.get(field.name) for field in self.fields}
        for field in self.fields:
            if (value := row.pop(field.column.name, None)) is None:
                continue
            try:
                resolved = field.column.type.resolve(value, row, raw_values, self._columns)
            except RowError as error:
                errors.append(error.at(field.name, value))
                continue
            if resolved is not None:
                row[field.column.name] = resolved
        return row, errors

    @cached_property
    def _needed(self) -> list[list[Field]]:
        """Returns each field that a row needs, even for prediction, with the field that may replace it."""
        by_name = {field.column.name: field for field in self.fields}
        needed = []
        for field in self.fields:
            other = field.column.type.replacement(self._columns)
            if field.column.required:
                needed.append([field] if other is None else [field, by_name[other.name]])
        return needed

    @property
    def reads(self) -> str:
        """The columns that a row needs, for messages."""
        return " and ".join(" or ".join(repr(field.name) for field in fields) for fields in self._needed)

    def has_input(self, cells: Mapping[str, Any]) -> bool:
        """Returns True if a row has the columns that it needs, or those that replace them."""
        for fields in self._needed:
            if any(field.name in cells for field in fields):
                continue
            if not any(field.column.type.columns_in(field.name, cells.keys()) for field in fields):
                return False
        return True

    def _label(self, name: str) -> str | None:
        """Returns the known label for an id or for another spelling of its number.

        Returns None if the label is hidden. pandas and JSON do not preserve the spelling of 1 or true in a file.
        """
        names = self._label_names
        if names and name not in names.values():
            if name not in names and name != "-1":
                raise RowError("unknown label", f"Expected one of {', '.join(names)}, or {', '.join(names.values())}.")
            return names.get(name)
        value = None if name in self._labels else label_value(name)
        return name if value is None else self._by_value.get(value, name)

    def _is_hidden(self, name: str | None) -> bool:
        """Returns True for a value that data sets write for "no label", unless it is one of the known labels."""
        return len(self._labels) > 0 and name in HIDDEN_LABELS and name not in self._labels

    def rows(self, records: Records, source: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of a source with their ``line``, and sets ``notes`` at the end.

        Raises:
            RowErrors: Some rows cannot be used. The error has all of them and is raised at the end. Rows with a
                ``ROW_ERROR`` count only if no row is left.
            DataError: There are no rows, or a column is missing.
        """
        carried = self.passthrough
        errors, unknown_labels = RowErrors(), RowErrors()
        present: dict[str, None] = dict.fromkeys(() if records.columns is None else records.columns)
        if records.columns is not None:
            self.check_columns(records.columns, source)
        noted: dict[str, list[int]] = {}  # notes for people on rows -> the lines of these rows
        count = bad = skipped = 0
        for record in records.rows:
            count += 1
            place = source if record.file is None else str(Path(source).parent / record.file)
            if record.skip is not None:
                noted.setdefault(f"skipped: {record.skip}", []).append(record.line)
                skipped += 1
                continue
            row: dict[str, Any] = {"line": record.line}
            if record.fault is None:
                if not record.cells.keys() <= present.keys():
                    present |= dict.fromkeys(record.cells)
                values, row_errors = self.validate(record.cells)
                for error in self._unknown_labels(values):
                    unknown_labels.add(place, record.line, error)
                    errors.add(place, record.line, error)
                for remark in self._remarks:
                    noted.setdefault(remark, []).append(record.line)
                row |= values
                if carried != "none":
                    kept = {k: v for k, v in record.cells.items() if carried == "all" or k in carried}
                    row[PASSTHROUGH] = _to_json(kept)
            else:
                row_errors = [RowError(record.fault)]
            for error in row_errors:
                error.what += "" if record.name is None else f" (question {record.name!r})"
                errors.add(place, record.line, error)
            bad += len(row_errors) > 0
            if row_errors and self.skip_errors:
                yield {"line": record.line, ROW_ERROR: _reject(record, row_errors)}
            elif record.fault is None:
                yield row
        self.notes = tuple(
            f"{len(lines)} of {counted(count, 'row')} {remark} (line {first_few(map(str, lines), 5)})"
            for remark, lines in noted.items()
        )
        if count == skipped:
            below = ". It has a header or blank lines only" if present and not skipped else ""
            raise DataError(f"{source}: no rows{below}{''.join(f'. {note}' for note in self.notes)}")
        if present:
            self.check_columns(present, source)
        # Skipped rows hold their error, but an unknown label is never skipped.
        errors.never_skipped = unknown_labels.count
        (unknown_labels if self.skip_errors and bad < count else errors).raise_if_any()

    def _unknown_labels(self, row: Mapping[str, Any]) -> Iterator[RowError]:
        for field in self.fields if self._labels else ():
            column_type, value = field.column.type, row.get(field.column.name)
            if column_type.has_classes and value is not None:
                names = column_type.labels_of(value)
                yield from (error.at(field.name, None) for error in column_type.unknown(names, self._labels))

    def check_columns(self, present: Collection[str], source: str) -> None:
        """Checks that a source has the needed columns, and columns set by name.

        Raises:
            DataError: A column is missing. The message names the columns of the source.
        """
        columns = ", ".join(map(repr, sorted(present)))
        for name in self._to_keep:
            if name not in present:
                message = f"{source}: no column {name!r} to keep{did_you_mean(name, present)}"
                raise DataError(f"{end_sentence(message)} The columns are {columns}")
        lines, names = list[str](), list[str]()
        for field in self.fields:
            other = field.column.type.replacement(self._columns)
            others = [] if other is None else [other.name]
            sources = [field.name, *(self.names[name] for name in others)]
            if not field.needed or any(field.column.type.columns_in(name, present) for name in sources):
                continue
            names = names if names else [field.column.name, *others]
            hint = "".join(f", nor {name!r}" for name in sources[1:])
            parts = column_parts(field.name)
            missing = next(column for column in (*parts, field.name) if column not in present)
            if field.column.type.is_numbered and len(parts) == 1:
                stem = field.name.removesuffix("s")
                hint = f", nor columns of single choices such as '{stem}0' and '{stem}1'"
            lines.append(f"{source}: no column {missing!r}{did_you_mean(missing, present)}{hint}")
        if not lines:
            return
        only = next(iter(present)) if len(present) == 1 else ""
        mark = next((mark for mark in (";", "\t", ",", "|") if mark in only), None)
        if mark is not None:
            message = f"{source}: there is only one column, {only!r}"
            raise DataError(f"{message}. If {mark!r} separates columns, set {argument('delimiter', mark)}")
        keys = " or ".join(f'{name} = "NAME"' for name in names)
        arguments = [argument("columns", {name: "NAME"}) for name in names]
        hint = (
            'folds.group = "NAME"' if names[0] == FOLD_GROUP else f"[data.columns] {keys}, or {' or '.join(arguments)}"
        )
        raise DataError("\n".join([*lines, f"  the columns are: {columns}", f"  say which one to read: {hint}"]))


def _to_json(cells: Row) -> str:
    """Returns the cells as JSON that UTF-8 can encode."""
    try:
        text = json.dumps(cells, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError):  # UnicodeError is a ValueError
        return json.dumps(plain(cells), ensure_ascii=False)
    return text


def _reject(record: Record, errors: Sequence[RowError]) -> str:
    """Returns an ASCII line for a file of rejects, with position, error and record."""
    name = {} if record.name is None else {"id": record.name}
    file = {} if record.file is None else {"file": record.file}
    raw = dict(record.cells) if record.raw is None else record.raw
    line = {**file, "line": record.line, **name, "reason": " ".join(map(str, errors)), "raw": raw}
    return json.dumps(line, default=str)


def plain(value: Any) -> Any:
    """Returns the value in JSON types, with None for nan and U+FFFD for surrogates."""
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    text = value if isinstance(value, str) else str(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class SharedValidator(RowValidator):
    """Converts each row of a source to the rows of several tasks, one value for each task.

    A row may lack the columns of a task, or its label. A value that cannot be used makes the row unusable for all
    tasks, because they read it together.

    Args:
        heads: The name of each task -> the columns that it reads.
        require_labels: The rows are for training or evaluation, so ``notes`` name tasks that no row has the columns of.
        layout, passthrough, skip_errors, label_separator: See ``RowValidator``.

    Raises:
        DataError: See ``RowValidator``.
    """

    def __init__(
        self,
        heads: Mapping[str, HeadColumns],
        *,
        require_labels: bool = False,
        layout: Format | None = None,
        label_separator: str = LABEL_SEPARATOR,
        **options: Any,
    ) -> None:
        super().__init__((), layout=layout, label_separator=label_separator, **options)
        self._heads = self.read_columns = heads
        self._expects_all = require_labels
        self._without_input = dict.fromkeys(heads)  # the tasks that no row so far has the columns of
        self._validators: dict[str, RowValidator] = {}
        # For each task the source's name of a column -> the task's own name, if it differs.
        self._own_names: dict[str, dict[str, str]] = {}
        fields: list[Field] = []
        for name, head in heads.items():
            validator = RowValidator(
                head.columns, head.names, layout=layout, labels=head.labels, label_separator=label_separator
            )
            self._validators[name] = validator
            inputs = [field for field in validator.fields if not field.column.is_label]
            others = [field for field in inputs if field.name != field.column.name]
            self._own_names[name] = {field.name: field.column.name for field in others}
            fields += [replace(field, needed=False) for field in validator.fields]
            fields += [replace(field, needed=False, name=field.column.name) for field in others]
        self.fields = tuple(fields)

    def validate(self, cells: Mapping[str, Any]) -> tuple[dict[str, Any], list[RowError]]:
        """Checks one row.

        Args:
            cells: The row under the source's names, or a row of a table of these tasks.

        Returns:
            The row of each task whose columns the cells have, by ``head_column``, and the first error.
        """
        rows: dict[str, Any] = {}
        remarks: dict[str, None] = {}
        present = {name: value for name, value in cells.items() if value is not None}
        for name, validator in self._validators.items():
            source = self._cells_of(name, present)
            if not validator.has_input(source):
                continue
            self._without_input.pop(name, None)
            row, errors = validator.validate(source)
            if errors:
                return {}, errors[:1]
            rows[head_column(name)] = row
            remarks |= dict.fromkeys(validator._remarks)
        self._remarks = tuple(remarks)
        if rows:
            return rows, []
        reads = ", ".join(f"{validator.reads} ({name})" for name, validator in self._validators.items())
        return {}, [RowError("no input of any task", f"The tasks read {reads}.")]

    def _cells_of(self, name: str, cells: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the cells for a task, in which its own names of columns may stand for those of the source."""
        of_table = cells.get(head_column(name))
        if isinstance(of_table, Mapping):
            names = self._validators[name].names
            return {names.get(key, str(key)): value for key, value in of_table.items() if value is not None}
        own_names = self._own_names[name]
        added = {given: cells[own] for given, own in own_names.items() if given not in cells and own in cells}
        return {**cells, **added} if added else cells

    def check_columns(self, present: Collection[str], source: str) -> None:
        """Checks the columns to keep, and adds a note on each task that no row has had the columns of."""
        super().check_columns(present, source)
        if not self._expects_all:
            return
        columns = ", ".join(map(repr, sorted(present)))
        for name in self._without_input:
            problem = no_input(name, self._heads[name])
            note = f"{problem} (the columns are {columns}, the task reads {self._validators[name].reads})"
            self.notes = (*self.notes, note)

    def _unknown_labels(self, row: Mapping[str, Any]) -> Iterator[RowError]:
        for name, validator in self._validators.items():
            yield from validator._unknown_labels(row.get(head_column(name), {}))


def no_input(name: str, head: HeadColumns) -> str:
    """Returns the message that no row has what one of several tasks reads."""
    nouns = dict.fromkeys(column.type.noun for column in head.columns if column.required)
    return f"no row has the {' and '.join(nouns)} of the task {name}"


def row_validator(columns: Columns, names: Mapping[str, str] | None = None, **options: Any) -> RowValidator:
    """Returns the validator of a task's rows (see ``RowValidator``) or of rows that several tasks share.

    Raises:
        DataError: See ``RowValidator``.
    """
    if not isinstance(columns, Mapping):
        return RowValidator(columns, names, **options)
    options.pop("labels", None)  # each task has labels of its own
    return SharedValidator(columns, **options)


def valid_rows(
    rows: Iterable[Row | str | tuple[str, ...]],
    columns: Columns,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Row]:
    """Yields the rows' values of some columns, validated for tasks.

    Args:
        rows: The rows, in the forms that ``as_row`` accepts.
        columns: Columns to read.
        names: Columns -> other names that rows may use for them.

    Raises:
        DataError: A row cannot be used. The message names its number from 0, its first error, and the column.
    """
    validator = row_validator(columns)
    for number, row in enumerate(rows):
        try:
            cells = as_row(row, columns, number)
            if not isinstance(columns, Mapping):  # several tasks know their names
                cells = rename_row(complete_row(cells, columns, names), names, columns)
        except RowError as error:
            raise DataError(f"row {number}: {error}") from None
        values, errors = validator.validate(cells)
        if errors:
            raise DataError(f"row {number}: {errors[0]}")
        yield values

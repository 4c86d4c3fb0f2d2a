"""The kind of a column that holds the whole row of one of several tasks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow

from bert_tasks.data.columns import text_columns
from bert_tasks.data.formats import named_format
from bert_tasks.data.kinds import Column, ColumnKind
from bert_tasks.data.problems import RowError
from bert_tasks.data.validator import Field, RowValidator

ROW_OF = "row of "  # the name of a column with the rows of a task begins so, as no column of data does


@dataclass(frozen=True, kw_only=True)
class TaskColumn(Column):
    """The row of one of several tasks. It, or its label, may be missing in a row.

    Args:
        columns: Columns of the task.
        names: Pairs of a column of the task and its name in the data, if they differ.
        labels: Known labels of the task.
        format: Format of the data, which may have names for label ids.
    """

    columns: tuple[Column, ...]
    names: tuple[tuple[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    format: str | None = None

    @property
    def task_name(self) -> str:
        return self.name.removeprefix(ROW_OF)

    @property
    def type(self) -> "TaskRow":
        return _kind_of(self)


class TaskRow(ColumnKind):
    """The columns of a task, as a mapping."""

    name = "row"
    has_texts = True
    may_be_missing = True
    is_composed = True
    strata_name = "labels"

    def __init__(self, column: TaskColumn | None = None) -> None:
        self.columns = () if column is None else column.columns
        self._column = column

    @cached_property
    def _validators(self) -> tuple[RowValidator, RowValidator]:
        """The validators of rows under the names of the data, and of the task."""
        column = self._column
        layout = None if column is None or column.format is None else named_format(column.format)
        names = {} if column is None else dict(column.names)
        return RowValidator(self.columns, names, layout=layout), RowValidator(self.columns, layout=layout)

    def _parse(self, value: Any, separator: str) -> Any:
        if value is None or isinstance(value, Mapping):
            return value
        raise RowError("not a row of the task", "Write a mapping from columns to values.")

    def arrow_type(self) -> Any:
        return pyarrow.struct([(column.name, column.type.arrow_type()) for column in self.columns])

    def row_of(self, texts: Sequence[str]) -> Mapping[str, str] | None:
        columns = text_columns([column for column in self.columns if not column.is_label])
        names = {} if self._column is None else dict(self._column.names)
        pairs = zip(columns, texts, strict=False)
        return {names.get(name, name): text for name, text in pairs} if len(columns) == len(texts) else None

    def texts(self, value: Any) -> Sequence[str]:
        columns = [column for column in self.columns if column.type.has_texts and value.get(column.name) is not None]
        return [text for column in columns for text in column.type.texts(value[column.name])]

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        column = next((column for column in self.columns if column.type.strata_name), None)
        if column is None:
            return super().strata(values)
        present = [None if value is None else value.get(column.name) for value in values]
        strata = iter(column.type.strata([value for value in present if value is not None]))
        return [("",) if value is None else next(strata) for value in present]

    def source_columns(self, column: Column) -> Sequence[Column]:
        """Returns the optional columns of the task, except labels."""
        fields = [field for field in self._validators[0].fields if not field.column.is_label]
        return [replace(field.column, name=field.name, required=False) for field in fields]

    def columns_in(self, name: str, present: Collection[str]) -> list[str]:
        columns: list[str] = []
        for field in self._validators[0].fields:
            columns += field.column.type.columns_in(field.name, present)
            columns += field.column.type.columns_in(field.column.name, present)  # see ``complete``
        if not columns:
            return [name]  # a source may lack the columns of a task, so ``complete`` checks each row
        return list(dict.fromkeys(columns))

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Adds the row of the task to the cells, if they have the columns that it reads."""
        name = names.get(column.name, column.name)
        is_nested = isinstance(cells.get(name), Mapping)
        source, validator = (cells[name], self._validators[1]) if is_nested else (cells, self._validators[0])
        source = {key: value for key, value in source.items() if value is not None}
        for field in validator.fields:  # the name of the task's column, if the name in the training data is missing
            if not field.column.is_label and field.name not in source and field.column.name in source:
                source[field.name] = source[field.column.name]
        for fields in self._needed(validator):
            if not any(field.column.type.columns_in(field.name, source.keys()) for field in fields):
                return self._without(cells, column, columns, names)
        row, errors = validator.validate(source)
        labels = () if self._column is None else self._column.labels
        for each in self.columns if labels else ():
            if each.type.has_classes and row.get(each.name) is not None:
                errors += each.type.unknown(each.type.labels_of(row[each.name]), labels)
        if errors:
            raise errors[0]
        return {**cells, name: row}

    def _needed(self, validator: RowValidator) -> list[list[Field]]:
        """Returns each field that a row of the task needs, with its replacements."""
        pairs = [(field, field.column.type.replacement(self.columns)) for field in validator.fields]
        return [
            [field, *(each for each in validator.fields if other is not None and each.column == other)]
            for field, other in pairs
            if field.column.required
        ]

    @property
    def reads(self) -> str:
        """Names the columns that a row of the task needs, for messages."""
        needed = self._needed(self._validators[0])
        return " and ".join(" or ".join(repr(field.name) for field in fields) for fields in needed)

    @staticmethod
    def _without(
        cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells, or raises RowError after the last task if all are missing."""
        tasks = [each for each in columns if isinstance(each, TaskColumn)]
        if column is tasks[-1] and not any(names.get(each.name, each.name) in cells for each in tasks):
            reads = (f"{each.type.reads} ({each.task_name})" for each in tasks)
            raise RowError("no input of any task", f"The tasks read {', '.join(reads)}.")
        return cells


@lru_cache(maxsize=64)
def _kind_of(column: TaskColumn) -> TaskRow:
    return TaskRow(column)

"""The kind of a column that holds the whole row of one of several tasks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from bert_tasks.data.columns import text_columns
from bert_tasks.data.kinds import Column, ColumnKind
from bert_tasks.data.problems import RowError
from bert_tasks.data.validator import RowValidator


@dataclass(frozen=True, kw_only=True)
class TaskColumn(Column):
    """The row of a task that is one of several. A row of the data may lack it, and a row of the task its label.

    Args:
        columns: The columns of the task.
        names: Pairs of a column of the task and its name in the data, where they differ.
        labels: The known labels of the task.
    """

    columns: tuple[Column, ...]
    names: tuple[tuple[str, str], ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def type(self) -> "TaskRow":
        return _kind_of(self)


class TaskRow(ColumnKind):
    """The columns of a task, as a mapping."""

    name = "row"
    has_texts = True
    may_be_missing = True
    strata_name = "labels"

    def __init__(self, column: TaskColumn | None = None) -> None:
        self.columns = () if column is None else column.columns
        self._column = column

    @cached_property
    def _validators(self) -> tuple[RowValidator, RowValidator]:
        """The validators of rows under the names of the data, and under the names of the task."""
        names = {} if self._column is None else dict(self._column.names)
        return RowValidator(self.columns, names), RowValidator(self.columns)

    def _parse(self, value: Any, separator: str) -> Any:
        if value is None or isinstance(value, Mapping):
            return value
        raise RowError("not a row of the task", "Write a mapping from columns to values.")

    def arrow_type(self) -> Any:
        import pyarrow

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
        """The columns of the task but for labels. None of them is required, because a row may lack the task."""
        fields = [field for field in self._validators[0].fields if not field.column.is_label]
        return [replace(field.column, name=field.name, required=False) for field in fields]

    def columns_in(self, name: str, present: Collection[str]) -> list[str]:
        if name in present:
            return [name]
        fields = self._validators[0].fields
        return [other for field in fields for other in field.column.type.columns_in(field.name, present)]

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Adds the row of the task to the cells, if they have what the task reads."""
        name = names.get(column.name, column.name)
        is_nested = isinstance(cells.get(name), Mapping)
        source, validator = (cells[name], self._validators[1]) if is_nested else (cells, self._validators[0])
        source = {key: value for key, value in source.items() if value is not None}
        required = [field for field in validator.fields if field.column.required]
        alternatives = {column.name: column.type.replacement(self.columns) for column in self.columns}
        for field in required:
            other = alternatives[field.column.name]
            fields = [field, *(each for each in validator.fields if other is not None and each.column == other)]
            if not any(each.column.type.columns_in(each.name, source.keys()) for each in fields):
                return cells
        for field in validator.fields:
            words = source.get(field.name)
            if isinstance(words, list | tuple) and field.column.type.is_text and not field.column.type.is_pretokenized:
                source |= {field.name: " ".join(map(str, words))}  # the words of another task are the text of this one
        row, errors = validator.validate(source)
        labels = () if self._column is None else self._column.labels
        for each in self.columns if labels else ():
            if each.type.has_classes and row.get(each.name) is not None:
                errors += each.type.unknown(each.type.labels_of(row[each.name]), labels)
        if errors:
            raise errors[0]
        return {**cells, name: row}


@lru_cache(maxsize=64)
def _kind_of(column: TaskColumn) -> TaskRow:
    return TaskRow(column)

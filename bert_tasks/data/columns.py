"""Columns that a task reads of a row, and their names.

This module owns what the readers and the tasks agree on: the columns of one task (a sequence of ``Column``) or of
several (a ``HeadColumns`` for each), and the forms in which a caller may pass rows, which are mappings, texts and
tuples of texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bert_tasks.data.kinds import Choices, ColumnKind, Text, Words
from bert_tasks.data.kinds import Column as Column
from bert_tasks.data.layouts import derived_from, unread_columns
from bert_tasks.errors import DataError

Row = Mapping[str, Any]
# Columns of a table beside those of the task, which may not begin with an underscore.
RECORD = "_record"  # the columns of its source that a row carries along, as JSON
REJECT = "_reject"  # why a row cannot be used, as a line of a file of rejects
FOLD_GROUP = "_group"  # the group of a row whose rows are in one fold

PassthroughColumns = Literal["all", "none"] | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class HeadColumns:
    """The columns that one of several tasks reads of the rows that the tasks share.

    Attributes:
        columns: Columns of the task.
        names: The task's columns -> the columns of the data, if the names differ.
        labels: Known labels of the task. Empty if they are not known yet.
    """

    columns: tuple[Column, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


# What is read of a row: the columns of a task, or for several tasks the name of each -> its columns.
Columns = Sequence[Column] | Mapping[str, HeadColumns]


def head_column(name: str) -> str:
    """Returns the column of a table that holds the rows of one of several tasks."""
    return f"_task.{name}"


def stored_names(columns: Columns) -> list[str]:
    """Returns the names of the columns in which a table holds the values of these columns."""
    if isinstance(columns, Mapping):
        return [head_column(name) for name in columns]
    return [column.name for column in columns]


def without_labels(columns: Columns) -> Columns:
    """Returns the columns that a prediction reads."""
    if not isinstance(columns, Mapping):
        return [column for column in columns if not column.is_label]
    inputs = {}
    for name, head in columns.items():
        of_head = tuple(column for column in head.columns if not column.is_label)
        names = {column.name: head.names[column.name] for column in of_head if column.name in head.names}
        inputs[name] = HeadColumns(columns=of_head, names=names)
    return inputs


def head_rows(rows: Sequence[Row], name: str, columns: Sequence[Column]) -> tuple[list[int], list[Row]]:
    """Returns the numbers and the cells of the rows that have a label of one of several tasks.

    Args:
        rows: The rows of a table.
        name: The name of the task. Empty for an only task, whose rows are all rows.
        columns: The columns of the task.
    """
    if not name:
        return list(range(len(rows))), list(rows)
    labels = [each.name for each in columns if each.is_label]
    column = head_column(name)
    numbers = []
    for number, row in enumerate(rows):
        cells = row.get(column)
        if cells is not None and any(cells.get(label) is not None for label in labels):
            numbers.append(number)
    return numbers, [head_cells(rows[number], name) for number in numbers]


def input_rows(rows: Sequence[Row], name: str) -> dict[int, Row]:
    """Returns the number and the cells of each row that has the input of one of several tasks.

    Args:
        rows: The rows of a table.
        name: The name of the task. Empty for an only task, whose rows are all rows.
    """
    if not name:
        return dict(enumerate(rows))
    column = head_column(name)
    return {number: head_cells(row, name) for number, row in enumerate(rows) if row.get(column) is not None}


def head_cells(row: Row, name: str) -> Row:
    """Returns the cells of one of several tasks, without the columns that Arrow fills in.

    Each row of an Arrow struct has all of its fields, so a column that the row lacks is None there.
    """
    return {column: value for column, value in row[head_column(name)].items() if value is not None}


def source_columns(columns: Columns) -> list[Column]:
    """Returns the columns as the data have them. All are optional if several tasks read a row."""
    if not isinstance(columns, Mapping):
        return list(columns)
    found: dict[str, Column] = {}
    for head in columns.values():
        unread = unread_columns(head.columns, head.names, {})
        for column in head.columns:
            if column.name not in unread:
                name = head.names.get(column.name, column.name)
                found[name] = replace(column, name=name, required=False)
    return list(found.values())


def first_column(columns: Columns, *kinds: type[ColumnKind]) -> Column | None:
    """Returns the first column of a task with one of these kinds. None for several tasks.

    Examples:
        >>> first_column([Column(name="text", kind="text")], Label)
    """
    if isinstance(columns, Mapping):
        return None
    return next((column for column in columns if isinstance(column.type, kinds)), None)


def has_labels(columns: Columns) -> bool:
    """Returns True if every row of a task has labels, unlike documents of a corpus and rows of several tasks."""
    return not isinstance(columns, Mapping) and any(column.is_label for column in columns)


def text_columns(columns: Columns) -> list[str]:
    """Returns the columns of texts that may stand for a row of a task, or none."""
    if isinstance(columns, Mapping):
        return []
    names = []
    for column in columns:
        if not column.required:
            continue
        if not isinstance(column.type, Text | Words):
            return []
        read = column
        if isinstance(column.type, Words):
            text = derived_from(column, columns)  # a text stands for its words, which are cut from it
            if text is not None:
                read = text
        names.append(read.name)
    return names


def _text_list_columns(columns: Columns) -> list[str]:
    """Returns the text columns and a last list of texts (context and choices), if any."""
    if isinstance(columns, Mapping):
        return []
    *firsts, last = [column for column in columns if column.required]
    if not firsts or not isinstance(last.type, Choices):
        return []
    return [*text_columns(firsts), last.name]


def as_row(row: Row | str | tuple[str, ...], columns: Columns, number: int) -> Row:
    """Returns the row of a mapping, a text or a tuple of texts with choices last.

    Args:
        row: The row.
        columns: The columns that are read.
        number: Number of the row, for the message.

    Raises:
        DataError: The row has another type. The message names the row and the valid types.
    """
    if isinstance(row, Mapping):
        return row
    texts, lists = text_columns(columns), _text_list_columns(columns)
    values = row
    if not isinstance(values, tuple):
        values = (values,)
    if all(isinstance(value, str) for value in values):
        if isinstance(columns, Mapping):
            shared = _shared_row(values, columns)
            if shared:
                return shared
        if texts and len(values) == len(texts):
            return dict(zip(texts, values, strict=True))
        if lists and len(values) >= len(lists):
            *firsts, last = lists
            return dict(zip(firsts, values, strict=False)) | {last: list(values[len(firsts) :])}
    sources = source_columns(columns)
    needed = [f'"{column.name}": ...' for column in sources if column.required or isinstance(columns, Mapping)]
    valid = f"a mapping such as {{{', '.join(needed)}}}"
    named = texts
    if not named:
        named = lists
    if len(named) == 1:
        valid += ", or a text"
    elif named:
        valid += f", or a tuple of {' and '.join(named)}"
    raise DataError(f"row {number}: expected {valid}, got {type(row).__name__}")


def _shared_row(texts: tuple[str, ...], heads: Mapping[str, HeadColumns]) -> dict[str, str]:
    """Returns the row that texts stand for, which are the texts of each task that reads so many."""
    row: dict[str, str] = {}
    for head in heads.values():
        names = text_columns(head.columns)
        if len(names) == len(texts):
            row |= {head.names.get(name, name): text for name, text in zip(names, texts, strict=True)}
    return row


def as_rows(
    inputs: Row | str | tuple[str, ...] | Iterable[Row | str | tuple[str, ...]], columns: Columns
) -> Iterable[Row]:
    """Returns the rows from the argument of ``TaskModel.predict``, a row or several.

    Raises:
        DataError: A row is not in one of the forms that ``as_row`` accepts.
    """
    texts, has_list = len(text_columns(columns)), len(_text_list_columns(columns)) > 0
    is_one = isinstance(inputs, Mapping | str) or not isinstance(inputs, Iterable)
    # A tuple of texts is one row if the task reads as many texts, and several rows if it reads one text.
    if isinstance(inputs, tuple) and all(isinstance(text, str) for text in inputs):
        is_one = has_list or texts == len(inputs) > 1
    several: Iterable[Any] = inputs
    if is_one:
        several = [inputs]
    return (as_row(row, columns, number) for number, row in enumerate(several))

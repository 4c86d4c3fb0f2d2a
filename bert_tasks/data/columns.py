"""Columns that a task reads of a row, and their names.

Owns the declaration of a column, further names of columns, and the forms in which a caller may pass rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from bert_tasks.data.cells import with_named_cell
from bert_tasks.data.kinds import REMARKS, ColumnKind
from bert_tasks.data.kinds import Column as Column
from bert_tasks.errors import DataError

Row = Mapping[str, Any]
# Columns of the table beside the task's. No task can have these names.
PASSTHROUGH, ROW_ERROR, FOLD_GROUP = "given row", "error of the row", "group of a fold"

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
    return f"row of {name}"  # no column of data has such a name


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
    labels, column = [each.name for each in columns if each.is_label], head_column(name)
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
    """Returns the cells of one of several tasks, without the columns that Arrow fills in."""
    return {column: value for column, value in row[head_column(name)].items() if value is not None}


def source_columns(columns: Columns) -> list[Column]:
    """Returns the columns as the data have them. All are optional if several tasks read a row."""
    if not isinstance(columns, Mapping):
        return list(columns)
    found: dict[str, Column] = {}
    for head in columns.values():
        unread = read_for_others(head.columns, head.names)
        for column in head.columns:
            if column.name not in unread:
                name = head.names.get(column.name, column.name)
                found[name] = replace(column, name=name, required=False)
    return list(found.values())


def first_column(columns: Columns, has: Callable[[ColumnKind], object]) -> Column | None:
    """Returns the first column of a task whose kind has a property. None for several tasks.

    Example:
        >>> first_column([Column(name="text", kind="text")], lambda kind: kind.has_classes)
    """
    if isinstance(columns, Mapping):
        return None
    return next((column for column in columns if has(column.type)), None)


def has_labels(columns: Columns) -> bool:
    """Returns True if every row of a task has labels, unlike documents of a corpus and rows of several tasks."""
    return not isinstance(columns, Mapping) and any(column.is_label for column in columns)


def complete_row(cells: Row, columns: Sequence[Column], names: Mapping[str, str] = MappingProxyType({})) -> Row:
    """Returns the cells with values that follow from other cells.

    They are the words of a text, a text of its sentences, and choices. A name with dots may be a path into objects, and
    a name with commas several columns. See ``with_named_cell``.

    Args:
        cells: The row under the source's names.
        columns: The task's columns.
        names: The task's columns -> the cells' columns, if they differ.

    Raises:
        RowError: The columns of single choices have wrong numbers, or several columns do not make one value.
    """
    for column in columns:
        name = names.get(column.name, column.name)
        cells = column.type.complete(with_named_cell(cells, name, column.type.join), column, columns, names)
        remark = column.type.remark(cells.get(name))
        if remark is not None:
            cells = {**cells, REMARKS: [*cells.get(REMARKS, ()), remark]}
    return cells


def rename_row(row: Row, names: Mapping[str, str], columns: Sequence[Column] = ()) -> Row:
    """Returns the row with the task's names for columns with other names.

    Args:
        row: The row.
        names: The task's columns -> other names, for columns that are missing under the task's name.
        columns: The columns that the task reads. None of them reads a value by name that another column has read.
    """
    moved = {name: row[other] for name, other in names.items() if name not in row and other in row}
    if not moved:
        return row
    unread = read_for_others(columns, names).intersection(names[name] for name in moved)
    return {**{name: value for name, value in row.items() if name not in unread}, **moved}


def read_for_others(
    columns: Sequence[Column], given_names: Mapping[str, str], usual: Mapping[str, str] = MappingProxyType({})
) -> set[str]:
    """Returns the optional columns whose source name is set for another column.

    They are not read. With ``context = "question"``, a task that may also have a ``question`` would otherwise read the
    question twice. The text of words is always read, because it defines the positions of the words and is no further
    input.

    Args:
        columns: The columns that the task reads.
        given_names: The task's columns -> the source's columns, as set by the caller.
        usual: The same for columns that the caller does not set, if they have another name.
    """
    taken = set(given_names.values())
    words = first_column(columns, lambda column_type: column_type.is_pretokenized)
    text = None if words is None else words.type.replacement(columns)
    unstated = [c.name for c in columns if not c.required and c != text and c.name not in given_names]
    return {name for name in unstated if usual.get(name, name) in taken}


def text_columns(columns: Columns) -> list[str]:
    """Returns the columns of texts that may stand for a row of a task, or none."""
    if isinstance(columns, Mapping):
        return []
    required = [column for column in columns if column.required]
    if not all(column.type.is_text for column in required):
        return []
    replaced = [column.type.replacement(columns) if column.type.is_pretokenized else None for column in required]
    return [column.name if text is None else text.name for column, text in zip(required, replaced, strict=True)]


def _text_list_columns(columns: Columns) -> list[str]:
    """Returns the text columns and a last list of texts (context and choices), if any."""
    if isinstance(columns, Mapping):
        return []
    *firsts, last = [column for column in columns if column.required]
    is_list = last.type.has_texts and not last.type.is_text and not last.type.may_be_missing
    return [*text_columns(firsts), last.name] if firsts and is_list else []


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
    values = row if isinstance(row, tuple) else (row,)
    if all(isinstance(value, str) for value in values):
        shared = _shared_row(values, columns) if isinstance(columns, Mapping) else {}
        if shared:
            return shared
        if texts and len(values) == len(texts):
            return dict(zip(texts, values, strict=True))
        if lists and len(values) >= len(lists):
            *firsts, last = lists
            return dict(zip(firsts, values, strict=False)) | {last: list(values[len(firsts) :])}
    sources = source_columns(columns)
    needed = [column.name for column in sources if column.required or isinstance(columns, Mapping)]
    mapping = "{" + ", ".join(f'"{name}": ...' for name in needed) + "}"
    named = texts if texts else lists
    short = ", or a text" if len(named) == 1 else f", or a tuple of {' and '.join(named)}" if named else ""
    raise DataError(f"row {number}: expected a mapping such as {mapping}{short}, got {type(row).__name__}")


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
    if isinstance(inputs, tuple) and all(isinstance(text, str) for text in inputs):
        is_one = has_list or texts == len(inputs) > 1
    several: Iterable[Any] = [inputs] if is_one else inputs
    return (as_row(row, columns, number) for number, row in enumerate(several))

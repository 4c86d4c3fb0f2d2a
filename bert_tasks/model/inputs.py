"""What goes into a model: rows of files or of memory, checked, and their features.

Owns the key under which features are kept. Must not know processes or what is done with the features.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from bert_tasks.data.checks import check_labels
from bert_tasks.data.columns import LABEL_SEPARATOR, PassthroughColumns, Row
from bert_tasks.data.features import Samples, cached_features
from bert_tasks.data.problems import did_you_mean
from bert_tasks.data.readers import Frame, ReadOptions, read_table, rows_in_memory
from bert_tasks.data.stored_reading import known_names, reading_of_file, renamed_row
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError
from bert_tasks.model.predicting import as_row, checked_features, tokenizer_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import sha256_file
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task

FEATURE_ROWS = 1000  # rows per call of ``Task.features``

Data = str | Path | RowTable | Sequence[Row] | Sequence[str] | Sequence[tuple[str, ...]] | Frame


def as_trained(model: TaskModel, data: Data, given: ReadOptions) -> tuple[Data, ReadOptions]:
    """What to read and how, where a name or an option that is not given is as it was in training, if that fits.

    Returns:
        The data, rows in memory under the task's names, and the options for a file.
    """
    columns = model.task.columns
    if isinstance(data, str | Path):
        return data, reading_of_file(given, model.reading, Path(data), columns)
    if isinstance(data, RowTable):
        return data, given
    stated = {} if given.columns is None else given.columns
    stored = {task: name for task, name in known_names(model.reading, columns).items() if task not in stated}
    return [_under_task_names(row, stated, stored) for row in in_memory(data, model.task)], given


def renamed(data: Data, task: Task, columns: Mapping[str, str] | None, source: str = "rows") -> Data:
    """The data, rows in memory under the task's names.

    Args:
        columns: the task's -> those of the rows.

    Raises:
        DataError: there are no rows, the task has no such column, or no row has it.
    """
    if isinstance(data, str | Path | RowTable):
        return data
    rows = in_memory(data, task, source)
    if not rows:
        raise DataError(f"{source}: no rows")
    stated = {} if columns is None else columns
    _check_stated(stated, rows, task, source)
    return [_under_task_names(row, stated, {}) for row in rows]


def _check_stated(stated: Mapping[str, str], rows: Sequence[Row], task: Task, source: str) -> None:
    known = [column.name for column in task.columns]
    present = list(dict.fromkeys(str(name) for row in rows for name in row))
    for name, other in stated.items():
        if name not in known:
            raise DataError(
                f"{source}: columns: the task reads {', '.join(known)}, no {name!r}{did_you_mean(name, known)}"
            )
        if other not in present:
            there = ", ".join(map(repr, present))
            raise DataError(
                f"{source}: no column {other!r}{did_you_mean(other, present)}; the columns there are: {there}"
            )


def in_memory(data: Iterable[Row | str | tuple[str, ...]] | Frame, task: Task, source: str = "rows") -> list[Row]:
    """Rows in memory, each of which may be the text that it consists of, or a tuple of its texts.

    Raises:
        DataError: naming the first that is none of these, counted from 0; or ``data`` holds no rows.
    """
    columns = [column for column in task.columns if not column.is_target]
    return [as_row(row, columns, number) for number, row in enumerate(rows_in_memory(data, source))]


def _under_task_names(row: Row, stated: Mapping[str, str], stored: Mapping[str, str]) -> Row:
    """The row; a stated name replaces the task's own, a stored one only where the row lacks that."""
    kept = {name: value for name, value in row.items() if name not in stated}
    chosen = {name: row[other] for name, other in stated.items() if other in row}
    return renamed_row({**kept, **chosen}, stored)


def load_table(
    data: Data,
    task: Task,
    *,
    reading: ReadOptions | None = None,
    targets: Literal["required", "optional", "unread"] = "required",
    name: str = "rows",
    keep: PassthroughColumns = "none",
    skips: bool = False,
) -> RowTable:
    """A table of a file, of rows in memory, or the table itself, checked against the task's columns and labels.

    Args:
        targets: whether every row must have its target, one of the task's labels, or may; or targets are not read.
        name: of the file, or of rows in memory, for messages, which count these from 1.
        keep: of files, see ``read_table``.
        skips: bad rows are in the table, too, unless all are bad; see ``read_table``.

    Raises:
        DataError: naming every bad row.
    """
    if isinstance(data, RowTable):
        return data
    wanted = [column for column in task.columns if targets != "unread" or not column.is_target]
    needed: Literal["required", "optional"] = "required" if targets == "required" else "optional"
    if not isinstance(data, str | Path):
        table = RowTable.from_rows(in_memory(data, task, name), name, wanted, needed, skips=skips)
        if task.labels and targets == "required":
            check_labels([table.without_faults()], wanted, task.labels)
        return table
    how = ReadOptions() if reading is None else reading
    unread = {column.name for column in task.columns} - {column.name for column in wanted}
    return read_table(
        data,
        columns=wanted,
        names=None if how.columns is None else {k: v for k, v in how.columns.items() if k not in unread},
        format=how.format,
        targets=needed,
        labels=task.labels,
        encoding=how.codec,
        delimiter=how.delimiter,
        header=how.has_header,
        label_separator=LABEL_SEPARATOR if how.label_separator is None else how.label_separator,
        keep=keep,
        skips=skips,
        called=None if name == "rows" else name,
    )


def tokenized(table: RowTable, task: Task, model: TaskModel) -> Samples:
    """The table's features, from the cache where the same rows were tokenised the same way before.

    Raises:
        DataError: a window is longer than the model's positions.
        UsageError: an id of a feature has no embedding.
    """
    key = {
        "task": f"{type(task).__module__}:{type(task).__qualname__}",
        "code": None if type(task) in TASKS.values() else sha256_file(Path(inspect.getfile(type(task)))),
        "labels": list(task.labels),
        "settings": task.settings(),
        "embeddings": [model.config.vocab_size, model.config.type_vocab_size],  # what the ids are checked against
        "version": version("bert-tasks"),
    }
    features = cached_features(
        table,
        features=lambda rows, tokenizer: checked_features(task, rows, tokenizer, model.config),
        tokenizer=tokenizer_of(model),
        key=key,
        batch_size=None if task.reads_neighbours else FEATURE_ROWS,
    )
    samples = Samples.of(features, task.sample)
    if samples.longest > model.config.usable_length:
        raise DataError(
            f"{table.source}: a window has {samples.longest} tokens, the model {model.config.usable_length} positions"
        )
    return samples

"""The trained model and the rows of evaluation, prediction, serving and export.

The module owns what these have in common: which class opens a name, that its head must be complete, and how a file is
read, for which the model's training file gives the defaults.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from bert_tasks.checkpoints.hub import resolve
from bert_tasks.data.columns import Columns, PassthroughColumns, Row, as_row, without_labels
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import Frame, column_names, given_rows, matching_files, read
from bert_tasks.data.rows import Rows
from bert_tasks.data.trained_reading import TrainedReading, names_column, options_for_file, with_names
from bert_tasks.distributed import is_main_process
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.model.exported import ExportedModel, ExportedMultiTaskModel, is_exported, load_exported
from bert_tasks.model.loading import check_trained, load_one_task
from bert_tasks.model.multitask import AnyModel, MultiTaskModel
from bert_tasks.model.pretrained import CheckpointFolder, folder_task, stored_heads
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import check_path
from bert_tasks.tasks import tasks_with_head
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import SEVERAL, HeadTask, choose_one

_log = logging.getLogger("bert_tasks")

Data = str | Path | Rows | Sequence[Row] | Sequence[str] | Sequence[tuple[str, ...]] | Frame


def open_model(
    name: str | Path,
    *,
    task: str | type[Task] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    served_as: Callable[[type[Task]], type[Task]] | None = None,
) -> AnyModel:
    """Opens a saved model of one task, of one of several tasks, or of several tasks. See ``load_one_task``.

    Raises:
        CheckpointError: The folder cannot be used.
        UsageError: A task or a setting is unknown, or settings are for several tasks.
    """
    if task is None and adapter is None:
        folder = CheckpointFolder.open(resolve(name, revision=revision))
        if folder.task == SEVERAL:
            if options:
                raise choose_one(stored_heads(folder))
            if is_exported(name):
                return ExportedMultiTaskModel.from_pretrained(name, revision=revision)
            return MultiTaskModel.from_pretrained(name, revision=revision)
    if adapter is None and is_exported(name):
        return load_exported(ExportedModel, name, task=task, revision=revision, options=options)
    how: dict[str, Any] = {"revision": revision, "options": options, "served_as": served_as, "adapter": adapter}
    return load_one_task(TaskModel, name, task=task, **how)


def load_trained(
    model: AnyModel | str | Path,
    *,
    task: str | type[Task] | None,
    settings: Mapping[str, Any] | None,
    reading: ReadOptions,
    revision: str | None,
    data: Data | None = None,
    adapter: str | Path | None = None,
) -> AnyModel:
    """Loads a model, whose head must be complete. onnxruntime runs an exported folder.

    The columns of ``reading`` and ``data`` say whether a classifier of transformers reads one text or two. For
    ``adapter`` see ``TaskModel.from_pretrained``.

    Raises:
        CheckpointError: The head, or a part of it, is not in the files.
        UsageError: A setting is not one of the task's.
    """
    if isinstance(model, AnyModel):
        if settings or adapter is not None:
            raise UsageError(
                "settings and adapters are for a model that is loaded from files. For a model in memory, replace "
                "model.task"
            )
        return model
    check_path(model, CheckpointError)
    options = {} if settings is None else settings
    trained = open_model(
        model,
        task=task,
        revision=revision,
        adapter=adapter,
        options=options,
        # Asked only if config.json does not name the task, because it reads the columns of the data.
        served_as=lambda task: _task_of_columns(task, data, reading),
    )
    opened = model if adapter is None else adapter
    for of_head in trained.heads.values():
        check_trained(opened, of_head.task, of_head.load_report)
    return trained


def trained_tasks(
    model: str | Path,
    *,
    task: str | type[Task] | None,
    settings: Mapping[str, Any] | None,
    reading: ReadOptions,
    revision: str | None,
) -> dict[str, HeadTask]:
    """Returns the tasks and the ``columns`` of ``load_trained`` from config.json alone."""
    folder = CheckpointFolder.open(resolve(model, revision=revision, weights=False)).of_task(task)
    fields = {} if settings is None else settings
    if task is None and folder.task == SEVERAL:
        heads = stored_heads(folder)
        if fields:
            raise choose_one(heads)
        return heads
    built, _ = folder_task(folder, task, fields, lambda head: _task_of_columns(head, None, reading))
    return {"": HeadTask(task=built, columns=folder.columns)}


def _task_of_columns(default: type[Task], data: Data | None, reading: ReadOptions) -> type[Task]:
    """Returns the task with ``default``'s head that reads most of the columns.

    A classifier of transformers does not say whether it reads one text or a pair. The data do, if they have the columns
    of a pair.
    """
    present: set[str] = set()
    if isinstance(data, str | Path) and data != "-":
        present = set(column_names(Path(data), reading))
    elif data is not None and data != "-":
        rows: Any = data if isinstance(data, Rows) else given_rows(data)
        first: Any = next(iter(rows), {})
        if isinstance(first, Mapping):  # and not a text or a tuple of texts
            present = set(first)
    tasks = tasks_with_head(default.outputs[0].head_kind)
    needs = {task: {column.name for column in task.of().columns if column.required} for task in tasks}
    for task, needed in needs.items():
        further = needed - needs[default]
        reads_more = needed > needs[default]  # a proper superset
        if reads_more and all(names_column(reading, name) or name in present for name in further):
            return task
    return default


def in_memory(data: Iterable[Row | str | tuple[str, ...]] | Frame, columns: Columns, source: str = "rows") -> list[Row]:
    """Returns rows in memory as mappings. See ``as_row`` and ``given_rows``."""
    inputs = without_labels(columns)
    return [as_row(row, inputs, number) for number, row in enumerate(given_rows(data, source))]


def input_names(
    reading: ReadOptions, names: Mapping[str, str], columns: Columns, present: Collection[str]
) -> Mapping[str, str]:
    """Returns the columns -> their names in data. See ``with_names``.

    For several tasks the result is empty, because the columns of each task have their names in the data already.
    """
    if isinstance(columns, Mapping):
        return {}
    renames = with_names(reading, names, columns, present).columns
    if renames is None:
        return {}
    task_names = [column.name for column in columns]
    return {task: name for task, name in renames.items() if task in task_names}


def reading_for_labels(model: AnyModel, data: Data, reading: ReadOptions) -> ReadOptions:
    """Returns the options for a file with labels, as the model's training file was read.

    They are the options of the caller, and the options of the training file that the caller leaves open, if the file
    has the extension of the training file. A warning names these options.

    Raises:
        CheckpointError: The training file had a format that is not registered here.
    """
    return _with_trained(model.reading, data, reading)


def reading_for_prediction(model: AnyModel, data: Data, reading: ReadOptions) -> ReadOptions:
    """Returns the options as ``reading_for_labels``, with each line of a text file as a text."""
    return _with_trained(model.reading.without_document(), data, reading)


def _with_trained(trained: TrainedReading, data: Data, reading: ReadOptions) -> ReadOptions:
    """Returns the options for a file as its model's training file was read, unless the caller sets them."""
    if not isinstance(data, str | Path):
        return reading
    stored = trained.missing_options(reading, Path(data))
    if not stored:
        return reading
    format = stored.get("format")
    if format is not None and format not in FORMATS:
        raise CheckpointError(
            f"{data}: the model's training file had the format {format!r}, which is not registered here. Register it, "
            f"or pass {argument('format', 'csv')} or another format"
        )
    if is_main_process():  # one warning, not one for each process
        listed = ", ".join(f"{name} = {value!r}" for name, value in stored.items())
        _log.warning("%s: read as the training file was, with %s. Options that you pass take precedence", data, listed)
    return replace(reading, **stored)


def load_table(
    data: Data,
    columns: Columns,
    *,
    known_labels: Sequence[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    reading: ReadOptions | None = None,
    labels: Literal["required", "optional", "unread"] = "required",
    name: str = "rows",
    passthrough: PassthroughColumns = "none",
    skip_errors: bool = False,
) -> Rows:
    """Returns a validated table of a file, of rows in memory, or the table itself.

    Args:
        data: The rows.
        columns: The columns that are read, with labels.
        known_labels: The labels of the task, if it has one and they are known.
        names: The task's columns -> their names in the model's training data, which the data may have instead.
        reading: How to read a file, and the names of columns.
        labels: "required" or "optional" for every row, or "unread".
        name: The name of the rows in messages.
        passthrough, skip_errors: For files. See ``read``.

    Raises:
        DataError: Rows are bad. The message lists them.
    """
    if isinstance(data, Rows):  # which were checked when they were made
        return data
    if reading is not None and reading.columns and isinstance(columns, Mapping):
        raise choose_one(columns)  # the names of columns belong to a task
    options = ReadOptions() if reading is None else reading
    read_columns = columns  # without labels if they are not read
    if labels == "unread":
        read_columns = without_labels(columns)
        options = replace(options, columns=_input_names(options.columns, columns))
    how: dict[str, Any] = {"require_labels": labels == "required", "labels": known_labels, "skip_errors": skip_errors}
    if not isinstance(data, str | Path):
        # A name that the caller states takes precedence over that of the training data.
        stated = {} if options.columns is None else options.columns
        others = {task: other for task, other in names.items() if task not in stated}
        return read(data, read_columns, options, others=others, name=name, **how)
    files = matching_files(data)  # several for a pattern such as "part-*.csv"
    tables = []
    for file in files:
        shown = None if name == "rows" or len(files) > 1 else name  # None for the name of the file
        of_file = options_for_file(options, file, names, read_columns)
        tables.append(read(file, read_columns, of_file, passthrough=passthrough, name=shown, **how))
    return Rows.joined(tables)


def _input_names(names: Mapping[str, Any] | None, columns: Columns) -> Mapping[str, Any] | None:
    """Returns the names of the columns that are no labels."""
    if names is None or isinstance(columns, Mapping):
        return names
    labels = {column.name for column in columns if column.is_label}
    return {task: name for task, name in names.items() if task not in labels}

"""Loading the model that evaluation, prediction, serving and export use: one whose head is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_tasks.data.readers import ReadOptions, column_names, rows_in_memory
from bert_tasks.data.table import RowTable
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.inputs import Data
from bert_tasks.model.onnx import ExportedModel, is_exported
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import Task, tasks_with_head


def load_trained(
    model: TaskModel | str | Path,
    *,
    task: str | type[Task] | None,
    settings: Mapping[str, Any] | None,
    reading: ReadOptions,
    revision: str | None,
    data: Data | None = None,
) -> TaskModel:
    """The model, whose head must be complete; an exported folder gives a model that onnxruntime runs.

    A folder of transformers does not say whether its classifier reads one text or two: the columns to read do, or those
    of ``data``.

    Raises:
        CheckpointError: the head, or a part of it, is not in the files.
        UsageError: a setting is not one of the task's.
    """
    if isinstance(model, TaskModel):
        if settings:
            raise UsageError(
                "settings change a model that is loaded from files; of a model in memory replace model.task"
            )
        return model
    loaded = (ExportedModel if is_exported(model) else TaskModel).load(
        model,
        task=task,
        revision=revision,
        given={} if settings is None else settings,
        served_as=lambda kind: _task_of_columns(kind, data, reading),
    )
    if loaded.load_report is not None and loaded.load_report.new:
        raise CheckpointError(
            f"{model} has no trained head for {loaded.task.name} ({', '.join(loaded.load_report.new)} would be new): "
            "train it first, or choose another model"
        )
    return loaded


def _task_of_columns(kind: type[Task], data: Data | None, reading: ReadOptions) -> type[Task]:
    """The task with the same head as ``kind`` that reads all required columns which are named, or are in the data."""
    needed = {
        task: {column.name for column in task().columns if column.required}
        for task in tasks_with_head(kind.default_head)
    }
    for task, columns in needed.items():
        more = columns - needed[kind]
        if more and (all(map(reading.has, more)) or _has_columns(data, more, len(columns), reading)):
            return task
    return kind


def _has_columns(data: Data | None, names: set[str], texts: int, reading: ReadOptions) -> bool:
    """Whether the data have these columns; rows in memory may also be tuples of the task's texts."""
    if data is None or data == "-":
        return False
    if isinstance(data, str | Path):
        return names <= set(column_names(Path(data), reading))
    first = next(iter(data if isinstance(data, RowTable) else rows_in_memory(data)), {})
    if isinstance(first, tuple):
        return len(first) == texts
    return isinstance(first, Mapping) and names <= first.keys()

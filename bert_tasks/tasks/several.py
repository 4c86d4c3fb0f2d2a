"""Several tasks whose heads are on one encoder, as a recipe and a saved folder state them.

Everywhere else the heads of a model are a mapping from names to what belongs to each, and a model of one task has the
single name "". Code therefore loops over the heads, however many there are. Only where one task has a form of its own,
such as a metric without a name in front, does it ask for the name "".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from bert_tasks.data.checks import labelled_splits
from bert_tasks.data.columns import Columns, HeadColumns
from bert_tasks.data.issues import shortened
from bert_tasks.data.splits import Splits
from bert_tasks.errors import UsageError, argument
from bert_tasks.tasks import TASK_NAMES
from bert_tasks.tasks.base import Task, is_dynamic

SEVERAL = "multi-task"  # the task of a recipe and of config.json
ENTRIES = ("task", "columns", "weight")  # keys of one of several tasks besides its settings
_LARGEST_WEIGHT = 1e6  # of a loss, far below what float32 can hold


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """The task of a head.

    Attributes:
        task: The task with its settings and labels.
        columns: The task's columns -> their names in the rows, if they differ.
        weight: Weight of the loss.
    """

    task: Task[Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0

    def entry(self) -> dict[str, Any]:
        """Returns the task as config.json and run.json hold it."""
        content = {"task": self.task.name, "labels": list(self.task.output.labels), **self.task.settings()}
        if self.columns:
            content["columns"] = dict(self.columns)
        if self.weight != 1.0:
            content["weight"] = self.weight
        return content


def head_tasks(
    entries: Mapping[str, Mapping[str, Any]], fitted: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> dict[str, HeadTask]:
    """Returns several tasks by their names, in alphabetical order.

    Args:
        entries: For each task ``task``, the name of its kind, its settings and ``labels``, ``columns``, and ``weight``.
        fitted: Name of a task -> its fields that were fitted to data.

    Raises:
        ValueError: There are no tasks, an entry has an impossible value, or a task cannot be one of several.
    """
    if not entries:
        raise ValueError("there are no tasks with a head each")
    heads = {}
    for name, entry in sorted(entries.items()):
        heads[name] = head_task(name, _task(name, {**entry, **fitted.get(name, {})}), entry)
    check_heads(heads)
    return heads


def head_task(name: str, task: Task[Any], entry: Mapping[str, Any]) -> HeadTask:
    """Returns one of several tasks with the columns and the weight of its entry. Raises as ``head_tasks``."""
    weight, columns = entry.get("weight", 1.0), entry.get("columns", {})
    # A bool is an int in Python, but true is no weight.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _LARGEST_WEIGHT:
        raise ValueError(
            f"tasks.{name}: weight is {shortened(weight)}, expected a number from 0 to {_LARGEST_WEIGHT:g}"
        )
    has_names = isinstance(columns, Mapping) and all(isinstance(other, str) for other in columns.values())
    if not has_names:
        raise ValueError(f"tasks.{name}: columns is {columns!r}, expected the task's columns and their names")
    known = [column.name for column in task.columns]
    unknown = sorted(set(columns).difference(known))
    if unknown:
        raise ValueError(f"tasks.{name}.columns: the task reads {', '.join(known)}, not {unknown[0]!r}")
    return HeadTask(task=task, columns=dict(columns), weight=float(weight))


def check_heads(heads: Mapping[str, HeadTask]) -> None:
    """Raises ValueError if a task cannot be one of several."""
    for name, head in heads.items():
        if not name.isidentifier():
            raise ValueError(f"tasks: the name {name!r} is no word of letters, digits and _")
        task = head.task
        # Their steps see other tokens than the features hold, and one encoder reads a window once for all heads.
        if is_dynamic(task) or task.generator() is not None:
            raise ValueError(f"tasks.{name}: {task.name} cannot be one of several tasks")
        if task.sample == "group":
            raise ValueError(f"tasks.{name}: a loss over groups of rows cannot be one of several tasks")


def _task(name: str, entry: Mapping[str, Any]) -> Task[Any]:
    """Returns the task of an entry with its settings, or raises ValueError with the key of a problem."""
    task_name = entry.get("task")
    if not isinstance(task_name, str) or task_name not in TASK_NAMES:
        raise ValueError(f"tasks.{name}: unknown task {task_name!r}")
    task_class = TASK_NAMES[task_name]
    options = {key: value for key, value in entry.items() if key not in ENTRIES}
    known = task_class.settings_by_name()
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ValueError(f"tasks.{name}: {task_class.name} has no setting {unknown[0]!r}")
    settings = {}
    for key, value in options.items():
        try:
            settings[key] = known[key].typed(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]  # pydantic's whole message has several lines and a link
            raise ValueError(f"tasks.{name}: {key} is {value!r}. {problem}") from None
    return task_class.of(**settings)


def with_labels(heads: Mapping[str, HeadTask], labels: Mapping[str, Sequence[str]]) -> dict[str, HeadTask]:
    """Returns the tasks with other labels, as far as they are given."""
    relabelled = dict(heads)
    for name, head in heads.items():
        if name in labels:
            task = head.task.with_settings(labels=tuple(labels[name]))
            relabelled[name] = replace(head, task=task)
    return relabelled


def labelled_heads(
    heads: Mapping[str, HeadTask], splits: Splits, *, labels: Sequence[str] = (), unlabelled: bool
) -> dict[str, HeadTask]:
    """Returns the tasks with their labels, after a check of the rows of each.

    Args:
        heads: The tasks.
        splits: Training and validation rows.
        labels: The known labels of an only task. Default: those of the training rows.
        unlabelled: Training rows may lack labels.

    Raises:
        DataError: See ``check_splits``, or a task has no rows.
        ValueError: Settings of a task do not fit the labels.
    """
    labelled = {}
    for name, head in heads.items():
        known, rows = labels, splits
        if name:  # one of several tasks, which reads only the rows that have its labels
            known = head.task.output.labels
            rows = labelled_splits(splits, name, head.task.columns, head.columns)
        task = head.task.with_labels_of(rows, labels=known, unlabelled=unlabelled)
        labelled[name] = replace(head, task=task)
    return labelled


def row_columns(heads: Mapping[str, HeadTask]) -> Columns:
    """Returns what is read of a row, the columns of the only task or those of each."""
    if "" in heads:
        return heads[""].task.columns
    columns: dict[str, HeadColumns] = {}
    for name, head in heads.items():
        task = head.task
        columns[name] = HeadColumns(columns=task.columns, names=head.columns, labels=task.output.labels)
    return columns


def settings_of(heads: Mapping[str, HeadTask]) -> dict[str, Any]:
    """Returns the settings of the only task, or those of each task, as config.json and run.json hold them."""
    if "" in heads:
        return heads[""].task.settings()
    return {
        "heads": {name: head.entry() for name, head in heads.items()},
        "max_length": max(head.task.max_length for head in heads.values()),
    }


def task_name(tasks: Mapping[str, Task[Any]]) -> str:
    """Returns the name of the only task, or the name that stands for several, for people and run.json."""
    if "" in tasks:
        return tasks[""].name
    return SEVERAL


def head_key(name: str, key: str) -> str:
    """Returns the key of a metric or of a column of one head, such as ``intent.accuracy``."""
    if not name:
        return key
    return f"{name}.{key}"


def fitted_values(tasks: Mapping[str, Task[Any]]) -> dict[str, Any]:
    """Returns the fields that were fitted to data, as files hold them."""
    if "" in tasks:
        return tasks[""].fitted_values()
    fitted: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        values = task.fitted_values()
        if values:
            fitted[name] = values
    return {"fitted": fitted}


def choose_one(names: Iterable[str]) -> UsageError:
    """Returns the error for what only a single task has."""
    return UsageError(f"choose one of the tasks {', '.join(names)} with {argument('task', 'NAME')}")

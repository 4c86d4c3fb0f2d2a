"""The entry ``bert_tasks`` in config.json, with the task, settings and labels.

The module owns how a folder is described when it is opened, which task is built from it, and what is written when a
model is saved. No name in a file is followed to code, because a file may come from anywhere: a task of the form
``module:Class`` is loaded only if the caller passes it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from bert_tasks.checkpoints.adapter_config import base_folder, is_adapter, read_adapter_config
from bert_tasks.checkpoints.files import read_config
from bert_tasks.data.issues import did_you_mean, shortened
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.encoder.config import HeadKind
from bert_tasks.errors import CheckpointError, NoHeadError, UsageError, argument
from bert_tasks.families import (
    CONFIG_KEY,
    encoder_config,
    family_of,
    head_kind,
    label_names,
)
from bert_tasks.model.hf_names import hf_hint
from bert_tasks.tasks import (
    TASKS,
    Task,
    named_task,
    stored_name,
    tasks_with_head,
)
from bert_tasks.tasks.several import SEVERAL, HeadTask, fitted_values, head_tasks, settings_of

READING_KEY = "reading"  # below our key of config.json
_OF_LABELS = ("id2label", "label2id", "problem_type")  # entries of transformers


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The parts of a folder that decide what is built.

    Attributes:
        hf_config: config.json.
        head: The kind of head in ``architectures``. None for classes that this package does not know.
        labels: The names of the head's outputs, in order. Empty if config.json has none.
        stored: The content of our key in config.json. None if this package did not write it.
        columns: The task's columns -> their names in the training data, as far as config.json says it.
        reading: How the file of the training rows was read.
        tokenizer_path: The folder with the tokenizer. Adapters of peft use the tokenizer of their base.
        base: The base of adapters, if the caller names it.
        head_name: The name of the task whose head is read, if the folder has several tasks (see ``of_task``).
    """

    path: Path
    hf_config: dict[str, Any]
    head: str | None = None
    labels: tuple[str, ...] = ()
    stored: dict[str, Any] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    reading: TrainedReading = field(default_factory=TrainedReading)
    tokenizer_path: Path = Path()
    base: Path | None = None
    head_name: str | None = None

    @property
    def task(self) -> Any:
        """The task's name in config.json. None if it has none."""
        if self.stored is None:
            return None
        return self.stored.get("task")

    @classmethod
    def open(cls, path: Path, base: Path | None = None) -> Self:
        """Reads the config.json of a folder.

        Args:
            path: The folder.
            base: The base of its adapters. Default: the base in the configuration of the adapters.

        Raises:
            CheckpointError: config.json is missing or damaged, or the family is not supported.
        """
        if is_adapter(path) and not (path / "config.json").exists():
            config = read_adapter_config(path)
            opened = base_folder(path, config.base) if base is None else base
            described = cls.open(opened)
            described = replace(described, path=path, tokenizer_path=described.path, base=base)
            return replace(described, head=config.head, labels=(), stored=None)
        hf_config = read_config(path)
        stored: dict[str, Any] | None = None
        content: Any = {}
        entry = hf_config.get(CONFIG_KEY)
        if isinstance(entry, dict):
            stored = entry
            content = stored.get(READING_KEY, {})
        # The file may have been edited by hand, so the type of each part is checked before it is used.
        columns = content.get("columns", {}) if isinstance(content, dict) else None
        if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns.values()):
            raise CheckpointError(f"{path}/config.json, key {CONFIG_KEY}: reading.columns must name columns")
        return cls(
            path=path,
            hf_config=hf_config,
            head=head_kind(hf_config),
            labels=label_names(hf_config),
            stored=stored,
            columns=columns,
            reading=_stored_reading(content, path),
            tokenizer_path=path,
            base=base,
        )

    def of_task(self, task: object) -> Self:
        """Returns a folder of several tasks as the folder of the one called ``task``.

        Raises:
            UsageError: The folder has several tasks, and ``task`` is neither the name of one nor a kind of task.
        """
        if self.task != SEVERAL or not isinstance(task, str):
            return self
        heads = stored_heads(self)
        if task not in heads:
            try:
                named_task(task)
            except UsageError:
                names = ", ".join(heads)
                raise UsageError(
                    f"{self.path} has the tasks {names}, not {task!r}{did_you_mean(task, heads)}"
                ) from None
            return self
        of_task = heads[task].task
        entry = {"task": of_task.name, "labels": of_task.output.labels, "settings": of_task.settings()}
        stored = {**entry, **of_task.fitted_values()}
        return replace(self, stored=stored, labels=of_task.output.labels, columns=heads[task].columns, head_name=task)


def stored_heads(folder: CheckpointFolder) -> dict[str, HeadTask]:
    """Returns the tasks of a folder of several tasks.

    Raises:
        CheckpointError: It is no model of several tasks, or its config.json is damaged.
    """
    if folder.stored is None or folder.task != SEVERAL:
        raise CheckpointError(
            f"{folder.path} is no model of several tasks. Name the tasks, or open it with TaskModel.from_pretrained"
        )
    content = {"heads": folder.stored.get("settings", {}), "fitted": folder.stored.get("fitted", {})}
    if isinstance(content["heads"], dict):  # below "settings" as in a recipe
        content["heads"] = content["heads"].get("heads")
    try:
        entries = TypeAdapter(dict[str, dict[str, dict[str, Any]]]).validate_json(json.dumps(content), strict=True)
        return head_tasks(entries["heads"], entries["fitted"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        reason = f"{name} is {shortened(first['input'])}. {first['msg']}"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise CheckpointError(f"{folder.path}/config.json, key {CONFIG_KEY}: {reason}")


def _stored_reading(content: Mapping[str, Any], path: Path) -> TrainedReading:
    """Returns how the training rows were read, from the part of our key that says it."""
    options = {name: value for name, value in content.items() if name != "columns"}
    try:
        return TypeAdapter(TrainedReading).validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join([READING_KEY, *map(str, first["loc"])])
        problem = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path}/config.json, key {CONFIG_KEY}: {name}: {problem}") from None


def folder_task(
    folder: CheckpointFolder,
    task: str | Task | type[Task] | None,
    options: Mapping[str, Any],
    served_as: Callable[[type[Task]], type[Task]] | None = None,
) -> tuple[Task, bool]:
    """Returns the task to load from a folder, and True if it is the folder's own.

    The head of a folder's own task must be complete. The class is the caller's, else the stored class, else the class
    that the folder's head serves.

    Args:
        folder: The folder.
        task: The task, its name or its class. None for the task of the folder.
        options: Fields of the task.
        served_as: Replaces the class that the head of a folder without our key serves.

    Raises:
        CheckpointError: The folder is damaged, or it has no head that this package knows.
        UsageError: The task or a field is unknown, or a field does not fit the others.
    """
    if task == folder.head_name:  # the folder is described as that of this task already (``of_task``)
        task = None
    if isinstance(task, Task):
        if options:
            raise UsageError("pass either a task, or a task's name with labels and settings")
        return task, False
    example = f"Pass {argument('task', next(iter(TASKS)))} (or another)"
    if isinstance(task, type):
        task_class = task
    elif folder.stored is not None and task in (None, folder.task):
        if folder.task == SEVERAL:
            raise UsageError(
                f"{folder.path} has the tasks {', '.join(stored_heads(folder))}. Choose one with "
                f"{argument('task', 'NAME')}, or open all of them with MultiTaskModel.from_pretrained"
            )
        stored = TASKS.get(folder.task) if isinstance(folder.task, str) else None
        if stored is None:  # a name such as "module:Class" is not imported, because the file chose it
            raise CheckpointError(
                f"{folder.path}: config.json says its task is {folder.task!r}, which is not built in. Pass the class "
                "with TaskModel.from_pretrained(folder, task=YourTask) or --task module:YourTask"
            )
        task_class = stored
    elif task is not None:
        task_class = named_task(task)
    elif served := tasks_with_head(folder.head):
        task_class = served[0]  # several tasks may have transformers' head, and the first is the usual one
        if served_as is not None:
            task_class = served_as(task_class)
    elif options:
        raise UsageError(f"labels and settings need a task. {example}")
    else:
        raise NoHeadError(
            f"{folder.path} has no task head this package knows (architectures: "
            f"{folder.hf_config.get('architectures')}). {example} for a new one"
        )
    is_own = task is None or (not options and folder.task == stored_name(task_class))
    return _merged_task(folder, task_class, options), is_own


def stated_task(
    folder: CheckpointFolder,
    task: str | Task | type[Task] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Task:
    """Returns the task of a folder of this package, with the fields in ``options``.

    A folder that transformers wrote is rejected. If the task is not built in, ``task`` is its class.

    Raises:
        CheckpointError: The folder does not set a task, or ``task`` is another.
        UsageError: A field is not one of the task's.
    """
    if folder.stored is not None and not isinstance(task, Task):
        built, _ = folder_task(folder, task, options)
        if folder.task == stored_name(type(built)):
            return built
    raise CheckpointError(f"{folder.path}: config.json says its task is {folder.task!r}. Only this task can be run")


def stored_head_tasks(folder: CheckpointFolder, task: type[Task] | None = None) -> dict[str, HeadTask]:
    """Returns the task of each head of a folder of this package, with its columns.

    If its only task is not built in, ``task`` is its class.

    Raises:
        CheckpointError: The folder does not set a task, or ``task`` is another.
    """
    if folder.task == SEVERAL:
        return stored_heads(folder)
    return {"": HeadTask(task=stated_task(folder, task), columns=folder.columns)}


def stored_tasks(folder: CheckpointFolder, task: type[Task] | None = None) -> dict[str, Task]:
    """Returns the task of each head of a folder of this package. See ``stored_head_tasks``."""
    return {name: head.task for name, head in stored_head_tasks(folder, task).items()}


def _merged_task(folder: CheckpointFolder, task_class: type[Task], options: Mapping[str, Any]) -> Task:
    """Returns the task of this class from a folder, with the caller's fields.

    This is the only function that merges settings. A field has the value of the caller, else the value that this
    package stored for the same task, else what transformers' configuration implies, else the default. A field of the
    caller changes no other field, except fields that cannot be combined with it (``Task.compatible_settings``).
    """
    is_own = folder.task == stored_name(task_class)
    # A name in ``id2label`` or a field such as ``problem_type`` describes the head in the files. It says nothing of
    # another head.
    implied: dict[str, Any] = {}
    if is_own or task_class in tasks_with_head(folder.head):  # a new head implies only the lengths
        implied = task_class.hf_settings(folder.hf_config, folder.labels)
    implied |= task_class.limited(encoder_config(folder.hf_config).usable_length)
    stored: dict[str, Any] = {}
    if is_own and folder.stored is not None:
        settings = folder.stored.get("settings", {})
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder.path}/config.json, key {CONFIG_KEY}: settings must be an object")
        names = ("labels", *task_class.fitted_names())
        fitted = {name: value for name, value in folder.stored.items() if name in names}
        stored = {**settings, **fitted}
    base = implied  # of another task nothing is stored
    if is_own or not options:
        try:
            task = _build(task_class, {**implied, **typed_settings(task_class, stored)})
        except UsageError as error:  # the values are the file's and not the caller's, so the error is, too
            source = f"config.json, key {CONFIG_KEY}" if is_own else "config.json"
            raise CheckpointError(f"{folder.path}/{source}: {error}") from None
        if not options:
            return task
        base = task.values()
    checked = typed_settings(task_class, options)
    try:
        # Stored fields that cannot be combined with a field of the caller give way to it.
        compatible = task_class.compatible_settings(base, checked)
    except ValueError as error:
        raise UsageError(f"{task_class.name}: {error}") from None
    return _build(task_class, {**compatible, **checked})


def typed_settings(task: type[Task], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with values of the types of the settings of a task. Others stay as they are."""
    checked = dict(entries)
    for name, setting in task.settings_by_name().items():
        if name not in entries:
            continue
        try:
            checked[name] = setting.typed(entries[name])
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise UsageError(f"{task.name}: {name} is {entries[name]!r}. {problem}") from None
    return checked


def _build(task: type[Task], entries: Mapping[str, Any]) -> Task:
    """Returns a task with these settings. Raises UsageError if one is unknown or does not fit."""
    names = list(task.settings_by_name())
    if unknown := next((key for key in entries if key not in names), None):
        raise UsageError(f"{task.name} has no setting {unknown!r}{hf_hint(unknown, names)}")
    settings = dict(entries)
    for name, value in entries.items():
        if isinstance(value, list):  # JSON has no tuples, and a task compares equal only with the same types
            settings[name] = tuple(value)
    try:
        return task.of(**settings)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{task.name}: {error}") from None


def saved_config(
    hf_config: Mapping[str, Any], heads: Mapping[str, HeadTask], reading: TrainedReading
) -> dict[str, Any]:
    """Returns the updated config.json of a saved model, with our key.

    A model of several tasks is a base model to transformers, which knows one head at most.

    Args:
        hf_config: The configuration of transformers.
        heads: The task of each head.
        reading: How the file of the training rows was read.
    """
    only = heads.get("")
    options = reading.stored()
    if only is not None and only.columns:
        options = {"columns": dict(only.columns), **options}
    entry: dict[str, Any] = {"settings": settings_of(heads), "version": version("bert-tasks")}
    entry |= fitted_values({name: head.task for name, head in heads.items()})
    if options:
        entry[READING_KEY] = options
    if only is None:
        return _config_of_head(hf_config, None, {}, {**entry, "task": SEVERAL, "labels": []}, unwanted=_OF_LABELS)
    task = only.task
    entry["task"] = stored_name(type(task))
    names_of_outputs = task.output.hf_config()
    if task.has_hf_head:
        return _config_of_head(hf_config, task.head_kind, names_of_outputs, entry, unwanted=())
    entry["labels"] = list(task.output.labels)
    stock: Mapping[str, Any] = {}
    if task.head_kind is not None:
        # Transformers learns only the number of labels of a head that it lacks. Otherwise its pipelines would
        # print our labels with the scores of a head that they have drawn at random.
        id2label: dict[str, str] = {}
        label2id: dict[str, int] = {}
        for index in range(len(names_of_outputs.get("id2label", {}))):
            name = f"LABEL_{index}"
            id2label[str(index)] = name  # keys of JSON objects are texts
            label2id[name] = index
        stock = {"id2label": id2label, "label2id": label2id}
    return _config_of_head(hf_config, task.head_kind, stock, entry, unwanted=_OF_LABELS)


def _config_of_head(
    hf_config: Mapping[str, Any],
    head: HeadKind | None,
    stock: Mapping[str, Any],
    entry: Mapping[str, Any],
    *,
    unwanted: Sequence[str],
) -> dict[str, Any]:
    """Returns the configuration of transformers for a head, with the entries of its labels and our key."""
    old = {"_name_or_path", "num_labels", "finetuning_task", *unwanted}
    kept = {key: value for key, value in hf_config.items() if key not in old}
    kind = "base" if head is None else head
    architecture = family_of(hf_config).architectures[kind]
    return {**kept, **stock, "architectures": [architecture], CONFIG_KEY: entry}

"""``MultiTaskModel`` has several tasks whose heads are on one encoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

from bert_tasks.data.splits import Splits
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import Inputs, TaskModel
from bert_tasks.tasks import MultiTask
from bert_tasks.tasks.multitask.head import SharedHeads
from bert_tasks.tasks.multitask.task import MultiTaskPrediction
from bert_tasks.tasks.shared.fitting import Fitting


class MultiTaskModel(TaskModel[MultiTaskPrediction]):
    """A model that predicts several tasks, for ``fit`` and ``evaluate``, too.

    Example:
        >>> tasks = {
        ...     "intent": {"task": "sequence-classification", "columns": {"label": "intent"}},
        ...     "slots": {"task": "token-classification", "columns": {"tags": "slots"}},
        ... }
        >>> model = MultiTaskModel.from_pretrained(base, tasks=tasks)
        >>> result = fit(model, "train.jsonl", output_dir="runs/x")
        >>> model.predict({"text": "book a table for four"})
    """

    assumed: tuple[str, ...] = ()  # tasks whose labels nobody has named yet

    @classmethod
    def from_pretrained(  # type: ignore[override]  # one task or several
        cls,
        name: str | Path,
        *,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        revision: str | None = None,
    ) -> Self:
        """Loads an encoder with a head for each task, or a saved model of several tasks.

        Args:
            name: A folder, a hub id, or ``package:NAME/PATH``.
            tasks: Name of each task -> ``task``, the name of its kind, its settings and ``labels``, ``columns``, the
                task's columns -> their names in the data, and ``weight`` of its loss. Default: the tasks of the folder.
            revision: Branch, tag or commit of a hub id.

        Raises:
            CheckpointError: Files are missing or damaged, or the folder has one task only.
            UsageError: A task or setting is unknown, or the tasks cannot share an encoder.
        """
        if tasks is None:
            return cls.load(name, task=MultiTask, revision=revision, options={})
        if not isinstance(tasks, Mapping) or not tasks:
            raise UsageError(f"tasks is {tasks!r}, expected the name of each task and its settings")
        models = {
            head: TaskModel.load(name, task=_task_name(head, entry), revision=revision, options=_settings(entry))
            for head, entry in tasks.items()
        }
        return cls._joined(models, tasks)

    @classmethod
    def _joined(cls, models: Mapping[str, TaskModel], entries: Mapping[str, Mapping[str, Any]]) -> Self:
        """Returns the model with the encoder of the first model and the heads of all."""
        first = next(iter(models.values()))
        task = MultiTask.of({name: model.task for name, model in models.items()}, entries)
        with torch.device("meta"):
            joined = cls(first.hf_config, task)
        joined.encoder, joined.tokenizer, joined.origin = first.encoder, first.require_tokenizer(), first.origin
        heads = cast("SharedHeads", joined.head).heads
        for name, model in models.items():
            heads[name] = model.head
            drawn = model._drawn.items()
            joined._drawn |= {key.replace("head.", f"head.heads.{name}.", 1): value for key, value in drawn}
        joined.load_report = first.load_report
        joined.assumed = tuple(name for name, model in models.items() if model.has_assumed_labels)
        joined.has_assumed_labels = len(joined.assumed) > 0
        return joined.eval()

    @property
    def models(self) -> dict[str, TaskModel]:
        """The model of each task, around the same encoder and head."""
        return models_of(self)

    def save_adapter(self, folder: str | Path) -> None:
        """Raises UsageError. The format of peft holds one head."""
        raise UsageError(f"peft holds one head. Call model.models[{next(iter(self.models))!r}].save_adapter")

    def predict(  # type: ignore[override]  # several predictions for a row
        self, inputs: Inputs, *, logits: bool = False, explain: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the predictions of all tasks for each row, by the names of the tasks.

        Args:
            inputs: One or several rows, each a text or a mapping with the columns that the tasks read.
            logits, explain: Must be False. The models of single tasks in ``models`` compute them.

        Raises:
            DataError: A row has the input of no task, or a value is of the wrong kind.
            UsageError: ``logits`` or ``explain`` is true.
        """
        if logits or explain:
            raise UsageError(f"logits and explanations belong to one task. Use models[{next(iter(self.models))!r}]")
        return [dict(prediction.tasks) for prediction in self.predict_rows(self.given_rows(inputs))]

    @property
    def reading_task(self) -> MultiTask:
        return self._multitask.with_labels(dict.fromkeys(self.assumed, ()))

    def read_labels(self, splits: Splits, *, unlabelled: bool) -> None:
        """Checks the rows of each task that have its label. See ``TaskModel.read_labels``."""
        labelled = cast("MultiTask", Fitting.of(self.reading_task).label(splits, unlabelled=unlabelled))
        self._set_task_labels({name: labelled.tasks[name].labels for name in self.assumed})

    def _set_task_labels(self, labels: Mapping[str, Sequence[str]]) -> None:
        models = self.models
        for name, of_task in labels.items():
            start = f"head.heads.{name}."
            drawn = {key: value for key, value in self._drawn.items() if key.startswith(start)}
            models[name]._drawn = {key.replace(f"heads.{name}.", "", 1): value for key, value in drawn.items()}
            models[name].set_labels(of_task)
            self._drawn = {key: value for key, value in self._drawn.items() if key not in drawn}
            self._drawn |= {key.replace("head.", start, 1): value for key, value in models[name]._drawn.items()}
            cast("SharedHeads", self.head).heads[name] = models[name].head
        self.task = self._multitask.with_labels(labels)
        self.assumed, self.has_assumed_labels = (), False

    @property
    def _multitask(self) -> MultiTask:
        return cast("MultiTask", self.task)


def models_of(model: TaskModel) -> dict[str, TaskModel]:
    """Returns a model for each task of a model, around the same encoder and head."""
    task, heads, models = cast("MultiTask", model.task), cast("SharedHeads", model.head).heads, {}
    for name, of_task in task.tasks.items():
        with torch.device("meta"):
            single: TaskModel = TaskModel(model.hf_config, of_task)
        single.encoder, single.head = model.encoder, cast("Any", heads[name])
        single.tokenizer, single.origin, single.adapters = model.require_tokenizer(), model.origin, model.adapters
        single.columns, single.reading = dict(task.heads[name].get("columns", {})), model.reading
        models[name] = single.train(model.training)
    return models


def _task_name(name: str, entry: Mapping[str, Any]) -> str:
    if not isinstance(entry, Mapping):
        raise UsageError(f"tasks.{name} is {entry!r}, expected a mapping with its task and settings")
    task_name = entry.get("task")
    if not isinstance(task_name, str):
        raise UsageError(f"tasks.{name}: task is {task_name!r}, expected the name of a task")
    return task_name


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in entry.items() if key not in MultiTask.entries}
    labels = settings.get("labels")
    return {**settings, "labels": tuple(labels)} if isinstance(labels, list | tuple) else settings

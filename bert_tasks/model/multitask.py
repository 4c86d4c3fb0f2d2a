"""``MultiTaskModel`` holds models of one task each around one encoder.

A row has the cells of each task, and the encoder reads equal windows of a row once (shared_heads.py). What follows the
logits is the work of each task (windows.py, prediction.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from bert_tasks.checkpoints.stored_tokenizers import config_with_tokenizer, new_tokenizer
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.columns import Columns, HeadColumns
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import CONFIG_KEY, encoder_config
from bert_tasks.model.encoder_with_heads import (
    EncoderWithHeads,
    Inputs,
)
from bert_tasks.model.loading import load_one_task, load_several_tasks
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.pretrained import (
    CheckpointFolder,
    stored_heads,
)
from bert_tasks.model.shared_heads import SharedHeads
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import (
    ENTRIES,
    HeadTask,
    check_heads,
    choose_one,
    head_task,
    head_tasks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Made = TypeVar("Made")


class MultiTaskModel(EncoderWithHeads):
    """A model that predicts several tasks, for ``fit`` and ``evaluate``, too.

    It holds a ``TaskModel`` for each task, and all of them share one encoder. Rows need not have labels of all tasks.
    One model costs one forward pass where separate models cost several, but the tasks have to agree on an encoder, so
    compare their metrics with those of separate models (Caruana 1997, "Multitask Learning"). ``forward``,
    ``with_layers`` and ``save_pretrained`` are those of ``TaskModel``.

    Attributes:
        models: Name of each task -> its model. Use it for what belongs to one task, such as logits.
        weights: Name of each task -> the weight of its loss.
        tasks: Name of each task -> the task with its settings. Training replaces it, because it fits values such as
            thresholds.

    Examples:
        >>> tasks = {
        ...     "intent": {"task": "sequence-classification", "columns": {"label": "intent"}},
        ...     "slots": {"task": "token-classification", "columns": {"tags": "slots"}},
        ... }
        >>> model = MultiTaskModel.from_pretrained(base, tasks=tasks)
        >>> result = fit(model, "train.jsonl", output_dir="runs/x")
        >>> list(model.predict({"text": "book a table for four"})[0])
        ['intent', 'slots']
    """

    head: SharedHeads
    head_kind = None

    def __init__(self, models: Mapping[str, TaskModel], weights: Mapping[str, float] = MappingProxyType({})) -> None:
        """Joins models of one task each around the encoder of the first one.

        The encoders of the other models are not used any more. If they differ from the first one, train the joined
        model before you use it.

        Args:
            models: Name of each task -> its model. Their encoders must have the same configuration. The models are
                changed, because they share the first encoder afterwards.
            weights: Name of a task -> weight of its loss. Default: 1.

        Raises:
            UsageError: There are no models, a weight is for an unknown task, or the models cannot share an encoder.
        """
        _check_models(models, weights)
        first = next(iter(models.values()))
        with torch.device("meta"):  # the encoder of the constructor is replaced at once
            super().__init__(first.hf_config)
        self.encoder, self.tokenizer, self.origin = first.encoder, first.tokenizer, first.origin
        self.load_report, self.reading = first.load_report, first.reading
        self._models = dict(sorted(models.items()))  # so that nothing depends on the order in which tasks are named
        self.weights = {name: weights.get(name, 1.0) for name in self._models}
        self.head = SharedHeads({name: model.head for name, model in self._models.items()})
        for name, model in self._models.items():
            model.encoder = self.encoder
            self._adopt_drawn(name)

    @property
    def models(self) -> dict[str, TaskModel]:
        """The model of each task, around the encoder and with the tokenizer of this model.

        A head that one of them has replaced, because its labels have become known, becomes a head of this model.
        """
        self.adopt_heads()
        for model in self._models.values():
            model._tokenizer = self._tokenizer  # whose segments fit already
            model.origin, model.reading, model.load_report = self.origin, self.reading, self.load_report
        return self._models

    def adopt_heads(self) -> None:
        """Takes over the heads that models of the tasks have replaced."""
        for name, model in self._models.items():
            if model.head is not self.head.heads[name]:
                self.head.heads[name] = model.head
                self._adopt_drawn(name)

    def _adopt_drawn(self, name: str) -> None:
        """Takes over which weights of a head were drawn."""
        start = f"head.heads.{name}."
        others = {key: value for key, value in self.drawn.items() if not key.startswith(start)}
        drawn = self._models[name].drawn
        self.drawn = others | {key.replace("head.", start, 1): value for key, value in drawn.items()}

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the encoder and of all heads, as ``torch.nn.Module.train`` does.

        Args:
            mode: True for training, with dropout, and False for evaluation.

        Returns:
            The model itself.

        Examples:
            >>> tasks = {"topic": {"task": "sequence-classification", "labels": ["food", "room"]}}
            >>> model = MultiTaskModel.from_pretrained(base, tasks=tasks).train()
            >>> model.models["topic"].training
            True
        """
        super().train(mode)
        for model in self._models.values():  # which are no modules of this one
            model.training = mode
        return self

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        revision: str | None = None,
    ) -> Self:
        """Loads an encoder with a head for each task, or a saved model of several tasks.

        See ``TaskModel.from_pretrained``, which loads one task of such a folder, too.

        Args:
            name: A folder, a hub id, or ``package:NAME/PATH``.
            tasks: Name of each task -> ``task``, the name of its kind, its settings and ``labels``, ``columns``, the
                task's columns -> their names in the data, and ``weight`` of its loss. Default: the tasks of the folder.
            revision: Branch, tag or commit of a hub id. Default: the branch ``main``.

        Returns:
            The model on the CPU, in float32 and in evaluation mode.

        Raises:
            CheckpointError: Files are missing or damaged, or the folder has one task only.
            UsageError: A task or setting is unknown, or the tasks cannot share an encoder.

        Examples:
            >>> tasks = {
            ...     "topic": {"task": "sequence-classification", "labels": ["food", "room"]},
            ...     "stars": {"task": "sequence-classification", "problem_type": "regression", "weight": 0.5},
            ... }
            >>> model = MultiTaskModel.from_pretrained(base, tasks=tasks)
            >>> sorted(model.models)
            ['stars', 'topic']
        """
        if tasks is None:
            return load_several_tasks(cls._of_folder, name, revision=revision)
        if not isinstance(tasks, Mapping) or not tasks:
            raise UsageError(f"tasks is {tasks!r}, expected the name of each task and its settings")
        models, heads = {}, {}
        for head, entry in tasks.items():
            task_name, settings = _task_name(head, entry), _settings(entry)
            models[head] = load_one_task(TaskModel, name, task=task_name, revision=revision, options=settings)
            heads[head] = _checked(head_task, head, models[head].task, entry)
            models[head].columns = heads[head].columns
        return cls(models, {head: of_head.weight for head, of_head in heads.items()}).eval()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        tasks: Mapping[str, Mapping[str, Any]],
        tokenizer: "str | Path | PreTrainedTokenizerBase",
        seed: int = 42,
    ) -> Self:
        """Makes a model with random weights, in evaluation mode.

        Args:
            config: See ``TaskModel.from_config``.
            tasks: See ``from_pretrained``. Each task has ``labels``, because no file names them.
            tokenizer: See ``TaskModel.from_config``.
            seed: Seed of the random weights.

        Returns:
            The model on the CPU, in float32.

        Raises:
            CheckpointError: A family or field is unknown, a value does not fit, or there is no such tokenizer.
            UsageError: A task or setting is unknown, or the tasks cannot share an encoder.

        Examples:
            >>> small = {"family": "bert", "hidden_size": 64, "num_attention_heads": 4}
            >>> tasks = {"topic": {"task": "sequence-classification", "labels": ["food", "room"]}}
            >>> model = MultiTaskModel.from_config(small, tasks=tasks, tokenizer=base)
            >>> list(model.tasks)
            ['topic']
        """
        if isinstance(tokenizer, str | Path):
            tokenizer = new_tokenizer(config, tokenizer)
        hf_config = config_with_tokenizer(config, tokenizer)
        tokenizer = with_segments(tokenizer, second=encoder_config(hf_config).second_segment)
        heads = _checked(head_tasks, tasks)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(new_models(hf_config, heads), weights_of(heads))
        model.tokenizer = tokenizer
        return model.eval()

    @classmethod
    def _of_folder(cls, folder: CheckpointFolder) -> Self:
        """Returns the model of a folder without its weights."""
        try:
            heads = stored_heads(folder)
            return cls(new_models(folder.hf_config, heads), weights_of(heads))
        except UsageError as error:
            raise CheckpointError(f"{folder.path}/config.json, key {CONFIG_KEY}: {error}") from None

    @property
    def heads(self) -> Mapping[str, TaskModel]:
        """The same as ``models``, under the name that ``TaskModel`` has, too."""
        return self.models

    def one_task(self) -> TaskModel:
        """Raises UsageError, whereas a model of one task returns itself."""
        raise choose_one(self.models)

    @property
    def tasks(self) -> dict[str, Task]:
        return {name: model.task for name, model in self.models.items()}

    @tasks.setter
    def tasks(self, tasks: Mapping[str, Task]) -> None:
        for name, task in tasks.items():
            self.models[name].task = task

    def _with_config(self, hf_config: Mapping[str, Any]) -> Self:
        heads = self.head_tasks
        student = type(self)(new_models(hf_config, heads), weights_of(heads))
        student.tokenizer = self._tokenizer
        return student

    @property
    def head_tasks(self) -> dict[str, HeadTask]:
        """The tasks with their columns and weights."""
        return {
            name: HeadTask(task=model.task, columns=model.columns, weight=self.weights[name])
            for name, model in self.models.items()
        }

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @property
    def row_columns(self) -> Columns:
        columns = {}
        for name, model in self.models.items():
            of_head = tuple(model.row_columns)
            columns[name] = HeadColumns(columns=of_head, names=model.columns, labels=model.labels)
        return columns

    def save_adapter(self, folder: str | Path) -> None:
        raise UsageError(f"peft holds one head. Call model.models[{next(iter(self.models))!r}].save_adapter")

    def predict(self, inputs: Inputs) -> list[dict[str, Prediction]]:
        """Returns the predictions of all tasks for each row, by the names of the tasks.

        The encoder runs a row once for all tasks that read the same texts. For logits and explanations use the model of
        a single task in ``models``, whose ``predict`` computes them. See ``TaskModel.predict``.

        Args:
            inputs: One or several rows, each a text or a mapping with the columns that the tasks read.

        Returns:
            For each row a dict from the name of a task to its prediction. A task without an input in the row is
            missing.

        Raises:
            DataError: A row has the input of no task, or a value is of the wrong kind.
            UsageError: The model has no tokenizer, or labels are not known yet.

        Examples:
            >>> tasks = {"topic": {"task": "sequence-classification", "labels": ["food", "room"]}}
            >>> model = MultiTaskModel.from_pretrained(base, tasks=tasks)
            >>> [sorted(predictions) for predictions in model.predict(["Cold soup.", "Kind staff."])]
            [['topic'], ['topic']]
        """
        return list(predict_rows(self, inputs))


AnyModel = TaskModel | MultiTaskModel


def new_models(
    hf_config: Mapping[str, Any],
    heads: Mapping[str, HeadTask],
    make: Callable[[Mapping[str, Any], Task[Any]], TaskModel] = TaskModel,
) -> dict[str, TaskModel]:
    """Returns a model of each task for ``MultiTaskModel``, each with a new head.

    Only the first one has an encoder, because the others share it afterwards. ``make`` is the class of the models.
    """
    models: dict[str, TaskModel] = {}
    for name, head in heads.items():
        if models:
            with torch.device("meta"):
                model = make(hf_config, head.task)
            if next(iter(models.values())).device.type != "meta":  # unless the caller wants no numbers at all
                model.head = head.task.head(model.config)
        else:
            model = make(hf_config, head.task)
        model.columns = head.columns
        models[name] = model
    return models


def weights_of(heads: Mapping[str, HeadTask]) -> dict[str, float]:
    """Returns the weight of the loss of each task."""
    return {name: head.weight for name, head in heads.items()}


def model_of_tasks(hf_config: Mapping[str, Any], heads: Mapping[str, HeadTask]) -> AnyModel:
    """Returns a model of one or of several tasks with random weights."""
    if "" in heads:
        return TaskModel(hf_config, heads[""].task)
    return MultiTaskModel(new_models(hf_config, heads), weights_of(heads))


def new_model(config: Mapping[str, Any], heads: Mapping[str, HeadTask], *, tokenizer: str, seed: int = 42) -> AnyModel:
    """Returns a new model of one or of several tasks. See ``TaskModel.from_config``."""
    if "" in heads:
        return TaskModel.from_config(config, task=heads[""].task, tokenizer=tokenizer, seed=seed)
    entries = {name: head.entry() for name, head in heads.items()}
    return MultiTaskModel.from_config(config, tasks=entries, tokenizer=tokenizer, seed=seed)


def pretrained_model(name: str, heads: Mapping[str, HeadTask], *, revision: str | None) -> AnyModel:
    """Returns a checkpoint with the head of one task, or the heads of several. See ``TaskModel.from_pretrained``."""
    if "" in heads:
        return TaskModel.from_pretrained(name, task=heads[""].task, revision=revision)
    entries = {head_name: head.entry() for head_name, head in heads.items()}
    return MultiTaskModel.from_pretrained(name, tasks=entries, revision=revision)


def _check_models(models: Mapping[str, TaskModel], weights: Mapping[str, float]) -> None:
    """Raises UsageError if models of single tasks cannot share an encoder."""
    if not isinstance(models, Mapping) or not models:
        raise UsageError(f"models is {models!r}, expected the name of each task and its model")
    unknown = sorted(weights.keys() - models.keys())
    if unknown:
        raise UsageError(f"weights has the unknown task {unknown[0]!r}. The tasks are {', '.join(models)}")
    first = next(iter(models.values()))
    for name, model in models.items():
        if model.config != first.config:
            raise UsageError(f"tasks.{name}: its encoder has another configuration than that of the first model")
    _checked(check_heads, {name: HeadTask(task=model.task) for name, model in models.items()})


def _checked(make: Callable[..., Made], *arguments: Any) -> Made:
    """Returns the result of a function of tasks/several.py, whose ValueError is one of the caller's arguments."""
    try:
        return make(*arguments)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None


def _task_name(name: str, entry: Mapping[str, Any]) -> str:
    """Returns the kind of a task from its entry in ``tasks``. Raises UsageError if there is none."""
    if not isinstance(entry, Mapping):
        raise UsageError(f"tasks.{name} is {entry!r}, expected a mapping with its task and settings")
    task_name = entry.get("task")
    if not isinstance(task_name, str):
        raise UsageError(f"tasks.{name}: task is {task_name!r}, expected the name of a task")
    return task_name


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a task from its entry in ``tasks``."""
    settings = {key: value for key, value in entry.items() if key not in ENTRIES}
    labels = settings.get("labels")
    if isinstance(labels, list | tuple):
        settings["labels"] = tuple(labels)
    return settings

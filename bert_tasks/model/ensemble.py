"""The models of a cross-validation as one, with the mean of their predictions.

Values that were fitted to data, such as thresholds, are averaged too. Temperatures are not, because each model's logits
are divided by its own temperature before the mean.

Shape legend: B sequences (windows), L logits of each, M models.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, read_json
from bert_tasks.checkpoints.hub import CONFIG, FOLDS, RUN_MODEL, RUN_SUMMARY, fold_runs
from bert_tasks.checkpoints.tokenizers import same_token_ids
from bert_tasks.data.problems import first_few
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.model.fixed import FixedModel
from bert_tasks.model.pretrained import check_one_task, check_trained
from bert_tasks.model.task_model import ForwardFn, TaskModel
from bert_tasks.tasks.base import Feature, PredictionT, Task
from bert_tasks.tasks.shared.calibration import CalibratedFitting, CalibratedTask
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.outputs import joins_windows, mean_logits, windows_by_row

_MOST_FOLDS = 1000  # as in the section [folds] of a recipe


def is_ensemble(name: str | Path) -> bool:
    """Returns True if the name of a model is the folder of a cross-validation."""
    folder = Path(os.path.expanduser(name))
    has_model = (folder / CONFIG).is_file() or (folder / RUN_MODEL / CONFIG).is_file()
    return not has_model and bool(fold_runs(folder))


class EnsembleModel(FixedModel[PredictionT]):
    """The models of a cross-validation as one, which predicts the mean.

    Args:
        models: Names for messages -> models with the same task, settings, labels, configuration and tokenizer.

    Raises:
        CheckpointError: They do not belong together.
        UsageError: Each has several tasks. Load one of them.
    """

    no_weights_reason: ClassVar[str] = "an ensemble of folds has no weights of its own. Use the model of one fold"

    def __init__(self, models: Mapping[str, TaskModel[PredictionT]]) -> None:
        (first_name, first), *others = models.items()
        check_one_task(first.task)
        for name, model in others:
            difference = _difference(model, first)
            if difference is not None:
                raise CheckpointError(f"{name} and {first_name} do not predict the same, because {difference}")
        task = _mean_task(models)
        super().__init__(first.hf_config, replace(task, temperature=1.0) if isinstance(task, CalibratedTask) else task)
        self.models = nn.ModuleList(models.values())
        self.head = first.head
        self._joins_windows = joins_windows(self.task, self.head)
        self.tokenizer, self.columns = first.require_tokenizer(), first.columns
        self.eval()

    def zero_shot(self, labels: Sequence[str] | str, **options: Any) -> NoReturn:
        raise UsageError(f"{argument('labels', None)}: {self.no_weights_reason}")

    def packed_logits(self, batch: PackedBatch) -> Any:
        return self.joined([cast("TaskModel", model).packed_logits for model in self.models])(batch)

    def joined(self, forward_fns: Sequence[ForwardFn]) -> ForwardFn:
        """Returns the function of the mean logits of functions, one for each model.

        If samples are rows, the mean needs all windows of a row, which prediction runs in several batches. Then the
        function returns the logits of all models, ``[B, L, M]``, and the mean is taken later.
        """
        tasks = [cast("TaskModel", model).task for model in self.models]

        def each_logits(batch: PackedBatch) -> Iterator[Any]:
            return (_calibrated(task, forward_fn(batch)) for task, forward_fn in zip(tasks, forward_fns, strict=True))

        if self._joins_windows:
            return lambda batch: torch.stack(list(each_logits(batch)), dim=-1)
        return lambda batch: mean_logits(self.task, self.head, each_logits(batch), batch.windows)

    def batch_logits(
        self, features: Sequence[Feature], *, forward_fn: ForwardFn | None = None
    ) -> tuple[PackedBatch, Any]:
        batch, logits = super().batch_logits(features, forward_fn=forward_fn)
        return batch, self._row_means(logits, batch.windows) if self._joins_windows else logits

    def forward_batch(self, features: Sequence[Feature], *, forward_fn: ForwardFn | None = None) -> tuple[Tensor, ...]:
        if not self._joins_windows:
            return super().forward_batch(features, forward_fn=forward_fn)
        _, logits = super().batch_logits(features, forward_fn=forward_fn)
        return tuple(logits.cpu().unbind())

    def forward_windows(
        self, features: Sequence[Feature], *, max_tokens: int | None = None, forward_fn: ForwardFn | None = None
    ) -> list[Tensor]:
        logits = super().forward_windows(features, max_tokens=max_tokens, forward_fn=forward_fn)
        if not self._joins_windows or not logits:
            return logits
        means = self._row_means(torch.stack(logits), [len(windows) for windows in windows_by_row(features)])
        return list(self.task.compact_logits(means.unbind(), features))

    def _row_means(self, logits: Tensor, windows: Sequence[int]) -> Tensor:
        """Averages windows, ``[B, L, M] -> [B, L]``. ``windows`` has their numbers by row."""
        with torch.inference_mode():
            means: Tensor = mean_logits(self.task, self.head, logits.unbind(-1), windows)
        return means


def _calibrated(task: Task[Any], logits: Any) -> Any:
    return task.calibrated(logits) if isinstance(task, CalibratedTask) else logits


def load_ensemble(name: str | Path, **options: Any) -> EnsembleModel:
    """Loads all models of ``train --folds`` with arguments of ``TaskModel.load``.

    Raises:
        CheckpointError: The cross-validation is not finished, or a model is missing, damaged or not its own.
    """
    models: dict[str, TaskModel] = {}
    for home in _finished_folds(Path(os.path.expanduser(name))):
        model = TaskModel.load(home, **options)
        check_trained(home, model.task, model.load_report)
        models[str(home)] = model
    fitted = _fitted_to_folds(Path(os.path.expanduser(name)))
    for model in models.values() if fitted else ():
        model.task = replace(model.task, **fitted)
    return EnsembleModel(models)


def _fitted_to_folds(folder: Path) -> dict[str, Any]:
    """Returns the fields fitted to out-of-fold predictions, or {} if there are none.

    Raises:
        CheckpointError: The file is damaged.
    """
    fitted = read_json(folder / FOLDS, max_bytes=MAX_CONFIG_BYTES).get("fitted", {})
    entries = fitted.items() if isinstance(fitted, dict) else [("", None)]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in entries}
    numbers = [number for value in values.values() for number in (value if isinstance(value, tuple) else (value,))]
    if not set(values) <= set(CalibratedFitting.fields) or not all(type(number) is float for number in numbers):
        raise CheckpointError(f"{folder / FOLDS} is damaged. Run the command that trained the folds again")
    return values


def _finished_folds(folder: Path) -> list[Path]:
    """Returns the folders of the runs of all folds, which must be finished."""
    homes = fold_runs(folder)
    if (folder / FOLDS).is_file():
        runs = read_json(folder / FOLDS, max_bytes=MAX_CONFIG_BYTES).get("runs")
        try:
            numbers = [int(run["fold"]) for run in cast("Any", runs)]
        except (TypeError, ValueError, KeyError, OverflowError):
            numbers = []
        homes = [folder / f"fold-{number}" for number in numbers]
        if not numbers or max(numbers) > _MOST_FOLDS:
            raise CheckpointError(f"{folder / FOLDS} is damaged. Run the command that trained the folds again")
    remedy = "Run the command that trained the folds again to resume it, or name one fold"
    needed = {
        RUN_SUMMARY: "no finished run of {} (interrupted, diverged or removed)",
        f"{RUN_MODEL}/{CONFIG}": f"no {RUN_MODEL}/ with {CONFIG} of {{}}",
    }
    for file, message in needed.items():
        missing = [home.name for home in homes if not (home / file).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {message.format(first_few(missing, 3))}. {remedy}")
    if not (folder / FOLDS).is_file():
        raise CheckpointError(f"{folder}: the cross-validation is not finished, as there is no {FOLDS}. {remedy}")
    return homes


def _difference(model: TaskModel, other: TaskModel) -> str | None:
    """Returns why the outputs of two models differ in meaning, or None."""
    task, theirs = model.task, other.task
    if type(task) is not type(theirs):
        return f"their tasks are {task.name} and {theirs.name}"
    if task.labels != theirs.labels:
        return f"their labels are {', '.join(task.labels)} and {', '.join(theirs.labels)}"
    settings, other_settings = Fitting.of(task).settings(), Fitting.of(theirs).settings()
    setting = next((name for name in settings if settings[name] != other_settings[name]), None)
    if setting is not None:
        return f"{setting} is {settings[setting]!r} and {other_settings[setting]!r}"
    if model.config != other.config:
        return "the configurations of their encoders differ"
    if not same_token_ids(model.require_tokenizer(), other.require_tokenizer()):
        return "their tokenizers give different tokens"
    return None


def _mean_task(models: Mapping[str, TaskModel[PredictionT]]) -> Task[PredictionT]:
    """Returns the models' task with means of fitted values and the first task's texts."""
    (first_name, first), *others = ((name, model.task) for name, model in models.items())
    means: dict[str, Any] = {}
    for field in Fitting.of(first).fields:
        value = getattr(first, field)
        for name, task in others:
            other = getattr(task, field)
            are_texts = isinstance(other, str) and isinstance(value, str)
            if not are_texts and _shape(other) != _shape(value):
                raise CheckpointError(
                    f"{name} and {first_name} do not predict the same, because {field} is {other!r} and {value!r}"
                )
        values = [value, *(getattr(task, field) for _, task in others)]
        if not isinstance(value, str) and any(other != value for other in values):
            means[field] = _mean(values)
    return replace(first, **means)


def _shape(value: Any) -> Any:
    """Returns the types in a float or a tuple of floats, or any other value itself."""
    if isinstance(value, tuple):
        return tuple(map(_shape, value))
    return float if isinstance(value, float) else value


def _mean(values: Sequence[Any]) -> Any:
    """Returns the mean of floats, or of tuples of floats item by item."""
    if isinstance(values[0], tuple):
        return tuple(map(_mean, zip(*values, strict=True)))
    return fmean(values)

"""The state of a run, its result, and its folder.

Owns ``TrainerState``, which a checkpoint's ``RunState`` stores, ``RunFolder``, and the content of run.json. The state
needs neither a position in the data nor the state of a random number generator, because the order of the samples and
the random numbers of a step are functions of seed, epoch and step.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from accelerate import Accelerator
from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError

from bert_tasks.data.checks import has_rare_labels, labelled_splits, named_splits
from bert_tasks.data.columns import REJECT
from bert_tasks.data.issues import shortened
from bert_tasks.data.splits import Splits
from bert_tasks.distributed import on_main_process, thread_hint, usable_cores
from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.encoder.lora import Adapters
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.metrics.tables import MetricTable, metrics_by_set
from bert_tasks.model.features import feature_libraries, input_notes
from bert_tasks.model.heads import metric_table
from bert_tasks.model.multitask import AnyModel
from bert_tasks.storage import remove_temporaries
from bert_tasks.tables import Table
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import fitted_values, task_name
from bert_tasks.training import checkpoints as checkpointing
from bert_tasks.training import files as outputs
from bert_tasks.training.checkpoints import RunState
from bert_tasks.training.files import Change
from bert_tasks.training.objectives import Objective, weights_digest
from bert_tasks.training.optim import attention_kernel, count_trained
from bert_tasks.training.records import (
    ChangeRecord,
    Count,
    MetricRecord,
    Metrics,
    Number,
    Record,
    RunRecord,
    SummaryRecord,
)
from bert_tasks.training.step import OptimizerSteps

_FEW_STEPS = 200  # in which a new head may not have learned anything yet
_USUAL_RATE = 1e-4  # the largest learning rate that is usual for a pre-trained model
Tasks = SkipValidation[Mapping[str, Task]]
# A checkpoint stores an infinite rank as null, because JSON has no infinity (see records.py).
LowestIfNull = BeforeValidator(lambda value: -math.inf if value is None else value)
HighestIfNull = BeforeValidator(lambda value: math.inf if value is None else value)


class TrainerState(Record):
    """The progress of a run, which checkpoints store with the fitted values of the tasks as ``tuned``.

    Attributes:
        tasks: The task of each head at the best evaluation, with its tuned thresholds.
        step: Number of completed optimizer steps. ``evaluated_step`` is the number before the last evaluation.
        best, last: Metrics of the best and of the last evaluation.
        best_value, best_loss: Rank of the best model (see ``rank_of``).
        best_step: Optimizer steps of the best model. 0 if there is none yet.
        best_collapse: Collapse of the best model on the validation set that its metric belongs to. See
            ``Output.degeneracy``.
        since_best: Number of evaluations since the best one.
        seconds: Time in seconds that was spent on training, without evaluation and saving.
        overflows: Consecutive steps that fp16 skipped.
        stopped: The run ends early.
    """

    model_config = ConfigDict(extra="forbid")
    tasks: Tasks = Field(exclude=True)
    step: Count = 0
    evaluated_step: Count = 0
    best: Metrics = Field(default_factory=dict)
    best_value: Annotated[Number, LowestIfNull] = -math.inf
    best_loss: Annotated[Number, HighestIfNull] = math.inf
    best_step: Count = 0
    best_collapse: str | None = None
    last: Metrics = Field(default_factory=dict)
    since_best: Count = 0
    seconds: float = 0.0
    overflows: Count = 0
    stopped: bool = False

    def add_evaluation(
        self,
        metrics: dict[str, float],
        rank: tuple[float, float],
        *,
        tasks: Mapping[str, Task],
        collapse: str | None,
    ) -> bool:
        """Adds the evaluation after ``step``. Returns True if it is the first best so far.

        ``rank`` is the result of ``rank_of``. ``tasks`` are the tasks as this evaluation tuned them.
        """
        value, loss = rank
        # The first evaluation is the best so far even if its value is minus infinity, because a run needs a model.
        is_best = (value, -loss) > (self.best_value, -self.best_loss) or not self.best
        self.last, self.evaluated_step = metrics, self.step
        self.since_best = 0 if is_best else self.since_best + 1
        if is_best:
            self.best, self.best_step, self.tasks = metrics, self.step, tasks
            self.best_value, self.best_loss, self.best_collapse = value, loss, collapse
        return is_best

    def update_early_stopping(self, patience: int | None) -> None:
        """Sets ``stopped`` from the number of evaluations without a better model."""
        self.stopped = patience is not None and self.since_best >= patience

    def to_json(self) -> dict[str, Any]:
        """Returns the state as a checkpoint has it."""
        return {**self.model_dump(mode="json"), "tuned": fitted_values(self.tasks)}

    @classmethod
    def of_checkpoint(cls, stored: object, tasks: Mapping[str, Task]) -> Self:
        """Returns the state that ``to_json`` has stored.

        Args:
            stored: The content of the checkpoint.
            tasks: The task of each head, without the values that were fitted before the checkpoint.

        Raises:
            ValueError: A field is damaged or missing.
        """
        if not isinstance(stored, Mapping):
            raise ValueError(f"the state is {shortened(stored)}, expected an object")
        # Every field has a default, which must not stand in for a field that a damaged checkpoint lacks.
        for name in (*cls.model_fields, "tuned"):
            if name not in stored and name != "tasks":
                raise ValueError(f"{name} = {shortened(stored)}, Field required")
        values = dict(stored)
        tuned = _tuned_tasks(tasks, values.pop("tuned"))
        return cls.checked({**values, "tasks": tuned})


def _tuned_tasks(tasks: Mapping[str, Task], stored: object) -> dict[str, Task]:
    """Returns the tasks with the fitted values of a checkpoint, which several tasks have by name under ``fitted``."""
    by_head = stored
    if "" in tasks:
        by_head = {"": stored}
    elif isinstance(stored, Mapping) and stored.keys() <= {"fitted"}:
        by_head = stored.get("fitted", {})
    if not isinstance(by_head, Mapping) or by_head.keys() - tasks.keys():
        raise ValueError(f"tuned has other tasks than {', '.join(tasks)}")
    return {name: _tuned(task, by_head.get(name, {})) for name, task in tasks.items()}


def _tuned(task: Task, values: object) -> Task:
    """Returns a task with fitted values from a checkpoint. Raises ValueError if one is damaged."""
    known = {name: setting for name, setting in task.settings_by_name().items() if setting.is_fitted}
    if not isinstance(values, Mapping) or values.keys() - known.keys():
        raise ValueError(f"tuned has other fields than {', '.join(known)}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = known[name].typed(value)
        except ValidationError as error:
            raise ValueError(f"tuned.{name} = {shortened(value)}, {error.errors()[0]['msg']}") from None
    return task.with_settings(**checked)


class FitResult(SummaryRecord):
    """The result of a run, as in ``metrics.json``.

    `fit`, `train` and `Trainer.train` return it, also for a run that was complete already. A notebook shows it as a
    table.

    Attributes:
        metrics, last_metrics: Metrics on the validation rows of the best model, and of the last evaluation.
        best_step, steps: Number of optimizer steps until the best model, and of all steps.
        train_seconds: Seconds of training, without evaluation and saving.
        tasks: Name of each task -> the task of the best model, with its tuned thresholds. If there is only one task,
            its name is "".
        validation_sets: Names of the validation sets, with which their metrics begin. A single set may be "".
        collapse: The prediction of the best model for every row of a validation set although the labels differ, such as
            "predicts 'calm' for every row", or None.
        notes: Sentences that a reader of the metrics must know.
        headline: The primary metric on the validation rows that chose the best model. Beside an accuracy is that of
            always predicting the most frequent label, such as "accuracy 0.9535 (always predicting 'calm': 0.5000)".
        reused: True if the run was complete already, so that nothing was trained.

    Examples:
        >>> result = fit(model, "train.csv", output_dir="runs/x", epochs=1)
        >>> result.best_step == result.steps
        True
        >>> accuracy = result.metrics["accuracy"]  # on the validation rows
    """

    output_dir: Path = Field(exclude=True)
    tasks: Tasks = Field(exclude=True)
    validation_sets: tuple[str, ...] = Field(exclude=True)
    headline: str = Field(default="", exclude=True)
    reused: bool = Field(default=False, exclude=True)

    def metric_tables(self) -> dict[str, MetricTable]:
        """Returns the metrics of the best model as one table for each validation set.

        A table has the metrics over all rows, and for most tasks the scores of each label.

        Returns:
            The table of each validation set, by its name.
        """
        by_set = metrics_by_set(self.metrics, self.validation_sets)
        return {name: metric_table(self.tasks, metrics) for name, metrics in by_set.items()}

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the metrics as a table, and where the model is."""
        columns, rows = ["validation set", "metric", "value"], []
        for name, table in self.metric_tables().items():
            rows += [[name, table.title(metric), f"{value:.4f}"] for metric, value in table.overall.items()]
        if self.validation_sets == ("",):
            columns, rows = columns[1:], [row[1:] for row in rows]
        about = f"best after step {self.best_step} of {self.steps}, {self.train_seconds:.0f} s of training"
        lines = [about, f"model: {self.output_dir / outputs.MODEL}", *self.notes]
        report = self.output_dir / outputs.REPORT
        if report.is_file():
            lines.append(f"report: {report}")
        return Table(columns=columns, rows=rows).html() + "".join(f"<div>{escape(line)}</div>" for line in lines)


def state_dict(steps: OptimizerSteps, state: TrainerState) -> RunState:
    """Returns the run after ``state.step`` steps. All weights have to be up to date.

    The tensors are those of the run and no copies, so they have to be written before the next step changes them.
    """
    scaler = steps.accelerator.scaler
    moments, other = steps.optimizer.state_dict()
    scaler_state = None if scaler is None else scaler.state_dict()
    # The key "course" is part of the format of checkpoints.
    progress = {"course": state.to_json(), "scaler": scaler_state}
    if other:
        progress["optimizer"] = other
    weights = steps.optimizer.checkpoint_parameters()
    return RunState(step=state.step, weights=weights, optimizer=moments, progress=progress)


def load_state(loaded: RunState, steps: OptimizerSteps, tasks: Mapping[str, Task]) -> TrainerState:
    """Loads a ``state_dict`` into parameters, optimizer and scaler, and returns the state of the run.

    Raises:
        CheckpointError: The checkpoint belongs to another model, or is damaged.
    """
    scaler, parameters = steps.accelerator.scaler, steps.optimizer.checkpoint_parameters()
    here = {name: parameter.shape for name, parameter in parameters.items()}
    stored = {name: tensor.shape for name, tensor in loaded.weights.items()}
    different = sorted(name for name in here.keys() | stored.keys() if here.get(name) != stored.get(name))
    if different:
        raise CheckpointError(
            f"ckpt-{loaded.step} belongs to another model, which differs in {', '.join(different[:5])}. "
            f"Choose another output folder, or {argument('overwrite')} to start again"
        )
    steps.optimizer.load_state_dict(loaded.weights, loaded.optimizer, loaded.progress.get("optimizer", {}))
    if scaler is not None and loaded.progress.get("scaler") is not None:
        scaler.load_state_dict(loaded.progress["scaler"])
    try:
        return TrainerState.of_checkpoint(loaded.progress.get("course", {}), tasks)
    except ValueError as error:
        raise CheckpointError(
            f"ckpt-{loaded.step} is damaged ({error}). Remove it, or start again with {argument('overwrite')}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class ExistingRun:
    """A run in the folder that may be resumed.

    Attributes:
        metadata: The content of its run.json.
        changed: The settings that differ from its settings, and may.
        summary: The content of metrics.json if the run is finished, else None.
    """

    metadata: RunRecord
    changed: Sequence[Change]
    summary: SummaryRecord | None


@dataclass(kw_only=True)
class RunFolder:
    """The folder of a run. The main process reads and writes it for all processes.

    Attributes:
        settings: All settings of the run, flat, as run.json holds them.
        recipe_text: The resolved recipe, if the run has one.
    """

    path: Path
    accelerator: Accelerator
    objective: Objective
    splits: Splits
    settings: Mapping[str, Any]
    recipe_text: str | None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / checkpointing.FOLDER

    @on_main_process
    def existing_run(self) -> ExistingRun | None:
        """Returns the run in the folder, or None if there is none.

        Raises:
            UsageError: A file of the run is damaged, or the run has other settings or rows, so that it can neither be
                resumed nor returned as the result.
        """
        metadata = outputs.read_run_metadata(self.path)
        if metadata is None:
            return None
        summary = outputs.read_summary(self.path)
        changed = outputs.changes(self.path, metadata.settings, self.settings, finished=summary is not None)
        return ExistingRun(metadata=metadata, changed=changed, summary=summary)

    @on_main_process
    def write_metadata(self, metadata: RunRecord) -> None:
        """Writes the settings and inputs of the run, run.json first, because it marks the folder as that of a run."""
        outputs.write_json(self.path / outputs.RUN, metadata.to_json())
        if self.recipe_text is not None:
            outputs.write_text(self.path / outputs.RECIPE, self.recipe_text)
        # Skipped rows, once for each source file, because validation rows may come from the training file.
        tables = {table.source: table for _, table in named_splits(self.splits)}
        rejects: list[str] = []
        for table in tables.values():
            if table.errors is None:
                continue
            for error in table.errors.values(REJECT):
                rejects.append(json.dumps({"file": table.source, **json.loads(error)}) + "\n")
        (self.path / outputs.REJECTS).unlink(missing_ok=True)
        if rejects:
            outputs.write_text(self.path / outputs.REJECTS, "".join(rejects))

    @on_main_process
    def load_newest(self, existing: ExistingRun, metadata: RunRecord) -> tuple[RunState | None, list[str]]:
        """Returns the newest intact checkpoint, from which the run resumes, if there is one, and notes for people.

        Args:
            existing: The run in the folder.
            metadata: What run.json will hold of the resumed run.

        Raises:
            CheckpointError: There are checkpoints and none can be used.
            UsageError: The checkpoint is beyond the end of the run, or the run is finished and has no checkpoint.
        """
        checkpointing.remove_checkpoints(self.checkpoints, only_leftovers=True)
        remove_temporaries(self.path, outputs.WRITTEN)
        newest = checkpointing.newest_checkpoint(self.checkpoints)
        if newest is None:
            if existing.summary is not None:
                raise UsageError(
                    f"{self.path} holds a finished run without checkpoints, which cannot be resumed. Choose another "
                    f"folder, or {argument('overwrite')} to train again (run.keep_checkpoints keeps the checkpoints of "
                    "a run)"
                )
            # A run that was killed before its first checkpoint has only metrics and settings.
            return None, ["the run in the folder has no checkpoint and starts again from the beginning"]
        if newest.state.step > metadata.steps:
            raise UsageError(
                f"{self.path} holds {newest.state.step} steps, more than the {metadata.steps} of this run. "
                "Raise optim.epochs or optim.max_steps, choose another folder, or "
                f"{argument('overwrite')} to train again"
            )
        if existing.metadata.encoder_weights != metadata.encoder_weights:
            raise CheckpointError(
                "the encoder has other weights than at the start of the run. Checkpoints hold only the adapters and "
                f"the head. Pass the model that the run began with, or {argument('overwrite')} to start again"
            )
        skipped = [f"NOT USED: {reason}" for reason in newest.skipped]
        return newest.state, [*skipped, f"resumed after step {newest.state.step} from {newest.path}"]

    @on_main_process
    def rewind(self, loaded: RunState | None, state: TrainerState, steps: OptimizerSteps) -> list[str]:
        """Cuts the files of the run back to the step from which it is resumed. Returns notes for people.

        ``model/`` may be from after that step, so it is written again from the checkpoint of the best model.
        """
        # The summary goes first, because without it the run counts as unfinished.
        (self.path / outputs.SUMMARY).unlink(missing_ok=True)
        outputs.cut_events(self.path, state.step, evaluated_step=state.evaluated_step)
        if loaded is None or not state.best_step:
            return []
        try:
            best = checkpointing.read_weights(self.checkpoints, state.best_step)
        except CheckpointError as error:
            # Checkpoints may have been removed by hand. An existing best model is then better than none.
            if not (self.path / outputs.MODEL / "config.json").is_file():
                raise
            return [f"NOT USED: {error}. The best model so far remains in {outputs.MODEL}/"]
        parameters = steps.optimizer.checkpoint_parameters()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(best.pop(name))  # frees each tensor, so that memory does not hold a further model
            steps.optimizer.update_weights()
            self._publish(state.tasks, steps.optimizer.adapters)
            for name, parameter in parameters.items():
                parameter.copy_(loaded.weights[name])
        return []

    @on_main_process
    def save_checkpoint(self, steps: OptimizerSteps, state: TrainerState, *, seed: int, keep_last: int) -> Path:
        """Writes a checkpoint of the run, whose weights have to be up to date. Returns its folder."""
        order = steps.order
        epoch = order.epoch_of(state.step)
        # Whole epochs, of which each has as many samples as there are, and the batches of the present one.
        batches = order.batches(order.first_step(epoch), state.step)
        metadata = {
            "epoch": order.epochs(state.step),
            "samples": epoch * len(steps.samples) + sum(len(batch) for _, batch in batches),
            "processes": self.accelerator.num_processes,
            "seed": seed,
            "data": outputs.data_metadata(self.splits),
            "versions": outputs.environment(feature_libraries(self.objective.model))["versions"],
        }
        return checkpointing.save_checkpoint(
            self.checkpoints,
            state_dict(steps, state),
            metadata=metadata,
            best_step=state.best_step,
            keep_last=keep_last,
        )

    @on_main_process
    def publish(self, tasks: Mapping[str, Task], adapters: Adapters | None) -> None:
        """Writes the present model to ``model/``, with the tuned tasks, and its adapters if the run saves them."""
        self._publish(tasks, adapters)

    def _publish(self, tasks: Mapping[str, Task], adapters: Adapters | None) -> None:
        """Does what ``publish`` does, inside of another method that runs on the main process."""
        model = self.objective.model
        model.adapters = None if adapters is None else adapters.weights()
        for of_head in model.heads.values():
            of_head.adapters = model.adapters
        # The run continues with the tasks as they were, because each evaluation tunes them anew.
        untuned, model.tasks = model.tasks, tasks
        try:
            model.save_pretrained(self.path / outputs.MODEL)
            if self.settings["run.save_adapter"]:
                model.save_adapter(self.path / outputs.ADAPTER)
        finally:
            model.tasks = untuned
        for name, further in self.objective.further_models.items():
            further.save_pretrained(self.path / name)


def run_environment(accelerator: Accelerator, model: AnyModel) -> dict[str, Any]:
    """Returns what bit-equal results depend on besides the settings and the data."""
    device = accelerator.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        **outputs.environment(feature_libraries(model)),
        "processes": accelerator.num_processes,
        "device": device.type,
        "device_name": device_name,
    }


def run_metadata(
    steps: OptimizerSteps, splits: Splits, metrics: MetricRecord, settings: Mapping[str, Any]
) -> RunRecord:
    """Returns run.json of a run that begins.

    ``metrics`` is the result of ``metric_metadata``, ``settings`` are all settings of the run.
    """
    model = steps.objective.model
    vocabulary, adapters = steps.optimizer.vocabulary, steps.optimizer.adapters
    vocabulary_rows = None
    if vocabulary is not None:
        vocabulary_rows = {"trained": len(vocabulary.ids), "all": model.config.vocab_size}
    origin: dict[str, str | None] = {}
    if model.origin is not None:
        origin = dict(vars(model.origin))
    # With adapters the checkpoints do not hold the encoder, so a resumed run needs the same one.
    encoder_weights = None if adapters is None else weights_digest(model.encoder.state_dict())
    return RunRecord(
        started=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        **run_environment(steps.accelerator, model),
        seed=steps.seed,
        attention=attention_kernel(model, steps.optim.mixed_precision),
        model=origin,
        task=task_name(model.tasks),
        labels=list(model.labels),
        metrics=metrics,
        data=outputs.data_metadata(splits),
        rows=len(splits.train),
        steps=steps.plan.total,
        vocabulary_rows=vocabulary_rows,
        trained_parameters=count_trained(steps.objective, adapters),
        initial_weights=weights_digest(steps.objective.checkpoint_parameters()),
        encoder_weights=encoder_weights,
        settings=dict(settings),
    )


def resumed_metadata(now: RunRecord, before: RunRecord, changed: Sequence[Change], step: int) -> RunRecord:
    """Returns run.json of a run that is resumed after a step, with what changed since it began."""
    changes = [ChangeRecord(step=step, change=str(change)) for change in changed]
    return now.model_copy(
        update={
            "started": before.started,
            "initial_weights": before.initial_weights,
            "resumed_at": [*before.resumed_at, step],
            "changes": [*before.changes, *changes],
        }
    )


def start_notes(steps: OptimizerSteps, splits: Splits, attention: str) -> Iterator[str]:
    """Yields sentences about what begins, and what may be unexpected in the data."""
    accelerator, objective, optimizer = steps.accelerator, steps.objective, steps.optimizer
    model = objective.model
    yield (
        f"{accelerator.num_processes} x {accelerator.device.type}, attention {attention}, "
        f"mixed precision {steps.optim.mixed_precision}"
    )
    # Too many threads are the most common reason why training on a CPU is slow.
    if accelerator.device.type == "cpu":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun, the number of processes on this machine
        processes = int(local) if local.isdecimal() else accelerator.num_processes
        hint = thread_hint(torch.get_num_threads(), processes, usable_cores())
        if hint is not None:
            yield hint
        if steps.optim.mixed_precision == "bf16":
            slow = slow_bfloat16()
            if slow is not None:
                yield f'{slow}. Set optim.mixed_precision = "no"'
    if model.load_report is not None:
        yield model.load_report.summary()
    if optimizer.adapters is not None:
        trained = count_trained(objective, optimizer.adapters)
        yield f"{trained:,} parameters of the low-rank adapters and the head are trained"
    yield from optimizer.notes
    yield from objective.notes
    tables = {f"validation {name}".strip(): table for name, table in splits.validation.items()}
    for name, table in {"train": splits.train, **tables}.items():
        for text in table.notes:
            yield f"{name}: {text}"
    for text in input_notes(steps.samples, model, rows=len(splits.train)):
        yield f"train: {text}"


def end_notes(steps: OptimizerSteps, splits: Splits, state: TrainerState, *, best_set: str) -> Iterator[str]:
    """Yields what a reader of the metrics must know at the end of a run.

    ``best_set`` is the name of the validation set whose metric selects the best model.
    """
    if splits.train.sample:
        yield f"the model was trained on {splits.train.sample}. Train on all rows before you use it"
    if state.best_collapse is None:
        return
    where = f" of the validation set {best_set!r}" if best_set else ""
    *remedies, last = _remedies(steps, splits, state.tasks)
    yield (
        f"the best model {state.best_collapse}{where}, although the labels of the validation rows differ. "
        f"Try {', '.join(remedies)} or {last}"
    )


def _remedies(steps: OptimizerSteps, splits: Splits, tasks: Mapping[str, Task]) -> list[str]:
    """Returns what may help a run whose best model predicts one label, the most likely first."""
    rate, model = steps.optim.learning_rate, steps.objective.model
    epochs = f"more epochs (now {steps.order.epochs(steps.plan.total):.3g})"
    # A new head that was updated a few times by small amounts still predicts what its random weights favour. After many
    # updates, or large ones, the usual reason is that they were too large.
    if steps.optim.linear_probe:
        remedies = ["more rows", "fine-tuning (linear_probe = false)"]
    elif steps.plan.total < _FEW_STEPS and rate <= _USUAL_RATE:
        remedies = [epochs, f"a higher learning_rate (now {rate:g})"]
    else:
        remedies = [f"a lower learning_rate (now {rate:g})", epochs]
    for name, task in tasks.items():
        rows = splits
        if name:
            rows = labelled_splits(splits, name, task.columns, model.heads[name].columns)
        if has_rare_labels(rows.train, task.columns):  # several tasks may have the same remedy
            remedies += [remedy for remedy in task.output.remedies if remedy not in remedies]
    return remedies

"""What a checkpoint holds of a run that goes on, and how a fresh process takes it over.

Owns the translation between the living objects (model, optimizer, course) and a ``RunState``. The place in the data
needs no state: the order of samples and the random numbers of a step are functions of seed, epoch and step. Must not
know files.

What a run does with its folder: opens it or goes on with what is there, saves itself and its best model.

Everything here happens on the first process; only ``resume`` involves the others. Must not know how steps are computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor

from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.inference import broadcast_from_main
from bert_tasks.paths import is_file
from bert_tasks.run_dir import checkpoints as checkpointing
from bert_tasks.run_dir import compatibility as resuming
from bert_tasks.run_dir import files as outputs
from bert_tasks.run_dir.checkpoints import LoadedCheckpoint, RunState
from bert_tasks.training.evaluation import TrainerState
from bert_tasks.training.job import Job
from bert_tasks.training.step import TrainContext

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_METRICS = ("best", "last")
_RANK = {"best_value": -math.inf, "best_loss": math.inf}  # of the best model, and where it has no such number


def captured(stepper: TrainContext, course: TrainerState, *, step: int) -> RunState:
    """The state after ``step`` optimizer steps. Its tensors are the living ones: write them before the next step."""
    parameters = dict(stepper.model.named_parameters())
    held = stepper.optimizer.optimizer.state
    moments = {
        f"{name}/{key}": held[parameter][key]
        for name, parameter in parameters.items()
        for key in _MOMENTS
        if parameter in held
    }
    scaler = stepper.accelerator.scaler
    progress = {"course": _course_to_json(course), "scaler": None if scaler is None else scaler.state_dict()}
    return RunState(step=step, weights=parameters, optimizer=moments, progress=progress)


def take_over(stepper: TrainContext, course: TrainerState, state: RunState) -> None:
    """Puts a state into the model, the optimizer and the course.

    Raises:
        CheckpointError: the state is of another model.
    """
    parameters = dict(stepper.model.named_parameters())
    _check_fit(parameters, state)
    held = stepper.optimizer.optimizer.state
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.weights[name])
    for name, parameter in parameters.items():
        moments = {key: state.optimizer.get(f"{name}/{key}") for key in _MOMENTS}
        if parameter.requires_grad and all(value is not None for value in moments.values()):
            held[parameter] = {key: value.to(parameter.device) for key, value in moments.items() if value is not None}
    if stepper.accelerator.scaler is not None and state.progress["scaler"] is not None:
        stepper.accelerator.scaler.load_state_dict(state.progress["scaler"])
    _restore_course(course, state.progress["course"])


def shared(accelerator: Accelerator, state: RunState | None) -> RunState | None:
    """The first process's state on every process, so that only that one needs to see the files."""
    if accelerator.num_processes == 1:
        return state
    outline: list[Any] = [None]
    if state is not None:
        tensors = (state.weights, state.optimizer)
        shapes = [{name: (value.shape, value.dtype) for name, value in part.items()} for part in tensors]
        outline = [(state.step, shapes, dict(state.progress))]
    broadcast_object_list(outline)
    if outline[0] is None:
        return None
    step, shapes, progress = outline[0]
    own = ({}, {}) if state is None else (state.weights, state.optimizer)
    weights, optimizer = (
        {name: _from_first(accelerator, given.get(name), *kind) for name, kind in part.items()}
        for given, part in zip(own, shapes, strict=True)
    )
    return RunState(step=step, weights=weights, optimizer=optimizer, progress=progress)


def _from_first(accelerator: Accelerator, tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    given = torch.empty(shape, dtype=dtype) if tensor is None else tensor.detach()
    received: Tensor = broadcast(given.to(accelerator.device))
    return received.cpu()


def _check_fit(parameters: Mapping[str, Tensor], state: RunState) -> None:
    different = sorted(parameters.keys() ^ state.weights.keys())
    different += [
        name for name in parameters.keys() & state.weights.keys() if parameters[name].shape != state.weights[name].shape
    ]
    if different:
        raise CheckpointError(
            f"ckpt-{state.step} is of another model: {', '.join(different[:5])} differ. "
            "Choose another output folder, or --overwrite to start again"
        )


def _course_to_json(course: TrainerState) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null stands for them."""
    plain = {key: value for key, value in vars(course).items() if key != "task"}
    for name in _METRICS:
        plain[name] = {key: value if math.isfinite(value) else None for key, value in plain[name].items()}
    for name in _RANK:
        plain[name] = plain[name] if math.isfinite(plain[name]) else None
    plain["tuned"] = {name: getattr(course.task, name) for name in course.task.tuned}
    return plain


def _restore_course(course: TrainerState, stored: Mapping[str, Any]) -> None:
    plain = dict(stored)
    tuned = plain.pop("tuned")
    course.task = replace(course.task, **{name: _frozen(value) for name, value in tuned.items()})
    for name in _METRICS:
        plain[name] = {key: math.nan if value is None else value for key, value in plain[name].items()}
    for name, worst in _RANK.items():
        plain[name] = worst if plain[name] is None else plain[name]
    for key, value in plain.items():
        setattr(course, key, value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class ExistingRun:
    """A run that is in the folder already and may be gone on with.

    Attributes:
        changed: settings that differ from its own, each allowed.
        summary: how it ended; None if it did not.
    """

    facts: Mapping[str, Any]
    changed: Sequence[resuming.Change]
    summary: Mapping[str, Any] | None

    @property
    def is_complete(self) -> bool:
        return self.summary is not None and not self.changed


def existing_run(job: Job) -> ExistingRun | None:
    """The run in the folder, if there is one.

    Raises:
        UsageError: it has settings or rows that a run cannot change on its way, or its files are damaged.
    """
    facts = outputs.read_facts(job.output_dir)
    if facts is None:
        return None
    summary = outputs.read_summary(job.output_dir)
    changed = resuming.changes(job.output_dir, facts["settings"], settings(job), finished=summary is not None)
    return ExistingRun(facts=facts, changed=changed, summary=summary)


def open_fresh(job: Job, facts: Mapping[str, Any]) -> None:
    """Makes the folder ready for a new run and writes what it is made of."""
    outputs.clear(job.output_dir)
    _write_origin(job, {**facts, "settings": settings(job)})


def resume(
    job: Job, stepper: TrainContext, course: TrainerState, earlier: ExistingRun, facts: Mapping[str, Any]
) -> list[str]:
    """Takes over the newest checkpoint on every process; the folder is then as it was at that step.

    Sets ``course.step``. Without a checkpoint the run starts again at its beginning.

    Returns:
        What there is to say about it.

    Raises:
        CheckpointError: there are checkpoints and none can be used.
        UsageError: the checkpoint is beyond the end of the run.
    """
    found: list[LoadedCheckpoint] = []

    def prepare() -> list[str]:
        outputs.sweep(job.output_dir)
        newest = checkpointing.newest_checkpoint(_checkpoints(job))
        if newest is None and earlier.summary is not None:
            raise UsageError(
                f"{job.output_dir} holds a finished run without checkpoints, which cannot go on: "
                "choose another folder, or --overwrite to train again"
            )
        step = 0 if newest is None else newest.state.step
        if step > stepper.total_steps:
            raise UsageError(
                f"{job.output_dir} holds {step} steps, more than the {stepper.total_steps} of this run: "
                "raise optim.epochs, choose another folder, or --overwrite to train again"
            )
        found.extend([] if newest is None else [newest])
        return _notes(earlier, newest)

    notes = broadcast_from_main(stepper.accelerator, prepare)
    state = shared(stepper.accelerator, found[0].state if found else None)
    if state is not None:
        take_over(stepper, course, state)
    origin = {**facts, "settings": settings(job)}
    return [*notes, *broadcast_from_main(stepper.accelerator, lambda: _cut_back(job, course, origin, earlier))]


def save(job: Job, stepper: TrainContext, course: TrainerState) -> Path:
    """Writes a checkpoint of the run as it is now.

    Raises:
        CheckpointError: it cannot be written; the ones before it are untouched.
    """
    facts = {
        "epoch": course.step / stepper.epoch_steps,
        "samples": _samples_seen(stepper, course.step),
        "processes": stepper.accelerator.num_processes,
        "seed": stepper.seed,
        "data": outputs.data_facts(job.splits),
        "versions": outputs.environment()["versions"],
    }
    return checkpointing.save_checkpoint(
        _checkpoints(job),
        captured(stepper, course, step=course.step),
        facts=facts,
        best_step=course.best_step,
        keep_last=job.run.keep_last,
    )


def publish(job: Job, course: TrainerState) -> None:
    """Writes the model as it is now, with the task tuned on validation, to ``model/``."""
    plain, job.model.task = job.model.task, course.task
    try:
        job.model.save_pretrained(job.output_dir / outputs.MODEL)
    finally:
        job.model.task = plain


def settings(job: Job) -> dict[str, Any]:
    """All settings of the run, stated and found, flat: those that run.json holds."""
    return {
        **resuming.stated_settings(
            {**job.source, "gradient_checkpointing": job.gradient_checkpointing}, job.optim, job.run
        ),
        **resuming.found_settings(job.model.task, job.model.config, outputs.data_facts(job.splits)),
    }


def _write_origin(job: Job, facts: Mapping[str, Any]) -> None:
    """run.json comes first: without it a folder with other files does not count as a run's."""
    outputs.write_json(job.output_dir / outputs.RUN, facts)
    for name, text in job.provenance.items():
        outputs.write_text(job.output_dir / name, text)
    outputs.write_rejects(job.output_dir, job.splits)


def _cut_back(job: Job, course: TrainerState, facts: Mapping[str, Any], earlier: ExistingRun) -> list[str]:
    """Makes the files those of the step that was taken over; returns what there is to say about it."""
    (job.output_dir / outputs.SUMMARY).unlink(missing_ok=True)
    outputs.cut_events(job.output_dir, course.step, evaluated_step=course.evaluated_step)
    resumed = [*earlier.facts.get("resumed_at", []), course.step]
    changes = [*earlier.facts.get("changes", []), *({"step": course.step, "change": str(it)} for it in earlier.changed)]
    began = {name: earlier.facts[name] for name in ("initial_weights",) if name in earlier.facts}
    _write_origin(job, {**facts, **began, "resumed_at": resumed, "changes": changes})
    return _republish(job, course) if course.best_step else []


def _republish(job: Job, course: TrainerState) -> list[str]:
    """Writes ``model/`` anew from the best checkpoint: what lies there may be from after the step taken over."""
    parameters = dict(job.model.named_parameters())
    try:
        best = checkpointing.read_weights(_checkpoints(job), course.best_step)
    except CheckpointError as error:
        if not is_file(job.output_dir / outputs.MODEL / "config.json"):
            raise
        return [f"NOT USED: {error}. The best model so far stays what lies in {outputs.MODEL}/"]
    now = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(best[name])
        publish(job, course)
        for name, parameter in parameters.items():
            parameter.copy_(now[name])
    return []


def _notes(earlier: ExistingRun, newest: LoadedCheckpoint | None) -> list[str]:
    notes = [f"changed since the run began: {change}" for change in earlier.changed]
    if newest is None:
        return [*notes, "the folder holds a run without a checkpoint: it starts again at its beginning"]
    notes += [f"NOT USED: {reason}" for reason in newest.skipped]
    return [*notes, f"resumed after step {newest.state.step} from {newest.path}"]


def _checkpoints(job: Job) -> Path:
    return job.output_dir / checkpointing.FOLDER


def _samples_seen(stepper: TrainContext, step: int) -> int:
    """Over all epochs."""
    epochs, rest = divmod(step, stepper.epoch_steps)
    return epochs * len(stepper.samples) + sum(len(batch) for batch in stepper.batches(epochs)[:rest])

"""What a checkpoint holds of a run that goes on, and how a fresh process takes it over.

Owns the translation between the living objects (model, optimizer, course) and a ``RunState``. The place in the data
needs no state: the order of samples and the random numbers of a step are functions of seed, epoch and step. Must not
know files.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor

from bert_tasks.errors import CheckpointError
from bert_tasks.training.checkpointing import RunState
from bert_tasks.training.selection import Course
from bert_tasks.training.steps import Stepper

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_METRICS = ("best", "last")
_RANK = {"best_value": -math.inf, "best_loss": math.inf}  # of the best model, and where it has no such number


def captured(stepper: Stepper, course: Course, *, step: int) -> RunState:
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


def take_over(stepper: Stepper, course: Course, state: RunState) -> None:
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


def _course_to_json(course: Course) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null stands for them."""
    plain = {key: value for key, value in vars(course).items() if key != "task"}
    for name in _METRICS:
        plain[name] = {key: value if math.isfinite(value) else None for key, value in plain[name].items()}
    for name in _RANK:
        plain[name] = plain[name] if math.isfinite(plain[name]) else None
    plain["tuned"] = {name: getattr(course.task, name) for name in course.task.tuned}
    return plain


def _restore_course(course: Course, stored: Mapping[str, Any]) -> None:
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

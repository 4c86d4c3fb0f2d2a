"""What a run does with its folder: opens it or goes on with what is there, saves itself and its best model.

Everything here happens on the first process; only ``resume`` involves the others. Must not know how steps are computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.inference import from_first_process
from bert_tasks.paths import is_file
from bert_tasks.training import checkpointing, outputs, resuming
from bert_tasks.training.checkpointing import Found
from bert_tasks.training.job import Job
from bert_tasks.training.run_state import captured, shared, take_over
from bert_tasks.training.selection import Course
from bert_tasks.training.steps import Stepper


@dataclass(frozen=True, kw_only=True)
class Earlier:
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


def earlier_run(job: Job) -> Earlier | None:
    """The run in the folder, if there is one.

    Raises:
        UsageError: it has settings or rows that a run cannot change on its way, or its files are damaged.
    """
    facts = outputs.read_facts(job.output_dir)
    if facts is None:
        return None
    summary = outputs.read_summary(job.output_dir)
    changed = resuming.changes(job.output_dir, facts["settings"], settings(job), finished=summary is not None)
    return Earlier(facts=facts, changed=changed, summary=summary)


def open_fresh(job: Job, facts: Mapping[str, Any]) -> None:
    """Makes the folder ready for a new run and writes what it is made of."""
    outputs.clear(job.output_dir)
    _write_origin(job, {**facts, "settings": settings(job)})


def resume(job: Job, stepper: Stepper, course: Course, earlier: Earlier, facts: Mapping[str, Any]) -> list[str]:
    """Takes over the newest checkpoint on every process; the folder is then as it was at that step.

    Sets ``course.step``. Without a checkpoint the run starts again at its beginning.

    Returns:
        What there is to say about it.

    Raises:
        CheckpointError: there are checkpoints and none can be used.
        UsageError: the checkpoint is beyond the end of the run.
    """
    found: list[Found] = []

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

    notes = from_first_process(stepper.accelerator, prepare)
    state = shared(stepper.accelerator, found[0].state if found else None)
    if state is not None:
        take_over(stepper, course, state)
    origin = {**facts, "settings": settings(job)}
    return [*notes, *from_first_process(stepper.accelerator, lambda: _cut_back(job, course, origin, earlier))]


def save(job: Job, stepper: Stepper, course: Course) -> Path:
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


def publish(job: Job, course: Course) -> None:
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


def _cut_back(job: Job, course: Course, facts: Mapping[str, Any], earlier: Earlier) -> list[str]:
    """Makes the files those of the step that was taken over; returns what there is to say about it."""
    (job.output_dir / outputs.SUMMARY).unlink(missing_ok=True)
    outputs.cut_events(job.output_dir, course.step, evaluated_step=course.evaluated_step)
    resumed = [*earlier.facts.get("resumed_at", []), course.step]
    changes = [*earlier.facts.get("changes", []), *({"step": course.step, "change": str(it)} for it in earlier.changed)]
    began = {name: earlier.facts[name] for name in ("initial_weights",) if name in earlier.facts}
    _write_origin(job, {**facts, **began, "resumed_at": resumed, "changes": changes})
    return _republish(job, course) if course.best_step else []


def _republish(job: Job, course: Course) -> list[str]:
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


def _notes(earlier: Earlier, newest: Found | None) -> list[str]:
    notes = [f"changed since the run began: {change}" for change in earlier.changed]
    if newest is None:
        return [*notes, "the folder holds a run without a checkpoint: it starts again at its beginning"]
    notes += [f"NOT USED: {reason}" for reason in newest.skipped]
    return [*notes, f"resumed after step {newest.state.step} from {newest.path}"]


def _checkpoints(job: Job) -> Path:
    return job.output_dir / checkpointing.FOLDER


def _samples_seen(stepper: Stepper, step: int) -> int:
    """Over all epochs."""
    epochs, rest = divmod(step, stepper.epoch_steps)
    return epochs * len(stepper.samples) + sum(len(batch) for batch in stepper.batches(epochs)[:rest])

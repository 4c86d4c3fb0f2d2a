"""A polite end: SIGTERM or SIGINT asks the run to save and stop after the step; a second one stops it at once.

Owns the signal handlers of a run. Must not know what is saved, or how processes agree.

The training loop.

The main path of the package: prepare data and optimizer, begin or go on with the run in the folder, then for every
optimizer step accumulate gradients, check the step before, update; evaluate after each epoch or every ``eval_steps``;
save the run and the best model.

Must not know recipes' files (run.py turns a recipe into a call of ``run_job``), how a step is computed (steps.py),
which model is the best (selection.py) or what is on the disk (run_folder.py).
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from accelerate import Accelerator
from accelerate.utils import broadcast

from bert_tasks.data.features import Samples
from bert_tasks.data.splits import Splits
from bert_tasks.errors import CheckpointError, DivergedError, GivenUpError, StoppedError, UsageError
from bert_tasks.inference import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.metrics.tables import check_set_names
from bert_tasks.model.inputs import tokenized
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.run_dir import files as outputs
from bert_tasks.storage import locked
from bert_tasks.training import state as run_folder
from bert_tasks.training.evaluation import (
    TrainerState,
    Validation,
    check_metric,
    chosen_set,
    evaluate_all,
    overall_metrics,
    rank_of,
)
from bert_tasks.training.job import FitResult, Job
from bert_tasks.training.metadata import check_agreement, collapse_notes, log_run_summary, run_metadata, tracker_config
from bert_tasks.training.optim import build_optimizer, freeze, parameter_groups
from bert_tasks.training.progress import Clock, MetricsLogger, make_reporter
from bert_tasks.training.sampling import total_steps
from bert_tasks.training.state import ExistingRun
from bert_tasks.training.step import StepResult, TrainContext, accumulate, read_step_metrics, update
from bert_tasks.training.tracking import Trackers

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While the context is open, signals are remembered instead of ending the process.

    Only in the main thread, which alone may handle signals; elsewhere signals do what they did before.

    Attributes:
        received: the signal that asked to stop; None if none did.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)


def run_job(job: Job, *, overwrite: bool = False, progress: bool = True) -> FitResult:
    """Trains what ``fit`` or a recipe has prepared.

    Raises:
        DataError, UsageError, CheckpointError, DivergedError, StoppedError: as ``fit`` in runs.py.
    """
    accelerator = make_accelerator(job.optim.mixed_precision)
    broadcast_from_main(accelerator, lambda: outputs.check_folder(job.output_dir))
    model = job.model
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _locked(job, accelerator):
        try:
            check_agreement(job, accelerator)
            preflight(model, job.splits, job.optim, job.run, accelerator)
            earlier = None if overwrite else broadcast_from_main(accelerator, lambda: run_folder.existing_run(job))
            if earlier is not None and earlier.summary is not None and earlier.is_complete:
                return _complete(job, accelerator, earlier.summary)
            samples, validation = main_process_first(accelerator, lambda: _features(job))
            stepper = _stepper(job, samples, accelerator)
            with closing(_journal(job, stepper, progress=progress)) as journal, StopSignals() as signals:
                course = _begin(job, stepper, earlier, journal)
                _train(job, stepper, course, validation, journal, signals)
                result = _finish(job, stepper, course)
                for note in result.notes:
                    journal.note(f"note: {note}")
                return result
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            model.zero_grad(set_to_none=True)
            model.stack.gradient_checkpointing = False
            accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()


@contextmanager
def _locked(job: Job, accelerator: Accelerator) -> Iterator[None]:
    """The first process holds the folder for all of them."""
    with ExitStack() as stack:
        broadcast_from_main(accelerator, lambda: stack.enter_context(locked(job.output_dir)))
        yield


def preflight(model: TaskModel, splits: Splits, optim: OptimSection, run: RunSection, accelerator: Accelerator) -> None:
    """What only the data and the model together can tell: data-dependent settings, freezing, the metric's name.

    Raises:
        DataError, UsageError: what would stop the run later.
    """
    if not splits.validation:
        raise UsageError("validation: expected at least one set of rows")
    check_set_names(splits.validation)
    model.task = model.task.unfitted().fitted_to(splits.train)
    freeze(model, embeddings=optim.freeze_embeddings, layers=optim.freeze_layers)
    check_metric(model, run, splits.validation, accelerator)


def _features(job: Job) -> tuple[Samples, Validation]:
    model, task = job.model, job.model.task
    validation = {name: (tokenized(table, task, model), table) for name, table in job.splits.validation.items()}
    return tokenized(job.splits.train, task, model), validation


def _stepper(job: Job, samples: Samples, accelerator: Accelerator) -> TrainContext:
    model, optim = job.model, job.optim
    model.to(accelerator.device)
    model.train()
    model.zero_grad(set_to_none=True)
    model.stack.gradient_checkpointing = job.gradient_checkpointing
    groups = parameter_groups(
        model,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        head_learning_rate=optim.head_learning_rate,
        layerwise_lr_decay=optim.layerwise_lr_decay,
    )
    optimizer = build_optimizer(groups, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_epsilon, fused=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    return TrainContext(
        accelerator=accelerator,
        model=model,
        prepared=prepared,
        optimizer=optimizer,
        rates=tuple(group["lr"] for group in groups),
        samples=samples,
        optim=optim,
        seed=job.run.seed,
        total_steps=total_steps(len(samples), optim.batch_size, optim.epochs),
    )


def _journal(job: Job, stepper: TrainContext, *, progress: bool) -> MetricsLogger:
    first = stepper.accelerator.is_main_process
    reporter = make_reporter(
        total_steps=stepper.total_steps, logging_steps=job.run.logging_steps, visible=progress and first
    )
    names, project = job.run.trackers if first else (), job.run.project
    trackers = Trackers(names, project=project, folder=job.output_dir, silent=not progress)
    callback = job.callback if first else None
    return MetricsLogger(folder=job.output_dir, reporter=reporter, trackers=trackers, callback=callback)


def _begin(job: Job, stepper: TrainContext, earlier: ExistingRun | None, journal: MetricsLogger) -> TrainerState:
    """The course of a new run, or of the one in the folder as far as its newest checkpoint.

    Raises:
        UsageError: a tracker cannot start, and no step is done yet.
    """
    course, accelerator = TrainerState(task=job.model.task), stepper.accelerator
    facts, changed = run_metadata(job, stepper), earlier is not None and bool(earlier.changed)
    log_run_summary(job, stepper, journal)
    if earlier is not None:
        for note in run_folder.resume(job, stepper, course, earlier, facts):
            journal.note(note)
        course.update_early_stopping(job.run.early_stopping_patience)
    else:
        broadcast_from_main(accelerator, lambda: run_folder.open_fresh(job, facts))
    config = tracker_config(facts, run_folder.settings(job))
    broadcast_from_main(accelerator, lambda: journal.trackers.start(config, step=course.step, changed=changed))
    return course


def _train(
    job: Job,
    stepper: TrainContext,
    course: TrainerState,
    validation: Validation,
    journal: MetricsLogger,
    signals: StopSignals,
) -> None:
    """Steps, evaluations and checkpoints from ``course.step`` to the end.

    Raises:
        StoppedError: a signal asked for it; the run is saved.
    """
    if course.step and _evaluation_is_due(job, stepper, course.step) and course.evaluated_step != course.step:
        _evaluate(job, stepper, course, validation, journal, signals)
    pending, clock = None, Clock()
    for step, batch in _plan(stepper, first=course.step):
        if course.stopped:
            break
        sums = accumulate(stepper, step, batch)
        clock.tokens += int(stepper.samples.lengths[batch].sum())
        if pending is not None and _settle(job, stepper, course, pending, journal, clock):
            stepper.optimizer.zero_grad(set_to_none=True)
            course.seconds += clock.seconds
            _save(job, stepper, course)
            _stop(job, stepper, course, signals)
        asked = signals.received is not None
        pending = update(stepper, step, batch, sums, stop=asked)
        course.step = step + 1
        evaluating = _evaluation_is_due(job, stepper, course.step)
        alone = stepper.accelerator.num_processes == 1  # nobody else's answer to wait for
        if evaluating or _is_multiple(course.step, job.run.save_steps) or (asked and alone):
            stopping = _settle(job, stepper, course, pending, journal, clock)
            course.seconds += clock.seconds
            if evaluating:
                _evaluate(job, stepper, course, validation, journal, signals)
            else:
                _save(job, stepper, course)
            if stopping and not course.stopped and course.step < stepper.total_steps:
                _stop(job, stepper, course, signals)
            pending, clock = None, Clock()


def _evaluation_is_due(job: Job, stepper: TrainContext, done: int) -> bool:
    every = job.run.eval_steps
    return _is_multiple(done, stepper.epoch_steps if every is None else every) or done == stepper.total_steps


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _plan(stepper: TrainContext, *, first: int) -> Iterator[tuple[int, list[int]]]:
    """(step, samples) of the run from its step ``first`` on."""
    for epoch in range(first // stepper.epoch_steps, stepper.optim.epochs):
        start = epoch * stepper.epoch_steps
        yield from ((step, batch) for step, batch in enumerate(stepper.batches(epoch), start) if step >= first)


def _stop(job: Job, stepper: TrainContext, course: TrainerState, signals: StopSignals) -> NoReturn:
    """Ends a run that is saved."""
    received = signal.SIGTERM if signals.received is None else signals.received
    raise StoppedError(
        f"stopped by {received.name} after step {course.step} of {stepper.total_steps}; the run is saved in "
        f"{job.output_dir}, and the same command goes on with it",
        signal_number=received,
    )


def _save(job: Job, stepper: TrainContext, course: TrainerState) -> None:
    broadcast_from_main(stepper.accelerator, lambda: run_folder.save(job, stepper, course).name)


def _settle(
    job: Job, stepper: TrainContext, course: TrainerState, result: StepResult, journal: MetricsLogger, clock: Clock
) -> bool:
    """Takes in a step's numbers; True if a process was asked to stop."""
    precision, rows_of = stepper.optim.mixed_precision, stepper.samples.rows
    try:
        log, course.overflows = read_step_metrics(
            result, overflows=course.overflows, mixed_precision=precision, rows_of=rows_of
        )
    except DivergedError:
        if stepper.accelerator.is_main_process:
            rows = [row + 1 for row in rows_of(result.batch)]
            with suppress(CheckpointError):  # that it diverged is the message
                journal.record({"event": "diverged", **result.numbers(), "rows": rows})
        raise
    epoch, speed = log.step // stepper.epoch_steps, clock.tokens_per_second
    journal.reporter.step(log, epoch=epoch, tokens_per_second=speed)
    last = log.step + 1 == stepper.total_steps
    if stepper.accelerator.is_main_process and (_is_multiple(log.step + 1, job.run.logging_steps) or last):
        event = {"event": "step", "step": log.step + 1, "epoch": epoch + 1, "loss": log.loss}
        rates = {"learning_rate": log.learning_rate, "grad_norm": log.grad_norm}
        record = {**event, **rates, "tokens_per_second": round(speed, 1)}
        journal.record(record)
        journal.call_back(record)
    return log.stop


def _evaluate(
    job: Job,
    stepper: TrainContext,
    course: TrainerState,
    validation: Validation,
    journal: MetricsLogger,
    signals: StopSignals,
) -> None:
    """Evaluates all validation sets and saves; a better model goes to disk once its checkpoint is there.

    Raises:
        StoppedError: a signal came meanwhile. The run is saved, and will begin with this evaluation.
    """
    model, accelerator = stepper.model, stepper.accelerator
    try:
        found = evaluate_all(model, validation, accelerator, stop=lambda: signals.received is not None)
    except GivenUpError:
        _save(job, stepper, course)
        _stop(job, stepper, course, signals)
    metrics, sets = found.metrics, list(validation)
    collapse = found.collapses[chosen_set(model.task, job.run, sets)]
    patience = job.run.early_stopping_patience
    rank = rank_of(metrics, model.task, job.run, sets)
    best = course.add(metrics, rank, task=found.task, collapse=collapse, patience=patience)
    epoch = (course.step - 1) // stepper.epoch_steps
    event = {"event": "evaluation", "step": course.step, "epoch": epoch + 1, "metrics": metrics}
    broadcast_from_main(accelerator, lambda: journal.record(event))
    _save(job, stepper, course)
    if best:
        broadcast_from_main(accelerator, lambda: run_folder.publish(job, course))
    asked = broadcast_from_main(accelerator, lambda: journal.call_back(event))
    journal.reporter.evaluation(course.step, overall_metrics(metrics, found.task, sets), best=best)
    if course.stopped:
        journal.note(f"no better model in {course.since_best} evaluations: stopped early")
    elif asked:
        course.stopped = True
        journal.note("the callback asked to stop")
    model.train()


def _complete(job: Job, accelerator: Accelerator, summary: Mapping[str, Any]) -> FitResult:
    """The result of a run that was finished before, with its model and the task tuned with it."""
    folder, kind = job.output_dir / outputs.MODEL, type(job.model.task)
    job.model.task = broadcast_from_main(accelerator, lambda: TaskModel.from_pretrained(folder, task=kind).task)
    _take_best(job, accelerator)
    return FitResult.from_summary(
        summary, output_dir=job.output_dir, task=job.model.task, validation_sets=tuple(job.splits.validation)
    )


def _finish(job: Job, stepper: TrainContext, course: TrainerState) -> FitResult:
    """Puts the best weights into the model and writes the summary, which makes the run a finished one."""
    accelerator = stepper.accelerator
    _take_best(job, accelerator)
    job.model.task = course.task
    result = FitResult(
        metrics=course.best,
        last_metrics=course.last,
        best_step=course.best_step,
        steps=course.step,
        stopped_early=course.stopped,
        train_seconds=round(course.seconds, 3),
        output_dir=job.output_dir,
        task=course.task,
        validation_sets=tuple(job.splits.validation),
        collapse=course.best_collapse,
        notes=collapse_notes(course, job),
    )
    broadcast_from_main(accelerator, lambda: outputs.write_json(job.output_dir / outputs.SUMMARY, result.summary()))
    return result


def _take_best(job: Job, accelerator: Accelerator) -> None:
    """The weights of ``model/``, which only the first process needs to see."""
    broadcast_from_main(accelerator, lambda: job.model.restore(job.output_dir / outputs.MODEL))
    if accelerator.num_processes > 1:
        for parameter in job.model.parameters():
            broadcast(parameter.data)

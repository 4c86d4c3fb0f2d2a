"""``fit``: the training loop.

The main path of the package: prepare data and optimizer, then for every optimizer step accumulate gradients, check the
step before, update; evaluate after each epoch or every ``eval_steps``; keep the best model on disk.

Must not know recipes' files (run.py turns a recipe into a call of ``run_job``), how a step is computed (steps.py) or
which model is the best (selection.py).
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator

from bert_tasks.data.batching import Samples, truncated_rows
from bert_tasks.data.checks import check_splits
from bert_tasks.data.splits import Splits
from bert_tasks.encoder.attention import attention_backend
from bert_tasks.errors import UsageError
from bert_tasks.inference import Data, first_process_first, load_table, make_accelerator, tokenized
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe import OptimSection, RunSection, sections
from bert_tasks.training import outputs
from bert_tasks.training.optim import build_optimizer, freeze, parameter_groups
from bert_tasks.training.progress import Reporter, make_reporter
from bert_tasks.training.sampling import epoch_batches, total_steps
from bert_tasks.training.selection import Course, Validation, check_metric, evaluate_all, value_of
from bert_tasks.training.steps import Stepper, StepResult, accumulate, settle, update

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run ended with; the same as in ``metrics.json``.

    Attributes:
        metrics: of the best model on the validation rows; ``last_metrics``: of the last evaluation.
        best_step, steps: optimizer steps until the best model, and in all.
        train_seconds: without evaluation and saving.
        reused: the run was complete already; nothing was trained.
    """

    metrics: dict[str, float]
    last_metrics: dict[str, float]
    best_step: int
    steps: int
    stopped_early: bool
    train_seconds: float
    output_dir: Path
    reused: bool = False

    def summary(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        return {key: value for key, value in vars(self).items() if key not in ("output_dir", "reused")}

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any], folder: Path) -> Self:
        """The result of a finished run; JSON's null is a metric that is not a number."""
        values = dict(summary)
        for name in ("metrics", "last_metrics"):
            values[name] = {key: math.nan if value is None else value for key, value in summary[name].items()}
        return cls(**values, output_dir=folder, reused=True)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs, loaded and checked. ``provenance``: file name -> text, written into the output folder."""

    model: TaskModel
    splits: Splits
    optim: OptimSection
    run: RunSection
    output_dir: Path
    gradient_checkpointing: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict)


def fit(
    model: TaskModel,
    train: Data,
    validation: Data | Mapping[str, Data],
    *,
    output_dir: str | Path,
    overwrite: bool = False,
    progress: bool = True,
    gradient_checkpointing: bool = False,
    **settings: Any,
) -> FitResult:
    """Fine-tunes a model; afterwards it holds the best weights, which ``output_dir/model`` holds too.

    Args:
        model: with a task; its task's data-dependent settings (balanced weights, thresholds) are set here.
        train, validation: files or rows with the task's columns; several validation sets by name.
        overwrite: replace an earlier run in ``output_dir``.
        gradient_checkpointing: compute layers twice to save memory.
        settings: fields of a recipe's ``[optim]`` (learning_rate, epochs, batch_size, ...) and ``[run]`` (seed,
            eval_steps, early_stopping_patience, metric_for_best_model, logging_steps).

    Raises:
        RecipeError: an unknown or impossible setting.
        DataError: rows that cannot be used, all of them named.
        UsageError: the output folder is in use, or the launcher does not fit.
        DivergedError: a loss or gradient was not finite.
    """
    optim, run = sections(**settings)
    sets = validation if isinstance(validation, Mapping) else {"": validation}
    accelerator = make_accelerator(optim.mixed_precision)

    def load() -> Splits:
        rows = load_table(train, model.task, name="train")
        tables = {key: load_table(data, model.task, name=f"validation {key}".strip()) for key, data in sets.items()}
        splits = Splits(train=rows, validation=tables)
        check_splits(splits, columns=model.task.columns, labels=model.task.labels)
        return splits

    job = Job(
        model=model,
        splits=first_process_first(accelerator, load),
        optim=optim,
        run=run,
        output_dir=Path(output_dir),
        gradient_checkpointing=gradient_checkpointing,
    )
    return run_job(job, overwrite=overwrite, progress=progress)


def run_job(job: Job, *, overwrite: bool = False, progress: bool = True) -> FitResult:
    """Trains what ``fit`` or a recipe has prepared; see ``fit``."""
    accelerator = make_accelerator(job.optim.mixed_precision)
    outputs.check_folder(job.output_dir, overwrite=overwrite)
    accelerator.wait_for_everyone()
    model = job.model
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        rehearse(model, job.splits, job.optim, job.run, accelerator)
        samples, validation = first_process_first(accelerator, lambda: _features(job))
        stepper = _stepper(job, samples, accelerator)
        if accelerator.is_main_process:
            _open(job, stepper)
        accelerator.wait_for_everyone()
        reporter = make_reporter(
            total_steps=stepper.total_steps,
            logging_steps=job.run.logging_steps,
            visible=progress and accelerator.is_main_process,
        )
        with closing(reporter):
            return _train(job, stepper, validation, reporter)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        model.zero_grad(set_to_none=True)
        model.stack.gradient_checkpointing = False
        accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()


def rehearse(model: TaskModel, splits: Splits, optim: OptimSection, run: RunSection, accelerator: Accelerator) -> None:
    """What only the data and the model together can tell: data-dependent settings, freezing, the metric's name.

    Raises:
        DataError, UsageError: what would stop the run later.
    """
    if not splits.validation:
        raise UsageError("validation: expected at least one set of rows")
    model.task = model.task.fitted_to(splits.train)
    freeze(model, embeddings=optim.freeze_embeddings, layers=optim.freeze_layers)
    check_metric(model, run, splits.validation, accelerator)


def _features(job: Job) -> tuple[Samples, Validation]:
    model, task = job.model, job.model.task
    validation = {name: (tokenized(table, task, model), table) for name, table in job.splits.validation.items()}
    return tokenized(job.splits.train, task, model), validation


def _stepper(job: Job, samples: Samples, accelerator: Accelerator) -> Stepper:
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
    return Stepper(
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


def _open(job: Job, stepper: Stepper) -> None:
    """Makes the output folder and writes what the run is made of."""
    outputs.open_folder(job.output_dir)
    task = job.model.task
    facts = {
        **outputs.environment(),
        "seed": job.run.seed,
        "processes": stepper.accelerator.num_processes,
        "device": stepper.accelerator.device.type,
        "attention": _attention(job, stepper.accelerator),
        "task": task.name,
        "labels": list(task.labels),
        "data": outputs.data_facts(job.splits),
        "rows": len(job.splits.train),
        "steps": stepper.total_steps,
    }
    for name, text in job.provenance.items():
        (job.output_dir / name).write_text(text, encoding="utf-8")
    outputs.write_json(job.output_dir / outputs.RUN, facts)


def _attention(job: Job, accelerator: Accelerator) -> str:
    """The kernel that training will use, for the log: the choice never changes the mathematics."""
    config = job.model.config
    return attention_backend(
        device=accelerator.device,
        dtype=_DTYPES[job.optim.mixed_precision],
        head_size=config.head_size,
        dropout=config.attention_probs_dropout_prob,
    )


def _train(job: Job, stepper: Stepper, validation: Validation, reporter: Reporter) -> FitResult:
    course, pending = Course(task=job.model.task), None
    _announce(job, stepper, reporter)
    done, mark, tokens = 0, time.perf_counter(), 0
    for step, epoch, batch, epoch_ends in _plan(stepper):
        sums = accumulate(stepper, step, batch)
        if pending is not None:
            _settle(job, stepper, course, pending, reporter, epoch=epoch, speed=tokens / (time.perf_counter() - mark))
        pending = update(stepper, step, batch, sums)
        tokens += int(stepper.samples.lengths[batch].sum())
        done = step + 1
        if _evaluation_is_due(job, done, epoch_ends=epoch_ends, last=done == stepper.total_steps):
            _settle(job, stepper, course, pending, reporter, epoch=epoch, speed=tokens / (time.perf_counter() - mark))
            pending = None
            course.seconds += time.perf_counter() - mark
            _evaluate(job, stepper, course, validation, reporter, step=done, epoch=epoch)
            mark, tokens = time.perf_counter(), 0
            if course.stopped:
                break
    return _finish(job, stepper, course, steps=done)


def _evaluation_is_due(job: Job, done: int, *, epoch_ends: bool, last: bool) -> bool:
    every = job.run.eval_steps
    return epoch_ends if every is None else last or done % every == 0


def _plan(stepper: Stepper) -> Iterator[tuple[int, int, list[int], bool]]:
    """(step, epoch, samples, whether the epoch ends) of the whole run."""
    step = 0
    for epoch in range(stepper.optim.epochs):
        batches = epoch_batches(
            stepper.samples.lengths, batch_size=stepper.optim.batch_size, seed=stepper.seed, epoch=epoch
        )
        for position, batch in enumerate(batches):
            yield step, epoch, batch, position == len(batches) - 1
            step += 1


def _announce(job: Job, stepper: Stepper, reporter: Reporter) -> None:
    accelerator = stepper.accelerator
    reporter.note(
        f"{accelerator.num_processes} x {accelerator.device.type}, attention {_attention(job, accelerator)}, "
        f"mixed precision {job.optim.mixed_precision}"
    )
    report = job.model.load_report
    if report is not None:
        reporter.note(report.summary())
    tables = {"train": job.splits.train} | {
        f"validation {name}".strip(): t for name, t in job.splits.validation.items()
    }
    for name, table in tables.items():
        for note in table.notes:
            reporter.note(f"{name}: {note}")
    cut = truncated_rows(stepper.samples.features)
    if cut:
        reporter.note(f"{cut} of {len(job.splits.train)} training rows are too long for max_length and were cut")


def _settle(
    job: Job, stepper: Stepper, course: Course, result: StepResult, reporter: Reporter, *, epoch: int, speed: float
) -> None:
    log, course.overflows = settle(result, overflows=course.overflows, mixed_precision=stepper.optim.mixed_precision)
    reporter.step(log, epoch=epoch, tokens_per_second=speed)
    last = log.step + 1 == stepper.total_steps
    if stepper.accelerator.is_main_process and ((log.step + 1) % job.run.logging_steps == 0 or last):
        event = {"event": "step", "step": log.step + 1, "epoch": epoch + 1, "loss": log.loss}
        rates = {"learning_rate": log.learning_rate, "grad_norm": log.grad_norm}
        outputs.append_event(job.output_dir, {**event, **rates, "tokens_per_second": round(speed, 1)})


def _evaluate(
    job: Job,
    stepper: Stepper,
    course: Course,
    validation: Validation,
    reporter: Reporter,
    *,
    step: int,
    epoch: int,
) -> None:
    """Evaluates all validation sets; a better model goes to disk."""
    model, accelerator = stepper.model, stepper.accelerator
    plain = model.task
    metrics, tuned = evaluate_all(model, validation, accelerator)
    value = value_of(metrics, plain, job.run, validation)
    best = course.add(metrics, value, step=step, task=tuned, patience=job.run.early_stopping_patience)
    if accelerator.is_main_process:
        event = {"event": "evaluation", "step": step, "epoch": epoch + 1, "metrics": metrics}
        outputs.append_event(job.output_dir, event)
        if best:
            model.task = tuned
            model.save_pretrained(job.output_dir / outputs.MODEL)
            model.task = plain
    reporter.evaluation(step, metrics, best=best)
    if course.stopped:
        reporter.note(f"no better model in {course.since_best} evaluations: stopped early")
    model.train()
    accelerator.wait_for_everyone()


def _finish(job: Job, stepper: Stepper, course: Course, *, steps: int) -> FitResult:
    """Puts the best weights into the model and writes the summary, which makes the run a finished one."""
    model, accelerator = stepper.model, stepper.accelerator
    accelerator.wait_for_everyone()
    model.restore(job.output_dir / outputs.MODEL)
    model.task = course.task
    result = FitResult(
        metrics=course.best,
        last_metrics=course.last,
        best_step=course.best_step,
        steps=steps,
        stopped_early=course.stopped,
        train_seconds=round(course.seconds, 3),
        output_dir=job.output_dir,
    )
    if accelerator.is_main_process:
        outputs.write_json(job.output_dir / outputs.SUMMARY, result.summary())
    accelerator.wait_for_everyone()
    return result

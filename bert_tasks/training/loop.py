"""The training loop: ``Trainer`` holds everything that a run consists of, and ``Trainer.train`` is the run.

Owns the order of things: check, begin or resume the run in its folder, then for each optimizer step accumulate
gradients, read the numbers of the step before, update; evaluate after each epoch or every ``eval_steps``; save
checkpoints and the best model. How a step is computed is in step.py, what is written into the folder in state.py.
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast
from torch import nn

from bert_tasks.data.checks import named_splits
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import tokenizer_content
from bert_tasks.distributed import (
    StopSignals,
    broadcast_from_main,
    check_agreement,
    cpu_use,
    main_process_first,
    make_accelerator,
    stop_signals,
    thread_hint,
)
from bert_tasks.encoder.attention import attention_backend
from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.errors import CheckpointError, DivergedError, GivenUpError, StoppedError, UsageError
from bert_tasks.metrics.tables import SEPARATOR, metric_key, metrics_by_set, split_key
from bert_tasks.model.inputs import input_notes, tokenized
from bert_tasks.model.pretrained import CheckpointFolder, folder_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.storage import locked
from bert_tasks.training import files as outputs
from bert_tasks.training.checkpoints import LoadedCheckpoint, save_checkpoint
from bert_tasks.training.evaluation import Validation, check_metric, evaluate_all, metric_metadata, rank_of
from bert_tasks.training.objectives import Objective, Supervised, weights_digest
from bert_tasks.training.progress import Callback, Clock, MetricsLogger, Reporter, make_reporter
from bert_tasks.training.state import (
    ExistingRun,
    FitResult,
    RunFolder,
    TrainerState,
    broadcast_state,
    load_state,
    state_dict,
)
from bert_tasks.training.step import (
    OptimizerSteps,
    StepResult,
    count_trained,
    freeze,
    freeze_encoder,
    read_step_metrics,
    set_sparse_gradients,
)

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Machines may store the weights in different places; DDP sends those of the main process.
_OWN_TO_PROCESS = ("model.name", "model.revision", "teacher.name", "teacher.revision")


class Trainer:
    """A run: model, data, optimizer, state and logger.

    Attributes:
        objective: what is minimised; its ``model`` is evaluated and saved.
        validation: the tokenised rows of each validation set.
        steps: computes optimizer steps over the tokenised training rows.
        state: the progress of the run.
        logger: where the records of the run go; ``reporter``: where people see them.
        signals: the signal that asked to stop, if there was one.
        clock: time and tokens since the last evaluation or checkpoint.
    """

    validation: Validation
    steps: OptimizerSteps
    logger: MetricsLogger
    reporter: Reporter
    signals: StopSignals

    def __init__(
        self,
        *,
        model: TaskModel,
        splits: Splits,
        optim: OptimSection,
        run: RunSection,
        model_settings: Mapping[str, Any] = MappingProxyType({}),
        recipe_text: str | None = None,
        callback: Callback | None = None,
        objective: Objective | None = None,
    ) -> None:
        """Stores what a run is made of; nothing is read or written yet.

        Args:
            model: with a task; afterwards it holds the best weights.
            splits: the checked rows.
            optim, run: the sections of a recipe; ``run.output_dir`` is the folder of the run.
            model_settings: the recipe's ``[model]``: name, revision, gradient_checkpointing, as far as they are known.
            recipe_text: the resolved recipe, which is written into the folder.
            callback: called with each record of metrics.jsonl.
            objective: default: ``Supervised(model)``.
        """
        self.model, self.splits, self.optim, self.run = model, splits, optim, run
        self.model_settings, self.recipe_text, self.callback = model_settings, recipe_text, callback
        self.objective = Supervised(model) if objective is None else objective
        self.output_dir = Path(str(run.output_dir))
        self.accelerator = make_accelerator(optim.mixed_precision)
        self.state = TrainerState(task=model.task)
        self.clock = Clock()

    def train(self, *, overwrite: bool = False, progress: bool = True) -> FitResult:
        """Trains, or resumes the run in the folder; the result of a finished run is only reported.

        The numbers of a step are read while the device computes the next one.

        Args:
            overwrite: replace a run that is in the folder.
            progress: report on standard error.

        Raises:
            DataError, UsageError, CheckpointError, DivergedError, StoppedError: see ``fit``.
        """
        broadcast_from_main(self.accelerator, lambda: outputs.check_folder(self.output_dir))
        trainable = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        with ExitStack() as stack:
            # The main process holds the folder for all of them.
            broadcast_from_main(self.accelerator, lambda: stack.enter_context(locked(self.output_dir)))
            stack.callback(self._release_model, trainable)
            if self.accelerator.num_processes > 1:
                self._check_agreement()
            self.preflight()
            existing = None if overwrite else broadcast_from_main(self.accelerator, self.folder.existing_run)
            if existing is not None and existing.summary is not None and not existing.changed:
                return self._reuse(existing.summary)
            self._begin(existing, stack, progress=progress)
            state, steps = self.state, self.steps
            if state.step and self._evaluation_is_due() and state.evaluated_step != state.step:
                self._evaluate()  # the run was stopped during this evaluation
            pending, self.clock = None, Clock()
            for step, batch in steps.batches(state.step):
                if state.stopped:
                    break
                sums = steps.accumulate(step, batch)
                self.clock.tokens += int(steps.samples.lengths[batch].sum())
                # The step before is read only now, while the device computes this one.
                if pending is not None and self._log_step(pending):  # a process was asked to stop before this step
                    steps.optimizer.zero_grad(set_to_none=True)
                    state.seconds += self.clock.seconds
                    self._save()
                    self._stop()
                asked = self.signals.received is not None
                pending = steps.update(step, batch, sums, stop=asked)
                state.step = step + 1
                evaluating = self._evaluation_is_due()
                alone = self.accelerator.num_processes == 1  # no other process has to learn of the signal first
                if evaluating or _is_multiple(state.step, self.run.save_steps) or (asked and alone):
                    stopping = self._log_step(pending)
                    state.seconds += self.clock.seconds
                    if evaluating:
                        self._evaluate()
                    else:
                        self._save()
                    if stopping and not state.stopped and state.step < steps.total_steps:
                        self._stop()
                    pending, self.clock = None, Clock()
            return self._finish()

    def preflight(self) -> None:
        """Fits the task to the training rows, freezes parameters, and checks what only data and model can tell.

        Checked are the names of the validation sets, the layers to freeze, and the metric that picks the best model.

        Raises:
            DataError, UsageError: what would stop the run later.
        """
        model, validation = self.model, self.splits.validation
        if not validation:
            raise UsageError("validation: expected at least one set of rows")
        ambiguous = next((name for name in validation if SEPARATOR in name), None)
        if ambiguous is not None:
            raise UsageError(f"validation set {ambiguous!r}: a name without {SEPARATOR!r} was expected; rename the set")
        if len(validation) > 1 and "" in validation:
            raise UsageError(f"{len(validation)} validation sets, one of them without a name: name each of them")
        for name, table in named_splits(self.splits):
            model.task.check_split(table, f"{name} ({table.source})")
        # Nothing may be left of the data that an earlier run was fitted to.
        model.task = model.task.drop_fitted_values().fit_to_train(self.splits.train)
        if self.optim.lora_rank is not None:
            freeze_encoder(self.objective, self.optim)
        freeze(model, embeddings=self.optim.freeze_embeddings, layers=self.optim.freeze_layers)
        if self.run.metric_for_best_model is not None:
            check_metric(model, self.run.metric_for_best_model, validation, self.accelerator, self.objective.run)

    @cached_property
    def folder(self) -> RunFolder:
        """What the main process writes, with all settings of the run: the recipe's and those of model and data."""
        task, data = self.model.task, outputs.data_metadata(self.splits)
        settings = outputs.flat_settings(
            {"gradient_checkpointing": False, **self.model_settings},
            self.optim,
            self.run,
            settings={**task.settings(), "labels": list(task.labels)},
            encoder=vars(self.model.config),
            data={name: split["fingerprint"] for name, split in data.items()},
            **self.objective.settings,
        )
        settings["task"] = type(task).__name__
        if not isinstance(self.objective, Supervised):
            settings["objective"] = type(self.objective).__name__
        return RunFolder(
            path=self.output_dir,
            model=self.model,
            splits=self.splits,
            settings=settings,
            recipe_text=self.recipe_text,
            further_models=self.objective.further_models,
        )

    def _check_agreement(self) -> None:
        """Compares labels, settings, rows and tokenizer over all processes; see ``check_agreement``."""
        own = {name: value for name, value in self.folder.settings.items() if name not in _OWN_TO_PROCESS}
        own["tokenizer"] = tokenizer_content(self.model.require_tokenizer())
        values = {name: json.dumps(value, ensure_ascii=False) for name, value in own.items()}
        check_agreement(values, found_in_data=("settings.labels", "data."))

    def _begin(self, existing: ExistingRun | None, stack: ExitStack, *, progress: bool) -> None:
        """Tokenises the rows, makes the optimizer, and begins a new run or resumes the one in the folder.

        Args:
            existing: the run in the folder, if it is to be resumed.
            stack: ends the display, the trackers, and the handling of signals.
            progress: see ``train``.

        Raises:
            UsageError: a tracker cannot start, and no step is completed yet.
        """
        model, splits, run, is_main = self.model, self.splits, self.run, self.accelerator.is_main_process
        with main_process_first(self.accelerator):
            samples = tokenized(splits.train, model.task, model)
            self.validation = {
                name: (tokenized(table, model.task, model), table) for name, table in splits.validation.items()
            }
            self.objective.begin(samples.features, self.accelerator.device)
        model.encoder.gradient_checkpointing = self.model_settings.get("gradient_checkpointing", False)
        self.steps = OptimizerSteps(
            objective=self.objective, samples=samples, optim=self.optim, seed=run.seed, accelerator=self.accelerator
        )
        stack.callback(self.steps.release)  # also of a run that ends in an error
        self.state = TrainerState(task=model.task)
        self.logger = MetricsLogger(
            self.output_dir, trackers=run.trackers if is_main else (), project=run.project, silent=not progress
        )
        self.reporter = make_reporter(
            total_steps=self.steps.total_steps, logging_steps=run.logging_steps, visible=progress and is_main
        )
        stack.enter_context(closing(self.logger))
        stack.enter_context(closing(self.reporter))
        self.signals = stack.enter_context(stop_signals())
        metadata = self._run_metadata()
        self._log_run_summary(metadata["attention"])
        if existing is None:
            broadcast_from_main(self.accelerator, lambda: outputs.clear(self.output_dir))
        else:
            metadata |= self._resume(existing, metadata)
        broadcast_from_main(self.accelerator, lambda: self.folder.write_metadata(metadata))
        if run.trackers:
            settings, step, changed = self.folder.settings, self.state.step, existing is not None and existing.changed
            start = partial(self.logger.start_trackers, metadata, settings, step=step, changed=bool(changed))
            broadcast_from_main(self.accelerator, start)

    def _run_metadata(self) -> dict[str, Any]:
        """The content of run.json: what bit-equal results depend on, and what a reader of the metrics must know."""
        model, task, device = self.model, self.model.task, self.accelerator.device
        vocabulary = self.steps.vocabulary
        rows = None if vocabulary is None else {"trained": len(vocabulary.ids), "all": model.config.vocab_size}
        return {
            **outputs.environment(task.feature_libraries),
            "seed": self.run.seed,
            "processes": self.accelerator.num_processes,
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "attention": attention_backend(  # the kernel; the choice never changes the mathematics
                device=device,
                dtype=_DTYPES[self.optim.mixed_precision],
                head_size=model.config.head_size,
                dropout=model.config.attention_probs_dropout_prob,
            ),
            "model": {} if model.origin is None else dict(vars(model.origin)),
            "task": task.name,
            "labels": list(task.labels),
            "metrics": metric_metadata(task, self.run, list(self.splits.validation)),
            "data": outputs.data_metadata(self.splits),
            "rows": len(self.splits.train),
            "steps": self.steps.total_steps,
            "vocabulary_rows": rows,  # of the word embeddings; None: all that the settings do not freeze
            "trained_parameters": count_trained(self.objective, self.steps.adapters),
            "initial_weights": weights_digest(self.objective.checkpoint_parameters()),
            # With adapters the checkpoints do not hold them: a resumed run needs the same ones.
            "encoder_weights": None if self.steps.adapters is None else weights_digest(model.encoder.state_dict()),
        }

    def _log_run_summary(self, attention: str) -> None:
        """Reports what begins, and what may be unexpected in the data."""
        note, accelerator, model = self.reporter.note, self.accelerator, self.model
        note(
            f"{accelerator.num_processes} x {accelerator.device.type}, attention {attention}, "
            f"mixed precision {self.optim.mixed_precision}"
        )
        if accelerator.device.type == "cpu":
            local = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun: the processes on this machine
            processes = int(local) if local.isdecimal() else accelerator.num_processes
            hint = thread_hint(cpu_use(threads=torch.get_num_threads(), processes=processes))
            if hint is not None:
                note(f"note: {hint}")
            slow = slow_bfloat16() if self.optim.mixed_precision == "bf16" else None
            if slow is not None:
                note(f'note: {slow}; set optim.mixed_precision = "no"')
        if model.load_report is not None:
            note(model.load_report.summary())
        if self.steps.adapters is not None:
            trained = count_trained(self.objective, self.steps.adapters)
            note(f"low-rank adapters and the head are trained: {trained:,} parameters")
        for text in self.objective.notes:
            note(text)
        tables = {f"validation {name}".strip(): table for name, table in self.splits.validation.items()}
        for name, table in {"train": self.splits.train, **tables}.items():
            for text in table.notes:
                note(f"{name}: {text}")
        for text in input_notes(self.steps.samples, model, rows=len(self.splits.train)):
            note(f"train: {text}")

    def _resume(self, existing: ExistingRun, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Loads the newest checkpoint on every process, and makes the folder what it was at that step.

        Args:
            existing: the run so far.
            metadata: what run.json would say about a new run.

        Returns:
            What run.json says about the run so far.

        Raises:
            CheckpointError: there are checkpoints and none can be used.
            UsageError: the checkpoint is beyond the end of the run.
        """
        found: list[LoadedCheckpoint] = []  # on the main process, which alone needs to see the files
        changed = [*existing.changed, *outputs.environment_changes(existing.metadata, metadata)]

        def read() -> list[str]:
            notes = [f"changed since the run began: {change}" for change in changed]
            newest = self.folder.newest_checkpoint(existing, self.steps.total_steps)
            if newest is None:
                return [*notes, "the run in the folder has no checkpoint: it starts again from the beginning"]
            found.append(newest)
            notes += [f"NOT USED: {reason}" for reason in newest.skipped]
            return [*notes, f"resumed after step {newest.state.step} from {newest.path}"]

        notes = broadcast_from_main(self.accelerator, read)
        loaded = broadcast_state(self.accelerator, found[0].state if found else None)
        if loaded is not None:
            if existing.metadata.get("encoder_weights") != metadata["encoder_weights"]:
                raise CheckpointError(
                    "the weights of the encoder are not those that the run began with, and its checkpoints hold only "
                    "the adapters and the head. Give it the model that it began with, or --overwrite to start again"
                )
            load_state(loaded, self.steps, self.state)
        weights = {} if loaded is None else loaded.weights
        notes += broadcast_from_main(self.accelerator, lambda: self.folder.rewind(self.state, self.steps, weights))
        for note in notes:
            self.reporter.note(note)
        self.state.update_early_stopping(self.run.early_stopping_patience)
        earlier, step = existing.metadata, self.state.step
        return {
            **{name: earlier[name] for name in ("initial_weights",) if name in earlier},
            "resumed_at": [*earlier.get("resumed_at", []), step],
            "changes": [*earlier.get("changes", []), *({"step": step, "change": str(it)} for it in changed)],
        }

    def _evaluation_is_due(self) -> bool:
        step, every = self.state.step, self.run.eval_steps
        due = self.steps.order.ends_epoch(step) if every is None else _is_multiple(step, every)
        return due or step == self.steps.total_steps

    def _log_step(self, result: StepResult) -> bool:
        """Reports a step; True if a process was asked to stop."""
        is_main, rows_of = self.accelerator.is_main_process, self.steps.samples.rows
        try:
            log, self.state.overflows = read_step_metrics(
                result, overflows=self.state.overflows, mixed_precision=self.optim.mixed_precision, rows_of=rows_of
            )
        except DivergedError:
            if is_main:
                loss, norm, *_ = result.values.tolist()
                event = {"event": "diverged", "step": result.step + 1, "loss": loss}
                rates = {"learning_rate": result.learning_rate, "grad_norm": norm}
                with suppress(CheckpointError):  # the divergence is the error to report
                    self.logger.record({**event, **rates, "rows": [row + 1 for row in rows_of(result.batch)]})
            raise
        step, epoch, speed = log.step + 1, self.steps.order.epoch_of(log.step), self.clock.tokens_per_second
        self.reporter.step(log, epoch=epoch, tokens_per_second=speed)
        if is_main and (_is_multiple(step, self.run.logging_steps) or step == self.steps.total_steps):
            event = {"event": "step", "step": step, "epoch": epoch + 1, "loss": log.loss}
            rates = {"learning_rate": log.learning_rate, "grad_norm": log.grad_norm}
            terms = {"terms": dict(log.terms)} if len(result.terms) > 1 else {}
            record = {**event, **rates, **terms, "tokens_per_second": round(speed, 1)}
            self.logger.record(record)
            if self.callback is not None:
                self.steps.update_weights()
                self.callback(dict(record))
        return log.stop

    def _evaluate(self) -> None:
        """Evaluates all validation sets and saves; a better model is written once its checkpoint is there.

        Raises:
            StoppedError: a signal came meanwhile. The run is saved, and resumes with this evaluation.
        """
        state, signals, callback = self.state, self.signals, self.callback
        self.steps.update_weights()
        self.objective.eval()  # until the next step
        try:
            found = evaluate_all(
                self.model,
                self.validation,
                self.accelerator,
                run=self.objective.run,
                stop=lambda: signals.received is not None,
            )
        except GivenUpError:
            self._save()
            self._stop()
        metadata = metric_metadata(self.model.task, self.run, list(self.validation))
        is_best = state.add_evaluation(
            found.metrics,
            rank_of(found.metrics, metadata),
            task=found.task,
            collapse=found.collapses[split_key(metadata["best"], metadata["sets"])[0]],
            patience=self.run.early_stopping_patience,
        )
        epoch = self.steps.order.epoch_of(state.step - 1)
        event = {"event": "evaluation", "step": state.step, "epoch": epoch + 1, "metrics": found.metrics}
        broadcast_from_main(self.accelerator, lambda: self.logger.record(event))
        self._save()
        if is_best:
            broadcast_from_main(self.accelerator, lambda: self.folder.publish(state.task))
        asked = broadcast_from_main(self.accelerator, lambda: callback is not None and bool(callback(dict(event))))
        overall = {  # those over all rows, each number once
            metric_key(name, metric): value
            for name, metrics in metrics_by_set(found.metrics, metadata["sets"]).items()
            for metric, value in found.task.metric_table(metrics).overall.items()
        }
        self.reporter.evaluation(state.step, overall, best=is_best)
        if state.stopped:
            self.reporter.note(f"stopped early; evaluations without a better model: {state.since_best}")
        elif asked:
            state.stopped = True
            self.reporter.note("the callback asked to stop")
        self.objective.train()

    def _save(self) -> None:
        """Writes a checkpoint of the run as it is now."""
        state, steps = self.state, self.steps
        steps.update_weights()

        def write() -> None:
            epoch = steps.order.epoch_of(state.step)
            batches = steps.order.batches(steps.order.first_step(epoch), state.step)
            metadata = {
                "epoch": steps.order.epochs(state.step),
                "samples": epoch * len(steps.samples) + sum(len(batch) for _, batch in batches),
                "processes": self.accelerator.num_processes,
                "seed": self.run.seed,
                "data": outputs.data_metadata(self.splits),
                "versions": outputs.environment(self.model.task.feature_libraries)["versions"],
            }
            options = {"best_step": state.best_step, "keep_last": self.run.keep_last}
            save_checkpoint(self.folder.checkpoints, state_dict(steps, state), metadata=metadata, **options)

        broadcast_from_main(self.accelerator, write)

    def _stop(self) -> NoReturn:
        """Ends a run that is saved."""
        received = signal.SIGTERM if self.signals.received is None else self.signals.received
        raise StoppedError(
            f"stopped by {received.name} after step {self.state.step} of {self.steps.total_steps}; the run is saved in "
            f"{self.output_dir}; run the same command again to resume it",
            signal_number=received,
        )

    def _finish(self) -> FitResult:
        """Loads the best weights into the model and writes the summary, which makes the run a finished one."""
        state, sets = self.state, tuple(self.splits.validation)
        self.steps.release()
        self._load_best()
        self.model.task = state.task
        agreement = self.objective.agreement(self.validation, self.accelerator)
        if agreement:
            event = {"event": "agreement", "step": state.step, "agreement": agreement}
            broadcast_from_main(self.accelerator, lambda: self.logger.record(event))
        notes: tuple[str, ...] = ()
        if state.best_collapse is not None:
            name, _ = split_key(metric_metadata(state.task, self.run, sets)["best"], sets)
            where = f" of the validation set {name!r}" if name else ""
            *first, last = (
                f"a lower learning_rate (now {self.optim.learning_rate:g})",
                f"more epochs (now {self.steps.order.epochs(self.steps.total_steps):.3g})",
                *state.task.collapse_remedies,
            )
            notes = (
                f"the best model {state.best_collapse}{where}, although the labels of the validation rows differ. "
                f"Try {', '.join(first)} or {last}",
            )
        result = FitResult(
            metrics=state.best,
            last_metrics=state.last,
            best_step=state.best_step,
            steps=state.step,
            stopped_early=state.stopped,
            train_seconds=round(state.seconds, 3),
            output_dir=self.output_dir,
            task=state.task,
            validation_sets=sets,
            collapse=state.best_collapse,
            notes=notes,
        )
        broadcast_from_main(
            self.accelerator, lambda: outputs.write_json(self.output_dir / outputs.SUMMARY, result.summary())
        )
        for note in notes:
            self.reporter.note(f"note: {note}")
        return result

    def _reuse(self, summary: Mapping[str, Any]) -> FitResult:
        """The result of a run that is complete already, with its model and the task tuned with it."""
        folder, kind = self.output_dir / outputs.MODEL, type(self.model.task)
        task, _ = broadcast_from_main(self.accelerator, lambda: folder_task(CheckpointFolder.open(folder), kind, {}))
        self.model.task = task
        self._load_best()
        sets = tuple(self.splits.validation)
        return FitResult.from_summary(summary, output_dir=self.output_dir, task=task, validation_sets=sets)

    def _load_best(self) -> None:
        """Loads the weights of ``model/``, which only the main process needs to see."""
        broadcast_from_main(self.accelerator, lambda: self.model.restore(self.output_dir / outputs.MODEL))
        if self.accelerator.num_processes > 1:
            for parameter in self.model.parameters():
                broadcast(parameter.data)

    def _release_model(self, trainable: Sequence[nn.Parameter]) -> None:
        """Leaves the model as a caller expects it: in evaluation mode, unfrozen, without gradients and wrappers."""
        for parameter in trainable:
            parameter.requires_grad_(True)
        self.objective.zero_grad(set_to_none=True)
        self.model.encoder.gradient_checkpointing = False
        set_sparse_gradients(self.objective, False)
        self.accelerator.unwrap_model(self.objective, keep_fp32_wrapper=False).eval()


def prepare_model(model: TaskModel, *, seed: int) -> None:
    """Makes a model ready for a run: a head that is new is drawn from the run's seed.

    Raises:
        UsageError: it cannot be trained and saved: it is exported, wrapped by another library, or no ``TaskModel``.
    """
    if not isinstance(model, TaskModel):
        raise UsageError(
            f"expected a TaskModel, got a {type(model).__name__}. Of a model that another library has wrapped, pass "
            "the TaskModel inside; adapters of peft are merged by model = peft_model.merge_and_unload()"
        )
    if model.no_weights_reason:
        raise UsageError(f"it cannot be trained: {model.no_weights_reason}")
    model.check_parameters()
    model.draw_new_head(seed)


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

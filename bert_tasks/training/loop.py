"""The training loop.

``Trainer`` holds everything that a run consists of, and ``Trainer.train`` is the run. This module owns the order of its
actions. The run checks its input, and begins or resumes in its folder. For each optimizer step it accumulates
gradients, reads the numbers of the step before, and updates the weights. In between it evaluates the model, and saves
checkpoints and the best model. At the end it loads the best weights and writes the summary.

The arithmetic of a step is in step.py, the state and the folder of a run in state.py, and what is evaluated in
evaluation.py.
"""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from accelerate.utils import broadcast
from torch import nn

from bert_tasks.checkpoints.adapters import no_adapters
from bert_tasks.data.checks import most_frequent_label
from bert_tasks.data.features import tokenizer_content
from bert_tasks.data.splits import Splits
from bert_tasks.distributed import (
    StopSignals,
    broadcast_from_main,
    check_agreement,
    main_process_first,
    make_accelerator,
    stop_signals,
)
from bert_tasks.errors import CheckpointError, DivergedError, GivenUpError, StoppedError, UsageError
from bert_tasks.inference.own_metrics import OwnMetric, metric_names, own_metrics
from bert_tasks.metrics.tables import split_key
from bert_tasks.model.encoder_with_heads import can_save_adapter
from bert_tasks.model.features import tokenized, training_samples
from bert_tasks.model.loading import restore
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.pretrained import CheckpointFolder, stored_tasks
from bert_tasks.recipe.check import fit_to_splits
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.storage import locked
from bert_tasks.tasks.several import settings_of, task_name
from bert_tasks.training import files as outputs
from bert_tasks.training.checkpoints import remove_checkpoints
from bert_tasks.training.evaluation import (
    Evaluated,
    Validation,
    check_metrics,
    check_set_names,
    evaluate_all,
    headline,
    metric_metadata,
    rank_of,
)
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.optim import OptimizerFactory, freeze, freeze_encoder, load_factory, set_sparse_gradients
from bert_tasks.training.probe import fit_output_layer, freeze_below_output
from bert_tasks.training.progress import Clock, MetricsLogger, Reporter, diverged_record, step_record
from bert_tasks.training.records import MetricRecord, RunRecord, SummaryRecord
from bert_tasks.training.state import (
    ExistingRun,
    FitResult,
    RunFolder,
    TrainerState,
    end_notes,
    load_state,
    resumed_metadata,
    run_metadata,
    start_notes,
)
from bert_tasks.training.step import OptimizerSteps, StepLog, StepResult, read_step_metrics

# Settings that may differ between processes. Machines may store the weights in different folders, and all processes
# train with the weights of the main process, which DDP sends them.
_OWN_TO_PROCESS = ("model.name", "model.revision", "teacher.name", "teacher.revision")


class Trainer:
    """A run with its model, data, optimizer, state and logger.

    `fit` and `train` make a trainer, so most programs never need this class. Use it to train with an objective of your
    own, with rows that you have split yourself, or to keep the trainer at hand after the run. A `TrainerCallback` is
    enough to follow a run or to end it.

    Attributes:
        objective, model: The objective that is minimised, and the model in it, which is evaluated and saved.
        validation: The tokenised rows of each validation set. It is set when the run begins, like the attributes below.
        steps: Computes optimizer steps over the tokenised training rows.
        state, clock: The progress of the run, and the time and tokens of its training.
        logger, reporter: The writers of the records of the run, to its files and to people.
        signals: The signal that asked the run to stop, if there was one.

    Examples:
        >>> recipe = load_recipe("recipe.toml")
        >>> data = prepare(recipe)  # of bert_tasks.recipe.check
        >>> model = TaskModel.from_pretrained(base, task=data.heads[""].task)
        >>> result = Trainer(objective=model, splits=data.splits, optim=recipe.optim, run=recipe.run).train()
        >>> result.steps == recipe.optim.max_steps
        True
    """

    validation: Validation
    steps: OptimizerSteps
    logger: MetricsLogger
    reporter: Reporter
    signals: StopSignals

    def __init__(
        self,
        *,
        objective: Objective | AnyModel,
        splits: Splits,
        optim: OptimSection,
        run: RunSection,
        model_settings: Mapping[str, Any] = MappingProxyType({}),
        recipe_text: str | None = None,
        callback: "Callback | None" = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        """Stores the parts of a run, without reading or writing anything.

        Args:
            objective: The objective to minimise, or a model, which is then trained on the labels of the rows. After the
                run the model holds the best weights.
            splits: The checked rows for training, and one or several validation sets.
            optim: The section ``[optim]`` of a recipe.
            run: The section ``[run]`` of a recipe. ``run.output_dir`` is the folder of the run.
            model_settings: The section ``[model]`` as a mapping. Default: no settings.
            recipe_text: The resolved recipe in TOML, which is written into the folder. Default: no file is written.
            callback: A function that is called with each record of metrics.jsonl, or a `TrainerCallback`. None calls
                nothing.
            optimizer: A function that makes the optimizer from parameter groups, each with ``params``, ``lr`` and
                ``weight_decay``. Default: the optimizer that ``optim.optimizer`` names.
        """
        self.objective = objective if isinstance(objective, Objective) else Supervised(objective)
        if optim.linear_probe:
            whole = {"epochs": 1, "max_steps": None, "batch_size": len(splits.train), "batch_tokens": None}
            optim = optim.model_copy(update=whole)  # one step with all rows
        self.model, self.splits, self.optim, self.run = self.objective.model, splits, optim, run
        self.model_settings, self.recipe_text, self.optimizer = model_settings, recipe_text, optimizer
        self.callback = TrainerCallback.of(callback)
        self.output_dir = Path(str(run.output_dir))
        self.accelerator = make_accelerator(optim.mixed_precision)
        self.state, self.clock = TrainerState(tasks=self.model.tasks), Clock()

    def train(self, *, overwrite: bool = False, progress: bool = True) -> FitResult:
        """Trains the model, or resumes the run in the folder.

        An interrupted run continues after its newest checkpoint, and ends with the same bits as if it had not been
        interrupted, on the same machine and with the same libraries. A finished run is not trained again, unless a
        setting extends it, such as more epochs. Its best weights are loaded and its result is returned.

        Args:
            overwrite: True to replace a run that is in the folder. Default: False.
            progress: True to show progress on standard error, which is the default.

        Returns:
            The metrics of the best model and of the last evaluation, with the tuned tasks.

        Raises:
            DataError: The rows do not fit the task, or the processes of a run have different rows.
            UsageError: A setting cannot be used, or the folder holds other files or a run that differs.
            CheckpointError: A file of the run is damaged or cannot be written.
            DivergedError: The loss or the gradient of a step was not finite.
            StoppedError: The process was asked to stop by SIGTERM or SIGINT. The run is saved and can be resumed.

        Examples:
            >>> recipe = load_recipe("recipe.toml", output_dir="runs/x")
            >>> data = prepare(recipe)  # of bert_tasks.recipe.check
            >>> model = TaskModel.from_pretrained(base, task=data.heads[""].task)
            >>> trainer = Trainer(objective=model, splits=data.splits, optim=recipe.optim, run=recipe.run)
            >>> trainer.train(progress=False).steps == recipe.optim.max_steps
            True
        """
        broadcast_from_main(self.accelerator, outputs.check_folder, self.output_dir)
        trainable = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        with ExitStack() as stack:
            # The main process holds the folder for all of them.
            broadcast_from_main(self.accelerator, lambda: stack.enter_context(locked(self.output_dir)))
            stack.callback(self._release_model, trainable)
            # Before anything else is shared, because processes with different rows or settings would wait forever.
            if self.accelerator.num_processes > 1:
                self._check_agreement()
            self.preflight()
            existing = None
            if not overwrite:
                existing = self.folder.existing_run()
            if existing is not None and existing.summary is not None and not existing.changed:
                return self._reuse(existing.summary)
            self._begin(existing, stack, progress=progress)
            try:
                self._run_steps()
            except GivenUpError:
                self._stop()
            return self._finish()

    def _run_steps(self) -> None:
        """Runs the steps that are left.

        The host reads the numbers of a step while the device computes the gradients of the next one. It waits for them
        only before an evaluation or a checkpoint, and before a run of one process is stopped.

        Raises:
            DivergedError: The loss or the gradient of a step was not finite.
            GivenUpError: A process was asked to stop. All processes raise it after the same step.
        """
        state, steps, clock = self.state, self.steps, self.clock
        if state.step and self._is_evaluation_due() and state.evaluated_step != state.step:
            self._evaluate()  # the run was stopped during the evaluation after this step
        if self.optim.linear_probe and state.step == 0:
            self._fit_probe()
        unread: StepResult | None = None
        clock.start()
        for step, batch in steps.batches(state.step):
            if state.stopped:
                break
            terms = steps.backward(step, batch)
            clock.tokens += int(steps.samples.lengths[batch].sum())
            # The device still computes the gradients that were just queued, while the host waits for the step before.
            # If that one diverged, this step has not changed the weights yet.
            if unread is not None:
                self._complete_step(unread)
            is_asked_to_stop = self.signals.received is not None
            unread = steps.update(step, batch, terms, stop=is_asked_to_stop)
            state.step = step + 1
            # An evaluation saves a checkpoint, too, so a step has one or the other.
            is_evaluation = self._is_evaluation_due()
            is_checkpoint = _is_multiple(state.step, self.run.save_steps)
            is_end = is_asked_to_stop and self.accelerator.num_processes == 1  # no other process has to learn of it
            if is_evaluation or is_checkpoint or is_end:
                self._complete_step(unread)
                unread = None
                state.seconds += clock.stop()
                if is_evaluation:
                    self._evaluate()
                else:
                    self._save()
                clock.start()

    def _fit_probe(self) -> None:
        """Runs the only step of a linear probe, and evaluates it."""
        self.clock.start()
        samples = self.steps.samples
        fit_output_layer(self.model.one_task(), samples, self.splits.train, seed=self.run.seed)
        self.clock.tokens = int(samples.lengths.sum())
        self.state.step, self.state.seconds = 1, self.clock.stop()
        self._evaluate()

    def _is_evaluation_due(self) -> bool:
        """Returns True every ``eval_steps`` steps, or else after each epoch, and in any case after the last step."""
        step, every = self.state.step, self.run.eval_steps
        if self._has_run_all_steps():
            return True
        if every is None:
            return self.steps.order.ends_epoch(step)
        return _is_multiple(step, every)

    def _has_run_all_steps(self) -> bool:
        """Returns True after the last step of the plan."""
        return self.state.step == self.steps.plan.total

    def _complete_step(self, result: StepResult) -> None:
        """Reads the numbers of the step that was updated last, and reports them.

        Raises:
            DivergedError: The loss or the gradient was not finite.
            GivenUpError: A process was asked to stop, and there are steps left.
        """
        is_main, speed = self.accelerator.is_main_process, self.clock.tokens_per_second
        step, epoch = result.step + 1, self.steps.order.epoch_of(result.step)
        log = self._read_step(result)
        self.reporter.step(log, epoch=epoch, tokens_per_second=speed)
        if is_main:
            self.callback.on_step(self, log)
        if is_main and (_is_multiple(step, self.run.logging_steps) or self._has_run_all_steps()):
            record = step_record(log, epoch=epoch, tokens_per_second=speed, has_terms=len(result.terms) > 1)
            self.logger.record(record)
            self.callback.on_record(self, record)
        # All processes read the same sum of their flags in the same step, so they end together. After the last step the
        # run is finished instead, because only an evaluation is left.
        if log.stop and not self._has_run_all_steps():
            raise GivenUpError

    def _read_step(self, result: StepResult) -> StepLog:
        """Waits for the numbers of a step.

        Raises:
            DivergedError: The loss or the gradient was not finite. The record of the step is written before.
        """
        rows_of = self.steps.samples.rows
        try:
            log, self.state.overflows = read_step_metrics(
                result,
                overflows=self.state.overflows,
                mixed_precision=self.optim.mixed_precision,
                rows_of=rows_of,
            )
        except DivergedError:
            if self.accelerator.is_main_process:
                epoch = self.steps.order.epoch_of(result.step)
                record = diverged_record(result, epoch=epoch, rows=rows_of(result.batch))
                with suppress(CheckpointError):  # the divergence is the error to report
                    self.logger.record(record)
            raise
        return log

    def _evaluate(self) -> None:
        """Evaluates all validation sets, saves a checkpoint, and then the model if it is the best so far.

        Raises:
            GivenUpError: A process was asked to stop meanwhile, and there are steps left.
        """
        state = self.state
        self.steps.optimizer.update_weights()
        self.objective.eval()
        evaluation = self._evaluate_all_sets()
        # If a run has several validation sets, one of them has the metric that selects the best model.
        is_best = state.add_evaluation(
            evaluation.metrics,
            rank_of(evaluation.metrics, self.metric_metadata),
            tasks=evaluation.tasks,
            collapse=evaluation.collapses[self.best_set],
        )
        state.update_early_stopping(self.run.early_stopping_patience)
        epoch = self.steps.order.epoch_of(state.step - 1)
        record = {"event": "evaluation", "step": state.step, "epoch": epoch + 1, "metrics": evaluation.metrics}
        broadcast_from_main(self.accelerator, self.logger.record, record)
        # First the checkpoint, because a resumed run can write `model/` again from it, but not the other way round.
        self._save()
        if is_best:
            self.folder.publish(state.tasks, self.steps.optimizer.adapters)
        callback_stops = broadcast_from_main(
            self.accelerator, lambda: bool(self.callback.on_evaluate(self, dict(record)))
        )
        self.reporter.evaluation(state.step, evaluation.overall, best=is_best)
        if state.stopped:
            self.reporter.early_end(state.since_best)
        elif callback_stops:
            state.stopped = True
            self.reporter.early_end(None)
        self.objective.train()

    def _evaluate_all_sets(self) -> Evaluated:
        """Returns the metrics of all validation sets. Raises GivenUpError like ``_evaluate``."""
        evaluate = partial(
            evaluate_all,
            self.model,
            self.validation,
            self.accelerator,
            forward_fn=self.objective.forward_fn,
            own=self.own_metrics,
        )
        try:
            return evaluate(stop=lambda: self.signals.received is not None)
        except GivenUpError:
            if not self._has_run_all_steps():
                raise
            # Nothing but this evaluation is left of the run, so it is done to the end, after the steps are safe.
            self._save()
            return evaluate()

    def _save(self) -> None:
        """Writes a checkpoint of the run as it is now."""
        self.steps.optimizer.update_weights()
        path = self.folder.save_checkpoint(self.steps, self.state, seed=self.run.seed, keep_last=self.run.keep_last)
        if self.accelerator.is_main_process:
            self.callback.on_save(self, path)

    def _stop(self) -> NoReturn:
        """Saves the run after its last update, and ends it."""
        # The gradients of a step that was begun are dropped. The resumed run computes that step again.
        self.steps.optimizer.accelerated.zero_grad(set_to_none=True)
        self.state.seconds += self.clock.stop()
        self._save()
        received = signal.SIGTERM if self.signals.received is None else self.signals.received
        raise StoppedError(
            f"stopped by {received.name} after step {self.state.step} of {self.steps.plan.total}. The run is saved in "
            f"{self.output_dir}. Run the same command again to resume it",
            signal_number=received,
        ) from None

    def _finish(self) -> FitResult:
        """Loads the best weights and writes the summary, which marks the run as finished.

        So the summary comes before the checkpoints are removed. After a kill in between, the next call only removes
        them.
        """
        state, order = self.state, self.steps.order
        self.steps.optimizer.release()
        self._load_best()
        self.model.tasks = state.tasks
        agreement = self.objective.agreement(self.validation, self.accelerator)
        if agreement:
            event = {"event": "agreement", "step": state.step, "agreement": agreement}
            broadcast_from_main(self.accelerator, self.logger.record, event)
        result = FitResult(
            metrics=state.best,
            last_metrics=state.last,
            best_step=state.best_step,
            steps=state.step,
            stopped_early=state.stopped,
            train_seconds=round(state.seconds, 3),
            output_dir=self.output_dir,
            tasks=state.tasks,
            validation_sets=tuple(self.splits.validation),
            collapse=state.best_collapse,
            notes=list(end_notes(self.steps, self.splits, state, best_set=self.best_set)),
            headline=self._headline(state.best),
        )
        path = self.output_dir / outputs.SUMMARY
        broadcast_from_main(self.accelerator, outputs.write_json, path, result.to_json())
        self._remove_checkpoints()
        for note in result.notes:
            self.reporter.note(note)
        self.reporter.end(
            seconds=state.seconds,
            tokens_per_second=self.clock.mean_tokens_per_second,
            best_epoch=order.epochs(state.best_step),
            epochs=order.epochs(state.step),
            frequent=self._frequent_label,
        )
        return result

    @cached_property
    def _frequent_label(self) -> tuple[str, float] | None:
        """The most frequent label of the rows that choose the best model and its fraction, if there are labels."""
        return most_frequent_label(self.splits.validation[self.best_set], self.model.row_columns)

    def _headline(self, metrics: Mapping[str, float]) -> str:
        """Returns the primary metric of the best model, beside its majority baseline if it has one."""
        return headline(self.model.tasks, metrics, name=self.best_set, frequent=self._frequent_label)

    def preflight(self) -> None:
        """Fits the task to the training rows, freezes parameters, and checks all that can be checked before a step.

        Raises:
            DataError, UsageError: A problem would stop the run later, perhaps after hours.
        """
        model, optim, validation = self.model, self.optim, self.splits.validation
        check_set_names(list(validation))
        fit_to_splits(model, self.splits)
        if self.optimizer is None:
            load_factory(optim)  # which raises the error of a name that cannot be imported
        if optim.lora_rank is not None:
            freeze_encoder(self.objective, optim)
        if self.run.save_adapter and (optim.lora_rank is None or not can_save_adapter(model)):
            raise no_adapters(task_name(model.tasks))
        if optim.linear_probe:
            freeze_below_output(self.objective, self.accelerator)
        freeze(self.objective, embeddings=optim.freeze_embeddings, layers=optim.freeze_layers)
        check_metrics(model, self.run, self.own_metrics, validation, self.accelerator, self.objective.forward_fn)

    @cached_property
    def own_metrics(self) -> tuple[OwnMetric, ...]:
        """The metrics of ``run.metrics``, which are loaded on the main process first."""
        if not self.run.metrics:
            return ()
        # The main process goes first, because loading a metric may download it into a cache.
        with main_process_first(self.accelerator):
            return own_metrics(self.run.metrics, self.model.tasks)

    @cached_property
    def metric_metadata(self) -> MetricRecord:
        """What readers of the metrics must know, such as the metric that selects the best model.

        See ``metric_metadata``.
        """
        return metric_metadata(self.model.tasks, self.run, list(self.splits.validation), self.own_metrics)

    @property
    def best_set(self) -> str:
        """The name of the validation set whose metric selects the best model."""
        return split_key(self.metric_metadata.best, tuple(self.splits.validation))[0]

    @cached_property
    def folder(self) -> RunFolder:
        """The folder of the run, with the settings of the recipe, of the model and of the data.

        A resumed run has to have the same ones, apart from those that may change (see files.py).
        """
        model, data = self.model, outputs.data_metadata(self.splits)
        settings = outputs.flat_settings(
            {"gradient_checkpointing": False, **self.model_settings},
            self.optim,
            self.run,
            settings={**settings_of(model.head_tasks), "labels": list(model.labels)},
            encoder=vars(model.config),
            data={name: split.fingerprint for name, split in data.items()},
            **self.objective.settings,
        )
        only = model.tasks.get("")  # None if there are several tasks
        settings["task"] = task_name(model.tasks) if only is None else type(only).__name__
        if not isinstance(self.objective, Supervised):
            settings["objective"] = type(self.objective).__name__
        if self.optimizer is not None:
            settings["optim.optimizer"] = getattr(self.optimizer, "__qualname__", repr(self.optimizer))
        settings["run.metrics"] = metric_names(self.run.metrics)
        return RunFolder(
            path=self.output_dir,
            accelerator=self.accelerator,
            objective=self.objective,
            splits=self.splits,
            settings=settings,
            recipe_text=self.recipe_text,
        )

    def _check_agreement(self) -> None:
        """Compares labels, settings, rows and tokenizer over all processes."""
        portable = {name: value for name, value in self.folder.settings.items() if name not in _OWN_TO_PROCESS}
        portable["tokenizer"] = tokenizer_content(self.model.require_tokenizer())
        values = {name: json.dumps(value, ensure_ascii=False) for name, value in portable.items()}
        check_agreement(values, found_in_data=("settings.labels", "data."))

    def _begin(self, existing: ExistingRun | None, stack: ExitStack, *, progress: bool) -> None:
        """Tokenises the rows, makes the optimizer, and begins or resumes the run."""
        model, splits, run, accelerator = self.model, self.splits, self.run, self.accelerator
        with main_process_first(accelerator):
            samples = training_samples(splits.train, model)
            self.validation = {name: (tokenized(table, model), table) for name, table in splits.validation.items()}
            self.objective.begin(samples.features, accelerator.device)
        model.encoder.gradient_checkpointing = self.model_settings.get("gradient_checkpointing", False)
        self.steps = OptimizerSteps(
            objective=self.objective,
            samples=samples,
            optim=self.optim,
            seed=run.seed,
            accelerator=accelerator,
            factory=self.optimizer,
        )
        stack.callback(self.steps.optimizer.release)  # also of a run that ends in an error
        self.state, self.clock = TrainerState(tasks=model.tasks), Clock()
        is_main = accelerator.is_main_process
        trackers = run.trackers if is_main else ()
        self.logger = MetricsLogger(self.output_dir, trackers=trackers, project=run.project, silent=not progress)
        self.reporter = Reporter(
            total_steps=self.steps.plan.total, logging_steps=run.logging_steps, visible=progress and is_main
        )
        stack.enter_context(closing(self.logger))
        stack.enter_context(closing(self.reporter))
        self.signals = stack.enter_context(stop_signals())
        metadata = run_metadata(self.steps, splits, self.metric_metadata, self.folder.settings)
        for note in start_notes(self.steps, splits, metadata.attention):
            self.reporter.note(note)
        # Nothing in the folder has changed so far. An earlier run is removed only when this one is about to begin.
        if existing is None:
            broadcast_from_main(accelerator, outputs.clear, self.output_dir)
        else:
            metadata = self._resume(existing, metadata)
        self.folder.write_metadata(metadata)
        if run.trackers:
            changed = existing is not None and bool(existing.changed)
            options = {"step": self.state.step, "changed": changed}
            broadcast_from_main(accelerator, self.logger.start_trackers, metadata, **options)

    def _resume(self, existing: ExistingRun, metadata: RunRecord) -> RunRecord:
        """Loads the newest checkpoint on every process, rewinds the folder to it, and returns the new run.json.

        A run without a checkpoint starts again from the beginning.
        """
        earlier = existing.metadata
        changed = [*existing.changed, *outputs.environment_changes(earlier, metadata)]
        notes = [f"changed since the run began: {change}" for change in changed]
        loaded, resume_notes = self.folder.load_newest(existing, metadata)
        if loaded is not None:
            self.state = load_state(loaded, self.steps, self.state.tasks)
        for note in [*notes, *resume_notes, *self.folder.rewind(loaded, self.state, self.steps)]:
            self.reporter.note(note)
        # The patience may have changed since the run was stopped.
        self.state.update_early_stopping(self.run.early_stopping_patience)
        return resumed_metadata(metadata, earlier, changed, self.state.step)

    def _reuse(self, summary: SummaryRecord) -> FitResult:
        """Returns the result of a finished run, after its best weights and its tuned tasks are loaded."""
        folder, tasks = self.output_dir / outputs.MODEL, self.model.tasks
        only = None
        if "" in tasks:
            only = type(tasks[""])
        stored = broadcast_from_main(self.accelerator, lambda: stored_tasks(CheckpointFolder.open(folder), only))
        self.model.tasks = stored
        self._load_best()
        self._remove_checkpoints()
        sets = tuple(self.splits.validation)
        return FitResult(
            **dict(summary),
            output_dir=self.output_dir,
            tasks=stored,
            validation_sets=sets,
            headline=self._headline(summary.metrics),
            reused=True,
        )

    def _remove_checkpoints(self) -> None:
        """Removes the checkpoints of a finished run, unless they are to be kept."""
        if not self.run.keep_checkpoints:
            broadcast_from_main(self.accelerator, remove_checkpoints, self.folder.checkpoints)

    def _load_best(self) -> None:
        """Loads the weights of ``model/``, which only the main process needs to see, on all processes."""
        # Only the first machine needs to have the folder, so the others get the weights from its memory.
        broadcast_from_main(self.accelerator, restore, self.model, self.output_dir / outputs.MODEL)
        if self.accelerator.num_processes > 1:
            for parameter in self.model.parameters():
                broadcast(parameter.data)

    def _release_model(self, trainable: Sequence[nn.Parameter]) -> None:
        """Leaves the model as a user expects it, whatever ended the run.

        It is in evaluation mode, without gradients, with the parameters unfrozen that were so before, and without what
        accelerate has wrapped around its ``forward``.
        """
        for parameter in trainable:
            parameter.requires_grad_(True)
        self.objective.zero_grad(set_to_none=True)
        self.model.encoder.gradient_checkpointing = False
        set_sparse_gradients(self.objective, False)
        # accelerate replaces `forward` of the objective for half precision, and puts it back only if asked.
        self.accelerator.unwrap_model(self.objective, keep_fp32_wrapper=False).eval()


class TrainerCallback:
    """The hooks into a run. Derive from this class and override the ones that you need.

    The main process calls them in the middle of the training loop, so a slow hook slows the run down. An exception in a
    hook ends the run. A plain function as ``callback`` is enough to read the records of metrics.jsonl, or to end a run
    after an evaluation.

    Word embeddings and the weights that adapters change are brought up to date only when something reads them. So
    ``on_step`` has to call ``trainer.steps.optimizer.update_weights()`` before it reads these weights.

    Examples:
        >>> class Steps(TrainerCallback):
        ...     count = 0
        ...
        ...     def on_step(self, trainer, log):
        ...         self.count += 1
        >>> steps = Steps()
        >>> result = fit(model, "train.csv", output_dir="runs/x", epochs=1, callback=steps)
        >>> steps.count == result.steps
        True
    """

    def on_step(self, trainer: Trainer, log: StepLog) -> None:
        """Called after each optimizer step, with its numbers."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Called with each record of a step in metrics.jsonl, after it is written."""

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> object:
        """Called with the record of an evaluation. A true result ends the run, which then counts as finished."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Called with the folder of a checkpoint, after it is written."""

    @staticmethod
    def of(callback: "Callback | None") -> "TrainerCallback":
        """Returns the hooks for what a user passes as ``callback``, which is None, a function or an object with hooks.

        Raises:
            UsageError: It is neither a `TrainerCallback` nor a function.
        """
        if callback is None:
            return TrainerCallback()
        if isinstance(callback, TrainerCallback):
            return callback
        if not callable(callback):
            kind = type(callback).__name__
            raise UsageError(f"callback: expected a function or a bert_tasks.TrainerCallback, got a {kind}")
        return _RecordCallback(callback)


# A function that gets each record of metrics.jsonl: ``record["event"]`` is "step" (with step, epoch, loss,
# learning_rate, grad_norm, tokens_per_second, and ``terms``, the mean of each loss term, if there are several) or
# "evaluation" (with step, epoch, metrics). A true return value for an evaluation ends the run.
Callback = TrainerCallback | Callable[[dict[str, Any]], object]


class _RecordCallback(TrainerCallback):
    """Calls a function with each record, after all weights are brought up to date."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self.function = function

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        trainer.steps.optimizer.update_weights()
        self.function(record)

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> object:
        return self.function(record)


def _is_multiple(step: int, every: int | None) -> bool:
    """Returns True if something that is done every so many steps is due. None is never."""
    return every is not None and step % every == 0

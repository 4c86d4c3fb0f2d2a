"""The training loop.

``Trainer`` holds everything that a run consists of, and ``Trainer.train`` is the run. Owns the order of its actions.
The run checks its input, and begins or resumes in its folder. For each optimizer step it accumulates gradients, reads
the numbers of the step before, and updates the weights. It evaluates, and saves checkpoints and the best model.
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
from bert_tasks.data.problems import counted
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import tokenizer_content
from bert_tasks.distributed import (
    StopSignals,
    broadcast_from_main,
    check_agreement,
    main_process_first,
    make_accelerator,
    stop_signals,
)
from bert_tasks.errors import CheckpointError, DivergedError, GivenUpError, StoppedError, UsageError, argument
from bert_tasks.metrics.tables import SEPARATOR, metric_key, metrics_by_set, split_key
from bert_tasks.model.features import tokenized, training_samples
from bert_tasks.model.heads import metric_table
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.pretrained import CheckpointFolder, stored_tasks
from bert_tasks.recipe.check import fit_to_splits
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.storage import locked
from bert_tasks.training import files as outputs
from bert_tasks.training.checkpoints import remove_checkpoints
from bert_tasks.training.evaluation import Validation, check_metric, evaluate_all, metric_metadata, rank_of
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.optim import OptimizerFactory, freeze, freeze_encoder, load_factory, set_sparse_gradients
from bert_tasks.training.progress import Clock, MetricsLogger, Reporter
from bert_tasks.training.state import (
    ExistingRun,
    FitResult,
    RunFolder,
    TrainerState,
    load_state,
    run_metadata,
    start_notes,
)
from bert_tasks.training.step import OptimizerSteps, StepLog, StepResult, read_step_metrics

# Machines may store the weights in different folders. DDP sends the main process's weights.
_OWN_TO_PROCESS = ("model.name", "model.revision", "teacher.name", "teacher.revision")


class Trainer:
    """A run with its model, data, optimizer, state and logger.

    Attributes:
        validation: The tokenised rows of each validation set.
        steps: Computes optimizer steps over the tokenised training rows.
        state, clock: The progress of the run, and time and tokens since the last evaluation or checkpoint.
        logger, reporter: Write the records of the run to its files, and to people.
        signals: The signal that asked to stop, if there was one.

    Example:
        >>> recipe = load_recipe("recipe.toml")
        >>> data = prepare(recipe)  # of bert_tasks.recipe.check
        >>> model = TaskModel.from_pretrained(base, task=data.heads[""].task)
        >>> result = Trainer(objective=model, splits=data.splits, optim=recipe.optim, run=recipe.run).train()
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
            objective: The objective to minimise, or a model to train on the labels. Afterwards the model holds the best
                weights.
            splits: The checked rows.
            optim, run: The sections ``[optim]`` and ``[run]`` of a recipe. ``run.output_dir`` is the folder of the run.
            model_settings: The section ``[model]`` as a mapping.
            recipe_text: The resolved recipe, which is written into the folder.
            callback: Called with each record of metrics.jsonl, or a `TrainerCallback`.
            optimizer: Makes the optimizer from parameter groups. Default: the optimizer of ``optim.optimizer``.
        """
        self.objective = objective if isinstance(objective, Objective) else Supervised(objective)
        self.model, self.splits, self.optim, self.run = self.objective.model, splits, optim, run
        self.model_settings, self.recipe_text, self.optimizer = model_settings, recipe_text, optimizer
        self.callback = TrainerCallback.of(callback)
        self.output_dir = Path(str(run.output_dir))
        self.accelerator = make_accelerator(optim.mixed_precision)
        self.state = TrainerState(tasks=self.model.tasks)
        self.clock = Clock()

    def train(self, *, overwrite: bool = False, progress: bool = True) -> FitResult:
        """Trains, or resumes the run in the folder. Raises the errors of ``fit``.

        Args:
            overwrite: True to replace a run that is in the folder. Otherwise the result of a finished run is
                returned.
            progress: True to show progress on standard error.
        """
        broadcast_from_main(self.accelerator, outputs.check_folder, self.output_dir)
        trainable = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        with ExitStack() as stack:
            # The main process holds the folder for all of them.
            broadcast_from_main(self.accelerator, lambda: stack.enter_context(locked(self.output_dir)))
            stack.callback(self._release_model, trainable)
            if self.accelerator.num_processes > 1:
                self._check_agreement()
            self.preflight()
            existing = None if overwrite else self.folder.existing_run()
            if existing is not None and existing.summary is not None and not existing.changed:
                return self._reuse(existing.summary)
            self._begin(existing, stack, progress=progress)
            return self._finish(self._run_steps())

    def _run_steps(self) -> float:
        """Runs the steps, and returns their tokens per second.

        It reads a step's numbers while the device computes the next one.
        """
        state, steps, tokens, before = self.state, self.steps, 0, self.state.seconds
        if state.step and self._evaluation_is_due() and state.evaluated_step != state.step:
            self._evaluate()  # the run was stopped during this evaluation
        pending, self.clock = None, Clock()
        for step, batch in steps.batches(state.step):
            if state.stopped:
                break
            sums = steps.backward(step, batch)
            self.clock.tokens += int(steps.samples.lengths[batch].sum())
            if pending is not None and self._log_step(pending):  # a process was asked to stop before this step
                steps.optimizer.accelerated.zero_grad(set_to_none=True)
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
                tokens += self.clock.tokens
                if evaluating:
                    self._evaluate()
                else:
                    self._save()
                if stopping and not state.stopped and state.step < steps.plan.total:
                    self._stop()
                pending, self.clock = None, Clock()
        return tokens / (state.seconds - before) if tokens else 0.0

    def preflight(self) -> None:
        """Fits the task to the training rows, freezes parameters, and checks the run.

        Raises:
            DataError, UsageError: A problem would stop the run later.
        """
        model, optim, validation = self.model, self.optim, self.splits.validation
        if (
            not validation
            or (len(validation) > 1 and "" in validation)
            or any(SEPARATOR in name for name in validation)
        ):
            raise UsageError(
                f"the validation sets are {list(validation)}, expected at least one, with a name for each of several, "
                f"without {SEPARATOR!r} in names"
            )
        fit_to_splits(model, self.splits)
        if self.optimizer is None:
            load_factory(optim)
        if optim.lora_rank is not None:
            freeze_encoder(self.objective, optim)
        if self.run.save_adapter and (optim.lora_rank is None or not model.can_save_adapter):
            raise no_adapters(model.task_name)
        freeze(model, embeddings=optim.freeze_embeddings, layers=optim.freeze_layers)
        if self.run.metric_for_best_model is not None:
            check_metric(model, self.run.metric_for_best_model, validation, self.accelerator, self.objective.forward_fn)

    @cached_property
    def folder(self) -> RunFolder:
        """The folder, with the settings of the recipe, of the model and of the data."""
        model, data = self.model, outputs.data_metadata(self.splits)
        settings = outputs.flat_settings(
            {"gradient_checkpointing": False, **self.model_settings},
            self.optim,
            self.run,
            settings={**model.settings, "labels": list(model.labels)},
            encoder=vars(model.config),
            data={name: split["fingerprint"] for name, split in data.items()},
            **self.objective.settings,
        )
        only = model.tasks.get("")
        settings["task"] = model.task_name if only is None else type(only).__name__
        if not isinstance(self.objective, Supervised):
            settings["objective"] = type(self.objective).__name__
        if self.optimizer is not None:
            settings["optim.optimizer"] = getattr(self.optimizer, "__qualname__", repr(self.optimizer))
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
        self.state = TrainerState(tasks=model.tasks)
        is_main = accelerator.is_main_process
        self.logger = MetricsLogger(
            self.output_dir, trackers=run.trackers if is_main else (), project=run.project, silent=not progress
        )
        self.reporter = Reporter(
            total_steps=self.steps.plan.total, logging_steps=run.logging_steps, visible=progress and is_main
        )
        stack.enter_context(closing(self.logger))
        stack.enter_context(closing(self.reporter))
        self.signals = stack.enter_context(stop_signals())
        metadata = run_metadata(self.steps, splits, run)
        for note in start_notes(self.steps, splits, metadata["attention"]):
            self.reporter.note(note)
        if existing is None:
            broadcast_from_main(accelerator, outputs.clear, self.output_dir)
        else:
            metadata |= self._resume(existing, metadata)
        self.folder.write_metadata(metadata)
        if run.trackers:
            changed = existing is not None and bool(existing.changed)
            options = {"step": self.state.step, "changed": changed}
            broadcast_from_main(accelerator, self.logger.start_trackers, metadata, self.folder.settings, **options)

    def _resume(self, existing: ExistingRun, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Loads the newest checkpoint on every process, and rewinds the folder to it."""
        earlier = existing.metadata
        changed = [*existing.changed, *outputs.environment_changes(earlier, metadata)]
        notes = [f"changed since the run began: {change}" for change in changed]
        loaded, resume_notes = self.folder.load_newest(existing, self.steps.plan.total)
        if loaded is not None:
            if earlier.get("encoder_weights") != metadata["encoder_weights"]:
                raise CheckpointError(
                    "the encoder has other weights than at the start of the run. Checkpoints hold only the adapters "
                    f"and the head. Pass the model that the run began with, or "
                    f"{argument('overwrite')} to start again"
                )
            load_state(loaded, self.steps, self.state)
        for note in [*notes, *resume_notes, *self.folder.rewind(loaded, self.state, self.steps)]:
            self.reporter.note(note)
        self.state.update_early_stopping(self.run.early_stopping_patience)
        step = self.state.step
        return {
            "initial_weights": earlier.get("initial_weights"),
            "resumed_at": [*earlier.get("resumed_at", []), step],
            "changes": [*earlier.get("changes", []), *({"step": step, "change": str(it)} for it in changed)],
        }

    def _evaluation_is_due(self) -> bool:
        step, every = self.state.step, self.run.eval_steps
        due = self.steps.order.ends_epoch(step) if every is None else _is_multiple(step, every)
        return due or step == self.steps.plan.total

    def _log_step(self, result: StepResult) -> bool:
        """Reports a step. Returns True if a process was asked to stop."""
        is_main, rows_of = self.accelerator.is_main_process, self.steps.samples.rows
        step, epoch, speed = result.step + 1, self.steps.order.epoch_of(result.step), self.clock.tokens_per_second
        record: dict[str, Any] = {"event": "step", "step": step, "epoch": epoch + 1}
        try:
            log, self.state.overflows = read_step_metrics(
                result, overflows=self.state.overflows, mixed_precision=self.optim.mixed_precision, rows_of=rows_of
            )
        except DivergedError:
            loss, norm, *_ = result.values.tolist()
            record |= {"event": "diverged", "loss": loss, "learning_rate": result.learning_rate, "grad_norm": norm}
            with suppress(CheckpointError):  # the divergence is the error to report
                if is_main:
                    self.logger.record({**record, "rows": [row + 1 for row in rows_of(result.batch)]})
            raise
        self.reporter.step(log, epoch=epoch, tokens_per_second=speed)
        if is_main:
            self.callback.on_step(self, log)
        if is_main and (_is_multiple(step, self.run.logging_steps) or step == self.steps.plan.total):
            record |= {"loss": log.loss, "learning_rate": log.learning_rate, "grad_norm": log.grad_norm}
            record |= {"terms": dict(log.terms)} if len(result.terms) > 1 else {}
            record["tokens_per_second"] = round(speed, 1)
            self.logger.record(record)
            self.callback.on_record(self, record)
        return log.stop

    def _evaluate(self) -> None:
        """Evaluates all validation sets and saves the checkpoint, then a better model."""
        state, signals = self.state, self.signals
        self.steps.optimizer.update_weights()
        self.objective.eval()  # until the next step
        forward_fn = self.objective.forward_fn
        evaluate = partial(evaluate_all, self.model, self.validation, self.accelerator, forward_fn=forward_fn)
        try:
            evaluation = evaluate(stop=lambda: signals.received is not None)
        except GivenUpError:
            self._save()
            if state.step < self.steps.plan.total:
                self._stop()
            evaluation = evaluate()  # nothing but this evaluation is left of the run
        metadata = metric_metadata(self.model.tasks, self.run, list(self.validation))
        is_best = state.add_evaluation(
            evaluation.metrics,
            rank_of(evaluation.metrics, metadata),
            tasks=evaluation.tasks,
            collapse=evaluation.collapses[split_key(metadata["best"], metadata["sets"])[0]],
        )
        state.update_early_stopping(self.run.early_stopping_patience)
        epoch = self.steps.order.epoch_of(state.step - 1)
        record = {"event": "evaluation", "step": state.step, "epoch": epoch + 1, "metrics": evaluation.metrics}
        broadcast_from_main(self.accelerator, self.logger.record, record)
        self._save()
        if is_best:
            self.folder.publish(state.tasks, self.steps.optimizer.adapters)
        asked = broadcast_from_main(self.accelerator, lambda: bool(self.callback.on_evaluate(self, dict(record))))
        overall = {  # the metrics over all rows, each number once
            metric_key(name, metric): value
            for name, metrics in metrics_by_set(evaluation.metrics, metadata["sets"]).items()
            for metric, value in metric_table(evaluation.tasks, metrics).overall.items()
        }
        self.reporter.evaluation(state.step, overall, best=is_best)
        if state.stopped:
            self.reporter.note(f"stopped early without a better model in {counted(state.since_best, 'evaluation')}")
        elif asked:
            state.stopped = True
            self.reporter.note("the callback asked to stop")
        self.objective.train()

    def _save(self) -> None:
        """Writes a checkpoint of the run as it is now."""
        self.steps.optimizer.update_weights()
        path = self.folder.save_checkpoint(self.steps, self.state, seed=self.run.seed, keep_last=self.run.keep_last)
        if self.accelerator.is_main_process:
            self.callback.on_save(self, path)

    def _stop(self) -> NoReturn:
        """Ends a run that is saved."""
        received = signal.SIGTERM if self.signals.received is None else self.signals.received
        raise StoppedError(
            f"stopped by {received.name} after step {self.state.step} of {self.steps.plan.total}. The run is saved in "
            f"{self.output_dir}. Run the same command again to resume it",
            signal_number=received,
        )

    def _finish(self, speed: float) -> FitResult:
        """Loads the best weights and writes the summary, which marks the run as finished."""
        state, sets = self.state, tuple(self.splits.validation)
        self.steps.optimizer.release()
        self._load_best()
        self.model.tasks = state.tasks
        agreement = self.objective.agreement(self.validation, self.accelerator)
        if agreement:
            event = {"event": "agreement", "step": state.step, "agreement": agreement}
            broadcast_from_main(self.accelerator, self.logger.record, event)
        notes: tuple[str, ...] = ()
        if self.splits.train.sample:
            notes = (f"the model was trained on {self.splits.train.sample}. Train on all rows before you use it",)
        name, _ = split_key(metric_metadata(state.tasks, self.run, sets)["best"], sets)
        if state.best_collapse is not None:
            where = f" of the validation set {name!r}" if name else ""
            remedies = [f"a lower learning_rate (now {self.optim.learning_rate:g})"]
            for task in state.tasks.values():
                remedies += [remedy for remedy in task.output.remedies if remedy not in remedies]
            epochs = self.steps.order.epochs(self.steps.plan.total)
            notes = (
                *notes,
                f"the best model {state.best_collapse}{where}, although the labels of the validation rows differ. "
                f"Try {', '.join(remedies)} or more epochs (now {epochs:.3g})",
            )
        result = FitResult(
            metrics=state.best,
            last_metrics=state.last,
            best_step=state.best_step,
            steps=state.step,
            stopped_early=state.stopped,
            train_seconds=round(state.seconds, 3),
            output_dir=self.output_dir,
            tasks=state.tasks,
            validation_sets=sets,
            collapse=state.best_collapse,
            notes=notes,
        )
        path = self.output_dir / outputs.SUMMARY
        broadcast_from_main(self.accelerator, outputs.write_json, path, result.summary())
        self._remove_checkpoints()
        for note in notes:
            self.reporter.note(note)
        frequent = most_frequent_label(self.splits.validation[name], self.model.row_columns)
        self.reporter.line(
            f"trained for {state.seconds:.0f} s at {speed:,.0f} tokens/s, "
            f"best epoch {self.steps.order.epochs(state.best_step):.3g} of {self.steps.order.epochs(state.step):.3g}"
            + ("" if frequent is None else f", most frequent label {frequent[0]!r} ({frequent[1]:.1%})")
        )
        return result

    def _reuse(self, summary: Mapping[str, Any]) -> FitResult:
        """Returns the result of a finished run, with its model and its tuned task."""
        folder, tasks = self.output_dir / outputs.MODEL, self.model.tasks
        only = type(tasks[""]) if "" in tasks else None
        stored = broadcast_from_main(self.accelerator, lambda: stored_tasks(CheckpointFolder.open(folder), only))
        self.model.tasks = stored
        self._load_best()
        self._remove_checkpoints()
        sets = tuple(self.splits.validation)
        return FitResult.from_summary(summary, output_dir=self.output_dir, tasks=stored, validation_sets=sets)

    def _remove_checkpoints(self) -> None:
        """Removes the checkpoints of a finished run, unless they are to be kept."""
        if not self.run.keep_checkpoints:
            broadcast_from_main(self.accelerator, remove_checkpoints, self.folder.checkpoints)

    def _load_best(self) -> None:
        """Loads the weights of ``model/``, which only the main process needs to see."""
        broadcast_from_main(self.accelerator, self.model.restore, self.output_dir / outputs.MODEL)
        if self.accelerator.num_processes > 1:
            for parameter in self.model.parameters():
                broadcast(parameter.data)

    def _release_model(self, trainable: Sequence[nn.Parameter]) -> None:
        """Sets the model to evaluation mode, unfreezes and unwraps it, drops gradients."""
        for parameter in trainable:
            parameter.requires_grad_(True)
        self.objective.zero_grad(set_to_none=True)
        self.model.encoder.gradient_checkpointing = False
        set_sparse_gradients(self.objective, False)
        self.accelerator.unwrap_model(self.objective, keep_fp32_wrapper=False).eval()


class TrainerCallback:
    """Hooks into a run, which the main process calls. Override the ones you need.

    Call ``trainer.steps.optimizer.update_weights()`` before ``on_step`` reads word embeddings or adapters, which
    otherwise get their updates later.

    Example:
        >>> class Norms(TrainerCallback):
        ...     def on_step(self, trainer, log):
        ...         print(log.step, log.grad_norm)
        >>> result = fit(model, "train.csv", output_dir="runs/x", epochs=1, callback=Norms())
    """

    def on_step(self, trainer: Trainer, log: StepLog) -> None:
        """Called after each optimizer step, with its numbers."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Called with each record of a step in metrics.jsonl, after it is written."""

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> object:
        """Called with the record of an evaluation. A true result ends the run."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Called with the folder of a checkpoint, after it is written."""

    @staticmethod
    def of(callback: "Callback | None") -> "TrainerCallback":
        """Returns the hooks of what a user passes.

        Raises:
            UsageError: It is neither a `TrainerCallback` nor a function.
        """
        if callback is None:
            return TrainerCallback()
        if isinstance(callback, TrainerCallback):
            return callback
        if not callable(callback):
            raise UsageError(f"callback: expected a function or a TrainerCallback, got a {type(callback).__name__}")
        return _RecordCallback(callback)


# A function that gets each record of metrics.jsonl: ``record["event"]`` is "step" (with step, epoch, loss,
# learning_rate, grad_norm, tokens_per_second, and ``terms``, the mean of each loss term, if there are several) or
# "evaluation" (with step, epoch, metrics). A true return value for an evaluation ends the run.
Callback = TrainerCallback | Callable[[dict[str, Any]], object]


class _RecordCallback(TrainerCallback):
    """Calls a function with each record, when all weights are up to date."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self.function = function

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        trainer.steps.optimizer.update_weights()
        self.function(record)

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> object:
        return self.function(record)


def prepare_model(model: AnyModel, *, seed: int) -> None:
    """Makes a model ready for a run. A new head is drawn from the run's seed.

    Raises:
        UsageError: The model cannot be trained and saved, because it is exported, wrapped by another library, or no
            ``TaskModel``.
    """
    if not isinstance(model, AnyModel):
        raise UsageError(
            f"expected a TaskModel, got a {type(model).__name__}. If another library has wrapped the model, pass "
            "the TaskModel inside. Merge adapters of peft with model = peft_model.merge_and_unload()"
        )
    if model.no_weights_reason:
        raise UsageError(f"it cannot be trained, because {model.no_weights_reason}")
    model.check_parameters()
    model.draw_new_head(seed)


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

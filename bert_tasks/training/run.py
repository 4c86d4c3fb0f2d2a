"""A recipe becomes a run: data, labels, task and model are made in the order in which they depend on each other.

Owns that order, the report of ``check`` and the dry run. Must not know the command line or how training works.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.data.checks import DataReport, TokenCounts, check_splits, data_report, named_splits
from bert_tasks.data.features import Cuts, token_lengths
from bert_tasks.data.formats import named_format
from bert_tasks.data.splits import Splits, load_splits, stored_reading
from bert_tasks.data.table import RowTable
from bert_tasks.errors import RecipeError
from bert_tasks.inference import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.model.inputs import tokenized
from bert_tasks.model.predicting import tokenizer_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import Recipe, build_task, load_recipe, resolved_toml
from bert_tasks.run_dir import files as outputs
from bert_tasks.run_dir.checkpoints import FOLDER, checkpoints
from bert_tasks.tasks.base import Task
from bert_tasks.training.job import FitResult, Job, prepare_model
from bert_tasks.training.loop import preflight, run_job
from bert_tasks.training.sampling import epoch_batches, total_steps, warmup_steps
from bert_tasks.training.state import ExistingRun, existing_run
from bert_tasks.training.tracking import check_installed


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A recipe's data and task, checked."""

    recipe: Recipe
    task: Task
    splits: Splits


def prepare(recipe: Recipe) -> Prepared:
    """Reads and checks all rows and fixes the label order.

    The labels are the recipe's; else those of the format (GLUE's order); else those of the training rows, sorted.

    Raises:
        DataError: naming every bad row of all files.
        RecipeError: settings that do not fit the labels.
    """
    draft = build_task(recipe)
    stated: tuple[str, ...] = draft.labels
    if not stated and recipe.data.format is not None:
        stated = tuple(named_format(recipe.data.format).label_names.values())
    splits = load_splits(recipe.data, columns=draft.columns, seed=recipe.run.seed, labels=stated)
    labels = check_splits(splits, columns=draft.columns, labels=stated)
    return Prepared(recipe=recipe, task=build_task(recipe, labels) if labels else draft, splits=splits)


def load_model(prepared: Prepared) -> TaskModel:
    """The recipe's checkpoint with the task's head; a new head is drawn from the recipe's seed."""
    recipe = prepared.recipe
    model = TaskModel.from_pretrained(recipe.model.name, task=prepared.task, revision=recipe.model.revision)
    prepare_model(model, seed=recipe.run.seed)
    return model


def train(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FitResult:
    """Runs a recipe, or goes on with its run; a finished run in its output folder is reported, not repeated.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, DivergedError, StoppedError: see ``fit``.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    check_installed(loaded.run.trackers)
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    broadcast_from_main(accelerator, lambda: outputs.check_folder(_folder(loaded)))
    prepared = main_process_first(accelerator, lambda: prepare(loaded))
    return run_job(job_of(prepared), overwrite=overwrite, progress=progress)


def _folder(recipe: Recipe) -> Path:
    if recipe.run.output_dir is None:
        raise RecipeError("the run needs a folder: set run.output_dir in the recipe, or pass --output-dir")
    return Path(recipe.run.output_dir)


def job_of(prepared: Prepared) -> Job:
    """What there is to train, with the model loaded."""
    recipe, model = prepared.recipe, load_model(prepared)
    model.reading = stored_reading(recipe.data)
    return Job(
        model=model,
        splits=prepared.splits,
        optim=recipe.optim,
        run=recipe.run,
        output_dir=_folder(recipe),
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        source={"name": recipe.model.name, "revision": recipe.model.revision},
        provenance={outputs.RECIPE: resolved_toml(recipe)},
    )


def check(recipe: Recipe) -> DataReport:
    """Label counts, token lengths, truncation, duplicates and overlap of a recipe's data; trains nothing.

    Raises:
        DataError, RecipeError, CheckpointError: what would stop ``train``.
    """
    check_installed(recipe.run.trackers)
    prepared = prepare(recipe)
    model, splits = load_model(prepared), prepared.splits
    preflight(model, splits, recipe.optim, recipe.run, make_accelerator(recipe.optim.mixed_precision))
    return _report(model, splits)


def _report(model: TaskModel, splits: Splits) -> DataReport:
    task = model.task

    def counts(table: RowTable) -> TokenCounts:
        features = tokenized(table, task, model).features
        cuts = Cuts.of(features, rows=len(table))
        return TokenCounts(lengths=token_lengths(features), cuts=cuts, notes=task.cut_notes(cuts))

    tokens = {name: counts(table) for name, table in named_splits(splits)}
    return data_report(splits, tokens, columns=task.columns, labels=task.labels)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would do."""

    steps: int
    warmup_steps: int
    tokens_per_epoch: int
    parameters: int
    report: DataReport
    load_summary: str
    example: str
    output_dir: str
    state: str

    def to_json(self) -> dict[str, Any]:
        return {**{key: value for key, value in vars(self).items() if key != "report"}, "data": self.report.to_json()}

    def lines(self) -> list[str]:
        """For people."""
        return [
            *self.report.lines(),
            f"weights: {self.load_summary}",
            f"parameters: {self.parameters:,}",
            f"steps: {self.steps} ({self.warmup_steps} of warm-up), {self.tokens_per_epoch:,} tokens an epoch",
            f"first row of the first batch: {self.example}",
            f"output folder: {self.output_dir}: {self.state} (nothing was written)",
        ]


def dry_run(recipe: Recipe, *, overwrite: bool = False) -> DryRun:
    """Everything ``train`` does before the first step, without writing to the output folder.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: what would stop ``train``.
    """
    check_installed(recipe.run.trackers)
    folder = _folder(recipe)
    outputs.check_folder(folder)
    job = job_of(prepare(recipe))
    model, optim = job.model, recipe.optim
    preflight(model, job.splits, optim, recipe.run, make_accelerator(optim.mixed_precision))
    earlier = None if overwrite else existing_run(job)
    samples = tokenized(job.splits.train, model.task, model)
    steps = total_steps(len(samples), optim.batch_size, optim.epochs)
    first = epoch_batches(samples.lengths, batch_size=optim.batch_size, seed=recipe.run.seed, epoch=0)[0][0]
    return DryRun(
        steps=steps,
        warmup_steps=warmup_steps(optim.warmup_ratio, steps),
        tokens_per_epoch=int(samples.lengths.sum()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        report=_report(model, job.splits),
        load_summary="" if model.load_report is None else model.load_report.summary(),
        example=str(tokenizer_of(model).decode(samples.features_of([first])[0]["input_ids"])),
        output_dir=str(folder),
        state=_state(folder, earlier),
    )


def _state(folder: Path, earlier: ExistingRun | None) -> str:
    """What a run would find in its folder."""
    if earlier is None:
        return "a new run"
    if earlier.is_complete:
        return "this run is complete"
    saved = checkpoints(folder / FOLDER)
    return f"a run that goes on from {saved[-1].name}" if saved else "a run without a checkpoint, which starts again"

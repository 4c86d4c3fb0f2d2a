"""Cross-validation with one run per fold and out-of-fold predictions.

Owns ``folds.json`` and ``out_of_fold.jsonl``, and the metrics over all rows and over the folds. data/folds.py decides
which rows are in a fold.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field

from bert_tasks.checkpoints.hub import FOLDS
from bert_tasks.data.columns import Row
from bert_tasks.data.conversion import plain
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.rows import Rows
from bert_tasks.data.writers import json_line, whole_file
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError, argument
from bert_tasks.experiments.group import RunGroup
from bert_tasks.inference import evaluate_data
from bert_tasks.inference.writing import INPUT
from bert_tasks.metrics.tables import format_number, split_key
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.recipe.schema import Recipe, load_recipe
from bert_tasks.tables import Result, Table
from bert_tasks.tasks.base import Task
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.records import Count, Metrics, Number, Record
from bert_tasks.training.run import DryRun, dry_run, run_recipe

PREDICTIONS = "out_of_fold.jsonl"
_COMPARED = ("count", "group", "seed")  # of the section: with others the rows are in other folds


class FoldMetric(Record):
    """A metric of predictions for held-out rows.

    Attributes:
        out_of_fold: The value over all rows together. None for the loss, or if there is no value.
        mean, std: Mean and sample standard deviation (divided by folds - 1) over the folds. NaN if a fold has no value.
    """

    model_config = ConfigDict(frozen=True, validate_by_name=True)
    out_of_fold: Number | None = Field(validation_alias="pooled", serialization_alias="pooled")
    mean: Number
    std: Number


class FoldRun(Record):
    """One fold's run, as in ``folds.json``.

    Attributes:
        rows: Number of held-out rows.
        metrics: The metrics of the best model on these rows.
        collapse: As in ``FitResult``, on the held-out rows.
        validation_metrics: The metrics of the best model on the validation rows.
        notes, reused: As in ``FitResult``. The file does not have them.
    """

    fold: Annotated[int, Field(ge=1, lt=2**31)]
    output_dir: Annotated[Path, Field(strict=False)]
    rows: Count
    metrics: Metrics
    collapse: str | None
    validation_metrics: Metrics
    best_step: Count
    steps: Count
    notes: list[str] = Field(default_factory=list, exclude=True)
    reused: bool = Field(default=False, exclude=True)


class FoldsRecord(Record):
    """``folds.json``. See ``FoldsResult``."""

    metric: str
    summary: str
    rows: Count
    metrics: dict[str, FoldMetric]
    runs: Annotated[list[FoldRun], Field(min_length=1)]
    predictions: str
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class FoldsResult(Result):
    """The runs of all folds, and the predictions for all rows.

    Attributes:
        metric, summary: The metric that is shown for each fold, and how the rows were divided.
        rows, predictions, folds: All rows, in the order of the data, with their predictions and folds.
        task: The task of all folds' models, without the values that each fold fitted to its rows.
    """

    output_dir: Path
    metric: str
    summary: str
    runs: tuple[FoldRun, ...]
    rows: Sequence[Row]
    predictions: Sequence[Prediction]
    folds: Sequence[int]
    task: Task

    @property
    def metrics(self) -> dict[str, FoldMetric]:
        """Every metric over all rows and over the folds."""
        overall = self.task.output.metrics(self.predictions, self.rows)
        metrics = {}
        for name in dict.fromkeys([*overall, *(name for run in self.runs for name in run.metrics)]):
            values = [run.metrics.get(name, math.nan) for run in self.runs]
            is_finite = all(map(math.isfinite, values))
            metrics[name] = FoldMetric(
                out_of_fold=overall.get(name),
                mean=statistics.fmean(values) if is_finite else math.nan,
                std=statistics.stdev(values) if is_finite else math.nan,
            )
        return metrics

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of the metrics must know."""
        notes = []
        for run in self.runs:
            notes += [f"fold {run.fold}: {note}" for note in run.notes]
            if run.collapse is not None and not run.notes:
                notes.append(f"fold {run.fold}: the model {run.collapse}, on the rows of the fold")
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``folds.json``."""
        record = FoldsRecord(
            metric=self.metric,
            summary=self.summary,
            rows=len(self.rows),
            metrics=self.metrics,
            runs=list(self.runs),
            predictions=str(self.output_dir / PREDICTIONS),
            notes=list(self.notes),
        )
        return record.to_json()

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        of_folds = []
        for run in self.runs:
            steps = f"{run.best_step} of {run.steps}"
            state = "complete already" if run.reused else ""
            of_folds.append((str(run.fold), str(run.rows), format_number(run.metrics.get(self.metric)), steps, state))
        metrics = self.metrics
        overall = {name: metric.out_of_fold for name, metric in metrics.items() if metric.out_of_fold is not None}
        shown = self.task.output.metric_table(overall).overall
        of_metrics = []
        for name, metric in metrics.items():
            if name in shown or name not in overall:
                of_metrics.append((name, *map(format_number, (metric.out_of_fold, metric.mean, metric.std))))
        folds = Table(columns=("fold", "rows", self.metric, "best step", ""), rows=of_folds)
        spread = Table(columns=("metric", "all rows", "mean", "std"), rows=of_metrics)
        tables = [self.summary, "", *folds.lines(), "", *spread.lines(), ""]
        files = [f"predictions: {self.output_dir / PREDICTIONS}", f"runs: {self.output_dir}"]
        return [*tables, *self.notes, *files]


def train_folds(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FoldsResult:
    """Trains one model per fold and predicts each row with the model of its fold.

    ``OUTPUT_DIR/fold-N`` is the run of the recipe with ``folds.fold = N``, whose model has not seen the rows of the
    fold. A finished run is not repeated, and an unfinished one resumes. The metrics are written to ``folds.json``, the
    predictions to ``out_of_fold.jsonl``.

    Args:
        recipe: A recipe with ``[folds]``, or the path of its TOML file.
        overwrite: True to repeat all runs, also runs of other folds that are in the folder.
        progress: True to show progress on standard error.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: See ``fit``. All folders are checked before the first run.
        DivergedError: A run diverged. The runs before it are complete.

    Example:
        >>> train_folds(load_recipe("recipe.toml", overrides=["folds.count=2"])).metrics["accuracy"].out_of_fold
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    group = fold_group(loaded, overwrite=overwrite)
    runs: list[FoldRun] = []
    parts: list[FoldPredictions] = []
    results = group.run(
        lambda planned: run_recipe(planned, progress=progress),
        progress=progress,
        remove=group.existing().values() if overwrite else (),
    )
    for number, trained_run in results:
        if isinstance(trained_run, DivergedError):
            raise DivergedError(f"fold {number}, {trained_run}") from trained_run
        trainer, result = trained_run
        if group.accelerator.is_main_process and not result.reused:  # files of an earlier cross-validation
            for name in (FOLDS, PREDICTIONS, outputs.REPORT):
                (group.folder / name).unlink(missing_ok=True)
        table = cast("Rows", trainer.splits.held_out)
        evaluation = evaluate_data(trainer.model, table, reading=ReadOptions())
        parts.append(FoldPredictions(fold=number, table=table, predictions=evaluation.scores[""].predictions))
        run = FoldRun(
            fold=number,
            output_dir=group.home(number),
            rows=len(table),
            metrics=evaluation.metrics,
            collapse=evaluation.collapse,
            validation_metrics=result.metrics,
            best_step=result.best_step,
            steps=result.steps,
            notes=result.notes,
            reused=result.reused,
        )
        runs.append(run)
    task, sets = trainer.model.one_task().task.without_fitted_values(), result.validation_sets
    _, metric = split_key(metric_metadata({"": task}, loaded.run, sets).best, sets)
    rows, folds, predictions = out_of_fold(parts)
    compared = FoldsResult(
        output_dir=group.folder,
        metric=metric if metric in runs[0].metrics else task.output.primary_metric,
        summary=trainer.splits.division,
        runs=tuple(runs),
        rows=rows,
        predictions=predictions,
        folds=folds,
        task=task,
    )
    if group.accelerator.is_main_process:
        write_predictions(compared)
        outputs.write_json(group.folder / FOLDS, compared.to_json())
    return compared


@dataclass(frozen=True, kw_only=True)
class FoldPredictions:
    """The rows of a fold and the predictions of the model that did not see them."""

    fold: int
    table: Rows
    predictions: Sequence[Prediction]


def out_of_fold(parts: Sequence[FoldPredictions]) -> tuple[list[Row], list[int], list[Prediction]]:
    """Returns all rows in the order of the data, the fold of each, and its prediction.

    Rows of several files have the name of their file as ``file``, because lines are counted in each file.
    """
    table = parts[0].table if parts[0].table.part is None else parts[0].table.part[0]
    of_row: dict[int, tuple[int, Prediction]] = {}
    for fold in parts:
        if fold.table.part is not None:
            pairs = zip(fold.table.part[1].tolist(), fold.predictions, strict=True)
            of_row |= {index: (fold.fold, prediction) for index, prediction in pairs}
    if len(of_row) != len(table):
        raise BertTasksError(f"the folds have {len(of_row)} of {len(table)} rows. Please report this")
    rows: list[Row] = list(table)
    if table.joined_sources:
        files = [source for source, count in table.joined_sources for _ in range(count)]
        rows = [{"file": file, **row} for file, row in zip(files, rows, strict=True)]
    folds, predictions = zip(*(of_row[index] for index in range(len(table))), strict=True)
    return rows, list(folds), list(predictions)


def write_predictions(result: FoldsResult) -> None:
    """Writes line (and file), columns, fold and prediction of each row.

    As in ``predict``, a column that the prediction repeats is skipped, and another one with the name of a field of the
    prediction is called ``input.NAME``.
    """
    labels = {column.name: column.is_label for column in result.task.columns}
    with whole_file(result.output_dir / PREDICTIONS) as file:
        for row, fold, prediction in zip(result.rows, result.folds, result.predictions, strict=True):
            predicted = prediction.to_json()
            taken = {field.name for field in fields(prediction)}
            kept = [name for name in row if name in labels and (labels[name] or name not in predicted)]
            cells = {f"{INPUT}{name}" if name in taken else name: plain(row[name]) for name in kept}
            line = {name: row[name] for name in ("line", "file") if name in row}
            file.write(json_line({**line, **cells, "fold": fold, **predicted}))


def dry_run_folds(recipe: Recipe, *, overwrite: bool = False) -> DryRun:
    """Checks all folders and returns the dry run of the first fold."""
    return dry_run(fold_group(recipe, overwrite=overwrite).first, overwrite=overwrite)


def fold_group(recipe: Recipe, *, overwrite: bool = False) -> RunGroup:
    """Checks the folders of a recipe's runs and returns the runs."""
    section = recipe.folds
    if section is None:
        raise RecipeError("no folds. Set folds.count in the recipe, or pass --folds 5")
    if section.fold is not None:
        raise RecipeError(f"folds.fold = {section.fold} is a single run. Remove it to train all folds")
    group = RunGroup(recipe, "fold", {fold: {"folds": {"fold": fold}} for fold in range(1, section.count + 1)})
    for home in [] if overwrite else group.existing().values():
        path = home / outputs.RECIPE
        before = load_recipe(path).folds if path.is_file() else section
        changed = [
            f"folds.{name} = {getattr(section, name)!r} (was {getattr(before, name)!r})"
            for name in _COMPARED
            if getattr(section, name) != getattr(before, name)
        ]
        if changed:
            raise UsageError(
                f"{group.folder} holds runs that differ in {', '.join(changed)}. Choose another folder, or "
                f"{argument('overwrite')} to replace the runs"
            )
    group.check(overwrite=overwrite)
    return group

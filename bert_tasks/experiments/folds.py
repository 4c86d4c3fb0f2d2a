"""Cross-validation with one run per fold and out-of-fold predictions.

Owns ``folds.json`` and ``out_of_fold.jsonl``, and the metrics over all rows and over the folds. data/folds.py decides
which rows are in a fold.

Each row is predicted by the one model that has seen neither the row nor its label. So the metric over all predictions
together has the uncertainty of all rows, which is less than that of a single validation set.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
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
from bert_tasks.recipe.schema import FoldsSection, Recipe, load_recipe
from bert_tasks.tables import Result, Table
from bert_tasks.tasks.base import Task
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.records import Count, Metrics, Number, Record
from bert_tasks.training.run import DryRun, dry_run, run_recipe

PREDICTIONS = "out_of_fold.jsonl"
_COMPARED = ("count", "group", "seed")  # the settings of [folds] that decide which rows are in which fold


class FoldMetric(Record):
    """One metric of the predictions for held-out rows.

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
        metrics: The metrics of the best model on the held-out rows.
        collapse: As in ``FitResult``, but on the held-out rows.
        validation_metrics: The metrics of the best model on the validation rows, by which it was selected.
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
    """The content of ``folds.json``, whose fields are explained in ``FoldsResult``."""

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
        output_dir: The folder of the cross-validation, with ``folds.json`` and ``out_of_fold.jsonl``.
        metric, summary: The metric that is shown for each fold, and a sentence that says how the rows were divided.
        runs: The run of each fold, in the order of the folds.
        rows, predictions, folds: All rows, in the order of the data, with their predictions and folds.
        task: The task of the models, without the values that each fold fitted to its own rows.
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
        """Every metric over all rows together, and its mean and deviation over the folds.

        The two differ for a metric that is no mean over rows, such as F1. In a fold with few rows such a metric is
        unreliable, and then the value over all rows is the one to report.
        """
        overall = self.task.output.metrics(self.predictions, self.rows)
        names = dict.fromkeys(overall)
        for run in self.runs:  # the loss of a run is not among the metrics of predictions
            names |= dict.fromkeys(run.metrics)
        metrics = {}
        for name in names:
            values = [run.metrics.get(name, math.nan) for run in self.runs]
            mean = std = math.nan
            if all(math.isfinite(value) for value in values):
                mean, std = statistics.fmean(values), statistics.stdev(values)
            metrics[name] = FoldMetric(out_of_fold=overall.get(name), mean=mean, std=std)
        return metrics

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the metrics in whole sentences, for example that a model predicts a single class."""
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
        table = self.task.output.metric_table(overall)
        of_metrics = []
        for name, metric in metrics.items():
            if name in table.overall or name not in overall:  # not the metrics of each label, a long table
                numbers = map(format_number, (metric.out_of_fold, metric.mean, metric.std))
                of_metrics.append((table.title(name), *numbers))
        folds = Table(columns=("fold", "rows", table.title(self.metric), "best step", ""), rows=of_folds)
        spread = Table(columns=("metric", "all rows", "mean", "std"), rows=of_metrics)
        tables = [self.summary, "", *folds.lines(), "", *spread.lines(), ""]
        files = [f"predictions: {self.output_dir / PREDICTIONS}", f"runs: {self.output_dir}"]
        return [*tables, *self.notes, *files]


def train_folds(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FoldsResult:
    """Trains one model per fold and predicts each row with the model of its fold.

    Use it when a single validation set would be too small to trust its metrics, or to get a prediction for every
    labelled row from a model that has not seen its label, for example to find wrong labels. It costs as much as
    ``folds.count`` runs. To learn how much of a score is due to chance, use `train_seeds` instead.

    ``OUTPUT_DIR/fold-N`` is the run of the recipe with ``folds.fold = N``, whose model has not seen the rows of the
    fold. A finished run is not repeated, and an unfinished one resumes. The metrics are written to ``folds.json``, the
    predictions to ``out_of_fold.jsonl``.

    Args:
        recipe: A recipe with ``[folds]``, or the path of its TOML file.
        overwrite: True to repeat all runs, also runs of other folds that are in the folder. Default: False.
        progress: True to show progress on standard error, which is the default.

    Returns:
        The runs of all folds, the predictions for all rows, and the metrics.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: See ``fit``. All folders are checked before the first run.
        DivergedError: A run diverged. The runs before it are complete.

    Examples:
        >>> result = train_folds(load_recipe("recipe.toml", overrides=["folds.count=2"]))
        >>> len(result.runs), len(result.predictions) == len(result.rows)
        (2, True)
        >>> value = result.metrics["accuracy"].out_of_fold  # over all rows together
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    group = fold_group(loaded, overwrite=overwrite)
    runs: list[FoldRun] = []
    parts: list[FoldPredictions] = []
    replaced: Iterable[Path] = ()
    if overwrite:
        replaced = group.existing().values()
    results = group.run(lambda planned: run_recipe(planned, progress=progress), progress=progress, remove=replaced)
    for number, trained_run in results:
        # Without one fold there are no predictions for all rows, so the experiment ends.
        if isinstance(trained_run, DivergedError):
            raise DivergedError(f"fold {number}, {trained_run}") from trained_run
        trainer, result = trained_run
        if group.accelerator.is_main_process and not result.reused:  # files of an earlier cross-validation
            for name in (FOLDS, PREDICTIONS, outputs.REPORT):
                (group.folder / name).unlink(missing_ok=True)
        # The model predicts the rows of the fold after the run, which never reads them.
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
    # The folds have fitted other thresholds and weights, of which none is that of all rows.
    task, sets = trainer.model.one_task().task.without_fitted_values(), result.validation_sets
    _, metric = split_key(metric_metadata({"": task}, loaded.run, sets).best, sets)
    if metric not in runs[0].metrics:  # for example a metric of one's own, which selected the best models
        metric = task.output.primary_metric
    rows, folds, predictions = out_of_fold(parts)
    compared = FoldsResult(
        output_dir=group.folder,
        metric=metric,
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
    table = parts[0].table
    if table.part is not None:
        table = table.part[0]  # all rows, of which each fold holds some
    of_row: dict[int, tuple[int, Prediction]] = {}  # the fold and the prediction of each row, by its number
    for fold in parts:
        if fold.table.part is not None:
            pairs = zip(fold.table.part[1].tolist(), fold.predictions, strict=True)
            of_row |= {index: (fold.fold, prediction) for index, prediction in pairs}
    # Every row is in exactly one fold. If that failed, metrics over "all rows" would be wrong without a sign.
    if len(of_row) != len(table):
        raise BertTasksError(f"the folds have {len(of_row)} of {len(table)} rows. Please report this")
    rows: list[Row] = list(table)
    if table.joined_sources:
        files: list[str] = []
        for source, count in table.joined_sources:
            files += [source] * count
        rows = [{"file": file, **row} for file, row in zip(files, rows, strict=True)]
    folds, predictions = zip(*(of_row[index] for index in range(len(table))), strict=True)
    return rows, list(folds), list(predictions)


def write_predictions(result: FoldsResult) -> None:
    """Writes the line (and the file), the columns, the fold and the prediction of each row.

    As in ``predict``, a column that the prediction repeats is skipped, and another one with the name of a field of the
    prediction is called ``input.NAME``. Labels are always written, so that they can be compared with the prediction.
    """
    labels = {column.name: column.is_label for column in result.task.columns}
    with whole_file(result.output_dir / PREDICTIONS) as file:
        for row, fold, prediction in zip(result.rows, result.folds, result.predictions, strict=True):
            predicted = prediction.to_json()
            taken = {field.name for field in fields(prediction)}
            cells: dict[str, Any] = {}
            for name, cell in row.items():
                if name not in labels or (name in predicted and not labels[name]):
                    continue
                key = f"{INPUT}{name}" if name in taken else name
                cells[key] = plain(cell)
            # First where the row is, so that a wrong label can be corrected in its file.
            line = {name: row[name] for name in ("line", "file") if name in row}
            file.write(json_line({**line, **cells, "fold": fold, **predicted}))


def dry_run_folds(recipe: Recipe, *, overwrite: bool = False) -> DryRun:
    """Checks all folders and returns the dry run of the first fold."""
    return dry_run(fold_group(recipe, overwrite=overwrite).first, overwrite=overwrite)


def fold_group(recipe: Recipe, *, overwrite: bool = False) -> RunGroup:
    """Checks the folders of a recipe's runs and returns the runs.

    Raises:
        RecipeError: The recipe has no folds, or names a single one.
        UsageError: A folder holds other files, or runs that divide the rows in another way.
    """
    section = recipe.folds
    if section is None:
        raise RecipeError("no folds. Set folds.count in the recipe, or pass --folds 5")
    if section.fold is not None:
        raise RecipeError(f"folds.fold = {section.fold} is a single run. Remove it to train all folds")
    group = RunGroup(recipe, "fold", {fold: {"folds": {"fold": fold}} for fold in range(1, section.count + 1)})
    if not overwrite:
        _check_division(group, section)
    group.check(overwrite=overwrite)
    return group


def _check_division(group: RunGroup, section: FoldsSection) -> None:
    """Raises UsageError if runs in the folder belong to another division of the rows.

    Models of two divisions must not be mixed, because some rows would then be predicted by a model that has seen them.
    """
    for home in group.existing().values():
        path = home / outputs.RECIPE
        before = load_recipe(path).folds if path.is_file() else section
        changed: list[str] = []
        for name in _COMPARED:
            now, earlier = getattr(section, name), getattr(before, name)
            if now != earlier:
                changed.append(f"folds.{name} = {now!r} (was {earlier!r})")
        if changed:
            raise UsageError(
                f"{group.folder} holds runs that differ in {', '.join(changed)}. Choose another folder, or "
                f"{argument('overwrite')} to replace the runs"
            )

"""Cross-validation: one run per fold, and predictions for every row by a model that was trained without it.

Owns the folder of the runs (``fold-1``, ``fold-2``, ..., ``folds.json`` and ``out_of_fold.jsonl``), and the metrics
over all rows and over the folds. Which rows are in a fold is decided in data/folds.py.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bert_tasks.checkpoints.hub import FOLD_RUN, FOLDS, fold_runs
from bert_tasks.data.columns import Row
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.table import RowTable
from bert_tasks.data.validator import plain
from bert_tasks.data.writers import json_line, whole_file
from bert_tasks.distributed import broadcast_from_main, make_accelerator
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.seeds import check_run_folders, format_number, format_table
from bert_tasks.inference import evaluate_data
from bert_tasks.inference.output import INPUT
from bert_tasks.metrics.tables import split_key
from bert_tasks.recipe.schema import Recipe, build_task, load_recipe
from bert_tasks.storage import locked
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.run import DryRun, dry_run, trained
from bert_tasks.training.state import FitResult

PREDICTIONS = "out_of_fold.jsonl"
_COMPARED = ("count", "group", "seed")  # of the section: with others the rows are in other folds


@dataclass(frozen=True, kw_only=True)
class FoldRun:
    """One fold's run.

    Attributes:
        rows: how many rows are held out.
        metrics: of the best model on these rows; ``result`` has those on the validation rows that picked it.
        collapse: see ``FitResult``; on the rows that are held out.
    """

    fold: int
    output_dir: Path
    rows: int
    metrics: Mapping[str, float]
    result: FitResult
    collapse: str | None = None


@dataclass(frozen=True, kw_only=True)
class FoldMetric:
    """A metric of predictions for rows that are held out.

    Attributes:
        pooled: of the predictions for all rows together; None for the loss.
        mean, std: of the folds' values, with the sample standard deviation (divided by folds - 1); NaN if a fold has
            no such value.
    """

    pooled: float | None
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class FoldsResult:
    """The runs of all folds, and the predictions for all rows.

    Attributes:
        metric: the metric that is shown for each fold.
        summary: how the rows were divided.
        rows: all rows, in the order of the data, and ``predictions`` for them.
        folds: the fold of each row.
        task: of all folds' models, without the values that each fold fitted to its rows.
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
        pooled = self.task.metrics(self.predictions, self.rows)
        names = dict.fromkeys([*pooled, *(name for run in self.runs for name in run.metrics)])
        found = {}
        for name in names:
            values = [run.metrics.get(name, math.nan) for run in self.runs]
            whole = all(map(math.isfinite, values))
            found[name] = FoldMetric(
                pooled=pooled.get(name),
                mean=statistics.fmean(values) if whole else math.nan,
                std=statistics.stdev(values) if whole else math.nan,
            )
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of the metrics must know."""
        found = []
        for run in self.runs:
            found += [f"fold {run.fold}: {note}" for note in run.result.notes]
            if run.collapse is not None and not run.result.notes:
                found.append(f"fold {run.fold}: the model {run.collapse}, on the rows of the fold")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The content of ``folds.json``."""
        return {
            "metric": self.metric,
            "summary": self.summary,
            "rows": len(self.rows),
            "metrics": {name: asdict(one) for name, one in self.metrics.items()},
            "runs": [
                {
                    "fold": run.fold,
                    "output_dir": str(run.output_dir),
                    "rows": run.rows,
                    "metrics": dict(run.metrics),
                    "validation_metrics": dict(run.result.metrics),
                    "best_step": run.result.best_step,
                    "steps": run.result.steps,
                    "collapse": run.collapse,
                }
                for run in self.runs
            ],
            "predictions": str(self.output_dir / PREDICTIONS),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For people."""
        rows = [("fold", "rows", self.metric, "best step", "")]
        for run in self.runs:
            steps = f"{run.result.best_step} of {run.result.steps}"
            value = format_number(run.metrics.get(self.metric, math.nan))
            state = "complete already" if run.result.reused else ""
            rows.append((str(run.fold), str(run.rows), value, steps, state))
        metrics = self.metrics
        pooled = {name: one.pooled for name, one in metrics.items() if one.pooled is not None}
        names = [name for name in metrics if name in self.task.metric_table(pooled).overall or name not in pooled]
        table = [("metric", "all rows", "mean", "std")]
        for name in names:
            one = metrics[name]
            whole = "-" if one.pooled is None else format_number(one.pooled)
            table.append((name, whole, format_number(one.mean), format_number(one.std)))
        return [
            self.summary,
            "",
            *format_table(rows),
            "",
            *format_table(table),
            "",
            *self.notes,
            f"predictions: {self.output_dir / PREDICTIONS}",
            f"runs: {self.output_dir}",
        ]


def train_folds(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FoldsResult:
    """Trains one model per fold and predicts each row with the model that was trained without it.

    ``OUTPUT_DIR/fold-N`` is an ordinary run, of the recipe with ``folds.fold = N``: its validation rows, which pick the
    best model and tune thresholds, are those of ``data.validation``, else a share of its training rows. The rows of
    the fold are predicted once, when the run is complete. A finished run is not repeated, an unfinished one resumes
    from its newest checkpoint. The metrics are written to ``folds.json``, the predictions to ``out_of_fold.jsonl``,
    one line per row in the order of the data.

    Args:
        overwrite: repeat all runs, also those of other folds that are in the folder.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: as ``train``; all folders are looked at before the first
            run starts.
        DivergedError: a run diverged; the runs before are complete.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    is_main = accelerator.is_main_process
    planned, folder = _planned(loaded, overwrite=overwrite), _folder(loaded)
    if overwrite:  # now: the command that resumes an interrupted run does not overwrite
        broadcast_from_main(accelerator, lambda: _remove_runs(folder))
    runs: list[FoldRun] = []
    parts: list[FoldPredictions] = []
    task, best, summary = build_task(loaded), "", ""
    for number, made in enumerate(planned, start=1):
        if progress and is_main:
            write_message(f"fold {number} of {len(planned)}")
        try:
            trainer, result = trained(made, progress=progress)
        except DivergedError as error:
            raise DivergedError(f"fold {number}: {error}") from error
        if is_main and not result.reused:  # the files of an earlier cross-validation are not of this model
            for name in (FOLDS, PREDICTIONS):
                (folder / name).unlink(missing_ok=True)
        if trainer.splits.held_out is None:
            raise BertTasksError("the run of a fold has no rows of the fold: please report this")
        table = trainer.splits.held_out
        evaluation = evaluate_data(trainer.model, table, reading=ReadOptions())
        parts.append(FoldPredictions(fold=number, table=table, predictions=evaluation.predictions))
        run = FoldRun(
            fold=number,
            output_dir=_folder(made),
            rows=len(table),
            metrics=evaluation.metrics,
            result=result,
            collapse=evaluation.collapse,
        )
        runs.append(run)
        if number == 1:
            task, summary = trainer.model.task.drop_fitted_values(), trainer.splits.division
            best = metric_metadata(task, made.run, result.validation_sets)["best"]
    _, metric = split_key(best, runs[0].result.validation_sets)
    rows, folds, predictions = pooled(parts)
    compared = FoldsResult(
        output_dir=folder,
        metric=metric if metric in runs[0].metrics else task.primary_metric,
        summary=summary,
        runs=tuple(runs),
        rows=rows,
        predictions=predictions,
        folds=folds,
        task=task,
    )
    if is_main:
        write_predictions(compared)
        outputs.write_json(folder / FOLDS, compared.to_json())
    return compared


@dataclass(frozen=True, kw_only=True)
class FoldPredictions:
    """The rows of a fold, which are a part of all rows, and the predictions of the model that did not see them."""

    fold: int
    table: RowTable
    predictions: Sequence[Prediction]


def pooled(parts: Sequence[FoldPredictions]) -> tuple[list[Row], list[int], list[Prediction]]:
    """All rows in the order of the data, the fold of each, and its prediction.

    Rows of several files have the name of theirs as ``file``, because lines are counted in each file.

    Raises:
        BertTasksError: the folds do not have every row exactly once, which is a defect.
    """
    found: dict[int, tuple[int, Prediction]] = {}
    seen = 0
    for part in parts:
        numbers = [] if part.table.part is None else part.table.part[1].tolist()
        seen += len(numbers)
        for number, prediction in zip(numbers, part.predictions, strict=True):
            found[number] = (part.fold, prediction)
    whole = None if parts[0].table.part is None else parts[0].table.part[0]
    rows: list[Row] = [] if whole is None else list(whole)
    if whole is not None and whole.joined_sources:
        files = [source for source, count in whole.joined_sources for _ in range(count)]
        rows = [{"file": file, **row} for file, row in zip(files, rows, strict=True)]
    if seen != len(rows) or sorted(found) != list(range(len(rows))):
        raise BertTasksError(f"the folds have {seen} of {len(rows)} rows: please report this")
    ordered = [found[number] for number in range(len(rows))]
    return rows, [fold for fold, _ in ordered], [prediction for _, prediction in ordered]


def write_predictions(result: FoldsResult) -> None:
    """Writes a line for each row: its line (and its file, of several), its columns, its fold and its prediction.

    As in ``predict``, a column that the prediction repeats is left out, and another one with the name of a field of the
    prediction is called ``input.NAME``.
    """
    labels = {column.name: column.is_label for column in result.task.columns}
    with whole_file(result.output_dir / PREDICTIONS) as file:
        for row, fold, prediction in zip(result.rows, result.folds, result.predictions, strict=True):
            predicted = prediction.to_json()
            taken = {field.name for field in fields(prediction)}
            kept = [name for name in row if name in labels and (labels[name] or name not in predicted)]
            given = {f"{INPUT}{name}" if name in taken else name: plain(row[name]) for name in kept}
            place = {name: row[name] for name in ("line", "file") if name in row}
            file.write(json_line({**place, **given, "fold": fold, **predicted}))


def dry_run_folds(recipe: Recipe, *, overwrite: bool = False) -> DryRun:
    """The dry run of the first fold, after a look at the folders of all; see ``train_folds`` and ``dry_run``."""
    return dry_run(_planned(recipe, overwrite=overwrite)[0], overwrite=overwrite)


def fold_recipes(recipe: Recipe) -> list[Recipe]:
    """The recipe of each fold's run.

    Raises:
        RecipeError: the recipe has no folds, or names one of them.
    """
    section, folder = recipe.folds, recipe.run.output_dir
    if section is None:
        raise RecipeError("no folds: set folds.count in the recipe, or pass --folds 5")
    if section.fold is not None:
        raise RecipeError(f"folds.fold = {section.fold} is a single run: remove it to train all folds")
    made = []
    for fold in range(1, section.count + 1):
        home = None if folder is None else str(Path(folder, f"fold-{fold}"))
        changes = {
            "folds": section.model_copy(update={"fold": fold}),
            "run": recipe.run.model_copy(update={"output_dir": home}),
        }
        made.append(recipe.model_copy(update=changes))
    return made


def _planned(recipe: Recipe, *, overwrite: bool) -> list[Recipe]:
    """The recipe of each run.

    Raises:
        RecipeError, UsageError: folds or folders that will not do.
    """
    if recipe.run.output_dir is None:
        raise RecipeError("the runs need a folder: set run.output_dir in the recipe, or pass --output-dir")
    recipes, folder = fold_recipes(recipe), _folder(recipe)
    earlier = [] if overwrite else fold_runs(folder)
    for home in earlier:
        before = load_recipe(home / outputs.RECIPE).folds if (home / outputs.RECIPE).is_file() else None
        if before is None or recipe.folds is None:
            continue
        changed = [
            f"folds.{name} = {now!r} (was {was!r})"
            for name in _COMPARED
            if (now := getattr(recipe.folds, name)) != (was := getattr(before, name))
        ]
        if changed:
            raise UsageError(
                f"{folder} holds runs of other folds: {'; '.join(changed)}. Choose another folder, or --overwrite to "
                "replace the runs"
            )
    check_run_folders(folder, recipes, FOLDS, FOLD_RUN, overwrite=overwrite)
    return recipes


def _remove_runs(folder: Path) -> None:
    for home in fold_runs(folder):
        with locked(home):
            outputs.remove(home)
        with suppress(OSError):  # it holds other files
            home.rmdir()
    for name in (FOLDS, PREDICTIONS, outputs.REPORT):
        (folder / name).unlink(missing_ok=True)


def _folder(recipe: Recipe) -> Path:
    return Path(str(recipe.run.output_dir))

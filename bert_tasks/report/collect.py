"""The contents of a run's folder, and its model's predictions for validation rows.

The folder keeps no predictions. The saved model therefore predicts the rows of the run's recipe again, if they still
have the fingerprints in run.json. If something is missing or has changed, the report says what and does not guess.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bert_tasks.checkpoints.hub import FOLDS, fold_runs
from bert_tasks.data.columns import RECORD, Row, head_rows
from bert_tasks.data.issues import missing_path
from bert_tasks.data.rows import Rows
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.experiments.folds import FoldPredictions, FoldsRecord, out_of_fold
from bert_tasks.experiments.seeds import SEEDS, SeedsRecord
from bert_tasks.inference import evaluated_predictions
from bert_tasks.inference.precision import default_device
from bert_tasks.metrics.tables import metric_key, metrics_of_set, split_key
from bert_tasks.model.heads import joined_metrics, metric_table, primary_metric
from bert_tasks.model.inputs import open_model
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.pretrained import CheckpointFolder, stored_tasks
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.thresholds import ThresholdOutput
from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.tasks.base import Task
from bert_tasks.training import files as outputs
from bert_tasks.training.records import EventRecord, RunRecord, SummaryRecord, read_record

_TOLERANCE = 1e-4  # batches are formed anew, so the last digits of a probability may differ


@dataclass(frozen=True, kw_only=True)
class PredictedSet:
    """The rows of a validation set that have labels of one head, and their predictions.

    Attributes:
        name: The name of the validation set. Empty if there is one set.
        head: The name of the head. Empty if there is one task.
        task: The task of the head.
        source: The file or the name of the rows.
        rows: The rows as the task reads them.
        predictions: A prediction for each row.
    """

    name: str
    head: str = ""
    task: Task
    source: str
    rows: Sequence[Row]
    predictions: Sequence[Prediction]

    @property
    def title(self) -> str:
        """The names of the validation set and of the task, as far as there are several."""
        return f"{self.name} {self.head}".strip()


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """The rows of each validation set by its name, and the tasks of the heads, of a run of ``fit``."""

    validation: Mapping[str, Rows]
    tasks: Mapping[str, Task]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with the contents of its folder.

    Attributes:
        folder: The output folder of the run.
        name: The name of the run on the page.
        metadata: The contents of run.json.
        events: The lines of metrics.jsonl.
        summary: The contents of metrics.json, or None if the run is not finished.
        recipe: The text of recipe.toml, or None for a run of ``fit``.
        tasks: The task of each head of the model. None if there is no model yet, or its task is not built in.
        predicted: The validation sets that could be predicted again, for each head.
        missing: A sentence for each part that the report lacks, with the reason.
        folds: The contents of folds.json of a cross-validation, whose folds are then one run.
    """

    folder: Path
    name: str
    metadata: RunRecord
    events: Sequence[EventRecord]
    summary: SummaryRecord | None
    recipe: str | None
    tasks: Mapping[str, Task] | None
    predicted: tuple[PredictedSet, ...]
    missing: tuple[str, ...]
    folds: FoldsRecord | None = None

    @property
    def evaluations(self) -> list[EventRecord]:
        """The events of evaluations, in order."""
        return [event for event in self.events if event.event == "evaluation"]

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the best model or of all folds, or the latest ones of an unfinished run."""
        if self.folds is not None:
            pooled = {name: metric.out_of_fold for name, metric in self.folds.metrics.items()}
            return {name: value for name, value in pooled.items() if value is not None}
        if self.summary is not None:
            return self.summary.metrics
        evaluations = self.evaluations
        if not evaluations:
            return {}
        return evaluations[-1].metrics

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of the validation sets. Thresholds are tuned on the first set."""
        return tuple(self.metadata.metrics.sets)

    @property
    def best_metric(self) -> tuple[str, str]:
        """The validation set and the metric that selected the best model.

        If two metrics are equal by definition, this is the name of the one on the page.
        """
        name, metric = split_key(self.metadata.metrics.best, self.sets)
        if self.tasks is None:
            return name, metric
        return name, metric_table(self.tasks, self.metrics_of(name)).repeated.get(metric, metric)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for readers of the metrics, from the finished run, and what the thresholds are to keep."""
        notes: list[str] = []
        if self.summary is not None:
            notes += self.summary.notes
        if self.tasks is not None:
            for task in self.tasks.values():
                if isinstance(task.output, ThresholdOutput) and task.output.promise:
                    notes.append(f"thresholds: {task.output.promise}")
        return tuple(notes)

    def metrics_of(self, name: str) -> dict[str, float]:
        """Returns the metrics of a validation set, without its name."""
        return metrics_of_set(self.metrics, name)


def gather(folders: Sequence[Path], fit_rows: GivenRows | None = None) -> list[Run]:
    """Returns the runs in some folders, with their predictions.

    A folder of ``train --seeds`` stands for all of its runs that have finished.

    Args:
        folders: Output folders of ``train``.
        fit_rows: The validation rows of a run of ``fit``, which has no recipe.

    Raises:
        UsageError: A folder holds no run, or occurs twice.
    """
    homes: list[Path] = []  # the folders of single runs
    for folder in folders:
        if (folder / SEEDS).is_file():
            runs = read_record(folder / SEEDS, SeedsRecord, remedy=f"name the runs, {folder}/seed-N").runs
            homes += [folder / f"seed-{run.seed}" for run in runs if run.failure is None]
        else:
            homes.append(folder)
    if not homes:
        raise UsageError(f"{', '.join(map(str, folders))}: no run has finished there yet")
    # A folder may be named in several ways, and one that is "." or a link has another name on the page.
    paths = [os.path.realpath(home) for home in homes]
    for home, path in zip(homes, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"{home} occurs twice. Name every run once")
    names = [Path(path).name for path in paths]
    if len(set(names)) < len(names):
        names = [str(home) for home in homes]
    # The files of all runs are read before any model predicts, so that a wrong folder is found at once.
    records = [_metadata(home) for home in homes]
    gathered = []
    for home, name, metadata in zip(homes, names, records, strict=True):
        if (home / FOLDS).is_file():
            gathered.append(_cross_validation(home, name, metadata))
        else:
            gathered.append(_run(home, name, metadata, fit_rows))
    return gathered


def _metadata(home: Path) -> RunRecord:
    """Returns run.json, of the first fold if there are folds, or raises UsageError."""
    folder = home
    if (home / FOLDS).is_file():
        folder = home / "fold-1"
    metadata = outputs.read_run_metadata(folder)
    if metadata is not None:
        return metadata
    if fold_runs(home):
        raise UsageError(
            f"{home}: the cross-validation is not finished. Run the same command again to resume it, or name one of "
            "its folds"
        )
    problem = f"no run here ({outputs.RUN} is missing). Expected the output folder of `bert-tasks train`"
    if not home.exists():
        problem = missing_path(home, "folder")
    raise UsageError(f"{home}: {problem}")


def _cross_validation(folder: Path, name: str, metadata: RunRecord) -> Run:
    """Returns all folds as one run, whose rows were each predicted by the model of the fold that held them out.

    Args:
        folder: The folder of the cross-validation.
        name: The name of the run on the page.
        metadata: The contents of run.json of the first fold, which has the same settings as the others.
    """
    folds = read_record(folder / FOLDS, FoldsRecord, remedy="run the command again to write it anew")
    homes = [folder / f"fold-{run.fold}" for run in folds.runs]
    # A terminal shows a note behind "note: ", but on the page it is a sentence.
    missing = [f"{note[:1].upper()}{note[1:]}." for note in folds.notes]
    tasks: dict[str, Task] | None = None
    predicted: tuple[PredictedSet, ...] = ()
    split = metadata.data["train"].model_copy(update={"rows": folds.rows})
    try:
        held_out, split.fingerprint = _held_out(homes)
        predicted = (held_out,)
        tasks = {held_out.head: held_out.task}
    except (BertTasksError, OSError) as error:
        missing.append(f"The models could not predict their rows again: {error}")
    # The folds together are one run with one set of rows, so run.json of the first fold is changed to say so.
    metrics = metadata.metrics.model_copy(update={"sets": [""], "best": folds.metric})
    about_all = {"rows": folds.rows, "data": {"held_out": split}, "metrics": metrics}
    return Run(
        folder=folder,
        name=name,
        metadata=metadata.model_copy(update=about_all),
        events=(),
        summary=None,
        recipe=_recipe_text(homes[0]),
        tasks=tasks,
        predicted=predicted,
        missing=tuple(missing),
        folds=folds,
    )


def _recipe_text(home: Path) -> str | None:
    """Returns the recipe of a run, or None for a run of ``fit``."""
    path = home / outputs.RECIPE
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8")


def load_model(home: Path, tasks: Mapping[str, Task] | None) -> AnyModel:
    """Loads the model of a run, on a GPU if there is one.

    Args:
        home: The folder of the run.
        tasks: The tasks of its heads. They give the class of an only task that is not built in.
    """
    task_class = None
    if tasks is not None and "" in tasks:
        task_class = type(tasks[""])
    return open_model(home / outputs.MODEL, task=task_class).to(default_device())


def _held_out(homes: Sequence[Path]) -> tuple[PredictedSet, str]:
    """Predicts each row by the model that was trained without it.

    Returns:
        The predictions, whose task has no values that were fitted to rows, because each fold fitted its own, and the
        fingerprint of all rows.
    """
    parts: list[FoldPredictions] = []
    for number, home in enumerate(homes, start=1):
        prepared = prepare(load_recipe(home / outputs.RECIPE))
        table = prepared.splits.held_out
        metadata = outputs.read_run_metadata(home)
        train = None
        if metadata is not None:
            train = metadata.data.get("train")
        if table is None or train is None or train.fingerprint != prepared.splits.train.fingerprint:
            raise UsageError(f"{prepared.splits.train.source} has changed since the run of {home}")
        tasks = {name: head.task for name, head in prepared.heads.items()}
        model = load_model(home, tasks).one_task()
        predictions = evaluated_predictions(model, table)[""]
        parts.append(FoldPredictions(fold=number, table=table, predictions=predictions))
    rows, _, predictions = out_of_fold(parts)
    table = parts[0].table
    task = model.task.without_fitted_values()
    fingerprint = table.fingerprint
    if table.part is not None:  # the rows of a fold are a part of those of the file
        fingerprint = table.part[0].fingerprint
    held_out = PredictedSet(name="", task=task, source=table.source, rows=rows, predictions=predictions)
    return held_out, fingerprint


def with_file_columns(run: Run) -> Run:
    """Returns the run with rows that have all columns of their file (``RECORD``).

    The rows are read again, because predictions need only the columns of the tasks. A run without a recipe does not
    change.

    Raises:
        BertTasksError: The files have changed in the meantime.
    """
    if run.recipe is None:
        return run
    home = run.folder
    if run.folds is not None:
        home = run.folder / "fold-1"
    splits = prepare(load_recipe(home / outputs.RECIPE), passthrough="all").splits
    tables: Mapping[str, Rows] = splits.validation
    if splits.held_out is not None and splits.held_out.part is not None and run.folds is not None:
        tables = {"": splits.held_out.part[0]}
    predicted = []
    for old_set in run.predicted:
        file_rows = list(tables[old_set.name])
        numbers, new_rows = head_rows(file_rows, old_set.head, old_set.task.columns)
        has_changed = len(new_rows) != len(old_set.rows)
        for old_row, new_row in zip(old_set.rows, new_rows, strict=False):
            if any(new_row[name] != old_row[name] for name in old_row.keys() & new_row):
                has_changed = True
        if has_changed:
            raise UsageError(f"{old_set.source} has changed while the report was made. Run the command again")
        rows = []
        for old_row, number in zip(old_set.rows, numbers, strict=True):
            rows.append({**old_row, RECORD: file_rows[number][RECORD]})
        predicted.append(replace(old_set, rows=rows))
    return replace(run, predicted=tuple(predicted))


def _run(folder: Path, name: str, metadata: RunRecord, rows_of_fit: GivenRows | None) -> Run:
    """Reads a run, and predicts its validation rows again."""
    summary = outputs.read_summary(folder)
    predicted, tasks, missing = _predict_validation(folder, metadata, rows_of_fit)
    # Without predictions, the settings of the task still say how metrics are shown.
    if tasks is None:
        with suppress(BertTasksError):
            tasks = stored_tasks(CheckpointFolder.open(folder / outputs.MODEL))
    if summary is None:
        missing.insert(
            0, "The run is unfinished. Metrics are of the latest evaluation, all else is of the best model so far."
        )
    elif tasks is not None:
        missing += _changed_metrics(predicted, tasks, summary.metrics)
    return Run(
        folder=folder,
        name=name,
        metadata=metadata,
        events=outputs.read_events(folder),
        summary=summary,
        recipe=_recipe_text(folder),
        tasks=tasks,
        predicted=tuple(predicted),
        missing=tuple(missing),
    )


def _changed_metrics(
    predicted: Sequence[PredictedSet], tasks: Mapping[str, Task], recorded: Mapping[str, float]
) -> list[str]:
    """Returns a sentence for each validation set on which the saved model does not reproduce the run's own metric."""
    by_set: dict[str, dict[str, dict[str, float]]] = {}
    for predicted_set in predicted:
        metrics_by_head = by_set.setdefault(predicted_set.name, {})
        output = predicted_set.task.output
        metrics_by_head[predicted_set.head] = output.metrics(predicted_set.predictions, predicted_set.rows)
    sentences = []
    metric = primary_metric(tasks)
    for name, metrics_by_head in by_set.items():
        key = metric_key(name, metric)
        now = joined_metrics(metrics_by_head, tasks)[metric]
        before = recorded.get(key)
        if before is not None and abs(now - before) > _TOLERANCE * max(1.0, abs(before)):
            sentences.append(
                f"The saved model now has {key} = {now:.6g}, but at the end of training it was {before:.6g}."
            )
    return sentences


def _predict_validation(
    folder: Path, metadata: RunRecord, rows_of_fit: GivenRows | None
) -> tuple[list[PredictedSet], Mapping[str, Task] | None, list[str]]:
    """Returns the predictions for each validation set and head, the tasks, and a sentence for each missing part."""
    if rows_of_fit is None and not (folder / outputs.RECIPE).is_file():
        reason = (
            "The run was started from Python with rows or files of its own and has no recipe. Its validation rows are "
            "not known, so there are no examples, tables by class or intervals. fit(..., report=True) reports on them."
        )
        return [], None, [reason]
    if not (folder / outputs.MODEL).is_dir():
        return [], None, ["There is no model yet, so there are no examples, tables by class or intervals."]
    try:
        if rows_of_fit is None:
            prepared = prepare(load_recipe(folder / outputs.RECIPE))
            prepared_tasks = {name: head.task for name, head in prepared.heads.items()}
            rows_of_fit = GivenRows(validation=prepared.splits.validation, tasks=prepared_tasks)
        model = load_model(folder, rows_of_fit.tasks)
    except (BertTasksError, OSError) as error:
        return [], None, [f"The model could not predict its validation rows again: {error}"]
    predicted: list[PredictedSet] = []
    missing: list[str] = []
    for name, table in rows_of_fit.validation.items():
        split = f"validation_{name}" if name else "validation"
        # Predictions of other rows would not belong to the metrics that the run recorded.
        recorded = metadata.data.get(split)
        if recorded is None or recorded.fingerprint != table.fingerprint:
            missing.append(f"{table.source} has changed since the run, so its results cannot be shown.")
            continue
        try:
            predictions = evaluated_predictions(model, table)
        except UsageError as error:
            missing.append(f"{table.source}: {error}.")
            continue
        for head, task in model.tasks.items():
            _, rows = head_rows(list(table), head, task.columns)
            if not rows:
                continue
            predicted_set = PredictedSet(
                name=name,
                head=head,
                task=task,
                source=table.source,
                rows=rows,
                predictions=predictions[head],
            )
            predicted.append(predicted_set)
    tasks = model.tasks if predicted else None
    return predicted, tasks, missing

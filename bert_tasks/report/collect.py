"""What a run's folder tells, and the predictions of its model for the validation rows.

The folder keeps no predictions: the saved model predicts the rows that the run's recipe names again, if they are still
the same (their fingerprints are in run.json). What cannot be told is reported as missing, not guessed.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tasks.data.columns import Row
from bert_tasks.data.problems import missing_path
from bert_tasks.data.table import RowTable
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.experiments.seeds import SEEDS
from bert_tasks.inference import evaluated_predictions
from bert_tasks.metrics.tables import metric_key, metrics_of_set, split_key
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.run_dir import files as outputs
from bert_tasks.storage import exists, is_file, is_folder, resolved
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.training.run import prepare

_TOLERANCE = 1e-4  # batches are formed anew, so the last digits of a probability may differ


@dataclass(frozen=True, kw_only=True)
class PredictedSet:
    """A validation set and the model's predictions for it; ``name`` is empty where there is only one."""

    name: str
    source: str
    rows: Sequence[Row]
    predictions: Sequence[Prediction]


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """The rows of each validation set, by its name, and the task of a run that has no recipe."""

    validation: Mapping[str, RowTable]
    task: type[Task]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        name: its name on the page.
        metadata: run.json.
        events: the lines of metrics.jsonl.
        summary: metrics.json; None where the run is not finished.
        recipe: recipe.toml; None for a run of ``fit``.
        task: of its model; None where there is no model yet, or its task is not built in.
        predicted: the validation sets that could be predicted again.
        missing: what the report lacks, and why.
    """

    folder: Path
    name: str
    metadata: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    recipe: str | None
    task: Task | None
    predicted: tuple[PredictedSet, ...]
    missing: tuple[str, ...]

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The events of evaluations, in order."""
        return [event for event in self.events if event["event"] == "evaluation"]

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics of the best model; of an unfinished run those of the latest evaluation."""
        if self.summary is not None:
            return dict(self.summary["metrics"])
        return dict(self.evaluations[-1]["metrics"]) if self.evaluations else {}

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of the validation sets; thresholds are tuned on the first."""
        return tuple(self.metadata["metrics"]["sets"])

    @property
    def best_metric(self) -> tuple[str, str]:
        """What the best model was chosen by: a validation set and a metric, under the name that the page shows.

        Of two metrics that are equal by definition the page shows one.
        """
        name, metric = split_key(self.metadata["metrics"]["best"], self.sets)
        if self.task is None:
            return name, metric
        known = {key: 0.0 if value is None else value for key, value in self.metrics_of(name).items()}
        return name, self.task.metric_table(known).repeated.get(metric, metric)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the metrics must know, as the finished run recorded it."""
        return () if self.summary is None else tuple(self.summary["notes"])

    def metrics_of(self, name: str) -> dict[str, float | None]:
        """The metrics of a validation set, without its name."""
        return metrics_of_set(self.metrics, name)

    def is_lower_better(self, metric: str) -> bool:
        """Whether lower values of a metric are better; the metric is without the name of its validation set."""
        return metric in self.metadata["metrics"]["lower_is_better"]

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the validation sets, by their names in run.json."""
        return {split: data["fingerprint"] for split, data in self.metadata["data"].items() if split != "train"}


def gather(folders: Sequence[Path], given: GivenRows | None = None) -> list[Run]:
    """Reads the runs in these folders; a folder that ``train --seeds`` made stands for its runs.

    Args:
        folders: output folders.
        given: the validation rows of the runs; None: the rows that each run's recipe names.

    Raises:
        UsageError: a folder holds no run, or one is given twice.
    """
    found: list[Path] = []
    for folder in folders:
        if not is_file(folder / SEEDS):
            found.append(folder)
            continue
        try:
            runs = json.loads((folder / SEEDS).read_text(encoding="utf-8"))["runs"]
            found += [folder / f"seed-{int(run['seed'])}" for run in runs if run["failure"] is None]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise UsageError(f"{folder / SEEDS} is damaged: name the runs, {folder}/seed-N") from None
    if not found:
        raise UsageError(f"{', '.join(map(str, folders))}: no run has finished there yet")
    places = [resolved(folder) for folder in found]
    for index, folder in enumerate(found):
        if places[index] in places[:index]:
            raise UsageError(f"{folder} is given twice: name every run once")
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        names = list(map(str, found))
    metadata: list[dict[str, Any]] = []
    for folder in found:  # of all runs, before any model predicts
        known = outputs.read_run_metadata(folder)
        if known is None:
            what = missing_path(folder, "folder") if not exists(folder) else f"no run here ({outputs.RUN} is missing)"
            raise UsageError(f"{folder}: {what}; give the output folder of `bert-tasks train`")
        metadata.append(known)
    return [_run(folder, name, known, given) for folder, name, known in zip(found, names, metadata, strict=True)]


def _run(folder: Path, name: str, metadata: dict[str, Any], given: GivenRows | None) -> Run:
    recipe, summary = folder / outputs.RECIPE, outputs.read_summary(folder)
    predicted, task, missing = _predicted(folder, metadata, given)
    if task is None:
        with suppress(BertTasksError):
            task = stated_task(CheckpointFolder.open(folder / outputs.MODEL))
    if summary is None:
        missing.insert(
            0, "The run is unfinished: metrics are of the latest evaluation, all else is of the best model so far."
        )
    elif task is not None:
        for one in predicted:  # does the saved model reproduce the run's own metric?
            key = metric_key(one.name, task.primary_metric)
            now, then = task.metrics(one.predictions, one.rows)[task.primary_metric], summary["metrics"].get(key)
            if then is not None and abs(now - then) > _TOLERANCE * max(1.0, abs(then)):
                missing.append(
                    f"The saved model now gives {key} = {now:.6g}; at the end of training it was {then:.6g}."
                )
    return Run(
        folder=folder,
        name=name,
        metadata=metadata,
        events=outputs.read_events(folder),
        summary=summary,
        recipe=recipe.read_text(encoding="utf-8") if is_file(recipe) else None,
        task=task,
        predicted=tuple(predicted),
        missing=tuple(missing),
    )


def _predicted(
    folder: Path, metadata: Mapping[str, Any], given: GivenRows | None
) -> tuple[list[PredictedSet], Task | None, list[str]]:
    """The predictions for each validation set, the model's task, and why there are none for others."""
    if given is None and not is_file(folder / outputs.RECIPE):
        reason = (
            "The run was started from Python with rows or files of its own and has no recipe, so its validation rows "
            "are not known: no examples, tables by class or intervals. fit(..., report=True) makes a report with them."
        )
        return [], None, [reason]
    if not is_folder(folder / outputs.MODEL):
        return [], None, ["There is no model yet: no examples, tables by class or intervals."]
    try:
        if given is None:
            prepared = prepare(load_recipe(folder / outputs.RECIPE))
            given = GivenRows(validation=prepared.splits.validation, task=type(prepared.task))
        model = TaskModel.from_pretrained(folder / outputs.MODEL, task=given.task)
    except (BertTasksError, OSError) as error:
        return [], None, [f"The model could not predict its validation rows again: {error}"]
    if torch.cuda.is_available():
        model.to("cuda")
    found: list[PredictedSet] = []
    missing: list[str] = []
    for name, table in given.validation.items():
        split = f"validation_{name}" if name else "validation"
        if metadata["data"].get(split, {}).get("fingerprint") != table.fingerprint:
            missing.append(f"{table.source} has changed since the run, so its results cannot be shown.")
            continue
        try:
            predictions = evaluated_predictions(model, table)
        except UsageError as error:
            missing.append(f"{table.source}: {error}.")
            continue
        found.append(PredictedSet(name=name, source=table.source, rows=list(table), predictions=predictions))
    return found, model.task if found else None, missing

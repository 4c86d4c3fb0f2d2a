"""What a run's folder tells, and the answers of its model to the validation rows.

Owns reading a run and making its answers again: the folder keeps no predictions, so the saved model answers the rows
that the run's recipe names, if these are still the same (their fingerprints are in run.json). What cannot be told is
said, not guessed. Must not know statistics or pages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tasks.checkpoints.load import read_config
from bert_tasks.data.columns import Row
from bert_tasks.data.problems import missing_path
from bert_tasks.data.table import RowTable
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.experiments.seeds import SEEDS
from bert_tasks.metrics.tables import metric_key, metrics_of_set, split_key
from bert_tasks.model.pretrained import stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import exists, is_file, is_folder, resolved
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.run_dir import files as outputs
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.training.run import prepare

_SAME = 1e-4  # batches are formed anew, so the last digits of a probability may differ


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The model's answers to one validation set (``name`` is empty where there is one)."""

    name: str
    source: str
    rows: Sequence[Row]
    predictions: Sequence[Prediction]
    task: Task


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """Validation set -> its rows, of a run that keeps no recipe, and its task."""

    validation: Mapping[str, RowTable]
    task: type[Task]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        name: what it is called on the page.
        facts: run.json; ``events``: the lines of metrics.jsonl.
        summary: metrics.json; None where the run is not finished.
        recipe: recipe.toml; None for a run of ``fit``.
        task: of its model; None where there is no model yet, or its task is not built in.
        missing: what the report cannot tell, and why.
    """

    folder: Path
    name: str
    facts: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    recipe: str | None
    task: Task | None
    answers: tuple[Answers, ...]
    missing: tuple[str, ...]

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Of the best model; of a run that is not finished those of its newest evaluation."""
        if self.summary is not None:
            return dict(self.summary["metrics"])
        found = [event["metrics"] for event in self.events if event["event"] == "evaluation"]
        return dict(found[-1]) if found else {}

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of the validation sets; thresholds are tuned on the first."""
        return tuple(self.facts["metrics"]["sets"])

    @property
    def chosen(self) -> tuple[str, str]:
        """What picked the best model: a validation set and a metric on it."""
        name, metric = split_key(self.facts["metrics"]["best"], self.sets)
        return name, self._shown_as(name, metric)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the metrics must know, as the finished run recorded it."""
        return () if self.summary is None else tuple(self.summary["notes"])

    def metrics_of(self, name: str) -> dict[str, float | None]:
        """The metrics of a validation set, without its name."""
        return metrics_of_set(self.metrics, name)

    def is_lower_better(self, metric: str) -> bool:
        """Whether less is better of a metric, without the name of its validation set."""
        return metric in self.facts["metrics"]["lower_is_better"]

    def _shown_as(self, name: str, metric: str) -> str:
        """The name on the page of a validation set's metric: of two that are equal by definition one is shown."""
        if self.task is None:
            return metric
        known = {key: 0.0 if value is None else value for key, value in self.metrics_of(name).items()}
        return self.task.metric_table(known).repeated.get(metric, metric)

    def fingerprints(self) -> dict[str, str]:
        """Of the validation sets, by their names in run.json."""
        return {split: data["fingerprint"] for split, data in self.facts["data"].items() if split != "train"}


def gather(folders: Sequence[Path], given: GivenRows | None = None) -> list[Run]:
    """The runs in these folders; a folder that ``train --seeds`` made stands for its runs.

    Args:
        given: what the runs were validated on; None: the rows that each run's recipe names.

    Raises:
        UsageError: a folder holds no run, or one is given twice.
    """
    chosen = [run for folder in folders for run in _runs_in(folder)]
    if not chosen:
        raise UsageError(f"{', '.join(map(str, folders))}: no run there has come to its end")
    twice = [str(folder) for place, folder in enumerate(chosen) if resolved(folder) in _resolved(chosen[:place])]
    if twice:
        raise UsageError(f"{twice[0]} is given twice: name every run once")
    facts = [_facts(folder) for folder in chosen]
    return [_run(folder, name, known, given) for folder, name, known in zip(chosen, _names(chosen), facts, strict=True)]


def _resolved(folders: Sequence[Path]) -> set[Path]:
    return {resolved(folder) for folder in folders}


def _runs_in(folder: Path) -> list[Path]:
    if not is_file(folder / SEEDS):
        return [folder]
    try:
        runs = json.loads((folder / SEEDS).read_text(encoding="utf-8"))["runs"]
        return [folder / f"seed-{int(run['seed'])}" for run in runs if run["failure"] is None]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise UsageError(f"{folder / SEEDS} is damaged: name the runs, {folder}/seed-N") from None


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names where these differ, else their paths."""
    short = [resolved(folder).name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _facts(folder: Path) -> dict[str, Any]:
    facts = outputs.read_run_metadata(folder)
    if facts is None:
        what = missing_path(folder, "folder") if not exists(folder) else f"no run here ({outputs.RUN} is missing)"
        raise UsageError(f"{folder}: {what}; give the output folder of `bert-tasks train`")
    return facts


def _run(folder: Path, name: str, facts: dict[str, Any], given: GivenRows | None) -> Run:
    recipe, summary = folder / outputs.RECIPE, outputs.read_summary(folder)
    answers, missing = _answers(folder, facts, given)
    unfinished = (
        []
        if summary is not None
        else [
            "The run is not finished: its metrics are those of its newest evaluation, all else is about the best model "
            "so far."
        ]
    )
    return Run(
        folder=folder,
        name=name,
        facts=facts,
        events=outputs.read_events(folder),
        summary=summary,
        recipe=recipe.read_text(encoding="utf-8") if is_file(recipe) else None,
        task=answers[0].task if answers else _stated_task(folder / outputs.MODEL),
        answers=tuple(answers),
        missing=(*unfinished, *missing, *([] if summary is None else _differing(summary["metrics"], answers))),
    )


def _stated_task(model: Path) -> Task | None:
    try:
        return stated_task(model, read_config(model), None, {})
    except BertTasksError:
        return None


def _answers(folder: Path, facts: Mapping[str, Any], given: GivenRows | None) -> tuple[list[Answers], list[str]]:
    """The answers to each validation set, and why there are none to others."""
    if given is None and not is_file(folder / outputs.RECIPE):
        return [], [
            "The run was started from Python with rows or files of its own and keeps no recipe, so its validation rows "
            "are not known: no examples, tables by class or intervals. fit(..., report=True) makes a report with them."
        ]
    if not is_folder(folder / outputs.MODEL):
        return [], ["There is no model yet: no examples, tables by class or intervals."]
    try:
        if given is None:
            prepared = prepare(load_recipe(folder / outputs.RECIPE))
            given = GivenRows(validation=prepared.splits.validation, task=type(prepared.task))
        model = TaskModel.from_pretrained(folder / outputs.MODEL, task=given.task)
    except (BertTasksError, OSError) as error:
        return [], [f"The model could not answer its validation rows again: {error}"]
    if torch.cuda.is_available():
        model.to("cuda")
    found: list[Answers] = []
    missing: list[str] = []
    for name, table in given.validation.items():
        split = f"validation_{name}" if name else "validation"
        if facts["data"].get(split, {}).get("fingerprint") != table.fingerprint:
            missing.append(
                f"{table.source} has changed since the run: its rows are not those that it was validated on."
            )
            continue
        rows = list(table)
        predictions = list(model.predict_rows(rows))
        found.append(Answers(name=name, source=table.source, rows=rows, predictions=predictions, task=model.task))
    return found, missing


def _differing(metrics: Mapping[str, float | None], answers: Sequence[Answers]) -> list[str]:
    """A remark where the saved model does not reach the run's own figure again."""
    found = []
    for one in answers:
        name = metric_key(one.name, one.task.primary_metric)
        now, then = one.task.metrics(one.predictions, one.rows)[one.task.primary_metric], metrics.get(name)
        if then is not None and abs(now - then) > _SAME * max(1.0, abs(then)):
            found.append(f"The saved model now gives {name} = {now:.6g}; at the end of training it was {then:.6g}.")
    return found

"""A run's model on any labelled file: the same figures as on the validation rows, by the values of columns too.

Owns reading such a file and answering it. Must not know how figures are computed or shown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tasks.data.readers import Reading
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluate_data
from bert_tasks.metrics.tables import ClassRow, MetricTable
from bert_tasks.model.inputs import as_trained, load_table
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import is_folder
from bert_tasks.report.gathering import Answers, Run
from bert_tasks.report.results import Results
from bert_tasks.report.slices import Scores, Slices, slices_by
from bert_tasks.report.statistics import Estimate
from bert_tasks.training import outputs


@dataclass(frozen=True, kw_only=True)
class FileResults:
    """What a model does on the rows of a file.

    Attributes:
        metrics: over all rows and of single classes, as ``evaluate`` gives them.
        table: the same for people.
        results: None of a task that has no figures of its own.
        slices: one table for each column that was asked for.
        target: the file's column that holds the labels.
    """

    source: str
    metrics: Mapping[str, float]
    table: MetricTable
    results: Results | None
    slices: tuple[Slices, ...]
    target: str | None

    def to_json(self) -> dict[str, Any]:
        """The figures, without the texts."""
        return {
            "source": self.source,
            "metrics": dict(self.metrics),
            "results": None if self.results is None else self.results.to_json(),
            "by": [_plain(one) for one in self.slices],
        }

    def lines(self) -> list[str]:
        """For people."""
        return [f"on {self.source}:", *self.table.lines(), *(line for one in self.slices for line in _lines(one))]


def results_on_file(
    run: Run,
    data: str | Path,
    by: Sequence[str],
    *,
    reading: Reading,
    make: Callable[[Answers], Results] | None,
) -> FileResults:
    """Lets the run's model answer the rows of a file.

    Args:
        run: with a model.
        data: a file with labels.
        by: columns of the file, or of the task.
        reading: how the file is read; what is not stated is as in training.
        make: the figures of the task; None where it has none of its own.

    Raises:
        UsageError: there is no model yet, or no such column.
        DataError: naming every bad row.
        CheckpointError: the model cannot be loaded.
    """
    folder = run.folder / outputs.MODEL
    if not is_folder(folder):
        raise UsageError(f"{run.folder} has no model yet that could answer {data}; let the run come to an evaluation")
    model = TaskModel.from_pretrained(folder, task=None if run.task is None else type(run.task))
    if torch.cuda.is_available():
        model.to("cuda")
    found, how = as_trained(model, data, reading)
    table = load_table(found, model.task, reading=how, keep="all")
    evaluation = evaluate_data(model, table, reading=how)
    rows, task = list(table), model.task

    def answers(places: Sequence[int]) -> Answers:
        chosen = [evaluation.predictions[place] for place in places]
        return Answers(name="", source=table.source, rows=[rows[p] for p in places], predictions=chosen, task=task)

    def score(places: Sequence[int]) -> Scores:
        part = answers(places)
        if make is not None:
            return make(part).estimates
        value = task.metrics(part.predictions, part.rows)[task.primary_metric]
        return {task.primary_metric: Estimate(value=value, low=None, high=None)}

    results = None if make is None else make(answers(range(len(rows))))
    names = (task.primary_metric,) if results is None else results.headline
    target = next((column.name for column in task.columns if column.is_target), None)
    renamed = {} if how.columns is None else how.columns
    return FileResults(
        source=str(data),
        metrics=evaluation.metrics,
        table=task.metric_table(evaluation.metrics),
        results=results,
        slices=tuple(slices_by(column, rows, score, names) for column in dict.fromkeys(by)),
        target=None if target is None else renamed.get(target, target),
    )


def _plain(one: Slices) -> dict[str, Any]:
    rows = [
        {
            "value": each.value,
            "rows": each.rows,
            "scores": {name: vars(score) for name, score in zip(one.names, each.scores, strict=True)},
        }
        for each in one.slices
    ]
    return {"column": one.column, "values": rows, "others": one.others}


def _lines(one: Slices) -> list[str]:
    table = MetricTable(
        overall={},
        word=one.column,
        columns=one.names,
        rows=tuple(
            ClassRow(name=each.value, scores=tuple(score.value for score in each.scores), support=each.rows)
            for each in one.slices
        ),
    )
    return [*table.class_lines("rows"), ""]

"""Scores of parts of a data set: one for each value of a column of its file.

Owns which rows are together. Must not know how scores are computed or shown.

A run's model on any labelled file: the same figures as on the validation rows, by the values of columns too.

Owns reading such a file and answering it. Must not know how figures are computed or shown.

The rows that a model answered wrong, as a file: the columns they came with, their label, and what was predicted.

Owns the columns of that file. Must not know tasks.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tasks.data.columns import PASSTHROUGH, Row
from bert_tasks.data.problems import did_you_mean
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.writers import (
    DELIMITERS,
    TableWriter,
    check_place,
    flat,
    json_line,
    whole_file,
)
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluate_data
from bert_tasks.metrics.tables import ClassRow, MetricTable
from bert_tasks.model.inputs import as_trained, load_table
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import is_folder, resolved
from bert_tasks.report.collect import Answers, Run
from bert_tasks.report.results import Results, Verdict
from bert_tasks.report.statistics import Estimate
from bert_tasks.run_dir import files as outputs

SHOWN = 20  # values of a column with a row of their own
NOTHING = "(empty)"

Scores = Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The rows with one value, or with any of those that have no row of their own."""

    value: str
    rows: int
    scores: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Scores by the values of a column, the most frequent first.

    Attributes:
        names: of the scores.
        others: how many values the last one stands for; 0 where each value has a row.
    """

    column: str
    names: tuple[str, ...]
    slices: tuple[Slice, ...]
    others: int


def given_cells(row: Row) -> Mapping[str, Any]:
    """The columns of a row as its file has them; the task's where these were not kept."""
    kept = row.get(PASSTHROUGH)
    if kept is None:
        return {name: value for name, value in row.items() if name != "line" and value is not None}
    cells: Mapping[str, Any] = json.loads(kept)
    return cells


def slices_by(
    column: str, rows: Sequence[Row], score: Callable[[Sequence[int]], Scores], names: Sequence[str]
) -> Slices:
    """The scores of the rows of each value.

    Args:
        column: of the file, or of the task.
        rows: of the data set.
        score: the places of some rows -> their scores.
        names: of the scores to tell.

    Raises:
        UsageError: no row has the column.
    """
    values = _values(column, rows)
    counted = Counter(values).most_common()
    own = [value for value, _ in (counted if len(counted) <= SHOWN else counted[: SHOWN - 1])]
    places: dict[str, list[int]] = {value: [] for value in own}
    rest: list[int] = []
    for place, value in enumerate(values):
        places.get(value, rest).append(place)
    others = len(counted) - len(own)
    groups = [*places.items(), *([(f"{others} others", rest)] if others else [])]
    found = []
    for value, chosen in groups:
        scores = score(chosen)
        found.append(Slice(value=value, rows=len(chosen), scores=tuple(scores[name] for name in names)))
    return Slices(column=column, names=tuple(names), slices=tuple(found), others=others)


def _values(column: str, rows: Sequence[Row]) -> list[str]:
    """The text of the column in each row."""
    cells = [given_cells(row) for row in rows]
    known = list(dict.fromkeys(name for row in cells for name in row))
    if column in known:
        return [_text(row.get(column)) for row in cells]
    used = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in (PASSTHROUGH, "line")]
    if column in used:
        return [_text(row.get(column)) for row in rows]
    names = [*known, *(name for name in used if name not in known)]
    raise UsageError(
        f"--by {column}: no row has this column{did_you_mean(column, names)}; there are {', '.join(map(repr, names))}"
    )


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
    reading: ReadOptions,
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
    table = load_table(found, model.task, reading=how, passthrough="all")
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
    target = next((column.name for column in task.columns if column.is_label), None)
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


_FORMATS = ("jsonl", *DELIMITERS)
_OWN = ("line", "set", "label", "prediction", "score")
_INPUT = "input."  # before the name of a column of the input that is called like one of those


def check_mistakes_file(path: Path, others: Sequence[Path]) -> None:
    """Refuses a file for the mistakes before any work is done for it.

    Args:
        path: the file.
        others: the files that must stay.

    Raises:
        UsageError: its extension or place will not do, or it is one of the others.
    """
    if path.suffix[1:] not in _FORMATS:
        raise UsageError(f"{path}: expected a name that ends in .csv, .tsv or .jsonl for the mistakes")
    check_place(path)
    for other in others:
        with suppress(OSError):
            if resolved(path) == resolved(other) or path.samefile(other):
                raise UsageError(f"{path}: the mistakes would overwrite {other}; choose another name")


def write_mistakes(path: Path, verdicts: Sequence[tuple[str, Verdict]], target: str | None) -> int:
    """Writes the rows that were answered wrong, those with the highest score first.

    Args:
        path: a .csv, .tsv or .jsonl file.
        verdicts: of the rows of all data sets, each with the name of its set.
        target: the column of the input whose values ``label`` repeats; it is not written twice.

    Returns:
        How many mistakes there are.

    Raises:
        UsageError: the file cannot be written.
    """
    wrong = sorted((one for one in verdicts if not one[1].right), key=lambda one: -one[1].score)
    is_named = len({name for name, _ in verdicts}) > 1
    rows = [_row(name if is_named else None, verdict, target) for name, verdict in wrong]
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            file.writelines(map(json_line, rows))
            return len(rows)
        tables = [flat(row) for row in rows]
        given = dict.fromkeys(name for row in tables for name in row if name not in _OWN)
        first, last = ["line", *(["set"] if is_named else [])], list(_OWN[2:])
        writer = TableWriter(file, [*first, *given, *last], DELIMITERS[path.suffix[1:]], raw=False)
        for row in tables:
            writer.write(row)
    return len(rows)


def _row(name: str | None, verdict: Verdict, target: str | None) -> dict[str, Any]:
    given = {
        f"{_INPUT}{key}" if key in _OWN else key: value
        for key, value in given_cells(verdict.row).items()
        if not (key == target == "label")
    }
    answer = {"label": verdict.label, "prediction": verdict.prediction, "score": verdict.score}
    return {"line": verdict.row.get("line"), **({} if name is None else {"set": name}), **given, **answer}

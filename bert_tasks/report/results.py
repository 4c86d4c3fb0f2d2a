"""A task's figures with their intervals on a data set, on a file and on slices."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bert_tasks.data.columns import FOLD_GROUP, RECORD, Row, head_rows
from bert_tasks.data.issues import counted, did_you_mean, first_few
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.trained_reading import options_for_file
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluate_data
from bert_tasks.inference.evaluation import Score, labelled_table
from bert_tasks.metrics.tables import CLASS_SCORES, ClassRow, MetricTable
from bert_tasks.model.heads import joined_metrics, metric_table, primary_metric
from bert_tasks.model.inputs import reading_for_labels
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.sections import ReportSections
from bert_tasks.report.collect import Run, load_model
from bert_tasks.report.statistics import Estimate, bootstrap
from bert_tasks.tables import Result
from bert_tasks.tasks.base import Task
from bert_tasks.training import files as outputs

MOST_VALUES = 20  # values of a column that have a row of their own
EMPTY = "(empty)"
FEW_ROWS = 30  # below which a page warns of the scores of a slice
_INTERNAL = (RECORD, FOLD_GROUP, "line")  # the fields of a row that are no columns

Scores = Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """The scores of the rows with one label, of one kind, or with one column value.

    Attributes:
        name: The label (or entity type, or tag), the kind, or the value.
        count: Number of rows. For a label, its number of occurrences in the labels.
    """

    name: str
    scores: Scores
    count: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of one data set in a report."""

    sections: ReportSections
    estimates: Scores
    table: tuple[ScoreRow, ...] = ()
    left_out: int = 0
    groups: tuple[ScoreRow, ...] = ()
    slices: "tuple[Slices, ...]" = ()

    @classmethod
    def of(cls, sections: ReportSections, *, first: str = "") -> "Results":
        """Adds intervals.

        Args:
            sections: of the task.
            first: the metric to show first, if it is one of the measure's.
        """
        estimates, support = bootstrap(sections.measure), sections.measure.support()
        if first in estimates:
            sections = replace(sections, headline=tuple(dict.fromkeys([first, *sections.headline])))
        table = tuple(
            ScoreRow(
                name=label,
                scores={score: estimates[f"{score}\0{label}"] for score in CLASS_SCORES},
                count=support[label],
            )
            for label in sections.labels
            if label in support
        )
        groups = tuple(
            ScoreRow(name=name, scores=bootstrap(measure), count=measure.statistics.rows)
            for name, measure in sections.groups.items()
        )
        left_out = len(sections.labels) - len(table)
        return cls(sections=sections, estimates=estimates, table=table, left_out=left_out, groups=groups)

    @property
    def headline(self) -> Scores:
        """The metrics that are shown first."""
        return {name: self.estimates[name] for name in self.sections.headline}

    @property
    def rows(self) -> int:
        """The number of labelled rows."""
        return len(self.sections.results)

    def metric_table(self) -> MetricTable:
        """Returns the first metrics and the metrics of each label, without intervals."""
        overall = {name: estimate.value for name, estimate in self.headline.items() if estimate.value is not None}
        if self.groups:
            return score_table(self.sections.unit, self.groups, overall)
        return score_table(self.sections.label_word, self.table, overall)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures, without the texts."""
        sections = self.sections
        optional = {
            "table": [{"label": row.name, **_plain(row.scores), "support": row.count} for row in self.table],
            "groups": [{"name": row.name, **_plain(row.scores), "count": row.count} for row in self.groups],
            "confusion": None if sections.confusion is None else asdict(sections.confusion),
            "calibration": None if sections.calibration is None else asdict(sections.calibration),
            "uncalibrated": None if sections.uncalibrated is None else asdict(sections.uncalibrated),
            "by": [table.to_json() for table in self.slices],
            **sections.figures,
        }
        return {
            "rows": self.rows,
            "unit": sections.unit,
            "mistakes": sum(not result.is_correct for result in sections.results),
            **{name: value for name, value in optional.items() if value},
            "estimates": _plain({name: estimate for name, estimate in self.estimates.items() if "\0" not in name}),
        }


def results_of(
    task: Task, predictions: Sequence[Prediction], rows: Sequence[Row], *, first: str = ""
) -> Results | None:
    """Returns the results of a task with report sections (``Results.of``)."""
    sections = task.output.report(predictions, rows, task.texts)
    return None if sections is None else Results.of(sections, first=first)


def _plain(scores: Scores) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}


def score_table(word: str, rows: Sequence[ScoreRow], overall: Mapping[str, float]) -> MetricTable:
    """Returns the values without intervals. ``word`` is the header of the rows."""
    class_rows = tuple(
        ClassRow(name=row.name, scores=tuple(score.value for score in row.scores.values()), support=row.count)
        for row in rows
    )
    return MetricTable(overall=overall, word=word, columns=tuple(rows[0].scores) if rows else (), rows=class_rows)


@dataclass(frozen=True, kw_only=True)
class Slices(Result):
    """The scores of the rows with each value of a column, the most frequent first.

    Attributes:
        slices: A row for each value. The last may stand for all values that have no row of their own.
        others: Number of values that the last slice stands for. 0 if each value has its own slice.
    """

    column: str
    slices: tuple[ScoreRow, ...]
    others: int = 0

    @property
    def warning(self) -> str:
        """Warns of slices with too few rows for a reliable score. Empty without any."""
        few = [f"{row.name} ({row.count})" for row in self.slices if row.count < FEW_ROWS]
        if not few:
            return ""
        return f"fewer than {FEW_ROWS} rows for {first_few(few, 5)}, so scores say little and intervals are too narrow"

    def to_json(self) -> dict[str, Any]:
        """Returns the column, and the scores of each value."""
        values = [{"value": row.name, "rows": row.count, "scores": _plain(row.scores)} for row in self.slices]
        return {"column": self.column, "values": values, "others": self.others}

    def lines(self) -> list[str]:
        """Returns a table for people."""
        warning = [f"{self.column}: {self.warning}"] if self.warning else []
        return [*score_table(self.column, self.slices, {}).class_lines("rows"), *warning, ""]


def slices_of(
    task: Task, predictions: Sequence[Prediction], rows: Sequence[Row], *, columns: Sequence[str], names: Sequence[str]
) -> tuple[Slices, ...]:
    """Returns the scores of the labelled rows by the values of each column.

    Args:
        task: The task of the predictions, which has report sections.
        predictions: A prediction for each row.
        rows: The rows of a data set. Rows of a cross-validation with a teacher may lack labels.
        columns: Columns of the file, or of the task.
        names: The names of the scores to show.

    Raises:
        UsageError: No row has such a column.
    """
    labels = [column.name for column in task.columns if column.is_label]
    labelled = [i for i, row in enumerate(rows) if not labels or any(row.get(name) is not None for name in labels)]
    predictions, rows = [predictions[i] for i in labelled], [rows[i] for i in labelled]

    def scores(indices: Sequence[int]) -> Scores:
        results = results_of(task, [predictions[i] for i in indices], [rows[i] for i in indices])
        estimates = {} if results is None else results.estimates
        return {name: estimates[name] for name in names}

    return _sliced(rows, columns, scores)


def slices_of_heads(
    tasks: Mapping[str, Task], evaluated: Mapping[str, Score], rows: Sequence[Row], *, columns: Sequence[str]
) -> tuple[Slices, ...]:
    """Returns the primary metric of all heads, without intervals, by the values of each column.

    Args:
        tasks: The task of each head.
        evaluated: The score of each head that has labelled rows.
        rows: The rows of the evaluation.
        columns: Columns of the file, or of the rows.

    Raises:
        UsageError: No row has such a column.
    """
    metric = primary_metric(tasks)
    read: dict[str, list[Row]] = {}  # the labelled rows of each head
    places: dict[str, dict[int, int]] = {}  # the number of a row -> its place among these
    for name, score in evaluated.items():
        numbers, read[name] = head_rows(rows, name, score.task.columns)
        places[name] = {number: place for place, number in enumerate(numbers)}

    def scores(indices: Sequence[int]) -> Scores:
        metrics = {}
        for name, score in evaluated.items():
            chosen = [places[name][index] for index in indices if index in places[name]]
            if chosen:
                predictions = [score.predictions[place] for place in chosen]
                metrics[name] = score.task.output.metrics(predictions, [read[name][place] for place in chosen])
        joined = joined_metrics(metrics, tasks) if metrics else {}
        return {metric: Estimate(value=joined.get(metric))}

    return _sliced(rows, columns, scores)


def _sliced(
    rows: Sequence[Row], columns: Sequence[str], scores: Callable[[Sequence[int]], Scores]
) -> tuple[Slices, ...]:
    """Returns the scores of rows by the values of each column. ``scores`` takes the indices of some of the rows."""
    slices = []
    for column in dict.fromkeys(columns):
        groups, others = group_rows(column, rows)
        score_rows = tuple(
            ScoreRow(name=value, scores=scores(indices), count=len(indices)) for value, indices in groups.items()
        )
        slices.append(Slices(column=column, slices=score_rows, others=others))
    return tuple(slices)


def group_rows(column: str, rows: Sequence[Row]) -> tuple[dict[str, list[int]], int]:
    """Groups rows by the values of a column, the most frequent value first.

    Returns:
        Value -> the indices of its rows, and for how many values the last group stands (0 if it is one value's).

    Raises:
        UsageError: if no row has the column.
    """
    cells: Sequence[Mapping[str, Any]] = [file_cells(row) for row in rows]
    if not any(column in row for row in cells):  # a column of the task that has another name in the file
        names = dict.fromkeys(name for row in [*cells, *rows] for name in row if name not in _INTERNAL)
        if column not in names:
            raise UsageError(
                f"--by {column}: no row has this column. The columns are {', '.join(map(repr, names))}"
                f"{did_you_mean(column, names)}"
            )
        cells = rows
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(cells):
        value = EMPTY if row.get(column) in (None, "") else row[column]
        groups.setdefault(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), []).append(index)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    if len(ordered) <= MOST_VALUES:
        return dict(ordered), 0
    shown, rest = ordered[: MOST_VALUES - 1], ordered[MOST_VALUES - 1 :]
    return {**dict(shown), counted(len(rest), "other"): sorted(i for _, indices in rest for i in indices)}, len(rest)


def file_cells(row: Row) -> Mapping[str, Any]:
    """Returns the file's columns of a row, or the task's columns without them."""
    kept = row.get(RECORD)
    if kept is None:
        return {name: value for name, value in row.items() if name not in _INTERNAL and value is not None}
    cells: Mapping[str, Any] = json.loads(kept)
    return cells


@dataclass(frozen=True, kw_only=True)
class FileResults(Result):
    """The results of a model on the rows of a file.

    Attributes:
        metrics: over all rows and of single classes, as ``evaluate`` gives them.
        table: the same for people.
        results: None for a task without report sections, and for several tasks.
        slices: the tables that were asked for.
        label_column: the file's column that holds the labels of the only task.
    """

    source: str
    metrics: Mapping[str, float]
    table: MetricTable
    results: Results | None
    slices: tuple[Slices, ...]
    label_column: str | None

    def to_json(self) -> dict[str, Any]:
        """Returns the figures, without the texts."""
        return {
            "source": self.source,
            "metrics": dict(self.metrics),
            "results": None if self.results is None else self.results.to_json(),
            "by": [table.to_json() for table in self.slices],
        }

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        return [f"on {self.source}:", *self.table.lines(), *(line for table in self.slices for line in table.lines())]


def model_of(run: Run, purpose: str) -> AnyModel:
    """Returns the model of a run. ``purpose`` completes the error message.

    Raises:
        UsageError: There is no model yet, or one for each fold.
        CheckpointError: The model cannot be loaded.
    """
    if run.folds is not None:
        raise UsageError(f"{run.folder} has a model for each fold. Name the folder of one of them {purpose}")
    if not (run.folder / outputs.MODEL).is_dir():
        raise UsageError(f"{run.folder} has no model yet {purpose}. Wait for the run's first evaluation")
    return load_model(run.folder, run.tasks)


def label_column(task: Task) -> str | None:
    """Returns the first column of a task that holds labels."""
    return next((column.name for column in task.columns if column.is_label), None)


def results_on_file(
    run: Run,
    data: str | Path,
    *,
    by: Sequence[str],
    read_options: ReadOptions,
    on_error: Literal["fail", "skip"] | None = None,
) -> FileResults:
    """Evaluates the run's model on the rows of a file.

    Args:
        run: A run with a model.
        data: A file with labels.
        by: Columns of the file, or of the task, whose values have scores of their own.
        read_options, on_error: How the file is read. See ``evaluate``.

    Raises:
        UsageError: There is no model yet, or no such column.
        DataError: Rows are bad. The message lists them.
        CheckpointError: The model cannot be loaded.
    """
    model = model_of(run, f"to evaluate on {data}")
    reading = reading_for_labels(model, data, read_options)
    options = options_for_file(reading, data, model.columns, model.row_columns)
    table = labelled_table(model, data, reading=options, on_error=on_error, passthrough="all")
    evaluation = evaluate_data(model, table, reading=options)
    rows, only = list(table), evaluation.scores.get("")
    results, label = None, None
    if only is not None:
        results = results_of(only.task, only.predictions, rows, first=run.best_metric[1])
        label = label_column(only.task)
    if only is None or results is None:
        slices = slices_of_heads(model.tasks, evaluation.scores, rows, columns=by)
    else:
        slices = slices_of(only.task, only.predictions, rows, columns=by, names=list(results.headline))
    renamed = {} if options.columns is None else options.columns
    return FileResults(
        source=str(data),
        metrics=evaluation.metrics,
        table=metric_table(model.tasks, evaluation.metrics),
        results=results,
        slices=slices,
        label_column=None if label is None else renamed.get(label, label),
    )

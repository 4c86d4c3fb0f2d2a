"""A task's figures with their intervals on a data set, on a file and on slices.

A slice is the rows with one value of a column, such as one language or one source of texts. Scores of slices show where
a model is worse than its overall score says.
"""

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
from bert_tasks.inference.evaluation import Evaluation, Score, labelled_table
from bert_tasks.metrics.tables import CLASS_SCORES, ClassRow, MetricTable, format_number
from bert_tasks.model.heads import joined_metrics, metric_table, primary_metric
from bert_tasks.model.inputs import reading_for_labels
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.sections import ReportSections
from bert_tasks.report.collect import Run, load_model
from bert_tasks.report.statistics import LEVEL, Estimate, bootstrap
from bert_tasks.tables import Result
from bert_tasks.tasks.base import Task
from bert_tasks.training import files as outputs

MOST_VALUES = 20  # values of a column that have a row of their own
EMPTY = "(empty)"
FEW_ROWS = 30  # a page warns of the scores of a slice with fewer rows
_INTERNAL = (RECORD, FOLD_GROUP, "line")  # the fields of a row that are no columns
# ``f1\0complaint`` is the estimate of a score of one label. The name of no other metric has this character.
_OF_LABEL = "\0"

Scores = Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """The scores of the rows with one label, of one kind, or with one column value.

    Attributes:
        name: The label (or entity type, or tag), the kind, or the value.
        scores: The estimate of each score, by the name of the score.
        count: The number of rows. For a label, the number of its occurrences in the labels.
    """

    name: str
    scores: Scores
    count: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of one data set in a report.

    Attributes:
        sections: What the task's output reports, with examples and charts.
        estimates: Each metric with its interval. Those of single labels have the label in their name.
        table: The scores of each label that occurs in the rows.
        left_out: The number of labels that the table does not have.
        groups: The scores of each kind of row, such as questions with and without an answer.
        slices: The scores by the values of columns, if they were asked for.
    """

    sections: ReportSections
    estimates: Scores
    table: tuple[ScoreRow, ...] = ()
    left_out: int = 0
    groups: tuple[ScoreRow, ...] = ()
    slices: "tuple[Slices, ...]" = ()

    @classmethod
    def of(cls, sections: ReportSections, *, first: str = "") -> "Results":
        """Computes the intervals of what a task reports, which takes up to a few seconds for many rows.

        Args:
            sections: The report sections of the task.
            first: The metric to show first, if it is one of the measure's.
        """
        estimates = bootstrap(sections.measure)
        support = sections.measure.support()
        if first in estimates:
            sections = replace(sections, headline=tuple(dict.fromkeys([first, *sections.headline])))
        table = []
        for label in sections.labels:
            if label in support:
                scores = {score: estimates[f"{score}{_OF_LABEL}{label}"] for score in CLASS_SCORES}
                table.append(ScoreRow(name=label, scores=scores, count=support[label]))
        groups = []
        for name, measure in sections.groups.items():
            groups.append(ScoreRow(name=name, scores=bootstrap(measure), count=measure.statistics.rows))
        return cls(
            sections=sections,
            estimates=estimates,
            table=tuple(table),
            left_out=len(sections.labels) - len(table),
            groups=tuple(groups),
        )

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
        optional: dict[str, Any] = {
            "table": [{"label": row.name, **_plain(row.scores), "support": row.count} for row in self.table],
            "groups": [{"name": row.name, **_plain(row.scores), "count": row.count} for row in self.groups],
        }
        if sections.confusion is not None:
            optional["confusion"] = asdict(sections.confusion)
        if sections.calibration is not None:
            optional["calibration"] = asdict(sections.calibration)
        if sections.uncalibrated is not None:
            optional["uncalibrated"] = asdict(sections.uncalibrated)
        optional["by"] = [table.to_json() for table in self.slices]
        optional |= sections.figures
        # The scores of single labels are in the table already.
        overall = {name: estimate for name, estimate in self.estimates.items() if _OF_LABEL not in name}
        return {
            "rows": self.rows,
            "unit": sections.unit,
            "mistakes": sum(not result.is_correct for result in sections.results),
            **{name: value for name, value in optional.items() if value},
            "estimates": _plain(overall),
        }


def results_of(
    task: Task, predictions: Sequence[Prediction], rows: Sequence[Row], *, first: str = ""
) -> Results | None:
    """Returns the results of predictions (``Results.of``), or None for a task without report sections."""
    sections = task.output.report(predictions, rows, task.texts)
    if sections is None:
        return None
    return Results.of(sections, first=first)


def evaluation_headline(tasks: Mapping[str, Task], evaluation: Evaluation) -> str:
    """Returns the primary metric of an evaluation, with its number of rows and its interval, if it has one.

    Its interval takes up to a few seconds for many rows. The mean over several tasks has none.
    """
    metric = primary_metric(tasks)
    title = metric_table(tasks, evaluation.metrics).title(metric)
    text = f"{title} {format_number(evaluation.metrics.get(metric))}"
    only = evaluation.scores.get("")
    if only is None:
        counts = [f"{name}: {counted(len(score.rows), 'row')}" for name, score in evaluation.scores.items()]
        return f"{text} ({', '.join(counts)})"
    sections = only.task.output.report(only.predictions, only.rows, only.task.texts)
    if sections is None:
        return f"{text} on {counted(len(only.rows), 'row')}"
    text = f"{text} on {counted(len(sections.results), sections.unit.removesuffix('s'))}"
    estimate = bootstrap(sections.measure).get(metric)
    if estimate is None or estimate.low is None:
        return text
    return f"{text} ({LEVEL} % interval: {format_number(estimate.low)} to {format_number(estimate.high)})"


def _plain(scores: Scores) -> dict[str, Any]:
    """Returns the scores as plain values for JSON."""
    return {name: asdict(score) for name, score in scores.items()}


def score_table(word: str, rows: Sequence[ScoreRow], overall: Mapping[str, float]) -> MetricTable:
    """Returns the values without intervals. ``word`` is the header of the rows."""
    columns: tuple[str, ...] = ()
    if rows:
        columns = tuple(rows[0].scores)
    class_rows = []
    for row in rows:
        values = tuple(score.value for score in row.scores.values())
        class_rows.append(ClassRow(name=row.name, scores=values, support=row.count))
    return MetricTable(overall=overall, word=word, columns=columns, rows=tuple(class_rows))


@dataclass(frozen=True, kw_only=True)
class Slices(Result):
    """The scores of the rows with each value of a column, the most frequent first.

    Attributes:
        column: The column of the file, or of the task.
        slices: A row for each value. The last one may stand for all values that have no row of their own.
        others: The number of values that the last slice stands for. It is 0 if each value has its own slice.
    """

    column: str
    slices: tuple[ScoreRow, ...]
    others: int = 0

    @property
    def warning(self) -> str:
        """A warning about slices with too few rows for a reliable score. It is empty if there are none."""
        few = [f"{row.name} ({row.count})" for row in self.slices if row.count < FEW_ROWS]
        if not few:
            return ""
        return f"fewer than {FEW_ROWS} rows for {first_few(few, 5)}, so scores say little and intervals are too narrow"

    def to_json(self) -> dict[str, Any]:
        """Returns the column, and the scores of each value."""
        values = [{"value": row.name, "rows": row.count, "scores": _plain(row.scores)} for row in self.slices]
        return {"column": self.column, "values": values, "others": self.others}

    def lines(self) -> list[str]:
        """Returns the lines for a terminal, of which the last one is empty."""
        lines = [*score_table(self.column, self.slices, {}).class_lines("rows")]
        if self.warning:
            lines.append(f"{self.column}: {self.warning}")
        return [*lines, ""]


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
    labelled_rows: list[Row] = []
    labelled_predictions: list[Prediction] = []
    for row, prediction in zip(rows, predictions, strict=True):
        # A task whose labels are made from the texts, such as masked tokens, has no column of labels.
        if not labels or any(row.get(name) is not None for name in labels):
            labelled_rows.append(row)
            labelled_predictions.append(prediction)

    def scores(indices: Sequence[int]) -> Scores:
        slice_predictions = [labelled_predictions[index] for index in indices]
        results = results_of(task, slice_predictions, [labelled_rows[index] for index in indices])
        estimates: Scores = {}
        if results is not None:
            estimates = results.estimates
        return {name: estimates[name] for name in names}

    return _sliced(labelled_rows, columns, scores)


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
    # The metric of several tasks is a mean over them, which has no formula of sums over rows and so no interval.
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
        joined: Mapping[str, float] = {}
        if metrics:  # none of these rows may have labels
            joined = joined_metrics(metrics, tasks)
        return {metric: Estimate(value=joined.get(metric))}

    return _sliced(rows, columns, scores)


def _sliced(
    rows: Sequence[Row], columns: Sequence[str], scores: Callable[[Sequence[int]], Scores]
) -> tuple[Slices, ...]:
    """Returns the scores of rows by the values of each column. ``scores`` takes the indices of some of the rows."""
    slices = []
    for column in dict.fromkeys(columns):
        groups, others = group_rows(column, rows)
        score_rows = []
        for value, indices in groups.items():
            score_rows.append(ScoreRow(name=value, scores=scores(indices), count=len(indices)))
        slices.append(Slices(column=column, slices=tuple(score_rows), others=others))
    return tuple(slices)


def group_rows(column: str, rows: Sequence[Row]) -> tuple[dict[str, list[int]], int]:
    """Groups rows by the values of a column, the most frequent value first.

    Returns:
        The indices of the rows of each value, and the number of values that the last group stands for. This number is
        0 if the last group has a single value, too.

    Raises:
        UsageError: No row has the column.
    """
    # The columns of the file come first, because users name what they see in it.
    cells: Sequence[Mapping[str, Any]] = [file_cells(row) for row in rows]
    if not any(column in row for row in cells):
        # It may be a column of the task that has another name in the file.
        names: dict[str, None] = {}
        for row in [*cells, *rows]:
            names |= dict.fromkeys(name for name in row if name not in _INTERNAL)
        if column not in names:
            raise UsageError(
                f"--by {column}: no row has this column. The columns are {', '.join(map(repr, names))}"
                f"{did_you_mean(column, names)}"
            )
        cells = rows
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(cells):
        value = row.get(column)
        if value in (None, ""):
            value = EMPTY
        elif not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)  # a list, for example, cannot be a key
        groups.setdefault(value, []).append(index)
    # Sorting is stable, so that equally frequent values stay in the order of the file.
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    if len(ordered) <= MOST_VALUES:
        return dict(ordered), 0
    shown = dict(ordered[: MOST_VALUES - 1])
    rest = ordered[MOST_VALUES - 1 :]
    others: list[int] = []
    for _, indices in rest:
        others += indices
    shown[counted(len(rest), "other")] = sorted(others)
    return shown, len(rest)


def file_cells(row: Row) -> Mapping[str, Any]:
    """Returns the file's columns of a row. A row that was read without them has the columns of the task."""
    kept = row.get(RECORD)
    if kept is None:
        return {name: value for name, value in row.items() if name not in _INTERNAL and value is not None}
    cells: Mapping[str, Any] = json.loads(kept)
    return cells


@dataclass(frozen=True, kw_only=True)
class FileResults(Result):
    """The results of a model on the rows of a file.

    Attributes:
        source: The file.
        metrics: The metrics over all rows and of single classes, as ``evaluate`` returns them.
        table: The same metrics as a table for people.
        results: The results with intervals. None for a task without report sections, and for several tasks.
        slices: The scores by the values of the columns that were asked for.
        label_column: The file's column that holds the labels of the only task.
    """

    source: str
    metrics: Mapping[str, float]
    table: MetricTable
    results: Results | None
    slices: tuple[Slices, ...]
    label_column: str | None

    def to_json(self) -> dict[str, Any]:
        """Returns the figures, without the texts."""
        results = None
        if self.results is not None:
            results = self.results.to_json()
        return {
            "source": self.source,
            "metrics": dict(self.metrics),
            "results": results,
            "by": [table.to_json() for table in self.slices],
        }

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        lines = [f"on {self.source}:", *self.table.lines()]
        for slices in self.slices:
            lines += slices.lines()
        return lines


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
        read_options, on_error: How the file is read, as for ``evaluate``.

    Raises:
        UsageError: There is no model yet, or no such column.
        DataError: There are bad rows, which the message lists.
        CheckpointError: The model cannot be loaded.
    """
    model = model_of(run, f"to evaluate on {data}")
    reading = reading_for_labels(model, data, read_options)
    options = options_for_file(reading, data, model.columns, model.row_columns)
    # All columns of the file are kept, for the slices and for the file of mistakes.
    table = labelled_table(model, data, reading=options, on_error=on_error, passthrough="all")
    evaluation = evaluate_data(model, table, reading=options)
    rows = list(table)
    only = evaluation.scores.get("")  # None for a model of several tasks
    results = None
    label = None
    if only is not None:
        results = results_of(only.task, only.predictions, rows, first=run.best_metric[1])
        label = label_column(only.task)
    if only is None or results is None:
        slices = slices_of_heads(model.tasks, evaluation.scores, rows, columns=by)
    else:
        slices = slices_of(only.task, only.predictions, rows, columns=by, names=list(results.headline))
    if label is not None and options.columns is not None:
        label = options.columns.get(label, label)
    return FileResults(
        source=str(data),
        metrics=evaluation.metrics,
        table=metric_table(model.tasks, evaluation.metrics),
        results=results,
        slices=slices,
        label_column=label,
    )

"""A task's figures with their intervals: on one data set, on a labelled file, and on slices of their rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_tasks.data.columns import FOLD_GROUP, PASSTHROUGH, Column, Row, text_of_words, word_spans
from bert_tasks.data.problems import counted, did_you_mean, first_few
from bert_tasks.data.readers import ReadOptions
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluate_data
from bert_tasks.metrics.tables import CLASS_SCORES, ClassRow, MetricTable
from bert_tasks.model.inputs import as_trained, load_table
from bert_tasks.model.task_model import TaskModel
from bert_tasks.report.collect import Run
from bert_tasks.report.statistics import Estimate, bootstrap
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.tasks.shared.report import ReportSections
from bert_tasks.training import files as outputs

MOST_VALUES = 20  # values of a column that have a row of their own
EMPTY = "(empty)"
FEW_ROWS = 30  # below which a page warns of the scores of a slice
NUMBER_GROUPS = 4  # of slices by length or by confidence
WORDS, CONFIDENCE = "words", "confidence"  # the names of these slices
_DIGITS = 3  # of a confidence
_INTERNAL = (PASSTHROUGH, FOLD_GROUP, "line")  # the fields of a row that are no columns
_CONFIDENCE_NOTE = (
    "confidence: the model's probability of its prediction; for several labels or words, of the least certain one"
)

Scores = Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """The scores of some of the rows: of those with one label, of one kind, or with one value of a column.

    Attributes:
        name: of the label (or entity type, or tag), the kind, or the value.
        count: how many rows they are; for a label how often it is in the labels.
    """

    name: str
    scores: Scores
    count: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a report shows of one data set.

    Attributes:
        sections: the task's figures and examples.
        estimates: the metrics with their intervals.
        table: a row for each label that has numbers of its own.
        left_out: how many labels have none.
        groups: a row for each kind of rows.
        slices: the tables that were asked for.
    """

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
        """The metrics that are shown first and those of each label, without intervals."""
        overall = {name: one.value for name, one in self.headline.items() if one.value is not None}
        if self.groups:
            return score_table(self.sections.unit, self.groups, overall)
        return score_table(self.sections.label_word, self.table, overall)

    def to_json(self) -> dict[str, Any]:
        """The figures, without the texts."""
        sections = self.sections
        optional = {
            "table": [{"label": one.name, **_plain(one.scores), "support": one.count} for one in self.table],
            "groups": [{"name": one.name, **_plain(one.scores), "count": one.count} for one in self.groups],
            "confusion": None if sections.confusion is None else asdict(sections.confusion),
            "calibration": None if sections.calibration is None else asdict(sections.calibration),
            "by": [one.to_json() for one in self.slices],
            **sections.figures,
        }
        return {
            "rows": self.rows,
            "unit": sections.unit,
            "mistakes": sum(not one.is_correct for one in sections.results),
            **{name: value for name, value in optional.items() if value},
            "estimates": _plain({name: one for name, one in self.estimates.items() if "\0" not in name}),
        }


def results_of(
    task: Task, predictions: Sequence[Prediction], rows: Sequence[Row], *, first: str = ""
) -> Results | None:
    """The results of a task that has report sections; ``first`` as in ``Results.of``."""
    sections = task.report_sections(predictions, rows)
    return None if sections is None else Results.of(sections, first=first)


def _plain(scores: Scores) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}


def score_table(word: str, rows: Sequence[ScoreRow], overall: Mapping[str, float]) -> MetricTable:
    """The values for people, without intervals; ``word``: what a row stands for."""
    found = tuple(
        ClassRow(name=one.name, scores=tuple(score.value for score in one.scores.values()), support=one.count)
        for one in rows
    )
    return MetricTable(overall=overall, word=word, columns=tuple(rows[0].scores) if rows else (), rows=found)


@dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """Which slices of the rows have scores of their own.

    Attributes:
        columns: one table for each.
        length, confidence: one table by the number of words, and one by the confidence in the prediction.
    """

    columns: tuple[str, ...] = ()
    length: bool = False
    confidence: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether none were asked for."""
        return not (self.columns or self.length or self.confidence)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Scores by the values of a column, the most frequent first, or by length or confidence, the lowest first.

    Attributes:
        names: of the scores.
        slices: a row for each value; the last may stand for all values that have no row of their own.
        others: how many values the last slice stands for; 0 where each value has its own.
        note: what the values are, for people; empty where the column says it.
    """

    column: str
    names: tuple[str, ...]
    slices: tuple[ScoreRow, ...]
    others: int = 0
    note: str = ""

    @property
    def warning(self) -> str:
        """A sentence about slices of so few rows that their scores say little; empty where there are none."""
        few = [f"{one.name} ({one.count})" for one in self.slices if one.count < FEW_ROWS]
        if not few:
            return ""
        return (
            f"scores of fewer than {FEW_ROWS} rows say little, and their intervals are too narrow: {first_few(few, 5)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The column, and the scores of each value."""
        values = [{"value": one.name, "rows": one.count, "scores": _plain(one.scores)} for one in self.slices]
        return {"column": self.column, "values": values, "others": self.others}

    def lines(self) -> list[str]:
        """A table for people."""
        note, warning = [self.note] if self.note else [], [f"{self.column}: {self.warning}"] if self.warning else []
        return [*score_table(self.column, self.slices, {}).class_lines("rows"), *note, *warning, ""]


def scores_of_rows(
    task: Task, predictions: Sequence[Prediction], rows: Sequence[Row]
) -> Callable[[Sequence[int]], Scores]:
    """A function: the indices of some rows -> their scores; the primary metric alone without report sections."""

    def score(indices: Sequence[int]) -> Scores:
        part = [predictions[index] for index in indices], [rows[index] for index in indices]
        results = results_of(task, *part)
        if results is not None:
            return results.estimates
        return {task.primary_metric: Estimate(value=task.metrics(*part)[task.primary_metric])}

    return score


def slices_by_length(
    rows: Sequence[Row],
    columns: Sequence[Column],
    score: Callable[[Sequence[int]], Scores],
    names: Sequence[str],
) -> Slices:
    """The scores of rows of similar length; see ``slices_by_number``.

    Args:
        rows: of the data set.
        columns: of the task.
        score, names: see ``slices_by``.
    """
    lengths = [row_length(row, columns) for row in rows]
    return slices_by_number(WORDS, lengths, score, names, written="{:,.0f}")


def slices_by_confidence(
    task: Task,
    predictions: Sequence[Prediction],
    score: Callable[[Sequence[int]], Scores],
    names: Sequence[str],
    *,
    out_of_fold: bool,
) -> Slices:
    """The scores of rows of whose predictions the model is similarly confident; see ``slices_by_number``.

    Args:
        task: of the predictions.
        predictions: for each row of the data set.
        score, names: see ``slices_by``.
        out_of_fold: each row was predicted by a model that was trained without it.

    Raises:
        UsageError: the task's predictions have no confidence.
    """
    confidences: list[float] = []
    for prediction in predictions:
        confidence = task.confidence(prediction)
        if confidence is None:
            raise UsageError(f"--by-confidence: these predictions of {task.name} have no probability of their own")
        confidences.append(round(confidence, _DIGITS))  # as it is shown, so that no two slices have the same name
    slices = slices_by_number(CONFIDENCE, confidences, score, names, written=f"{{:.{_DIGITS}f}}")
    models = "; the model of a row was trained without it" if out_of_fold else ""
    return replace(slices, note=f"{_CONFIDENCE_NOTE}{models}")


def slices_by_number(
    column: str,
    values: Sequence[float],
    score: Callable[[Sequence[int]], Scores],
    names: Sequence[str],
    *,
    written: str,
) -> Slices:
    """The scores of rows with similar numbers: a quarter of the rows each, as far as equal numbers stay together.

    Args:
        column: the name of the numbers.
        values: of each row.
        score, names: see ``slices_by``.
        written: the format of a number.
    """
    numbers = np.array(values)
    shares = np.arange(1, NUMBER_GROUPS + 1) / NUMBER_GROUPS
    edges = np.unique(np.quantile(numbers, shares, method="inverted_cdf"))
    group_of_row = np.searchsorted(edges, numbers)
    slices = []
    for group in range(len(edges)):
        places = np.flatnonzero(group_of_row == group).tolist()
        low, high = (written.format(end) for end in (numbers[places].min(), numbers[places].max()))
        scores = score(places)
        label = low if low == high else f"{low} to {high}"
        slices.append(ScoreRow(name=label, scores={name: scores[name] for name in names}, count=len(places)))
    return Slices(column=column, names=tuple(names), slices=tuple(slices))


def row_length(row: Row, columns: Sequence[Column]) -> int:
    """The number of words, and marks of punctuation, in the texts that a task reads of a row."""
    _, text_of = text_of_words(columns)
    total = 0
    for column in columns:
        value = row.get(column.name)
        if value is None or column == text_of:
            continue
        if column.kind == "words":
            total += len(value)
        elif column.kind in ("text", "choices"):
            total += sum(len(word_spans(text)) for text in ([value] if column.kind == "text" else value))
    return total


def slices_of(
    task: Task,
    predictions: Sequence[Prediction],
    rows: Sequence[Row],
    *,
    options: SliceOptions,
    names: Sequence[str],
    out_of_fold: bool = False,
) -> tuple[Slices, ...]:
    """The slices that were asked for, of the rows that have a label: by columns, by length and by confidence.

    Args:
        task: of the predictions.
        predictions: for each row.
        rows: of the data set; those of a cross-validation with a teacher may lack labels.
        options: which slices.
        names: of the scores to show.
        out_of_fold: see ``slices_by_confidence``.

    Raises:
        UsageError: see ``slices_by`` and ``slices_by_confidence``.
    """
    labels = [column.name for column in task.columns if column.is_label]
    if labels:
        places = [place for place, row in enumerate(rows) if any(row.get(name) is not None for name in labels)]
        predictions, rows = [predictions[place] for place in places], [rows[place] for place in places]
    score = scores_of_rows(task, predictions, rows)
    found = [slices_by(column, rows, score, names) for column in dict.fromkeys(options.columns)]
    if options.length:
        found.append(slices_by_length(rows, task.columns, score, names))
    if options.confidence:
        found.append(slices_by_confidence(task, predictions, score, names, out_of_fold=out_of_fold))
    return tuple(found)


def slices_by(
    column: str, rows: Sequence[Row], score: Callable[[Sequence[int]], Scores], names: Sequence[str]
) -> Slices:
    """The scores of the rows of each value.

    Args:
        column: of the file, or of the task.
        rows: of the data set.
        score: the indices of some rows -> their scores.
        names: of the scores to show.

    Raises:
        UsageError: no row has the column.
    """
    cells: Sequence[Mapping[str, Any]] = [file_cells(row) for row in rows]
    if not any(column in row for row in cells):
        own = dict.fromkeys(name for row in rows for name in row if name not in _INTERNAL)
        if column not in own:
            known = list(dict.fromkeys(name for row in [*cells, own] for name in row))
            raise UsageError(
                f"--by {column}: no row has this column{did_you_mean(column, known)}; the columns are "
                f"{', '.join(map(repr, known))}"
            )
        cells = rows
    indices: dict[str, list[int]] = {}
    for index, row in enumerate(cells):
        value = row.get(column)
        if value is None or value == "":
            value = EMPTY
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        indices.setdefault(text, []).append(index)
    chosen = sorted(indices.items(), key=lambda item: -len(item[1]))
    others = 0
    if len(chosen) > MOST_VALUES:
        others = len(chosen) - (MOST_VALUES - 1)
        rest = sorted(index for _, places in chosen[MOST_VALUES - 1 :] for index in places)
        chosen = [*chosen[: MOST_VALUES - 1], (counted(others, "other"), rest)]
    slices = []
    for text, places in chosen:
        scores = score(places)
        slices.append(ScoreRow(name=text, scores={name: scores[name] for name in names}, count=len(places)))
    return Slices(column=column, names=tuple(names), slices=tuple(slices), others=others)


def file_cells(row: Row) -> Mapping[str, Any]:
    """The columns of a row as its file has them; those of the task where these were not kept."""
    kept = row.get(PASSTHROUGH)
    if kept is None:
        return {name: value for name, value in row.items() if name not in _INTERNAL and value is not None}
    cells: Mapping[str, Any] = json.loads(kept)
    return cells


@dataclass(frozen=True, kw_only=True)
class FileResults:
    """The results of a model on the rows of a file.

    Attributes:
        metrics: over all rows and of single classes, as ``evaluate`` gives them.
        table: the same for people.
        results: None for a task without report sections.
        slices: the tables that were asked for.
        label_column: the file's column that holds the labels.
    """

    source: str
    metrics: Mapping[str, float]
    table: MetricTable
    results: Results | None
    slices: tuple[Slices, ...]
    label_column: str | None

    def to_json(self) -> dict[str, Any]:
        """The figures, without the texts."""
        return {
            "source": self.source,
            "metrics": dict(self.metrics),
            "results": None if self.results is None else self.results.to_json(),
            "by": [one.to_json() for one in self.slices],
        }

    def lines(self) -> list[str]:
        """For people."""
        return [f"on {self.source}:", *self.table.lines(), *(line for one in self.slices for line in one.lines())]


def model_of(run: Run, purpose: str) -> TaskModel:
    """The model of a run.

    Raises:
        UsageError: there is no model yet, or one for each fold; ``purpose`` says what it is for.
        CheckpointError: it cannot be loaded.
    """
    if run.folds is not None:
        raise UsageError(f"{run.folder} has a model for each fold: name the folder of one of them {purpose}")
    folder = run.folder / outputs.MODEL
    if not folder.is_dir():
        raise UsageError(f"{run.folder} has no model yet {purpose}; wait for the run's first evaluation")
    model = TaskModel.from_pretrained(folder, task=None if run.task is None else type(run.task))
    return model.to("cuda") if torch.cuda.is_available() else model


def results_on_file(run: Run, data: str | Path, *, slices: SliceOptions, read_options: ReadOptions) -> FileResults:
    """Evaluates the run's model on the rows of a file.

    Args:
        run: with a model.
        data: a file with labels.
        slices: which slices have scores of their own; columns are those of the file, or of the task.
        read_options: how the file is read; what is not stated is as in training.

    Raises:
        UsageError: there is no model yet, or no such column.
        DataError: naming every bad row.
        CheckpointError: the model cannot be loaded.
    """
    model = model_of(run, f"to evaluate on {data}")
    source, options = as_trained(model, data, read_options)
    table = load_table(source, model.task, reading=options, passthrough="all")
    evaluation = evaluate_data(model, table, reading=options)
    rows, task = list(table), model.task
    results = results_of(task, evaluation.predictions, rows, first=run.best_metric[1])
    names = [task.primary_metric] if results is None else list(results.headline)
    label = next((column.name for column in task.columns if column.is_label), None)
    renamed = {} if options.columns is None else options.columns
    return FileResults(
        source=str(data),
        metrics=evaluation.metrics,
        table=task.metric_table(evaluation.metrics),
        results=results,
        slices=slices_of(task, evaluation.predictions, rows, options=slices, names=names),
        label_column=None if label is None else renamed.get(label, label),
    )

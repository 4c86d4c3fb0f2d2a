"""Rows whose label is probably wrong, by confident learning.

Owns which rows these are. The library cleanlab detects them in the predictions of a cross-validation by the rule of
Northcutt, Jiang and Chuang (arXiv:1911.00068). By this rule a row counts as another class if its probability of that
class is at least the mean over the rows with that label.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_tasks.data.columns import Row, first_column
from bert_tasks.data.kinds import Label
from bert_tasks.errors import UsageError
from bert_tasks.report.collect import Run

ISSUE_COLUMNS = ("label", "suggested", "probability", "suggested_probability")


@dataclass(frozen=True, kw_only=True)
class LabelIssue:
    """A row whose label is probably wrong.

    Attributes:
        label: the row's.
        suggested: the class that the model finds most probable.
        probability, suggested_probability: of the two, by a model that was trained without the row.
    """

    row: Row
    label: str
    suggested: str
    probability: float
    suggested_probability: float


def label_issues_of(run: Run) -> tuple[LabelIssue, ...]:
    """Returns the rows whose label is probably wrong, the least probable label first.

    Raises:
        UsageError: The run is no cross-validation, its rows could not be predicted again, or they do not have one label
            each.
    """
    if run.folds is None:
        raise UsageError(
            f"{run.folder}: --label-issues needs predictions of models that did not see the rows. Name the folder of "
            "`bert-tasks train RECIPE --folds 5`"
        )
    if not run.predicted:
        raise UsageError(f"{run.folder}: --label-issues needs predictions. {' '.join(run.missing)}")
    predicted = run.predicted[0]
    labels = predicted.task.output.labels
    column = first_column(predicted.task.columns, Label)
    scores = [getattr(prediction, "scores", None) for prediction in predicted.predictions]
    if column is None or not all(isinstance(item, Mapping) and item.keys() >= set(labels) for item in scores):
        raise UsageError(
            f"{run.folder}: --label-issues is for rows with one label each and predictions with all probabilities"
        )
    pairs = [(row, p) for row, p in zip(predicted.rows, scores, strict=True) if row.get(column.name) is not None and p]
    return tuple(find_issues(pairs, column.name, labels))


def weak_folds_note(run: Run) -> str | None:
    """Returns a caution if the models of some folds are no better than the most frequent label.

    Such a model finds the rare labels improbable whatever the text, so that their rows look wrong.

    Args:
        run: A cross-validation for which ``label_issues_of`` returns the issues.
    """
    if run.folds is None or not run.predicted:
        return None
    column = first_column(run.predicted[0].task.columns, Label)
    if column is None:
        return None
    labels = [row[column.name] for row in run.predicted[0].rows if row.get(column.name) is not None]
    majority, count = Counter(labels).most_common(1)[0]
    share = count / len(labels)
    folds = run.folds.runs
    weak = [str(fold.fold) for fold in folds if fold.metrics.get("accuracy", 1.0) <= share]
    if not weak:
        return None
    return (
        f"In {len(weak)} of {len(folds)} folds (fold {', '.join(weak)}) the model is no better than {majority!r} for "
        f"every row ({share:.1%} of the rows), so that the labels that it finds improbable may well be right. Train "
        "better models before you correct labels."
    )


def find_issues(
    pairs: Sequence[tuple[Row, Mapping[str, float]]], column: str, labels: Sequence[str]
) -> list[LabelIssue]:
    """Returns the label issues of rows with a label in ``column`` and probabilities."""
    from cleanlab.filter import find_label_issues

    present = [label for label in labels if any(row[column] == label for row, _ in pairs)]
    index = {label: number for number, label in enumerate(present)}
    classes = np.array([index[row[column]] for row, _ in pairs])
    scores = np.array([[shares[label] for label in present] for _, shares in pairs], dtype=np.float64)  # [rows, labels]
    scores /= scores.sum(axis=1, keepdims=True)  # corrects float32 rounding and labels that no row has
    rows = find_label_issues(
        classes, scores, filter_by="confident_learning", return_indices_ranked_by="self_confidence", n_jobs=1
    )
    issues = []
    for number in rows.tolist():
        best = int(scores[number].argmax())
        issue = LabelIssue(
            row=pairs[number][0],
            label=present[classes[number]],
            suggested=present[best],
            probability=float(scores[number, classes[number]]),
            suggested_probability=float(scores[number, best]),
        )
        issues.append(issue)
    return issues


def issue_cells(issue: LabelIssue, cells: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the file to correct. ``cells`` are the row's columns."""
    reserved = ("line", "set", *ISSUE_COLUMNS)
    others = {f"input.{name}" if name in reserved else name: cells[name] for name in cells if name != "label"}
    return {"line": issue.row.get("line"), **others, **{name: getattr(issue, name) for name in ISSUE_COLUMNS}}

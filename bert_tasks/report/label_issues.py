"""Rows whose label is probably wrong, by confident learning.

This module owns which rows these are. The library cleanlab detects them in the predictions of a cross-validation by the
rule of Northcutt, Jiang and Chuang (arXiv:1911.00068). By this rule a row counts as another class if its probability of
that class is at least the mean over the rows with that label, which corrects for a model that is more confident in some
classes than in others.
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
        row: The row as the task reads it.
        label: The label of the row.
        suggested: The class that the model finds most probable.
        probability, suggested_probability: The probabilities of the two, by a model that was trained without the row.
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
    pairs = []
    for row, probabilities in zip(predicted.rows, scores, strict=True):
        if row.get(column.name) is not None and probabilities:
            pairs.append((row, probabilities))
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
    # A model that always predicts the most frequent label has its share as accuracy.
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
    """Returns the label issues among rows.

    Args:
        pairs: Each row with the probabilities of its labels, which sum to about 1.
        column: The column that holds the label of each row.
        labels: The labels of the task, of which the rows may lack some.
    """
    from cleanlab.filter import find_label_issues

    # cleanlab numbers the classes from 0. Labels that no row has are left out.
    present = [label for label in labels if any(row[column] == label for row, _ in pairs)]
    index = {label: number for number, label in enumerate(present)}
    classes = np.array([index[row[column]] for row, _ in pairs])  # [rows]
    probabilities = []
    for _, of_labels in pairs:
        probabilities.append([of_labels[label] for label in present])
    scores = np.array(probabilities, dtype=np.float64)  # [rows, labels]
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
    """Returns a row of the file to correct, whose column ``label`` is last, with the suggestion.

    Args:
        issue: The issue of the row.
        cells: The columns of the row in its file.
    """
    reserved = ("line", "set", *ISSUE_COLUMNS)
    corrected = {"line": issue.row.get("line")}
    for name, cell in cells.items():
        if name == "label":
            continue
        if name in reserved:
            name = f"input.{name}"
        corrected[name] = cell
    for name in ISSUE_COLUMNS:
        corrected[name] = getattr(issue, name)
    return corrected

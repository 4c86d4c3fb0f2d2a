"""What a report shows of sequence and pair classification: one class, several labels, or a number."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.data.problems import counted
from bert_tasks.metrics.classification import calibration
from bert_tasks.metrics.formulas import class_measure, multilabel_measure, regression_measure
from bert_tasks.tasks.shared.report import (
    MOST_EXAMPLES,
    Axis,
    Chart,
    Confusion,
    Example,
    Examples,
    Line,
    Remark,
    ReportSections,
    RowResult,
    cut,
)

SequencePrediction = Any  # of task.py, which imports this module

MOST_SCATTERED = 1500  # points of a scatter plot
_SEED = 0  # of their choice

Pairs = Sequence[tuple[Row, SequencePrediction]]


def class_sections(pairs: Pairs, names: tuple[str, ...]) -> ReportSections:
    """One class per row.

    Args:
        pairs: the labelled rows and their predictions.
        names: of the classes.
    """
    labels, predictions = [row["label"] for row, _ in pairs], [str(one.label) for _, one in pairs]
    results = tuple(
        RowResult(row=row, label=label, prediction=prediction, score=one.score, is_correct=label == prediction)
        for (row, one), label, prediction in zip(pairs, labels, predictions, strict=True)
    )
    return ReportSections(
        measure=class_measure(labels, predictions, names),
        unit="rows",
        headline=("accuracy", "macro_f1"),
        results=results,
        accuracy_of_rows=True,
        label_word="class",
        labels=names,
        confusion=Confusion.of(labels, predictions, names, "rows"),
        calibration=calibration([one.score for one in results], [one.is_correct for one in results]),
        examples=_confident_mistakes(results),
    )


def multilabel_sections(pairs: Pairs, names: tuple[str, ...]) -> ReportSections:
    """Several labels per row; arguments as in ``class_sections``. A row is correct if all its labels are."""
    labels = [tuple(row["labels"]) for row, _ in pairs]
    predictions = [() if one.labels is None else one.labels for _, one in pairs]
    results = []
    for (row, one), label, prediction in zip(pairs, labels, predictions, strict=True):
        wrong = set(label) ^ set(prediction)
        confidences = (one.scores[name] if name in prediction else 1 - one.scores[name] for name in wrong)
        result = RowResult(
            row=row,
            label=list(label),
            prediction=list(prediction),
            score=max(confidences, default=0.0),  # of the most confident mistake among the labels
            is_correct=not wrong,
        )
        results.append(result)
    return ReportSections(
        measure=multilabel_measure(labels, predictions, names),
        unit="rows",
        headline=("f1", "micro_f1"),
        results=tuple(results),
        label_word="label",
        labels=names,
        calibration=calibration(
            [one.scores[name] for _, one in pairs for name in names],
            [name in label for label in labels for name in names],
        ),
        confidence_in="label",
        examples=_confident_mistakes(results),
    )


def regression_sections(pairs: Pairs) -> ReportSections:
    """A number per row; ``pairs`` as in ``class_sections``."""
    labels, predictions = [float(row["label"]) for row, _ in pairs], [one.score for _, one in pairs]
    results = tuple(
        RowResult(row=row, label=label, prediction=number, score=abs(number - label), is_correct=number == label)
        for (row, _), label, number in zip(pairs, labels, predictions, strict=True)
    )
    farthest = sorted(results, key=lambda one: -one.score)[:MOST_EXAMPLES]
    items = [
        _example(one.row, Remark(name="label", value=f"{one.label:.3g}"), prediction=f"{one.prediction:.3g}")
        for one in farthest
    ]
    measure = regression_measure(labels, predictions)
    return ReportSections(
        measure=measure,
        unit="rows",
        headline=measure.names,
        results=results,
        charts=_regression_charts(labels, predictions),
        examples=Examples(
            word="Mistakes",
            title="Largest errors",
            lead="The rows whose prediction is farthest from their label.",
            items=tuple(items),
        ),
    )


def _confident_mistakes(results: Sequence[RowResult]) -> Examples:
    wrong = sorted((one for one in results if not one.is_correct), key=lambda one: -one.score)
    items = [
        _example(
            one.row,
            Remark(name="label", value=cut(_text(one.label), 200)),
            Remark(name="confidence", value=one.score),
            prediction=cut(_text(one.prediction), 200),
        )
        for one in wrong[:MOST_EXAMPLES]
    ]
    lead = (
        f"Wrong predictions: {len(wrong):,} of {len(results):,}, the most confident first. Wrong labels in the data "
        "show up here, too."
    )
    return Examples(word="Mistakes", title="Most confident mistakes", lead=lead, items=tuple(items))


def _example(row: Row, label: Remark, *more: Remark, prediction: str) -> Example:
    texts = [row["text"], *([] if row.get("text_pair") is None else [row["text_pair"]])]
    predicted = Remark(name="prediction", value=prediction, tone="bad")
    return Example(line=row.get("line"), texts=tuple(map(cut, texts)), remarks=(label, predicted, *more), row=row)


def _text(label: Any) -> str:
    if isinstance(label, str):
        return label
    return ", ".join(label) if label else "(none)"


def _regression_charts(labels: Sequence[float], predictions: Sequence[float]) -> tuple[Chart, Chart]:
    """Predictions over labels, and errors over predictions, of a random choice of very many rows."""
    pairs = list(zip(labels, predictions, strict=True))
    if len(pairs) > MOST_SCATTERED:
        chosen = np.random.default_rng(_SEED).choice(len(pairs), MOST_SCATTERED, replace=False)
        pairs = [pairs[place] for place in sorted(chosen.tolist())]
    axis = Axis.around("label", (number for pair in pairs for number in pair))
    diagonal = Line(name="prediction equals label", points=((axis.low,) * 2, (axis.high,) * 2), style=7, marked=False)
    scatter = Chart(
        title="Predictions and labels",
        description=f"Predictions over labels of {counted(len(pairs), 'row')}.",
        x=axis,
        y=replace(axis, name="prediction"),
        lines=(diagonal,),
        points=tuple((label, prediction, 3.0) for label, prediction in pairs),
    )
    errors = [(prediction, prediction - label) for label, prediction in pairs]
    widest = max(abs(error) for _, error in errors)
    across = Axis.around("prediction", (prediction for prediction, _ in errors))
    residuals = Chart(
        title="Residuals",
        description=f"Prediction minus label of {counted(len(errors), 'row')}, at most {widest:.3g} apart.",
        x=across,
        y=Axis.around("prediction minus label", (-widest, widest)),
        lines=(Line(name="no error", points=((across.low, 0.0), (across.high, 0.0)), style=7, marked=False),),
        points=tuple((prediction, error, 3.0) for prediction, error in errors),
    )
    return scatter, residuals

"""The report of predictions of a class, labels, a number or a choice for a row.

``Task.output_kind`` says which of them. Predictions have the fields of the hub's pipelines, which are ``label``,
``labels``, ``score`` and ``scores``.

Shape legend: L labels.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, ClassVar

import numpy as np

from bert_tasks.data.columns import Column, Row
from bert_tasks.errors import DataError
from bert_tasks.metrics.calibration import COVERAGES, Calibration, calibration, coverage_curve
from bert_tasks.metrics.formulas import accuracy_measure, class_measure, multilabel_measure, regression_measure
from bert_tasks.tasks.base import labelled
from bert_tasks.tasks.shared.calibration import ECE, CalibratedTask
from bert_tasks.tasks.shared.report import (
    MOST_EXAMPLES,
    Axis,
    Chart,
    Confusion,
    Example,
    Examples,
    Line,
    Remark,
    Report,
    ReportSections,
    RowResult,
    cut,
)

MOST_SCATTERED = 1500  # points of a scatter plot
_SEED = 0  # seed of the choice of points
_NO_SPREAD = 0.01  # share of the labels' range within which predicted numbers count as equal
_NEAR = 0.1  # standard deviations within which numbers of two models are the same
_ALIKE = 1e-6  # relative difference that may come from the batch

Pairs = Sequence[tuple[Row, Any]]


class RowReport(Report):
    """The report of a class, several labels, a number or a choice for a row."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset({ECE})

    @property
    def column(self) -> str:
        """The column of the labels."""
        columns: Sequence[Column] = self.task.columns
        return next(column.name for column in columns if column.is_label)

    def truths(self, row: Row) -> Sequence[Hashable]:
        value = row.get(self.column)
        return () if value is None else (frozenset(value) if isinstance(value, list | tuple) else value,)

    def decisions(self, prediction: Any) -> Sequence[Hashable]:
        match self.task.output_kind:
            case "sigmoid":
                return (() if prediction.labels is None else tuple(prediction.labels),)
            case "value":
                return (prediction.score,)
            case _:
                return (prediction.label,)

    def describe(self, decision: Any) -> str:
        if self.task.output_kind != "sigmoid":
            return super().describe(decision)
        return f"{', '.join(map(repr, decision))} for every row" if decision else "no label for any row"

    def collapse(self, predictions: Sequence[Any], rows: Sequence[Row]) -> str | None:
        """Treats numbers as equal within 1/100 of the range of the labels."""
        if self.task.output_kind != "value":
            return super().collapse(predictions, rows)
        pairs = labelled(rows, predictions, self.column)
        numbers, labels = [prediction.score for _, prediction in pairs], [float(row[self.column]) for row, _ in pairs]
        if not pairs or max(numbers) - min(numbers) >= _NO_SPREAD * (max(labels) - min(labels)):
            return None
        return f"predicts a number close to {sum(numbers) / len(numbers):.4g} for every row"

    def same(self, predictions: Sequence[Any], others: Sequence[Any]) -> list[bool]:
        """Treats numbers as the same within 0.1 standard deviations.

        Raises:
            DataError: All predicted numbers are alike.
        """
        if self.task.output_kind != "value":
            return super().same(predictions, others)
        numbers = [prediction.score for prediction in predictions]
        spread = pstdev(numbers) if numbers else 0.0
        if numbers and spread <= _ALIKE * max(1.0, abs(fmean(numbers))):
            raise DataError(f"the model predicts the same number for all {len(numbers)} rows, {numbers[0]:.6g}")
        return [abs(number - other.score) <= _NEAR * spread for number, other in zip(numbers, others, strict=True)]

    # Sections.

    def sections(self, predictions: Sequence[Any], rows: Sequence[Row]) -> ReportSections:
        pairs = labelled(rows, predictions, self.column)
        match self.task.output_kind:
            case "value":
                return self._number_sections(pairs)
            case "sigmoid":
                return self._label_sections(pairs)
            case _:
                return self._class_sections(pairs)

    def result(self, row: Row, prediction: Any) -> RowResult:
        """Returns the label and the prediction of a row as a report shows them."""
        label = row[self.column]
        return RowResult(
            row=row,
            label=label,
            prediction=prediction.label,
            score=prediction.score,
            is_correct=label == prediction.label,
        )

    def candidates(self, row: Row, prediction: Any) -> tuple[tuple[str, float], ...]:
        """Returns the best predictions for a row with their probabilities."""
        return ()

    def _class_sections(self, pairs: Pairs) -> ReportSections:
        """Reports one class or choice for each row."""
        results, names = [self.result(row, prediction) for row, prediction in pairs], self.task.labels
        correct = [result.is_correct for result in results]
        labels, predicted = [result.label for result in results], [str(result.prediction) for result in results]
        has_classes = self.task.output_kind != "choice"
        return ReportSections(
            measure=class_measure(labels, predicted, names) if has_classes else accuracy_measure(correct),
            unit="rows",
            headline=("accuracy", "macro_f1") if has_classes else ("accuracy",),
            results=tuple(results),
            label_word="class" if has_classes else "",
            labels=names,
            confusion=Confusion.of(labels, predicted, names, "rows") if has_classes else None,
            calibration=calibration([result.score for result in results], correct),
            uncalibrated=self._uncalibrated(pairs, correct),
            charts=_coverage([result.score for result in results], correct) if self._is_calibrated else (),
            examples=self._mistakes(results, pairs),
        )

    @property
    def _is_calibrated(self) -> bool:
        return isinstance(self.task, CalibratedTask) and self.task.calibration == "temperature"

    def _uncalibrated(self, pairs: Pairs, correct: Sequence[bool]) -> Calibration | None:
        """Returns the calibration of the probabilities without the temperature."""
        if not self._is_calibrated or self.task.temperature == 1:  # each model of a fold has its own temperature
            return None
        scores = [prediction.scores for _, prediction in pairs]
        logs = [np.log(np.clip([*(s.values() if isinstance(s, Mapping) else s)], 1e-30, 1.0)) for s in scores]
        powers = (np.exp((each - each.max()) * self.task.temperature) for each in logs)
        return calibration([float(1 / each.sum()) for each in powers], correct)

    def _label_sections(self, pairs: Pairs) -> ReportSections:
        """Reports several labels for each row. All of them must be right."""
        names, results = self.task.labels, []
        labels = [tuple(row[self.column]) for row, _ in pairs]
        predicted = [() if prediction.labels is None else tuple(prediction.labels) for _, prediction in pairs]
        for (row, prediction), label, decided in zip(pairs, labels, predicted, strict=True):
            wrong, scores = set(label) ^ set(decided), prediction.scores
            confidences = (scores[name] if name in decided else 1 - scores[name] for name in wrong)
            results.append(
                RowResult(
                    row=row,
                    label=list(label),
                    prediction=list(decided),
                    score=max(confidences, default=0.0),  # score of the most confident mistake among the labels
                    is_correct=not wrong,
                )
            )
        return ReportSections(
            measure=multilabel_measure(labels, predicted, names),
            unit="rows",
            headline=("f1", "micro_f1"),
            results=tuple(results),
            label_word="label",
            labels=names,
            calibration=calibration(
                [prediction.scores[name] for _, prediction in pairs for name in names],
                [name in label for label in labels for name in names],
            ),
            confidence_in="label",
            examples=self._mistakes(results, pairs),
        )

    def _number_sections(self, pairs: Pairs) -> ReportSections:
        """Reports a number for each row."""
        labels, numbers = [float(row[self.column]) for row, _ in pairs], [prediction.score for _, prediction in pairs]
        results = [
            RowResult(row=row, label=label, prediction=number, score=abs(number - label), is_correct=number == label)
            for (row, _), label, number in zip(pairs, labels, numbers, strict=True)
        ]
        farthest = sorted(results, key=lambda result: -result.score)[:MOST_EXAMPLES]
        measure = regression_measure(labels, numbers)
        return ReportSections(
            measure=measure,
            unit="rows",
            headline=measure.names,
            results=tuple(results),
            charts=_scatter(labels, numbers),
            examples=Examples(
                word="Mistakes",
                title="Largest errors",
                lead="The rows whose prediction is farthest from their label.",
                items=tuple(
                    self._example(result, f"{result.label:.3g}", f"{result.prediction:.3g}") for result in farthest
                ),
            ),
        )

    def _mistakes(self, results: Sequence[RowResult], pairs: Pairs) -> Examples:
        """Returns the wrong predictions with the highest confidence."""
        wrong = [(result, pair) for result, pair in zip(results, pairs, strict=True) if not result.is_correct]
        wrong.sort(key=lambda mistake: -mistake[0].score)
        items = [
            replace(
                self._example(
                    result,
                    cut(_text(result.label), 200),
                    cut(_text(result.prediction), 200),
                    Remark(name="confidence", value=result.score),
                ),
                candidates=self.candidates(*pair),
            )
            for result, pair in wrong[:MOST_EXAMPLES]
        ]
        lead = (
            f"Wrong predictions: {len(wrong):,} of {len(results):,}, the most confident first. Wrong labels in the "
            "data show up here, too."
        )
        return Examples(word="Mistakes", title="Most confident mistakes", lead=lead, items=tuple(items))

    def _example(self, result: RowResult, label: str, prediction: str, *remarks: Remark) -> Example:
        kinds = {column.name: column.type for column in self.task.columns}
        names = [name for name, column_type in kinds.items() if column_type.is_text and not column_type.is_pretokenized]
        return Example(
            line=result.row.get("line"),
            texts=tuple(cut(result.row[name]) for name in names if result.row.get(name)),
            remarks=(
                Remark(name="label", value=label),
                Remark(name="prediction", value=prediction, tone="bad"),
                *remarks,
            ),
            row=result.row,
        )


def _text(label: Any) -> str:
    if isinstance(label, str):
        return label
    return ", ".join(label) if label else "(none)"


def _coverage(scores: Sequence[float], correct: Sequence[bool]) -> tuple[Chart, ...]:
    """Returns the accuracy of the most confident predictions over their share of rows."""
    if not scores:
        return ()
    accuracies = [accuracy for _, accuracy in coverage_curve(scores, correct)]
    points = tuple(zip(COVERAGES, accuracies, strict=True))
    (share, accuracy) = points[len(points) // 2 - 1]
    chart = Chart(
        title="Accuracy by coverage",
        description="Accuracy of the most confident rows: " + ", ".join(f"{x:.0%} {y:.3f}" for x, y in points),
        x=Axis(name="share of the rows, the most confident first", low=0.0, high=1.0),
        y=Axis.around("accuracy", accuracies),
        lines=(Line(name="accuracy", points=points),),
        note=f"The most confident {share:.0%} of the rows have an accuracy of {accuracy:.3f}.",
    )
    return (chart,)


def _scatter(labels: Sequence[float], numbers: Sequence[float]) -> tuple[Chart, Chart]:
    """Returns predictions over labels and errors over predictions of some rows."""
    pairs = list(zip(labels, numbers, strict=True))
    if len(pairs) > MOST_SCATTERED:
        numbers_shown = np.random.default_rng(_SEED).choice(len(pairs), MOST_SCATTERED, replace=False)
        pairs = [pairs[index] for index in sorted(numbers_shown.tolist())]
    axis = Axis.around("label", (number for pair in pairs for number in pair))
    diagonal = Line(name="prediction equals label", points=((axis.low,) * 2, (axis.high,) * 2), style=7, marked=False)
    scatter = Chart(
        title="Predictions and labels",
        description=f"Predictions over labels of {len(pairs)} rows.",
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
        description=f"Prediction minus label of {len(errors)} rows, at most {widest:.3g} apart.",
        x=across,
        y=Axis.around("prediction minus label", (-widest, widest)),
        lines=(Line(name="no error", points=((across.low, 0.0), (across.high, 0.0)), style=7, marked=False),),
        points=tuple((prediction, error, 3.0) for prediction, error in errors),
    )
    return scatter, residuals

"""A number for a row, by the mean squared error.

Shape legend: B sequences (windows), S samples (rows), R samples with labels.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import regression_metrics
from bert_tasks.metrics.formulas import regression_measure
from bert_tasks.outputs.base import LossTerm, Output, labelled, no_loss
from bert_tasks.outputs.calibration import ECE
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.hf_config import label_config
from bert_tasks.outputs.linear_probe import LinearLayer, Numbers, fit_number
from bert_tasks.outputs.logits import sample_logits
from bert_tasks.outputs.prediction import NOT_WRITTEN, Prediction
from bert_tasks.outputs.row_sections import row_example
from bert_tasks.outputs.samples import labelled_samples, mean_logits_to_explain, row_logits, with_mean_logits
from bert_tasks.outputs.sections import (
    MOST_EXAMPLES,
    Axis,
    Chart,
    Example,
    Examples,
    Line,
    Remark,
    ReportSections,
    RowResult,
)
from bert_tasks.outputs.settings import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SCATTERED = 1500  # points of a scatter plot
_RADIUS = 3.0  # of a point
_SEED = 0  # seed of the choice of points
_NO_SPREAD = 0.01  # share of the labels' range within which predicted numbers count as equal
_NEAR = 0.1  # standard deviations within which numbers of two models are the same
_ALIKE = 1e-6  # relative difference that may come from the batch


@dataclass(frozen=True, kw_only=True)
class NumberPrediction(Prediction):
    """The predicted number for one text or pair of texts.

    Attributes:
        score: The number.
        label, scores: None and empty, because a number has no labels. They are not written.
        logits: The number as the only logit. Only on request.
        explanation: Explanation of the number. Only on request.
    """

    score: float
    label: None = field(default=None, metadata=NOT_WRITTEN)
    scores: Mapping[str, float] = field(default_factory=dict, metadata=NOT_WRITTEN)
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class Number(Output[NumberPrediction]):
    """A number for each row, which is the logit. It learns by the squared error.

    It suits ratings, similarities and other quantities. A model of pairs of texts has ``Ranking`` instead, which can
    also rank the rows of a query. transformers' name of it is ``problem_type = "regression"``, and a saved folder
    gives the same numbers there.

    Attributes:
        labels: None. Do not set them.
        problem_type: What is predicted, as in transformers' config: a single label, several labels, or with
            ``regression`` a number, so that there are no labels.

    Examples:
        >>> Number().column.kind
        'number'
    """

    name: ClassVar[str] = "number"
    prediction: ClassVar[type[Prediction]] = NumberPrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "sequence"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    column: ClassVar[Column] = Column(name="label", kind="number", required=False)
    size: ClassVar[int] = 1
    lower_is_better: ClassVar[frozenset[str]] = frozenset({ECE})  # run.json lists it for every problem_type
    no_teacher_reason: ClassVar[str | None] = None
    no_explanations_reason: ClassVar[str | None] = None
    problem_type: Literal["regression"] = "regression"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, "labels do not apply to problem_type = 'regression'")

    def hf_config(self) -> dict[str, Any]:
        return {**label_config(("LABEL_0",)), "problem_type": self.problem_type}

    # Training

    def encode(self, row: Row) -> list[float] | None:
        value = row.get(self.column.name)
        return None if value is None else [float(value)]

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the summed loss of the labelled rows, which are counted."""
        samples = labelled_samples(logits, batch)
        if samples is None:
            return (no_loss(self.name, logits),)
        numbers, labels = samples  # [R, 1] each
        count = numbers.new_full((), len(numbers))
        total = self.summed_loss(numbers.squeeze(-1), labels.squeeze(-1).to(numbers.dtype), None)
        return (LossTerm(name=self.name, total=total, count=count),)

    def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the summed loss of labelled rows, which is divided by their number.

        Override it for your own loss.

        Args:
            logits: ``[R]`` predicted numbers.
            labels: ``[R]`` numbers.
            weights: None. A number has no class weights.
        """
        return F.mse_loss(logits, labels, reduction="sum")

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the squared distance of the two numbers of each row."""
        of_student = sample_logits(student, batch.windows)  # [S, 1]
        of_teacher = sample_logits(teacher, batch.windows)  # [S, 1]
        return F.mse_loss(of_student, of_teacher, reduction="sum"), float(len(of_student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(len(windows_by_row(features)))

    def fit_linear(self, vectors: Numbers, labels: Numbers, *, seed: int) -> LinearLayer:
        return fit_number(vectors, labels[:, 0])

    # Predictions

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[NumberPrediction]:
        if not rows:
            return []
        numbers = row_logits(compact, features)[:, 0]  # [S]
        return [NumberPrediction(score=number) for number in numbers.tolist()]

    def with_logits(
        self, predictions: Sequence[NumberPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[NumberPrediction]:
        return with_mean_logits(predictions, compact, features)

    def explained_logits(
        self,
        predictions: Sequence[NumberPrediction],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Returns the number of each row, a mean over its windows."""
        return mean_logits_to_explain([None] * len(rows), [0] * len(rows), features, rows, texts)

    # Metrics and report

    @property
    def primary_metric(self) -> str:
        return "pearson"

    @property
    def curves(self) -> tuple[str, ...]:
        return ("pearson", "spearmanr")

    def metrics(self, predictions: Sequence[NumberPrediction], rows: Sequence[Row]) -> dict[str, float]:
        labels, numbers = self._labels_and_numbers(labelled(rows, predictions, self.column.name))
        return regression_metrics(labels, numbers)

    def _labels_and_numbers(self, pairs: Sequence[tuple[Row, NumberPrediction]]) -> tuple[list[float], list[float]]:
        """Returns the label and the predicted number of each labelled row."""
        labels: list[float] = []
        numbers: list[float] = []
        for row, prediction in pairs:
            labels.append(float(row[self.column.name]))
            numbers.append(prediction.score)
        return labels, numbers

    def metric_inputs(
        self, predictions: Sequence[NumberPrediction], rows: Sequence[Row]
    ) -> tuple[list[float], list[float]]:
        """Returns the numbers.

        It is the form of evaluate's mse and pearsonr (https://huggingface.co/spaces/evaluate-metric/mse).
        """
        labels, numbers = self._labels_and_numbers(labelled(rows, predictions, self.column.name))
        return numbers, labels

    def truths(self, row: Row) -> Sequence[Hashable]:
        value = row.get(self.column.name)
        return () if value is None else (value,)

    def decisions(self, prediction: NumberPrediction) -> Sequence[Hashable]:
        return (prediction.score,)

    def degeneracy(self, predictions: Sequence[NumberPrediction], rows: Sequence[Row]) -> str | None:
        """Treats numbers as equal within 1/100 of the range of the labels."""
        labels, numbers = self._labels_and_numbers(labelled(rows, predictions, self.column.name))
        if not labels:
            return None
        if max(numbers) - min(numbers) >= _NO_SPREAD * (max(labels) - min(labels)):
            return None
        return f"predicts a number close to {sum(numbers) / len(numbers):.4g} for every row"

    def agreements(self, predictions: Sequence[NumberPrediction], others: Sequence[NumberPrediction]) -> list[bool]:
        """Treats numbers as the same within 0.1 standard deviations.

        Raises:
            DataError: All predicted numbers are alike.
        """
        numbers = [prediction.score for prediction in predictions]
        spread = 0.0
        if numbers:
            spread = pstdev(numbers)
            if spread <= _ALIKE * max(1.0, abs(fmean(numbers))):
                raise DataError(f"the model predicts the same number for all {len(numbers)} rows, {numbers[0]:.6g}")
        pairs = zip(numbers, others, strict=True)
        return [abs(number - other.score) <= _NEAR * spread for number, other in pairs]

    def report(
        self, predictions: Sequence[NumberPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        """Reports the errors of the numbers, with charts and the largest errors."""
        pairs = labelled(rows, predictions, self.column.name)
        labels, numbers = self._labels_and_numbers(pairs)
        results = []
        for (row, _), label, number in zip(pairs, labels, numbers, strict=True):
            is_correct = number == label
            error = abs(number - label)
            results.append(RowResult(row=row, label=label, prediction=number, score=error, is_correct=is_correct))
        measure = regression_measure(labels, numbers)
        return ReportSections(
            measure=measure,
            unit="rows",
            headline=measure.names,
            results=tuple(results),
            summary=self.summary(labels, numbers),
            charts=_scatter_charts(labels, numbers),
            examples=_largest_errors(results, texts),
        )

    def summary(self, labels: Sequence[float], numbers: Sequence[float]) -> str:
        """Returns the mean error in words, and that of a model which always predicts the same number.

        Of all such models, one that predicts the median has the smallest mean absolute error.
        """
        if not labels:
            return ""
        middle = median(labels)
        error = fmean(abs(number - label) for number, label in zip(numbers, labels, strict=True))
        error_without_model = fmean(abs(middle - label) for label in labels)
        return (
            f"the predictions differ from the labels by {error:.3g} on average; always predicting {middle:.3g}, the "
            f"median label, would differ by {error_without_model:.3g}"
        )


def _largest_errors(results: Sequence[RowResult], texts: Sequence[str]) -> Examples:
    """Returns the rows with the largest errors, which are the scores of the results."""
    farthest = sorted(results, key=lambda result: -result.score)[:MOST_EXAMPLES]
    items: list[Example] = []
    for result in farthest:
        verdict = Remark(name=f"off by {result.score:.3g}", tone="bad")
        items.append(row_example(result, texts, verdict, f"{result.label:.3g}", f"{result.prediction:.3g}"))
    return Examples(
        word="Mistakes",
        title="Largest errors",
        lead="The rows whose prediction is farthest from their label.",
        items=tuple(items),
    )


def _scatter_charts(labels: Sequence[float], numbers: Sequence[float]) -> tuple[Chart, Chart]:
    """Returns predictions over labels and errors over predictions of some rows."""
    pairs = list(zip(labels, numbers, strict=True))
    if len(pairs) > MOST_SCATTERED:
        chosen = np.random.default_rng(_SEED).choice(len(pairs), MOST_SCATTERED, replace=False)
        pairs = [pairs[index] for index in sorted(chosen.tolist())]
    return _scatter(pairs), _residuals(pairs)


def _scatter(pairs: Sequence[tuple[float, float]]) -> Chart:
    """Returns predictions over labels, with the diagonal on which they are equal."""
    values: list[float] = []
    points: list[tuple[float, float, float]] = []
    for label, prediction in pairs:
        values += [label, prediction]
        points.append((label, prediction, _RADIUS))
    axis = Axis.around("label", values)  # one scale for both, so that the diagonal is straight
    ends = ((axis.low, axis.low), (axis.high, axis.high))
    return Chart(
        title="Predictions and labels",
        description=f"Predictions over labels of {len(pairs)} rows.",
        x=axis,
        y=replace(axis, name="prediction"),
        lines=(Line(name="prediction equals label", points=ends, style=7, marked=False),),
        points=tuple(points),
    )


def _residuals(pairs: Sequence[tuple[float, float]]) -> Chart:
    """Returns errors over predictions, with the line of no error."""
    predicted: list[float] = []
    points: list[tuple[float, float, float]] = []
    for label, prediction in pairs:
        predicted.append(prediction)
        points.append((prediction, prediction - label, _RADIUS))
    widest = max(abs(error) for _, error, _ in points)
    across = Axis.around("prediction", predicted)
    ends = ((across.low, 0.0), (across.high, 0.0))
    return Chart(
        title="Residuals",
        description=f"Prediction minus label of {len(points)} rows, at most {widest:.3g} apart.",
        x=across,
        y=Axis.around("prediction minus label", (-widest, widest)),
        lines=(Line(name="no error", points=ends, style=7, marked=False),),
        points=tuple(points),
    )

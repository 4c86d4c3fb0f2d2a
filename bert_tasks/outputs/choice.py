"""The choice of one of a row's windows, by a softmax over their logits.

Shape legend: B sequences (windows, each one choice), S samples (rows), C choices of the row that has most.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder import packing
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import accuracy_measure
from bert_tasks.outputs.base import LossTerm, Output, labelled, no_loss
from bert_tasks.outputs.calibration import (
    ECE,
    CalibrationMethod,
    calibration_metrics,
    check_temperature,
    fitted_temperature,
    uncalibrated,
)
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.logits import NO_LOGIT, choice_logits, softmax_divergence
from bert_tasks.outputs.losses import check_focal_gamma, cross_entropy
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.row_sections import coverage_charts, mistakes, right_predictions
from bert_tasks.outputs.samples import joined_logits, with_joined_logits
from bert_tasks.outputs.sections import Chart, ReportSections, RowResult, cut, per_cent
from bert_tasks.outputs.settings import fitted, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ChoicePrediction(Prediction):
    """The prediction for one row of choices.

    Attributes:
        label: Index of the most probable choice, from 0. None if its score is too low for the caller.
        answer: Text of the choice.
        score: Probability of the choice among the row's choices.
        scores, logits: Probability and logit of every choice, in their order. Logits only on request.
        explanation: Explanation of the most probable choice. Only on request.
    """

    label: int | None
    answer: str | None
    score: float
    scores: tuple[float, ...]
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class Choice(Output[ChoicePrediction]):
    """One of a row's choices, each of which is a window with one logit. Rows have a list of ``choices``.

    The model reads every choice with the context and gives it one logit, and a softmax compares the choices of the
    row, so rows may have different numbers of choices. A row costs as much as its number of choices in single texts.

    Attributes:
        labels: None. Do not set them.
        calibration: ``temperature`` divides the logits by one number that gives the validation rows the lowest cross
            entropy. ``none`` uses them as they are.
        temperature: The number, fitted on the validation rows.
        focal_gamma: Exponent of the focal loss (arXiv:1708.02002), which multiplies the cross entropy of an example by
            (1 - p)^focal_gamma, where p is the probability of the right label. 0 is the cross entropy, the paper uses
            2.
        label_base: The number that labels give to the first choice, 0 or 1.

    Examples:
        >>> Choice(label_base=1).column.kind
        'choice from 1'
    """

    name: ClassVar[str] = "choice"
    prediction: ClassVar[type[Prediction]] = ChoicePrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "choice"
    pipeline_tag: ClassVar[str | None] = "multiple-choice"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({ECE})
    size: ClassVar[int] = 1
    no_teacher_reason: ClassVar[str | None] = None
    no_explanations_reason: ClassVar[str | None] = None
    can_abstain: ClassVar[bool] = True
    primary_metric: ClassVar[str] = "accuracy"
    calibration: CalibrationMethod = "none"
    temperature: float = fitted(1.0)
    focal_gamma: float = 0.0
    label_base: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, "labels do not apply to multiple choice, where every row has choices of its own")
        check_temperature(self.temperature)
        check_focal_gamma(self.focal_gamma)

    @property
    def column(self) -> Column:
        kind = "choice" if self.label_base == 0 else "choice from 1"
        return Column(name="label", kind=kind, required=False)

    # Training

    def encode(self, row: Row) -> list[float] | None:
        """Returns the number of the right choice, from 0, or None if the row has no label."""
        label = row.get("label")
        if label is None:
            return None
        return [float(label)]

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the cross entropy over the choices of the labelled rows, which are counted."""
        numbers = batch.labelled_rows
        if not numbers:
            return (no_loss(self.name, logits),)
        # A choice that a row lacks has the probability 0, because its logit is -inf.
        samples = choice_logits(logits, batch.windows, absent=-torch.inf)  # [S, C]
        if len(numbers) < len(samples):
            samples = samples.index_select(0, packing.device_tensor(numbers, samples.device, torch.long))
        total = cross_entropy(samples, batch.labels.long(), gamma=self.focal_gamma)
        return (LossTerm(name=self.name, total=total, count=logits.new_full((), len(numbers))),)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the divergence of the choices of each row."""
        of_student = choice_logits(student, batch.windows, absent=NO_LOGIT)  # [S, C]
        of_teacher = choice_logits(teacher, batch.windows, absent=NO_LOGIT)  # [S, C]
        return softmax_divergence(of_student, of_teacher, temperature), float(len(of_student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(len(windows_by_row(features)))

    # Values fitted to data

    @property
    def calibrates(self) -> bool:
        return self.calibration == "temperature"

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Self:
        pairs = []
        for logits, row in zip(joined_logits(compact, features), rows, strict=True):
            if row.get("label") is not None:
                pairs.append((logits, row["label"]))
        temperature = fitted_temperature(pairs)
        if temperature is None:
            return self
        return replace(self, temperature=temperature)

    # Predictions

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[ChoicePrediction]:
        predictions = []
        for logits, row in zip(joined_logits(compact, features), rows, strict=True):
            if self.calibrates:
                logits = logits / self.temperature
            scores = logits.softmax(dim=0).tolist()
            best = max(range(len(scores)), key=scores.__getitem__)  # the first of equals
            prediction = ChoicePrediction(
                label=best, answer=row["choices"][best], score=scores[best], scores=tuple(scores)
            )
            predictions.append(prediction)
        return predictions

    def with_logits(
        self, predictions: Sequence[ChoicePrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[ChoicePrediction]:
        """Returns the predictions with the logits of each choice."""
        return with_joined_logits(predictions, compact, features)

    def explained_logits(
        self,
        predictions: Sequence[ChoicePrediction],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Returns the logit of the most probable choice, whose words are in its column."""
        explained = []
        for prediction, windows, row in zip(predictions, windows_by_row(features), rows, strict=True):
            best = prediction.scores.index(prediction.score)
            read = {name: row[name] for name in texts if row.get(name) is not None}
            read["choices"] = prediction.answer
            term = (windows[best], 0, 1.0)
            explained.append(ExplainedLogit(label=prediction.answer, texts=read, terms=(term,)))
        return explained

    # Metrics and report

    def metrics(self, predictions: Sequence[ChoicePrediction], rows: Sequence[Row]) -> dict[str, float]:
        pairs = labelled(rows, predictions, "label")
        if not pairs:
            return {}
        correct: list[bool] = []
        scores: list[float] = []
        for row, prediction in pairs:
            correct.append(prediction.label == row["label"])
            scores.append(prediction.score)
        metrics = {"accuracy": sum(correct) / len(correct)}
        if self.calibrates:
            metrics.update(calibration_metrics(scores, correct))
        return metrics

    def metric_inputs(
        self, predictions: Sequence[ChoicePrediction], rows: Sequence[Row]
    ) -> tuple[list[int | None], list[int]]:
        """Returns the numbers of the choices, from 0.

        It is the form of evaluate's accuracy (https://huggingface.co/spaces/evaluate-metric/accuracy).
        """
        pairs = labelled(rows, predictions, "label")
        return [prediction.label for _, prediction in pairs], [row["label"] for row, _ in pairs]

    def report(
        self, predictions: Sequence[ChoicePrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        results: list[RowResult] = []
        candidates: list[tuple[tuple[str, float], ...]] = []
        scores: list[float] = []
        correct: list[bool] = []
        scores_of_choices: list[tuple[float, ...]] = []
        for row, prediction in labelled(rows, predictions, "label"):
            result = _result(row, prediction)
            results.append(result)
            candidates.append(_ranked_choices(row, prediction))
            scores.append(result.score)
            correct.append(result.is_correct)
            scores_of_choices.append(prediction.scores)
        before = None
        charts: tuple[Chart, ...] = ()
        if self.calibrates:
            before = uncalibrated(scores_of_choices, correct, self.temperature)
            charts = coverage_charts(scores, correct)
        return ReportSections(
            measure=accuracy_measure(correct),
            unit="rows",
            headline=("accuracy",),
            results=tuple(results),
            summary=right_predictions(results, _random_choice(scores_of_choices)),
            calibration=calibration(scores, correct),
            uncalibrated=before,
            charts=charts,
            examples=mistakes(results, texts, candidates),
        )

    def truths(self, row: Row) -> Sequence[Hashable]:
        label = row.get("label")
        return () if label is None else (label,)

    def decisions(self, prediction: ChoicePrediction) -> Sequence[int | None]:
        return (prediction.label,)

    def describe(self, decision: int) -> str:
        return f"choice {decision} for every row"


def _random_choice(scores_of_choices: Sequence[Sequence[float]]) -> str:
    """Returns the accuracy of a random choice, for ``right_predictions``."""
    chances = [1 / len(scores) for scores in scores_of_choices]
    if not chances:
        return ""
    return f"choosing at random would give {per_cent(sum(chances), len(chances))}"


def _result(row: Row, prediction: ChoicePrediction) -> RowResult:
    """Returns the texts of the right and of the predicted choice."""
    return RowResult(
        row=row,
        label=row["choices"][row["label"]],
        prediction=prediction.answer,
        score=prediction.score,
        is_correct=row["label"] == prediction.label,
    )


def _ranked_choices(row: Row, prediction: ChoicePrediction) -> tuple[tuple[str, float], ...]:
    """Returns the choices of a row with their probabilities, the most probable first."""
    choices = [cut(choice, 200) for choice in row["choices"]]
    pairs = zip(choices, prediction.scores, strict=True)
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))

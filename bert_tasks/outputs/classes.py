"""One of several classes for a row, by a softmax over the logits.

Shape legend: B sequences (windows), S samples (rows), R samples with labels, L labels.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.classification import MISSED, classification_metrics
from bert_tasks.metrics.formulas import class_measure
from bert_tasks.metrics.tables import MetricTable, metric_table, on_one_line
from bert_tasks.outputs.base import LossTerm, labelled, no_loss
from bert_tasks.outputs.calibration import (
    ECE,
    CalibrationMethod,
    calibration_metrics,
    check_temperature,
    fitted_temperature,
    score_list,
    uncalibrated,
)
from bert_tasks.outputs.class_weights import (
    REMEDY,
    balanced_weights,
    check_class_weights,
    label_weights,
    weights_like,
)
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.linear_probe import LinearLayer, Numbers, fit_classes
from bert_tasks.outputs.logits import sample_logits, softmax_divergence
from bert_tasks.outputs.losses import check_focal_gamma, cross_entropy
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.row_sections import coverage_charts, mistakes, most_frequent_label, right_predictions
from bert_tasks.outputs.samples import (
    check_known,
    label_logits_to_explain,
    labelled_samples,
    most_probable,
    row_logits,
    with_mean_logits,
)
from bert_tasks.outputs.sections import Chart, Confusion, ReportSections, RowResult
from bert_tasks.outputs.settings import fitted, per_label, require
from bert_tasks.outputs.thresholds import ThresholdOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ClassPrediction(Prediction):
    """The predicted class of a text or of a pair of texts, with the field names of transformers' pipeline.

    Attributes:
        label: The most probable label. None if its score is below the threshold of the label or that of the caller.
        score: Probability of ``label`` (softmax).
        scores: Label -> probability.
        logits: Logit of every label, in label order. Only on request.
        explanation: Explanation of ``label``. Only on request.
    """

    label: str | None
    score: float
    scores: Mapping[str, float]
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class Classes(ThresholdOutput[ClassPrediction]):
    """One of several classes that exclude each other, by a softmax over the logits. It learns by the cross entropy.

    It is the default output for texts and pairs of texts. If a text may have several labels, or none, use ``LabelSet``,
    and for a number ``Number``. For rare classes there are class weights and the focal loss, and for confidences that
    shall be probabilities there is a temperature. A saved folder gives the same scores in transformers.

    Attributes:
        problem_type: What is predicted, as in transformers' config: a single label, several labels, or with
            ``regression`` a number, so that there are no labels.
        class_weights: One weight per label, or ``balanced`` (n / (labels x n of the label), from the n labelled rows of
            the training data). For several labels they weigh the positive examples, and ``balanced`` is negatives /
            positives.
        balanced_weights: The weights of ``balanced`` on the training rows, one per label.
        focal_gamma: Exponent of the focal loss (arXiv:1708.02002), which multiplies the cross entropy of an example by
            (1 - p)^focal_gamma, where p is the probability of the right label. 0 is the cross entropy, the paper uses
            2.
        label_smoothing: Share of the label distribution that is spread evenly over all labels, for a single label only.
        calibration: ``temperature`` divides the logits by one number that gives the validation rows the lowest cross
            entropy. ``none`` uses them as they are.
        temperature: The number, fitted on the validation rows.

    Examples:
        >>> Classes(labels=("complaint", "praise")).hf_config()["label2id"]
        {'complaint': 0, 'praise': 1}
    """

    name: ClassVar[str] = "classes"
    prediction: ClassVar[type[Prediction]] = ClassPrediction
    head_kind: ClassVar[HeadKind | None] = "sequence"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    column: ClassVar[Column] = Column(name="label", kind="label", required=False)
    lower_is_better: ClassVar[frozenset[str]] = frozenset({ECE})
    no_teacher_reason: ClassVar[str | None] = None
    no_explanations_reason: ClassVar[str | None] = None
    can_abstain: ClassVar[bool] = True
    problem_type: Literal["single_label_classification"] = "single_label_classification"
    class_weights: Literal["balanced"] | tuple[float, ...] | None = per_label(None)
    balanced_weights: tuple[float, ...] = fitted((), per_label=True)
    focal_gamma: float = 0.0
    label_smoothing: float = 0.0
    calibration: CalibrationMethod = "none"
    temperature: float = fitted(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_focal_gamma(self.focal_gamma)
        check_class_weights(self.labels, self.class_weights, self.balanced_weights)
        check_temperature(self.temperature)
        require(len(self.labels) != 1, f"labels holds {len(self.labels)} name, a classifier needs at least 2")
        require(
            0.0 <= self.label_smoothing < 1.0,
            f"label_smoothing is {self.label_smoothing}, expected a share from 0 to below 1",
        )
        require(
            self.label_smoothing == 0 or self.focal_gamma == 0,
            "label_smoothing has no focal loss, which is defined for one right label. Set focal_gamma = 0 or "
            "label_smoothing = 0",
        )

    def hf_config(self) -> dict[str, Any]:
        return {**super().hf_config(), "problem_type": self.problem_type}

    # Training

    def encode(self, row: Row) -> list[float] | None:
        """Returns the index of the row's label.

        Raises:
            DataError: The label is unknown.
        """
        label = row.get(self.column.name)
        if label is None:
            return None
        check_known({label}, self.labels)
        return [float(self.labels.index(label))]

    def label_weights(self) -> tuple[float, ...] | None:
        """Returns the weight of each label. None if there are no weights.

        Raises:
            UsageError: The weights are ``balanced`` and were not computed yet.
        """
        return label_weights(self.class_weights, self.balanced_weights)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the number of labelled rows, or the sum of their class weights."""
        weights = self.label_weights()
        if weights is None:
            return super().counts(features)
        of_rows = []
        for feature in features:
            labels = feature.get("labels")
            if labels:
                of_rows.append(weights[int(labels[0])])
        return {self.name: float(sum(of_rows))}

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the summed loss of the labelled rows. The count is the divisor of transformers' mean."""
        samples = labelled_samples(logits, batch)
        if samples is None:
            return (no_loss(self.name, logits),)
        labelled_logits, labels_of_rows = samples  # [R, L], [R, 1]
        labels = labels_of_rows.squeeze(-1).long()  # [R]
        weights = weights_like(self.label_weights(), labelled_logits)
        count = labelled_logits.new_full((), len(labels))
        if weights is not None:
            count = weights.index_select(0, labels).sum()
        total = self.summed_loss(labelled_logits, labels, weights)
        return (LossTerm(name=self.name, total=total, count=count),)

    def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the summed loss of labelled rows, which is divided by their number.

        Override it for your own loss.

        Args:
            logits: ``[R, L]`` logits.
            labels: ``[R]`` classes as int64.
            weights: ``[L]`` class weights. None if there are none. With weights the divisor is the sum of the rows'
                weights.
        """
        return cross_entropy(logits, labels, weights=weights, gamma=self.focal_gamma, smoothing=self.label_smoothing)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the divergence of the classes of each row."""
        of_student = sample_logits(student, batch.windows)  # [S, L]
        of_teacher = sample_logits(teacher, batch.windows)  # [S, L]
        return softmax_divergence(of_student, of_teacher, temperature), float(len(of_student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(len(windows_by_row(features)))

    def fit_linear(self, vectors: Numbers, labels: Numbers, *, seed: int) -> LinearLayer:
        return fit_classes(vectors, labels[:, 0], self.labels, self.label_weights(), seed=seed)

    # Values fitted to data

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Computes what ``balanced`` class weights come to on these rows."""
        if self.class_weights != "balanced":
            return self
        labels = [row[self.column.name] for row in rows if row.get(self.column.name) is not None]
        weights = balanced_weights(self.labels, Counter(labels), len(labels))
        return replace(self, balanced_weights=weights)

    @property
    def calibrates(self) -> bool:
        return self.calibration == "temperature"

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Self:
        pairs = []
        for logits, row in zip(row_logits(compact, features), rows, strict=True):
            label = row.get(self.column.name)
            if label is not None:
                pairs.append((logits, self.labels.index(label)))
        temperature = fitted_temperature(pairs)
        if temperature is None:
            return self
        return replace(self, temperature=temperature)

    def candidates(
        self, predictions: Sequence[ClassPrediction], rows: Sequence[Row]
    ) -> Iterator[tuple[str, float, bool]]:
        for row, prediction in labelled(rows, predictions, self.column.name):
            label, predicted = row[self.column.name], most_probable(prediction)
            yield predicted, prediction.score, predicted == label
            if predicted != label:
                yield label, MISSED, True

    @property
    def remedies(self) -> tuple[str, ...]:
        return (REMEDY,) if self.class_weights is None else ()

    # Predictions

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[ClassPrediction]:
        if not rows:
            return []
        samples = row_logits(compact, features)  # [S, L]
        if self.calibrates:
            samples = samples / self.temperature
        predictions = []
        limits = self.limits
        for probabilities in samples.softmax(dim=-1).tolist():
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            label: str | None = self.labels[best]
            if probabilities[best] < limits[best]:
                label = None
            scores = dict(zip(self.labels, probabilities, strict=True))
            predictions.append(ClassPrediction(label=label, score=probabilities[best], scores=scores))
        return predictions

    def with_logits(
        self, predictions: Sequence[ClassPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[ClassPrediction]:
        return with_mean_logits(predictions, compact, features)

    def explained_logits(
        self,
        predictions: Sequence[ClassPrediction],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Returns the logit of each row's most probable label, a mean over its windows."""
        return label_logits_to_explain(predictions, self.labels, features, rows, texts)

    # Metrics and report

    @property
    def primary_metric(self) -> str:
        return "accuracy"

    @property
    def curves(self) -> tuple[str, ...]:
        return ("accuracy", "macro_f1")

    def metrics(self, predictions: Sequence[ClassPrediction], rows: Sequence[Row]) -> dict[str, float]:
        pairs = labelled(rows, predictions, self.column.name)
        labels, predicted = self._numbers_of_classes(pairs)
        metrics = classification_metrics(labels, predicted, self.labels)
        if self.calibrates:
            scores = [prediction.score for _, prediction in pairs]
            correct = [label == guess for label, guess in zip(labels, predicted, strict=True)]
            metrics |= calibration_metrics(scores, correct)
        if self.thresholds:  # all other metrics are of the most probable class, with and without thresholds
            accepted = [row[self.column.name] == each.label for row, each in pairs if each.label is not None]
            metrics["coverage"] = len(accepted) / len(pairs)
            metrics["accepted_accuracy"] = sum(accepted) / max(len(accepted), 1)
        return metrics

    def _numbers_of_classes(self, pairs: Sequence[tuple[Row, ClassPrediction]]) -> tuple[list[int], list[int]]:
        """Returns the places in ``labels`` of each row's label and of its predicted class."""
        index = {label: number for number, label in enumerate(self.labels)}
        labels: list[int] = []
        predicted: list[int] = []
        for row, prediction in pairs:
            labels.append(index[row[self.column.name]])
            predicted.append(index[most_probable(prediction)])
        return labels, predicted

    def metric_inputs(self, predictions: Sequence[ClassPrediction], rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Returns the numbers of the classes, their places in ``labels``.

        It is the form of evaluate's accuracy, f1 and glue (https://huggingface.co/spaces/evaluate-metric/glue).
        """
        labels, predicted = self._numbers_of_classes(labelled(rows, predictions, self.column.name))
        return predicted, labels

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Skips ``f1``, which equals ``macro_f1`` unless there are two classes, of which it is that of the second."""
        repeated: dict[str, str] = {}
        titles: dict[str, str] = {}
        if len(self.labels) == 2:
            titles["f1"] = f"f1 ({on_one_line(self.labels[1])})"
        elif "macro_f1" in metrics:
            repeated["f1"] = "macro_f1"
        table = metric_table(
            metrics, self.labels, lambda name, score: f"{score}_{name}", word="class", repeated=repeated
        )
        return replace(table, titles=titles)

    def truths(self, row: Row) -> Sequence[Hashable]:
        label = row.get(self.column.name)
        return () if label is None else (label,)

    def decisions(self, prediction: ClassPrediction) -> Sequence[Hashable]:
        return (most_probable(prediction),)

    def report(
        self, predictions: Sequence[ClassPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        """Reports the classes, their confusion, the calibration and the most confident mistakes."""
        results: list[RowResult] = []
        labels: list[str] = []
        predicted: list[str] = []
        correct: list[bool] = []
        scores: list[float] = []
        scores_of_classes: list[list[float]] = []
        for row, prediction in labelled(rows, predictions, self.column.name):
            label = row[self.column.name]
            guess = most_probable(prediction)
            is_correct = label == guess
            result = RowResult(
                row=row,
                label=label,
                prediction=guess,
                score=prediction.score,
                is_correct=is_correct,
            )
            results.append(result)
            labels.append(label)
            predicted.append(guess)
            correct.append(is_correct)
            scores.append(prediction.score)
            scores_of_classes.append(score_list(prediction.scores))
        before = None
        charts: tuple[Chart, ...] = ()
        if self.calibrates:
            before = uncalibrated(scores_of_classes, correct, self.temperature)
            charts = coverage_charts(scores, correct)
        return ReportSections(
            measure=class_measure(labels, predicted, self.labels),
            unit="rows",
            headline=("accuracy", "macro_f1"),
            results=tuple(results),
            summary=right_predictions(results, most_frequent_label(labels)),
            label_word="class",
            labels=self.labels,
            confusion=Confusion.of(labels, predicted, self.labels, "rows"),
            calibration=calibration(scores, correct),
            uncalibrated=before,
            charts=charts,
            examples=mistakes(results, texts),
        )

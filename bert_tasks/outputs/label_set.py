"""Any number of labels for a row, by a sigmoid for each label.

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
from bert_tasks.metrics.classification import multilabel_metrics, tune_thresholds
from bert_tasks.metrics.formulas import multilabel_measure
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.outputs.base import LossTerm, labelled, no_loss
from bert_tasks.outputs.calibration import ECE
from bert_tasks.outputs.class_weights import (
    REMEDY,
    balanced_weights,
    check_class_weights,
    label_weights,
    weights_like,
)
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.linear_probe import LinearLayer, Numbers, fit_label_set
from bert_tasks.outputs.logits import sample_logits, sigmoid_divergence
from bert_tasks.outputs.losses import binary_cross_entropy, check_focal_gamma
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.row_sections import mistakes, most_frequent_label, right_predictions
from bert_tasks.outputs.samples import (
    check_known,
    label_logits_to_explain,
    labelled_samples,
    row_logits,
    with_mean_logits,
)
from bert_tasks.outputs.sections import ReportSections, RowResult
from bert_tasks.outputs.settings import fitted, per_label
from bert_tasks.outputs.thresholds import ThresholdOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class LabelSetPrediction(Prediction):
    """The predicted labels of a text or of a pair of texts, with the field names of transformers' pipeline.

    Attributes:
        label: The most probable label. None if its score is too low for the caller, who may ask for that in zero-shot
            classification.
        labels: The labels whose probability reaches their threshold.
        score: Probability of ``label`` (sigmoid).
        scores: Label -> probability.
        logits: Logit of every label, in label order. Only on request.
        explanation: Explanation of ``label``. Only on request.
    """

    label: str | None
    labels: tuple[str, ...]
    score: float
    scores: Mapping[str, float]
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class LabelSet(ThresholdOutput[LabelSetPrediction]):
    """Any number of labels, each of which is present or absent. It learns by the binary cross entropy.

    It suits topics or kinds of toxicity, of which a text may have several or none. The labels are decided independently
    of each other. A label counts as predicted if its probability reaches its threshold, which is tuned for the best F1
    on the validation rows, because 0.5 often misses rare labels.

    Attributes:
        problem_type: What is predicted, as in transformers' config: a single label, several labels, or with
            ``regression`` a number, so that there are no labels.
        class_weights: One weight per label for its positive examples, or ``balanced``, which is the number of rows
            without the label divided by the number of rows with it.
        balanced_weights: The weights of ``balanced`` on the training rows, one per label.
        focal_gamma: Exponent of the focal loss (arXiv:1708.02002), which multiplies the cross entropy of an example by
            (1 - p)^focal_gamma, where p is the probability of the right label. 0 is the cross entropy, the paper uses
            2.

    Examples:
        >>> LabelSet(labels=("refund", "angry")).encode({"labels": ["angry"]})
        [0.0, 1.0]
    """

    name: ClassVar[str] = "label-set"
    prediction: ClassVar[type[Prediction]] = LabelSetPrediction
    head_kind: ClassVar[HeadKind | None] = "sequence"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    column: ClassVar[Column] = Column(name="labels", kind="labels", required=False)
    lower_is_better: ClassVar[frozenset[str]] = frozenset({ECE})  # run.json lists it for every problem_type
    no_teacher_reason: ClassVar[str | None] = None
    no_explanations_reason: ClassVar[str | None] = None
    default_threshold: ClassVar[float] = 0.5
    problem_type: Literal["multi_label_classification"] = "multi_label_classification"
    class_weights: Literal["balanced"] | tuple[float, ...] | None = per_label(None)
    balanced_weights: tuple[float, ...] = fitted((), per_label=True)
    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_focal_gamma(self.focal_gamma)
        check_class_weights(self.labels, self.class_weights, self.balanced_weights)

    def hf_config(self) -> dict[str, Any]:
        return {**super().hf_config(), "problem_type": self.problem_type}

    # Training

    def encode(self, row: Row) -> list[float] | None:
        """Returns 1.0 for each label that the row has and 0.0 for the others.

        Raises:
            DataError: A label is unknown.
        """
        value = row.get(self.column.name)
        if value is None:
            return None
        row_labels = set(value)
        check_known(row_labels, self.labels)
        return [float(label in row_labels) for label in self.labels]

    def label_weights(self) -> tuple[float, ...] | None:
        """Returns the weight of each label. None if there are no weights.

        Raises:
            UsageError: The weights are ``balanced`` and were not computed yet.
        """
        return label_weights(self.class_weights, self.balanced_weights)

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the summed loss of the labelled rows. All labels of a row are counted."""
        samples = labelled_samples(logits, batch)
        if samples is None:
            return (no_loss(self.name, logits),)
        labelled_logits, labels_of_rows = samples  # [R, L] each
        weights = weights_like(self.label_weights(), labelled_logits)
        count = labelled_logits.new_full((), labelled_logits.numel())
        total = self.summed_loss(labelled_logits, labels_of_rows.to(labelled_logits.dtype), weights)
        return (LossTerm(name=self.name, total=total, count=count),)

    def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the summed loss of labelled rows, which is divided by their number times the number of labels.

        Override it for your own loss.

        Args:
            logits: ``[R, L]`` logits.
            labels: ``[R, L]`` of 0.0 and 1.0.
            weights: ``[L]`` class weights of the labels that are present. None if there are none.
        """
        return binary_cross_entropy(logits, labels, weights=weights, gamma=self.focal_gamma)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the divergence of the labels of each row."""
        of_student = sample_logits(student, batch.windows)  # [S, L]
        of_teacher = sample_logits(teacher, batch.windows)  # [S, L]
        return sigmoid_divergence(of_student, of_teacher, temperature), float(of_student.numel())

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(len(windows_by_row(features)) * self.size)

    def fit_linear(self, vectors: Numbers, labels: Numbers, *, seed: int) -> LinearLayer:
        return fit_label_set(vectors, labels, self.labels, self.label_weights(), seed=seed)

    # Values fitted to data

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Computes what ``balanced`` class weights come to on these rows."""
        if self.class_weights != "balanced":
            return self
        counts = Counter[str]()
        total = 0
        for row in rows:
            labels = row.get(self.column.name)
            if labels is not None:
                counts.update(labels)
                total += 1
        weights = balanced_weights(self.labels, counts, total, is_set=True)
        return replace(self, balanced_weights=weights)

    def tune(self, predictions: Sequence[LabelSetPrediction], rows: Sequence[Row]) -> Self:
        """Sets the threshold of each label with the best F1 on these rows."""
        pairs = labelled(rows, predictions, self.column.name)
        if not pairs:
            return self
        labels: list[list[bool]] = []
        probabilities: list[list[float]] = []
        for row, prediction in pairs:
            labels.append(self._flags(row[self.column.name]))
            probabilities.append([prediction.scores[label] for label in self.labels])
        return replace(self, thresholds=tune_thresholds(labels, probabilities))

    def candidates(
        self, predictions: Sequence[LabelSetPrediction], rows: Sequence[Row]
    ) -> Iterator[tuple[str, float, bool]]:
        for row, prediction in labelled(rows, predictions, self.column.name):
            for label, score in prediction.scores.items():
                yield label, score, label in row[self.column.name]

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
    ) -> list[LabelSetPrediction]:
        if not rows:
            return []
        samples = row_logits(compact, features)  # [S, L]
        return [self._decoded(probabilities) for probabilities in samples.sigmoid().tolist()]

    def _decoded(self, probabilities: Sequence[float]) -> LabelSetPrediction:
        """Returns the prediction of a row from the probabilities of its labels, ``[L]``."""
        present: list[str] = []
        scores: dict[str, float] = {}
        for label, score, limit in zip(self.labels, probabilities, self.limits, strict=True):
            scores[label] = score
            if score >= limit:
                present.append(label)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return LabelSetPrediction(
            label=self.labels[best], labels=tuple(present), score=probabilities[best], scores=scores
        )

    def with_logits(
        self, predictions: Sequence[LabelSetPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[LabelSetPrediction]:
        return with_mean_logits(predictions, compact, features)

    def explained_logits(
        self,
        predictions: Sequence[LabelSetPrediction],
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
        return "f1"

    @property
    def curves(self) -> tuple[str, ...]:
        return ("micro_f1", "f1")

    def metrics(self, predictions: Sequence[LabelSetPrediction], rows: Sequence[Row]) -> dict[str, float]:
        labels: list[list[bool]] = []
        predicted: list[list[bool]] = []
        for row, prediction in labelled(rows, predictions, self.column.name):
            labels.append(self._flags(row[self.column.name]))
            predicted.append(self._flags(prediction.labels))
        return multilabel_metrics(labels, predicted, self.labels)

    def metric_inputs(
        self, predictions: Sequence[LabelSetPrediction], rows: Sequence[Row]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Returns 0 or 1 for each label of each row.

        It is the form of the configuration ``multilabel`` of evaluate's accuracy and f1
        (https://huggingface.co/spaces/evaluate-metric/f1).
        """
        labels: list[list[int]] = []
        predicted: list[list[int]] = []
        for row, prediction in labelled(rows, predictions, self.column.name):
            labels.append([int(flag) for flag in self._flags(row[self.column.name])])
            predicted.append([int(flag) for flag in self._flags(prediction.labels)])
        return predicted, labels

    def _flags(self, names: Iterable[str]) -> list[bool]:
        """Returns whether each label is among these names."""
        present = set(names)
        return [label in present for label in self.labels]

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Skips ``macro_f1``, which equals ``f1``. Training compares ``f1`` with ``untuned_f1``."""
        return metric_table(
            metrics,
            self.labels,
            lambda name, score: f"{score}_{name}",
            word="label",
            repeated={"macro_f1": "f1"},
        )

    def truths(self, row: Row) -> Sequence[Hashable]:
        value = row.get(self.column.name)
        return () if value is None else (frozenset(value),)

    def decisions(self, prediction: LabelSetPrediction) -> Sequence[Hashable]:
        return (tuple(prediction.labels),)

    def describe(self, decision: Any) -> str:
        if not decision:
            return "no label for any row"
        names = ", ".join(repr(label) for label in decision)
        return f"{names} for every row"

    def report(
        self, predictions: Sequence[LabelSetPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        """Reports the labels, of which all must be right in a row, their calibration and the mistakes."""
        results: list[RowResult] = []
        labels: list[tuple[str, ...]] = []
        predicted: list[tuple[str, ...]] = []
        scores: list[float] = []
        present: list[bool] = []
        for row, prediction in labelled(rows, predictions, self.column.name):
            results.append(self._result(row, prediction))
            row_labels = tuple(row[self.column.name])
            labels.append(row_labels)
            predicted.append(prediction.labels)
            # Each label of a row is a prediction of its own, whose confidence is the probability of the label.
            scores += [prediction.scores[name] for name in self.labels]
            present += [name in row_labels for name in self.labels]
        # Rows with the same labels in another order are equal.
        in_order = [tuple(name for name in self.labels if name in row_labels) for row_labels in labels]
        return ReportSections(
            measure=multilabel_measure(labels, predicted, self.labels),
            unit="rows",
            headline=("f1", "micro_f1"),
            results=tuple(results),
            summary=right_predictions(results, most_frequent_label(in_order), right="right in all labels"),
            label_word="label",
            labels=self.labels,
            calibration=calibration(scores, present),
            confidence_in="label",
            examples=mistakes(results, texts),
        )

    def _result(self, row: Row, prediction: LabelSetPrediction) -> RowResult:
        """Returns the labels of a row and those predicted, with the score of the most confident mistake among them."""
        labels = row[self.column.name]
        wrong = set(labels) ^ set(prediction.labels)
        confidence = 0.0
        for name in wrong:
            score = prediction.scores[name]
            if name not in prediction.labels:
                score = 1 - score  # the confidence that a label of the row is absent
            confidence = max(confidence, score)
        return RowResult(
            row=row,
            label=list(labels),
            prediction=list(prediction.labels),
            score=confidence,
            is_correct=not wrong,
        )

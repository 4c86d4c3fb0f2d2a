"""Sequence classification with a class, several labels, or a number for a text.

Owns how texts become windows, how logits become predictions and what the loss is. A text longer than ``max_length`` is
cut, or read in overlapping windows whose logits are averaged before the loss and before the prediction.

Shape legend: B sequences (windows), S samples (rows), L labels.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder import heads, packing
from bert_tasks.encoder.config import EncoderConfig, Pooling
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.classification import (
    classification_metrics,
    multilabel_metrics,
    regression_metrics,
    tune_thresholds,
)
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.tasks.base import Feature, LossTerm, OutputKind, Part, Prediction, labelled, require
from bert_tasks.tasks.sequence_classification.detection import TextDetection
from bert_tasks.tasks.shared.calibration import CalibratedFitting, CalibratedTask
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.class_loss import (
    WeightedConfig,
    WeightedFitting,
    WeightedTask,
    binary_cross_entropy,
    cross_entropy,
)
from bert_tasks.tasks.shared.encoding import EncodedText, text_windows, token_characters, truncated_texts
from bert_tasks.tasks.shared.explanation import Explainable, ExplainedLogit, Explanation, TokenSpan
from bert_tasks.tasks.shared.hf_config import label_config
from bert_tasks.tasks.shared.outputs import sample_logits, windows_by_row
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.row_report import RowReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

_LABEL_COLUMNS: Mapping[ProblemType, Column] = {
    "single_label_classification": Column(name="label", kind="label", required=False),
    "multi_label_classification": Column(name="labels", kind="labels", required=False),
    "regression": Column(name="label", kind="number", required=False),
}
_REGRESSION: Final = "regression"
_MULTI_LABEL: Final = "multi_label_classification"
_CLASSES: tuple[ProblemType, ...] = ("single_label_classification", "multi_label_classification")
# The fields that only some problems have.
_APPLY_TO: Mapping[str, tuple[ProblemType, ...]] = {
    "labels": _CLASSES,
    "class_weights": _CLASSES,
    "focal_gamma": _CLASSES,
    "label_smoothing": ("single_label_classification",),
    "calibration": ("single_label_classification",),
    **dict.fromkeys(CalibratedFitting.fields, ("single_label_classification",)),
    "thresholds": ("multi_label_classification",),
    "ranking_loss": (_REGRESSION,),
}


@dataclass(frozen=True, kw_only=True)
class SequencePrediction(Prediction):
    """The prediction for one text, with the field names of transformers' pipeline.

    Attributes:
        label: The most probable label. None for regression, and if its score is too low for the caller.
        labels: The labels whose probability reaches their threshold, for several labels only.
        score: Probability of ``label`` (softmax, or sigmoid for several labels), or the predicted number.
        scores: Label -> probability. Empty for regression.
        logits: Logit of every label, in label order, or the predicted number. Only on request.
        explanation: Explanation of ``label`` or of the number. Only on request.
    """

    label: str | None = None
    labels: tuple[str, ...] | None = None
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None

    def to_json(self, **options: Any) -> dict[str, Any]:
        """See ``Prediction.to_json``. A classifier that abstains has the label null, and a number has no label."""
        content = super().to_json(**options)
        return {"label": None} | content if self.scores else content


class TextFormats(Card, Rendering, WeightedConfig):
    """Classification on cards, in prediction files and in transformers' config."""

    task: "TextClassification"
    pipeline_tag: ClassVar[str] = "text-classification"
    default_head: ClassVar[Literal["sequence"]] = "sequence"

    @property
    def prediction_fields(self) -> tuple[str, ...]:
        if self.task.problem_type == _REGRESSION:
            return ("score",)
        labels = ("labels",) if self.task.problem_type == _MULTI_LABEL else ()
        return ("label", *labels, "score", "scores")

    @property
    def head(self) -> Literal["sequence"] | None:
        return "sequence" if self.task.pooling == "cls" else None

    @property
    def entries(self) -> dict[str, Any]:
        labels = ("LABEL_0",) if self.task.problem_type == _REGRESSION else self.task.labels
        return {**label_config(labels), "problem_type": self.task.problem_type}

    def implied_fields(
        self, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int
    ) -> dict[str, Any]:
        """Sets regression for one label without a problem type, as transformers does."""
        names = labels if labels else ("LABEL_0", "LABEL_1")  # transformers' default: two classes
        problem_type = hf_config.get("problem_type")
        inferred = "regression" if len(names) == 1 else "single_label_classification"
        problem = inferred if problem_type is None else problem_type
        fields = {"problem_type": problem, "max_length": min(self.task.max_length, usable_length)}
        return fields if problem == "regression" else {**fields, "labels": names}

    def compatible_fields(self, stored: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Orders values by label, and drops fields that the problem type lacks."""
        compatible = super().compatible_fields(stored, options)
        if options.get("labels") and compatible.get("problem_type") == "regression":
            del compatible["problem_type"]  # labels were given, so the model is a classifier
        stored_problem = stored.get("problem_type", self.task.problem_type)
        problem = {**compatible, **options}.get("problem_type", self.task.problem_type)
        compatible = {name: value for name, value in compatible.items() if problem in _APPLY_TO.get(name, (problem,))}
        if problem != stored_problem:
            compatible.pop("balanced_weights", None)  # they were computed for another problem
        return compatible


class TextFitting(WeightedFitting, CalibratedFitting):
    """Training of classification of texts and pairs."""

    task: "TextClassification"
    fields: ClassVar[tuple[str, ...]] = ("balanced_weights", "thresholds", *CalibratedFitting.fields)

    def fit_to_train(self, rows: Iterable[Row]) -> Any:
        """Computes what ``balanced`` class weights come to on these rows."""
        if self.task.class_weights != "balanced":
            return self.task
        column, is_set = _LABEL_COLUMNS[self.task.problem_type].name, self.task.problem_type == _MULTI_LABEL
        values = [value for row in rows if (value := row.get(column)) is not None]
        counts = Counter(label for value in values for label in (value if is_set else [value]))
        return self.balance(counts, len(values), is_set=is_set)

    def label_of(self, row: Row) -> int | None:
        return None if row.get("label") is None else self.task.labels.index(row["label"])

    def tune_on_validation(self, predictions: Sequence[SequencePrediction], rows: Sequence[Row]) -> Any:
        """Sets the threshold of each of several labels with the best F1 on these rows."""
        pairs = self.task._labelled_pairs(predictions, rows)
        if self.task.problem_type != _MULTI_LABEL or not pairs:
            return self.task
        labels = [[label in value for label in self.task.labels] for _, value in pairs]
        probabilities = [[prediction.scores[label] for label in self.task.labels] for prediction, _ in pairs]
        return replace(self.task, thresholds=tune_thresholds(labels, probabilities))


class TextExplainable(Explainable):
    """Explains a logit of classification of texts and pairs."""

    task: "TextClassification"

    def token_spans(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase"
    ) -> Sequence[Sequence[TokenSpan | None]]:
        texts = self.task.row_texts(rows)
        names = self.task.texts
        return [
            [None if token is None else TokenSpan(names[token[0]], *token[1:]) for token in window]
            for window in token_characters(self.task.encoded(texts, tokenizer), texts, tokenizer)
        ]

    def explained_logit(
        self, prediction: SequencePrediction, windows: Mapping[int, Tensor], features: Sequence[Feature], row: Row
    ) -> ExplainedLogit:
        """Explains the most probable label's logit, or the number, as a mean over windows."""
        index = 0 if prediction.label is None else self.task.labels.index(prediction.label)
        return ExplainedLogit(
            label=prediction.label,
            texts={name: row[name] for name in self.task.texts},
            terms=tuple((window, index, 1 / len(windows)) for window in windows),
        )


class TextReport(RowReport):
    """The report of classification of texts and pairs."""

    task: "TextClassification"

    def table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Skips ``f1`` or ``macro_f1``, which are equal unless there are two classes."""
        word, repeated = "class", {"f1": "macro_f1"}
        if self.task.problem_type == _MULTI_LABEL:  # f1 picks the best model, and untuned_f1 is compared with it
            word, repeated = "label", {"macro_f1": "f1"}
        elif len(self.task.labels) == 2 or "macro_f1" not in metrics:
            repeated = {}
        return metric_table(
            metrics, self.task.labels, lambda name, score: f"{score}_{name}", word=word, repeated=repeated
        )

    @property
    def curves(self) -> tuple[str, ...]:
        if self.task.problem_type == _REGRESSION:
            return ("pearson", "spearmanr")
        return ("micro_f1", "f1") if self.task.problem_type == _MULTI_LABEL else ("accuracy", "macro_f1")


@dataclass(frozen=True, kw_only=True)
class TextClassification(WeightedTask[SequencePrediction], CalibratedTask[SequencePrediction]):
    """The common settings of the classification of texts and of pairs of texts.

    Attributes:
        texts: The columns of texts that are read together.
        problem_type: As in transformers' config. For ``regression`` there are no labels.
        pooling: ``cls`` is the family's own head. ``mean``, ``max`` and ``attention`` read all tokens of the last
            layer.
        label_smoothing: Share of the label distribution that is spread evenly over all labels (single label only).
        thresholds: A threshold for each label, tuned on validation (several labels only). If empty, 0.5.
    """

    parts: ClassVar[tuple[type[Part], ...]] = (TextDetection, TextFormats, TextFitting, TextExplainable, TextReport)

    texts: ClassVar[tuple[str, ...]] = ("text",)
    problem_type: ProblemType = "single_label_classification"
    pooling: Pooling = "cls"
    label_smoothing: float = 0.0
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        single = self.problem_type == "single_label_classification"
        if self.problem_type == _REGRESSION and self.labels:
            raise ValueError("labels do not apply to problem_type = 'regression'")
        if self.labels and len(self.labels) < (2 if single else 1):
            raise ValueError(f"labels holds {len(self.labels)} name, a classifier needs at least 2")
        if not 0.0 <= self.label_smoothing < 1.0 or (self.label_smoothing and not single):
            raise ValueError("label_smoothing is a share from 0 to below 1, for single-label classification only")
        if self.calibration != "none" and not single:
            raise ValueError("calibration is for problem_type = 'single_label_classification' only")
        require(
            not self.label_smoothing or self.focal_gamma == 0,
            "label_smoothing has no focal loss, which is defined for one right label. Set focal_gamma = 0 or "
            "label_smoothing = 0",
        )
        if self.thresholds and (self.problem_type != _MULTI_LABEL or len(self.thresholds) != len(self.labels)):
            raise ValueError("thresholds: one per label, for multi-label classification only")
        if len(self.texts) == 2 and self.max_length < 5:
            raise ValueError(f"max_length is {self.max_length}, a pair needs at least 5")
        if self.overlap is not None and not 0 <= self.overlap < self.max_length - 2:
            raise ValueError(
                f"doc_stride is {self.overlap}, but windows of {self.max_length} tokens (two of them special) "
                f"can overlap by 0 to {self.max_length - 3}"
            )

    @property
    def without_classes(self) -> str | None:
        return "problem_type = 'regression', which predicts numbers" if self.problem_type == _REGRESSION else None

    @property
    def overlap(self) -> int | None:
        """Number of tokens that a row's windows share. None cuts a row at ``max_length``."""
        return None

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*(Column(name=name, kind="text") for name in self.texts), _LABEL_COLUMNS[self.problem_type])

    @property
    def output_kind(self) -> OutputKind:
        match self.problem_type:
            case "regression":
                return "value"
            case "multi_label_classification":
                return "sigmoid"
            case "single_label_classification":
                return "softmax"

    @property
    def primary_metric(self) -> str:
        return {"regression": "pearson", "multi_label_classification": "f1"}.get(self.problem_type, "accuracy")

    def head(self, config: EncoderConfig) -> Head:
        if self.problem_type != _REGRESSION and not self.labels:
            raise UsageError("sequence classification needs labels, e.g. labels=['negative', 'positive']")
        outputs = 1 if self.problem_type == _REGRESSION else len(self.labels)
        if self.pooling == "cls":
            return heads.SequenceHead(config, outputs)
        return heads.PoolingHead(config, outputs, pooling=self.pooling)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the windows of each row. Only the first has the labels.

        Special tokens written in a text stay plain characters.
        """
        features: list[Feature] = []
        for window in self.encoded(self.row_texts(rows), tokenizer):
            is_first = not features or features[-1]["row"] != window.row
            labels = self._labels(rows[window.row]) if is_first else None
            features.append(window.feature(labels=labels))
        return features

    def row_texts(self, rows: Sequence[Row]) -> list[list[str]]:
        """Returns the texts of rows, column by column."""
        return [[row[name] for row in rows] for name in self.texts]

    def encoded(self, texts: Sequence[Sequence[str]], tokenizer: "PreTrainedTokenizerBase") -> list[EncodedText]:
        """Returns the windows of texts. Without an overlap there is one for each row."""
        if self.overlap is None:
            return truncated_texts(texts, tokenizer, max_length=self.max_length)
        return text_windows(texts[0], tokenizer, max_length=self.max_length, overlap=self.overlap)

    def _labels(self, row: Row) -> list[float] | None:
        """Returns a row's labels as a class index, a 0/1 vector, or the number itself."""
        value = row.get(_LABEL_COLUMNS[self.problem_type].name)
        if value is None:
            return None
        if self.problem_type == _REGRESSION:
            return [float(value)]
        row_labels = set(value) if self.problem_type == _MULTI_LABEL else {value}
        unknown = sorted(row_labels.difference(self.labels))
        if unknown:
            raise DataError(f"unknown label {unknown[0]!r}. The labels are {', '.join(map(repr, self.labels))}")
        if self.problem_type == _MULTI_LABEL:
            return [float(label in row_labels) for label in self.labels]
        return [float(self.labels.index(value))]

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Sums over labelled samples. The count is the divisor of transformers' mean."""
        samples = sample_logits(logits, batch.windows)  # [S, L]
        labelled = batch.labelled_rows
        if not labelled:
            return (LossTerm(name=self.name, total=logits.sum() * 0.0, count=logits.new_zeros(())),)
        if len(labelled) < len(samples):
            samples = samples.index_select(0, packing.device_tensor(labelled, samples.device, torch.long))
        labels = batch.labels.view(len(labelled), -1)  # [S, 1] or [S, L]
        weights = self.weights_like(samples)
        count = samples.new_full((), samples.numel() if self.problem_type == _MULTI_LABEL else len(labelled))
        match self.problem_type:
            case "regression":
                labels = labels.squeeze(-1).to(samples.dtype)
            case "multi_label_classification":
                labels = labels.to(samples.dtype)
            case "single_label_classification":
                labels = labels.squeeze(-1).long()
                count = count if weights is None else weights.index_select(0, labels).sum()
        total = self.summed_loss(samples if self.output_kind != "value" else samples.squeeze(-1), labels, weights)
        return (LossTerm(name=self.name, total=total, count=count),)

    def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the summed loss of labelled rows, which is divided by their number.

        Override it for your own loss.

        Args:
            logits: ``[S, L]``, or ``[S]`` for regression.
            labels: ``[S]`` classes as int64, ``[S, L]`` of 0.0 and 1.0, or ``[S]`` numbers.
            weights: ``[L]`` class weights. None if there are none. With weights of single labels the divisor is the sum
                of the rows' weights.
        """
        match self.problem_type:
            case "regression":
                return F.mse_loss(logits, labels, reduction="sum")
            case "multi_label_classification":
                return binary_cross_entropy(logits, labels, weights=weights, gamma=self.focal_gamma)
            case "single_label_classification":
                options = {"gamma": self.focal_gamma, "smoothing": self.label_smoothing}
                return cross_entropy(logits, labels, weights=weights, **options)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Counts labelled samples, times several labels, or sums class weights."""
        firsts = (features[numbers[0]] for numbers in windows_by_row(features))
        labels = [row_labels for first in firsts if (row_labels := first.get("labels"))]
        weights = self.label_weights()
        if self.problem_type == "single_label_classification" and weights is not None:
            return {self.name: float(sum(weights[int(label)] for (label,) in labels))}
        return {self.name: float(sum(map(len, labels)))}

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[SequencePrediction]:
        if not rows:
            return []
        samples = self.row_logits(compact, features)
        if self.problem_type == _REGRESSION:
            return [SequencePrediction(label=None, score=value, scores={}) for value in samples[:, 0].tolist()]
        is_multi_label, predictions = self.problem_type == _MULTI_LABEL, []
        limits = self.thresholds if self.thresholds else (0.5,) * len(self.labels)
        for probabilities in (
            samples.sigmoid() if is_multi_label else self.calibrated(samples).softmax(dim=-1)
        ).tolist():
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            candidates = zip(self.labels, probabilities, limits, strict=True)
            prediction = SequencePrediction(
                label=self.labels[best],
                score=probabilities[best],
                scores=dict(zip(self.labels, probabilities, strict=True)),
                labels=tuple(label for label, score, limit in candidates if score >= limit) if is_multi_label else None,
            )
            predictions.append(prediction)
        return predictions

    def row_logits(self, compact: Sequence[Tensor], features: Sequence[Feature]) -> Tensor:
        """Returns ``[S, L]`` the mean logits of the windows of each row."""
        return sample_logits(torch.stack(list(compact)), Counter(feature["row"] for feature in features).values())

    def metrics(self, predictions: Sequence[SequencePrediction], rows: Sequence[Row]) -> dict[str, float]:
        pairs = self._labelled_pairs(predictions, rows)
        if self.problem_type == _REGRESSION:
            return regression_metrics([float(value) for _, value in pairs], [result.score for result, _ in pairs])
        if self.problem_type == _MULTI_LABEL:
            labels = [[label in value for label in self.labels] for _, value in pairs]
            predicted = [() if prediction.labels is None else prediction.labels for prediction, _ in pairs]
            decided = [[label in names for label in self.labels] for names in predicted]
            return multilabel_metrics(labels, decided, self.labels)
        index = {label: position for position, label in enumerate(self.labels)}
        indices = [index[value] for _, value in pairs]
        metrics = classification_metrics(
            indices, [index[str(prediction.label)] for prediction, _ in pairs], self.labels
        )
        correct = [prediction.label == value for prediction, value in pairs]
        return metrics | self.calibration_metrics([prediction.score for prediction, _ in pairs], correct)

    def _labelled_pairs(
        self, predictions: Sequence[SequencePrediction], rows: Sequence[Row]
    ) -> list[tuple[SequencePrediction, Any]]:
        """Returns predictions with their labels, for the rows that have one."""
        name = _LABEL_COLUMNS[self.problem_type].name
        return [(prediction, row[name]) for row, prediction in labelled(rows, predictions, name)]


class SequenceFormats(TextFormats):
    """Sequence classification on cards, in prediction files and HF configs."""

    task: "SequenceClassification"
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "text_pair": "text_pair is not read, because the model is served as a model of single texts. If it "
            "reads pairs, its operator starts it with --task pair-classification"
        }
    )

    @property
    def limits(self) -> tuple[str, ...]:
        return ("Longer texts are cut, not read in windows.",) if self.task.long_texts == "truncate" else ()


@dataclass(frozen=True, kw_only=True)
class SequenceClassification(TextClassification):
    """Texts with one label, several labels or a number.

    Attributes:
        long_texts: ``truncate`` cuts at ``max_length``, and ``windows`` reads everything.
        doc_stride: the OVERLAP of two neighbouring windows in tokens, as in transformers.

    Example:
        >>> model = TaskModel.from_pretrained(base, task=SequenceClassification, labels=["complaint", "praise"])
        >>> model.predict("Cold soup.")[0].score
    """

    name: ClassVar[str] = "sequence-classification"
    parts: ClassVar[tuple[type[Part], ...]] = (SequenceFormats, *TextClassification.parts)
    # A folder of transformers does not say how many texts its classifier reads.
    long_texts: Literal["truncate", "windows"] = "truncate"
    doc_stride: int = 32

    @property
    def overlap(self) -> int | None:
        return self.doc_stride if self.long_texts == "windows" else None

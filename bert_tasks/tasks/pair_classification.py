"""Pair classification: one class, several labels, or a number for two texts read together.

Owns the second text and ranking within groups; everything else is sequence classification, which it asks. A pair that
is longer than ``max_length`` is cut from its longer text first, as in transformers.

Shape legend: L labels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head, Pooling
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.metrics.classification import ranking_metrics
from bert_tasks.metrics.tables import MetricTable, merged
from bert_tasks.tasks.base import Feature, LossTerm, Prediction, Task
from bert_tasks.tasks.detection import Guess, Hints
from bert_tasks.tasks.report_data import ReportSections
from bert_tasks.tasks.sequence_classification.detection import detect_texts
from bert_tasks.tasks.sequence_classification.task import ProblemType, SequenceClassification, SequencePrediction

GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class PairClassification(Task[SequencePrediction]):
    """Settings of pair classification; each means what it means in ``SequenceClassification``.

    With two labels and a column ``group`` (a query, a question) the rows of each group are ranked by the probability of
    the second label, and ``map`` and ``mrr`` are reported.
    """

    name: ClassVar[str] = "pair-classification"
    default_head: ClassVar[Literal["sequence"]] = "sequence"
    pipeline_tag: ClassVar[str] = "text-classification"
    row_needs: ClassVar[str] = "two texts and a label or number"
    tuned: ClassVar[tuple[str, ...]] = ("balanced_weights", "thresholds")
    problem_type: ProblemType = "single_label_classification"
    pooling: Pooling = "cls"
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    balanced_weights: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 5:
            raise ValueError(f"max_length is {self.max_length}, a pair needs at least 5")
        _ = self.classifier  # it checks the settings

    @cached_property
    def classifier(self) -> SequenceClassification:
        """The task without its second text."""
        names = [field.name for field in fields(PairClassification)]  # a subclass may have more
        return SequenceClassification(**{name: getattr(self, name) for name in names})

    @property
    def columns(self) -> tuple[Column, ...]:
        text, label = self.classifier.columns
        return text, Column(name="text_pair", kind="text"), label, Column(name=GROUP, kind="id", required=False)

    @property
    def primary_metric(self) -> str:
        return self.classifier.primary_metric

    @property
    def lower_is_better(self) -> frozenset[str]:
        return self.classifier.lower_is_better

    @property
    def neutral_metrics(self) -> frozenset[str]:
        return self.classifier.neutral_metrics | {"ranked_groups"}

    @property
    def hf_head(self) -> Literal["sequence"] | None:
        return self.classifier.hf_head

    @property
    def hf_config(self) -> dict[str, Any]:
        return self.classifier.hf_config

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int) -> dict[str, Any]:
        return SequenceClassification.from_hf(hf_config, labels, usable_length)

    @classmethod
    def compatible_fields(cls, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``SequenceClassification.compatible_fields``."""
        return SequenceClassification.compatible_fields(known, given)

    @classmethod
    def detect(cls, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: Hints) -> Guess | None:
        """See ``Task.detect``."""
        return detect_texts(cls.name, 2, profiles, rows, hints)

    def head(self, config: EncoderConfig) -> Head:
        return self.classifier.head(config)

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        pairs = [row["text_pair"] for row in rows]
        return self.classifier.text_features([row["text"] for row in rows], pairs, rows, tokenizer)

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        return self.classifier.loss(logits, batch)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        return self.classifier.counts(features)

    def decode(
        self, reduced: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[SequencePrediction]:
        return self.classifier.decode(reduced, features, rows)

    def with_logits(
        self, predictions: Sequence[Prediction], reduced: Sequence[Tensor], features: Sequence[Feature]
    ) -> Sequence[Prediction]:
        return self.classifier.with_logits(predictions, reduced, features)

    def metrics(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> dict[str, float]:
        return merged(self.classifier.metrics(predictions, rows), self._ranking(predictions, rows))

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """See ``SequenceClassification.metric_table``."""
        return self.classifier.metric_table(metrics)

    @property
    def curve_metrics(self) -> tuple[str, ...]:
        return self.classifier.curve_metrics

    def report_sections(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> ReportSections:
        """See ``SequenceClassification.report_sections``."""
        return self.classifier.report_sections(predictions, rows)

    def collapse(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> str | None:
        """See ``SequenceClassification.collapse``."""
        return self.classifier.collapse(predictions, rows)

    @property
    def collapse_remedies(self) -> tuple[str, ...]:
        return self.classifier.collapse_remedies

    def same_predictions(self, predictions: Sequence[Prediction], others: Sequence[Prediction]) -> list[bool]:
        """See ``SequenceClassification.same_predictions``."""
        return self.classifier.same_predictions(predictions, others)

    @property
    def prediction_schema(self) -> type[BaseModel]:
        return self.classifier.prediction_schema

    @property
    def example_rows(self) -> Sequence[Row]:
        pairs = (
            ("A man is playing a guitar on stage.", "Someone is making music."),
            ("The shop closes at six.", "The shop is open all night."),
            ("Two dogs run through the snow.", "Animals are outdoors."),
        )
        return [{"text": text, "text_pair": other} for text, other in pairs]

    def _ranking(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> dict[str, float]:
        if self.problem_type != "single_label_classification" or len(self.labels) != 2:
            return {}
        relevant = self.labels[1]
        typed = cast("Sequence[SequencePrediction]", predictions)
        ranked = [
            (row[GROUP], row["label"] == relevant, prediction.scores[relevant])
            for prediction, row in zip(typed, rows, strict=True)
            if row.get(GROUP) is not None and row.get("label") is not None
        ]
        if not ranked:
            return {}
        groups, hits, scores = zip(*ranked, strict=True)
        if not any(hits):
            return {"map": math.nan, "mrr": math.nan, "ranked_groups": 0.0}
        return ranking_metrics(groups, hits, scores)

    def fitted_to(self, rows: Iterable[Row]) -> Self:
        """See ``SequenceClassification.fitted_to``."""
        return replace(self, balanced_weights=self.classifier.fitted_to(rows).balanced_weights)

    def tuned_on(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> Self:
        """See ``SequenceClassification.tuned_on``."""
        return replace(self, thresholds=self.classifier.tuned_on(predictions, rows).thresholds)

"""Pair classification: one class, several labels, or a number for two texts read together.

Owns the second text and ranking within groups; ``TextClassification`` does everything else. A pair that is longer
than ``max_length`` is cut from its longer text first, as in transformers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bert_tasks.data.columns import Column, Row
from bert_tasks.metrics.classification import ranking_metrics
from bert_tasks.metrics.tables import merged
from bert_tasks.tasks.base import Part, labelled
from bert_tasks.tasks.sequence_classification.detection import PairDetection
from bert_tasks.tasks.sequence_classification.task import (
    SequencePrediction,
    TextClassification,
    TextFormats,
    TextReport,
)

GROUP = "group"


class PairFormats(TextFormats):
    """Pair classification on cards, in files of predictions and in a config of transformers."""

    example_rows: ClassVar[Sequence[Row]] = (
        {"text": "A man is playing a guitar on stage.", "text_pair": "Someone is making music."},
        {"text": "The shop closes at six.", "text_pair": "The shop is open all night."},
        {"text": "Two dogs run through the snow.", "text_pair": "Animals are outdoors."},
    )


class PairReport(TextReport):
    """What a report shows of pair classification."""

    neutral_metrics: ClassVar[frozenset[str]] = frozenset({"ranked_groups"})


@dataclass(frozen=True, kw_only=True)
class PairClassification(TextClassification):
    """Settings of pair classification; each means what it means in ``TextClassification``.

    With two labels and a column ``group`` (a query, a question) the rows of each group are ranked by the probability of
    the second label, and ``map`` and ``mrr`` are reported.
    """

    name: ClassVar[str] = "pair-classification"
    parts: ClassVar[tuple[type[Part], ...]] = (PairDetection, PairFormats, PairReport, *TextClassification.parts)
    texts: ClassVar[tuple[str, ...]] = ("text", "text_pair")

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*super().columns, Column(name=GROUP, kind="id", required=False))

    def metrics(self, predictions: Sequence[SequencePrediction], rows: Sequence[Row]) -> dict[str, float]:
        metrics = super().metrics(predictions, rows)
        if self.problem_type != "single_label_classification" or len(self.labels) != 2:
            return metrics
        relevant = self.labels[1]
        ranked = [
            (row[GROUP], row["label"] == relevant, prediction.scores[relevant])
            for row, prediction in labelled(rows, predictions, "label")
            if row.get(GROUP) is not None
        ]
        if not ranked:
            return metrics
        groups, hits, scores = zip(*ranked, strict=True)
        if any(hits):
            return merged(metrics, ranking_metrics(groups, hits, scores))
        return merged(metrics, {"map": math.nan, "mrr": math.nan, "ranked_groups": 0.0})

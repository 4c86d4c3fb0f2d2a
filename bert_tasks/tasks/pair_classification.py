"""Pair classification of two texts read together, or a number for them.

Owns the second text and ranking within groups. ``TextClassification`` does everything else. A pair that is longer than
``max_length`` is cut from its longer text first, as in transformers.

Shape legend: B sequences (rows), G groups, C rows of the group that has most.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.table import RowTable
from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import NDCG, ranking_metrics
from bert_tasks.metrics.tables import merged
from bert_tasks.tasks.base import Feature, LossTerm, Part, labelled, require
from bert_tasks.tasks.sequence_classification.detection import PairDetection
from bert_tasks.tasks.sequence_classification.task import (
    SequencePrediction,
    TextClassification,
    TextFitting,
    TextFormats,
    TextReport,
)
from bert_tasks.tasks.shared.outputs import NO_LOGIT, choice_logits, windows_by_row
from bert_tasks.tasks.shared.ranking import ABSENT_GRADE, RankingLoss, ranking_count, ranking_loss

GROUP = "group"


class PairFormats(TextFormats):
    """Pair classification on cards, in prediction files and in transformers' config."""

    example_rows: ClassVar[Sequence[Row]] = (
        {"text": "A man is playing a guitar on stage.", "text_pair": "Someone is making music."},
        {"text": "The shop closes at six.", "text_pair": "The shop is open all night."},
        {"text": "Two dogs run through the snow.", "text_pair": "Animals are outdoors."},
    )


class PairReport(TextReport):
    """The report of pair classification."""

    neutral_metrics: ClassVar[frozenset[str]] = frozenset({"ranked_groups"})


class PairFitting(TextFitting):
    """Training with a ranking loss, on groups as samples and grades as labels."""

    task: "PairClassification"

    @property
    def sample(self) -> Literal["row", "group"]:  # type: ignore[override]  # it depends on the loss
        return "row" if self.task.ranking_loss == "none" else "group"

    def groups(self, rows: RowTable) -> Sequence[Any]:
        return rows.rows.values(GROUP)

    def check_split(self, rows: RowTable, source: str) -> None:
        name = self.task.ranking_loss
        if name == "none":
            return
        start, groups = f"{source}: settings.ranking_loss = {name!r}", defaultdict(list)
        require(GROUP in rows.rows.column_names, f"{start} needs the column {GROUP!r}, such as a query", DataError)
        for row in rows:
            grade, line = row.get("label"), f"{start}: line {row['line']}"
            require(row[GROUP] not in (None, ""), f"{line} has no {GROUP}", DataError)
            if grade is not None:
                require(grade >= 0, f"{line} has the grade {grade:g}, expected a number from 0", DataError)
                groups[row[GROUP]].append(grade)
        if groups and not any(ranking_count(name, grades) for grades in groups.values()):
            raise DataError(f"{start} compares rows of one {GROUP}, and no {GROUP} has rows with different grades")


@dataclass(frozen=True, kw_only=True)
class PairClassification(TextClassification):
    """Pairs of texts with a label, labels or a number.

    With a column ``group`` (a query, a question) the rows of each group are ranked, by the probability of the second of
    two labels, or by the number of ``problem_type = "regression"``. Then ``map``, ``mrr`` and ``ndcg@10`` are reported.

    Attributes:
        ranking_loss: ``ranknet``, ``listnet`` or ``lambda`` compare the rows of a group. ``label`` is then a grade from
            0 (not relevant), ``problem_type`` is ``regression``, and a sample is a group: ``batch_size`` counts groups.
            ``none`` learns each row for itself.

    Example:
        >>> model = TaskModel.from_pretrained(base, task=PairClassification(problem_type="regression"))
        >>> model.predict([("A man sings.", "Somebody sings.")])[0].score
    """

    name: ClassVar[str] = "pair-classification"
    parts: ClassVar[tuple[type[Part], ...]] = (
        PairDetection,
        PairFormats,
        PairFitting,
        PairReport,
        *TextClassification.parts,
    )
    texts: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    ranking_loss: RankingLoss = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ranking_loss == "none" or self.problem_type == "regression",
            f"ranking_loss = {self.ranking_loss!r} needs problem_type = 'regression', with grades from 0 as labels",
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*super().columns, Column(name=GROUP, kind="id", required=False))

    @property
    def primary_metric(self) -> str:
        return super().primary_metric if self.ranking_loss == "none" else NDCG

    @property
    def can_rank(self) -> bool:
        """Returns True if a prediction has one number or the probability of two labels."""
        is_binary = self.problem_type == "single_label_classification" and len(self.labels) == 2
        return is_binary or self.problem_type == "regression"

    def relevance(self, prediction: SequencePrediction) -> float:
        """Returns the number by which rows are ranked."""
        return prediction.scores[self.labels[1]] if self.labels else prediction.score

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Computes the ranking loss of groups if there is one, else the loss of rows."""
        if self.ranking_loss == "none":
            return super().loss(logits, batch)
        rows = [row for row, count in enumerate(batch.label_counts) if count]
        if not rows:
            return (LossTerm(name=self.name, total=logits.sum() * 0.0, count=logits.new_zeros(())),)
        if len(rows) < len(logits):
            logits = logits.index_select(0, packing.device_tensor(rows, logits.device, torch.long))
        counts = iter(batch.label_counts)
        sizes = [size for windows in batch.windows if (size := sum(islice(counts, windows)))]
        scores = choice_logits(logits, sizes, absent=NO_LOGIT)  # [G, C]
        grades = choice_logits(batch.labels.unsqueeze(-1), sizes, absent=ABSENT_GRADE)
        total, count = ranking_loss(self.ranking_loss, scores, grades)
        return (LossTerm(name=self.name, total=total, count=count),)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        if self.ranking_loss == "none":
            return super().counts(features)
        count = 0
        for group in windows_by_row(features):
            grades = [labels[0] for i in group if (labels := features[i].get("labels"))]
            count += ranking_count(self.ranking_loss, grades)
        return {self.name: float(count)}

    def metrics(self, predictions: Sequence[SequencePrediction], rows: Sequence[Row]) -> dict[str, float]:
        metrics = super().metrics(predictions, rows)
        ranked = [
            (row[GROUP], self._grade(row["label"]), self.relevance(prediction))
            for row, prediction in (labelled(rows, predictions, "label") if self.can_rank else ())
            if row.get(GROUP) is not None
        ]
        if not ranked and self.ranking_loss == "none":
            return metrics
        groups, grades, scores = zip(*ranked, strict=True) if ranked else ((), (), ())
        if any(grades):
            return merged(metrics, ranking_metrics(groups, grades, scores))
        return merged(metrics, {**dict.fromkeys(("map", "mrr", NDCG), math.nan), "ranked_groups": 0.0})

    def _grade(self, label: Any) -> float:
        """Returns the relevance of a label, from 0."""
        return float(label == self.labels[1]) if self.labels else max(0.0, float(label))

"""The ranking of the rows of a group by a class or a number of each pair of texts: metrics and ranking losses.

Shape legend: B sequences (rows), G groups, C rows of the group that has most.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Row
from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.metrics.classification import NDCG, ranking_metrics
from bert_tasks.metrics.tables import merged
from bert_tasks.outputs.base import LossTerm, labelled, no_loss
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.logits import NO_LOGIT, choice_logits
from bert_tasks.outputs.number import Number, NumberPrediction
from bert_tasks.outputs.ranking_loss import ABSENT_GRADE, RankingLoss, ranking_count, ranking_loss

GROUP = "group"  # the column of the query or question whose rows are ranked
RANKED_GROUPS = "ranked_groups"  # the number of the groups behind the metrics, which is no score
RankedRow = tuple[Any, float, float]  # its group or None, its grade from 0, and the number by which it is ranked


@dataclass(frozen=True, kw_only=True)
class RankedClasses(Classes):
    """Classes of pairs of texts. Two of them rank the rows of a group, by the probability of the second class.

    It is the default output of pairs, for example for natural language inference or for paraphrases. If rows have a
    ``group``, such as a query, the metrics of ranking are reported beside those of the classes.

    Examples:
        >>> RankedClasses(labels=("no", "yes")).can_rank
        True
    """

    name: ClassVar[str] = "ranked-classes"
    neutral_metrics: ClassVar[frozenset[str]] = frozenset({RANKED_GROUPS})

    @property
    def can_rank(self) -> bool:
        """True if rows can be ranked by ``relevance``, which needs two labels."""
        return len(self.labels) == 2

    def relevance(self, prediction: ClassPrediction) -> float:
        """Returns the number by which rows are ranked."""
        return prediction.scores[self.labels[1]]

    def metrics(self, predictions: Sequence[ClassPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns the metrics of classes, and those of ranked groups if rows have a group."""
        metrics = super().metrics(predictions, rows)
        pairs = labelled(rows, predictions, self.column.name)
        if not self.can_rank or not _has_group(pairs):
            return metrics
        ranked: list[RankedRow] = []
        for row, prediction in pairs:
            grade = float(row[self.column.name] == self.labels[1])
            ranked.append((row.get(GROUP), grade, self.relevance(prediction)))
        return merged(metrics, _group_metrics(ranked))


@dataclass(frozen=True, kw_only=True)
class Ranking(Number):
    """The number of a pair of texts, by which the rows of a group are ranked.

    It suits similarities, and graded relevance of documents to a query. The losses of ranking are explained in
    outputs/ranking_loss.py, with their sources. They compare rows, so that all rows of a group are in one batch, which
    limits the size of a group by the memory.

    Attributes:
        ranking_loss: ``ranknet``, ``listnet`` or ``lambda`` compare the rows of a group. ``label`` is then a grade from
            0 (not relevant), ``problem_type`` is ``regression``, and a sample is a group: ``batch_size`` counts groups.
            ``none`` learns each row for itself.

    Examples:
        >>> Ranking(ranking_loss="lambda").primary_metric
        'ndcg@10'
    """

    name: ClassVar[str] = "ranking"
    neutral_metrics: ClassVar[frozenset[str]] = frozenset({RANKED_GROUPS})
    ranking_loss: RankingLoss = "none"

    @property
    def can_rank(self) -> bool:
        """True, because every number ranks rows by ``relevance``."""
        return True

    def relevance(self, prediction: NumberPrediction) -> float:
        """Returns the number by which rows are ranked."""
        return prediction.score

    @property
    def compares_rows(self) -> bool:
        """True if the loss compares the rows of a group, so that a sample is a group."""
        return self.ranking_loss != "none"

    # Training

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the number of labelled rows, or what a ranking loss counts in each group."""
        if not self.compares_rows:
            return super().counts(features)
        count = 0
        for group in windows_by_row(features):
            grades = []
            for index in group:
                labels = features[index].get("labels")
                if labels:
                    grades.append(labels[0])
            count += ranking_count(self.ranking_loss, grades)
        return {self.name: float(count)}

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the ranking loss of groups if there is one, else the loss of rows."""
        if not self.compares_rows:
            return super().loss(logits, batch)
        rows = [row for row, count in enumerate(batch.label_counts) if count]
        if not rows:
            return (no_loss(self.name, logits),)
        if len(rows) < len(logits):
            logits = logits.index_select(0, packing.device_tensor(rows, logits.device, torch.long))
        sizes = _labelled_sizes(batch)
        scores = choice_logits(logits, sizes, absent=NO_LOGIT)  # [G, C]
        grades = choice_logits(batch.labels.unsqueeze(-1), sizes, absent=ABSENT_GRADE)  # [G, C]
        total, count = ranking_loss(self.ranking_loss, scores, grades)
        return (LossTerm(name=self.name, total=total, count=count),)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the squared distance of two numbers. With a ranking loss every window is a row."""
        if not self.compares_rows:
            return super().divergence(student, teacher, batch, temperature)
        return F.mse_loss(student, teacher, reduction="sum"), float(len(student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        if not self.compares_rows:
            return super().divergence_count(features)
        return float(len(features))

    # Metrics

    @property
    def primary_metric(self) -> str:
        return NDCG if self.compares_rows else super().primary_metric

    def metrics(self, predictions: Sequence[NumberPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns the correlations, and the metrics of ranked groups if rows have a group."""
        metrics = super().metrics(predictions, rows)
        pairs = labelled(rows, predictions, self.column.name)
        if not self.compares_rows and not _has_group(pairs):
            return metrics
        ranked: list[RankedRow] = []
        for row, prediction in pairs:
            grade = max(0.0, float(row[self.column.name]))  # numbers without a ranking loss may be below 0
            ranked.append((row.get(GROUP), grade, self.relevance(prediction)))
        return merged(metrics, _group_metrics(ranked))

    def summary(self, labels: Sequence[float], numbers: Sequence[float]) -> str:
        """Returns the mean error in words, but nothing with a ranking loss, whose numbers are on another scale."""
        return "" if self.compares_rows else super().summary(labels, numbers)


def _labelled_sizes(batch: PackedBatch) -> list[int]:
    """Returns the number of labelled rows of each group that has one."""
    counts = iter(batch.label_counts)
    sizes = []
    for windows in batch.windows:
        size = sum(islice(counts, windows))
        if size:
            sizes.append(size)
    return sizes


def _has_group(pairs: Iterable[tuple[Row, Any]]) -> bool:
    """Returns True if one of the rows, each with its prediction, is in a group."""
    return any(row.get(GROUP) is not None for row, _ in pairs)


def _group_metrics(rows: Iterable[RankedRow]) -> dict[str, float]:
    """Returns ``map``, ``mrr`` and ``ndcg@10`` of the rows of each group, and the number of groups.

    They are nan if no group has a relevant row. Rows without a group do not count.
    """
    groups: list[str] = []
    grades: list[float] = []
    relevances: list[float] = []
    for group, grade, relevance in rows:
        if group is not None:
            groups.append(group)
            grades.append(grade)
            relevances.append(relevance)
    if not any(grades):
        return {"map": math.nan, "mrr": math.nan, NDCG: math.nan, RANKED_GROUPS: 0.0}
    return ranking_metrics(groups, grades, relevances)

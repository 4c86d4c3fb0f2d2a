"""Metrics of ranked candidates: how high the relevant rows of a group stand by their scores.

Owns the order, its ties and the averages, as trec_eval has them. Must not know what the rows hold or which model
scored them.

Shape legend: S rows, G groups that have a relevant row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bert_tasks.errors import DataError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


def ranking_metrics(groups: Sequence[str], relevant: Sequence[bool], scores: Sequence[float]) -> dict[str, float]:
    """Mean average precision (``map``) and mean reciprocal rank of the first relevant row (``mrr``), both 0 to 1.

    trec_eval puts the higher document id first among equal scores; here the place in the file is the id, so that the
    later row stands first, and a file that lists right answers first gives nothing away. Groups without a relevant row
    are left out, as is usual for WikiQA and TREC QA; ``ranked_groups`` says how many remain. Groups in which every row
    is relevant count, as in trec_eval. The rows of a group need not be neighbours.

    Args:
        groups: what each row is a candidate for: the text or id of a question.
        relevant: whether the row is a right answer.
        scores: higher is better; only their order within a group matters.

    Raises:
        DataError: if lengths differ, a score is NaN, or no group has a relevant row.
    """
    if not len(groups) == len(relevant) == len(scores):
        raise DataError(
            f"Ranking metrics: {len(groups)} groups, {len(relevant)} judgements and {len(scores)} scores, "
            "expected one of each per row."
        )
    place: dict[str, int] = {}
    group = np.array([place.setdefault(name, len(place)) for name in groups], dtype=np.int64)
    given = np.asarray(scores, dtype=np.float64)
    if np.isnan(given).any():
        row = int(np.isnan(given).argmax()) + 1
        raise DataError(f"Ranking metrics: the score of row {row} is NaN, expected a number; check the model for NaN.")
    first, average = _per_group(group, np.asarray(relevant, dtype=np.bool_), given)
    if len(first) == 0:
        raise DataError(
            "Ranking metrics: no group has a relevant row, so there is nothing to rank; check the column of groups and "
            "which label means relevant."
        )
    return {"map": float(average.mean()), "mrr": float((1 / first).mean()), "ranked_groups": float(len(first))}


def _per_group(group: Integers, relevant: Flags, scores: Floats) -> tuple[Integers, Floats]:
    """The rank of the first relevant row and the average precision, for groups that have one; each ``[G]``."""
    rows = np.arange(len(group))
    order = np.lexsort((-rows, -scores, group))  # by group, then score, then row, both from high to low
    ordered = group[order]
    rank = rows - np.searchsorted(ordered, ordered) + 1
    hit = relevant[order]
    hit_group, hit_rank = ordered[hit], rank[hit]  # one item per relevant row
    _, starts, found = np.unique(hit_group, return_index=True, return_counts=True)
    nth = np.arange(len(hit_group)) - np.repeat(starts, found) + 1
    precision = np.add.reduceat(nth / hit_rank, starts) if len(starts) > 0 else np.zeros(0)
    return hit_rank[starts], precision / found

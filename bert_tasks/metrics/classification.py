"""Metrics of classification, regression and ranking, in float64 with numpy alone, and thresholds of labels.

Keys and scales are HF evaluate's (0 to 1), values scikit-learn's, scipy's and, for ranking, trec_eval's. A ratio 0/0
counts as 0. A correlation with a constant has no value and is nan.

Shape legend: S rows, L label names, C candidates for a prediction, T thresholds, G groups that have a relevant row.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.errors import DataError
from bert_tasks.metrics.formulas import (
    Flags,
    Floats,
    LabelCounts,
    class_scores,
    label_metrics,
    mean_ranks,
    multilabel_scores,
)

NDCG = "ndcg@10"
NDCG_ROWS = 10  # the first ranks of a group, which nDCG counts
# From strict to loose, evenly spaced in logits, because the scores of a fine-tuned model crowd near 0 and 1.
THRESHOLDS = np.append(1 / (1 + np.exp(-np.linspace(16, -16, 321))), 0.0)  # [T]
MISSED = -1.0  # the score of a label that no threshold finds
_STARTS = 3  # of the tests for a precision


def classification_metrics(labels: Sequence[int], predictions: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """Returns metrics of one label per row. ``f1`` is of class 1 of 2, else the macro.

    Args:
        labels: Label of each row, as an index into ``names``.
        predictions: Prediction of each row, as an index into ``names``.
        names: Names of the labels, which are in the keys of metrics by label.

    Raises:
        DataError: There is no row.
    """
    counts = class_counts(labels, predictions, len(names))
    metrics: dict[str, float] = {}
    for name, score in class_scores(len(names)).items():
        metrics[name] = float(score(counts))
    return metrics | label_metrics(counts, names, "{1}_{0}".format)


def multilabel_metrics(labels: ArrayLike, predictions: ArrayLike, names: Sequence[str]) -> dict[str, float]:
    """Returns metrics of several labels per row, accuracy of whole rows and macro F1.

    Args:
        labels: 0 or 1, ``[S, L]``.
        predictions: 0 or 1, ``[S, L]``.
        names: Names of the labels.

    Raises:
        DataError: There is no row.
    """
    true_values, predicted_values = _aligned(labels, predictions)
    true, predicted = true_values == 1, predicted_values == 1  # [S, L]
    counts = LabelCounts(support=true.sum(axis=0), predicted=predicted.sum(axis=0), both=(true & predicted).sum(axis=0))
    # As scikit-learn's accuracy_score for indicator matrices: a row counts only if all of its labels are right.
    metrics = {"accuracy": float((true == predicted).all(axis=1).mean())}
    for name, score in multilabel_scores(counts.support).items():
        metrics[name] = float(score(counts))
    return metrics | label_metrics(counts, names, "{1}_{0}".format)


def regression_metrics(labels: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Pearson's and Spearman's correlation of predicted numbers with their labels.

    Both are nan if there is one row, or if all labels or all predictions are equal.

    Raises:
        DataError: There is no row.
    """
    return {"pearson": pearson(labels, predictions), "spearmanr": spearmanr(labels, predictions)}


def class_counts(labels: ArrayLike, predictions: ArrayLike, class_count: int) -> LabelCounts:
    """Returns the counts of one class per row, each ``[L]``.

    Raises:
        DataError: There is no row.
    """
    true_values, predicted_values = _aligned(labels, predictions)
    true, predicted = true_values.astype(np.int64), predicted_values.astype(np.int64)
    return LabelCounts(
        support=np.bincount(true, minlength=class_count),
        predicted=np.bincount(predicted, minlength=class_count),
        both=np.bincount(true[true == predicted], minlength=class_count),
    )


def _aligned(labels: ArrayLike, predictions: ArrayLike) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Returns labels and predictions as arrays, or raises DataError if there is no row."""
    true, predicted = np.asarray(labels), np.asarray(predictions)
    if true.size == 0:
        raise DataError("Metrics: no row has a label, so there is nothing to compare.")
    return true, predicted


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Pearson's correlation of labels and predictions, from -1 to 1.

    It is the value of ``scipy.stats.pearsonr``, without its p-value and without importing scipy. A metric of one's own
    may call it, and the output ``Number`` reports it as ``pearson``.

    Args:
        labels: ``[S]`` numbers.
        predictions: ``[S]`` numbers, in the same order.

    Returns:
        The correlation, computed in float64. It is nan for one row, if all labels or all predictions are equal, and if
        a number is not finite, because no correlation is defined then.

    Raises:
        DataError: There is no row.

    Examples:
        >>> round(pearson([1, 2, 3], [2, 4, 7]), 3)
        0.993
    """
    sides = [values.astype(np.float64) for values in _aligned(labels, predictions)]
    for side in sides:
        if not np.isfinite(side).all() or side.min() == side.max():
            return float("nan")
    x, y = sides[0] - sides[0].mean(), sides[1] - sides[1].mean()
    # Sums, because the digits of a dot product depend on the number of threads.
    covariance = (x * y).sum()
    spread = np.sqrt(np.square(x).sum() * np.square(y).sum())
    return float(np.clip(covariance / spread, -1.0, 1.0))  # rounding can exceed 1 by a digit


def spearmanr(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Spearman's rank correlation with mean ranks, or nan as ``pearson`` does."""
    sides = [values.astype(np.float64) for values in _aligned(labels, predictions)]
    # Asked before ranks are taken, because nan and inf have ranks, which are finite.
    for side in sides:
        if not np.isfinite(side).all():
            return float("nan")
    return pearson(mean_ranks(sides[0]), mean_ranks(sides[1]))


def tune_thresholds(labels: ArrayLike, probabilities: ArrayLike) -> tuple[float, ...]:
    """Returns for each label the threshold with the highest F1.

    ``probability >= threshold`` predicts the label. Candidates are 0.5 and the midpoints between neighbouring
    probabilities. The closest to 0.5 of equally good thresholds is returned. A label without positives gets 0.5.
    Compare in float64, because in float32 a threshold can round onto a probability.

    Args:
        labels: 0 or 1, ``[S, L]``.
        probabilities: From 0 to 1, ``[S, L]``.

    Raises:
        DataError: A probability is not from 0 to 1.
    """
    true, predicted = _aligned(labels, probabilities)
    scores: Floats = predicted.astype(np.float64)
    if not ((scores >= 0) & (scores <= 1)).all():
        raise DataError("Thresholds: probabilities must lie between 0 and 1. Check the model for NaN.")
    thresholds: list[float] = []
    for label in range(true.shape[1]):
        thresholds.append(_best_threshold(true[:, label] == 1, scores[:, label]))
    return tuple(thresholds)


def _best_threshold(labels: Flags, scores: Floats) -> float:
    """Returns the threshold of one label with the highest F1, from its flags and probabilities, ``[S]`` each."""
    if not labels.any():
        return 0.5
    order = np.argsort(scores)
    ordered = scores[order]
    previous = np.concatenate(([0.0], ordered[:-1]))
    middles = (ordered + previous) / 2
    middles = np.where(middles > previous, middles, ordered)  # neighbouring floats have no middle
    candidates = np.append(middles, 0.5)
    below = np.searchsorted(ordered, candidates, side="left")  # how many scores each candidate rejects
    positives_from = np.append(np.cumsum(labels[order][::-1])[::-1], 0)  # positives at and above each place
    hits = positives_from[below]
    f1 = 2 * hits / (len(scores) - below + int(labels.sum()))  # 2 TP / (predicted + positive)
    best = candidates[f1 == f1.max()]
    return float(best[np.argmin(np.abs(best - 0.5))])


def promised_threshold(
    outcomes: Sequence[tuple[float, bool]], metric: Literal["precision", "recall"], share: float, confidence: float
) -> float | None:
    """Returns the lowest threshold with this precision on new rows, or the highest with this recall.

    Thresholds of a fixed grid are tested one after the other, as in fixed sequence testing with several starts of
    "Learn then Test" (Angelopoulos et al. 2021, arXiv:2110.01052), so that the confidence holds for all tests together.
    A test passes if the lower bound of Clopper and Pearson (1934, doi:10.1093/biomet/26.4.404), here in the form of a
    binomial p-value, reaches ``share``, and then leaves its error to the next one. For a recall the tests go up from 0.
    For a precision they go down from three starts: the first thresholds that accept the fewest candidates that could
    pass, twice, and four times as many, because one wrong candidate among the first few would end a single sequence.
    The confidence is then exact if the precision does not rise again after it has fallen below ``share``.

    Args:
        outcomes: Score from 0 to 1 of each of C independent candidates, and whether it is right. A label that no
            threshold finds is right and has the score ``MISSED``.
        metric: What is promised.
        share: Its lowest value, between 0 and 1.
        confidence: The probability that the threshold keeps the promise, between 0 and 1.

    Returns:
        The lowest score that is accepted. None if no threshold passes.

    Examples:
        >>> promised_threshold([(0.9, True)] * 100, "precision", 0.95, 0.95)
        0.0
    """
    from scipy.stats import binom  # here, because the import takes 0.2 s

    trials, hits = accepted_and_right(outcomes, THRESHOLDS)
    places = range(len(THRESHOLDS))
    starts = [len(THRESHOLDS) - 1]
    if metric == "recall":
        trials = np.full_like(trials, sum(is_right for _, is_right in outcomes))
        places = places[::-1]
    else:
        fewest = fewest_right(metric, share, confidence)
        starts = [int(np.searchsorted(trials, fewest * 2**number)) for number in range(_STARTS)]
    p_values = binom.sf(hits - 1, trials, share)
    chosen: float | None = None
    error = 0.0  # that the next test may make
    for place in places:
        error += starts.count(place) * (1 - confidence) / len(starts)
        if p_values[place] < error:
            chosen = float(THRESHOLDS[place])
        else:
            error = 0.0
    return chosen


def fewest_right(metric: Literal["precision", "recall"], share: float, confidence: float) -> int:
    """Returns how many right candidates, without a wrong one, ``promised_threshold`` needs at least."""
    starts = 1 if metric == "recall" else _STARTS
    return math.floor(math.log((1 - confidence) / starts) / math.log(share)) + 1


def accepted_and_right(outcomes: Sequence[tuple[float, bool]], thresholds: ArrayLike) -> NDArray[np.int64]:
    """Returns how many candidates each threshold accepts, and how many of these are right, ``[2, T]``."""
    scores, right = np.array(outcomes, dtype=np.float64).reshape(-1, 2).T  # [C] each
    order = np.argsort(-scores)
    accepted = np.searchsorted(-scores[order], -np.asarray(thresholds), side="right")
    right_so_far = np.append(0, np.cumsum(right[order].astype(np.int64)))
    return np.stack([accepted, right_so_far[accepted]])


def ranking_metrics(groups: Sequence[str], grades: Sequence[float], scores: Sequence[float]) -> dict[str, float]:
    """Returns ``map``, ``mrr`` and ``ndcg@10``, from 0 to 1.

    They are the mean average precision, the mean reciprocal rank of the first relevant row, and nDCG. A row is relevant
    if its grade is above 0. nDCG is the sum of grade / log2(1 + rank) over the first 10 ranks, divided by its highest
    value in the group. The grade itself is the gain, as in trec_eval and scikit-learn's ``ndcg_score``.

    Only ties differ from trec_eval. It ranks the higher document id first, but here the later row comes first, so that
    a file that lists relevant rows first gains nothing. Groups without a relevant row do not count, as is usual for
    WikiQA and TREC QA. ``ranked_groups`` is the number of the other groups. Groups in which every row is relevant
    count, as in trec_eval. The rows of a group need not be neighbours.

    Args:
        groups: Text or id of the question of each row.
        grades: Relevance of each row, from 0.
        scores: Score of each row. Only the order within a group matters, the highest first.

    Raises:
        DataError: A score is NaN, or no group has a relevant row.
    """
    values, gains = np.asarray(scores, dtype=np.float64), np.asarray(grades, dtype=np.float64)
    if np.isnan(values).any():
        row = int(np.isnan(values).argmax()) + 1
        raise DataError(f"the score of row {row} is NaN, expected a number to rank by. Check the model for NaN.")
    if not (gains > 0).any():
        raise DataError(
            "no group has a relevant row, so there is nothing to rank. Check the group column, and "
            "that the second label means 'relevant'."
        )
    numbers: dict[str, int] = {}
    group_of_row = [numbers.setdefault(name, len(numbers)) for name in groups]
    group = np.array(group_of_row, dtype=np.int64)  # [S]
    ranked, rank = _ranked(group, values)  # the rows by group and rank
    ideal, _ = _ranked(group, gains)
    # A group has as many rows in both orders, so the ranks, and with them the discounts, are the same for both.
    discounts = np.where(rank <= NDCG_ROWS, 1 / np.log2(1 + rank), 0.0)
    dcg = np.bincount(group[ranked], weights=gains[ranked] * discounts)
    best = np.bincount(group[ideal], weights=gains[ideal] * discounts)
    hit = gains[ranked] > 0
    hit_group, hit_rank = group[ranked][hit], rank[hit]  # one item per relevant row
    names, starts, sizes = np.unique(hit_group, return_index=True, return_counts=True)
    # The precision at the nth relevant row of a group is n divided by its rank.
    nth = np.arange(len(hit_group)) - np.repeat(starts, sizes) + 1
    average_precision = np.add.reduceat(nth / hit_rank, starts) / sizes  # [G]
    reciprocal_rank = 1 / hit_rank[starts]  # [G]
    return {
        "map": float(average_precision.mean()),
        "mrr": float(reciprocal_rank.mean()),
        NDCG: float((dcg[names] / best[names]).mean()),
        "ranked_groups": float(len(starts)),
    }


def _ranked(group: NDArray[np.int64], values: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ``[S]`` rows by group, then value and row from high to low, and ranks."""
    rows = np.arange(len(group))
    order = np.lexsort((-rows, -values, group))
    ordered = group[order]
    return order, rows - np.searchsorted(ordered, ordered) + 1

"""Metrics of ranked candidates: how high the relevant rows of a group stand by their scores.

Owns the order, its ties and the averages, as trec_eval has them. Must not know what the rows hold or which model
scored them.

Shape legend: S rows, G groups that have a relevant row.

Metrics of classification and regression, computed in float64 with numpy alone.

Owns the arithmetic; keys and scales are those of HF evaluate (0 to 1), values those of scikit-learn and
scipy. Must not know about torch, tasks, or label texts other than as parts of a metric's key. A ratio 0/0
counts as 0; a correlation with a constant has no value and is nan.

Shape legend: S samples, L labels.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.errors import DataError
from bert_tasks.metrics.tables import MetricTable, metric_table

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


class LabelCounts(NamedTuple):
    """How often each label was predicted, was the reference, and both at once; each ``[L]``."""

    both: Integers
    predicted: Integers
    actual: Integers


class LabelScores(NamedTuple):
    """Precision, recall and F1 of each label; each ``[L]``."""

    precision: Floats
    recall: Floats
    f1: Floats


def accuracy(references: ArrayLike, predictions: ArrayLike) -> float:
    """The share of rows predicted right. For 0/1 matrices ``[S, L]`` a row is right if all its labels are."""
    actual, predicted = _aligned(references, predictions)
    right = actual == predicted
    return float(right.reshape(len(right), -1).all(axis=1).mean())


def precision_recall_f1(references: ArrayLike, predictions: ArrayLike, *, class_count: int) -> LabelScores:
    """The scores of every class, also of those that no row has (0)."""
    return _scores(_class_counts(references, predictions, class_count))


def class_f1(references: ArrayLike, predictions: ArrayLike, *, positive: int = 1) -> float:
    """F1 of one class against all others."""
    actual, predicted = _aligned(references, predictions)
    return float(_scores(_label_counts(actual[:, None] == positive, predicted[:, None] == positive)).f1[0])


def macro_f1(references: ArrayLike, predictions: ArrayLike) -> float:
    """The mean F1 over the classes that occur in references or predictions, as scikit-learn has it."""
    counts = _class_counts(references, predictions)
    return _macro(counts)


def micro_f1(references: ArrayLike, predictions: ArrayLike) -> float:
    """F1 of the pooled counts of all classes; with one label per row this is the accuracy."""
    return _micro(_class_counts(references, predictions))


def matthews_correlation(references: ArrayLike, predictions: ArrayLike) -> float:
    """Matthews' correlation for any number of classes; 0 when either side holds one class only."""
    counts = _class_counts(references, predictions)
    total = int(counts.actual.sum())
    both, predicted, actual = (values.astype(np.float64) for values in counts)
    spread_predicted = total**2 - float(predicted @ predicted)
    spread_actual = total**2 - float(actual @ actual)
    if spread_predicted == 0 or spread_actual == 0:
        return 0.0
    covariance = float(both.sum()) * total - float(predicted @ actual)
    return covariance / float(np.sqrt(spread_predicted) * np.sqrt(spread_actual))


def pearson(references: ArrayLike, predictions: ArrayLike) -> float:
    """Pearson's correlation; nan for fewer than two rows, a constant side or a value that is not finite."""
    actual, predicted = (values.astype(np.float64) for values in _aligned(references, predictions))
    if not _varies(actual) or not _varies(predicted):
        return float("nan")
    return float(np.clip((_unit(actual) * _unit(predicted)).sum(), -1.0, 1.0))


def spearmanr(references: ArrayLike, predictions: ArrayLike) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; nan where ``pearson`` is nan."""
    actual, predicted = (values.astype(np.float64) for values in _aligned(references, predictions))
    if not np.isfinite(actual).all() or not np.isfinite(predicted).all():
        return float("nan")
    return pearson(_mean_ranks(actual), _mean_ranks(predicted))


def multilabel_macro_f1(targets: ArrayLike, predictions: ArrayLike) -> float:
    """The mean F1 over all labels of 0/1 matrices ``[S, L]``; a label that never occurs counts as 0."""
    return float(_scores(_multilabel_counts(targets, predictions)).f1.mean())


def multilabel_micro_f1(targets: ArrayLike, predictions: ArrayLike) -> float:
    """F1 of the pooled counts of all labels of 0/1 matrices ``[S, L]``."""
    return _micro(_multilabel_counts(targets, predictions))


def tune_thresholds(targets: ArrayLike, probabilities: ArrayLike) -> tuple[float, ...]:
    """For each label the threshold with the highest F1, if ``probability >= threshold`` predicts the label.

    Candidates are 0.5 and the middles between neighbouring probabilities. Among equals the one closest to 0.5
    is taken; a label without positives gets 0.5. Compare in float64, as here: in float32 a threshold can
    round onto a probability.

    Args:
        targets: 0 or 1, ``[S, L]``.
        probabilities: from 0 to 1, ``[S, L]``.
    """
    actual, given = _aligned(targets, probabilities)
    scores: Floats = given.astype(np.float64)
    if not ((scores >= 0) & (scores <= 1)).all():
        raise DataError("Thresholds: probabilities must lie between 0 and 1; check the model for NaN.")
    return tuple(_best_threshold(actual[:, label] == 1, scores[:, label]) for label in range(actual.shape[1]))


def classification_metrics(
    references: Sequence[int], predictions: Sequence[int], labels: Sequence[str]
) -> dict[str, float]:
    """Metrics of one label per row. ``f1`` is that of class 1 where there are two classes, else macro F1."""
    counts = _class_counts(references, predictions, len(labels))
    macro = _macro(counts)
    scores = _scores(counts)
    return {
        "accuracy": accuracy(references, predictions),
        "f1": float(scores.f1[1]) if len(labels) == 2 else macro,
        "macro_f1": macro,
        "matthews_correlation": matthews_correlation(references, predictions),
        **_per_label(scores, counts.actual, labels),
    }


def multilabel_metrics(targets: ArrayLike, predictions: ArrayLike, labels: Sequence[str]) -> dict[str, float]:
    """Metrics of 0/1 matrices ``[S, L]``. ``accuracy`` is that of whole rows, ``f1`` the macro F1."""
    counts = _multilabel_counts(targets, predictions)
    if len(labels) != len(counts.actual):
        raise DataError(
            f"Multi-label metrics: {len(counts.actual)} columns, expected {len(labels)}, one for each label."
        )
    scores = _scores(counts)
    macro = float(scores.f1.mean())
    return {
        "accuracy": accuracy(targets, predictions),
        "f1": macro,
        "macro_f1": macro,
        "micro_f1": _micro(counts),
        **_per_label(scores, counts.actual, labels),
    }


def regression_metrics(references: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Both correlations of raw outputs."""
    return {"pearson": pearson(references, predictions), "spearmanr": spearmanr(references, predictions)}


def _aligned(references: ArrayLike, predictions: ArrayLike) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    actual, predicted = np.asarray(references), np.asarray(predictions)
    if actual.shape != predicted.shape:
        raise DataError(f"Metrics: references {actual.shape} and predictions {predicted.shape}, expected equal shapes.")
    if actual.size == 0:
        raise DataError("Metrics: no rows to compare; expected at least one row with a label.")
    return actual, predicted


def _class_counts(references: ArrayLike, predictions: ArrayLike, class_count: int | None = None) -> LabelCounts:
    actual, predicted = (values.astype(np.int64) for values in _aligned(references, predictions))
    top = int(max(actual.max(), predicted.max())) + 1
    size = top if class_count is None else class_count
    lowest = min(actual.min(), predicted.min())
    if lowest < 0 or top > size:
        raise DataError(f"Metrics: class numbers from {lowest} to {top - 1}, expected 0 to {size - 1}.")
    return LabelCounts(
        both=np.bincount(actual[actual == predicted], minlength=size),
        predicted=np.bincount(predicted, minlength=size),
        actual=np.bincount(actual, minlength=size),
    )


def _multilabel_counts(targets: ArrayLike, predictions: ArrayLike) -> LabelCounts:
    actual, predicted = _aligned(targets, predictions)
    if actual.ndim != 2:
        raise DataError(f"Multi-label metrics: shape {actual.shape}, expected (rows, labels).")
    return _label_counts(actual == 1, predicted == 1)


def _label_counts(actual: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> LabelCounts:
    return LabelCounts((actual & predicted).sum(axis=0), predicted.sum(axis=0), actual.sum(axis=0))


def _scores(counts: LabelCounts) -> LabelScores:
    return LabelScores(
        precision=_ratio(counts.both, counts.predicted),
        recall=_ratio(counts.both, counts.actual),
        f1=_ratio(2 * counts.both, counts.predicted + counts.actual),
    )


def _ratio(parts: Integers, wholes: Integers) -> Floats:
    return np.divide(parts, wholes, out=np.zeros(wholes.shape), where=wholes > 0)


def _macro(counts: LabelCounts) -> float:
    occurs = counts.predicted + counts.actual > 0
    return float(_scores(counts).f1[occurs].mean())


def _micro(counts: LabelCounts) -> float:
    pooled = LabelCounts(*(values.sum(keepdims=True) for values in counts))
    return float(_scores(pooled).f1[0])


def _per_label(scores: LabelScores, support: Integers, labels: Sequence[str]) -> dict[str, float]:
    columns = (("f1", scores.f1), ("precision", scores.precision), ("recall", scores.recall), ("support", support))
    return {
        f"{metric}_{label}": float(values[index]) for index, label in enumerate(labels) for metric, values in columns
    }


def label_table(
    metrics: Mapping[str, float], labels: Sequence[str], *, word: str, repeated: Mapping[str, str]
) -> MetricTable:
    """The metrics above as a table with a row for each label; see ``metric_table``."""
    return metric_table(metrics, labels, lambda label, score: f"{score}_{label}", word=word, repeated=repeated)


def _varies(values: Floats) -> bool:
    return bool(np.isfinite(values).all() and values.min() < values.max())


def _unit(values: Floats) -> Floats:
    scaled = values / np.abs(values).max()  # squares neither overflow nor vanish
    centred: Floats = scaled - scaled.mean()
    norm = float(np.sqrt(np.square(centred).sum()))  # a dot product's digits would depend on threads
    return centred / norm


def _mean_ranks(values: Floats) -> Floats:
    _, place, repeats = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(repeats)
    return (last - (repeats - 1) / 2)[place]


def _best_threshold(actual: NDArray[np.bool_], scores: Floats) -> float:
    if not actual.any():
        return 0.5
    order = np.argsort(scores)
    ordered = scores[order]
    previous = np.concatenate(([0.0], ordered[:-1]))
    middles = (ordered + previous) / 2
    middles = np.where(middles > previous, middles, ordered)  # neighbouring floats have no middle
    candidates = np.append(middles, 0.5)
    below = np.searchsorted(ordered, candidates, side="left")  # how many scores each candidate turns down
    found = np.append(np.cumsum(actual[order][::-1])[::-1], 0)[below]
    f1 = 2 * found / (len(scores) - below + int(actual.sum()))
    best = candidates[f1 == f1.max()]
    return float(best[np.argmin(np.abs(best - 0.5))])

"""Metric formulas over sufficient statistics: the sums over rows from which a metric follows.

``evaluate`` applies a formula to the sums over all rows. The report applies the same formula to the sums over resampled
rows, so a published value and its interval come from the same arithmetic. A row is what is resampled: a text, a
sentence with all its words, or a question.

Two metrics of ``classification`` are not formulas of this module. ``pearson`` is computed from the rows themselves,
which keeps more digits than the sums that resampling needs. Spearman's correlation does not follow from sums.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates, L labels (or entity types, or tags).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Number = TypeVar("Number", float, Floats)

_BINS = 256  # of scores, for the area under the curve of many tokens
_ROUNDING = 1e-12  # of a sum of squares: equal numbers seem to differ by no more
MOST_LABELS = 200  # the most frequent labels have numbers of their own in a ``MetricFormula``


@dataclass(frozen=True, kw_only=True)
class SufficientStatistics:
    """What each row adds to K sums. Rows that add the same form one group.

    Attributes:
        group_of_row: ``[S]``, the group of each row.
        added: ``[G, K]``, what a row of each group adds. A ``scipy.sparse.csr_array``, because with thousands of
            labels a row adds to a few sums only.
    """

    group_of_row: Integers
    added: Any

    @classmethod
    def of(cls, rows: Floats) -> Self:
        """Groups the rows of a dense matrix ``[S, K]`` of what each row adds."""
        from scipy.sparse import csr_array  # here: 0.2 s, and most commands need no sums

        groups, group_of_row = np.unique(rows, axis=0, return_inverse=True)
        return cls(group_of_row=group_of_row, added=csr_array(groups))

    @classmethod
    def of_counts(cls, rows: Iterable[Mapping[int, int]], columns: int) -> Self:
        """Groups rows that are given as the columns that each adds to, and how much."""
        from scipy.sparse import csr_array

        groups: dict[tuple[tuple[int, int], ...], int] = {}
        group_of_row = [groups.setdefault(tuple(sorted(row.items())), len(groups)) for row in rows]
        entries = [(group, column, count) for row, group in groups.items() for column, count in row]
        group, column, count = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        added = csr_array((count.astype(np.float64), (group, column)), shape=(len(groups), columns))
        return cls(group_of_row=np.array(group_of_row, dtype=np.int64), added=added)

    def beside(self, other: Self) -> Self:
        """Returns the statistics of two models of the same rows, with the sums of both: ``[S, K1 + K2]``."""
        from scipy.sparse import hstack

        pairs, group_of_row = np.unique(np.stack([self.group_of_row, other.group_of_row]), axis=1, return_inverse=True)
        added = hstack([self.added[pairs[0]], other.added[pairs[1]]], format="csr")
        return type(self)(group_of_row=group_of_row, added=added)

    @cached_property
    def sizes(self) -> Integers:
        """``[G]``, the number of rows in each group."""
        return np.bincount(self.group_of_row)

    @property
    def rows(self) -> int:
        """S, the number of rows."""
        return len(self.group_of_row)

    @property
    def columns(self) -> int:
        """K, the number of sums."""
        return int(self.added.shape[1])

    @property
    def total(self) -> Floats:
        """``[K]``, the sums over all rows."""
        total: Floats = self.sums(self.sizes[None])[0]
        return total

    def sums(self, counts: Integers | Floats) -> Floats:
        """``[R, G] -> [R, K]``: the sums over ``counts`` rows of each group."""
        sums: Floats = counts @ self.added
        return sums


class LabelCounts(NamedTuple):
    """How often each label is in the labels (its support), in the predictions, and in both; each ``[..., L]``."""

    support: NDArray[Any]
    predicted: NDArray[Any]
    both: NDArray[Any]


Score = Callable[[LabelCounts], Floats]  # ``[..., L] -> [...]``, or ``[..., L]`` for one number for each label


def ratio(parts: NDArray[Any], wholes: NDArray[Any]) -> Floats:
    """``parts / wholes`` elementwise; 0 where ``wholes`` is 0, as in scikit-learn with ``zero_division=0``."""
    out: Floats = np.zeros(np.broadcast(parts, wholes).shape)
    np.divide(parts, wholes, out=out, where=np.asarray(wholes) > 0)
    return out


def percentage(total: Number, count: Number) -> Number:
    """The mean on a scale from 0 to 100, rounded as in SQuAD's scripts."""
    return 100.0 * total / count


def pooled(counts: LabelCounts) -> LabelCounts:
    """``[..., L] -> [..., 1]``: the counts of all labels as one, for micro averages."""
    return LabelCounts(*(part.sum(axis=-1, keepdims=True) for part in counts))


def precision(counts: LabelCounts) -> Floats:
    """``[..., L]``."""
    return ratio(counts.both, counts.predicted)


def recall(counts: LabelCounts) -> Floats:
    """``[..., L]``."""
    return ratio(counts.both, counts.support)


def f1(counts: LabelCounts) -> Floats:
    """``[..., L]``, rounded as in scikit-learn."""
    return ratio(2 * counts.both, counts.predicted + counts.support)


def entity_f1(counts: LabelCounts) -> Floats:
    """``[..., L]``: the same number, rounded as in seqeval: the harmonic mean of precision and recall."""
    p, r = precision(counts), recall(counts)
    return ratio(2 * p * r, p + r)


def label_metrics(
    counts: LabelCounts,
    names: Sequence[str],
    key: Callable[[str, str], str],
    *,
    support: str = "support",
    label_f1: Score = f1,
) -> dict[str, float]:
    """Returns precision, recall, F1 and support of each label; ``key``: label and score -> the name of the metric."""
    scores = {"f1": label_f1(counts), "precision": precision(counts), "recall": recall(counts), support: counts.support}
    return {key(name, score): float(of_all[i]) for i, name in enumerate(names) for score, of_all in scores.items()}


def accuracy(counts: LabelCounts) -> Floats:
    """``[..., L] -> [...]``: the share of correct predictions, where each row (or word) has one label."""
    return recall(pooled(counts))[..., 0]


def macro_f1(counts: LabelCounts, always: Flags | None = None) -> Floats:
    """``[..., L] -> [...]``: the mean F1 over labels that occur, and over those that ``always`` (``[L]``) names."""
    scores, counted = f1(counts), counts.predicted + counts.support > 0
    if always is not None:
        counted = counted | always
    if scores.ndim == 1:
        scores = scores[counted]  # zeros in between would change the last digit, which is scikit-learn's
    return ratio(scores.sum(axis=-1), counted.sum(axis=-1))


def micro_f1(counts: LabelCounts) -> Floats:
    """``[..., L] -> [...]``: F1 of the pooled counts of all labels."""
    return f1(pooled(counts))[..., 0]


def matthews_correlation(counts: LabelCounts) -> Floats:
    """``[..., L] -> [...]``: Matthews' correlation for any number of classes; 0 when either side has one class only."""
    support, predicted, both = (part.astype(np.float64) for part in counts)
    total = support.sum(axis=-1)
    spreads = [np.sqrt(total * total - (side * side).sum(axis=-1)) for side in (predicted, support)]
    covariance = both.sum(axis=-1) * total - (predicted * support).sum(axis=-1)
    return ratio(covariance, spreads[0] * spreads[1])


def class_scores(classes: int) -> dict[str, Score]:
    """Returns the scores of one class per row. ``f1`` is the F1 of class 1 of two classes, else the macro F1."""

    def second_f1(counts: LabelCounts) -> Floats:
        return f1(counts)[..., 1]

    return {
        "accuracy": accuracy,
        "f1": second_f1 if classes == 2 else macro_f1,
        "macro_f1": macro_f1,
        "matthews_correlation": matthews_correlation,
    }


def multilabel_scores(support: NDArray[Any]) -> dict[str, Score]:
    """Returns the scores of several labels per row.

    A label that is in no row's labels counts as 0 in the macro F1. A replicate that happens to miss a rare label says
    nothing about that label: its macro F1 is the mean over the others. Which labels are in no row follows from the
    labels alone, so the predictions of two models can be exchanged.

    Args:
        support: ``[L]``, how often each label is in the labels of all rows.
    """
    absent = support == 0

    def macro(counts: LabelCounts) -> Floats:
        return macro_f1(counts, absent)

    return {"f1": macro, "macro_f1": macro, "micro_f1": micro_f1}


def entity_scores(name: str) -> dict[str, Score]:
    """Returns precision, recall and F1 of all entity types together; their keys begin with ``name``."""

    def pooled_score(score: Score) -> Score:
        return lambda counts: score(pooled(counts))[..., 0]

    scores = {"precision": precision, "recall": recall, "f1": entity_f1}
    return {f"{name}_{key}": pooled_score(score) for key, score in scores.items()}


WORD_SCORES: Mapping[str, Score] = {"overall_accuracy": accuracy, "macro_f1": macro_f1}


@dataclass(frozen=True, kw_only=True)
class MetricFormula:
    """Numbers of a data set that follow from sums over its rows.

    Attributes:
        names: of the M numbers; ``f1\\0NAME`` and the like for the numbers of one label.
        statistics: what each row adds to the sums.
        formula: ``[..., K] -> [..., M]``.
        labels: the labels (or limits of the bins) whose counts are the sums; empty where the sums count no labels.
            Predictions can be exchanged only between measures with the same labels.
    """

    names: tuple[str, ...]
    statistics: SufficientStatistics
    formula: Callable[[Floats], Floats]
    labels: tuple[str, ...] = ()

    def values(self) -> dict[str, float | None]:
        """The numbers over all rows; None for those that are not defined."""
        numbers = self.formula(self.statistics.total).tolist()
        return {name: value if math.isfinite(value) else None for name, value in zip(self.names, numbers, strict=True)}

    def number(self, name: str, sums: Floats) -> Floats:
        """``[..., K] -> [...]``: one of the numbers."""
        number: Floats = self.formula(sums)[..., self.names.index(name)]
        return number

    def support(self) -> dict[str, int]:
        """How often each label that has numbers of its own is in the labels."""
        names, totals = set(self.names), self.statistics.total.tolist()
        counts = zip(self.labels, totals, strict=False)  # the first L sums
        return {label: int(count) for label, count in counts if f"f1\0{label}" in names}


class Span(NamedTuple):
    """Words ``start`` to ``end - 1`` of a sentence."""

    start: int
    end: int
    type: str


def class_measure(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> MetricFormula:
    """The metrics of one class per row.

    Args:
        labels: the label of each row.
        predictions: the prediction of each row.
        names: of the classes.
    """

    pairs = zip(labels, predictions, strict=True)
    statistics = _label_statistics(([[a], [b], [a] if a == b else []] for a, b in pairs), names)
    return _label_measure(statistics, names, class_scores(len(names)), label_f1=f1)


def multilabel_measure(
    labels: Sequence[Iterable[str]], predictions: Sequence[Iterable[str]], names: Sequence[str]
) -> MetricFormula:
    """Returns the metrics of several labels per row; arguments as in ``class_measure``."""
    pairs = ((set(a), set(b)) for a, b in zip(labels, predictions, strict=True))
    statistics = _label_statistics(((a, b, a & b) for a, b in pairs), names)
    return _label_measure(statistics, names, multilabel_scores(statistics.total[: len(names)]), label_f1=f1)


def word_measure(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], names: Sequence[str]
) -> MetricFormula:
    """The metrics of sentences whose words have one tag each; arguments as in ``class_measure``."""
    pairs = zip(labels, predictions, strict=True)
    rows = ((a, b, [tag for tag, other in zip(a, b, strict=True) if tag == other]) for a, b in pairs)
    return _label_measure(_label_statistics(rows, names), names, WORD_SCORES, label_f1=f1)


def entity_measure(
    labels: Sequence[Set[Span]], predictions: Sequence[Set[Span]], types: Sequence[str]
) -> MetricFormula:
    """The metrics of entities; one is correct if its type and both ends are. Arguments as in ``class_measure``."""
    pairs = zip(labels, predictions, strict=True)
    rows = ([[span.type for span in side] for side in (a, b, a & b)] for a, b in pairs)
    return _label_measure(_label_statistics(rows, types), types, entity_scores("overall"), label_f1=entity_f1)


def _label_statistics(rows: Iterable[Sequence[Iterable[str]]], names: Sequence[str]) -> SufficientStatistics:
    """How often each name is in the labels, in the predictions and in both: the three sides of each row; K = 3 L."""
    index = {name: number for number, name in enumerate(names)}
    counts = (
        Counter(index[name] + len(names) * side for side, labels in enumerate(row) for name in labels if name in index)
        for row in rows
    )
    return SufficientStatistics.of_counts(counts, 3 * len(names))


def _label_measure(
    statistics: SufficientStatistics,
    names: Sequence[str],
    overall: Mapping[str, Score],
    *,
    label_f1: Score,
) -> MetricFormula:
    """The numbers of the most frequent labels and those over all labels.

    The numbers of a label that is in neither labels nor predictions of a replicate are not defined there.
    """
    frequent = sorted(np.argsort(-statistics.total[: len(names)], kind="stable")[:MOST_LABELS].tolist())
    scores = {"precision": precision, "recall": recall, "f1": label_f1}

    def formula(sums: Floats) -> Floats:
        counts = LabelCounts(*np.split(sums, 3, axis=-1))
        shown = LabelCounts(*(part[..., frequent] for part in counts))
        absent = shown.support + shown.predicted == 0
        each = [np.where(absent, np.nan, score(shown)) for score in scores.values()]
        return np.concatenate([*each, *(score(counts)[..., None] for score in overall.values())], axis=-1)

    label_names = [f"{score}\0{names[index]}" for score in scores for index in frequent]
    return MetricFormula(names=(*label_names, *overall), statistics=statistics, formula=formula, labels=tuple(names))


def regression_measure(labels: Sequence[float], predictions: Sequence[float]) -> MetricFormula:
    """Pearson's correlation, the mean absolute error and the root of the mean squared error."""
    true, predicted = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    # Centred, so that the sums of squares keep their digits. Both by the mean of the labels: the rows of two models are
    # mixed in a randomisation test, so they must not be moved by different amounts.
    x, y = true - true.mean(), predicted - true.mean()
    error = predicted - true
    rows = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y, np.abs(error), error * error], axis=1)

    def formula(sums: Floats) -> Floats:
        count, x, y, xx, yy, xy, absolute, squared = np.moveaxis(sums, -1, 0)
        spread, others = count * xx - x * x, count * yy - y * y
        varies = (spread > _ROUNDING * count * xx) & (others > _ROUNDING * count * yy)
        pearson = np.full(varies.shape, np.nan)
        np.divide(count * xy - x * y, np.sqrt(np.abs(spread * others)), out=pearson, where=varies)
        return np.stack([np.clip(pearson, -1.0, 1.0), absolute / count, np.sqrt(squared / count)], axis=-1)

    names = ("pearson", "mean_absolute_error", "rmse")
    return MetricFormula(names=names, statistics=SufficientStatistics.of(rows), formula=formula)


def answer_measure(exact: Sequence[float], f1_scores: Sequence[float], *, exact_name: str) -> MetricFormula:
    """Exact match and F1 of questions, from 0 to 100.

    Args:
        exact: of each question, 0 or 1.
        f1_scores: of each question, from 0 to 1.
        exact_name: the metric's name, which differs between SQuAD 1.1 and 2.0.
    """
    rows = np.stack([np.ones(len(exact)), np.asarray(exact, dtype=np.float64), np.asarray(f1_scores)], axis=1)

    def formula(sums: Floats) -> Floats:
        count = sums[..., 0]
        return np.stack([percentage(sums[..., 1], count), percentage(sums[..., 2], count)], axis=-1)

    return MetricFormula(names=(exact_name, "f1"), statistics=SufficientStatistics.of(rows), formula=formula)


def accuracy_measure(correct: Sequence[bool]) -> MetricFormula:
    """Accuracy alone, for rows that share no classes.

    Args:
        correct: whether each row's prediction is right.
    """
    rows = np.stack([np.ones(len(correct)), np.asarray(correct, dtype=np.float64)], axis=1)

    def formula(sums: Floats) -> Floats:
        return ratio(sums[..., 1:], sums[..., :1])

    return MetricFormula(names=("accuracy",), statistics=SufficientStatistics.of(rows), formula=formula)


def masked_token_measure(counts: Sequence[int], losses: Sequence[float], correct: Sequence[int]) -> MetricFormula:
    """Perplexity, exp of the mean cross entropy, and accuracy of masked tokens.

    Args:
        counts: the masked tokens of each row.
        losses: the sum of their cross entropies.
        correct: how many of them are predicted correctly.
    """
    rows = np.stack([np.asarray(part, dtype=np.float64) for part in (counts, losses, correct)], axis=1)

    def formula(sums: Floats) -> Floats:
        count, loss, hits = np.moveaxis(sums, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.stack([np.exp(loss / count), hits / count], axis=-1)

    return MetricFormula(names=("perplexity", "accuracy"), statistics=SufficientStatistics.of(rows), formula=formula)


def replaced_token_measure(sizes: Sequence[int], scores: Floats, replaced: Flags, masked: Flags) -> MetricFormula:
    """How well replaced tokens are told from others by their scores, and how often the original token was drawn.

    A resampled area under the curve is computed from scores in ``_BINS`` bins; what the bins change over all rows is
    corrected. The bins come from these scores.

    Args:
        sizes: the tokens of each row.
        scores: ``[N]`` of all tokens; above 0 a token is taken for a replaced one.
        replaced: ``[N]`` whether another token is in its place.
        masked: ``[N]`` whether a token was drawn for it.
    """
    edges = np.unique([0.0, *np.quantile(scores, np.linspace(0, 1, _BINS))]) if len(scores) else np.zeros(1)
    bins = np.searchsorted(edges, scores, side="left")  # scores above 0 are in bins of their own
    above, count = np.arange(len(edges) + 1) > np.searchsorted(edges, 0.0), len(edges) + 1
    columns = np.split(bins + count * replaced, np.cumsum(sizes)[:-1])
    drawn = np.split(masked, np.cumsum(sizes)[:-1])
    rows = [Counter(one.tolist()) | {2 * count: int(part.sum())} for one, part in zip(columns, drawn, strict=True)]
    correction = 0.0

    def formula(sums: Floats) -> Floats:
        others, exact = sums[..., :count], sums[..., count:-1]
        below = np.cumsum(others, axis=-1) - others / 2  # a tie counts one half
        positives, negatives = exact.sum(-1), others.sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            area = (exact * below).sum(-1) / (positives * negatives)
            accuracy = 1 - positives / sums[..., -1]
        hits, said = exact[..., above].sum(-1), (exact + others)[..., above].sum(-1)
        return np.stack([area + correction, ratio(hits, said), ratio(hits, positives), accuracy], axis=-1)

    statistics = SufficientStatistics.of_counts(rows, 2 * count + 1)
    exact = area_under_curve(replaced, scores)
    if math.isfinite(exact):
        correction = exact - float(formula(statistics.total)[0])
    names = ("auc", "precision", "recall", "generator_accuracy")
    return MetricFormula(names=names, statistics=statistics, formula=formula, labels=tuple(map(str, edges.tolist())))


def area_under_curve(labels: Flags, scores: Floats) -> float:
    """The area under the ROC curve: how often a positive has a higher score than a negative; a tie counts one half.

    Args:
        labels: ``[S]`` whether each is a positive.
        scores: ``[S]``.

    Returns:
        The area, or NaN without positives or without negatives.
    """
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return math.nan
    return float((mean_ranks(scores)[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def mean_ranks(values: Floats) -> Floats:
    """Returns the rank of each value, from 1; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks

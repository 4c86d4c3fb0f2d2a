"""Formulas that compute metrics from sufficient statistics, sums over rows.

``evaluate`` applies a formula to the sums over all rows. The report applies the same formula to the sums over resampled
rows, so a published value and its interval come from the same arithmetic. Resampling draws rows, and a row is a text, a
sentence with all its words, or a question.

Two metrics of ``classification`` are not formulas of this module. ``pearson`` is computed from the rows themselves,
which keeps more digits than the sums that resampling needs. Spearman's correlation does not follow from sums.

Shape legend: S rows, G groups of equal rows, K sums, M numbers, R replicates, L labels (or entity types, or tags).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Number = TypeVar("Number", float, Floats)

_BINS = 256  # bins of scores, for the area under the curve of many tokens
_ROUNDING = 1e-12  # share of a sum of squares by which equal numbers can seem to differ, through rounding
MOST_LABELS = 200  # number of the most frequent labels with separate numbers in a ``MetricFormula``


@dataclass(frozen=True, kw_only=True)
class SufficientStatistics:
    """The numbers that each row adds to K sums. Equal rows form a group.

    Attributes:
        group_of_row: ``[S]``, the group of each row.
        added: ``[G, K]``, the numbers that a row of each group adds. A ``scipy.sparse.csr_array``, because with
            thousands of labels a row adds to a few sums only.
    """

    group_of_row: Integers
    added: Any

    @classmethod
    def of(cls, rows: Floats) -> Self:
        """Groups the rows of a dense matrix ``[S, K]`` of added numbers."""
        from scipy.sparse import csr_array  # here, because it takes 0.2 s and most commands need no sums

        groups, group_of_row = np.unique(rows, axis=0, return_inverse=True)
        return cls(group_of_row=group_of_row, added=csr_array(groups))

    @classmethod
    def of_counts(cls, rows: Iterable[Mapping[int, int]], columns: int) -> Self:
        """Groups rows that map columns to added counts."""
        from scipy.sparse import csr_array

        groups: dict[tuple[tuple[int, int], ...], int] = {}
        group_of_row: list[int] = []
        for row in rows:
            content = tuple(sorted(row.items()))
            group_of_row.append(groups.setdefault(content, len(groups)))
        entries: list[tuple[int, int, int]] = []
        for content, number in groups.items():
            entries += [(number, column, count) for column, count in content]
        # The reshape is for no entries at all, whose array would have one dimension.
        group, column, count = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        added = csr_array((count.astype(np.float64), (group, column)), shape=(len(groups), columns))
        return cls(group_of_row=np.array(group_of_row, dtype=np.int64), added=added)

    def beside(self, other: Self) -> Self:
        """Returns the sums of two models of the same rows, ``[S, K1 + K2]``.

        A resample that draws a row then draws it for both models, so their difference is that of paired rows.
        """
        from scipy.sparse import hstack

        # A group is now a pair of groups, one of each model, of which only those that occur are kept.
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
        """Returns the sums over ``counts`` rows of each group, ``[R, G] -> [R, K]``."""
        sums: Floats = counts @ self.added
        return sums


class LabelCounts(NamedTuple):
    """Each label's counts in labels (support), predictions and both, ``[..., L]``."""

    support: NDArray[Any]
    predicted: NDArray[Any]
    both: NDArray[Any]


Score = Callable[[LabelCounts], Floats]  # ``[..., L] -> [...]``, or ``[..., L]`` for one number for each label
# The names in the labels of a row, in its prediction, and in both, each as often as it counts.
NamedSides = tuple[Iterable[str], Iterable[str], Iterable[str]]


def ratio(parts: NDArray[Any], wholes: NDArray[Any]) -> Floats:
    """Returns ``parts / wholes``, or 0 for a whole of 0, as in scikit-learn."""
    # ``where`` skips the division by 0 and its warning. The places that it skips keep the 0 of ``out``.
    out: Floats = np.zeros(np.broadcast(parts, wholes).shape)
    np.divide(parts, wholes, out=out, where=np.asarray(wholes) > 0)
    return out


def percentage(total: Number, count: Number) -> Number:
    """Returns the mean on a scale from 0 to 100, rounded as in SQuAD's scripts."""
    return 100.0 * total / count


def pooled(counts: LabelCounts) -> LabelCounts:
    """Sums the counts of all labels for micro averages, ``[..., L] -> [..., 1]``."""
    return LabelCounts(*(count.sum(axis=-1, keepdims=True) for count in counts))


def precision(counts: LabelCounts) -> Floats:
    """Returns the precision of each label, ``[..., L]``."""
    return ratio(counts.both, counts.predicted)


def recall(counts: LabelCounts) -> Floats:
    """Returns the recall of each label, ``[..., L]``."""
    return ratio(counts.both, counts.support)


def f1(counts: LabelCounts) -> Floats:
    """Returns the F1 of each label, ``[..., L]``, rounded as in scikit-learn."""
    return ratio(2 * counts.both, counts.predicted + counts.support)


def entity_f1(counts: LabelCounts) -> Floats:
    """Returns F1, ``[..., L]``, as seqeval's harmonic mean of precision and recall.

    ``f1`` is the same number, but the two roundings differ in the last digit, and each library is matched exactly.
    """
    of_predicted, of_labels = precision(counts), recall(counts)
    return ratio(2 * of_predicted * of_labels, of_predicted + of_labels)


def label_metrics(
    counts: LabelCounts,
    names: Sequence[str],
    key: Callable[[str, str], str],
    *,
    support: str = "support",
    label_f1: Score = f1,
) -> dict[str, float]:
    """Returns scores and support of each label, under ``key(label, score)``."""
    scores = {"f1": label_f1(counts), "precision": precision(counts), "recall": recall(counts), support: counts.support}
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        for score, of_all in scores.items():
            metrics[key(name, score)] = float(of_all[index])
    return metrics


def accuracy(counts: LabelCounts) -> Floats:
    """Returns the accuracy for one label per row or word, ``[..., L] -> [...]``."""
    return recall(pooled(counts))[..., 0]  # with one label each, the pooled support is the number of rows


def macro_f1(counts: LabelCounts, always: Flags | None = None) -> Floats:
    """Returns the mean F1, ``[..., L] -> [...]``, of occurring and ``always`` labels."""
    scores = f1(counts)
    counted = counts.predicted + counts.support > 0
    if always is not None:
        counted = counted | always
    if scores.ndim == 1:
        scores = scores[counted]  # zeros in between would change the last digit, which is scikit-learn's
    return ratio(scores.sum(axis=-1), counted.sum(axis=-1))


def micro_f1(counts: LabelCounts) -> Floats:
    """Returns F1 of the summed counts of all labels, ``[..., L] -> [...]``."""
    return f1(pooled(counts))[..., 0]


def matthews_correlation(counts: LabelCounts) -> Floats:
    """Returns Matthews' correlation, ``[..., L] -> [...]``, 0 for a constant side.

    It is Gorodkin's R_K for any number of classes (https://doi.org/10.1016/j.compbiolchem.2004.09.006), computed as in
    scikit-learn's ``matthews_corrcoef``.
    """
    # In float64, because products of integer counts can overflow.
    support, predicted, both = (count.astype(np.float64) for count in counts)
    total = support.sum(axis=-1)
    predicted_spread = np.sqrt(total * total - (predicted * predicted).sum(axis=-1))
    label_spread = np.sqrt(total * total - (support * support).sum(axis=-1))
    covariance = both.sum(axis=-1) * total - (predicted * support).sum(axis=-1)
    return ratio(covariance, predicted_spread * label_spread)


def class_scores(classes: int) -> dict[str, Score]:
    """Returns the scores of one class per row. ``f1`` is as in ``classification``."""

    def second_f1(counts: LabelCounts) -> Floats:
        return f1(counts)[..., 1]

    # As evaluate's f1 with its default, where the second of two classes is the positive one.
    common_f1: Score = second_f1 if classes == 2 else macro_f1
    return {
        "accuracy": accuracy,
        "f1": common_f1,
        "macro_f1": macro_f1,
        "matthews_correlation": matthews_correlation,
    }


def multilabel_scores(support: NDArray[Any]) -> dict[str, Score]:
    """Returns the scores of several labels per row.

    A label that is in no row's labels counts as 0 in the macro F1. A replicate that misses a rare label does not
    measure it, so its macro F1 is the mean over the other labels. The labels alone decide which labels are in no row,
    so the predictions of two models can be exchanged.

    Args:
        support: ``[L]``, number of rows with each label.
    """
    absent = support == 0

    def macro(counts: LabelCounts) -> Floats:
        return macro_f1(counts, absent)

    return {"f1": macro, "macro_f1": macro, "micro_f1": micro_f1}


def entity_scores(name: str) -> dict[str, Score]:
    """Returns precision, recall and F1 of all entities, under the prefix ``name``."""

    def pooled_score(score: Score) -> Score:
        return lambda counts: score(pooled(counts))[..., 0]

    scores = {"precision": precision, "recall": recall, "f1": entity_f1}
    return {f"{name}_{key}": pooled_score(score) for key, score in scores.items()}


WORD_SCORES: Mapping[str, Score] = {"overall_accuracy": accuracy, "macro_f1": macro_f1}


@dataclass(frozen=True, kw_only=True)
class MetricFormula:
    """Numbers of a data set that follow from sums over its rows.

    Attributes:
        names: Names of the M numbers, for example ``f1\\0NAME`` for the number of a label.
        statistics: The numbers that each row adds to the sums.
        formula: ``[..., K] -> [..., M]``.
        labels: Labels (or limits of the bins) whose counts are the sums. Empty if the sums count no labels. Predictions
            can be exchanged only between measures with the same labels.
    """

    names: tuple[str, ...]
    statistics: SufficientStatistics
    formula: Callable[[Floats], Floats]
    labels: tuple[str, ...] = ()

    def values(self) -> dict[str, float | None]:
        """Returns the numbers over all rows, and None for undefined numbers."""
        numbers = self.formula(self.statistics.total).tolist()
        values: dict[str, float | None] = {}
        for name, value in zip(self.names, numbers, strict=True):
            values[name] = value if math.isfinite(value) else None
        return values

    def number(self, name: str, sums: Floats) -> Floats:
        """Returns one of the numbers, ``[..., K] -> [...]``."""
        number: Floats = self.formula(sums)[..., self.names.index(name)]
        return number

    def support(self) -> dict[str, int]:
        """Returns the number of rows with each label that has separate numbers."""
        names = set(self.names)
        totals = self.statistics.total.tolist()
        support: dict[str, int] = {}
        for label, count in zip(self.labels, totals, strict=False):  # the first L sums are of the labels
            if f"f1\0{label}" in names:
                support[label] = int(count)
        return support


class Span(NamedTuple):
    """Words ``start`` to ``end - 1`` of a sentence."""

    start: int
    end: int
    type: str


def class_measure(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> MetricFormula:
    """Returns the metrics of one class per row.

    Args:
        labels: Label of each row.
        predictions: Prediction of each row.
        names: Names of the classes.
    """

    def rows() -> Iterator[NamedSides]:
        for label, prediction in zip(labels, predictions, strict=True):
            both = [label] if label == prediction else []
            yield [label], [prediction], both

    statistics = _label_statistics(rows(), names)
    return _label_measure(statistics, names, class_scores(len(names)), label_f1=f1)


def multilabel_measure(
    labels: Sequence[Iterable[str]], predictions: Sequence[Iterable[str]], names: Sequence[str]
) -> MetricFormula:
    """Returns the metrics of several labels per row, as ``class_measure`` does."""

    def rows() -> Iterator[NamedSides]:
        for label_names, predicted_names in zip(labels, predictions, strict=True):
            true, predicted = set(label_names), set(predicted_names)
            yield true, predicted, true & predicted

    statistics = _label_statistics(rows(), names)
    support = statistics.total[: len(names)]  # the sums over the labels come first
    return _label_measure(statistics, names, multilabel_scores(support), label_f1=f1)


def word_measure(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], names: Sequence[str]
) -> MetricFormula:
    """Returns the metrics of sentences of tagged words, as ``class_measure`` does."""

    def rows() -> Iterator[NamedSides]:
        for tags, predicted in zip(labels, predictions, strict=True):
            both = [tag for tag, other in zip(tags, predicted, strict=True) if tag == other]
            yield tags, predicted, both

    return _label_measure(_label_statistics(rows(), names), names, WORD_SCORES, label_f1=f1)


def entity_measure(
    labels: Sequence[Set[Span]], predictions: Sequence[Set[Span]], types: Sequence[str]
) -> MetricFormula:
    """Returns the metrics of entities, which must match in type and both ends."""

    def rows() -> Iterator[NamedSides]:
        for spans, predicted in zip(labels, predictions, strict=True):
            true_types = [span.type for span in spans]
            predicted_types = [span.type for span in predicted]
            yield true_types, predicted_types, [span.type for span in spans & predicted]

    return _label_measure(_label_statistics(rows(), types), types, entity_scores("overall"), label_f1=entity_f1)


def _label_statistics(rows: Iterable[NamedSides], names: Sequence[str]) -> SufficientStatistics:
    """Returns the counts of each name in labels, predictions and both, K = 3 L."""
    index = {name: number for number, name in enumerate(names)}

    def counts_of_rows() -> Iterator[Counter[int]]:
        for row in rows:
            counts = Counter[int]()
            for side, side_names in enumerate(row):
                first = side * len(names)  # the sums of a side follow each other
                counts.update(first + index[name] for name in side_names if name in index)
            yield counts

    return SufficientStatistics.of_counts(counts_of_rows(), 3 * len(names))


def _label_measure(
    statistics: SufficientStatistics,
    names: Sequence[str],
    overall: Mapping[str, Score],
    *,
    label_f1: Score,
) -> MetricFormula:
    """Returns the numbers of the most frequent labels and of all labels.

    A label that is in neither labels nor predictions of a replicate has no numbers for it.
    """
    by_support = np.argsort(-statistics.total[: len(names)], kind="stable")
    frequent = sorted(by_support[:MOST_LABELS].tolist())
    scores: Mapping[str, Score] = {"precision": precision, "recall": recall, "f1": label_f1}

    def formula(sums: Floats) -> Floats:
        counts = LabelCounts(*np.split(sums, 3, axis=-1))
        shown = LabelCounts(
            support=counts.support[..., frequent],
            predicted=counts.predicted[..., frequent],
            both=counts.both[..., frequent],
        )
        absent = shown.support + shown.predicted == 0
        numbers: list[Floats] = []
        for score in scores.values():
            numbers.append(np.where(absent, np.nan, score(shown)))
        for score in overall.values():
            numbers.append(score(counts)[..., None])
        return np.concatenate(numbers, axis=-1)

    # In the order in which the formula joins the numbers: score by score, then label by label.
    label_names: list[str] = []
    for score in scores:
        label_names += [f"{score}\0{names[index]}" for index in frequent]
    return MetricFormula(names=(*label_names, *overall), statistics=statistics, formula=formula, labels=tuple(names))


def regression_measure(labels: Sequence[float], predictions: Sequence[float]) -> MetricFormula:
    """Returns Pearson's correlation, the mean absolute error and the RMSE."""
    true, predicted = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    # Centred, so that sums of squares keep their digits. Both use the mean of the labels. The rows of two models are
    # mixed in a randomisation test, so they must not be moved by different amounts.
    x, y = true - true.mean(), predicted - true.mean()
    error = predicted - true
    rows = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y, np.abs(error), error * error], axis=1)

    def formula(sums: Floats) -> Floats:
        count, x, y, xx, yy, xy, absolute, squared = np.moveaxis(sums, -1, 0)
        # n times the sums of squares around the mean of the drawn rows, which differs from the mean above.
        spread, others = count * xx - x * x, count * yy - y * y
        varies = (spread > _ROUNDING * count * xx) & (others > _ROUNDING * count * yy)
        pearson = np.full(varies.shape, np.nan)
        np.divide(count * xy - x * y, np.sqrt(np.abs(spread * others)), out=pearson, where=varies)
        correlation = np.clip(pearson, -1.0, 1.0)
        return np.stack([correlation, absolute / count, np.sqrt(squared / count)], axis=-1)

    names = ("pearson", "mean_absolute_error", "rmse")
    return MetricFormula(names=names, statistics=SufficientStatistics.of(rows), formula=formula)


def answer_measure(exact: Sequence[float], f1_scores: Sequence[float], *, exact_name: str) -> MetricFormula:
    """Returns exact match and F1 of questions, from 0 to 100.

    Args:
        exact: Exact match of each question, 0 or 1.
        f1_scores: F1 of each question, from 0 to 1.
        exact_name: Name of the metric, which differs between SQuAD 1.1 and 2.0.
    """
    rows = np.stack([np.ones(len(exact)), np.asarray(exact, dtype=np.float64), np.asarray(f1_scores)], axis=1)

    def formula(sums: Floats) -> Floats:
        count = sums[..., 0]
        return np.stack([percentage(sums[..., 1], count), percentage(sums[..., 2], count)], axis=-1)

    return MetricFormula(names=(exact_name, "f1"), statistics=SufficientStatistics.of(rows), formula=formula)


def accuracy_measure(correct: Sequence[bool]) -> MetricFormula:
    """Returns the accuracy alone, for rows that share no classes.

    Args:
        correct: True for each correct prediction.
    """
    rows = np.stack([np.ones(len(correct)), np.asarray(correct, dtype=np.float64)], axis=1)

    def formula(sums: Floats) -> Floats:
        return ratio(sums[..., 1:], sums[..., :1])

    return MetricFormula(names=("accuracy",), statistics=SufficientStatistics.of(rows), formula=formula)


def masked_token_measure(counts: Sequence[int], losses: Sequence[float], correct: Sequence[int]) -> MetricFormula:
    """Returns perplexity, exp of mean cross entropy, and accuracy of masked tokens.

    Args:
        counts: Number of masked tokens of each row.
        losses: Sum of their cross entropies.
        correct: Number of correct predictions.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (counts, losses, correct)]
    rows = np.stack(columns, axis=1)

    def formula(sums: Floats) -> Floats:
        count, loss, hits = np.moveaxis(sums, -1, 0)
        # A resample can have no masked token (nan), and the perplexity of a new model can be infinite.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.stack([np.exp(loss / count), hits / count], axis=-1)

    return MetricFormula(names=("perplexity", "accuracy"), statistics=SufficientStatistics.of(rows), formula=formula)


def replaced_token_measure(sizes: Sequence[int], scores: Floats, replaced: Flags, masked: Flags) -> MetricFormula:
    """Returns metrics of replaced tokens by their scores, and of the generator.

    A resampled area under the curve is computed from scores in ``_BINS`` bins, and corrected by the effect of the bins
    over all rows. The bins come from these scores.

    Args:
        sizes: Number of tokens of each row.
        scores: ``[N]`` of all tokens. Above 0 a token counts as replaced.
        replaced: ``[N]`` True if another token is in its position.
        masked: ``[N]`` True if a token was drawn for it.
    """
    edges = np.zeros(1)
    if len(scores):
        edges = np.unique([0.0, *np.quantile(scores, np.linspace(0, 1, _BINS))])
    bins = np.searchsorted(edges, scores, side="left")  # scores above 0 are in bins of their own
    count = len(edges) + 1  # of the bins
    above = np.arange(count) > np.searchsorted(edges, 0.0)
    # The sums: tokens that are not replaced by bin, replaced ones by bin, and the number of masked tokens.
    ends = np.cumsum(sizes)[:-1]
    columns = np.split(bins + count * replaced, ends)
    drawn = np.split(masked, ends)
    rows: list[Mapping[int, int]] = []
    for codes, mask in zip(columns, drawn, strict=True):
        rows.append(Counter(codes.tolist()) | {2 * count: int(mask.sum())})
    correction = 0.0

    def formula(sums: Floats) -> Floats:
        others, exact = sums[..., :count], sums[..., count:-1]
        # The area is the share of pairs of a replaced and another token in which the replaced one has the higher score.
        below = np.cumsum(others, axis=-1) - others / 2  # a tie counts 0.5
        positives, negatives = exact.sum(-1), others.sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            area = (exact * below).sum(-1) / (positives * negatives)
            accuracy = 1 - positives / sums[..., -1]  # where the generator draws the original, nothing is replaced
        hits, said = exact[..., above].sum(-1), (exact + others)[..., above].sum(-1)
        return np.stack([area + correction, ratio(hits, said), ratio(hits, positives), accuracy], axis=-1)

    statistics = SufficientStatistics.of_counts(rows, 2 * count + 1)
    exact = area_under_curve(replaced, scores)
    if math.isfinite(exact):
        correction = exact - float(formula(statistics.total)[0])
    names = ("auc", "precision", "recall", "generator_accuracy")
    limits = tuple(str(edge) for edge in edges.tolist())
    return MetricFormula(names=names, statistics=statistics, formula=formula, labels=limits)


def area_under_curve(labels: Flags, scores: Floats) -> float:
    """Returns the area under the ROC curve. A tie of two scores counts 0.5.

    Args:
        labels: ``[S]`` True for each positive.
        scores: ``[S]``.

    Returns:
        The area, or NaN without positives or without negatives.
    """
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return math.nan
    # Mann and Whitney's U: the sum of the ranks of the positives, minus the smallest sum that they could have.
    above_negatives = mean_ranks(scores)[labels].sum() - positives * (positives + 1) / 2
    return float(above_negatives / (positives * negatives))


def mean_ranks(values: Floats) -> Floats:
    """Returns the rank of each value, from 1. Equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks

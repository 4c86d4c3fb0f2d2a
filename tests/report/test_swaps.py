"""Comparisons and intervals are those of a naive loop: rows exchanged or repeated, and metrics computed anew."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats

from bert_tasks.data.conll import entities
from bert_tasks.metrics.classification import classification_metrics, multilabel_metrics
from bert_tasks.metrics.formulas import (
    MetricFormula,
    Span,
    accuracy_measure,
    answer_measure,
    class_measure,
    entity_measure,
    masked_token_measure,
    multilabel_measure,
    regression_measure,
    word_measure,
)
from bert_tasks.metrics.squad import answer_scores, squad_v1_metrics, squad_v2_metrics
from bert_tasks.metrics.tagging import tagging_metrics
from bert_tasks.report.statistics import paired, permutation_test, swapped_differences

Rows = Sequence[Any]
ROWS = 40
NAMES = ("a", "b", "c")
TAGS = ("O", "B-X", "I-X", "B-Y")
DRAW = np.random.default_rng(3)


class Case(NamedTuple):
    """A measure and the metrics that it stands for, each of labels and predictions."""

    measure: Callable[[Rows, Rows], MetricFormula]
    naive: Callable[[Rows, Rows], Mapping[str, float]]
    labels: Rows
    models: tuple[Rows, Rows]


def numbers(labels: Rows, predictions: Rows) -> dict[str, float]:
    errors = np.asarray(predictions) - np.asarray(labels)
    return {
        "pearson": float(stats.pearsonr(labels, predictions).statistic),
        "mean_absolute_error": float(np.abs(errors).mean()),
        "rmse": math.sqrt(float((errors**2).mean())),
    }


def classes(names: Sequence[str]) -> Callable[[Rows, Rows], dict[str, float]]:
    return lambda a, b: classification_metrics(*([names.index(label) for label in side] for side in (a, b)), names)


def sets(labels: Rows, predictions: Rows) -> dict[str, float]:
    return multilabel_metrics(
        *([[name in row for name in NAMES] for row in side] for side in (labels, predictions)), NAMES
    )


def spans(side: Rows) -> list[set[Span]]:
    return [{Span(entity.start, entity.end, entity.type) for entity in entities(tags)} for tags in side]


def answers(version_2: bool, exact_name: str) -> Callable[[Rows, Rows], MetricFormula]:
    return lambda a, b: answer_measure(*answer_scores(a, b, version_2=version_2), exact_name=exact_name)


def masks(_: Rows, predictions: Rows) -> dict[str, float]:
    count, loss, hits = np.asarray(predictions, dtype=float).sum(axis=0)
    return {"perplexity": math.exp(loss / count), "accuracy": hits / count}


def drawn(make: Callable[[], Any], labels: Rows, shares: tuple[float, float]) -> tuple[Rows, Rows]:
    """The predictions of two models, right in so many rows."""
    first, second = ([label if DRAW.random() < share else make() for label in labels] for share in shares)
    return first, second


def case(measure: Any, naive: Any, make: Callable[[], Any]) -> Case:
    labels = [make() for _ in range(ROWS)]
    return Case(measure, naive, labels, drawn(make, labels, (0.3, 0.6)))


def numbers_case(scale: float, shift: float) -> Case:
    """Two models whose predictions differ in scale and in place."""
    labels = DRAW.normal(size=ROWS)
    first, second = labels + DRAW.normal(size=ROWS), scale * (labels + DRAW.normal(size=ROWS)) + shift
    return Case(regression_measure, numbers, labels.tolist(), (first.tolist(), second.tolist()))


def one_of(*values: Any) -> Callable[[], Any]:
    return lambda: values[int(DRAW.integers(len(values)))]


CASES = {
    "numbers": numbers_case(1.0, 0.0),
    "numbers of another place": numbers_case(1.0, 2.0),
    "numbers of another scale": numbers_case(0.1, -5.0),
    "classes": case(lambda a, b: class_measure(a, b, NAMES), classes(NAMES), one_of(*NAMES)),
    "two classes": case(lambda a, b: class_measure(a, b, NAMES[:2]), classes(NAMES[:2]), one_of(*NAMES[:2])),
    "sets": case(lambda a, b: multilabel_measure(a, b, NAMES), sets, one_of((), ("a",), ("a", "b"), ("c",), NAMES)),
    "choices": case(
        lambda a, b: accuracy_measure([x == y for x, y in zip(a, b, strict=True)]),
        lambda a, b: {"accuracy": sum(x == y for x, y in zip(a, b, strict=True)) / len(a)},
        one_of(*NAMES),
    ),
    "entities": case(
        lambda a, b: entity_measure(spans(a), spans(b), ("X", "Y")),
        lambda a, b: tagging_metrics(a, b, raw=False),
        lambda: DRAW.choice(TAGS, size=5).tolist(),
    ),
    "words": case(
        lambda a, b: word_measure(a, b, NAMES),
        lambda a, b: tagging_metrics(a, b, raw=True),
        lambda: DRAW.choice(NAMES, size=4).tolist(),
    ),
    "answers of version 1": Case(
        answers(version_2=False, exact_name="exact_match"),
        squad_v1_metrics,
        [["the ferry"], ["the", "x"]] * (ROWS // 2),  # "?" matches "the" exactly with an F1 of 0
        drawn(one_of("ferry", "?", "the ferry at"), [""] * ROWS, (0.2, 0.6)),
    ),
    "answers": Case(
        answers(version_2=True, exact_name="exact"),
        lambda a, b: squad_v2_metrics(a, b, None),
        [["the ferry"], [], ["seven o'clock", "at seven"], ["a cup"]] * (ROWS // 4),
        drawn(one_of("ferry", "", "seven", "the cup", "a cold ferry"), [""] * ROWS, (0.2, 0.6)),
    ),
    "masks": case(
        lambda _, b: masked_token_measure(*zip(*b, strict=True)),
        masks,
        lambda: (3, float(DRAW.gamma(9)), int(DRAW.integers(4))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_swap_gives_the_difference_of_the_metrics_of_the_swapped_predictions(name: str) -> None:
    measure, naive, labels, models = CASES[name]
    first, second = (measure(labels, model) for model in models)
    swaps = DRAW.integers(2, size=(30, ROWS)).astype(bool)
    swaps[:2] = [[False], [True]]
    mixed = [
        [[pair[swap ^ side] for *pair, swap in zip(*models, swap, strict=True)] for side in (0, 1)] for swap in swaps
    ]
    expected = [(naive(labels, predictions), naive(labels, other)) for predictions, other in mixed]
    compared_names = [metric for metric in first.names if "\0" not in metric]
    assert compared_names
    for metric in compared_names:
        pair = paired(first, second, metric)
        groups, count = pair.statistics.group_of_row, len(pair.statistics.sizes)
        gaps = swapped_differences(pair, np.stack([np.bincount(groups[swap], minlength=count) for swap in swaps]))
        assert gaps == pytest.approx(
            [other[metric] - metrics[metric] for metrics, other in expected], rel=1e-9, abs=1e-11
        )


@pytest.mark.parametrize("name", CASES)
def test_each_replicate_gives_the_metrics_of_the_rows_that_were_drawn(name: str) -> None:
    measure, naive, labels, (predictions, _) = CASES[name]
    whole = measure(labels, predictions)
    rows = DRAW.integers(ROWS, size=(20, ROWS))
    counts = np.stack(
        [np.bincount(whole.statistics.group_of_row[sample], minlength=len(whole.statistics.sizes)) for sample in rows]
    )
    sums = whole.statistics.sums(counts)
    expected = [naive([labels[index] for index in sample], [predictions[index] for index in sample]) for sample in rows]
    for metric in (metric_name for metric_name in whole.names if "\0" not in metric_name):
        values = whole.number(metric, sums)
        assert values == pytest.approx([metrics[metric] for metrics in expected], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_p_of_pearson_is_that_of_scipy(shift: float) -> None:
    """All 1,024 swaps of ten rows."""
    draw = np.random.default_rng(8)
    labels = draw.normal(size=10)
    first, second = labels + draw.normal(size=10), labels + 0.2 * draw.normal(size=10) + shift

    def difference(scores: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
        return stats.pearsonr(labels, other, axis=axis).statistic - stats.pearsonr(labels, scores, axis=axis).statistic

    exact = stats.permutation_test((first, second), difference, permutation_type="samples", n_resamples=np.inf)
    result = permutation_test(regression_measure(labels, first), regression_measure(labels, second), "pearson")
    assert (result.p, result.draws) == (pytest.approx(exact.pvalue, abs=0.002), 1024)


def test_equal_differences_count_at_any_size_of_the_metric() -> None:
    """Three rows differ by 0.6 and two by -0.6: no swap gives a smaller difference than the observed one."""
    losses = [77.1, 61.6, 67.7, 63.3, 67.6], [77.7, 62.2, 68.3, 62.7, 67.0]
    first, second = (masked_token_measure([7] * 5, model_losses, [0] * 5) for model_losses in losses)
    assert permutation_test(first, second, "perplexity") == (1.0, 32)


@pytest.mark.parametrize("value", [0.1, 3.3, 1e5 + 0.1])
def test_a_model_that_predicts_one_number_has_no_correlation(value: float) -> None:
    labels = DRAW.normal(2.7, size=30)
    constant = regression_measure(labels, [value] * 30)
    assert constant.values()["pearson"] is None
    assert permutation_test(constant, regression_measure(labels, labels), "pearson") is None

"""Resampling of many classes and of rare labels."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from bert_tasks.metrics.classification import classification_metrics, multilabel_metrics
from bert_tasks.metrics.formulas import class_measure, multilabel_measure
from bert_tasks.report.statistics import bootstrap, permutation_test

DRAW = np.random.default_rng(0)


@pytest.mark.slow
def test_many_classes_need_little_memory_and_have_numbers_where_they_are_frequent():
    labels = tuple(map(str, range(2000)))
    true, predicted = ([labels[number] for number in DRAW.integers(2000, size=4000)] for _ in range(2))
    predicted[:2000] = true[:2000]
    tracemalloc.start()
    first, second = (class_measure(true, side, labels) for side in (predicted, true))
    estimates, result = bootstrap(first), permutation_test(first, second, "macro_f1")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150e6  # one dense matrix would be 192 MB
    assert result.p == 1 / (result.draws + 1)
    told = [name for name in estimates if name.startswith("f1\0")]
    assert len(told) == 200
    often = Counter(true)
    assert min(often[name.removeprefix("f1\0")] for name in told) >= sorted(often.values())[-200]
    numbers = [list(map(int, side)) for side in (true, predicted)]
    assert estimates["macro_f1"].value == pytest.approx(classification_metrics(*numbers, labels)["macro_f1"])


def test_a_replicate_without_a_rare_label_says_nothing_about_it():
    true = [["a"]] * 30 + [["b"]]
    rare = bootstrap(multilabel_measure(true, true, ("a", "b")))
    assert (rare["f1\0b"].low, rare["f1"].low) == (1.0, 1.0)


def test_a_stray_answer_of_one_run_leaves_both_the_same_denominator():
    """Every swap gives what the task's own metric gives of the answers so mixed."""
    labels = ("a", "b", "never")
    true = [["a"]] * 30 + [["b"]] * 30
    straying, missing = [["a", "never"], *true[1:]], [*true[:-9], *[[]] * 9]
    first, second = (multilabel_measure(true, side, labels) for side in (straying, missing))

    def metric(predicted):
        sides = ([[name in row for name in labels] for row in side] for side in (true, predicted))
        return multilabel_metrics(*sides, labels)["f1"]

    assert (first.values()["f1"], second.values()["f1"]) == pytest.approx((metric(straying), metric(missing)))
    draw = np.random.default_rng(0)
    gaps = []
    for _ in range(500):
        swapped = draw.integers(2, size=60) == 1
        pairs = [(b, a) if swap else (a, b) for a, b, swap in zip(straying, missing, swapped, strict=True)]
        gaps.append(metric([a for a, _ in pairs]) - metric([b for _, b in pairs]))
    hits = int((np.abs(gaps) >= abs(metric(straying) - metric(missing)) - 1e-12).sum())
    assert permutation_test(first, second, "f1").p == pytest.approx((hits + 1) / 501, abs=0.02)

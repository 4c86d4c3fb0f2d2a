"""Ranking metrics against the definitions in plain Python and against scikit-learn."""

import math

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import ranking_metrics

quick = settings(max_examples=40, deadline=None, database=None)
# Few scores, so that ties are common.
grades = st.sampled_from([0, 0, 1, 2, 0.5])
rows = st.tuples(st.sampled_from("ab"), grades, st.sampled_from([-1.0, 0.0, 0.25, 2.0]))
tables = st.lists(rows, min_size=1, max_size=30)


def columns(table):
    return [list(column) for column in zip(*table, strict=True)]


def ranked(table, name):
    """The grades of a group, best score first, the later row first among equals."""
    numbered = [(score, row, grade) for row, (group, grade, score) in enumerate(table) if group == name]
    return [grade for _, _, grade in sorted(numbered, reverse=True)]


def dcg(judgements):
    return sum(grade / math.log2(1 + rank) for rank, grade in enumerate(judgements[:10], start=1))


def ndcg(judgements):
    return dcg(judgements) / dcg(sorted(judgements, reverse=True))


def average_precision(grades):
    judgements = [grade > 0 for grade in grades]
    precisions = [sum(judgements[:rank]) / rank for rank, hit in enumerate(judgements, start=1) if hit]
    return sum(precisions) / len(precisions)


def mean(values):
    return sum(values) / len(values)


@quick
@given(tables)
def test_metrics_equal_their_definitions(table):
    lists = [ranked(table, name) for name in sorted({name for name, _, _ in table})]
    counted = [judgements for judgements in lists if any(judgements)]
    assume(counted)
    ours = ranking_metrics(*columns(table))
    assert ours == pytest.approx(
        {
            "map": mean([average_precision(judgements) for judgements in counted]),
            "mrr": mean([1 / ([grade > 0 for grade in grades].index(True) + 1) for grades in counted]),
            "ndcg@10": mean([ndcg(judgements) for judgements in counted]),
            "ranked_groups": len(counted),
        },
        abs=1e-14,
    )
    assert all(type(value) is float for value in ours.values())


@pytest.mark.parametrize("seed", range(5))
def test_ndcg_without_ties_is_scikit_learns_mean(seed):
    """The grades are the gains, and the first 10 of about 15 rows count."""
    random = np.random.default_rng(seed)
    groups, grades = random.integers(0, 5, size=80), random.integers(0, 4, size=80)
    scores = random.permutation(80) / 80
    expected = [sklearn.metrics.ndcg_score([grades[groups == i]], [scores[groups == i]], k=10) for i in range(5)]
    ours = ranking_metrics([str(group) for group in groups], grades.tolist(), scores.tolist())
    assert ours["ndcg@10"] == pytest.approx(np.mean(expected), abs=1e-12)
    exponential = [
        sklearn.metrics.ndcg_score([2.0 ** grades[groups == i] - 1], [scores[groups == i]], k=10) for i in range(5)
    ]
    assert abs(ours["ndcg@10"] - np.mean(exponential)) > 1e-3


def test_equal_scores_put_the_later_row_first():
    first = ranking_metrics(["q"] * 3, [True, False, False], [0.5] * 3)
    last = ranking_metrics(["q"] * 3, [False, False, True], [0.5] * 3)
    assert (first["mrr"], last["mrr"]) == (pytest.approx(1 / 3), 1.0)


@pytest.mark.parametrize(
    ("groups", "relevant", "scores", "message"),
    [
        (["a", "a"], [True, False], [0.1, float("nan")], "score of row 2 is NaN"),
        (["a", "b"], [False, False], [0.1, 0.2], "no group has a relevant row"),
        ([], [], [], "no group has a relevant row"),
    ],
)
def test_what_cannot_be_ranked_is_refused(groups, relevant, scores, message):
    with pytest.raises(DataError, match=message):
        ranking_metrics(groups, relevant, scores)

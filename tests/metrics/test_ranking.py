"""Ranking metrics against the definitions in plain Python and against scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import ranking_metrics

quick = settings(max_examples=80, deadline=None, database=None)
# Few scores, so that ties are common.
rows = st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from([-1.0, 0.0, 0.25, 2.0]))
tables = st.lists(rows, min_size=1, max_size=14)


def columns(table):
    return [list(column) for column in zip(*table, strict=True)]


def ranked(table, name):
    """The judgements of a group, best score first, the later row first among equals."""
    numbered = [(score, row, relevant) for row, (group, relevant, score) in enumerate(table) if group == name]
    return [relevant for _, _, relevant in sorted(numbered, reverse=True)]


def average_precision(judgements):
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
            "mrr": mean([1 / (judgements.index(True) + 1) for judgements in counted]),
            "ranked_groups": len(counted),
        },
        abs=1e-14,
    )
    assert all(type(value) is float for value in ours.values())


@pytest.mark.parametrize("seed", range(5))
def test_map_without_ties_is_scikit_learns_mean(seed):
    random = np.random.default_rng(seed)
    groups = random.integers(0, 6, size=80)
    relevant = random.random(80) < 0.4
    scores = random.permutation(80) / 80
    expected = [
        sklearn.metrics.average_precision_score(relevant[groups == group], scores[groups == group])
        for group in range(6)
        if relevant[groups == group].any()
    ]
    ours = ranking_metrics([f"question {group}" for group in groups], relevant.tolist(), scores.tolist())
    assert ours["map"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert ours["ranked_groups"] == len(expected)


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

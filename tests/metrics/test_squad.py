"""SQuAD scores: against the rules in plain Python on random answers, and by hand where the scripts have quirks."""

from math import inf, isfinite, nextafter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_tasks.errors import DataError
from bert_tasks.metrics.squad import (
    answer_scores,
    normalize_answer,
    squad_v1_metrics,
    squad_v2_metrics,
    tune_null_threshold,
)
from support.span_reference import plain_exact, plain_f1, plain_normalized, plain_v1, plain_v2

quick = settings(max_examples=50, deadline=None, database=None)
few = settings(max_examples=30, deadline=None, database=None)
# Words, articles, punctuation of ASCII and not, letters that change under lower(), white space of many kinds.
PIECES = (
    "ferry",
    "Ferry",
    "seven",
    "a",
    "An",
    "THE",
    "the",
    "theatre",
    ".",
    "'",
    "—",
    "«",
    "é",
    "e\u0301",
    "İ",
    "2",
    "_",
)
GAPS = (" ", " ", "", "  ", "\n", "\u00a0")
Text = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(GAPS)), max_size=5).map(
    lambda parts: "".join(piece + gap for piece, gap in parts)
)
# Some are equal, some have 0.1's rounding, and both zeros are there.
Odds = st.one_of(st.sampled_from((-1.0, -0.0, 0.0, 0.1, 0.3, 1.0)), st.floats(-5, 5))


@st.composite
def answered(
    draw: st.DrawFn, *, fewest: int, odds: st.SearchStrategy[float] = Odds
) -> tuple[list[list[str]], list[str], list[float]]:
    """Golds (at least so many each), predictions that often are one of them, and null odds."""
    labels = draw(st.lists(st.lists(Text, min_size=fewest, max_size=3), min_size=1, max_size=8))
    predictions = [
        draw(st.one_of(Text, st.sampled_from(texts)) if texts else st.one_of(Text, st.just(""))) for texts in labels
    ]
    return labels, predictions, draw(st.lists(odds, min_size=len(labels), max_size=len(labels)))


def exact_score(label: str, prediction: str) -> float:
    return answer_scores([[label]], [prediction], version_2=True).exact[0]


def f1_score(label: str, prediction: str) -> float:
    return answer_scores([[label]], [prediction], version_2=True).f1[0]


class TestPlainRules:
    @quick
    @given(Text | st.text(max_size=12))
    @example("a\u0301 the\u2014an, THE_end; a.n 'a' theA")
    def test_normalization(self, text: str) -> None:
        assert normalize_answer(text) == plain_normalized(text)

    @quick
    @given(label=Text, prediction=Text)
    def test_two_texts(self, label: str, prediction: str) -> None:
        assert exact_score(label, prediction) == plain_exact(label, prediction)
        assert f1_score(label, prediction) == plain_f1(label, prediction)

    @few
    @given(answered(fewest=1))
    def test_first_version(self, case: tuple[list[list[str]], list[str], list[float]]) -> None:
        labels, predictions, _ = case
        assert squad_v1_metrics(labels, predictions) == plain_v1(labels, predictions)

    @few
    @given(case=answered(fewest=0))
    def test_second_version(self, case: tuple[list[list[str]], list[str], list[float]]) -> None:
        labels, predictions, odds = case
        for null_odds in (odds, None):
            metrics = squad_v2_metrics(labels, predictions, null_odds)
            expected = plain_v2(labels, predictions, null_odds, 0.0)
            assert metrics == expected
            assert list(metrics) == list(expected)

    @quick
    @given(case=answered(fewest=0, odds=Odds | st.sampled_from((-inf, inf, nextafter(1.0, 2.0)))), other=Odds)
    @example(case=([[], ["x"]], ["z", "no"], [-5.0, -4.0]), other=-6.0)  # no answer is best, and 0.0 answers both
    @example(case=([["x"], [], []], ["x", "y", "z"], [1.0, 1.0, 1.0]), other=0.0)  # no threshold parts the three
    @example(case=([["x"], []], ["x", "z"], [1.0, nextafter(1.0, 2.0)]), other=1.0)
    def test_tuned_threshold(self, case: tuple[list[list[str]], list[str], list[float]], other: float) -> None:
        """The metrics at the tuned threshold are at least those at any threshold there is."""
        labels, predictions, odds = case
        finite = [value for value in odds if isfinite(value)]
        ends = [min(finite, default=0.0) - 1, max(finite, default=0.0) + 1]

        def f1(threshold: float) -> float:
            return plain_v2(labels, predictions, odds, threshold)["f1"]

        fitted_fields = tune_null_threshold(labels, predictions, odds)
        assert isfinite(fitted_fields)
        assert f1(fitted_fields) >= max(map(f1, [other, *finite, *ends])) - 1e-9


class TestFirstVersion:
    def test_questions_without_gold_are_refused(self) -> None:
        with pytest.raises(
            DataError, match=r"question 1 \(of 2, from 0\) has no answer in the data, .* use the SQuAD 2.0"
        ):
            squad_v1_metrics([["x"], []], ["x", "x"])

    def test_sums_without_compensation(self) -> None:
        """0.1 ten times and the like: math.fsum, or sum() of newer Pythons, would give another last digit."""
        labels = [["x " * 9 + "y"]] * 10
        each = f1_score(labels[0][0], "y")
        total = 0.0
        for _ in labels:
            total += each
        assert total != 10 * each
        assert squad_v1_metrics(labels, ["y"] * 10)["f1"] == 100.0 * total / 10


class TestSecondVersion:
    def test_golds_empty_once_normalized_are_not_compared(self) -> None:
        assert squad_v2_metrics([["the", "boat"]], ["a"], None)["exact"] == 0.0
        metrics = squad_v2_metrics([["the", "?"], ["an"]], ["", "boat"], None)  # nothing is left: "" is right
        assert (metrics["HasAns_exact"], metrics["HasAns_total"]) == (50.0, 2)
        # Yet such a question has an answer, so blanking its prediction is wrong.
        assert squad_v2_metrics([["the"]], [""], [1.0])["exact"] == 0.0


class TestThresholds:
    def test_the_smallest_of_equally_good_thresholds(self) -> None:
        labels, predictions, odds = [["x"], ["y"], []], ["x", "no", ""], [-3.0, -1.0, 2.0]
        assert tune_null_threshold(labels, predictions, odds) == -2.0


@pytest.mark.parametrize(
    ("labels", "predictions", "odds", "message"),
    [
        ([], [], [], "there is no question, but SQuAD metrics need at least one"),
        ([["x"]], ["x"], [float("nan")], "null odds hold nan, .* Look for nan in the model's logits"),
    ],
)
def test_input_without_a_score(
    labels: list[list[str]], predictions: list[str], odds: list[float], message: str
) -> None:
    for score in (squad_v2_metrics, tune_null_threshold):
        with pytest.raises(DataError, match=message):
            score(labels, predictions, odds)
    with pytest.raises(DataError, match="there is no question"):
        squad_v1_metrics([], [])

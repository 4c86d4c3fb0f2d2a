"""The pure metrics against scikit-learn and scipy, on random and degenerate inputs."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bert_tasks.errors import DataError
from bert_tasks.metrics import classification

quick = settings(max_examples=30, deadline=None, database=None)


@st.composite
def class_pairs(draw):
    """Two columns of classes out of 1 to 5; few classes and rows make missing classes common."""
    classes = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 30))
    column = st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)
    return classes, draw(column), draw(column)


@st.composite
def number_pairs(draw):
    rows = draw(st.integers(2, 30))
    few = st.integers(-3, 3).map(float)
    many = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
    column = st.lists(draw(st.sampled_from([few, many])), min_size=rows, max_size=rows)
    return draw(column), draw(column)


@st.composite
def label_matrices(draw):
    shape = (draw(st.integers(1, 25)), draw(st.integers(2, 4)))
    return draw(arrays(np.int64, shape, elements=st.integers(0, 1))), draw(
        arrays(np.int64, shape, elements=st.integers(0, 1))
    )


@quick
@given(class_pairs())
def test_single_label_scores_equal_scikit_learn(case):
    classes, labels, predictions = case
    names = [f"c{index}" for index in range(classes)]
    ours = classification.classification_metrics(labels, predictions, names)
    precision, recall, f1, support = sklearn.metrics.precision_recall_fscore_support(
        labels, predictions, labels=range(classes), zero_division=0
    )
    macro = sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(labels, predictions),
        "f1": f1[1] if classes == 2 else macro,
        "macro_f1": macro,
        "matthews_correlation": ours["matthews_correlation"],  # has a test of its own
    }
    for index, name in enumerate(names):
        expected |= {
            f"f1_{name}": f1[index],
            f"precision_{name}": precision[index],
            f"recall_{name}": recall[index],
            f"support_{name}": support[index],
        }
    assert ours == pytest.approx(expected, abs=1e-14)
    assert all(type(value) is float for value in ours.values())


@quick
@given(class_pairs())
def test_matthews_correlation_equals_scikit_learn(case):
    _, labels, predictions = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn remarks on a single class
        expected = sklearn.metrics.matthews_corrcoef(labels, predictions)
    assert matthews_correlation(labels, predictions) == pytest.approx(expected, abs=1e-12)


def matthews_correlation(labels, predictions):
    names = [str(number) for number in range(5)]
    return classification.classification_metrics(labels, predictions, names)["matthews_correlation"]


@pytest.mark.parametrize("classes", [5, 8, 40, 300])
def test_macro_f1_equals_scikit_learns_to_the_last_digit_with_classes_that_never_occur(classes):
    draw = np.random.default_rng(classes)
    labels, predictions = draw.integers(0, classes, size=(2, classes))
    names = [str(number) for number in range(2 * classes)]
    score = classification.classification_metrics(labels, predictions, names)["macro_f1"]
    assert score == sklearn.metrics.f1_score(labels, predictions, average="macro")


def test_matthews_correlation_of_many_rows_does_not_overflow():
    labels = np.tile([0, 1], 100_000)
    predictions = np.where(np.arange(200_000) % 10 == 0, 1 - labels, labels)
    expected = sklearn.metrics.matthews_corrcoef(labels, predictions)
    assert matthews_correlation(labels, predictions) == pytest.approx(expected, abs=1e-12)


@quick
@given(number_pairs())
def test_correlations_equal_scipy(case):
    labels, predictions = case
    ours = classification.regression_metrics(labels, predictions)
    if len(set(labels)) == 1 or len(set(predictions)) == 1:
        assert math.isnan(ours["pearson"])
        assert math.isnan(ours["spearmanr"])
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy remarks on nearly constant columns
        expected = scipy.stats.pearsonr(labels, predictions).statistic
    assert ours["pearson"] == pytest.approx(expected, abs=1e-9)
    ranked = scipy.stats.spearmanr(labels, predictions).statistic
    assert ours["spearmanr"] == pytest.approx(ranked, abs=1e-12)


@pytest.mark.parametrize("correlation", [classification.pearson, classification.spearmanr])
@pytest.mark.parametrize("column", [[2.0, 2.0, 2.0], [1.0, math.nan, 3.0], [1.0, math.inf, 3.0]])
def test_correlation_without_a_value_is_nan(correlation, column):
    assert math.isnan(correlation(column, [1.0, 2.0, 3.0]))
    assert math.isnan(correlation([1.0, 2.0, 3.0], column))


@quick
@given(label_matrices())
def test_multilabel_scores_equal_scikit_learn(case):
    labels, predictions = case
    names = [f"c{index}" for index in range(labels.shape[1])]
    ours = classification.multilabel_metrics(labels, predictions, names)
    scores = {
        average: sklearn.metrics.f1_score(labels, predictions, average=average, zero_division=0)
        for average in ("macro", "micro")
    }
    precision, recall, f1, support = sklearn.metrics.precision_recall_fscore_support(
        labels, predictions, zero_division=0
    )
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(labels, predictions),
        "f1": scores["macro"],
        "macro_f1": scores["macro"],
        "micro_f1": scores["micro"],
    }
    for index, name in enumerate(names):
        expected |= {
            f"f1_{name}": f1[index],
            f"precision_{name}": precision[index],
            f"recall_{name}": recall[index],
            f"support_{name}": support[index],
        }
    assert ours == pytest.approx(expected, abs=1e-14)


@quick
@given(st.data())
def test_tuned_thresholds_reach_the_best_f1_of_all(data):
    rows = data.draw(st.integers(1, 12))
    labels = data.draw(arrays(np.int64, (rows, 2), elements=st.integers(0, 1)))
    grid = st.integers(0, 20).map(lambda value: value / 20)
    probabilities = data.draw(arrays(np.float64, (rows, 2), elements=grid))
    thresholds = classification.tune_thresholds(labels, probabilities)
    for label, threshold in enumerate(thresholds):
        positives, scores = labels[:, label], probabilities[:, label]

        def reached(at, positives=positives, scores=scores):
            guesses = scores >= at
            either = int(positives.sum() + guesses.sum())
            return 2 * int((positives * guesses).sum()) / either if either else 0.0

        everywhere = [reached(at) for at in np.linspace(0, 1.05, 85)]
        assert reached(threshold) == max(everywhere)
        if reached(0.5) == max(everywhere):
            assert threshold == 0.5


@pytest.mark.parametrize("low", [0.0, 5e-324, 0.1, 0.3, math.nextafter(0.3, 1), 0.7, math.nextafter(0.7, 1)])
def test_neighbouring_floats_are_told_apart_by_tuning(low):
    scores = np.array([[low], [math.nextafter(low, 1)]])
    (threshold,) = classification.tune_thresholds([[0], [1]], scores)
    assert (scores >= threshold).ravel().tolist() == [False, True]


def test_equal_thresholds_are_settled_towards_one_half():
    probabilities = [[0.9, 0.1, 0.6], [0.8, 0.05, 0.2], [0.7, 0.02, 0.4]]
    labels = [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert classification.tune_thresholds(labels, probabilities) == pytest.approx((0.75, 0.075, 0.5))
    tied = [[0.3], [0.6], [0.6], [0.9]]  # F1 is 2/3 with the 0.9 alone and with all rows
    assert classification.tune_thresholds([[1], [0], [0], [1]], tied) == pytest.approx((0.75,))


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.1])
def test_tuning_refuses_what_is_no_probability(bad):
    with pytest.raises(DataError, match="between 0 and 1"):
        classification.tune_thresholds([[1], [0]], [[0.5], [bad]])


def test_no_rows_are_an_error():
    with pytest.raises(DataError, match="no row has a label"):
        classification.classification_metrics([], [], ["a", "b"])


@pytest.mark.slow
def test_the_pure_functions_load_no_library_but_numpy():
    code = (
        "import sys, bert_tasks.metrics.classification as m;"
        "m.regression_metrics([1, 2], [1, 3]);"
        "sys.exit(any(n in sys.modules for n in ('datasets', 'torch', 'sklearn', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Two or more runs side by side, with results made by hand: numbers, directions, tests and their correction."""

from types import SimpleNamespace

import pytest
from scipy import stats

from bert_tasks.metrics.formulas import class_measure, multilabel_measure
from bert_tasks.report.comparison import MCNEMAR, RANDOMISATION, compared
from bert_tasks.report.results import Results
from bert_tasks.tasks.report_data import ReportSections, RowResult
from bert_tasks.tasks.token_classification.task import TokenClassification, TokenPrediction

LABELS = ["a", "b"] * 30


def with_mistakes(*places):
    """Predictions for the rows, wrong at these places."""
    return [{"a": "b", "b": "a"}[label] if place in places else label for place, label in enumerate(LABELS)]


def results_of(predictions, *, names=("a", "b"), metric="accuracy"):
    rows = [
        RowResult(row={}, label=label, prediction=prediction, score=0.5, is_correct=label == prediction)
        for label, prediction in zip(LABELS, predictions, strict=True)
    ]
    measure = class_measure(LABELS, predictions, names)
    return Results.of(ReportSections(measure=measure, unit="rows", headline=(metric,), results=tuple(rows)))


def compare(*results):
    names = [SimpleNamespace(name=f"run-{number}") for number in range(len(results))]
    (found,) = compared(names, [{"": one} for one in results])
    return found


def test_the_second_run_is_compared_with_the_first():
    worse, better = results_of(with_mistakes(*range(12))), results_of(with_mistakes(0, 1, 50))
    found = compare(worse, better)
    assert (found.test, found.metric, found.rows, found.unit) == (MCNEMAR, "accuracy", 60, "rows")
    first, second = found.runs
    assert (first.value.value, second.value.value) == (0.8, 0.95)
    assert (first.difference, first.p) == (None, None)
    assert (second.only_first, second.only_this) == (1, 10)
    assert second.p == pytest.approx(stats.binomtest(1, 11).pvalue)
    assert second.difference.value == pytest.approx(0.15)
    assert 0 < second.difference.low < 0.15 < second.difference.high
    (_, back) = compare(better, worse).runs
    assert (back.only_first, back.only_this, back.p) == (10, 1, second.p)
    assert back.difference.value == pytest.approx(-0.15)
    assert back.difference.high < 0


def test_other_metrics_are_compared_by_swapping():
    found = compare(*(results_of(with_mistakes(*wrong), metric="macro_f1") for wrong in (range(12), (0, 1, 50))))
    assert found.test == RANDOMISATION
    one = found.runs[1]
    assert one.difference.value == pytest.approx(found.runs[1].value.value - found.runs[0].value.value)
    assert one.difference.low > 0
    assert one.p == pytest.approx(stats.binomtest(1, 11).pvalue, abs=0.006)  # nearly the accuracy
    assert (one.draws, one.only_first, one.no_p) == (10_000, None, "")
    assert f"p {one.p:.3g} of 10,000 draws against run-0" in found.lines()[2]


def test_p_values_are_adjusted_for_their_number_and_keep_their_runs():
    wrong = [range(12), (0, 1, 50), range(11), ()]
    runs = compare(*(results_of(with_mistakes(*places)) for places in wrong)).runs
    p = [one.p for one in runs[1:]]
    assert p[2] < p[0] < p[1] == 1.0
    assert [one.p_adjusted for one in runs] == [None, pytest.approx(2 * p[0]), 1.0, pytest.approx(3 * p[2])]


def test_runs_with_other_labels_have_no_p_and_it_is_said_why():
    one, other = with_mistakes(*range(12)), with_mistakes(0, 1, 50)
    first = results_of(one, metric="macro_f1")
    found = compare(first, results_of(other, names=("a", "b", "c")), results_of(other))
    assert [run.p is None for run in found.runs] == [True, True, False]
    assert found.runs[1].difference.value == pytest.approx(found.runs[2].difference.value)
    assert found.runs[2].p_adjusted == found.runs[2].p
    assert found.runs[1].no_p == "its labels are not those of the first run"
    assert found.lines()[2].endswith("no p: its labels are not those of the first run")
    measure = multilabel_measure([[label] for label in LABELS], [[label] for label in other], ("a", "b"))
    sections = ReportSections(measure=measure, unit="rows", headline=("f1",), results=())
    missing = compare(results_of(one), Results.of(sections)).runs[1]
    assert (missing.value.value, missing.p, missing.no_p) == (None, None, "it has no accuracy")


def test_runs_that_predict_other_types_are_compared():
    task = TokenClassification(labels=("O", "B-X", "B-Y", "B-Z", "B-NEVER"))
    labels = [("B-X", "O", "O"), ("O", "B-Y", "O"), ("B-X", "B-Y", "O")] * 8
    straying = [("B-X", "B-Z", "O")] * 24
    first, second = (tagged(task, labels, predictions) for predictions in (straying, labels))
    assert [row.name for row in first.table] == ["X", "Y", "Z"]
    assert [(row.name, row.count) for row in second.table] == [("X", 16), ("Y", 16)]
    assert (first.left_out, second.left_out) == (0, 0)
    (_, one) = compare(first, second).runs
    assert (one.p, one.no_p) == (1 / 10_001, "")
    assert one.difference.value == pytest.approx(1 - 2 * 16 / (48 + 32))


def tagged(task, labels, predictions):
    words = ("one", "two", "three")
    found = [TokenPrediction(words=words, tags=tags, scores=(0.9,) * 3, entities=()) for tags in predictions]
    rows = [{"words": list(words), "tags": list(tags)} for tags in labels]
    return Results.of(task.report_sections(found, rows))

"""Two or more runs side by side, with results made by hand: numbers, directions and tests."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bert_tasks.metrics.formulas import class_measure, multilabel_measure, replaced_token_measure
from bert_tasks.outputs.sections import ReportSections, RowResult
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.outputs.vocabulary import Candidate, MaskedToken, MaskPrediction
from bert_tasks.report.comparison import compare as compare_runs
from bert_tasks.report.results import Results
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.tasks.token_classification import TokenClassification

LABELS = ["a", "b"] * 30


def with_mistakes(*places):
    """Predictions for the rows, wrong at these places."""
    return [{"a": "b", "b": "a"}[label] if index in places else label for index, label in enumerate(LABELS)]


def results_of(predictions, *, names=("a", "b"), metric="accuracy"):
    rows = [
        RowResult(row={}, label=label, prediction=prediction, score=0.5, is_correct=label == prediction)
        for label, prediction in zip(LABELS, predictions, strict=True)
    ]
    measure = class_measure(LABELS, predictions, names)
    sections = ReportSections(measure=measure, unit="rows", headline=(metric,), results=tuple(rows))
    return Results.of(sections)


def compare(*results):
    names = [SimpleNamespace(name=f"run-{number}") for number in range(len(results))]
    (comparison,) = compare_runs(names, [{"": result} for result in results])
    return comparison


def test_the_second_run_is_compared_with_the_first():
    worse, better = results_of(with_mistakes(*range(12))), results_of(with_mistakes(0, 1, 50))
    comparison = compare(worse, better)
    assert (comparison.metric, comparison.rows, comparison.unit) == ("accuracy", 60, "rows")
    first, second = comparison.runs
    assert (first.value.value, second.value.value) == (0.8, 0.95)
    assert (first.difference, first.p) == (None, None)
    assert second.p == pytest.approx(stats.binomtest(1, 11).pvalue, abs=0.006)
    assert second.difference.value == pytest.approx(0.15)
    assert 0 < second.difference.low < 0.15 < second.difference.high
    (_, back) = compare(better, worse).runs
    assert back.p == second.p
    assert back.difference.value == pytest.approx(-0.15)
    assert back.difference.high < 0


def test_draws_are_said():
    comparison = compare(*(results_of(with_mistakes(*wrong), metric="macro_f1") for wrong in (range(12), (0, 1, 50))))
    second = comparison.runs[1]
    assert second.difference.value == pytest.approx(comparison.runs[1].value.value - comparison.runs[0].value.value)
    assert second.difference.low > 0
    assert second.p == pytest.approx(stats.binomtest(1, 11).pvalue, abs=0.006)  # nearly the accuracy
    assert (second.draws, second.no_p) == (10_000, "")
    assert f"p {second.p:.3g} of 10,000 draws against run-0" in comparison.lines()[2]


def test_runs_with_other_labels_have_no_p_and_it_is_said_why():
    mistakes, other = with_mistakes(*range(12)), with_mistakes(0, 1, 50)
    first = results_of(mistakes, metric="macro_f1")
    comparison = compare(first, results_of(other, names=("a", "b", "c")), results_of(other))
    assert [run.p is None for run in comparison.runs] == [True, True, False]
    assert comparison.runs[1].difference.value == pytest.approx(comparison.runs[2].difference.value)
    assert comparison.runs[1].no_p == "its labels differ from the labels of the first run"
    assert comparison.lines()[2].endswith("no p-value because its labels differ from the labels of the first run")
    measure = multilabel_measure([[label] for label in LABELS], [[label] for label in other], ("a", "b"))
    sections = ReportSections(measure=measure, unit="rows", headline=("f1",), results=())
    missing = compare(results_of(mistakes), Results.of(sections)).runs[1]
    assert (missing.value.value, missing.p, missing.no_p) == (None, None, "it has no accuracy")


def test_runs_that_predict_other_types_are_compared():
    task = TokenClassification.of(labels=("O", "B-X", "B-Y", "B-Z", "B-NEVER"))
    labels = [("B-X", "O", "O"), ("O", "B-Y", "O"), ("B-X", "B-Y", "O")] * 8
    straying = [("B-X", "B-Z", "O")] * 24
    first, second = (tagged(task, labels, predictions) for predictions in (straying, labels))
    assert [row.name for row in first.table] == ["X", "Y", "Z"]
    assert [(row.name, row.count) for row in second.table] == [("X", 16), ("Y", 16)]
    assert (first.left_out, second.left_out) == (0, 0)
    (_, run) = compare(first, second).runs
    assert (run.p, run.no_p) == (1 / 10_001, "")
    assert run.difference.value == pytest.approx(1 - 2 * 16 / (48 + 32))


def tagged(task, labels, predictions):
    words = ("one", "two", "three")
    answers = [TokenPrediction(words=words, tags=tags, scores=(0.9,) * 3, entities=()) for tags in predictions]
    rows = [{"words": list(words), "tags": list(tags)} for tags in labels]
    return Results.of(task.output.report(answers, rows, task.texts))


def test_scores_in_other_bins_are_not_exchanged():
    """The area under the curve is resampled in bins of own scores, and each generator replaces other tokens."""
    draw = np.random.default_rng(5)
    replaced = draw.random(40) < 0.4
    scores = [draw.normal(size=40) + replaced for _ in range(2)]
    measures = [
        replaced_token_measure([4] * 10, model_scores, replaced, replaced) for model_scores in (*scores, scores[0])
    ]
    sections = [ReportSections(measure=measure, unit="texts", headline=("auc",), results=()) for measure in measures]
    _, other, same = compare(*map(Results.of, sections)).runs
    assert (other.p, other.no_p) == (None, "its labels differ from the labels of the first run")
    assert (same.p, same.difference.value) == (1.0, 0.0)


def test_the_accuracy_of_masked_tokens_is_not_that_of_texts():
    """No text is all correct, so a test of whole texts would see no difference."""
    task, rows = MaskedLanguageModeling.of(max_length=24), [{"text": "x"}] * 6
    counts = [[0, 1, 0, 0, 1, 0], [2, 2, 1, 2, 1, 2]]

    def masks(correct):
        tokens = [0] * correct + [1] * (3 - correct)
        return tuple(
            MaskedToken(candidates=(Candidate(score=0.5, token=token, token_str="", sequence=""),), label=0)
            for token in tokens
        )

    predictions = [[MaskPrediction(masks=(), measured=masks(count)) for count in model] for model in counts]
    comparison = compare(
        *(
            Results.of(task.output.report(model_predictions, rows, task.texts), first="accuracy")
            for model_predictions in predictions
        )
    )
    assert comparison.metric == "accuracy"
    gaps = [b - a for a, b in zip(*counts, strict=True)]
    swapped = [
        abs(sum(sign * gap for sign, gap in zip(signs, gaps, strict=True))) for signs in product((1, -1), repeat=6)
    ]
    exact = sum(difference >= sum(gaps) for difference in swapped) / len(swapped)
    assert comparison.runs[1].p == pytest.approx(exact, abs=0.01)

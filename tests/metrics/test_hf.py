"""The ``evaluate.Metric`` classes: offline, keyed as upstream, equal to the pure functions."""

import evaluate
import pytest

from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics import classification, hf, squad

REFERENCES = [0, 1, 2, 1, 0, 2, 2]
PREDICTIONS = [0, 2, 2, 1, 1, 2, 0]


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "metrics")


@pytest.mark.parametrize(
    ("metric", "options", "expected"),
    [
        (hf.Accuracy, {}, {"accuracy": 4 / 7}),
        (hf.F1, {}, {"f1": classification.class_f1(REFERENCES, PREDICTIONS)}),
        (hf.F1, {"pos_label": 2}, {"f1": classification.class_f1(REFERENCES, PREDICTIONS, positive=2)}),
        (hf.F1, {"average": "macro"}, {"f1": classification.macro_f1(REFERENCES, PREDICTIONS)}),
        (hf.F1, {"average": "micro"}, {"f1": 4 / 7}),
        (
            hf.MatthewsCorrelation,
            {},
            {"matthews_correlation": classification.matthews_correlation(REFERENCES, PREDICTIONS)},
        ),
        (hf.Pearson, {}, {"pearson": classification.pearson(REFERENCES, PREDICTIONS)}),
        (hf.Spearman, {}, {"spearmanr": classification.spearmanr(REFERENCES, PREDICTIONS)}),
    ],
)
def test_metric_equals_the_pure_function(metric, options, expected, cache):
    computed = metric(cache_dir=cache).compute(predictions=PREDICTIONS, references=REFERENCES, **options)
    assert computed == expected


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_multilabel_metric_takes_rows_of_labels(average, cache):
    references, predictions = [[0, 1], [1, 1], [0, 0]], [[0, 1], [1, 0], [1, 0]]
    expected = {
        "macro": classification.multilabel_macro_f1(references, predictions),
        "micro": classification.multilabel_micro_f1(references, predictions),
    }
    metric = hf.MultilabelF1(cache_dir=cache)
    computed = metric.compute(predictions=predictions, references=references, average=average)
    assert computed == {"f1": expected[average]}


def test_rows_added_in_batches_and_metrics_combined(cache):
    both = evaluate.combine([hf.Accuracy(cache_dir=cache), hf.MatthewsCorrelation(cache_dir=cache)])
    both.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3])
    both.add_batch(predictions=PREDICTIONS[3:], references=REFERENCES[3:])
    assert both.compute() == {
        "accuracy": 4 / 7,
        "matthews_correlation": classification.matthews_correlation(REFERENCES, PREDICTIONS),
    }


@pytest.mark.parametrize("metric", [hf.F1, hf.MultilabelF1])
def test_unknown_average_is_refused(metric, cache):
    rows = [[0, 1]] if metric is hf.MultilabelF1 else [0]
    with pytest.raises(UsageError, match="average='weighted'"):
        metric(cache_dir=cache).compute(predictions=rows, references=rows, average="weighted")


GOLD = [
    {"id": "a", "answers": {"text": ["Denver Broncos", "Broncos"], "answer_start": [0, 7]}},
    {"id": "b", "answers": {"text": ["1976"], "answer_start": [3]}},
    {"id": "c", "answers": {"text": [], "answer_start": []}},
]
TEXTS, ODDS = ["the Broncos", "in 1976", "nobody"], [0.25, 0.5, 0.75]


def test_squad_metrics_take_what_evaluate_takes_in_any_order(cache):
    given = [{"id": question["id"], "prediction_text": text} for question, text in zip(GOLD, TEXTS, strict=True)]
    golds = [question["answers"]["text"] for question in GOLD]
    first = hf.Squad(cache_dir=cache).compute(predictions=given[1::-1], references=GOLD[:2])
    assert first == squad.squad_v1_metrics(golds[:2], TEXTS[:2])
    with_odds = [answer | {"no_answer_probability": odds} for answer, odds in zip(given, ODDS, strict=True)]
    for options in ({}, {"no_answer_threshold": 0.6}):
        second = hf.SquadV2(cache_dir=cache).compute(predictions=with_odds[::-1], references=GOLD, **options)
        assert second == squad.squad_v2_metrics(golds, TEXTS, ODDS, threshold=options.get("no_answer_threshold", 1.0))
    assert second["NoAns_exact"] == 100.0


@pytest.mark.parametrize("ids", ["aa", "ac"])
def test_squad_predictions_need_the_questions_ids(ids, cache):
    given = [{"id": name, "prediction_text": "x"} for name in ids]
    with pytest.raises(DataError, match="expected one prediction for the id of each question"):
        hf.Squad(cache_dir=cache).compute(predictions=given, references=GOLD[:2])

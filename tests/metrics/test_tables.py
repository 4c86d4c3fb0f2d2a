"""Metrics for people: each number once, and one row for each class with its support."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.metrics.classification import classification_metrics, multilabel_metrics
from bert_tasks.metrics.squad import squad_v2_metrics
from bert_tasks.metrics.tables import MetricTable, format_number, metric_table
from bert_tasks.metrics.tagging import tagging_metrics
from bert_tasks.model.heads import metric_table as metric_table_of_heads
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification

# Labels that look like the names of other metrics.
LABELS = ("f1", "macro_f1", "a_number", "support", "", "loss")


def check_rows(table, metrics, support, *, key="{1}_{0}"):
    """Every number of a class is in its row, with its support, and nowhere else."""
    assert table.columns == ("precision", "recall", "f1")
    for row in table.rows:
        assert row.scores == tuple(metrics[key.format(row.name, score)] for score in table.columns)
        assert row.support == support.get(row.name, 0)
        assert not {key.format(row.name, score) for score in table.columns} & table.overall.keys()


@pytest.mark.parametrize("task_class", [SequenceClassification, PairClassification])
@given(st.data())
def test_classes(task_class, data):
    labels = LABELS[: data.draw(st.integers(2, len(LABELS)))]
    numbers = st.integers(0, len(labels) - 1)
    true = data.draw(st.lists(numbers, min_size=1, max_size=20))
    predictions = data.draw(st.lists(numbers, min_size=len(true), max_size=len(true)))
    metrics = {"loss": 0.5, **classification_metrics(true, predictions, labels)}
    table = task_class.of(labels=labels).output.metric_table(metrics)
    assert [row.name for row in table.rows] == list(labels)
    assert table.word == "class"
    check_rows(table, metrics, Counter(labels[number] for number in true))
    overall = {"loss", "accuracy", "macro_f1", "matthews_correlation"}
    assert table.overall.keys() == (overall | {"f1"} if len(labels) == 2 else overall)


@pytest.mark.parametrize(("labels", "title"), [(("calm", "glad"), "f1 (glad)"), (("calm", "a\tb"), "f1 ('a\\tb')")])
def test_f1_of_one_class_names_the_class_in_print_only(labels, title):
    metrics = classification_metrics([0, 1, 1], [0, 1, 0], labels)
    table = SequenceClassification.of(labels=labels).output.metric_table(metrics)
    assert "f1" in table.overall
    assert [line.partition("  ")[0] for line in table.lines("dev") if "/f1" in line] == [f"dev/{title}"]
    several = metric_table_of_heads(
        {"mood": SequenceClassification.of(labels=labels), "tags": TokenClassification.of(labels=("O", "B-X"))},
        {f"mood.{name}": value for name, value in metrics.items()},
    )
    assert "mood.f1" in several.overall
    assert several.title("mood.f1") == f"mood.{title}"
    three = SequenceClassification.of(labels=(*labels, "sad")).output
    assert three.metric_table(metrics).title("f1") == "f1"


@given(st.data())
def test_several_labels(data):
    labels = LABELS[: data.draw(st.integers(1, len(LABELS)))]
    rows = st.lists(st.lists(st.integers(0, 1), min_size=len(labels), max_size=len(labels)), min_size=1, max_size=20)
    true = data.draw(rows)
    predictions = [data.draw(st.permutations(row)) for row in true]
    metrics = multilabel_metrics(true, predictions, labels)
    task = SequenceClassification.of(problem_type="multi_label_classification", labels=labels)
    table = task.output.metric_table({**metrics, "untuned_f1": 0.25})
    assert table.word == "label"
    check_rows(table, metrics, dict(zip(labels, map(sum, zip(*true, strict=True)), strict=True)))
    assert table.overall.keys() == {"accuracy", "f1", "micro_f1", "untuned_f1"}


@pytest.mark.parametrize("raw", [True, False])
def test_tags(raw):
    spelt = ("N", "V", "A_number") if raw else ("B-N", "B-V", "B-A_number")
    true, predictions = [[spelt[0], spelt[1], spelt[2]], [spelt[0]]], [[spelt[0], spelt[0], spelt[2]], [spelt[1]]]
    metrics = tagging_metrics(true, predictions, raw=raw)
    table = TokenClassification.of(labels=spelt if raw else ("O", *spelt)).output.metric_table(metrics)
    assert table.word == ("tag" if raw else "type")
    check_rows(table, metrics, {"N": 2, "V": 1, "A_number": 1}, key="{0}_{1}")
    assert {row.name for row in table.rows} == {"N", "V", "A_number"}
    assert not any(name.endswith("_number") for name in table.overall)


def test_questions_with_and_without_an_answer():
    task = SpanExtraction.of(version_2_with_negative=True)
    metrics = squad_v2_metrics([["cat"], [], ["dog"]], ["cat", "", "cow"], None)
    table = task.output.metric_table(metrics)
    assert [(row.name, row.scores, row.support) for row in table.rows] == [
        ("HasAns", (50.0, 50.0), 2),
        ("NoAns", (100.0, 100.0), 1),
    ]
    assert table.overall.keys() == {"exact", "f1", "total"}
    one_kind = task.output.metric_table(squad_v2_metrics([["cat"], ["dog"]], ["cat", "cow"], None))
    assert (one_kind.rows, one_kind.overall.keys()) == ((), {"exact", "f1", "total"})  # HasAns_f1 would be f1


def test_the_lines_of_a_table_are_aligned_with_a_column_for_the_support() -> None:
    metrics = {
        "accuracy": 0.75,
        "macro_f1": 0.5,
        **{"precision_calm": 1.0, "recall_calm": 0.625, "f1_calm": 0.5, "support_calm": 30.0},
        **{"precision_a\tb": 0.0, "recall_a\tb": 0.0, "f1_a\tb": 0.0, "support_a\tb": 4.0},
    }
    table = metric_table(metrics, ["calm", "a\tb", "absent"], lambda name, score: f"{score}_{name}", word="label")
    assert table.lines("dev") == [
        "dev/accuracy  0.7500",
        "dev/macro_f1  0.5000",
        "",
        "label   precision  recall      f1  support",
        "calm       1.0000  0.6250  0.5000       30",
        "'a\\tb'     0.0000  0.0000  0.0000        4",
        "",
    ]
    assert table.class_lines("rows")[0].endswith("   f1  rows")
    assert MetricTable(overall={"accuracy": 1.0}).lines() == ["accuracy  1.0000"]
    assert [format_number(number) for number in (None, math.nan, 50.0, 12.5, 0.00001)] == [
        "-",
        "-",
        "50",
        "12.5000",
        "0.0000",
    ]
    assert MetricTable(overall={"accuracy": 1.0}).class_lines() == []

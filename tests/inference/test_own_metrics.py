"""Metrics of one's own: the forms that modules of evaluate take, what may be returned, and what is rejected."""

import json
import sys
from functools import partial
from math import isnan, nan
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bert_tasks import TaskModel, evaluate
from bert_tasks.errors import RecipeError, UsageError
from bert_tasks.inference.own_metrics import OwnMetric, own_metrics
from bert_tasks.outputs.answer import SpanPrediction
from bert_tasks.outputs.choice import ChoicePrediction
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.outputs.label_set import LabelSetPrediction
from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.span_search import Span
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.tasks import (
    MaskedLanguageModeling,
    MultipleChoice,
    PairClassification,
    SequenceClassification,
    SpanExtraction,
    TokenClassification,
)
from support.evaluation_modules import write_module

ALL = ("",)
TEXTS = ["good food", "bad food", "kind staff", "cold soup"]
FUNCTIONS = """
def bias(predictions, references):
    return sum(predictions) / len(predictions) - sum(references) / len(references)

def named(predictions, references):
    return {"mean": sum(references) / len(references), "nested": {"rows": len(predictions)}}

def same(predictions, references):
    return {"accuracy": 1.0}

def raises(predictions, references):
    raise KeyError("no such key")

def text(predictions, references):
    return {"words": "many"}

def nothing(predictions, references):
    return None

def empty(predictions, references):
    return {}

def flag(predictions, references):
    return {"right": True}

def array(predictions, references):
    import numpy
    return {"f1": numpy.zeros(3)}

number = 3
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    """The module ``toy_metrics``, and a home for the caches of evaluate."""
    (tmp_path / "toy_metrics.py").write_text(FUNCTIONS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("toy_metrics", None)


def loaded(source, tasks=ALL):
    (metric,) = own_metrics([source], tasks)
    return metric


def classes(*numbers):
    return [ClassPrediction(label="abc"[number], score=1.0, scores={}) for number in numbers]


def answers(*texts, null_odds=None):
    span = Span(text="", start=0, end=0, score=1.0, start_logit=0.0, end_logit=0.0)
    return [
        SpanPrediction(id=str(n), answer=text, start=0, end=1, score=1.0, null_odds=null_odds, n_best=[], best=span)
        for n, text in enumerate(texts)
    ]


def question(number, *texts, **cells):
    return {"id": f"q{number}", "context": "", "answers": {"text": texts, "answer_start": [0] * len(texts)}, **cells}


# Task, predictions, rows, the module, and the names of the module's numbers that equal the task's of the same name.
CASES = {
    "accuracy": (
        SequenceClassification.of(labels=("a", "b", "c")),
        classes(0, 1, 2, 2),
        [{"label": "a"}, {"label": "b"}, {"label": "a"}, {"label": None}],
        "accuracy",
        {"accuracy"},
    ),
    "glue": (
        PairClassification.of(labels=("a", "b")),
        classes(0, 1, 1, 0),
        [{"label": "a"}, {"label": "b"}, {"label": "a"}, {"label": "b"}],
        "glue:mrpc",
        {"accuracy", "f1"},
    ),
    "numbers": (
        PairClassification.of(problem_type="regression"),
        [NumberPrediction(score=score) for score in (0.5, 1.0, 3.0, 9.0)],
        [{"label": 1.0}, {"label": 2.5}, {"label": 3.0}, {"label": None}],
        "glue:stsb",
        {"pearson"},
    ),
    "ranking": (
        PairClassification.of(problem_type="regression", ranking_loss="lambda"),
        [NumberPrediction(score=score) for score in (0.5, 1.0, 3.0)],
        [{"label": 1, "group": "x"}, {"label": 0, "group": "x"}, {"label": 3, "group": "y"}],
        "glue:stsb",
        {"pearson"},
    ),
    "label set": (
        SequenceClassification.of(labels=("a", "b", "c"), problem_type="multi_label_classification"),
        [LabelSetPrediction(label="a", labels=labels, score=1.0, scores={}) for labels in (("a",), (), ("b", "c"))],
        [{"labels": ["a"]}, {"labels": []}, {"labels": ["b"]}],
        "accuracy:multilabel",
        {"accuracy"},
    ),
    "choice": (
        MultipleChoice.of(),
        [ChoicePrediction(label=label, answer="", score=1.0, scores=()) for label in (0, 1, 2)],
        [{"label": 0}, {"label": 1}, {"label": 0}],
        "accuracy",
        {"accuracy"},
    ),
    "tags": (
        TokenClassification.of(labels=("O", "B-X", "I-X", "B-Y", "I-Y")),
        [
            TokenPrediction(words=(), tags=("B-X", "I-X", "O"), scores=(), entities=()),
            TokenPrediction(words=(), tags=("I-Y", "O", "B-X"), scores=(), entities=()),
        ],
        [{"tags": ["B-X", "I-X", "O"]}, {"tags": ["B-Y", "O", "B-Y"]}],
        "seqeval",
        {"overall_f1", "overall_precision", "overall_recall", "overall_accuracy", "X_f1", "Y_precision", "Y_number"},
    ),
    "tags of another scheme": (
        TokenClassification.of(labels=("O", "S-X", "B-X", "I-X", "E-X")),
        [TokenPrediction(words=(), tags=("B-X", "E-X", "S-X"), scores=(), entities=())],
        [{"tags": ["B-X", "E-X", "S-X"]}],
        "seqeval",
        {"overall_f1", "X_number", "X_f1"},
    ),
    "answer": (
        SpanExtraction.of(),
        answers("the red car", "blue"),
        [question(0, "red car"), question(1, "dark blue", "navy")],
        "squad",
        {"exact_match", "f1"},
    ),
    "answer or none": (
        SpanExtraction.of(version_2_with_negative=True),
        answers("red", "", "no", null_odds=2.0),
        [question(0, "red car"), question(1), question(2)],
        "squad_v2",
        {"exact", "f1", "total"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_of_evaluate_take_what_an_output_gives_and_agree_with_it(tmp_path, case):
    task, predictions, rows, module, names = CASES[case]
    name, _, configuration = module.partition(":")
    path = write_module(tmp_path, name)
    metric = loaded(f"evaluate:{path}:{configuration}" if configuration else f"evaluate:{path}")
    for _ in range(2):  # it can be computed again
        values = metric.values(*task.output.metric_inputs(predictions, rows))
        ours = task.output.metrics(predictions, rows)
        assert values.keys() >= names
        assert {key: values[key] for key in names} == pytest.approx({key: ours[key] for key in names})


def test_the_forms_are_those_of_the_pages_of_evaluate():
    def inputs(case):
        task, predictions, rows, *_ = CASES[case]
        return task.output.metric_inputs(predictions, rows)

    assert inputs("accuracy") == ([0, 1, 2], [0, 1, 0])
    assert inputs("label set") == ([[1, 0, 0], [0, 0, 0], [0, 1, 1]], [[1, 0, 0], [0, 0, 0], [0, 1, 0]])
    assert inputs("tags of another scheme") == ([["B-X", "I-X", "B-X"]], [["B-X", "I-X", "B-X"]])
    predicted, references = inputs("answer or none")
    assert predicted[0] == {"id": "q0", "prediction_text": "red", "no_answer_probability": pytest.approx(0.880797)}
    assert references[1] == {"id": "q1", "answers": {"text": [], "answer_start": []}}
    assert inputs("answer")[0][0] == {"id": "q0", "prediction_text": "the red car"}


def test_questions_without_their_own_ids_have_numbers():
    for ids in (("x", "x"), (None, "x")):
        rows = [question(number, "red", id=name) for number, name in enumerate(ids)]
        predicted, references = SpanExtraction.of().output.metric_inputs(answers("red", "blue"), rows)
        assert [row["id"] for row in predicted] == [row["id"] for row in references] == ["0", "1"]


def test_a_metric_cannot_change_what_the_next_one_gets():
    task, predictions, rows, *_ = CASES["answer"]
    _, references = task.output.metric_inputs(predictions, rows)
    references[0]["answers"]["text"].clear()
    assert rows[0]["answers"]["text"] == ("red car",)


def test_numbers_of_every_library_are_numbers():
    def many(predictions, references):
        return {
            "a": np.float32(0.5),
            "b": np.array(2),
            "c": torch.tensor(0.25),
            "d": float("inf"),
            "e": {"f": 1},
            7: nan,
            8: 10**400,
        }

    values = OwnMetric(name="many", source=many).values([1], [1])
    assert {type(value) for value in values.values()} == {float}
    assert [values[name] for name in ("a", "b", "c", "e_f")] == [0.5, 2.0, 0.25, 1.0]
    assert isnan(values["d"])
    assert isnan(values["7"])
    assert isnan(values["8"])


@pytest.fixture(scope="module")
def model(checkpoint):
    return TaskModel.from_pretrained(checkpoint, task="sequence-classification", labels=["0", "1"], max_length=8)


ROWS = [{"text": text, "label": str(number % 2)} for number, text in enumerate(TEXTS)]


def test_evaluate_reports_them_behind_those_of_the_task(model, tmp_path):
    path = write_module(tmp_path, "glue")
    plain = evaluate(model, ROWS)
    metrics = ["toy_metrics:bias", f"evaluate:{path}:sst2", lambda predictions, references: {"rows": len(predictions)}]
    both = evaluate(model, ROWS, metrics=metrics)
    assert list(both)[: len(plain)] == list(plain)
    assert {name: both[name] for name in plain} == plain
    predicted = sum(prediction.label == "1" for prediction in model.predict(ROWS)) / len(ROWS)
    added = {name: value for name, value in both.items() if name not in plain}
    assert added == {"bias": predicted - 0.5, "glue_accuracy": plain["accuracy"], "rows": 4.0}
    assert evaluate(model, ROWS, metrics="toy_metrics:named")["nested_rows"] == 4
    assert isnan(evaluate(model, ROWS, metrics=[lambda *_: {"none": nan}])["none"])


def test_a_module_in_memory_and_joined_modules_are_metrics(model, tmp_path):
    import evaluate as library

    accuracy, glue = (library.load(str(write_module(tmp_path, name)), kind) for name, kind in MODULES)
    values = evaluate(model, ROWS, metrics=[accuracy, library.combine([accuracy, glue], force_prefix=True)])
    same = ("accuracy", "accuracy_accuracy", "combined_accuracy_accuracy", "glue_accuracy")
    assert len({values[name] for name in same if name in values}) == 1
    assert values["accuracy_accuracy"] == values["glue_accuracy"] == values["combined_accuracy_accuracy"]


MODULES = (("accuracy", None), ("glue", "mrpc"))


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (
            "toy_metrics:biass",
            RecipeError,
            "the module of metric 'toy_metrics:biass' has no 'biass', did you mean 'bias'",
        ),
        ("nowhere:bias", RecipeError, "cannot import metric 'nowhere:bias' .*PYTHONPATH"),
        ("accuracy", RecipeError, "metric is 'accuracy', expected 'evaluate:NAME_OR_PATH' or 'module:function'"),
        ("toy_metrics:number", UsageError, "metric 'toy_metrics:number' is of type int, expected a function"),
        ("broken_import:x", UsageError, "metric 'broken_import:x' cannot be loaded, because of ZeroDivisionError"),
        ("toy_metrics:raises", UsageError, "metric 'raises' failed with KeyError: 'no such key'"),
        ("toy_metrics:text", UsageError, "metric 'text' returns a value of type str as 'words', expected a number"),
        ("toy_metrics:nothing", UsageError, "metric 'nothing' returns None as 'nothing', expected a number"),
        ("toy_metrics:empty", UsageError, "metric 'empty' returns nothing, expected a number"),
        ("toy_metrics:flag", UsageError, "returns a value of type bool as 'right'"),
        ("toy_metrics:array", UsageError, "returns a value of type ndarray as 'f1'"),
        ("toy_metrics:same", UsageError, "metric 'same' returns 'accuracy', which the task reports already"),
        (
            "evaluate:broken",
            UsageError,
            "metric 'broken' failed with ZeroDivisionError: nothing is right. It gets the predictions and",
        ),
        ("evaluate:seqeval", UsageError, "metric 'seqeval' failed with .*"),
        (
            "evaluate:/nowhere/x",
            UsageError,
            "metric 'evaluate:/nowhere/x' cannot be loaded, because of FileNotFoundError",
        ),
        (3, UsageError, "metric 3 is of type int, expected a function"),
    ],
)
def test_what_gives_no_numbers_is_one_message(model, tmp_path, metric, error, message):
    (tmp_path / "broken_import.py").write_text("1 / 0", "utf-8")
    if metric in ("evaluate:broken", "evaluate:seqeval"):
        metric = f"evaluate:{write_module(tmp_path, metric.partition(':')[2])}"
    with pytest.raises(error, match=message) as raised:
        evaluate(model, ROWS, metrics=[metric])
    assert raised.value.exit_code == 2
    assert len(str(raised.value).splitlines()) == 1


def test_two_metrics_of_one_name_are_an_error(model):
    first = SimpleNamespace(compute=lambda predictions, references: {"cost": 1}, name="first")
    second = SimpleNamespace(compute=lambda predictions, references: {"cost": 2}, name="second")
    values = evaluate(model, ROWS, metrics=[first, second])
    assert (values["cost"], values["second_cost"]) == (1, 2)

    def cost(predictions, references):
        return 3

    with pytest.raises(UsageError, match="metric 'cost' returns 'cost', which metric 'first' reports already"):
        evaluate(model, ROWS, metrics=[first, cost])
    with pytest.raises(UsageError, match="metric 'first' returns 'first_cost', which metric 'first' reports already"):
        evaluate(model, ROWS, metrics=[first, first, first])


def test_the_loss_of_the_evaluation_keeps_its_name(model):
    module = SimpleNamespace(compute=lambda predictions, references: {"loss": 7.0}, name="mine")
    values = evaluate(model, ROWS, metrics=[module])
    assert values["mine_loss"] == 7
    assert values["loss"] != 7
    with pytest.raises(UsageError, match="returns 'loss', which the task reports already"):
        evaluate(model, ROWS, metrics=[lambda predictions, references: {"loss": 7.0}])


def test_a_direction_that_names_nothing_is_an_error():
    def cost(predictions, references):
        return 1.0

    for lower in ("mse", 3):
        cost.lower_is_better = lower
        with pytest.raises(UsageError, match=r"metric 'cost': lower_is_better is .*, expected a set of names"):
            own_metrics([cost], ALL)


def test_an_output_without_labels_of_rows_says_so(checkpoint):
    masked = TaskModel.from_pretrained(checkpoint, task=MaskedLanguageModeling.of(max_length=8))
    with pytest.raises(UsageError, match=r"predictions of the output '.*' have no form for metrics of your own"):
        evaluate(masked, [{"text": text} for text in TEXTS], metrics=["toy_metrics:bias"])


def test_metrics_of_a_task_need_a_model_of_several(model):
    with pytest.raises(UsageError, match=r"given for the task 'topic', but the model has one task\. Pass a list"):
        evaluate(model, ROWS, metrics={"topic": ["toy_metrics:bias"]})


def test_the_command_prints_them(model, tmp_path, monkeypatch, capsys):
    from bert_tasks.cli import main

    model.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    command = ["bert-tasks", "evaluate", str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), "--json"]
    for metric, code in (("toy_metrics:bias", 0), ("toy_metrics:raises", 2)):
        monkeypatch.setattr(sys, "argv", [*command, "--metric", metric, "--metric", "toy_metrics:named"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        printed = capsys.readouterr()
        if code == 0:
            assert json.loads(printed.out).keys() >= {"accuracy", "bias", "mean", "nested_rows"}
        else:
            assert printed.err.count("metric 'raises' failed with KeyError") == 1
            assert "Traceback" not in printed.err


def test_a_single_metric_needs_no_list_and_a_partial_function_is_its_function() -> None:
    def far(predictions: list[int], references: list[int], *, weight: float) -> float:
        return weight

    far.lower_is_better = {"far"}
    weighted = partial(far, weight=2.0)
    (metric,) = own_metrics(cast("Any", weighted), {"": None})
    assert metric.values([1], [0]) == {"far": 2.0}
    assert metric.lower_is_better == {"far"}
    with pytest.raises(UsageError, match="of type int, expected a function"):
        own_metrics(cast("Any", 5), {"": None})


def test_names_that_become_equal_are_an_error() -> None:
    metric = OwnMetric(name="costs", source=lambda predictions, references: {"a": {"b": 1}, "a_b": 2})
    with pytest.raises(UsageError, match="metric 'costs' returns the name 'a_b' twice"):
        metric.values([1], [0])

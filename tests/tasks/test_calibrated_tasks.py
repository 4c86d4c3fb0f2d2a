"""Calibrated probabilities: what the temperature changes and does not change, where it is stored, and abstention."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit, predict, predict_file
from bert_tasks.errors import UsageError
from bert_tasks.model.multitask import MultiTaskModel
from support.small_checkpoints import edit_config, save_checkpoint
from support.task_examples import CHOICES, CLASSES, LABELS, PAIRS, SENTENCES

SETTINGS: dict[str, Any] = {"epochs": 8, "batch_size": 4, "learning_rate": 5e-3, "progress": False}
# Task -> rows, the settings of a model, and the name of the column of labels.
TASKS: Mapping[str, tuple[Sequence[Any], dict[str, Any], str]] = {
    "sequence-classification": (CLASSES, {"labels": ["low", "mid", "high"]}, "label"),
    "pair-classification": (PAIRS, {"labels": ["no", "yes"]}, "label"),
    "multiple-choice": ((*CHOICES[:6], *({**row, "label": 1 - row["label"]} for row in CHOICES[6:])), {}, "label"),
    "token-classification": (SENTENCES, {"labels": list(LABELS), "labelling": "all", "doc_stride": 6}, "tags"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", unigram_tokenizer)
    edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


SLOW = ("pair-classification",)  # whose output has the code of the first task's


@pytest.fixture(
    scope="module", params=[pytest.param(task, marks=pytest.mark.slow if task in SLOW else ()) for task in TASKS]
)
def trained(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A task, and the run of a model that was trained on half of its rows."""
    rows, settings, _ = TASKS[request.param]
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(base, task=request.param, max_length=32, calibration="temperature", **settings)
    run = tmp_path_factory.mktemp("run")
    fit(model, rows[:4], rows, output_dir=run, **SETTINGS)
    return request.param, run


def scores_of(prediction: Any) -> Sequence[Sequence[float]]:
    """The probability of every class or choice; of words the highest one."""
    if hasattr(prediction, "tags"):
        return [[score] for score in prediction.scores]
    return [list(prediction.scores.values() if isinstance(prediction.scores, Mapping) else prediction.scores)]


def logits_of(prediction: Any) -> list[Tensor]:
    rows = prediction.logits if hasattr(prediction, "tags") else [prediction.logits]
    return [torch.tensor(row) for row in rows]


def cross_entropy(model: TaskModel, task: str, temperature: float) -> float:
    rows, _, column = TASKS[task]
    losses = []
    for row, prediction in zip(rows, model.predict(rows, logits=True), strict=True):
        names = row[column] if task == "token-classification" else [row[column]]
        for name, logits in zip(names, logits_of(prediction), strict=True):
            index = name if task == "multiple-choice" else model.task.output.labels.index(name)
            losses.append(-(logits.double() / temperature).log_softmax(0)[index].item())
    return sum(losses) / len(losses)


def test_scores_are_the_softmax_of_logits_by_the_temperature(trained: tuple[str, Path]) -> None:
    task, run = trained
    model = TaskModel.from_pretrained(run / "model")
    temperature = model.task.output.temperature
    assert abs(math.log(temperature)) > 0.01
    for prediction in model.predict(TASKS[task][0], logits=True):
        for scores, logits in zip(scores_of(prediction), logits_of(prediction), strict=True):
            expected = (logits / temperature).softmax(0)
            assert scores == pytest.approx(expected.tolist() if len(scores) > 1 else [expected.max().item()], abs=1e-6)


def test_the_temperature_has_the_lowest_cross_entropy_and_changes_no_label(trained: tuple[str, Path]) -> None:
    task, run = trained
    model = TaskModel.from_pretrained(run / "model")
    plain = TaskModel.from_pretrained(run / "model", calibration="none")
    best = model.task.output.temperature
    losses = {factor: cross_entropy(model, task, best * factor) for factor in (0.9, 1.0, 1.1)}
    if 0.051 < best < 19.9:
        assert min(losses, key=losses.__getitem__) == 1.0
    rows = TASKS[task][0]
    for calibrated, prediction in zip(model.predict(rows), plain.predict(rows), strict=True):
        assert getattr(calibrated, "label", None) == getattr(prediction, "label", None)
        assert getattr(calibrated, "tags", None) == getattr(prediction, "tags", None)
    metrics = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]
    measured = [evaluate(each, rows) for each in (model, TaskModel.from_pretrained(run / "model", calibration="none"))]
    assert metrics["ece"] == pytest.approx(measured[0]["ece"], abs=1e-6)
    assert "ece" not in measured[1]
    assert metrics["untuned_ece"] != metrics["ece"]


@pytest.mark.slow
def test_the_temperature_is_fitted_anew_for_new_rows(trained: tuple[str, Path], tmp_path: Path) -> None:
    task, run = trained
    rows = TASKS[task][0]
    model = TaskModel.from_pretrained(run / "model")
    before = model.task.output.temperature
    fit(model, rows[4:], rows[:3], output_dir=tmp_path / "run", **SETTINGS)
    assert model.task.output.temperature != before


@pytest.mark.slow
def test_the_report_shows_the_error_before_and_after(trained: tuple[str, Path], base: Path, tmp_path: Path) -> None:
    task, _ = trained
    rows, settings, _ = TASKS[task]
    model = TaskModel.from_pretrained(base, task=task, max_length=32, calibration="temperature", **settings)
    fit(model, rows[:4], rows, output_dir=tmp_path / "run", report=True, **SETTINGS)
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "untuned_ece" in page
    if task != "token-classification":
        assert "Without the temperature, which was fitted on these rows, the error is" in page
        assert "the temperature was fitted on this data" in page.lower()
        assert "Accuracy by coverage" in page


@pytest.mark.slow
def test_several_tasks_have_a_temperature_each(base: Path, tmp_path: Path) -> None:
    rows = [{**row, "topic": other["label"]} for row, other in zip(SENTENCES, CLASSES, strict=True)]
    rows = [{**row, "text": other["text"]} for row, other in zip(rows, CLASSES, strict=True)]
    tasks = {
        "topic": {
            "task": "sequence-classification",
            "labels": ["low", "mid", "high"],
            "max_length": 32,
            "columns": {"label": "topic"},
            "calibration": "temperature",
        },
        "slots": {
            "task": "token-classification",
            "labels": list(LABELS),
            "max_length": 32,
            "doc_stride": 6,
            "calibration": "temperature",
        },
    }
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(base, tasks=tasks)
    result = fit(model, rows[:4], rows, output_dir=tmp_path / "run", **SETTINGS)
    opened = MultiTaskModel.from_pretrained(tmp_path / "run" / "model")
    temperatures = [opened.models[name].task.output.temperature for name in tasks]
    assert 1.0 not in temperatures
    assert temperatures[0] != temperatures[1]
    assert {"topic.ece", "topic.untuned_ece", "slots.ece"} - result.metrics.keys() <= {"topic.untuned_ece"}
    for prediction, logits in zip(opened.predict(rows), opened.models["topic"].predict(rows, logits=True), strict=True):
        expected = (torch.tensor(logits.logits) / temperatures[0]).softmax(0)
        assert list(prediction["topic"].scores.values()) == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.slow
def test_an_exported_model_has_the_same_scores(trained: tuple[str, Path], tmp_path: Path) -> None:
    from bert_tasks.export import export

    task, run = trained
    rows = TASKS[task][0]
    export(run / "model", to="onnx", output=tmp_path / "onnx", data=rows)
    for prediction, expected in zip(
        predict(tmp_path / "onnx", rows), TaskModel.from_pretrained(run / "model").predict(rows), strict=True
    ):
        for scores, others in zip(scores_of(prediction), scores_of(expected), strict=True):
            assert scores == pytest.approx(others, abs=1e-5)


# Abstention.


def answered(trained: tuple[str, Path], **limits: float) -> list[Any]:
    task, run = trained
    return list(predict(run / "model", TASKS[task][0], **limits))


def skip_tags(trained: tuple[str, Path]) -> None:
    if trained[0] == "token-classification":
        pytest.skip("a row has several tags")


def test_predictions_below_the_score_have_no_label(trained: tuple[str, Path]) -> None:
    skip_tags(trained)
    everything = answered(trained)
    limit = sorted(prediction.score for prediction in everything)[3]
    for prediction, full in zip(answered(trained, abstain_below=limit), everything, strict=True):
        assert (prediction.label is None) == (full.score < limit)
        assert (prediction.score, prediction.scores) == (full.score, full.scores)
        assert prediction.to_json()["label"] == prediction.label


def test_rows_without_a_label_are_written(trained: tuple[str, Path], tmp_path: Path) -> None:
    task, run = trained
    skip_tags(trained)
    for name in ("out.jsonl", "out.csv"):
        assert predict_file(run / "model", TASKS[task][0], tmp_path / name, abstain_below=1.0).rows == 8
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [line["label"] is None for line in lines] == [line["score"] < 1.0 for line in lines]
    assert any(line["label"] is None for line in lines)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert [row["label"] == "" for row in csv.DictReader(file)] == [line["label"] is None for line in lines]


@pytest.mark.parametrize(
    ("task", "settings", "row"),
    [
        ("sequence-classification", {"problem_type": "regression"}, {"text": "a"}),
        ("token-classification", {"labels": ["a", "b"]}, {"words": ["a"]}),
        ("span-extraction", {}, {"question": "a", "context": "b"}),
    ],
)
def test_tasks_without_one_label_for_each_row_do_not_abstain(
    base: Path, task: str, settings: dict[str, Any], row: dict[str, Any]
) -> None:
    model: TaskModel = TaskModel.from_pretrained(base, task=task, **settings)
    with pytest.raises(UsageError, match="abstain_below needs predictions with one label for each row"):
        predict(model, [row], abstain_below=0.5)

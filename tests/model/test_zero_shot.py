"""Labels without training: scores as in transformers' pipeline, whatever reads the rows, and every wrong input."""

import csv
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase, pipeline

from bert_tasks import TaskModel, evaluate, fit, predict, predict_file
from bert_tasks.errors import BertTasksError, CheckpointError, UsageError
from bert_tasks.export import export
from bert_tasks.model.prediction import batch_rows
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.tasks import PairClassification, SequenceClassification
from bert_tasks.tasks.base import Task
from support.sampling import one_of_each
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES

NLI = ("contradiction", "neutral", "entailment")
# Names of the labels of a model of pairs, of which one begins with "entail".
NAMES = (
    *(NLI, NLI[::-1], ("contradiction", "ENTAILMENT", "neutral")),
    *(("entailed", "not_entailment"), ("not_entailment", "entailment")),
)
LABELS = ["the weather", "food and drink", "a machine", "politics"]
HYPOTHESIS = "This text is about {}."
LENGTH = 48  # of small checkpoints
TEXTS = [*LINES, " ".join(LINES), " ".join(LINES[:3]), "a"]


@pytest.fixture(scope="module")
def model(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> TaskModel:
    folder = tmp_path_factory.mktemp("nli")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, head="sequence", labels=NLI, wide=True)
    return TaskModel.from_pretrained(folder, task="pair-classification")


def stock_scores(folder: Path, texts: Sequence[str], labels: Sequence[str], **options: Any) -> list[dict[str, float]]:
    """The scores of transformers' pipeline for texts, by label."""
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=LENGTH)
    classify = pipeline(
        "zero-shot-classification",
        model=AutoModelForSequenceClassification.from_pretrained(folder),
        tokenizer=tokenizer,
        device="cpu",
    )
    answers = classify(list(texts), candidate_labels=labels, **options)
    return [dict(zip(answer["labels"], answer["scores"], strict=True)) for answer in answers]


def assert_equal_scores(predictions: Sequence[Any], expected: Sequence[dict[str, float]]) -> None:
    for prediction, scores in zip(predictions, expected, strict=True):
        assert prediction.scores == pytest.approx(scores, abs=1e-5)
        assert scores[prediction.label] == pytest.approx(max(scores.values()), abs=1e-5)
        assert prediction.score == prediction.scores[prediction.label]


@pytest.mark.parametrize(
    ("family", "multi_label"),
    one_of_each([*product(["bert", "roberta", "albert", "xlm-roberta", "deberta-v2", "modernbert"], [False, True])]),
)
def test_scores_equal_transformers_pipeline(
    family: str, multi_label: bool, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, family, tokenizer_of(family, by_kind), head="sequence", labels=NLI, wide=True)
    stock = TaskModel.from_pretrained(tmp_path)  # of which nothing says that it reads pairs
    zero_shot = stock.zero_shot(LABELS, hypothesis=HYPOTHESIS, multi_label=multi_label)
    zero_shot.task = zero_shot.task.with_settings(max_length=LENGTH)
    folder = tmp_path
    if family == "albert":  # transformers' class of tokenizers drops the segments, unless the folder names them
        stock.save_pretrained(folder := tmp_path / "saved")
    expected = stock_scores(folder, TEXTS, LABELS, hypothesis_template=HYPOTHESIS, multi_label=multi_label)
    assert_equal_scores(zero_shot.predict(TEXTS), expected)
    assert len({round(score, 3) for scores in expected for score in scores.values()}) > 20


@pytest.mark.parametrize(("names", "count"), one_of_each([*product(NAMES, [len(LABELS), 1])]))
def test_a_folder_of_ours_opens_in_the_pipeline(
    names: tuple[str, ...], count: int, wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    labels = LABELS[:count]
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, wide=True)
    torch.manual_seed(2)
    pair = TaskModel.from_pretrained(tmp_path / "base", task=PairClassification.of(labels=names, max_length=LENGTH))
    torch.nn.init.normal_(pair.head.output.weight, std=0.5)
    pair.save_pretrained(tmp_path / "saved")
    loaded = TaskModel.from_pretrained(tmp_path / "saved")
    for multi_label in (False, True):
        predictions = loaded.zero_shot(labels, multi_label=multi_label).predict(TEXTS)
        assert_equal_scores(predictions, stock_scores(tmp_path / "saved", TEXTS, labels, multi_label=multi_label))
        if multi_label or len(labels) == 1:
            decided = [
                tuple(label for label in labels if prediction.scores[label] >= 0.5) for prediction in predictions
            ]
            assert [prediction.labels for prediction in predictions] == decided
        else:
            assert {type(prediction) for prediction in predictions} == {ClassPrediction}
            assert all(sum(prediction.scores.values()) == pytest.approx(1) for prediction in predictions)


def test_files_and_columns_are_read_as_by_other_models(
    model: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"{text} {number}" for number, text in enumerate(LINES[:10])]
    zero_shot = model.zero_shot(LABELS, hypothesis=HYPOTHESIS)
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 16)
    assert batch_rows(zero_shot, explain=False) == 16 // len(LABELS)
    expected = zero_shot.predict(many)
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(many)])
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        assert predict_file(zero_shot, tmp_path / "rows.csv", tmp_path / name).rows == len(many)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["label"]) for row in rows] == [
        (str(i), prediction.label) for i, prediction in enumerate(expected)
    ]
    assert [list(row) for row in rows[:1]] == [["id", "text", "label", "score", "scores"]]
    assert model.predict([("a", "b")])[0].label in NLI  # the model itself is as before
    trained = model.zero_shot(LABELS)
    trained.columns = {}
    model.columns = {"text": "premise", "text_pair": "other"}
    try:
        assert model.zero_shot(LABELS).predict([{"premise": LINES[0]}]) == trained.predict(LINES[:1])
    finally:
        model.columns = {}


def test_labels_may_be_separated_by_commas(model: TaskModel) -> None:
    rows = [{"text": line} for line in LINES[:4]]
    listed = model.zero_shot(LABELS).predict(rows)
    assert model.zero_shot(" , ".join([*LABELS, ""])).predict(rows) == listed


def test_logits_are_the_logits_of_the_scores(model: TaskModel) -> None:
    for multi_label in (False, True):
        (prediction,) = model.zero_shot(LABELS, multi_label=multi_label).predict(LINES[0], logits=True)
        logits = torch.tensor(prediction.logits)
        scores = logits.sigmoid() if multi_label else logits.softmax(0)
        assert list(prediction.scores.values()) == pytest.approx(scores.tolist(), abs=1e-6)


@pytest.mark.parametrize("multi_label", [False, True])
def test_labelled_rows_are_evaluated(model: TaskModel, multi_label: bool) -> None:
    zero_shot = model.zero_shot(LABELS, multi_label=multi_label)
    predictions = zero_shot.predict(LINES)
    assert len({prediction.label for prediction in predictions}) > 1
    if multi_label:
        rows: list[dict[str, Any]] = [
            {"text": line, "labels": prediction.labels} for line, prediction in zip(LINES, predictions, strict=True)
        ]
        metrics = evaluate(zero_shot, rows)
        assert metrics["micro_f1"] == 1
        scores = torch.tensor([list(prediction.scores.values()) for prediction in predictions], dtype=torch.double)
        loss = -torch.maximum(scores, 1 - scores).log().mean().item()
    else:
        rows = [{"text": line, "label": prediction.label} for line, prediction in zip(LINES, predictions, strict=True)]
        metrics = evaluate(zero_shot, rows)
        assert metrics["accuracy"] == 1
        loss = -sum(torch.tensor(prediction.score).log().item() for prediction in predictions) / len(predictions)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-4)


def test_only_the_text_is_cut(model: TaskModel) -> None:
    long = " ".join(LINES)
    zero_shot = model.zero_shot(LABELS)
    windows = zero_shot.task.features([{"text": long}], model.require_tokenizer())
    texts = [model.require_tokenizer().decode(window["input_ids"]) for window in windows]
    assert [text.rsplit("[SEP]", 2)[1].strip() for text in texts] == [f"this example is {label}." for label in LABELS]
    assert {len(window["input_ids"]) for window in windows} == {zero_shot.task.max_length}
    assert all(window["lost_tokens"] > 0 for window in windows)


@pytest.mark.slow
def test_graphs_and_low_precision(model: TaskModel, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", to="onnx", output=tmp_path / "graph")
    zero_shot = model.zero_shot(LABELS)
    expected = [prediction.scores for prediction in zero_shot.predict(LINES)]
    for name in LABELS:
        names = [scores[name] for scores in expected]
        rows = predict(zero_shot, LINES, dtype="bf16")
        assert [prediction.scores[name] for prediction in rows] == pytest.approx(names, abs=0.3)
    exported = predict_exported(tmp_path / "graph")
    for prediction, scores in zip(exported, expected, strict=True):
        assert prediction.scores == pytest.approx(scores, abs=1e-4)


def predict_exported(folder: Path) -> Sequence[Any]:
    from bert_tasks.data.options import ReadOptions
    from bert_tasks.model.inputs import load_trained

    loaded = load_trained(folder, task=None, settings=None, reading=ReadOptions(), revision=None)
    return loaded.zero_shot(LABELS).predict(LINES)


LONG = "word " * LENGTH + "{}"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"labels": []}, "labels: there are no labels. Write them as 'sports,politics'."),
    ({"labels": " , "}, "labels: there are no labels. Write them as 'sports,politics'."),
    ({"labels": ["a", " "]}, "labels: a label is empty. Write them as 'sports,politics'."),
    ({"labels": "a,b,a"}, "labels: labels 1 and 3 are equal. Write each label once."),
    ({"labels": ["a", 2]}, "labels: not a text. Write it in quotes."),
    ({"labels": ["a", "\udc80"]}, "labels: "),
    ({"hypothesis": "It is so."}, "hypothesis: it needs {} for the label, once. Write it as 'This example is {}.'."),
    ({"hypothesis": "{}\ud800"}, "hypothesis: half a character (surrogate U+D800). Replace it."),
    ({"hypothesis": LONG}, f"hypothesis: with a label it leaves no room for the text in max_length = {LENGTH} tokens"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_labels_and_hypotheses(model: TaskModel, changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"labels": LABELS, "hypothesis": HYPOTHESIS, **changes}
    with pytest.raises(UsageError) as raised:
        model.zero_shot(options.pop("labels"), **options)
    assert str(raised.value).startswith(message)


OTHERS: list[tuple[Task, str]] = [
    (
        SequenceClassification.of(labels=NLI),
        "labels: the model must be one of pair-classification, not of sequence-class",
    ),
    (
        PairClassification.of(labels=("no", "yes")),
        "labels: the model needs a label that begins with 'entail'. Its labels are no, yes",
    ),
    (
        PairClassification.of(problem_type="regression"),
        "labels: the model needs a label that begins with 'entail'. It has no labels",
    ),
]


@pytest.mark.parametrize(("task", "message"), OTHERS)
def test_other_models(model: TaskModel, task: Task, message: str, tmp_path: Path) -> None:
    assert model.origin is not None
    other = TaskModel.from_pretrained(model.origin.name, task=task.with_settings(max_length=LENGTH))
    other.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        TaskModel.from_pretrained(tmp_path).zero_shot(LABELS)
    assert str(raised.value).startswith(message)


def test_what_the_model_of_texts_is_not_for(model: TaskModel, tmp_path: Path) -> None:
    assert model.origin is not None
    zero_shot, folder = model.zero_shot(LABELS), model.origin.name
    rows = [{"text": line, "label": LABELS[number % 2]} for number, line in enumerate(LINES)]
    refusals: list[tuple[Any, str]] = [
        (lambda: zero_shot.save_pretrained(tmp_path / "x"), "neither trained nor saved"),
        (
            lambda: fit(zero_shot, rows, output_dir=tmp_path / "run"),
            "neither trained",
        ),
        (lambda: zero_shot.predict(LINES, explain=True), "has no explanations"),
        (lambda: zero_shot.zero_shot(LABELS), "must be one of pair-classification"),
        (
            lambda: TaskModel.from_pretrained(folder, long_texts="windows").zero_shot(LABELS),
            "labels: texts are not read in windows. Set long_texts = 'truncate'",
        ),
    ]
    for call, message in refusals:
        with pytest.raises(BertTasksError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif("BERT_TASKS_DATA" not in os.environ, reason="BERT_TASKS_DATA is not set")
def test_real_texts(embedded_model: Path, tmp_path: Path) -> None:
    """The published small model with a random head, whose logits differ as they do after training."""
    with (Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "RTE" / "dev.tsv").open(encoding="utf-8") as file:
        texts = [line.split("\t")[1] for line in list(file)[1:61]]
    torch.manual_seed(0)
    task = PairClassification.of(labels=("entailment", "not_entailment"), max_length=LENGTH)
    pair = TaskModel.from_pretrained(embedded_model, task=task)
    torch.nn.init.normal_(pair.head.output.weight, std=0.5)
    pair.save_pretrained(tmp_path)
    for multi_label in (False, True):
        predictions = pair.zero_shot(LABELS, multi_label=multi_label).predict(texts)
        assert_equal_scores(predictions, stock_scores(tmp_path, texts, LABELS, multi_label=multi_label))
        assert len({prediction.label for prediction in predictions}) > 1

"""Graphs of several tasks: one encoder, an output for each head, and a folder that predicts as the model does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, evaluate, predict
from bert_tasks.cli.app import app
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.export import export
from bert_tasks.model.exported import ExportedMultiTaskModel
from bert_tasks.outputs.prediction import Prediction
from support.hf_models import widen
from support.sampling import slow_except
from support.small_checkpoints import copied, edit_config, save_checkpoint
from support.task_examples import CLASSES, LABELS, QUESTIONS, SENTENCES

TOPIC = {"task": "sequence-classification", "labels": ["low", "mid", "high"], "max_length": 32}
SLOTS = {"task": "token-classification", "labels": list(LABELS), "max_length": 32, "doc_stride": 6}
QUESTION = {"task": "span-extraction", "max_length": 32, "doc_stride": 6, "max_query_length": 8, "max_answer_length": 5}
# Pairs of tasks -> their settings, and the outputs of their graph.
CASES: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "sequence and token": (
        {"slots": {**SLOTS, "columns": {"tags": "slots"}}, "topic": {**TOPIC, "columns": {"label": "topic"}}},
        ["slots.logits", "topic.logits"],
    ),
    "span, mean of tokens and CRF": (
        {
            "answer": QUESTION,
            "slots": {**SLOTS, "crf": True, "columns": {"tags": "slots"}},
            "topic": {**TOPIC, "pooling": "mean", "columns": {"label": "topic"}},
        },
        ["answer.start_logits", "answer.end_logits", "slots.logits", "topic.logits"],
    ),
}
ROWS: list[dict[str, Any]] = [
    {
        **question,
        "text": row["text"],
        "topic": row["label"],
        "words": tagged["words"],
        "slots": tagged["tags"],
    }
    for row, tagged, question in zip(CLASSES, SENTENCES, QUESTIONS, strict=True)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", wordpiece_tokenizer)
    return folder


def saved(base: Path, folder: Path, tasks: Mapping[str, Mapping[str, Any]]) -> MultiTaskModel:
    """A model whose heads have large weights, so that a wrong logit shows."""
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(base, tasks=tasks)
    widen(model.head, seed=0)
    model.save_pretrained(folder)
    return model


def rows_of(case: str) -> list[dict[str, Any]]:
    """Rows, some without the input of a task."""
    rows = [dict(row) for row in ROWS]
    if "span" not in case:
        rows = [{name: row[name] for name in ("text", "topic", "words", "slots")} for row in rows]
    del rows[0]["text"], rows[0]["topic"], rows[1]["words"], rows[1]["slots"]
    return rows


def contents(predictions: Sequence[Mapping[str, Prediction]]) -> list[dict[str, Any]]:
    """The predictions of each row as JSON."""
    return [{name: prediction.to_json() for name, prediction in of_row.items()} for of_row in predictions]


def numbers(value: Any) -> Any:
    """JSON with rounded numbers."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))


@pytest.fixture(scope="module", params=slow_except(list(CASES), "span, mean of tokens and CRF"))
def case(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, MultiTaskModel]:
    folder = tmp_path_factory.mktemp("case")
    model = saved(base, folder / "model", CASES[request.param][0])
    command = ["export", folder / "model", "--to", "onnx", "--output", folder / "onnx"]
    app(list(map(str, command)), standalone_mode=False)
    return request.param, folder / "onnx", model


def test_a_graph_has_the_encoder_once_and_an_output_for_each_head(case: tuple[str, Path, MultiTaskModel]) -> None:
    name, folder, model = case
    record = json.loads((folder / "export.json").read_text())
    assert record["outputs"] == CASES[name][1]
    assert record["parity"]["max_difference"] <= record["parity"]["allowed"]
    assert record["parity"]["largest_logit"] > 0.5
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * weights * 0.95 < record["bytes"] < 4 * weights * 1.2 + 200_000
    session = ExportedMultiTaskModel.from_pretrained(folder).graph.session
    encoded = model.require_tokenizer()([row["text"] for row in CLASSES], padding=True, return_tensors="np")
    outputs = dict(zip(record["outputs"], session.run(None, dict(encoded)), strict=True))
    for task, single in model.models.items():
        with torch.no_grad():
            logits = single(*(torch.from_numpy(encoded[key]) for key in record["inputs"]))
        if task == "slots" and "crf" in CASES[name][0]["slots"]:
            continue  # the graph has the emissions
        parts = [outputs[key] for key in outputs if key.startswith(f"{task}.")]
        expected = logits.numpy() if len(parts) == 1 else logits.numpy().transpose(2, 0, 1)
        np.testing.assert_allclose(parts[0] if len(parts) == 1 else np.stack(parts), expected, atol=1e-5, rtol=0)


def test_the_folder_predicts_and_evaluates_as_the_model(case: tuple[str, Path, MultiTaskModel]) -> None:
    name, folder, model = case
    rows = rows_of(name)
    expected, predictions = (predict(source, rows) for source in (model, folder))
    assert [list(each) for each in predictions] == [list(each) for each in expected]
    assert numbers(contents(predictions)) == numbers(contents(expected))
    assert evaluate(folder, rows) == pytest.approx(evaluate(model, rows), rel=1e-4)


def test_an_exported_folder_has_all_of_its_tasks(case: tuple[str, Path, MultiTaskModel], tmp_path: Path) -> None:
    _, folder, _ = case
    with pytest.raises(UsageError, match=r"is exported with all of its tasks\. Remove .*task.*, or export this task"):
        predict(folder, ["a text"], task="slots")
    slots = ExportedMultiTaskModel.from_pretrained(folder).models["slots"]
    with pytest.raises(UsageError, match="exported with others is predicted with them"):
        slots.predict("a text")
    damaged = copied(folder, tmp_path / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    config["bert_tasks"]["settings"]["heads"]["topic"]["labels"] = ["low", "high"]
    edit_config(damaged, bert_tasks=config["bert_tasks"])
    with pytest.raises(CheckpointError, match=r"returns 3 logits, but config\.json states 2 labels"):
        predict(damaged, ["a text"])


@pytest.mark.slow
def test_an_int8_graph_keeps_the_predictions_of_each_task(base: Path, tmp_path: Path) -> None:
    model = saved(base, tmp_path / "model", CASES["sequence and token"][0])
    exported = export(model, to="int8", output=tmp_path / "int8", data=rows_of("sequence and token"))
    words = sum(len(row["words"]) for row in SENTENCES)
    assert len(ROWS) < exported.record["int8"]["answers"] <= words + len(ROWS)
    assert [list(each) for each in predict(tmp_path / "int8", ["a text"])] == [["slots", "topic"]]

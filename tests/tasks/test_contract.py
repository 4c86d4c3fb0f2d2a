"""What every task promises, on every family. A new task needs its entries in ``EXAMPLES`` and nothing else here."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Row
from bert_tasks.model.predicting import feature_summaries
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import (
    TASKS,
    PairClassification,
    SequenceClassification,
    SpanExtraction,
    Task,
    TokenClassification,
)
from bert_tasks.tasks.base import Feature, Prediction, collate
from hf_models import FAMILIES
from small_checkpoints import save_checkpoint, tokenizer_of

ENOUGH_STEPS = 120


@dataclass(frozen=True, kw_only=True)
class Example:
    """A task, eight labelled rows that a small model can learn, and the column whose text or words tests may change."""

    task: Task
    rows: tuple[Row, ...]
    column: str
    windows: bool = False


TEXTS = (
    "the ferry leaves at seven",
    "nobody told the baker",
    "a cold wind brought rain",
    "bring your own cup",
    "the sound was terrible",
    "what a wonderful evening",
    "is this seat free",
    "prices rose last winter",
)
CLASSES = tuple({"text": text, "label": ("low", "mid", "high")[number % 3]} for number, text in enumerate(TEXTS))
SETS = tuple(
    {"text": text, "labels": [name for bit, name in enumerate(("x", "y", "z")) if number >> bit & 1]}
    for number, text in enumerate(TEXTS)
)
PAIRS = tuple(
    {"text": text, "text_pair": TEXTS[number // 2], "label": ("no", "yes")[number % 2]}
    for number, text in enumerate(TEXTS)
)
TAGS = {
    "ferry": "B-THING",
    "baker": "B-WHO",
    "cold": "B-THING",
    "wind": "I-THING",
    "cup": "B-THING",
    "sound": "B-THING",
}
SENTENCES = tuple({"words": text.split(), "tags": [TAGS.get(word, "O") for word in text.split()]} for text in TEXTS)
QUESTIONS = tuple(
    {"id": str(number), "question": f"{text.split()[0]} what", "context": text, "answers": answers}
    for number, text in enumerate(TEXTS)
    for last in [text.split()[-1]]
    for answers in [{"text": [last], "answer_start": [text.index(last)]}]
)
SOME_WITHOUT_ANSWER = tuple(
    {**row, "answers": {"text": [], "answer_start": []}} if number % 3 == 0 else row
    for number, row in enumerate(QUESTIONS)
)
LABELS = ("O", "B-THING", "I-THING", "B-WHO", "I-WHO")
SPANS: dict[str, Any] = {"max_length": 32, "doc_stride": 6, "max_query_length": 8, "max_answer_length": 5}
NUMBERS = tuple({"text": text, "label": number / 4 - 1.0} for number, text in enumerate(TEXTS))
EXAMPLES = {
    "single": Example(
        task=SequenceClassification(labels=("low", "mid", "high"), max_length=24), rows=CLASSES, column="text"
    ),
    "windows": Example(
        task=SequenceClassification(
            labels=("low", "mid", "high"), max_length=24, pooling="mean", long_texts="windows", doc_stride=6
        ),
        rows=CLASSES,
        column="text",
        windows=True,
    ),
    "several": Example(
        task=SequenceClassification(
            labels=("x", "y", "z"), max_length=24, problem_type="multi_label_classification", pooling="attention"
        ),
        rows=SETS,
        column="text",
    ),
    "regression": Example(
        task=SequenceClassification(problem_type="regression", max_length=24), rows=NUMBERS, column="text"
    ),
    "token": Example(
        task=TokenClassification(labels=LABELS, max_length=24, doc_stride=6),
        rows=SENTENCES,
        column="words",
        windows=True,
    ),
    "token crf": Example(
        task=TokenClassification(labels=LABELS, max_length=24, doc_stride=6, crf=True),
        rows=SENTENCES,
        column="words",
        windows=True,
    ),
    "span": Example(task=SpanExtraction(**SPANS), rows=QUESTIONS, column="context", windows=True),
    "span v2": Example(
        task=SpanExtraction(**SPANS, version_2_with_negative=True),
        rows=SOME_WITHOUT_ANSWER,
        column="context",
        windows=True,
    ),
    "pair": Example(task=PairClassification(labels=("no", "yes"), max_length=32), rows=PAIRS, column="text"),
    "pair regression": Example(
        task=PairClassification(problem_type="regression", max_length=32, pooling="mean"),
        rows=tuple({**row, "label": number / 4 - 1.0} for number, row in enumerate(PAIRS)),
        column="text_pair",
    ),
}


def test_every_task_has_an_example() -> None:
    assert {example.task.name for example in EXAMPLES.values()} == set(TASKS)
    for name, task in TASKS.items():
        assert task.name == name


@pytest.fixture(scope="module")
def by_kind(
    wordpiece_tokenizer: PreTrainedTokenizerBase,
    bpe_tokenizer: PreTrainedTokenizerBase,
    unigram_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, PreTrainedTokenizerBase]:
    return {"wordpiece": wordpiece_tokenizer, "bpe": bpe_tokenizer, "unigram": unigram_tokenizer}


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(
    request: pytest.FixtureRequest,
    by_kind: dict[str, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, request.param, tokenizer_of(request.param, by_kind))
    return folder


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture(scope="module")
def model(family_folder: Path, example: Example) -> TaskModel:
    """A fresh head on a small encoder; tests must not change it."""
    torch.manual_seed(0)
    return TaskModel.from_pretrained(family_folder, task=example.task)


def changed(example: Example, text: str) -> Row:
    words = isinstance(example.rows[0][example.column], list)
    return {**unlabelled(example)[0], example.column: text.split() if words else text}


def unlabelled(example: Example) -> list[Row]:
    targets = {column.name for column in example.task.columns if column.is_target}
    return [{name: value for name, value in row.items() if name not in targets} for row in example.rows]


def made(model: TaskModel, rows: Sequence[Row]) -> list[Feature]:
    assert model.tokenizer is not None
    return model.task.features(rows, model.tokenizer)


def numbers(predictions: Sequence[Prediction]) -> list[float]:
    """Every number in the predictions, in one order."""

    def walk(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for item in value.values() for number in walk(item)]
        if isinstance(value, list):
            return [number for item in value for number in walk(item)]
        return [value] if isinstance(value, float) else []

    return [number for prediction in predictions for number in walk(prediction.to_json())]


def same(left: Sequence[Prediction], right: Sequence[Prediction]) -> bool:
    return len(left) == len(right) and numbers(left) == pytest.approx(numbers(right), abs=2e-6)


def test_every_row_has_one_prediction_in_order(model: TaskModel, example: Example) -> None:
    rows = [*example.rows, changed(example, ""), changed(example, "word " * 300), *example.rows[:3]]
    together = model.predict(rows)
    assert len(together) == len(rows)
    alone = [prediction for row in rows for prediction in model.predict([row])]
    assert same(together, alone)
    assert same(list(reversed(model.predict(rows[::-1]))), together)
    assert len({tuple(numbers([prediction])) for prediction in together}) >= len(example.rows)


def test_predictions_do_not_depend_on_the_batch(model: TaskModel, example: Example) -> None:
    features = made(model, [*example.rows, changed(example, "word " * 60)])
    wide, narrow = (feature_summaries(model, features, max_tokens=limit) for limit in (10_000, 1))
    for left, right in zip(wide, narrow, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=0)
        assert left.device.type == "cpu"


def test_predictions_and_features_are_plain_values(model: TaskModel, example: Example) -> None:
    for prediction in model.predict(example.rows):
        content = prediction.to_json()
        assert json.loads(json.dumps(content, allow_nan=False)) == content
    features = made(model, example.rows)
    stored = Dataset.from_list([dict(feature) for feature in features])
    assert [dict(feature) for feature in features] == list(stored)


def test_empty_text_is_a_window_like_any_other(model: TaskModel, example: Example) -> None:
    features = made(model, [changed(example, ""), *example.rows])
    assert sum(feature["row"] == 0 for feature in features) == 1
    assert 2 <= len(features[0]["input_ids"]) < model.task.max_length
    assert features[0]["lost_tokens"] == 0
    assert [feature["row"] for feature in features] == sorted(feature["row"] for feature in features)


def test_long_text_is_cut_and_counted_or_read_in_windows(model: TaskModel, example: Example) -> None:
    features = made(model, [changed(example, "word " * 100), *example.rows])
    longest = max(len(feature["input_ids"]) for feature in features)
    of_long = [feature for feature in features if feature["row"] == 0]
    assert longest == model.task.max_length
    assert (len(of_long) > 1) == example.windows
    lost = sum(feature["lost_tokens"] for feature in of_long)
    assert (lost == 0) if example.windows else (lost >= 100 - model.task.max_length)
    assert {feature["row"] for feature in features} == set(range(len(example.rows) + 1))


def test_eight_examples_are_learnt(model: TaskModel, example: Example) -> None:
    learner = copy.deepcopy(model)
    task = learner.task
    batch = collate(made(learner, example.rows), position_offset=learner.config.position_offset)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3, weight_decay=0.0, foreach=True)
    for _ in range(ENOUGH_STEPS):
        loss = task.loss(learner(batch), batch)
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        if mean < 0.02:
            break
    assert mean < 0.02
    assert task.metrics(learner.predict(example.rows), example.rows)[task.primary_metric] > 0.95


def test_saved_and_loaded_predictions_are_equal(model: TaskModel, example: Example, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    loaded = TaskModel.from_pretrained(tmp_path / "model")
    assert loaded.task == model.task
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert loaded.predict(example.rows) == model.predict(example.rows)


def test_loss_of_rows_without_targets_counts_nothing(model: TaskModel, example: Example) -> None:
    without = unlabelled(example)
    offset = model.config.position_offset
    with torch.no_grad():
        batch = collate(made(model, without), position_offset=offset)
        assert model.task.loss(model(batch), batch).count == 0
        mixed = collate(made(model, [*example.rows[:2], *without]), position_offset=offset)
        part = collate(made(model, example.rows[:2]), position_offset=offset)
        with_others, alone = model.task.loss(model(mixed), mixed), model.task.loss(model(part), part)
    assert with_others.count == alone.count > 0
    assert with_others.total.item() == pytest.approx(alone.total.item(), rel=1e-5)

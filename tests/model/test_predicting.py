"""Prediction in memory: what rows must be, order, streaming, and that a model is left as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.options import ReadOptions
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.model.inputs import load_table
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import batch_tokens, forward_windows, pack_features
from bert_tasks.outputs.features import Feature
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES


@pytest.fixture(scope="module")
def model(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> TaskModel:
    folder: Path = tmp_path_factory.mktemp("albert")
    save_checkpoint(folder, "albert", unigram_tokenizer, head="sequence", labels=("a", "b", "c"))
    return TaskModel.from_pretrained(folder, task="sequence-classification", max_length=40)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"review": "fine"}, "row 1: missing text in column 'text'. The row has 'review'."),
        ({}, "row 1: missing text in column 'text'. The row has no columns."),
        ({"text": None}, "row 1: missing text in column 'text'. Write an empty text as \"\"."),
        ({"text": 7}, "row 1: not a text in column 'text': 7. Write it in quotes."),
        ({"text": ["a"]}, "row 1: not a text in column 'text': ['a']. Write it in quotes."),
        (
            {"text": "broken \ud800"},
            "row 1: half a character (surrogate U+D800) in column 'text': 'broken \\ud800'. Replace it.",
        ),
        (("a", "b"), 'row 1: expected a mapping such as {"text": ...}, or a text, got tuple'),
        (None, 'row 1: expected a mapping such as {"text": ...}, or a text, got NoneType'),
    ],
)
def test_rows_that_cannot_be_read(model: TaskModel, row: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        model.predict([{"text": "fine"}, row])
    assert str(error.value) == message


def test_rows_are_counted_over_chunks(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 2)
    with pytest.raises(DataError, match="row 5: missing text in column 'text'"):
        model.predict([{"text": "a"}] * 5 + [{"words": "a"}])


def test_chunks_do_not_change_predictions(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": line} for line in LINES]
    whole = model.predict(rows)
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 3)
    parts = model.predict(rows)
    assert [prediction.to_json()["label"] for prediction in parts] == [
        prediction.to_json()["label"] for prediction in whole
    ]
    for left, right in zip(parts, whole, strict=True):
        assert left.to_json()["scores"] == pytest.approx(right.to_json()["scores"], abs=1e-6)


def test_rows_stream(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless source is read one chunk at a time."""
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 4)
    taken = 0

    def rows() -> Iterator[dict[str, str]]:
        nonlocal taken
        while True:
            taken += 1
            yield {"text": f"line {taken}"}

    stream = predict_rows(model, rows())
    for number in range(1, 10):
        next(stream)
        assert taken == -(-number // 4) * 4


def test_no_rows(model: TaskModel) -> None:
    assert model.predict([]) == []
    assert model.predict(iter(())) == []


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_left_as_it_was(model: TaskModel, training: bool) -> None:
    quiet = model.eval().predict([{"text": "the ferry leaves"}])
    model.train(training)
    try:
        assert model.predict([{"text": "the ferry leaves"}]) == quiet  # without dropout
        assert {module.training for module in model.modules()} == {training}
        with pytest.raises(IndexError):
            forward_windows(model, [Feature(row=0, input_ids=[10**6], token_type_ids=[0])])
        assert {module.training for module in model.modules()} == {training}
    finally:
        model.eval()


def test_logits_come_in_feature_order_without_a_graph(model: TaskModel) -> None:
    features = model.task.features([{"text": line} for line in LINES], model.tokenizer)
    logits = forward_windows(model, features, max_tokens=100)
    assert len(logits) == len(features)
    batch = pack_features(model, features)
    assert batch.layout.regroup is None, "on a CPU no rows are copied for attention"
    for index in (0, 7, 19):
        (alone,) = forward_windows(model, [features[index]])
        assert torch.allclose(alone, logits[index], atol=1e-6)
        assert not alone.requires_grad


def test_logits_do_not_depend_on_the_threads(model: TaskModel) -> None:
    features = model.task.features([{"text": line} for line in LINES], model.require_tokenizer())
    alone = forward_windows(model, features, max_tokens=30)
    torch.set_num_threads(2)
    try:
        together = forward_windows(model, features, max_tokens=30)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(together, alone)
    assert not model.training


def test_a_model_without_tokenizer(model: TaskModel) -> None:
    bare = TaskModel(model.hf_config, model.task)
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        bare.predict([{"text": "a"}])


def test_scores_that_are_no_numbers_are_no_answer(model: TaskModel) -> None:
    with pytest.raises(CheckpointError, match="scores are not finite"):
        list(predict_rows(model, [{"text": "a"}], forward_fn=lambda batch: model(batch) * float("nan")))


@pytest.mark.parametrize("labels", [2, 100, 1000, 10_000])
def test_the_logits_of_a_batch_of_a_crf_take_at_most_128_mib(model: TaskModel, labels: int) -> None:
    """A CRF has a matrix of logits for each word, so that batches get smaller with the square of the labels."""
    tagger: TaskModel = object.__new__(TaskModel)
    tagger.__dict__.update({**model.__dict__, "_modules": dict(model._modules)})
    tagger.head = CRFHead(model.config, labels, dropout=0.0)
    numbers = batch_tokens(tagger) * tagger.head.transitions.numel()
    assert batch_tokens(tagger) == 1 or numbers * 4 <= 128 * 2**20
    assert batch_tokens(tagger) == batch_tokens(model) or numbers * 4 > 64 * 2**20


REVIEWS = [{"review": "fine", "text": "4 of 5", "stars": "a"}]


@pytest.mark.parametrize(
    ("columns", "labels", "expected"),
    [
        (None, "optional", {"text": "4 of 5", "line": 1}),
        ({"text": "review"}, "optional", {"text": "fine", "line": 1}),
        ({"text": "review", "label": "stars"}, "required", {"text": "fine", "label": "a", "line": 1}),
        ({"text": "review", "label": "mood"}, "unread", {"text": "fine", "line": 1}),
    ],
)
def test_rows_in_memory_have_the_columns_that_are_stated(
    model: TaskModel,
    columns: dict[str, str] | None,
    labels: Literal["required", "optional", "unread"],
    expected: dict[str, Any],
) -> None:
    table = load_table(REVIEWS, model.row_columns, reading=ReadOptions(columns=columns), labels=labels)
    assert list(table) == [expected]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"text": "revew", "label": "stars"},
            r"^rows: no column 'revew', did you mean 'review'\?\n  the columns are: 'review', 'stars', 'text'\n",
        ),
        ({"label": "mood"}, r"^rows: no column 'mood'\n  the columns are: 'review', 'stars', 'text'\n"),
        ({"txt": "review"}, "not 'txt', did you mean 'text'?"),
    ],
)
def test_stated_columns_that_rows_in_memory_do_not_have(
    model: TaskModel, columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_table(REVIEWS, model.row_columns, reading=ReadOptions(columns=columns))

"""RemBERT's head over the vocabulary, whose table is not the table of word embeddings, and its tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase, RemBertTokenizer

from bert_tasks import TaskModel, fit, predict
from bert_tasks.checkpoints.tokenizers import load_tokenizer, with_segments
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import converted_config, encoder_config
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification
from support.hf_models import VERSION, hf_config
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES, MULTILINGUAL_LINES, REPLACED, sentencepiece_model, unigram_pieces
from support.task_contract import numbers
from support.task_examples import MASKED

ROWS = [dict(row) for row in MASKED]
DECODER = ("cls.predictions.decoder.bias", "cls.predictions.decoder.weight")


@pytest.fixture
def model(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> TaskModel:
    save_checkpoint(tmp_path / "base", "rembert", unigram_tokenizer, wide=True)
    return TaskModel.from_pretrained(tmp_path / "base", task=MaskedLanguageModeling.of(max_length=24))


def test_the_table_of_the_head_is_trained_saved_and_dropped_by_other_tasks(model: TaskModel, tmp_path: Path) -> None:
    assert set(DECODER) < set(model.load_report.new)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, ROWS, ROWS, output_dir=tmp_path / "run", epochs=1, progress=False)
    tables = ("encoder.embeddings.word.weight", "head.decoder.weight")
    assert [list(before[name].shape) for name in tables] == [[len(model.tokenizer), 20], [len(model.tokenizer), 44]]
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in tables)
    folder = tmp_path / "run" / "model"
    _, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(load_file(folder / "model.safetensors")[DECODER[1]], model.head.decoder.weight)
    labels = ("calm", "glad")
    other = TaskModel.from_pretrained(folder, task=SequenceClassification.of(labels=labels, max_length=24))
    assert set(DECODER) < set(other.load_report.dropped)


@pytest.mark.slow  # it trains
def test_a_student_has_the_table_and_learns_from_its_teacher(model: TaskModel, tmp_path: Path) -> None:
    student = model.with_layers([0])
    assert torch.equal(student.head.decoder.weight, model.head.decoder.weight)
    result = fit(student, ROWS, ROWS, output_dir=tmp_path / "run", teacher=model, epochs=1, progress=False)
    assert result.steps > 0
    predictions = numbers(predict(student, ROWS))
    assert predictions == pytest.approx(numbers(predict(tmp_path / "run", ROWS)), abs=1e-5)


def test_no_other_family_has_such_a_head() -> None:
    config = hf_config("rembert").to_dict()
    with pytest.raises(UsageError, match="computes with output_embedding_size = None instead of 44"):
        converted_config(config, layers=[0], family="electra")
    with pytest.raises(CheckpointError, match="output_embedding_size = 0, expected at least 1"):
        encoder_config({**config, "output_embedding_size": 0})


@pytest.mark.skipif(VERSION < (5, 14), reason="transformers before 5.14 adds no special tokens with new tokenizers")
def test_tokenizers_need_tokenizer_json(tmp_path: Path) -> None:
    """From the SentencePiece file alone, transformers 5.23 makes a tokenizer that adds no special tokens to a text."""
    pieces = unigram_pieces(["<pad>", "</s>", "<unk>", "<s>", "[CLS]", "[SEP]", "[MASK]"], 500)
    (tmp_path / "sentencepiece.model").write_bytes(sentencepiece_model(pieces, REPLACED))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rembert"}))
    with pytest.raises(CheckpointError, match=r"no tokenizer\. Expected one of tokenizer\.json, "):
        load_tokenizer(tmp_path, vocab_size=600)
    assert AutoTokenizer.from_pretrained(tmp_path)("")["input_ids"] == []
    RemBertTokenizer(vocab=pieces).save_pretrained(tmp_path)
    stock, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path, vocab_size=600)
    assert tokenizer is not None
    for text in (*LINES[:5], *MULTILINGUAL_LINES):
        encoding = with_segments(tokenizer, second=1)(text, "a")
        assert encoding["input_ids"] == stock(text, "a")["input_ids"]
        assert set(encoding["token_type_ids"]) == {0, 1}

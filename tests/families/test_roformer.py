"""RoFormer's stored sines and cosines, and what is rejected: its multiple choice, rotated values, words of jieba."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import RoFormerModel

from bert_tasks import Encoder
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.errors import CheckpointError
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "天气", "非常", "好", "the", "3", "a", "1", ",", "."]


@pytest.mark.parametrize(
    "changes", [{}, {"embedding_size": None}, {"hidden_size": 384, "max_position_embeddings": 1536}]
)
def test_a_new_table_is_transformers(changes: dict[str, int | None]) -> None:
    """Bit by bit."""
    config = hf_config("roformer", **changes)
    expected = RoFormerModel(config).encoder.embed_positions.weight
    assert torch.equal(Encoder(config.to_dict()).encoder.positions.weight, expected)


def test_the_table_of_a_file_counts() -> None:
    theirs = hf_model("roformer", "token")
    batch = random_batch("roformer")
    with torch.no_grad():
        before = ours_from(theirs, "token")
        theirs.roformer.encoder.embed_positions.weight.mul_(1.5)
    ours = ours_from(theirs, "token")
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, before, batch) > 1e-3


def test_positions_beyond_the_table_are_rejected() -> None:
    ours, batch = ours_from(hf_model("roformer"), "base"), random_batch("roformer")
    with pytest.raises(ValueError, match="position_ids holds 48, this checkpoint has embeddings for 0 to 47"):
        ours(batch.input_ids, batch.attention_mask, position_ids=torch.full_like(batch.input_ids, 48))


def test_words_of_jieba_are_rejected_with_the_library_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roformer"}))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), "utf-8")
    message = r"vocab\.txt: the tokenizer splits words with a Python library, such as jieba"
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path, vocab_size=50)
    words = SimpleNamespace(tokenize=lambda text, hmm: [(text, 0, len(text))])
    monkeypatch.setitem(sys.modules, "rjieba", words)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path, vocab_size=50)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    assert load_tokenizer(tmp_path, vocab_size=50) is not None

"""Tokenizers from the cache give what AutoTokenizer gives, without transformers."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bert_tasks import TaskModel
from bert_tasks.checkpoints import stored_tokenizers
from bert_tasks.checkpoints.stored_tokenizers import StoredTokenizer, open_tokenizer
from bert_tasks.checkpoints.tokenizers import load_tokenizer, same_token_ids, save_tokenizer, trained_segments
from bert_tasks.errors import CheckpointError, UsageError
from support.small_checkpoints import copied
from support.small_tokenizers import (
    LINES,
    MULTILINGUAL_LINES,
    train_bpe,
    train_camembert,
    train_deberta,
    train_modernbert,
    train_mpnet,
    train_unigram,
    train_xlm_roberta,
)

MANY = 10**6
TRAIN = (train_bpe, train_camembert, train_deberta, train_modernbert, train_mpnet, train_unigram, train_xlm_roberta)
ODD = "a\u200bﬁ…😀 \U00012000"
TEXTS = [
    *LINES[:6],
    *MULTILINGUAL_LINES[:4],
    "",
    " ",
    " two  spaces ",
    "[MASK] <mask> </s> [SEP]",
    ODD,
]
WORDS = [line.split() for line in LINES[:3]] + [["", "a b", "[SEP]"]]
PLAIN = {"return_offsets_mapping": True, "verbose": False}
WINDOWS = {"return_overflowing_tokens": True, "stride": 3, "max_length": 16}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "texts": ((TEXTS,), PLAIN),
    "one text": ((TEXTS[0],), PLAIN),
    "one pair": ((TEXTS[0], ""), {**PLAIN, "return_token_type_ids": True}),
    "pairs": ((TEXTS, TEXTS[::-1]), {**PLAIN, "return_token_type_ids": True, "split_special_tokens": True}),
    "without special tokens": ((TEXTS,), {"add_special_tokens": False, "return_attention_mask": False}),
    "cut": ((TEXTS, TEXTS[::-1]), {"truncation": True, "max_length": 12}),
    "windows": ((TEXTS,), {**PLAIN, **WINDOWS, "truncation": True}),
    "windows of the second": ((TEXTS[:6], TEXTS[6:12]), {**WINDOWS, "max_length": 60, "truncation": "only_second"}),
    "words": ((WORDS,), {**PLAIN, "is_split_into_words": True, "split_special_tokens": True}),
    "words of one text": ((WORDS[0],), {"is_split_into_words": True}),
    "padded, by transformers": ((TEXTS,), {"padding": True, "return_tensors": "pt"}),
}


QUICK = ("wordpiece", train_bpe, train_unigram)
LONG = [pytest.param(train, marks=pytest.mark.slow) for train in TRAIN if train not in QUICK]


@pytest.fixture(params=[*QUICK, *LONG], ids=lambda train: getattr(train, "__name__", train))
def folder(request: pytest.FixtureRequest, embedded_model: Path, tmp_path: Path) -> Path:
    if request.param == "wordpiece":
        return embedded_model
    trained: Path = request.param(tmp_path)
    return trained


def opened(folder: Path, second: int = 1) -> Any:
    return open_tokenizer(folder, vocab_size=MANY, second=second)


def stored(folder: Path, monkeypatch: pytest.MonkeyPatch, second: int = 1) -> Any:
    """The tokenizer of a folder, opened for the second time, when AutoTokenizer may not be asked."""
    opened(folder, second)
    with monkeypatch.context() as patch:
        patch.setattr(stored_tokenizers, "load_tokenizer", None)
        return opened(folder, second)


def plain(encoding: Any) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in encoding.items()}


@pytest.mark.parametrize("second", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_every_call_and_every_file_is_that_of_transformers(
    folder: Path, second: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = stored(folder, monkeypatch, second)
    loaded = load_tokenizer(folder, vocab_size=MANY)
    assert loaded is not None
    theirs = trained_segments(loaded, second=second)
    for name, (texts, options) in CALLS.items():
        ours_encoded, theirs_encoded = ours(*texts, **options), theirs(*texts, **options)
        assert plain(ours_encoded) == plain(theirs_encoded), name
        for method in ("word_ids", "sequence_ids", "tokens"):
            assert getattr(ours_encoded, method)(0) == getattr(theirs_encoded, method)(0), (name, method)
    for name in stored_tokenizers._ATTRIBUTES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert same_token_ids(ours, theirs)
    stock = AutoTokenizer.from_pretrained(folder)
    assert ours(LINES)["input_ids"] == stock(LINES)["input_ids"]
    assert ours.decode(ours(TEXTS[0])["input_ids"]) == stock.decode(stock(TEXTS[0])["input_ids"])
    files = []
    for name, tokenizer in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        save_tokenizer(tokenizer, tmp_path / name)
        files.append({path.name: path.read_text("utf-8") for path in (tmp_path / name).iterdir()})
    for content in files:  # the library tokenizers may read the last digit of a score as another one
        content["tokenizer.json"] = Tokenizer.from_str(content["tokenizer.json"]).to_str()
    assert files[0] == files[1]


def test_a_model_gives_the_tokenizer_of_transformers(embedded_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller changes in it counts in predictions."""
    model = TaskModel.from_pretrained(embedded_model, task="sequence-classification", labels=["a", "b"])
    assert type(model.require_tokenizer()) is StoredTokenizer
    before = model.predict("a fine film", logits=True)[0].logits
    assert isinstance(model.tokenizer, PreTrainedTokenizerBase)
    assert model.predict("a fine film", logits=True)[0].logits == before
    model.tokenizer.add_tokens(["qqfilm"])  # an id without an embedding
    with pytest.raises(UsageError, match="the input_ids of a feature hold 30522"):
        model.predict("a fine qqfilm")


def test_a_copy_is_the_same(bpe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = stored(bpe_folder, monkeypatch)
    for copied_one in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied_one(TEXTS)["input_ids"] == ours(TEXTS)["input_ids"]
        assert copied_one.pad_token == ours.pad_token


def test_changed_and_damaged_files_are_read_anew(
    bpe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(bpe_folder, tmp_path / "model")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    before = opened(folder)
    (entry,) = (tmp_path / "cache").rglob("*.json")
    content = entry.read_text("utf-8")
    for damaged in ("", content[:100], content.replace("ferry", "berry"), "\udcff"):
        entry.write_text(damaged, "utf-8", errors="surrogateescape")
        assert opened(folder)(TEXTS)["input_ids"] == before(TEXTS)["input_ids"]
        assert entry.read_text("utf-8") == content
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 77}), "utf-8")
    assert opened(folder).model_max_length == 77
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        opened(folder)


def test_a_cache_that_cannot_be_written_costs_time_only(
    bpe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    assert len(opened(bpe_folder)(TEXTS)["input_ids"]) == len(TEXTS)

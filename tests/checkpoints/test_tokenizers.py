"""Tokenizers of folders: loaded, checked against the model, and written without the state of the last call."""

import errno
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, XLMRobertaTokenizer

from bert_tasks.checkpoints.tokenizers import load_tokenizer, save_tokenizer, with_segments
from bert_tasks.errors import CheckpointError
from support.small_tokenizers import (
    LINES,
    MULTILINGUAL_LINES,
    REPLACED,
    charsmap,
    sentencepiece_model,
    unigram_pieces,
)

VOCABULARY = 30522
TEXT = "The ferry leaves the old harbour, 7 a.m."


@pytest.fixture
def folder(embedded_model: Path, tmp_path: Path) -> Path:
    """A copy of the embedded tokenizer and config that a test may damage."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(embedded_model / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path, vocab_size: int = VOCABULARY) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(folder, vocab_size=vocab_size)
    assert tokenizer is not None
    return tokenizer


def test_loads_what_transformers_loads(folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    assert load(folder)(TEXT)["input_ids"] == wordpiece_tokenizer(TEXT)["input_ids"]


def test_vocab_txt_alone(folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    (folder / "tokenizer.json").unlink()
    assert load(folder)(TEXT)["input_ids"] == wordpiece_tokenizer(TEXT)["input_ids"]


def test_other_kinds(bpe_folder: Path, unigram_folder: Path) -> None:
    for path in (bpe_folder, unigram_folder):
        assert len(load(path)(TEXT)["input_ids"]) > 10


def test_no_files(folder: Path) -> None:
    """AutoTokenizer would give a tokenizer of five tokens here."""
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    assert load_tokenizer(folder, vocab_size=VOCABULARY, required=False) is None
    with pytest.raises(CheckpointError, match=r"no tokenizer\. Expected one of tokenizer\.json, vocab\.txt"):
        load_tokenizer(folder, vocab_size=VOCABULARY)


FAST, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NO_LENGTH = r"model_max_length is .*, expected a number of tokens"
# New content of some files (None removes one), and what the message says.
DAMAGES: list[tuple[dict[str, bytes | None], str]] = [
    ({FAST: b""}, rf"/{FAST}: .*empty"),
    ({FAST: b'{"version": "1.0", "tru'}, rf"/{FAST}: .*not valid JSON"),
    ({FAST: b"{}"}, rf"/{FAST}: .*does not load"),
    ({FAST: b'{"model": {"type": "X"}, "added_tokens": []}'}, rf"/{FAST}: .*does not load"),
    ({FAST: b"version https://git-lfs.github.com/spec/v1\n"}, rf"/{FAST}: .*git lfs pull"),
    ({SETTINGS: b"{"}, rf"/{SETTINGS}: .*not valid JSON"),
    ({FAST: None, SETTINGS: b'{"tokenizer_class": "BertJapaneseTokenizer"}'}, "BertJapaneseTokenizer is a slow"),
    ({FAST: None, "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"}, "recognises no ordinary text"),
    (
        {"vocab.txt": None, SETTINGS: b'{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        "the tokenizer has no cls or bos, no sep or eos token",
    ),
    *(({SETTINGS: b'{"model_max_length": %s}' % value}, NO_LENGTH) for value in (b'"512"', b"true", b"0", b"12.5")),
]


@pytest.mark.parametrize(("contents", "message"), DAMAGES)
def test_what_cannot_be_used_is_named(contents: dict[str, bytes | None], message: str, folder: Path) -> None:
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder, vocab_size=VOCABULARY, required=False)


def test_vocabulary_must_fit_the_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has 30522 tokens, but the model has 30521 embeddings"):
        load_tokenizer(folder, vocab_size=VOCABULARY - 1)


@pytest.mark.parametrize("length", [64, 64.0, 10**30, 1e30])
def test_longest_texts_of_published_files(length: float, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", model_max_length=length)
    assert load(folder).model_max_length == length


def test_code_of_the_checkpoint_never_runs(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w')\nclass T: ...\n")
    auto_map = {"AutoTokenizer": ["evil.T", "evil.T"]}
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.T", "AutoTokenizer": "evil.T"})
    edit(folder / "tokenizer_config.json", auto_map=auto_map)
    assert len(load(folder)) == VOCABULARY
    edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder, vocab_size=VOCABULARY)
    assert "trust_remote_code" not in str(caught.value)
    assert not (folder / "canary").exists()


def test_a_tokenizer_that_is_only_code_of_the_checkpoint_is_refused(folder: Path) -> None:
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.T", "AutoTokenizer": "evil.T"})
    classes = {"AutoTokenizer": ["evil.T", "evil.T"]}
    edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=classes)
    with pytest.raises(CheckpointError, match="it needs Python code from the checkpoint, which is never run"):
        load_tokenizer(folder, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("spm.model", "deberta-v2"),
        ("spiece.model", "albert"),
        ("sentencepiece.bpe.model", "xlm-roberta"),
        ("sentencepiece.bpe.model", "camembert"),
    ],
)
def test_a_sentencepiece_file_is_converted(name: str, model_type: str, tmp_path: Path) -> None:
    """By transformers, with the libraries sentencepiece and protobuf. What is saved needs neither."""
    special = {"spm.model": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "spiece.model": ["<pad>", "<unk>", "[CLS]", "[SEP]"]}
    first = special.get(name, ["<unk>", "<s>", "</s>"])
    vocabulary = unigram_pieces(first, 500, unknown="[UNK]" if name == "spm.model" else "<unk>")
    (tmp_path / name).write_bytes(sentencepiece_model([*vocabulary, ("<user>", -1.0)], REPLACED))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 600}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "model_max_length": 512}))
    tokenizer = load(tmp_path, 600)
    assert type(tokenizer).__name__.lower().startswith(model_type.replace("-", "").removesuffix("v2"))
    save_tokenizer(tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved", 600)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*LINES[:5], *MULTILINGUAL_LINES, " two  spaces\tand １ﬁ… ", "a <user> of\u200b it<user>", ""):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"] == stock(text)["input_ids"]
    assert "<user>" not in tokenizer.all_special_tokens
    assert len(tokenizer("<user>", add_special_tokens=False)["input_ids"]) <= 2


def test_replacements_that_transformers_forgets(
    multilingual_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers before 5.14 leaves out what the tokenizer.json of SentencePiece tokenizers replaces in texts."""
    multilingual_tokenizer.save_pretrained(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.Precompiled(charsmap(REPLACED))
    backend.save(str(tmp_path / "tokenizer.json"))
    initialise = XLMRobertaTokenizer.__init__

    def initialise_as_before(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("_spm_precompiled_charsmap", None)
        initialise(self, *arguments, **options)

    monkeypatch.setattr(XLMRobertaTokenizer, "__init__", initialise_as_before)
    stock, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load(tmp_path, 600)
    source, text = "".join(REPLACED), "".join(REPLACED.values())
    assert stock(source)["input_ids"] != stock(text)["input_ids"]
    assert tokenizer(source)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("content", [b"\x0a\x0e\x0a\x05<unk>", b"", b"no model", b"\x0a\x07\x0a\x05<unk>"])
def test_a_damaged_sentencepiece_file_is_named(content: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    (folder / "spm.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"spm\.model: "):
        load(folder)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["multilingual", "french"])
def test_special_tokens_in_a_text_are_characters(
    name: str, tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    """The Unigram model has them among its pieces. Masks that are asked for stay masks."""
    by_kind[name].save_pretrained(tmp_path / "stock")
    tokenizer = load(tmp_path / "stock")
    text = "a </s></s> b<s>, <pad> <mask>"
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    plain: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
    assert special.intersection(by_kind[name](text, **plain)["input_ids"])
    assert special.isdisjoint(tokenizer(text, **plain)["input_ids"])
    assert tokenizer(TEXT, TEXT)["input_ids"] == by_kind[name](TEXT, TEXT)["input_ids"]
    assert tokenizer.mask_token_id in tokenizer(text)["input_ids"]
    save_tokenizer(tokenizer, tmp_path)
    again = load(tmp_path)
    assert again(text, **plain)["input_ids"] == tokenizer(text, **plain)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]


def test_log_level_is_restored(folder: Path) -> None:
    level = logging.getLogger("transformers").level
    load(folder)
    assert logging.getLogger("transformers").level == level


def test_saved_files_forget_the_last_call(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder)
    saved = []
    for limit in (3, 7):
        tokenizer(TEXT, truncation=True, max_length=limit, padding="max_length")
        (tmp_path / str(limit)).mkdir()
        save_tokenizer(tokenizer, tmp_path / str(limit))
        saved.append({file.name: file.read_bytes() for file in (tmp_path / str(limit)).iterdir()})
    assert saved[0] == saved[1]
    content = json.loads(saved[0]["tokenizer.json"])
    assert content["truncation"] is None
    assert content["padding"] is None


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "unigram"])
def test_saved_tokenizer_gives_the_same_ids(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(f"{name}_tokenizer")
    save_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "café 你好 😀 ", ""):
        assert again(text, text)["input_ids"] == tokenizer(text, text)["input_ids"]
    assert again.model_max_length == tokenizer.model_max_length


def test_full_disk_is_an_os_error(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """tokenizers reports it as a plain Exception."""
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        save_tokenizer(wordpiece_tokenizer, tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path))


@pytest.mark.parametrize("second", [0, 1])
def test_segments_are_decided_without_a_padding_token(folder: Path, second: int) -> None:
    """Windows are packed, so that nothing is padded."""
    tokenizer = load(folder)
    tokenizer.pad_token = None
    pair = with_segments(tokenizer, second=second)("a", "b c", return_token_type_ids=True)
    assert pair["token_type_ids"] == [0, 0, 0, second, second, second]
    assert tokenizer.backend_tokenizer.padding is None

"""Tokenizers that are trained: what stock transformers opens, the same files each time, and what is refused."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AlbertTokenizer, AutoTokenizer

from bert_tasks import TaskModel
from bert_tasks.checkpoints.tokenizer_training import train_tokenizer
from bert_tasks.checkpoints.tokenizers import builds_as_stated
from bert_tasks.data.options import ReadOptions
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.init.recipe import init_recipe
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import load_recipe
from support.small_tokenizers import LINES

TYPES = ("wordpiece", "bpe", "unigram")
SPECIAL = {
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "bpe": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "unigram": ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"],
}
FAMILIES = {"wordpiece": "bert", "bpe": "roberta", "unigram": "albert"}
# As BertTokenizer, RobertaTokenizer and AlbertTokenizer of published models put them around a pair.
PAIRS = {"wordpiece": "[CLS]A[SEP]B[SEP]", "bpe": "<s>A</s></s>B</s>", "unigram": "[CLS]A[SEP]B[SEP]"}
TEXT = "The café near the station doesn't charge 2.50, Ærø does."


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES[:10]) + "\n\n" + "\n".join(LINES[10:]) + "\nÆrø, ærø!\n")
    return path


def trained(corpus: Path, folder: str = "tok", type: Any = "wordpiece", **options: Any) -> Path:
    """The folder of a new tokenizer."""
    if type == "unigram" and not builds_as_stated(AlbertTokenizer):
        with pytest.raises(UsageError, match=r"unigram needs transformers 5\.14 or newer"):
            train_tokenizer([corpus], corpus.parent / folder, type=type, vocab_size=400)
        pytest.skip("transformers before 5.14 changes what unigram reads")
    train_tokenizer([corpus], corpus.parent / folder, type=type, **{"vocab_size": 400} | options)
    return corpus.parent / folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("type", TYPES)
def test_stock_transformers_opens_it_with_the_special_tokens_of_its_family(corpus: Path, type: Any) -> None:
    folder = trained(corpus, type=type)
    opened = AutoTokenizer.from_pretrained(folder)
    assert opened.convert_ids_to_tokens(list(range(5))) == SPECIAL[type]
    assert len(opened) <= 400
    assert opened.is_fast
    pair = opened("a", "b")["input_ids"]
    outline = "".join(token if token in SPECIAL[type] else "." for token in opened.convert_ids_to_tokens(pair))
    while ".." in outline:
        outline = outline.replace("..", ".")
    assert outline == PAIRS[type].replace("A", ".").replace("B", ".")
    assert opened.mask_token in opened.decode(opened(f"a {opened.mask_token} b")["input_ids"])
    folded = opened.decode(opened(TEXT, add_special_tokens=False)["input_ids"]).replace(" ", "")
    assert folded == TEXT.replace(" ", "")
    # The ids of special tokens are those that the configurations of the family expect.
    config = {"family": FAMILIES[type], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes = {"intermediate_size": 8, "max_position_embeddings": 40}
    model = TaskModel.from_config(
        config | sizes, task="sequence-classification", labels=["a", "b"], tokenizer=folder, max_length=32
    )
    assert model.config.vocab_size == len(opened)
    assert model.config.pad_token_id == SPECIAL[type].index("<pad>" if type != "wordpiece" else "[PAD]")
    assert len(model.predict([TEXT])) == 1


@pytest.mark.parametrize("type", TYPES)
def test_the_same_files_give_the_same_tokenizer(corpus: Path, type: Any) -> None:
    folders = [trained(corpus, name, type=type, vocab_size=300) for name in ("one", "two", "three")]
    first, *others = (files(folder) for folder in folders)
    assert all(other == first for other in others)
    assert {"tokenizer.json", "tokenizer_config.json"} <= first.keys()


@pytest.mark.parametrize("type", ["wordpiece", "unigram"])
def test_lower_case_is_stated(corpus: Path, type: Any) -> None:
    cased, uncased = (
        AutoTokenizer.from_pretrained(trained(corpus, str(lower), type=type, lowercase=lower))
        for lower in (False, True)
    )
    assert uncased.tokenize("CAFÉ") == uncased.tokenize("cafe")
    assert cased.tokenize("Café") != cased.tokenize("cafe")
    with pytest.raises(UsageError, match="bpe works on bytes"):
        trained(corpus, type="bpe", lowercase=True)


def chinese(folder: Path, count: int, *, other: str = "") -> tuple[Path, list[str]]:
    """A corpus of different Chinese characters, the first ones more frequent, and the characters."""
    characters = [chr(0x4E00 + number) for number in range(count)]
    path = folder / "chinese.txt"
    path.write_text("\n\n".join(["".join(characters[:length]) for length in (count // 2, count)] + [other]), "utf-8")
    return path, characters


def test_a_character_of_the_corpus_has_a_token_as_long_as_the_vocabulary_has_room(tmp_path: Path) -> None:
    path, characters = chinese(tmp_path, 3000, other="zh \u0e01\u0e02\u0e03 \u3042\u3044")
    opened = AutoTokenizer.from_pretrained(trained(path, vocab_size=3200))
    assert len(opened) <= 3200
    assert opened.tokenize("".join(characters)) == characters
    for text in ("hz", "\u0e03\u0e02\u0e01", "\u3044\u3042"):  # other words of the same characters
        assert "[UNK]" not in opened.tokenize(text)


def test_a_small_vocabulary_has_the_most_frequent_characters(tmp_path: Path) -> None:
    path, characters = chinese(tmp_path, 400, other="1 1 1")
    opened = AutoTokenizer.from_pretrained(trained(path, vocab_size=5 + 2 + 200))
    assert len(opened) == 207
    assert opened.tokenize("".join(characters)) == [*characters[:200], *["[UNK]"] * 200]


@pytest.mark.parametrize("type", TYPES)
def test_a_tokenizer_is_a_new_model_for_init(type: Any, corpus: Path, tmp_path: Path) -> None:
    folder = trained(corpus, type=type)
    reviews = tmp_path / "reviews.csv"
    reviews.write_text("text,label\n" + "".join(f'"{line}",{n % 2}\n' for n, line in enumerate(LINES)), "utf-8")
    init_recipe(reviews, model=str(folder), output=tmp_path / "made.toml")
    recipe = load_recipe(tmp_path / "made.toml")
    assert recipe.model.config is not None
    assert (recipe.model.config["family"], recipe.model.name) == (FAMILIES[type], None)
    check(recipe)
    for content in ("{", "{}", '{"model": 1}'):
        (folder / "tokenizer.json").write_text(content, "utf-8")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
            init_recipe(reviews, model=str(folder), output=tmp_path / "other.toml")


def test_the_corpus_is_read_as_training_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"parts": [line, line.upper()]}) + "\n" for line in LINES))
    reading = ReadOptions(columns={"sentences": "parts"})
    tokenizer = train_tokenizer([path], tmp_path / "tok", type="bpe", vocab_size=500, reading=reading)
    pieces = tokenizer.get_vocab()
    assert any(len(piece) > 2 and piece.isupper() for piece in pieces)
    assert any(len(piece) > 2 and piece.islower() for piece in pieces)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vocab_size": 3}, "vocab_size is 3, expected 7 to 1000000 for wordpiece"),
        ({"vocab_size": 260, "type": "bpe"}, "vocab_size is 260, expected 261 to 1000000 for bpe"),
        ({"vocab_size": 40, "type": "unigram"}, "vocab_size is 40, expected at least 57"),
        ({"type": "sentencepiece"}, "type is 'sentencepiece', expected one of wordpiece, bpe, unigram"),
        ({"folder": "."}, "is not an empty folder"),
        ({"folder": "corpus.txt"}, "is not an empty folder"),
    ],
)
def test_options_that_are_refused(corpus: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(corpus, **options)


def test_a_full_disk_leaves_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tokenizer: object, folder: Path) -> None:
        (folder / "tokenizer.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device (os error 28)")

    monkeypatch.setattr("bert_tasks.checkpoints.tokenizer_training.save_tokenizer", fail)
    with pytest.raises(OSError, match="No space left"):
        trained(corpus)
    assert not (corpus.parent / "tok").exists()
    assert not list(corpus.parent.glob(".*"))


KILLED = """
import os, signal, sys
from bert_tasks.checkpoints import tokenizer_training
tokenizer_training.save_tokenizer = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
tokenizer_training.train_tokenizer([sys.argv[1]], sys.argv[2], type="bpe", vocab_size=400)
"""


@pytest.mark.slow  # it kills a process
def test_the_next_training_removes_what_a_killed_one_left(corpus: Path) -> None:
    command = [sys.executable, "-c", KILLED, corpus, corpus.parent / "tok"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (corpus.parent / "tok").exists()
    assert list(corpus.parent.glob(".*"))
    assert trained(corpus, type="bpe").is_dir()
    assert not list(corpus.parent.glob(".*"))


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("\n \n")
    with pytest.raises(DataError, match="no rows"):
        trained(tmp_path / "rows.txt")
    (tmp_path / "rows.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(DataError, match="holds no text"):
        trained(tmp_path / "rows.jsonl", type="unigram")

"""Weights with the vocabulary of some texts: these keep their tokens and logits, and other texts still have tokens."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bert_tasks import TaskModel, predict
from bert_tasks.cli import main
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.export import export, vocabulary
from support.small_checkpoints import edit_config, save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES, MULTILINGUAL_LINES
from support.task_contract import numbers
from support.task_examples import CHOICES, MASKED, PAIRS, QUESTIONS, SENTENCES

# The vocabularies lack some of these characters.
TEXTS = [line[:40] for line in [*LINES[:6], *MULTILINGUAL_LINES[:5]]] + ["a snow☃man", "x" * 120, "[MASK] </s>", ""]


def saved(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A classifier as this package saves it, because some tokenizers get other segments then."""
    save_checkpoint(folder.with_suffix(".stock"), family, tokenizer, head="sequence", wide=True, positions=300)
    return export(folder.with_suffix(".stock"), to="transformers", output=folder).folder


def unknown_score(folder: Path) -> float | None:
    """The lowest score of Unigram, from which that of unknown characters is computed."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    return min(score for _, score in model["vocab"]) if model["type"] == "Unigram" else None


def random_texts(seed: int) -> list[str]:
    """Parts of known lines, with characters of any script between them."""
    source = random.Random(seed)
    texts = []
    for _ in range(24):
        line = source.choice([*LINES, *MULTILINGUAL_LINES])
        start = source.randrange(len(line))
        stranger = chr(source.choice([source.randrange(32, 0x250), source.randrange(0x370, 0xD800), 0x1F600]))
        texts.append(line[start : start + source.randrange(12)] + stranger + source.choice(line.split()))
    return texts


@pytest.mark.parametrize(
    "family",
    [
        *("roberta", "albert"),
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("bert", "xlm-roberta", "camembert", "mpnet", "modernbert", "deberta-v2", "eurobert", "gemma")
        ),
    ],
)
def test_the_texts_keep_tokens_and_logits(
    family: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    if family == "gemma":  # the tokenizer of mmBERT, which is a ModernBERT
        source = saved(tmp_path / "model", "modernbert", by_kind["gemma"])
    else:
        source = saved(tmp_path / "model", family, tokenizer_of(family, by_kind))
    texts = [*TEXTS, *random_texts(0)]
    smaller = export(source, to="transformers", output=tmp_path / "smaller", vocabulary=texts).folder
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(smaller)
    whole = AutoModelForSequenceClassification.from_pretrained(source)
    part = AutoModelForSequenceClassification.from_pretrained(smaller)
    assert len(after) == part.config.vocab_size < whole.config.vocab_size
    assert after.all_special_tokens == before.all_special_tokens
    padding = [before.convert_ids_to_tokens(whole.config.pad_token_id)]
    assert after.convert_ids_to_tokens([part.config.pad_token_id]) == padding
    inputs, others = (tokenizer(texts, texts, padding=True, return_tensors="pt") for tokenizer in (before, after))
    ids = zip(inputs["input_ids"].flatten().tolist(), others["input_ids"].flatten().tolist(), strict=True)
    old, new = zip(*sorted(set(ids)), strict=True)
    assert list(new) == sorted(set(new))  # one to one, in the same order
    assert before.convert_ids_to_tokens(old) == after.convert_ids_to_tokens(new)
    assert unknown_score(smaller) == unknown_score(source)
    with torch.no_grad():
        torch.testing.assert_close(part(**others).logits, whole(**inputs).logits, rtol=0, atol=1e-5)
    assert numbers(predict(smaller, texts)) == pytest.approx(numbers(predict(source, texts)), abs=1e-5)
    source_of_words = random.Random(1)
    for text in [*random_texts(1), *texts]:
        ids = after(text)["input_ids"]
        assert max(ids) < len(after)
        # Other words of the same characters are unknown only if they were.
        shuffled = "".join(source_of_words.sample(text, len(text)))
        was_unknown = before.unk_token_id in before(shuffled)["input_ids"]
        if text in texts and not was_unknown:
            assert after.unk_token_id not in after(shuffled)["input_ids"]


def test_the_piece_that_unknown_characters_depend_on_stays(
    unigram_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """No text has this piece, and its score is the lowest."""
    source = saved(tmp_path / "model", "albert", unigram_tokenizer)
    content = json.loads((source / "tokenizer.json").read_text())
    words = [entry for entry in content["model"]["vocab"] if entry[0].startswith("▁")]
    word = max(words, key=lambda entry: len(entry[0]))
    word[1] = -30.0
    (source / "tokenizer.json").write_text(json.dumps(content))
    smaller = export(source, to="transformers", output=tmp_path / "smaller", vocabulary=["a ☃ cat", "☃"]).folder
    assert word[0] in AutoTokenizer.from_pretrained(smaller).get_vocab()
    assert unknown_score(smaller) == -30.0


@pytest.mark.parametrize(("family", "kind"), [("roberta", "bpe"), ("modernbert", "gemma")])
def test_a_tokenizer_with_bytes_reads_every_text(
    family: str, kind: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    source = saved(tmp_path / "model", family, by_kind[kind])
    smaller = export(source, to="transformers", output=tmp_path / "smaller", vocabulary=["a cold wind"]).folder
    tokenizer = AutoTokenizer.from_pretrained(smaller)
    assert len(tokenizer) < 330  # 256 bytes, 5 special tokens, characters and a few pieces
    for text in [*LINES, *MULTILINGUAL_LINES, "🤗"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_wordpiece_keeps_the_piece_for_unknown_characters(
    wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    content = json.loads(wordpiece_tokenizer.backend_tokenizer.to_str())
    found = tokens_in_smaller_vocabulary(content, tmp_path, ["a cold wind"])
    assert found == ["[CLS]", "a", "[UNK]", "wind", "[SEP]"]


@pytest.mark.parametrize("has_unknown", [True, False])
def test_unigram_keeps_the_piece_for_unknown_characters(
    has_unknown: bool, unigram_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The piece is the last one, so it gets another id. A tokenizer that has all characters can do without it."""
    content = json.loads(unigram_tokenizer.backend_tokenizer.to_str())
    settings = content["model"]
    pieces = settings["vocab"]
    pieces.append(pieces[1])
    pieces[1] = ["▁never", -9.0]
    settings["unk_id"] = len(pieces) - 1
    texts = ["a cold wind"]
    if not has_unknown:
        settings["unk_id"] = None
        missing = set("☃3ип\u0435л你好,.<>[]1\U00012000") - {piece for piece, _ in pieces}
        pieces += [[character, -9.0] for character in sorted(missing)]
        texts += missing
    unknown = "<unk>" if has_unknown else "☃"
    expected = ["[CLS]", "▁a", "▁", unknown, "▁win", "d", "[SEP]"]
    assert tokens_in_smaller_vocabulary(content, tmp_path, texts) == expected


def tokens_in_smaller_vocabulary(content: dict[str, Any], folder: Path, texts: list[str]) -> list[str]:
    """Exports a model with this tokenizer, of which transformers knows no piece for unknown characters."""
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in ("[UNK]", "<unk>")]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"pad_token": content["added_tokens"][0]["content"]}
    names |= {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "mask")}
    before = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=300, **names)
    save_checkpoint(folder / "model", "bert", before, head="sequence", wide=True, positions=300)
    smaller = export(folder / "model", to="transformers", output=folder / "smaller", vocabulary=texts).folder
    text = "a ☃ wind"
    after = AutoTokenizer.from_pretrained(smaller)
    tokens = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for tokenizer in (before, after)]
    assert tokens[0] == tokens[1]
    assert len(after) < len(before)
    assert numbers(predict(smaller, [text])) == pytest.approx(numbers(predict(folder / "model", [text])), abs=1e-5)
    return tokens[1]


def with_special_tokens_at(place: int, tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """Moves the five special tokens, which have the first ids, behind this number of pieces."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    for piece, number in ids.items():
        if number < place + 5:
            ids[piece] = (number - 5) % (place + 5)
    content["model"]["vocab"] = dict(sorted(ids.items(), key=lambda pair: pair[1]))
    for token in content["added_tokens"]:
        token["id"] = ids[token["content"]]
    for piece, token in content["post_processor"]["special_tokens"].items():
        token["ids"] = [ids[piece]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    moved = AutoTokenizer.from_pretrained(folder)
    assert moved.pad_token_id == place
    return moved


@pytest.mark.parametrize("processor", ["TemplateProcessing", "RobertaProcessing"])
def test_special_tokens_behind_the_pieces(
    processor: str, modern_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As in published ModernBERT checkpoints. Their ids change in config.json and in the post-processor, too."""
    before = with_special_tokens_at(595, modern_tokenizer, tmp_path)
    if processor == "RobertaProcessing":
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        ends = {"sep": ["[SEP]", 597], "cls": ["[CLS]", 596]}
        content["post_processor"] = {"type": processor, **ends, "trim_offsets": True, "add_prefix_space": False}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        before = AutoTokenizer.from_pretrained(tmp_path)
    save_checkpoint(tmp_path / "model", "modernbert", before, head="sequence", wide=True, positions=300)
    edit_config(tmp_path / "model", pad_token_id=595, cls_token_id=596, sep_token_id=597, bos_token_id=None)
    no_ids = [600, [597]]
    edit_config(tmp_path / "model", eos_token_id=[597, 596, *no_ids], decoder_start_token_id={})
    smaller = export(tmp_path / "model", to="transformers", output=tmp_path / "smaller", vocabulary=LINES[:5]).folder
    after = AutoTokenizer.from_pretrained(smaller)
    config = json.loads((smaller / "config.json").read_text())
    for role in ("pad", "cls", "sep"):
        assert config[f"{role}_token_id"] == getattr(after, f"{role}_token_id") < len(after) < 595
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == [after.sep_token_id, after.cls_token_id]
    tokens = [tokenizer.convert_ids_to_tokens(tokenizer(LINES[0])["input_ids"]) for tokenizer in (before, after)]
    assert tokens[0] == tokens[1]
    assert (tokens[1][0], tokens[1][-1]) == ("[CLS]", "[SEP]")


def test_the_published_model(embedded_model: Path, tmp_path: Path) -> None:
    """Characters stay if a kept piece has a character of their script. The model opens again with its settings."""
    model = TaskModel.from_pretrained(embedded_model, task="text-classification", labels=["no", "yes"], max_length=16)
    result = export(model, to="transformers", output=tmp_path / "smaller", vocabulary=[*LINES, "Слон"])
    measured = result.record["vocabulary"]
    assert (measured["rows"], measured["before"]["pieces"]) == (21, 30522)
    size = sum(path.stat().st_size for path in result.folder.glob("*.safetensors"))
    assert measured["after"]["mib"] == pytest.approx(size / 2**20, rel=0.01)
    saved_rows = (measured["before"]["pieces"] - measured["after"]["pieces"]) * model.config.embedding_size * 4
    assert measured["before"]["mib"] - measured["after"]["mib"] == pytest.approx(saved_rows / 2**20)
    assert f"vocabulary: {measured['after']['pieces']:,} of 30,522 pieces" in result.lines()
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert tokenizer.tokenize("zyx ждф 漢") == ["z", "##y", "##x", "ж", "##д", "##ф", "[UNK]"]
    assert TaskModel.from_pretrained(result.folder).task == model.task


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("pair-classification", PAIRS),
        ("token-classification", SENTENCES),
        ("span-extraction", QUESTIONS),
        ("multiple-choice", CHOICES),
    ],
)
def test_rows_of_other_tasks(task: str, rows: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Long texts are truncated after the same tokens, because texts are read whole."""
    model = TaskModel.from_pretrained(checkpoint, task=task)
    labels = {"token-classification": ["O", "B-X"], "pair-classification": ["no", "yes"]}.get(task)
    if labels is not None:
        model = TaskModel.from_pretrained(checkpoint, task=task, labels=labels, max_length=8, **_overlap(task))
    data = [dict(row) for row in rows]
    result = export(model, to="transformers", output=tmp_path / "smaller", vocabulary=data)
    assert result.record["vocabulary"]["after"]["pieces"] < model.config.vocab_size
    assert numbers(predict(result.folder, data)) == pytest.approx(numbers(predict(model, data)), abs=1e-6)


def _overlap(task: str) -> dict[str, int]:
    return {"doc_stride": 2} if task == "token-classification" else {}


@pytest.mark.parametrize(("family", "is_tied"), [("roberta", True), ("eurobert", False)])
def test_masked_language_models(
    family: str, is_tied: bool, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """The decoder and its bias have the same rows as the table. Pieces that are gone cannot be predicted."""
    save_checkpoint(tmp_path / "base", family, tokenizer_of(family, by_kind), wide=True)
    edit_config(tmp_path / "base", tie_word_embeddings=is_tied)
    model = TaskModel.from_pretrained(tmp_path / "base", task="masked-language-modeling", max_length=24)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.normal_(std=0.5)  # the bias, too
    source = export(model, to="transformers", output=tmp_path / "whole").folder
    texts = [row["text"].replace("[MASK]", model.tokenizer.mask_token) for row in MASKED]
    smaller = export(model, to="transformers", output=tmp_path / "smaller", vocabulary=texts_file(tmp_path, texts))
    check_logits_of_masked_language_models(source, smaller.folder, texts)
    assert len(predict(smaller.folder, [dict(MASKED[0])])[0].masks) == 1


def check_logits_of_masked_language_models(source: Path, smaller: Path, texts: list[str]) -> None:
    """The logits of the pieces that stay are the same. export does not check them."""
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(smaller)
    kept = before.convert_tokens_to_ids(after.convert_ids_to_tokens(range(len(after))))
    whole = AutoModelForMaskedLM.from_pretrained(source)
    part = AutoModelForMaskedLM.from_pretrained(smaller)
    assert len(after) == part.config.vocab_size < whole.config.vocab_size
    for text in texts:
        expected = whole(**before(text, return_tensors="pt")).logits[..., kept]
        torch.testing.assert_close(part(**after(text, return_tensors="pt")).logits, expected)


def test_positions_behind_the_id_of_padding(modern_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The id stays, because RoBERTa's first token has the position behind it."""
    tokenizer = with_special_tokens_at(300, modern_tokenizer, tmp_path)
    save_checkpoint(tmp_path / "base", "roberta", tokenizer, wide=True, positions=600)
    edit_config(tmp_path / "base", pad_token_id=300)
    model = TaskModel.from_pretrained(tmp_path / "base", task="masked-language-modeling", max_length=24)
    source = export(model, to="transformers", output=tmp_path / "whole").folder
    texts = [row["text"] for row in MASKED]
    smaller = export(model, to="transformers", output=tmp_path / "smaller", vocabulary=texts).folder
    check_logits_of_masked_language_models(source, smaller, texts)


def texts_file(folder: Path, texts: list[str]) -> Path:
    path = folder / "texts.txt"
    path.write_text("\n".join(texts) + "\n")
    return path


def test_the_texts_are_what_predict_accepts(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Only paths in a list are files."""
    source = saved(tmp_path / "model", "albert", unigram_tokenizer)
    texts = ["snow wind", "the child asked"]
    file = texts_file(tmp_path, texts)
    rows = [{"text": text} for text in texts]
    vocabularies = []
    for data in (texts, rows, pd.DataFrame(rows), file, str(file), [file], (file,)):
        result = export(source, to="transformers", output=tmp_path / "smaller", overwrite=True, vocabulary=data)
        assert result.record["vocabulary"]["rows"] == 2
        vocabularies.append(AutoTokenizer.from_pretrained(result.folder).get_vocab())
    assert "▁win" in vocabularies[0]
    assert all(found == vocabularies[0] for found in vocabularies)


def test_the_command_reads_several_files(
    bpe_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = saved(tmp_path / "model", "roberta", bpe_tokenizer)
    (tmp_path / "train.csv").write_text("text,label\na cold wind,x\n")
    paths = [str(tmp_path / "train.csv"), str(texts_file(tmp_path, LINES))]
    options = ["--to", "transformers", "--vocabulary", paths[0], "--vocabulary", paths[1]]
    command = ["bert-tasks", "export", str(source), *options, "--output", str(tmp_path / "smaller"), "--json"]
    monkeypatch.setattr("sys.argv", command)
    assert ended_with() == 0
    record = json.loads(capsys.readouterr().out)
    assert record["vocabulary"]["rows"] == 1 + len(LINES)
    monkeypatch.setattr("sys.argv", [*command, "--overwrite"])
    assert ended_with() == 0


def ended_with() -> Any:
    """The exit code of the command."""
    try:
        main()
    except SystemExit as error:
        return error.code or 0
    return 0


def with_new_weights(model: TaskModel) -> TaskModel:
    torch.nn.init.normal_(model.encoder.embeddings.word.weight)
    return model


def test_what_is_refused(
    bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = vocabulary._smaller_model
    source = saved(tmp_path / "model", "roberta", bpe_tokenizer)
    with pytest.raises(UsageError, match=r"a smaller vocabulary is for weights\. Set to='transformers'"):
        export(source, to="onnx", output=tmp_path / "other", vocabulary=["a"])
    with pytest.raises(DataError, match="there is no row whose pieces could be the vocabulary"):
        export(source, to="transformers", output=tmp_path / "other", vocabulary=[])
    monkeypatch.setattr(vocabulary, "_merged_pieces", lambda pieces, merges: set())
    with pytest.raises(CheckpointError, match="the texts have other tokens with a smaller vocabulary, so export wrote"):
        export(source, to="transformers", output=tmp_path / "other", vocabulary=["a"] * 200 + LINES)  # all are checked
    monkeypatch.undo()
    monkeypatch.setattr(vocabulary, "_smaller_model", lambda model, new_ids: with_new_weights(made(model, new_ids)))
    with pytest.raises(CheckpointError, match="the same tokens have other logits with a smaller vocabulary, so export"):
        export(source, to="transformers", output=tmp_path / "other", vocabulary=LINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.stock"]

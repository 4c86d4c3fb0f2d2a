"""Texts in a language that the vocabulary does not have: what checks, training, evaluation and prediction report."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.inference.prediction import predict_file
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import load_recipe
from support.small_checkpoints import save_checkpoint, tokenizer_of

THAI = "\u0e01\u0e02\u0e04 \u0e07\u0e08"  # two words, each an unknown token
ENGLISH = "the ferry leaves home"
WARNING = "{} of {} tokens ({}) are unknown to {}. Choose a multilingual model or a model for the language of"


def rows_of(count: int, *texts: str) -> list[dict[str, Any]]:
    return [{"text": texts[n % len(texts)], "label": ("calm", "glad")[n // len(texts) % 2]} for n in range(count)]


@pytest.fixture(scope="module")
def folder(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_checkpoint(folder, "bert", wordpiece_tokenizer)
    return folder


def load(folder: Path) -> TaskModel[Any]:
    return TaskModel.from_pretrained(folder, task="sequence-classification", labels=["calm", "glad"], max_length=16)


def checked(folder: Path, rows: list[dict[str, Any]], tmp_path: Path) -> list[str]:
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'task = "sequence-classification"\n[model]\nname = "{folder}"\n[settings]\nmax_length = 16\n'
        '[data]\ntrain = "rows.csv"\nvalidation = "rows.csv"\n[optim]\nepochs = 1\n'
    )
    return [line.strip() for line in check(load_recipe(recipe)).lines() if "unknown" in line]


def test_every_command_warns_of_many(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(8, THAI, ENGLISH)  # 2 of 2 and 0 of 4 tokens are unknown
    said = WARNING.format(8, 24, "33.33%", folder)
    assert [line.startswith(said) for line in checked(folder, rows, tmp_path)] == [True, True]  # train and validation
    model = load(folder)
    fit(model, rows, rows, output_dir=tmp_path / "run", epochs=1)
    assert f"train: {said}" in " ".join(capsys.readouterr().err.split())
    evaluate(model, rows)
    assert f"rows: {said}" in caplog.text
    for output in (tmp_path / "out.jsonl", io.BytesIO()):
        assert [line.startswith(said) for line in predict_file(model, rows, output).lines()] == [True]


@pytest.mark.slow  # trains
def test_a_few_are_counted_where_there_is_a_summary(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*rows_of(58, ENGLISH), *rows_of(2, "\u0e07\u0e08")]
    line = f"2 of 234 tokens (0.85%) are unknown to {folder}"
    assert checked(folder, rows, tmp_path) == [line, line]
    model = load(folder)
    fit(model, rows, rows, output_dir=tmp_path / "run", epochs=1)
    assert f"train: {line}" in " ".join(capsys.readouterr().err.split())
    evaluate(model, rows)
    assert "unknown" not in caplog.text
    assert predict_file(model, rows, tmp_path / "out.jsonl").lines() == []


@pytest.mark.parametrize(
    ("family", "are_counted"),
    [("bert", True), ("albert", True), ("roberta", False), ("modernbert", False)],  # the last two read bytes
)
def test_tokenizers(family: str, are_counted: bool, by_kind: dict[str, PreTrainedTokenizerBase]) -> None:
    tokenizer = tokenizer_of(family, by_kind)
    counts = UnknownTokens.of([np.array(tokenizer(THAI)["input_ids"])], tokenizer)
    assert (counts.unknown > 0) == are_counted == bool(counts.notes("it"))
    assert UnknownTokens.of([], tokenizer).notes("it") == ()
    word = np.array([tokenizer.unk_token_id])  # in tagging also of a word without characters
    assert UnknownTokens.of([word], tokenizer) == ((1, 1) if are_counted else (0, 0))

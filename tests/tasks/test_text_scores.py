"""Scores of texts by a masked language model against a loop over transformers' model, one forward pass a token."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertForMaskedLM, PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate
from bert_tasks.errors import UsageError
from bert_tasks.model import windows
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.tasks import masked_language_modeling as task_module
from support.hf_models import hf_config, widen
from support.small_tokenizers import LINES

TEXTS = LINES[:9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    """A BERT of words that the tokenizer cuts into several pieces."""
    folder = tmp_path_factory.mktemp("scores")
    torch.manual_seed(0)
    config = hf_config("bert", vocab_size=len(unigram_tokenizer), max_position_embeddings=80, num_hidden_layers=2)
    config.architectures = ["BertForMaskedLM"]
    model = BertForMaskedLM(config)
    widen(model, seed=0)
    model.save_pretrained(folder)
    unigram_tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def brute_force(folder: Path, tokenizer: PreTrainedTokenizerBase, text: str, *, by_word: bool) -> list[float]:
    model = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    encoding = tokenizer(text, return_tensors="pt")
    ids, words = encoding["input_ids"], encoding.word_ids(0)
    scores = []
    for index, word in enumerate(words):
        if word is None:
            continue
        masked = ids.clone()
        for other in range(index, len(words)):
            if other == index or (by_word and words[other] == word):
                masked[0, other] = tokenizer.mask_token_id
        segments = torch.zeros_like(ids)
        logits = model(masked, attention_mask=torch.ones_like(ids), token_type_ids=segments).logits
        scores.append(logits[0, index].log_softmax(0)[ids[0, index]].item())
    return scores


@pytest.mark.parametrize("score", ["pppl", "pll-word-l2r"])
def test_scores_equal_a_loop_over_transformers(
    folder: Path, unigram_tokenizer: PreTrainedTokenizerBase, score: str
) -> None:
    model = TaskModel.from_pretrained(folder, task=MaskedLanguageModeling.of(score=score, max_length=80))
    for text, prediction in zip(TEXTS[:3], model.predict(TEXTS[:3]), strict=True):
        logarithms = brute_force(folder, unigram_tokenizer, text, by_word=score == "pll-word-l2r")
        total = math.fsum(logarithms)
        expected = total if score == "pll-word-l2r" else math.exp(-total / len(logarithms))
        assert prediction.to_json() == {"score": pytest.approx(expected, rel=1e-6), "tokens": len(logarithms)}


def test_masking_the_rest_of_a_word_changes_the_score(folder: Path) -> None:
    values = {}
    for score in ("pppl", "pll-word-l2r"):
        model = TaskModel.from_pretrained(folder, task="fill-mask", score=score, max_length=80)
        values[score] = [prediction.score for prediction in model.predict(TEXTS)]
    sums = [math.exp(-total) for total in values["pll-word-l2r"]]
    assert all(value != pytest.approx(other) for value, other in zip(values["pppl"], sums, strict=True))


def test_each_token_of_a_long_text_is_scored_once(folder: Path, unigram_tokenizer: PreTrainedTokenizerBase) -> None:
    text = " ".join(TEXTS[:3])
    model = TaskModel.from_pretrained(folder, task=MaskedLanguageModeling.of(score="pppl", max_length=20))
    (whole,) = model.predict(text)
    assert whole.tokens == len(unigram_tokenizer(text, add_special_tokens=False)["input_ids"])
    assert [json.loads(json.dumps(prediction.to_json())) for prediction in model.predict(["", "[MASK]"])] == [
        {"score": None, "tokens": 0}
    ] * 2


@pytest.mark.parametrize("score", ["pppl", pytest.param("pll-word-l2r", marks=pytest.mark.slow)])
def test_batches_bound_the_copies_that_exist_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    task = MaskedLanguageModeling.of(score=score, max_length=20)
    model = TaskModel.from_pretrained(folder, task=task)
    texts = [*TEXTS[:3], " ".join(TEXTS[3:5])] * 3
    expected = model.predict(texts)
    copy_count, run_copies, sizes = 0, 0, []
    copies, run = task_module.scored_copies, windows.pack_features

    def counted(*args: Any, **options: Any) -> Iterator[Any]:
        nonlocal copy_count
        for feature in copies(*args, **options):
            copy_count += 1
            yield feature

    def recorded(model: Any, features: Any) -> Any:
        nonlocal run_copies
        run_copies += len(features)
        assert copy_count <= run_copies + 4 * (50 // 6)  # copies are made for the next four batches at most
        sizes.append(sum(len(feature["input_ids"]) for feature in features))
        return run(model, features)

    monkeypatch.setattr(task_module, "scored_copies", counted)
    monkeypatch.setattr(windows, "pack_features", recorded)
    monkeypatch.setattr(windows, "batch_tokens", lambda model: 50)
    predictions = model.predict(texts)
    assert [prediction.tokens for prediction in predictions] == [prediction.tokens for prediction in expected]
    assert [prediction.score for prediction in predictions] == pytest.approx(
        [prediction.score for prediction in expected], rel=1e-5
    )
    assert max(sizes) <= 50
    assert copy_count == sum(prediction.tokens for prediction in predictions)


def test_scores_are_for_predictions_only(folder: Path) -> None:
    model = TaskModel.from_pretrained(folder, task=MaskedLanguageModeling.of(score="pppl", max_length=20))
    with pytest.raises(UsageError, match='score = "none"'):
        evaluate(model, [{"text": "a map"}])

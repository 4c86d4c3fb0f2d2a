"""Folders that transformers saved, whatever their labels are called, open, evaluate and predict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.conll import to_iob2
from bert_tasks.data.writers import json_line
from bert_tasks.inference import evaluate, predict
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import PairClassification, SpanExtraction, TokenClassification
from support.hf_models import WITH_SPAN, WITHOUT_TYPES, with_families
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES
from support.task_contract import padded_logits

TAGGERS = {
    "IOB2": ("I-LOC", "O", "B-LOC", "B-PER", "I-PER"),
    "BIOES": ("S-x", "O", "B-x", "E-x", "I-x"),
    "entities without prefix": ("PER", "O", "place of birth"),
    "parts of speech": ("NOUN", "VERB", "PUNCT", "X"),
    "unnamed": ("LABEL_0", "LABEL_1", "LABEL_2"),
}
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": str(number),
        "question": f"What about {line.split()[1]}?",
        "context": line,
        "answers": {"text": [line.split()[2]], "answer_start": [line.index(line.split()[2])]},
    }
    for number, line in enumerate(LINES[:6])
]


def sentences(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Words that all bear tags the labels can say."""
    whole = [label for label in labels if label[:2] not in ("I-", "E-") and ("B-" not in label or "S-x" not in labels)]
    return [
        {"words": words, "tags": [whole[len(word) % len(whole)] for word in words]}
        for words in map(str.split, LINES[:6])
    ]


@pytest.mark.parametrize(("family", "labels"), with_families(TAGGERS, every=False, in_turn=True))
def test_token_classification(
    family: str, labels: tuple[str, ...], by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    stock = save_checkpoint(tmp_path, family, tokenizer_of(family, by_kind), head="token", labels=labels, wide=True)
    model = TaskModel.from_pretrained(tmp_path)
    assert isinstance(model.task, TokenClassification)
    assert model.task.output.labels == labels
    assert model.tokenizer is not None
    rows = sentences(labels)
    features = model.task.features(rows, model.tokenizer)
    for feature, ours in zip(features, padded_logits(model, features), strict=True):
        with torch.no_grad():
            theirs = stock(input_ids=torch.tensor([feature["input_ids"]])).logits[0]
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    metrics = evaluate(model, rows)
    answers = model.predict(rows)
    spoken = to_iob2 if "S-x" in labels else list  # what is said in IOB2 is compared as it is
    right = [
        tag == guess
        for row, answer in zip(rows, answers, strict=True)
        for tag, guess in zip(spoken(row["tags"]), spoken(answer.tags), strict=True)
    ]
    assert metrics["overall_accuracy"] == pytest.approx(sum(right) / len(right))
    assert model.task.output.primary_metric in metrics


@pytest.mark.parametrize(
    ("family", "names"),
    with_families(
        {"unnamed": ("LABEL_0", "LABEL_1"), "named": ("end?", "start")},
        families=lambda _: WITH_SPAN,
        every=False,
        in_turn=True,
    ),
)
def test_span_extraction(
    family: str, names: tuple[str, ...], by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    stock = save_checkpoint(tmp_path, family, tokenizer_of(family, by_kind), head="span", labels=names, wide=True)
    model = TaskModel.from_pretrained(tmp_path)
    assert isinstance(model.task, SpanExtraction)
    assert model.tokenizer is not None
    features = model.task.features(QUESTIONS, model.tokenizer)
    segments = [
        {} if family in WITHOUT_TYPES else {"token_type_ids": torch.tensor([f["token_type_ids"]])} for f in features
    ]
    for feature, extra, ours in zip(features, segments, padded_logits(model, features), strict=True):
        with torch.no_grad():
            output = stock(input_ids=torch.tensor([feature["input_ids"]]), **extra)
        theirs = torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1)
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    metrics = evaluate(model, QUESTIONS)
    answers = model.predict(QUESTIONS)
    # An exact answer without a word ("the" for "a") has an F1 of 0, so F1 may be the smaller one.
    assert all(0.0 <= metrics[name] <= 100.0 for name in ("exact_match", "f1"))
    for row, answer in zip(QUESTIONS, answers, strict=True):
        assert answer.answer == row["context"][answer.start : answer.end] != ""


@pytest.mark.parametrize("as_file", [True, False])
def test_two_texts_are_read_where_there_are_two(
    as_file: bool, wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A classifier of transformers does not say how many it was trained on; dropping one would give other answers."""
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer, head="sequence", labels=("no", "yes"), wide=True)
    rows = [{"text": line, "text_pair": LINES[-1]} for line in LINES[:3]]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(map(json_line, rows)))
    answers = predict(tmp_path, path if as_file else rows)
    pairs = TaskModel.from_pretrained(tmp_path, task=PairClassification).predict(rows)
    singles = predict(tmp_path, rows, task="sequence-classification")
    assert (
        [prediction.to_json() for prediction in answers]
        == [prediction.to_json() for prediction in pairs]
        != [prediction.to_json() for prediction in singles]
    )


NAMES = (None, "sequence-classification", "text-classification", "pair-classification")
CONFIGS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("x", "y", "z"), "multi_label_classification"),
    (("x", "y", "z"), None),
    (("LABEL_0",), None),
    (("LABEL_0",), "regression"),
)
# Every config with another name of the task is fast, and all pairs are slow.
IMPLIED = [
    pytest.param(*config, settings, task, marks=() if settings and names == configs else pytest.mark.slow)
    for configs, config in enumerate(CONFIGS)
    for names, task in enumerate(NAMES)
    for settings in ({}, {"max_length": 20})
]


@pytest.mark.parametrize(("labels", "problem_type", "settings", "task"), IMPLIED)
def test_what_the_config_implies_holds_beside_what_is_given(
    labels: tuple[str, ...],
    problem_type: Literal["regression", "multi_label_classification"] | None,
    settings: dict[str, Any],
    task: str | None,
    wordpiece_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """Scores are what transformers' model says, whether a task is named, pairs are detected, or a field is given."""
    stock = save_checkpoint(
        tmp_path, "bert", wordpiece_tokenizer, head="sequence", labels=labels, problem_type=problem_type, wide=True
    )
    texts = [" ".join(line.split()[:4]) for line in LINES[:3]]
    pairs = None if task is not None and task != "pair-classification" else texts[1:] + texts[:1]
    rows = [{"text": text} if pairs is None else {"text": text, "text_pair": pairs[n]} for n, text in enumerate(texts)]
    answers = [answer.to_json() for answer in predict(tmp_path, rows, task=task, settings=settings)]
    for number, answer in enumerate(answers):
        encoded = wordpiece_tokenizer(
            texts[number], None if pairs is None else pairs[number], truncation=True, max_length=20, padding=False
        )
        with torch.no_grad():
            logits = stock(**{name: torch.tensor([value]) for name, value in encoded.items()}).logits[0]
        activated = logits.sigmoid() if problem_type == "multi_label_classification" else logits.softmax(-1)
        expected = logits.tolist() if len(labels) == 1 else activated.tolist()
        said = [answer["score"]] if len(labels) == 1 else [answer["scores"][label] for label in labels]
        assert said == pytest.approx(expected, abs=5e-5)

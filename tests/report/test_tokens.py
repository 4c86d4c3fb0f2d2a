"""Figures of taggers: a word's probability is compared with what it is the probability of."""

import random

import pytest

from bert_tasks.data.conll import Scheme, from_iob2
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.tasks.token_classification import TokenClassification

IOB2 = ("O", "B-X", "I-X", "B-Y", "I-Y")
BIOES = (*IOB2, "E-X", "S-X", "E-Y", "S-Y")
BILOU = ("O", "B-X", "I-X", "L-X", "U-X", "B-Y", "I-Y", "L-Y", "U-Y")
SENTENCE = ["B-X", "I-X", "B-X", "O", "B-Y", "I-Y", "I-Y", "O", "B-X", "I-X"]
LETTERS = {"E": "L", "S": "U"}


@pytest.mark.parametrize(("scheme", "labels"), [("IOB1", IOB2), ("IOB2", BIOES), ("BIOES", BILOU)])
def test_a_calibrated_tagger_has_no_calibration_error(scheme: Scheme, labels: tuple[str, ...]) -> None:
    """Each tag is right as often as its score says; where it is wrong, mostly only its prefix is."""
    chance = random.Random(1)
    true = SENTENCE if labels == IOB2 else from_iob2(SENTENCE, "BIOES")
    if labels == BILOU:
        true = [LETTERS.get(tag[0], tag[0]) + tag[1:] for tag in true]
    predictions, scores = [], []
    for _ in range(400):
        sure = [chance.uniform(0.5, 1.0) for _ in true]
        tags = [
            tag if chance.random() < score else chance.choice([label for label in labels if label != tag])
            for tag, score in zip(true, sure, strict=True)
        ]
        swapped = [_other_prefix(tag, true_tag, labels) for tag, true_tag in zip(tags, true, strict=True)]
        words = ("w",) * len(true)
        predictions.append(TokenPrediction(words=words, tags=tuple(swapped), scores=tuple(sure), entities=()))
        scores += sure
    rows = [{"words": ["w"] * len(true), "tags": from_iob2(SENTENCE, scheme)}] * len(predictions)
    task = TokenClassification.of(labels=labels)
    sections = task.output.report(predictions, rows, task.texts)
    assert sections.calibration.predictions == len(scores)
    assert sections.calibration.ece < 0.03


def _other_prefix(tag: str, true: str, labels: tuple[str, ...]) -> str:
    """A wrong tag of the same type, where there is one."""
    same = [label for label in labels if label[1:] == true[1:] and label != true]
    return same[0] if tag != true and same else tag


def test_raw_tags_are_compared_as_they_are() -> None:
    task = TokenClassification.of(labels=("noun", "verb"))
    predictions = [TokenPrediction(words=("a", "b"), tags=("noun", "noun"), scores=(0.95, 0.95), entities=())]
    rows = [{"words": ["a", "b"], "tags": ["noun", "verb"]}]
    sections = task.output.report(predictions, rows, task.texts)
    assert [(score_bin.count, score_bin.accuracy) for score_bin in sections.calibration.bins] == [(2, 0.5)]

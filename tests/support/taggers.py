"""Owns what the tests of token classification share: rows with tags, a tiny tagger, and transformers' own recipe for
the labels of sub-words.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def tagged(lines: Sequence[str], labels: Sequence[str] = LABELS) -> list[dict[str, Any]]:
    """Words with tags that depend on their letters; an I- follows nothing, so they are all B- or O."""
    first_labels = [label for label in labels if not label.startswith("I-")]
    return [
        {"words": words, "tags": [first_labels[sum(map(ord, word)) % len(first_labels)] for word in words]}
        for words in map(str.split, lines)
    ]


@torch.no_grad()
def save_tagger(folder: Path, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] = LABELS) -> Path:
    """A RoBERTa of transformers whose tags vary from word to word: no label is the best on average."""
    model = save_checkpoint(folder, "roberta", tokenizer, head="token", labels=labels, wide=True)
    model.classifier.weight.mul_(4.0)
    batch = tokenizer(LINES, padding=True, return_tensors="pt")
    logits = model(**batch).logits[batch["attention_mask"].bool()]
    model.classifier.bias.sub_(logits.mean(0))
    model.save_pretrained(folder)
    return folder


def transformers_labels(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], labelling: str = "first"
) -> list[int]:
    """What transformers' example makes of a row, -100 where nothing is trained."""
    numbers: list[int] = []
    before = None
    for word in tokenizer(row["words"], is_split_into_words=True).word_ids():
        tag = None if word is None else row["tags"][word]
        if tag is None or (word == before and labelling == "first"):
            numbers.append(-100)
        elif word == before and labelling == "continuation" and tag.startswith("B-"):
            numbers.append(labels.index(f"I-{tag[2:]}"))
        else:
            numbers.append(labels.index(tag))
        before = word
    return numbers

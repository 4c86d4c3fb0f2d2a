"""The logits of words among the logits of the tokens that a window reads.

A window may read all sub-words of a word or the first one only, and of those the first stands for the word. A row with
a long context has windows with different parts of the context and the same words. Then one of the windows stands for
the word.

Shape legend: R tokens read, W words, L labels.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.outputs.features import Feature, word_starts


def word_places(compact: Sequence[Tensor], features: Sequence[Feature], labels: Sequence[str]) -> list[tuple[int, int]]:
    """Returns for each word of all rows the feature that is read for it, and its first token among those read there.

    If several windows of a row read a word, it is the window in which the label "O" has the highest probability. "O"
    says that the context supports the word, and one part of a context that supports a word is enough, however many
    others say nothing about it. Of several equal windows it is the first. The rule for whole sentences is the same in
    SummaC (https://arxiv.org/abs/2111.09525, the maximum over the sentences of a document) and in AlignScore
    (https://arxiv.org/abs/2305.16739, the maximum over the chunks of a context).

    Args:
        compact: The logits of the tokens that each feature reads.
        features: The features of rows.
        labels: The labels, in the order of the logits.
    """
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}  # row and number of a word -> its places
    for number, feature in enumerate(features):
        word_ids = feature.get("word_ids")
        if word_ids is None:
            continue
        for token, is_start in enumerate(word_starts(word_ids)):
            if is_start:
                places.setdefault((feature["row"], word_ids[token]), []).append((number, token))
    if all(len(of_word) == 1 for of_word in places.values()):
        return [of_word[0] for of_word in places.values()]
    outside = labels.index("O")
    support: list[list[float]] = [logits.softmax(dim=1).select(1, outside).tolist() for logits in compact]

    def support_at(place: tuple[int, int]) -> float:
        number, token = place
        return support[number][token]

    return [max(of_word, key=support_at) for of_word in places.values()]  # the first of equal places


def word_logits(compact: Sequence[Tensor], features: Sequence[Feature], labels: Sequence[str]) -> Tensor:
    """Returns ``[W, L]`` the logits of each word at its place. See ``word_places``, which has these arguments."""
    logits = torch.cat(list(compact))  # [R, L]
    places = word_places(compact, features, labels)
    if len(places) == len(logits):  # every token that is read is the first of another word
        return logits
    lengths = [len(of_feature) for of_feature in compact]
    starts = list(accumulate(lengths, initial=0))  # where the logits of each feature begin
    read = [starts[number] + token for number, token in places]
    return logits.index_select(0, torch.tensor(read, dtype=torch.long))


def labelled_logits(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Returns the logits of the tokens of windows that have labels."""
    gathered = batch.layout.gather_counts
    if sum(batch.label_counts) >= sum(gathered):
        return logits
    places: list[int] = []
    starts = accumulate(gathered, initial=0)  # with the end of the last window, which starts none
    for start, count in zip(starts, batch.label_counts, strict=False):
        places += range(start, start + count)
    return logits.index_select(0, packing.device_tensor(places, logits.device, torch.long))

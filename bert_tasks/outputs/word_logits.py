"""The logits of words among the logits of the tokens that a window reads.

A window may read all sub-words of a word or the first one only, and of those the first stands for the word.

Shape legend: R tokens read, W words, L labels.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.outputs.features import Feature, word_starts


def word_logits(compact: Sequence[Tensor], features: Sequence[Feature]) -> Tensor:
    """Returns ``[W, L]`` the logits of the first token of each word."""
    logits = torch.cat(list(compact))  # [R, L]
    are_first: list[bool] = []
    for feature in features:
        are_first += word_starts(feature.get("word_ids"))
    if all(are_first):
        return logits
    places = torch.tensor(are_first, dtype=torch.bool).nonzero().squeeze(1)  # [W]
    return logits.index_select(0, places)


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


def first_tokens(windows: Sequence[int], features: Sequence[Feature]) -> list[tuple[int, int]]:
    """Returns the window of each word of a row, and the position of its first token among those that are read."""
    places: list[tuple[int, int]] = []
    for window in windows:
        starts = word_starts(features[window].get("word_ids"))
        places += [(window, token) for token, is_start in enumerate(starts) if is_start]
    return places

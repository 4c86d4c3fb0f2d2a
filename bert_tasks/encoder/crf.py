"""Linear-chain CRF: the likelihood of tag sequences, the most probable one, and how probable each tag is.

Owns the arithmetic on chains of different lengths, without padding: chains lie side by side, longest first, and step t
runs over those that have a word t. Must not know words, tokens or what labels mean.

Every function takes ``logits [R, L + 2, L]``, the words of all chains one after another, and ``counts``, the words of
each chain, none of them 0. A word's matrix says what label j adds to a path: row 0 if the word begins the chain, row
i + 1 after label i, the last row, on top of that, if the word ends it.

Shape legend: R words, C chains, K chains that have a word at some step, L labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

# Added to the score of a step that is not allowed: far from every real score, and harmless where all steps are bad.
FORBIDDEN = -1e4


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Words in the order in which they are computed: step after step, in each the longest chain first.

    Attributes:
        words: step -> ``[K, L + 2, L]``.
        places: ``[R]`` the place of each word in that order.
        ends: ``[C]`` the place of each chain's last word.
    """

    words: tuple[Tensor, ...]
    places: Tensor
    ends: Tensor

    @classmethod
    def of(cls, logits: Tensor, counts: Sequence[int]) -> Self:
        by_length = sorted(range(len(counts)), key=lambda chain: -counts[chain])
        starts = list(accumulate(counts, initial=0))
        sizes = [0] * max(counts)
        for count in counts:
            sizes[count - 1] += 1
        sizes = list(accumulate(reversed(sizes)))[::-1]
        order = [starts[chain] + step for step, size in enumerate(sizes) for chain in by_length[:size]]
        places = [0] * len(order)
        for place, word in enumerate(order):
            places[word] = place
        device = logits.device
        return cls(
            words=torch.split(logits.index_select(0, torch.tensor(order, device=device)), sizes),
            places=torch.tensor(places, device=device),
            ends=torch.tensor([places[end - 1] for end in starts[1:]], device=device),
        )

    def in_order(self, found: Sequence[Tensor]) -> Tensor:
        """What was found step by step, ``[K, ...]`` each, as ``[R, ...]`` in the order of words."""
        return torch.cat(list(found)).index_select(0, self.places)


def log_likelihood(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """``[C]`` the log probability of each chain's labels (``[R]``, int64)."""
    return path_score(logits, labels, counts) - log_partition(logits, counts)


def path_score(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """``[C]`` what each chain's labels add up to."""
    lengths = torch.tensor(counts, device=logits.device)
    ends = lengths.cumsum(0) - 1
    before = torch.cat([labels.new_zeros(1), labels[:-1] + 1]).index_fill(0, ends - lengths + 1, 0)  # [R]
    cells = before * logits.shape[-1] + labels
    within = logits.flatten(1).gather(1, cells[:, None]).squeeze(1)  # [R]
    last = logits[:, -1].gather(1, labels[:, None]).squeeze(1).index_select(0, ends)  # [C]
    return torch.segment_reduce(within, "sum", lengths=lengths) + last


def log_partition(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """``[C]`` the logarithm of the summed exponentials of all paths' scores."""
    steps = _Steps.of(logits, counts)
    forward = torch.cat(_forward(steps)).index_select(0, steps.ends)
    stops = torch.cat([words[:, -1] for words in steps.words]).index_select(0, steps.ends)
    return torch.logsumexp(forward + stops, dim=1)


def marginals(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """``[R, L]`` the probability of each label of each word, over all paths of its chain."""
    steps = _Steps.of(logits, counts)
    return steps.in_order([torch.softmax(a + b, dim=1) for a, b in zip(_forward(steps), _backward(steps), strict=True)])


def best_labels(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """``[R]`` the labels of the best path of each chain (Viterbi)."""
    steps = _Steps.of(logits, counts)
    scores, pointers = [steps.words[0][:, 0]], []  # step -> [K, L] best score up to each label, and whence
    for words in steps.words[1:]:
        best = (scores[-1][: len(words), :, None] + words[:, 1:-1]).max(dim=1)
        scores.append(best.values)
        pointers.append(best.indices)
    chosen: list[Tensor] = []
    for step in reversed(range(len(scores))):
        going_on = pointers[step].gather(1, chosen[-1][:, None]).squeeze(1) if chosen else scores[0].new_empty(0).long()
        stopping = slice(len(going_on), None)
        ended = (scores[step][stopping] + steps.words[step][stopping, -1]).argmax(dim=1)
        chosen.append(torch.cat([going_on, ended]))
    return steps.in_order(chosen[::-1])


def _forward(steps: _Steps) -> list[Tensor]:
    """Step -> ``[K, L]`` log sum over all paths up to a word with each label, that word included."""
    found = [steps.words[0][:, 0]]
    for words in steps.words[1:]:
        found.append(torch.logsumexp(found[-1][: len(words), :, None] + words[:, 1:-1], dim=1))
    return found


def _backward(steps: _Steps) -> list[Tensor]:
    """Step -> ``[K, L]`` log sum over all paths on from a word with each label, that word excluded."""
    found = [steps.words[-1][:, -1]]
    for words, following in zip(steps.words[-2::-1], steps.words[:0:-1], strict=True):
        going_on = torch.logsumexp(following[:, 1:-1] + found[-1][:, None, :], dim=2)
        found.append(torch.cat([going_on, words[len(following) :, -1]]))
    return found[::-1]


def compressed(logits: Tensor) -> Tensor:
    """``[R, L + 2, L] -> [L + 2 + R, L]`` the first word's matrix and every word's row 0; ``[0, L]`` without words.

    That is all there is to know, because a label adds its own score to all of its word's rows but the last.
    """
    return torch.cat([logits[:1].flatten(0, 1), logits[:, 0]])


def restored(summaries: Sequence[Tensor]) -> Tensor:
    """The logits of several summaries of one model, ``[R, L + 2, L]`` over all their words, but for rounding."""
    filled = [summary for summary in summaries if len(summary)]
    labels = summaries[0].shape[1]
    if not filled:
        return summaries[0].new_empty(0, labels + 2, labels)
    matrix = filled[0][: labels + 2]
    starts = torch.cat([summary[labels + 2 :] for summary in filled])  # [R, L]
    within = matrix[:-1] + (starts - starts[:1])[:, None]  # [R, L + 1, L]
    return torch.cat([within, matrix[-1:].expand(len(starts), 1, labels)], dim=1)

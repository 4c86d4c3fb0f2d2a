"""Linear-chain CRF with likelihoods, the most probable labels and marginals.

Sequences of different lengths are computed without padding. The longest comes first, and step t covers the sequences
that have a word t. Every function has two arguments. ``logits [R, L + 2, L]`` holds the words of all sequences one
after another, and ``counts`` holds the number of words of each sequence, none of them 0. A word's matrix holds the
score that label j adds to a path. Row 0 counts if the word is the first, row i + 1 after label i, and the last row in
addition if the word is the last.

Shape legend: R words, C sequences, K sequences that have a word at some step, L labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from bert_tasks.encoder.packing import device_tensor

# Added to the score of a forbidden step. It is far below every real score, and harmless if all steps are forbidden.
FORBIDDEN = -1e4


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """The words in the order of computation, by step and by length of the sequence.

    Attributes:
        words: Maps a step to ``[K, L + 2, L]``.
        places: ``[R]`` the position of each word in that order.
        ends: ``[C]`` the position of each sequence's last word.
    """

    words: tuple[Tensor, ...]
    places: Tensor
    ends: Tensor

    @classmethod
    def of(cls, logits: Tensor, counts: Sequence[int]) -> Self:
        """Sorts the words ``[R, L + 2, L]`` by their place in the sequence, those of longer sequences first."""
        starts = list(accumulate(counts, initial=0))  # [C + 1]
        longest_first = sorted(zip(starts, counts, strict=False), key=lambda sequence: -sequence[1])
        sizes = [0] * max(counts)  # step -> K
        for count in counts:
            sizes[count - 1] += 1
        sizes = list(accumulate(reversed(sizes)))[::-1]  # sequences of at least that length
        rows: list[int] = []
        for step, size in enumerate(sizes):
            rows += [start + step for start, _ in longest_first[:size]]
        order = device_tensor(rows, logits.device)
        places = order.argsort()
        return cls(
            words=torch.split(logits.index_select(0, order), sizes),
            places=places,
            ends=places.index_select(0, device_tensor(starts[1:], logits.device) - 1),
        )

    def in_order(self, steps: Sequence[Tensor]) -> Tensor:
        """Joins the steps' results ``[K, ...]`` to ``[R, ...]`` in the order of the words."""
        return torch.cat(list(steps)).index_select(0, self.places)


def log_likelihood(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[C]``, the log probability of each sequence's labels (``[R]``, int64)."""
    return path_score(logits, labels, counts) - log_partition(logits, counts)


def path_score(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[C]``, the score of the path through the labels (``[R]``, int64)."""
    lengths = device_tensor(counts, logits.device)
    ends = lengths.cumsum(0) - 1
    before = torch.cat([labels.new_zeros(1), labels[:-1] + 1]).index_fill(0, ends - lengths + 1, 0)  # [R]
    cells = before * logits.shape[-1] + labels
    within = logits.flatten(1).gather(1, cells[:, None]).squeeze(1)  # [R]
    last = logits[:, -1].gather(1, labels[:, None]).squeeze(1).index_select(0, ends)  # [C]
    return torch.segment_reduce(within, "sum", lengths=lengths, unsafe=True) + last


def log_partition(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[C]``, the log of the sum of the exponentials of all paths' scores."""
    steps = _Steps.of(logits, counts)
    forward = torch.cat(_forward(steps)).index_select(0, steps.ends)
    stops = torch.cat([words[:, -1] for words in steps.words]).index_select(0, steps.ends)
    return torch.logsumexp(forward + stops, dim=1)


def marginals(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[R, L]``, each label's probability over all paths of the sequence."""
    steps = _Steps.of(logits, counts)
    sums = zip(_forward(steps), _backward(steps), strict=True)
    # The sums of both directions are the log of the weight of all paths through a label, up to a constant of the word.
    return steps.in_order([torch.softmax(before + after, dim=1) for before, after in sums])


def best_labels(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns ``[R]``, the labels of the best path of each sequence (Viterbi)."""
    steps = _Steps.of(logits, counts)
    scores = [steps.words[0][:, 0]]  # step -> [K, L] score of the best path up to each label
    pointers: list[Tensor] = []  # step -> [K, L] the label before, on the best path to each label of the next step
    for words in steps.words[1:]:
        best = (scores[-1][: len(words), :, None] + words[:, 1:-1]).max(dim=1)
        scores.append(best.values)
        pointers.append(best.indices)
    labels: list[Tensor] = []  # [K] of each step, the last step first
    continued = logits.new_empty(0).long()  # after the last step no sequence continues
    for words, score in zip(reversed(steps.words), reversed(scores), strict=True):
        if labels:  # the sequences that continue come first, and follow the pointers of their next label
            continued = pointers.pop().gather(1, labels[-1][:, None]).squeeze(1)
        ended = (score[len(continued) :] + words[len(continued) :, -1]).argmax(dim=1)
        labels.append(torch.cat([continued, ended]))
    return steps.in_order(labels[::-1])


def _forward(steps: _Steps) -> list[Tensor]:
    """Returns ``[K, L]`` per step, the log sum over paths up to and with each label."""
    sums = [steps.words[0][:, 0]]
    for words in steps.words[1:]:
        sums.append(torch.logsumexp(sums[-1][: len(words), :, None] + words[:, 1:-1], dim=1))
    return sums


def _backward(steps: _Steps) -> list[Tensor]:
    """Returns ``[K, L]`` per step, the log sum over paths after each label."""
    sums = [steps.words[-1][:, -1]]
    for words, following in zip(steps.words[-2::-1], steps.words[:0:-1], strict=True):
        continued = torch.logsumexp(following[:, 1:-1] + sums[-1][:, None, :], dim=2)
        sums.append(torch.cat([continued, words[len(following) :, -1]]))
    return sums[::-1]


def compressed(logits: Tensor) -> Tensor:
    """Compresses logits, ``[R, L + 2, L] -> [L + 2 + R, L]``.

    The result holds the first word's matrix and row 0 of every word, or ``[0, L]`` without words. ``restored`` computes
    the logits from it, because a label adds the same score to all rows of its word but the last, and the rest of the
    matrix is the same for all words.
    """
    return torch.cat([logits[:1].flatten(0, 1), logits[:, 0]])


def restored(summaries: Sequence[Tensor]) -> Tensor:
    """Restores ``[R, L + 2, L]`` from ``compressed`` tensors, up to rounding."""
    filled = [summary for summary in summaries if len(summary)]
    labels = summaries[0].shape[1]
    if not filled:
        return summaries[0].new_empty(0, labels + 2, labels)
    matrix = filled[0][: labels + 2]
    starts = torch.cat([summary[labels + 2 :] for summary in filled])  # [R, L]
    within = matrix[:-1] + (starts - starts[:1])[:, None]  # [R, L + 1, L]
    return torch.cat([within, matrix[-1:].expand(len(starts), 1, labels)], dim=1)

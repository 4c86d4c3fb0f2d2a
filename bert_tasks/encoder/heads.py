"""The heads that tasks put on the encoder, and pooling over sequences.

Owns three head shapes; what families differ in is data (``HeadConfig``). A head says which rows of the last layer it
reads (``read``) and turns them into logits (``forward``). Must not know labels, losses or checkpoints.

Shape legend: N rows, B sequences, T padded length, H hidden, L labels, R rows a head reads.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.layers import activate, initialize
from bert_tasks.encoder.packing import Layout, Packed, Padded

TokenPooling = Literal["mean", "max", "attention"]
Pooling = Literal["cls", TokenPooling]


def first_rows(layout: Layout) -> Tensor:
    """``[B]`` the row of each sequence's first real token (under left padding that is not column 0)."""
    if isinstance(layout, Packed):
        return layout.first_rows
    starts = torch.arange(layout.batch, device=layout.mask.device) * layout.length
    return starts + layout.mask.int().argmax(dim=1)


def reduce_rows(hidden: Tensor, layout: Layout, how: Literal["sum", "mean", "max"]) -> Tensor:
    """``[N, H] -> [B, H]`` sum, mean or largest value over each sequence's tokens."""
    if isinstance(layout, Packed):
        reduced = torch.segment_reduce(hidden, how, lengths=layout.row_lengths)
        return reduced.index_select(0, layout.order)
    rectangle, absent = hidden.view(*layout.mask.shape, -1), ~layout.mask[..., None]  # [B, T, H], [B, T, 1]
    if how == "max":
        return rectangle.masked_fill(absent, torch.finfo(hidden.dtype).min).amax(1)
    total = rectangle.masked_fill(absent, 0.0).sum(1)
    return total if how == "sum" else total / layout.mask.sum(1, keepdim=True).clamp(min=1)


def softmax_rows(scores: Tensor, layout: Layout) -> Tensor:
    """``[N] -> [N]`` softmax within each sequence; rows of padding get 0."""
    if isinstance(layout, Packed):
        largest = torch.segment_reduce(scores.detach(), "max", lengths=layout.row_lengths)  # [B]
        powers = (scores - largest.index_select(0, layout.sequence_of_row)).exp()
        sums = torch.segment_reduce(powers, "sum", lengths=layout.row_lengths)
        return powers / sums.index_select(0, layout.sequence_of_row)
    rectangle = scores.view(layout.mask.shape).masked_fill(~layout.mask, torch.finfo(scores.dtype).min)
    return (rectangle.softmax(1) * layout.mask).flatten()


class SequenceHead(nn.Module):
    """One row of logits per sequence from the first token, as the family's HF class computes it.

    In BERT and ALBERT ``dense`` is the pooler of the base model; in the others it belongs to the classifier.
    """

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.activation = config.head.activation
        self.dropout = Dropout(config.head.sequence_dropout)
        self.input_dropout = Dropout(config.head.sequence_dropout if config.head.dropout_before_dense else 0.0)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def read(self, layout: Layout) -> Tensor | None:
        return first_rows(layout)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """``[B, H] -> [B, L]``"""
        pooled = activate(self.dense(self.input_dropout(hidden)), self.activation)
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class PoolingHead(nn.Module):
    """One row of logits per sequence from all of its tokens: mean, max or learned attention, then a linear layer."""

    def __init__(self, config: EncoderConfig, num_labels: int, *, pooling: TokenPooling) -> None:
        super().__init__()
        self.pooling: TokenPooling = pooling
        if pooling == "attention":
            self.score = nn.Linear(config.hidden_size, 1)
        self.dropout = Dropout(config.head.sequence_dropout)
        self.output = nn.Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def read(self, layout: Layout) -> Tensor | None:
        return None

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """``[N, H] -> [B, L]``"""
        if self.pooling == "attention":
            weights = softmax_rows(self.score(hidden).squeeze(-1), layout)  # [N]
            pooled = reduce_rows(hidden * weights[:, None], layout, "sum")
        else:
            pooled = reduce_rows(hidden, layout, self.pooling)
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class PerTokenHead(nn.Module):
    """Logits for each token that is read: token classification (L labels) and span extraction (2: start and end).

    Packed rows come out sequence after sequence in the caller's order, whatever order they are computed in.
    """

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def read(self, layout: Layout) -> Tensor | None:
        return layout.gather_positions if isinstance(layout, Packed) else None

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """``[R, H] -> [R, L]``"""
        logits: Tensor = self.output(self.dropout(hidden))
        return logits


class CRFHead(PerTokenHead):
    """Logits for each word that depend on the word before: a linear-chain CRF over the rows that are read.

    ``transitions [L + 2, L]``: row 0 scores a label at the start of a chain, row i + 1 a label after label i, the last
    row a label at the end.
    """

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__(config, num_labels, dropout=dropout)
        self.transitions = nn.Parameter(torch.zeros(num_labels + 2, num_labels))

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """``[R, H] -> [R, L + 2, L]``, see ``with_transitions``; padded rows give the emissions alone, ``[N, L]``."""
        emissions = super().forward(hidden, layout)  # [R, L]
        return emissions if isinstance(layout, Padded) else self.with_transitions(emissions)

    def with_transitions(self, emissions: Tensor) -> Tensor:
        """``[R, L] -> [R, L + 2, L]`` emission + transition.

        Each row holds what it adds to a path as a start, after each label, and (without emission) as an end.
        """
        within = emissions[:, None, :] + self.transitions[:-1]  # [R, L + 1, L]
        ends = self.transitions[-1:].expand(emissions.shape[0], 1, -1)  # [R, 1, L]
        return torch.cat([within, ends], dim=1)


Head = SequenceHead | PoolingHead | PerTokenHead


def label_dims(head: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names of the parameters that belong to single labels -> the dimensions that count labels."""
    dims: dict[str, tuple[int, ...]] = {"head.output.weight": (0,), "head.output.bias": (0,)}
    return {**dims, "head.transitions": (0, 1)} if isinstance(head, CRFHead) else dims


def reordered(tensor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The tensor with label ``order[i]`` in place i; a start before and an end after the labels stay."""
    for dim in dims:
        rim = (tensor.size(dim) - len(order)) // 2
        ends = torch.arange(tensor.size(dim))
        index = torch.cat([ends[:rim], order + rim, ends[len(order) + rim :]])
        tensor = tensor.index_select(dim, index)
    return tensor

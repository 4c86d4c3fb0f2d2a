"""The heads that tasks put on the encoder, and pooling over sequences.

A head selects the tokens that it reads from the last layer (``select``) and turns their states into logits
(``forward``). What families differ in is data (``HeadConfig``).

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that a head reads, V vocabulary,
E width of the embeddings.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import ACTIVATIONS, Linear
from bert_tasks.encoder.packing import Layout, Packed, Padded, Selection

TokenPooling = Literal["mean", "max", "attention"]
Pooling = Literal["cls", TokenPooling]


class Head(nn.Module, ABC):
    """What a task adds to the encoder; a task of your own may return any subclass.

    Attributes:
        per_token: the logits are one row for each token that is read, and not one for each sequence.
        label_dims: name of a parameter of single labels -> its dimensions that count labels, so that loading can
            reorder the labels.
        output: the linear layer that makes the logits; export needs it.
    """

    per_token: ClassVar[bool] = False
    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {"output.weight": (0,), "output.bias": (0,)}
    output: nn.Linear

    def select(self, layout: Layout) -> Selection | None:
        """The tokens whose states ``forward`` gets; None: all."""
        return None

    @abstractmethod
    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Logits from the states of the selected tokens.

        Args:
            hidden: ``[R, H]``, or ``[N, H]`` of all tokens.
            layout: where the sequences are.
            embeddings: ``[V, E]`` the encoder's word embeddings, for heads that are tied to them.
        """


def select_first_tokens(layout: Layout) -> Selection:
    """The first real token of each sequence, ``[B]`` (under left padding that is not column 0)."""
    if isinstance(layout, Packed):
        return Selection(rows=layout.first_rows, first_tokens=True)
    starts = torch.arange(layout.batch, device=layout.mask.device) * layout.length
    return Selection(rows=starts + layout.mask.int().argmax(dim=1), first_tokens=True)


def reduce_rows(hidden: Tensor, layout: Layout, how: Literal["sum", "mean", "max"]) -> Tensor:
    """``[N, H] -> [B, H]`` sum, mean or largest value over the tokens of each sequence."""
    if isinstance(layout, Packed):
        reduced = torch.segment_reduce(hidden, how, lengths=layout.row_lengths)
        return reduced.index_select(0, layout.order)
    rectangle, absent = hidden.view(*layout.mask.shape, -1), ~layout.mask[..., None]  # [B, T, H], [B, T, 1]
    if how == "max":
        return rectangle.masked_fill(absent, torch.finfo(hidden.dtype).min).amax(1)
    total = rectangle.masked_fill(absent, 0.0).sum(1)
    return total if how == "sum" else total / layout.mask.sum(1, keepdim=True).clamp(min=1)


def softmax_rows(scores: Tensor, layout: Layout) -> Tensor:
    """``[N] -> [N]`` softmax within each sequence; padding gets 0."""
    if isinstance(layout, Packed):
        largest = torch.segment_reduce(scores.detach(), "max", lengths=layout.row_lengths)  # [B]
        powers = (scores - largest.index_select(0, layout.sequence_of_row)).exp()
        sums = torch.segment_reduce(powers, "sum", lengths=layout.row_lengths)
        return powers / sums.index_select(0, layout.sequence_of_row)
    rectangle = scores.view(layout.mask.shape).masked_fill(~layout.mask, torch.finfo(scores.dtype).min)
    return (rectangle.softmax(1) * layout.mask).flatten()


class SequenceHead(Head):
    """One row of logits per sequence from its first token, as the family's HF class computes it.

    In BERT and ALBERT ``dense`` is the pooler of the base model; in the others it belongs to the classifier.
    """

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.activation = config.head.activation
        self.dropout = Dropout(config.head.sequence_dropout)
        self.input_dropout = Dropout(config.head.sequence_dropout if config.head.dropout_before_dense else 0.0)
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def select(self, layout: Layout) -> Selection:
        return select_first_tokens(layout)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[B, H] -> [B, L]``"""
        pooled = ACTIVATIONS[self.activation](self.dense(self.input_dropout(hidden)))
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class PoolingHead(Head):
    """One row of logits per sequence from all of its tokens: mean, max or learned attention, then a linear layer."""

    def __init__(self, config: EncoderConfig, num_labels: int, *, pooling: TokenPooling) -> None:
        super().__init__()
        self.pooling: TokenPooling = pooling
        if pooling == "attention":
            self.score = Linear(config.hidden_size, 1)
        self.dropout = Dropout(config.head.sequence_dropout)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[N, H] -> [B, L]``"""
        if self.pooling == "attention":
            weights = softmax_rows(self.score(hidden).squeeze(-1), layout)  # [N]
            pooled = reduce_rows(hidden * weights[:, None], layout, "sum")
        else:
            pooled = reduce_rows(hidden, layout, self.pooling)
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class PerTokenHead(Head):
    """Logits for each token that is read: token classification (L labels) and span extraction (2: start and end).

    They come out sequence after sequence in the caller's order, whatever the order of the rows.
    """

    per_token = True

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, std=config.initializer_range)

    def select(self, layout: Layout) -> Selection | None:
        return Selection(rows=layout.gather_positions) if isinstance(layout, Packed) else None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[R, H] -> [R, L]``"""
        logits: Tensor = self.output(self.dropout(hidden))
        return logits


class CRFHead(PerTokenHead):
    """Logits for each word that depend on the label of the word before: a linear-chain CRF over the words.

    ``transitions [L + 2, L]``: row 0 scores a label at the start of a sequence, row i + 1 a label after label i, the
    last row a label at the end.
    """

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {**PerTokenHead.label_dims, "transitions": (0, 1)}

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__(config, num_labels, dropout=dropout)
        self.transitions = nn.Parameter(torch.zeros(num_labels + 2, num_labels))

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[R, H] -> [R, L + 2, L]``, see ``with_transitions``; a padded layout gives the emissions, ``[N, L]``."""
        emissions = super().forward(hidden, layout, embeddings)  # [R, L]
        return emissions if isinstance(layout, Padded) else self.with_transitions(emissions)

    def with_transitions(self, emissions: Tensor) -> Tensor:
        """``[R, L] -> [R, L + 2, L]`` the matrices that crf.py computes with.

        A word's matrix holds what each label adds to a path: as the first word, after each label, and (without the
        emission) as the last word.
        """
        within = emissions[:, None, :] + self.transitions[:-1]  # [R, L + 1, L]
        ends = self.transitions[-1:].expand(emissions.shape[0], 1, -1)  # [R, 1, L]
        return torch.cat([within, ends], dim=1)


def reordered(tensor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The tensor with label ``order[i]`` in place i; a start before and an end after the labels stay."""
    for dim in dims:
        rim = (tensor.size(dim) - len(order)) // 2
        ends = torch.arange(tensor.size(dim))
        index = torch.cat([ends[:rim], order + rim, ends[len(order) + rim :]])
        tensor = tensor.index_select(dim, index)
    return tensor

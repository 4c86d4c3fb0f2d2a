"""Heads with one row of logits, or one vector, for each sequence, and the pooling of the states of its tokens.

Packed sequences are reduced without padding them, by ``torch.segment_reduce`` over the rows of each sequence.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bert_tasks.encoder.config import EncoderConfig, Pooling
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.heads.base import Head
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import ACTIVATIONS, Linear
from bert_tasks.encoder.packing import Layout, Packed, Selection


def select_first_tokens(layout: Layout) -> Selection:
    """Selects each sequence's first real token, ``[B]``, also under left padding."""
    if isinstance(layout, Packed):
        return Selection(rows=layout.first_rows, first_tokens=True)
    starts = torch.arange(layout.batch, device=layout.mask.device) * layout.length
    return Selection(rows=starts + layout.mask.int().argmax(dim=1), first_tokens=True)


def reduce_rows(hidden: Tensor, layout: Layout, how: Literal["sum", "mean", "max"]) -> Tensor:
    """Returns the sum, mean or maximum over the rows of each sequence, ``[N, H] -> [B, H]``.

    The result is in the caller's order of sequences. Padding does not count.
    """
    if isinstance(layout, Packed):
        compact = torch.segment_reduce(hidden, how, lengths=layout.row_lengths, unsafe=True)
        return compact.index_select(0, layout.caller_order)
    rectangle, absent = hidden.view(*layout.mask.shape, -1), ~layout.mask[..., None]  # [B, T, H], [B, T, 1]
    if how == "max":
        return rectangle.masked_fill(absent, torch.finfo(hidden.dtype).min).amax(1)
    total = rectangle.masked_fill(absent, 0.0).sum(1)
    if how == "sum":
        return total
    return total / layout.mask.sum(1, keepdim=True).clamp(min=1)  # a sequence of padding alone has no mean


def softmax_rows(scores: Tensor, layout: Layout) -> Tensor:
    """Computes softmax within each sequence, ``[N] -> [N]``. Padding gets 0."""
    if isinstance(layout, Packed):
        # Softmax does not change if the greatest score is subtracted, and without this exp would overflow.
        largest = torch.segment_reduce(scores.detach(), "max", lengths=layout.row_lengths, unsafe=True)  # [B]
        powers = (scores - largest.index_select(0, layout.sequence_of_row)).exp()
        sums = torch.segment_reduce(powers, "sum", lengths=layout.row_lengths, unsafe=True)
        return powers / sums.index_select(0, layout.sequence_of_row)
    rectangle = scores.view(layout.mask.shape).masked_fill(~layout.mask, torch.finfo(scores.dtype).min)
    return (rectangle.softmax(1) * layout.mask).flatten()


class PooledHead(Head):
    """Base of the heads that pool the tokens of each sequence.

    Attributes:
        pooling: The first token, the mean over the tokens, their maximum, or attention, which is a mean weighted by the
            softmax of ``score``.
        score: The linear layer that scores tokens for attention.
    """

    pooling: Pooling
    score: Linear

    def select(self, layout: Layout) -> Selection | None:
        if self.pooling == "cls":
            return select_first_tokens(layout)
        return None

    def pool(self, rows: Tensor, layout: Layout) -> Tensor:
        """Pools ``[N, H] -> [B, H]``. First tokens are selected already, ``[B, H] -> [B, H]``."""
        if self.pooling == "cls":
            return rows
        if self.pooling == "attention":
            weights = softmax_rows(self.score(rows).squeeze(-1), layout)  # [N]
            return reduce_rows(rows * weights[:, None], layout, "sum")
        return reduce_rows(rows, layout, self.pooling)


class SequenceHead(PooledHead):
    """Head with one row of logits for each sequence, as for classes or a number.

    By default it is the head of the family's HF class, which reads the first token, or as ``HeadConfig.pooling`` says.
    In BERT and ALBERT ``dense`` is the pooler of the base model. In the other families it belongs to the classifier.
    UltraBERT has no such layer. With another pooling the head has only the last linear layer.

    Your own task returns it from ``Task.head`` if it has one answer for each text. ``PerTokenHead`` is its counterpart
    for one answer for each word or token.

    Args:
        config: The configuration of the encoder.
        num_labels: Number of logits.
        pooling: ``cls`` for the head of the family's HF class, or how the states of the tokens are pooled.
            ``attention`` learns one more linear layer, with H weights and a bias.

    Examples:
        >>> head = SequenceHead(model.config, 3)
        >>> head.num_logits
        3
    """

    def __init__(self, config: EncoderConfig, num_labels: int, *, pooling: Pooling = "cls") -> None:
        super().__init__()
        shape, hidden, is_of_family = config.head, config.hidden_size, pooling == "cls"
        self.activation = shape.activation
        self.pooling = pooling
        if is_of_family and shape.pooling != "cls":
            self.pooling = "mean"
        self.pools_logits = is_of_family and shape.pooling == "late"  # not the states
        if pooling == "attention":
            self.score = Linear(hidden, 1)
        self.dropout = Dropout(shape.sequence_dropout)
        self.input_dropout = Dropout(shape.dense_dropout)
        # In the order of the calculation, because the norm of the gradients is summed in the order of the parameters.
        self.dense: Linear | None = None
        if is_of_family and shape.sequence_dense:
            self.dense = Linear(hidden, hidden, bias=config.head_bias)
        self.norm: nn.Module = nn.Identity()
        if is_of_family and shape.prediction_head:
            self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps, bias=config.head_bias)
        self.output = Linear(hidden, num_labels)
        initialize(self, config)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Computes the logits of each sequence.

        Args:
            hidden: The last hidden states, ``[B, H]`` of the first tokens if the head reads no others, or else
                ``[N, H]`` of all tokens.
            layout: Where the sequences are in ``hidden``.
            embeddings: ``[V, H]`` table of the word embeddings, which this head does not read.

        Returns:
            ``[B, L]`` logits.
        """
        if not self.pools_logits:
            hidden = self.pool(hidden, layout)
        if self.dense is not None:
            hidden = self.dense(self.input_dropout(hidden))
            hidden = self.norm(ACTIVATIONS[self.activation](hidden))
        logits: Tensor = self.output(self.dropout(hidden))
        if self.pools_logits:
            logits = self.pool(logits, layout)
        return logits


class ChoiceHead(SequenceHead):
    """Head with one logit for each choice, as in the family's HF class.

    Only dropout differs from the sequence head. In RoBERTa and MPNet, too, ``dense`` is the pooler of the base model.
    """

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, 1)
        self.dropout = Dropout(config.head.choice_dropout)
        self.input_dropout = Dropout(config.head.choice_dense_dropout)


class EmbeddingHead(PooledHead):
    """One vector for each sequence, pooled from the states of its tokens, without parameters.

    Args:
        width: Length of a vector, H.
        pooling: How the states are pooled.
        depth: Number of layers that run before the states are read. 0 means the embeddings of the tokens.
    """

    def __init__(self, *, width: int, pooling: Literal["mean", "cls", "max"], depth: int) -> None:
        super().__init__()
        self.width, self.pooling, self.depth = width, pooling, depth

    @property
    def num_logits(self) -> int:
        return self.width

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Pools ``[N, H]``, or returns ``[B, H]`` of first tokens, ``-> [B, H]``."""
        return self.pool(hidden, layout)

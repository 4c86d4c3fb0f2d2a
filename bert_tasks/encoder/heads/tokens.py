"""Heads with one row of logits for each token that they read, also for a CRF.

Shape legend: N tokens, H hidden, L labels, R tokens that a head reads.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.heads.base import Head
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import Linear, linear_activation
from bert_tasks.encoder.packing import Layout, Packed, Padded, Selection


class PerTokenHead(Head):
    """Head with one row of logits for each token that is read, for tags (L labels) and spans (start and end).

    They come out sequence after sequence in the caller's order, whatever the order of the rows. Only the tokens that
    the task reads, such as the first token of each word, are computed in the last layer and here.

    Your own task returns it from ``Task.head`` if it has one answer for each word or token. ``SequenceHead`` is its
    counterpart for one answer for each text.

    Args:
        config: The configuration of the encoder.
        num_labels: Number of logits of each token.
        dropout: Probability of dropping an input of the last linear layer, usually ``config.head.token_dropout``.

    Examples:
        >>> head = PerTokenHead(model.config, 3, dropout=0.1)
        >>> head.num_logits, head.per_token
        (3, True)
    """

    per_token = True
    dense: Linear | None

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__()
        hidden, self.activation = config.hidden_size, config.head.activation
        self.dense = None
        if config.head.prediction_head:
            self.dense = Linear(hidden, hidden, bias=config.head_bias)
        self.norm: nn.Module = nn.Identity()
        if config.head.prediction_head:
            self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps, bias=config.head_bias)
        self.dropout = Dropout(dropout)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, config)

    def select(self, layout: Layout) -> Selection | None:
        if isinstance(layout, Packed):
            return Selection(rows=layout.gather_positions)
        return None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Computes the logits of the tokens that the task reads.

        Args:
            hidden: ``[R, H]`` last hidden states of these tokens.
            layout: Where the sequences are. This head does not read it.
            embeddings: ``[V, H]`` table of the word embeddings, which this head does not read.

        Returns:
            ``[R, L]`` logits.
        """
        if self.dense is not None:
            hidden = self.norm(linear_activation(self.dense, hidden, self.activation))
        logits: Tensor = self.output(self.dropout(hidden))
        return logits


class CRFHead(PerTokenHead):
    """Head with a linear-chain CRF over the words.

    The logits of a word depend on the label of the word before. Row 0 of ``transitions [L + 2, L]`` scores a label at
    the start of a sequence, row i + 1 a label after label i, and the last row a label at the end.
    """

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {**PerTokenHead.label_dims, "transitions": (0, 1)}

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__(config, num_labels, dropout=dropout)
        self.transitions = nn.Parameter(torch.zeros(num_labels + 2, num_labels))
        self.outputs_per_token = self.transitions.numel()

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Returns ``with_transitions`` of ``[R, H]``, or padded emissions ``[N, L]``."""
        emissions = super().forward(hidden, layout, embeddings)  # [R, L]
        if isinstance(layout, Padded):
            return emissions
        return self.with_transitions(emissions)

    @property
    def outside_graph(self) -> dict[str, Tensor]:
        return {"transitions": self.transitions}

    def from_graph(self, logits: Tensor) -> Tensor:
        return self.with_transitions(logits)

    def with_transitions(self, emissions: Tensor) -> Tensor:
        """Computes the matrices that crf.py reads, ``[R, L] -> [R, L + 2, L]``.

        A word's matrix holds the score that each label adds to a path. The rows stand for the first word, for the word
        after each label, and (without the emission) for the last word.
        """
        within = emissions[:, None, :] + self.transitions[:-1]  # [R, L + 1, L]
        ends = self.transitions[-1:].expand(emissions.shape[0], 1, -1)  # [R, 1, L]
        return torch.cat([within, ends], dim=1)


class HiddenStatesHead(Head):
    """Head that returns the states of the tokens, for exported graphs whose users pool them.

    Args:
        width: Number of components of a state, H.
    """

    per_token = True

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width

    @property
    def num_logits(self) -> int:
        return self.width

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Returns the states as they are, ``[N, H] -> [N, H]``."""
        return hidden

"""The encoder's shape as data: one configuration serves all families, whose differences are its fields.

Names are those of Hugging Face's configurations where it has one. families/ translates a config.json into these fields.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_new", "relu", "tanh"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """How the families' task heads differ.

    Attributes:
        activation: between the two linear layers of the sequence head (tanh; ELECTRA: gelu, DistilBERT: relu).
        dropout_before_dense: dropout also before the sequence head's first linear layer (RoBERTa and ELECTRA).
        sequence_dropout: in the sequence head.
        token_dropout: before the token head's linear layer.
        span_dropout: before the span head's linear layer (DistilBERT only).
        pair_dropout: before the linear layer of a pre-training head for pairs (ALBERT only).
        vocabulary_activation: in heads over the vocabulary (RoBERTa and ELECTRA: always gelu, else ``hidden_act``).
    """

    activation: Activation
    dropout_before_dense: bool
    sequence_dropout: float
    token_dropout: float
    span_dropout: float = 0.0
    pair_dropout: float = 0.0
    vocabulary_activation: Activation = "gelu"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes, options, activation, dropout and head shape of one encoder.

    Attributes:
        embedding_size: width of the embedding tables (ALBERT and small ELECTRA: not ``hidden_size``).
        project_embeddings: a linear layer follows the embeddings (ALBERT: even for equal widths).
        position_offset: position id of the first token (RoBERTa: ``pad_token_id + 1``, else 0).
        type_vocab_size: rows of the segment table; 0: there is none (DistilBERT).
        layer_order: for each layer, the index of the parameters it uses (ALBERT shares them; else 0, 1, 2, ...).
        hidden_dropout_prob: after the embeddings; the layers have the next two.
        attention_output_dropout: after the attention's output projection (0 in DistilBERT).
        feed_forward_dropout: after the feed-forward's second linear layer (0 in ALBERT).
        second_segment: the segment id of the second text of a pair.
        norm: whether a layer normalises after each residual connection or before attention and feed-forward.
        positions: how attention knows the order of tokens: from a table of absolute positions, or from distances.
        mlp: the feed-forward: two linear layers, or with a gate.
        attention_window: for each layer, how many tokens on each side a token attends to, None: all; None: all layers
            attend to all.
        bias: the linear layers of the encoder have biases.
    """

    vocab_size: int
    hidden_size: int
    embedding_size: int
    project_embeddings: bool
    num_attention_heads: int
    intermediate_size: int
    hidden_act: Activation
    layer_order: tuple[int, ...]
    max_position_embeddings: int
    position_offset: int
    type_vocab_size: int
    pad_token_id: int
    layer_norm_eps: float
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    attention_output_dropout: float
    feed_forward_dropout: float
    initializer_range: float
    head: HeadConfig
    norm: Literal["post", "pre"] = "post"
    positions: Literal["absolute", "rotary", "relative", "disentangled"] = "absolute"
    mlp: Literal["dense", "gated"] = "dense"
    attention_window: tuple[int | None, ...] | None = None
    bias: bool = True
    second_segment: Literal[0, 1] = 0

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def usable_length(self) -> int:
        """The longest input in tokens, special tokens included (RoBERTa: 512 of 514 positions)."""
        return self.max_position_embeddings - self.position_offset

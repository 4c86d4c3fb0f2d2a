"""The encoder's shape as data: one configuration serves all families, whose differences are its fields.

Names are Hugging Face's, where its configurations have one. families/ translates a config.json into these fields.
"""

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_new", "relu", "silu", "tanh"]
PairObjective = Literal["nsp", "sop"]
SequencePooling = Literal["cls", "mean", "late"]
TokenPooling = Literal["mean", "max", "attention"]
Pooling = Literal["cls", TokenPooling]
# The heads of transformers whose parameters have names in the families' data.
HeadKind = Literal["sequence", "token", "span", "masked-lm", "pretraining", "replaced-token", "choice"]
# Linear layers of the encoder that may have low-rank adapters; the last two belong to the feed-forward.
LoraTarget = Literal["query", "key", "value", "attention_output", "intermediate", "output"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """How the families' task heads differ.

    Attributes:
        activation: after the linear layer that the sequence head begins with (tanh; ELECTRA: gelu, DistilBERT: relu).
        dense_dropout: before the sequence head's first linear layer (RoBERTa, ELECTRA and DeBERTa).
        sequence_dropout: before its last one.
        token_dropout: before the token head's linear layer.
        span_dropout: before the span head's linear layer (DistilBERT only).
        pair_dropout: before the linear layer of a pre-training head for pairs (ALBERT only).
        choice_dropout: before the last linear layer of the head of multiple choice.
        choice_dense_dropout: before its first one (DeBERTa only).
        pair_objectives: what a pre-training head for pairs is for: next sentences, the order of sentences; none: the
            family has no such head.
        vocabulary_activation: in heads over the vocabulary (RoBERTa and ELECTRA: always gelu, else ``hidden_act``).
        pooling: whether the sequence head reads the first token or the mean over all tokens (ModernBERT has both), or
            makes logits of every token, whose mean counts (late: EuroBERT).
        prediction_head: every head begins with a linear layer, ``activation`` and a norm (ModernBERT). Otherwise the
            sequence head has no norm, and heads on tokens are one linear layer.
        sequence_dense: the sequence head begins with a linear layer (not in UltraBERT).
        vocabulary_dense: heads over the vocabulary have a linear layer before the product with the table (not in
            EuroBERT).
        vocabulary_norm: they have a norm before the product (not in EuroBERT and UltraBERT).
        vocabulary_bias: their logits have a bias (not in EuroBERT and UltraBERT).
    """

    activation: Activation
    dense_dropout: float = 0.0
    sequence_dropout: float
    token_dropout: float
    span_dropout: float = 0.0
    pair_dropout: float = 0.0
    choice_dropout: float = 0.0
    choice_dense_dropout: float = 0.0
    pair_objectives: tuple[PairObjective, ...] = ()
    vocabulary_activation: Activation = "gelu"
    pooling: SequencePooling = "cls"
    prediction_head: bool = False
    sequence_dense: bool = True
    vocabulary_dense: bool = True
    vocabulary_norm: bool = True
    vocabulary_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class DisentangledConfig:
    """Disentangled attention (He et al., arXiv:2006.03654): scores of contents, and of contents with distances.

    Attributes:
        buckets: distances up to half of it have embeddings of their own, greater ones share them by their logarithm;
            0: all distances up to ``max_distance`` have their own.
        max_distance: the greatest distance that is told from others.
        content_to_position: queries are multiplied with keys made of distances.
        position_to_content: keys are multiplied with queries made of distances.
        shared: these keys and queries come from the linear layers of the contents.
        norm: the embeddings of distances are normalised.
    """

    buckets: int
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    shared: bool
    norm: bool

    @property
    def span(self) -> int:
        """How many embeddings there are for distances in one direction."""
        return self.buckets if self.buckets else self.max_distance

    @property
    def own_keys(self) -> bool:
        """Whether attention has a linear layer for the keys of distances."""
        return self.content_to_position and not self.shared

    @property
    def own_queries(self) -> bool:
        """Whether attention has a linear layer for the queries of distances."""
        return self.position_to_content and not self.shared

    def scale(self, head_size: int) -> float:
        """The factor of all scores, which are sums of up to three products."""
        return 1 / math.sqrt(head_size * (1 + self.content_to_position + self.position_to_content))


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes, options, activation, dropout and head shape of one encoder.

    Attributes:
        embedding_size: width of the embedding tables (ALBERT and small ELECTRA: not ``hidden_size``).
        project_embeddings: a linear layer follows the embeddings (ALBERT: even for equal widths).
        output_embedding_size: width of a table over the vocabulary that heads multiply with (RemBERT); None: they are
            tied to the word embeddings.
        prediction_head_size: width of one more linear layer, with which heads over the vocabulary begin (UltraBERT);
            None: there is none.
        norm_after_projection: it has no bias, and comes before the norm of the embeddings (DeBERTa).
        position_offset: position id of the first token (RoBERTa: ``pad_token_id + 1``, else 0).
        type_vocab_size: rows of the segment table; 0: there is none (DistilBERT).
        task_type_vocab_size: rows of the table of task types, whose row 0 is added to every token (ERNIE); 0: there is
            none.
        layer_order: for each layer, the index of the parameters it uses (ALBERT shares them; else 0, 1, 2, ...).
        hidden_dropout_prob: after the embeddings; the layers have the next two.
        attention_output_dropout: after the attention's output projection (0 in DistilBERT).
        feed_forward_dropout: after the feed-forward's second linear layer (0 in ALBERT).
        gate_dropout: before it, where the feed-forward has a gate (ModernBERT).
        initializer_range: standard deviation of new weights.
        initializer_cutoff: new weights come from a normal distribution that is cut at this number of deviations, and
            is narrower where a layer adds to its input (ModernBERT). None: from the whole distribution.
        second_segment: the segment id of the second text of a pair.
        norm: whether norms subtract the mean (LayerNorm) or only divide by the root of the mean square, without a bias
            (RMSNorm, Zhang & Sennrich, arXiv:1910.07467).
        placement: whether a layer normalises after each residual connection, or before attention and feed-forward.
        embedding_norm: the embeddings are normalised.
        first_norm: the first layer normalises before attention (not in ModernBERT, whose embeddings are normalised).
        final_norm: one more norm follows the last layer.
        positions: how attention knows the order of tokens: from the embeddings alone, or from distances, too. Rotary
            positions turn planes: of a component in the first half of a head and one in the second half, or,
            interleaved, of two neighbours, whose sines and cosines may be a table in the file (RoFormer).
        absolute_positions: the embeddings have a table of positions.
        disentangled: how distances take part in attention where positions are disentangled (DeBERTa), else None.
        convolution_size: how many neighbouring tokens the convolution beside the first layer reads (large DeBERTa-v2);
            0: there is none.
        convolution_act: the activation after it.
        mlp: the feed-forward: two linear layers, or with a gate.
        attention_window: for each layer, how many tokens on each side a token attends to, None: all; None: all layers
            attend to all.
        rotary_theta: for each layer, the base of the wavelengths of rotary positions.
        num_key_value_heads: heads of keys and values, each for a group of queries' heads (grouped-query
            attention, Ainslie et al., arXiv:2305.13245); None: as many, and one linear layer for all three.
        head_dim: size of a head; None: ``hidden_size`` divided by the number of heads.
        bias: the linear layers of the encoder have biases.
        intermediate_bias: so has the feed-forward's first one (not in GTE).
        norm_bias: its norms have them.
        head_bias: so have the linear layers and the norm that heads begin with. The last layers have biases, except
            over the vocabulary (``HeadConfig.vocabulary_bias``).
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
    output_embedding_size: int | None = None
    prediction_head_size: int | None = None
    task_type_vocab_size: int = 0
    initializer_cutoff: float | None = None
    norm: Literal["layer", "rms"] = "layer"
    placement: Literal["post", "pre"] = "post"
    embedding_norm: bool = True
    first_norm: bool = True
    final_norm: bool = False
    positions: Literal["absolute", "rotary", "rotary-interleaved", "rotary-table", "relative", "disentangled"] = (
        "absolute"
    )
    absolute_positions: bool = True
    disentangled: DisentangledConfig | None = None
    norm_after_projection: bool = False
    convolution_size: int = 0
    convolution_act: Activation = "tanh"
    mlp: Literal["dense", "gated"] = "dense"
    attention_window: tuple[int | None, ...] | None = None
    rotary_theta: tuple[float, ...] = ()
    gate_dropout: float = 0.0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    intermediate_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = True
    second_segment: Literal[0, 1] = 0

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def usable_length(self) -> int:
        """The longest input in tokens, special tokens included (RoBERTa: 512 of 514 positions)."""
        return self.max_position_embeddings - self.position_offset

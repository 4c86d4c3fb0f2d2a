"""The configuration of the encoder, one dataclass for all families.

The families differ only in the values of its fields, which have Hugging Face's names if possible. families/ translates
a config.json into these fields.
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
# Linear layers of the encoder that may have low-rank adapters. The last two belong to the feed-forward.
LoraTarget = Literal["query", "key", "value", "attention_output", "intermediate", "output"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The differences between the families' task heads.

    Attributes:
        activation: Activation after the first linear layer of the sequence head (tanh, in ELECTRA gelu, in DistilBERT
            relu).
        dense_dropout: Dropout before the sequence head's first linear layer (RoBERTa, ELECTRA and DeBERTa).
        sequence_dropout: Dropout before its last linear layer.
        token_dropout: Dropout before the token head's linear layer.
        span_dropout: Dropout before the span head's linear layer (DistilBERT only).
        pair_dropout: Dropout before the linear layer of a pre-training head for pairs (ALBERT only).
        choice_dropout: Dropout before the last linear layer of the head of multiple choice.
        choice_dense_dropout: Dropout before its first linear layer (DeBERTa only).
        pair_objectives: Objectives of a pre-training head for pairs, next sentences or the order of sentences. Empty if
            the family has no such head.
        vocabulary_activation: Activation in heads over the vocabulary (in RoBERTa and ELECTRA gelu, else
            ``hidden_act``).
        pooling: Input of the sequence head, the first token or the mean over all tokens (ModernBERT has both). ``late``
            computes the logits of every token and then their mean (EuroBERT).
        prediction_head: Every head begins with a linear layer, ``activation`` and a norm (ModernBERT). Otherwise the
            sequence head has no norm, and heads on tokens are one linear layer.
        sequence_dense: The sequence head begins with a linear layer (not in UltraBERT).
        vocabulary_dense: Heads over the vocabulary have a linear layer before the product with the table (not in
            EuroBERT).
        vocabulary_norm: They have a norm before the product (not in EuroBERT and UltraBERT).
        vocabulary_bias: Their logits have a bias (not in EuroBERT and UltraBERT).
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
    """Disentangled attention to contents and distances (He et al., arXiv:2006.03654).

    Attributes:
        buckets: Distances up to half of this number have separate embeddings, and greater distances share them by their
            logarithm. 0 means that all distances up to ``max_distance`` have separate embeddings.
        max_distance: The greatest distance. Greater distances count as this distance.
        content_to_position: Queries are multiplied with keys made of distances.
        position_to_content: Keys are multiplied with queries made of distances.
        shared: These keys and queries come from the linear layers of the contents.
        norm: The embeddings of distances are normalised.
    """

    buckets: int
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    shared: bool
    norm: bool

    @property
    def span(self) -> int:
        """The number of embeddings for distances in one direction."""
        if self.buckets:
            return self.buckets
        return self.max_distance

    @property
    def own_keys(self) -> bool:
        """True if attention has a linear layer for the keys of distances."""
        return self.content_to_position and not self.shared

    @property
    def own_queries(self) -> bool:
        """True if attention has a linear layer for the queries of distances."""
        return self.position_to_content and not self.shared

    def scale(self, head_size: int) -> float:
        """Returns the factor of all scores, which are sums of up to three products."""
        # A product of D components has a variance of D. A sum of three such products has three times as much.
        return 1 / math.sqrt(head_size * (1 + self.content_to_position + self.position_to_content))


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Scaling of rotary positions for longer inputs than those of the first training, see ``scaled_frequencies``.

    Attributes:
        rope_type: The formula.
        factor: How many times as long as ``original_length`` inputs may be.
        original_length: The greatest length of the first training, in tokens.
        attention_factor: Factor of sines and cosines (YaRN).
        beta_fast, beta_slow: Turns in the original length above and below which YaRN keeps and divides the angles.
    """

    rope_type: Literal["linear", "dynamic", "yarn"]
    factor: float
    original_length: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes, options, activation, dropout and head shape of one encoder.

    Attributes:
        embedding_size: Width of the embedding tables (in ALBERT and small ELECTRA not ``hidden_size``).
        project_embeddings: A linear layer follows the embeddings (in ALBERT even for equal widths).
        output_embedding_size: Width of a table over the vocabulary that heads multiply with (RemBERT). None means that
            heads use the word embeddings.
        prediction_head_size: Width of one more linear layer at the beginning of heads over the vocabulary (UltraBERT),
            or None.
        norm_after_projection: The projection has no bias, and comes before the norm of the embeddings (DeBERTa).
        position_offset: Position id of the first token (in RoBERTa ``pad_token_id + 1``, else 0).
        type_vocab_size: Number of rows of the segment table. 0 means no table (DistilBERT).
        task_type_vocab_size: Number of rows of the table of task types, whose row 0 is added to every token (ERNIE). 0
            means no table.
        layer_order: For each layer, the index of the parameters it uses (ALBERT shares them, else 0, 1, 2, ...).
        hidden_dropout_prob: Dropout after the embeddings. The layers have the next two rates.
        attention_output_dropout: Dropout after the attention's output projection (0 in DistilBERT).
        feed_forward_dropout: Dropout after the feed-forward's second linear layer (0 in ALBERT).
        gate_dropout: Dropout before this layer, if the feed-forward has a gate (ModernBERT).
        initializer_range: Standard deviation of new weights.
        initializer_cutoff: New weights come from a normal distribution that is cut at this number of deviations, and is
            narrower if a layer adds to its input (ModernBERT). None means no cut.
        second_segment: Segment id of the second text of a pair, unless the tokenizer states that pairs have none.
        norm: LayerNorm, which subtracts the mean, or RMSNorm, which only divides by the root of the mean square,
            without a bias (Zhang & Sennrich, arXiv:1910.07467).
        placement: A layer normalises after each residual connection, or before attention and feed-forward.
        embedding_norm: The embeddings are normalised.
        first_norm: The first layer normalises before attention (not in ModernBERT, whose embeddings are normalised).
        final_norm: One more norm follows the last layer.
        positions: Attention knows the order of tokens from the embeddings alone, or also from distances. Rotary
            positions rotate planes of one component in the first half of a head and one in the second half. Interleaved
            rotary positions rotate planes of two neighbours, and their sines and cosines may be a table in the file
            (RoFormer).
        absolute_positions: The embeddings have a table of positions.
        disentangled: Use of distances in disentangled attention (DeBERTa), or None.
        convolution_size: Number of neighbouring tokens that the convolution next to the first layer reads (large
            DeBERTa-v2). 0 means no convolution.
        convolution_act: Activation after the convolution.
        mlp: Feed-forward of two linear layers, or with a gate.
        attention_window: For each layer, the number of tokens on each side that a token attends to, or None for all.
            None means all in every layer.
        rotary_theta: For each layer, the base of the wavelengths of rotary positions.
        rotary_scaling: For each layer, the scaling of rotary positions, or None. Empty means no scaling.
        num_key_value_heads: Number of heads of keys and values, each for a group of queries' heads (grouped-query
            attention, Ainslie et al., arXiv:2305.13245). None means the number of queries' heads, and one linear layer
            for all three.
        head_dim: Size of a head. None means ``hidden_size`` divided by the number of heads.
        bias: The linear layers of the encoder have biases.
        intermediate_bias: The feed-forward's first linear layer has a bias (not in GTE).
        norm_bias: The norms of the encoder have biases.
        head_bias: The linear layers and the norm at the beginning of heads have biases. The last layers have biases,
            except over the vocabulary (``HeadConfig.vocabulary_bias``).
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
    rotary_scaling: tuple[RotaryScaling | None, ...] = ()
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
        """The number of components of a head, D."""
        if self.head_dim is not None:
            return self.head_dim
        return self.hidden_size // self.num_attention_heads

    @property
    def usable_length(self) -> int:
        """Maximum length of an input in tokens (RoBERTa uses 512 of 514 positions, scaled positions reach farther)."""
        scaled = [int(each.factor * each.original_length) for each in self.rotary_scaling if each is not None]
        return max([self.max_position_embeddings - self.position_offset, *scaled])

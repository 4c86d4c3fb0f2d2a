"""What a family's data file states, and the tables that several families share.

A family differs from BERT in names and values only: the names of Hugging Face's config fields and modules, the default
values of its config class, the shape of its heads, and the options of the encoder that it uses. All of that is data
here, read off transformers 5.23 and held against it by tests. Nothing outside this package knows a name of Hugging
Face.

Our module names are those of ``Encoder`` and ``TaskModel``: ``stack.`` is the encoder, ``pooler`` and ``head.`` stand
beside it, and ``{i}`` is the index of a layer's parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bert_tasks.encoder.config import Activation

WEIGHT = ("weight",)
WEIGHT_AND_BIAS = ("weight", "bias")

# Names of TensorFlow's layer norm parameters, which transformers wrote until 2019 and writes again when a model loaded
# from such a file is saved.
OLD_PARAMETERS: Mapping[str, str] = MappingProxyType({"gamma": "weight", "beta": "bias"})
# Endings of the buffers that older versions of transformers saved.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

BERT_ONLY_VALUES: Mapping[str, Any] = MappingProxyType(
    {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
)


@dataclass(frozen=True)
class KeyRow:
    """The parameters of one of our modules, and the modules of Hugging Face that hold them.

    Attributes:
        module: ours.
        hf_modules: those of Hugging Face whose tensors are concatenated along dimension 0; saving splits them again.
        parameters: the module's parameters, which have the same names on both sides.
        only_with: the field of ``EncoderConfig`` without which (or at 0) the model has no such module; None: always.
    """

    module: str
    hf_modules: tuple[str, ...]
    parameters: tuple[str, ...] = WEIGHT_AND_BIAS
    only_with: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of encoders.

    Attributes:
        model_type: as config.json names the family.
        prefix: of the base model's parameters inside a model with a head (``bert.``).
        fields: a field of ours -> (HF's name, default of HF's config class). The fields are those of ``EncoderConfig``,
            and ``num_hidden_layers`` and ``num_hidden_groups``, which give its ``layer_order``. A field without a name
            of HF's has the default always.
        keys: the parameters of the base model; the modules of HF are named without the prefix.
        pooler: the module of HF, without the prefix, that is the base model's linear layer on the first token.
        heads: kind of head -> the parameters of the head; the modules of HF are named in full.
        architectures: kind of head, or ``base`` -> class of HF.
        pretraining: prefixes of pre-training heads, which are dropped on load by tasks that do not use them.
        decoder: the module of HF that is the linear layer of the head over the vocabulary, tied to the embeddings.
        head_activation, dropout_before_dense: see ``HeadConfig``.
        vocabulary_activation: see ``HeadConfig``; None: ``hidden_act``.
        sequence_dropout, token_dropout, span_dropout, pair_dropout: config fields of HF for the dropout of these heads
            with the defaults of its config class, of which the first that is not None counts; without fields it is 0.
        options: the fields of ``EncoderConfig`` that are the same for all models of the family.
        positions_after_padding: position ids count from ``pad_token_id + 1`` in place of 0.
        has_segments: the second text of a pair is told by its segment id. In RoBERTa and DistilBERT it is not, even
            where a config has more than one segment.
        only_values: config fields of HF -> the one value that this encoder computes; others are refused.
    """

    model_type: str
    prefix: str
    fields: Mapping[str, tuple[str, Any]]
    keys: tuple[KeyRow, ...]
    pooler: str | None
    heads: Mapping[str, tuple[KeyRow, ...]]
    architectures: Mapping[str, str]
    pretraining: tuple[str, ...]
    decoder: str = ""
    head_activation: Activation
    vocabulary_activation: Activation | None = None
    dropout_before_dense: bool = False
    sequence_dropout: Mapping[str, float | None]
    token_dropout: Mapping[str, float | None]
    span_dropout: Mapping[str, float | None] = field(default_factory=dict)
    pair_dropout: Mapping[str, float | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    positions_after_padding: bool = False
    has_segments: bool = True
    only_values: Mapping[str, Any] = field(default_factory=lambda: BERT_ONLY_VALUES)


BERT_FIELDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "vocab_size": ("vocab_size", 30522),
        "hidden_size": ("hidden_size", 768),
        "num_hidden_layers": ("num_hidden_layers", 12),
        "num_attention_heads": ("num_attention_heads", 12),
        "intermediate_size": ("intermediate_size", 3072),
        "hidden_act": ("hidden_act", "gelu"),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.1),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.1),
        "max_position_embeddings": ("max_position_embeddings", 512),
        "type_vocab_size": ("type_vocab_size", 2),
        "initializer_range": ("initializer_range", 0.02),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "pad_token_id": ("pad_token_id", 0),
    }
)

EMBEDDING_KEYS = (
    KeyRow("stack.embeddings.word", ("embeddings.word_embeddings",), WEIGHT),
    KeyRow("stack.embeddings.position", ("embeddings.position_embeddings",), WEIGHT),
    KeyRow("stack.embeddings.token_type", ("embeddings.token_type_embeddings",), WEIGHT, only_with="type_vocab_size"),
    KeyRow("stack.embeddings.norm", ("embeddings.LayerNorm",)),
)


def layer_keys(
    prefix: str,
    *,
    qkv: tuple[str, str, str],
    attention_output: str,
    attention_norm: str,
    intermediate: str,
    output: str,
    output_norm: str,
) -> tuple[KeyRow, ...]:
    """The parameters of a layer from the names of HF's modules below ``prefix``."""
    return (
        KeyRow("stack.layers.{i}.attention.qkv", tuple(prefix + name for name in qkv)),
        KeyRow("stack.layers.{i}.attention.output", (prefix + attention_output,)),
        KeyRow("stack.layers.{i}.attention_norm", (prefix + attention_norm,)),
        KeyRow("stack.layers.{i}.intermediate", (prefix + intermediate,)),
        KeyRow("stack.layers.{i}.output", (prefix + output,)),
        KeyRow("stack.layers.{i}.output_norm", (prefix + output_norm,)),
    )


BERT_LAYER_KEYS = layer_keys(
    "encoder.layer.{i}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    intermediate="intermediate.dense",
    output="output.dense",
    output_norm="output.LayerNorm",
)

# The dropout of a head that follows the encoder's where the config states none of its own.
CLASSIFIER_DROPOUT: Mapping[str, float | None] = MappingProxyType(
    {"classifier_dropout": None, "hidden_dropout_prob": 0.1}
)


def head_keys(*, dense: str, output: str) -> dict[str, tuple[KeyRow, ...]]:
    """The parameters of the three usual heads, of which only the sequence head differs between families.

    Args:
        dense, output: full names of the modules of HF that are the sequence head's linear layers.
    """
    return {
        "sequence": (KeyRow("head.dense", (dense,)), KeyRow("head.output", (output,))),
        "token": (KeyRow("head.output", ("classifier",)),),
        "span": (KeyRow("head.output", ("qa_outputs",)),),
    }


def vocabulary_keys(*, dense: str, norm: str, bias: str) -> tuple[KeyRow, ...]:
    """The parameters of a head over the vocabulary, whose decoder is tied to the word embeddings.

    Args:
        dense, norm, bias: full names of the modules of HF that hold them.
    """
    return (KeyRow("head.dense", (dense,)), KeyRow("head.norm", (norm,)), KeyRow("head", (bias,), ("bias",)))


def pair_keys(*, pooler: str, pair: str) -> tuple[KeyRow, ...]:
    """The parameters that a pre-training head has for pairs, by the full names of the modules of HF."""
    return (KeyRow("head.pooler", (pooler,)), KeyRow("head.pair", (pair,)))


def architectures(name: str) -> dict[str, str]:
    """HF's classes with the base model and the heads of all families, such as ``BertForSequenceClassification``."""
    return {
        "base": f"{name}Model",
        "sequence": f"{name}ForSequenceClassification",
        "token": f"{name}ForTokenClassification",
        "span": f"{name}ForQuestionAnswering",
        "masked-lm": f"{name}ForMaskedLM",
    }

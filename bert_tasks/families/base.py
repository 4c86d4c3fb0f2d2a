"""The dataclass of a family, and the tables that several families share.

A family differs from BERT in names and values only. They are the names of Hugging Face's config fields and modules, the
default values of its config class, the shape of its heads, and the options of the encoder that it uses. All of them are
data here, read off transformers 5.23 and compared with it by tests. Nothing outside this package knows a name of
Hugging Face.

Our modules have the names in ``Encoder`` and ``TaskModel``. ``encoder.`` is the encoder, ``pooler`` and ``head.`` are
its siblings, and ``{i}`` is the index of a layer's parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bert_tasks.data.issues import shortened
from bert_tasks.encoder.config import Activation, PairObjective, RotaryScaling, SequencePooling
from bert_tasks.errors import CheckpointError

# The parameters of a module. Embeddings and layers without a bias have only the first one.
WEIGHT = ("weight",)
WEIGHT_AND_BIAS = ("weight", "bias")

# Names of TensorFlow's layer norm parameters, which transformers wrote until 2019 and writes again when a model loaded
# from such a file is saved.
OLD_PARAMETERS: Mapping[str, str] = MappingProxyType({"gamma": "weight", "beta": "bias"})
# Endings of the buffers that older versions of transformers saved.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

# Configs of BERT-like families may also describe decoders, and older ones relative positions.
BERT_ONLY_VALUES: Mapping[str, Any] = MappingProxyType(
    {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
)

# Reasons for ``Family.only_values``, the only supported values of config fields.
_ENCODERS_ONLY = "a token of an encoder reads the tokens on both sides"
_NOT_READ = "transformers does not read it"
_NOT_PUBLISHED = "published models have no other"
VALUE_REASONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("is_decoder", "add_cross_attention", "causal"), _ENCODERS_ONLY),
        **dict.fromkeys(("position_embedding_type", "layer_norm_type", "logn_attention_scale", "pack_qkv"), _NOT_READ),
        **dict.fromkeys(("activation_function", "n_head", "layer_norm_epsilon", "rotary_emb_base"), _NOT_READ),
        **dict.fromkeys(("rotary_emb_fraction", "rotary_emb_interleaved", "prenorm", "parallel_block"), _NOT_READ),
        **dict.fromkeys(("use_rms_norm", "num_experts", "pretraining_tp"), _NOT_READ),
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias"), _NOT_PUBLISHED),
        **dict.fromkeys(("classifier_activation", "pooler_hidden_act", "conv_groups", "rotary_value"), _NOT_PUBLISHED),
        **dict.fromkeys(("inner_group_num", "summary_type", "summary_use_proj", "summary_activation"), _NOT_PUBLISHED),
        **dict.fromkeys(("summary_proj_to_labels", "summary_first_dropout"), _NOT_PUBLISHED),
        **dict.fromkeys(("relative_attention_num_buckets", "pad_token_id"), "transformers computes with this value"),
        "rope_scaling": "transformers reads rope_parameters instead",
    }
)

# The greatest number in a config.json, and lower limits of some fields. The deepest published encoders have less
# than 100 layers, and the widest less than 10,000 hidden units.
MOST = 2**31 - 1
MOST_UNITS = 2**20
MOST_LABELS = 1_000_000
# Fields of ours -> the least and the greatest value, if they are not the usual limits.
_BOUNDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "num_hidden_groups"), (1, 1000)),
        **dict.fromkeys(
            ("hidden_size", "embedding_size", "output_embedding_size", "prediction_head_size", "intermediate_size"),
            (1, MOST_UNITS),
        ),
        **dict.fromkeys(("type_vocab_size", "pad_token_id"), (0, MOST)),
    }
)
_KINDS: Mapping[type, str] = MappingProxyType(
    {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
)


@dataclass(frozen=True)
class KeyMapping:
    """Maps the parameters of one of our modules to those of modules of Hugging Face.

    Attributes:
        module: Our module.
        hf_modules: The modules of Hugging Face. Their tensors are concatenated along dimension 0, and split on saving.
        parameters: The module's parameters, which have the same names on both sides.
        only_with: A field of ``EncoderConfig``, or a property of a field, such as ``disentangled.norm``. Without this
            field (or at 0) the model has no such module. None means always.
        first_layer: The first layer that has the module.
    """

    module: str
    hf_modules: tuple[str, ...]
    parameters: tuple[str, ...] = WEIGHT_AND_BIAS
    only_with: str | None = None
    first_layer: int = 0


def no_layer_fields(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``Family.of_layers`` of families whose layers are alike."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of encoders, as data that a test compares with transformers.

    Attributes:
        model_type: Name of the family in config.json.
        prefix: Prefix of the base model's parameters inside a model with a head (``bert.``).
        fields: A field of ours -> (HF's name, default of HF's config class), for fields of ``EncoderConfig``, and
            ``num_hidden_layers`` and ``num_hidden_groups``, which define its ``layer_order``. A field without a name of
            HF's always has the default.
        layer_fields: Config fields of HF, with their defaults, for ``of_layers``. They hold differences between layers
            (ModernBERT), distances in attention (DeBERTa), and a tied table over the vocabulary (EuroBERT).
        of_layers: Function from the config, completed by ``layer_fields``, and the number of layers to fields of
            ``EncoderConfig``.
        kept_layers: Function from the config and the indices of layers to the config fields of HF that are different in
            a model of these layers. None means that all layers are alike.
        keys: Parameters of the base model. The modules of HF are named without the prefix.
        pooler: Module of HF, without the prefix, that is the base model's linear layer on the first token.
        heads: Type of head -> the parameters of the head. The modules of HF are named in full.
        architectures: Type of head, or ``base`` -> class of HF.
        pretraining: Prefixes of pre-training heads, which are dropped on load by tasks that do not use them.
        aliases: Modules of HF under other names that files may have for them -> their names in ``heads``.
        file_names: Pieces of the names that transformers gives tensors in files -> the same pieces in the names of its
            modules. For several pieces, the tensor is split into them along dimension 0. For an empty piece, files may
            have the piece.
        variants: A config field of HF and one of its values -> the changes in models that have it.
        decoder: Module of HF that is the linear layer of the head over the vocabulary. It is tied to the embeddings
            unless ``EncoderConfig.output_embedding_size`` is set.
        shared_head: Prefixes of the modules of HF that heads of all types have, which are loaded from a file with
            another head.
        unsupported_heads: Type of head that transformers has and this package lacks -> the reason.
        head_activation: ``HeadConfig.activation``. None means ``hidden_act``.
        pair_objectives, prediction_head: See ``HeadConfig``.
        head_pooling: Config field of HF that is ``HeadConfig.pooling``, or "".
        poolings: Its values -> values of ours. The first is the default.
        vocabulary_activation: See ``HeadConfig``. None means ``hidden_act``.
        sequence_dropout, dense_dropout, token_dropout, span_dropout, pair_dropout, choice_dropout,
            choice_dense_dropout: Config fields of HF for the dropout of these heads (see ``HeadConfig``) with the
            defaults of its config class. The first that is not None counts. Without fields it is 0.
        options: Fields of ``EncoderConfig`` that are the same for all models of the family.
        head_options: Further fields of ``HeadConfig`` that are the same for all models of the family.
        positions_after_padding: Position ids count from ``pad_token_id + 1`` instead of 0.
        has_segments: The second text of a pair has another segment id. In RoBERTa and DistilBERT it has not, even if a
            config has more than one segment.
        only_values: Config fields of HF -> the only value that this encoder computes. See ``VALUE_REASONS``.
    """

    model_type: str
    prefix: str
    fields: Mapping[str, tuple[str, Any]]
    layer_fields: Mapping[str, Any] = field(default_factory=dict)
    of_layers: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = no_layer_fields
    kept_layers: Callable[[Mapping[str, Any], Sequence[int]], Mapping[str, Any]] | None = None
    keys: tuple[KeyMapping, ...]
    pooler: str | None
    heads: Mapping[str, tuple[KeyMapping, ...]]
    architectures: Mapping[str, str]
    pretraining: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    file_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants: Mapping[tuple[str, Any], Mapping[str, Any]] = field(default_factory=dict)
    decoder: str = ""
    shared_head: tuple[str, ...] = ()
    unsupported_heads: Mapping[str, str] = field(default_factory=dict)
    head_activation: Activation | None
    head_pooling: str = ""
    poolings: Mapping[str, SequencePooling] = field(default_factory=lambda: {"cls": "cls", "mean": "mean"})
    prediction_head: bool = False
    vocabulary_activation: Activation | None = None
    pair_objectives: tuple[PairObjective, ...] = ()
    sequence_dropout: Mapping[str, float | None]
    dense_dropout: Mapping[str, float | None] = field(default_factory=dict)
    token_dropout: Mapping[str, float | None]
    span_dropout: Mapping[str, float | None] = field(default_factory=dict)
    pair_dropout: Mapping[str, float | None] = field(default_factory=dict)
    choice_dropout: Mapping[str, float | None]
    choice_dense_dropout: Mapping[str, float | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    head_options: Mapping[str, Any] = field(default_factory=dict)
    positions_after_padding: bool = False
    has_segments: bool = True
    only_values: Mapping[str, Any] = field(default_factory=lambda: BERT_ONLY_VALUES)

    def is_in_any_model(self, hf_name: str) -> bool:
        """Returns True if a parameter is loaded from a file with any type of head."""
        return hf_name.startswith((self.prefix, *self.shared_head))


def config_value(
    hf_config: Mapping[str, Any],
    name: str,
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    title: str | None = None,
) -> Any:
    """Returns a field of a config.json with the default's type and within bounds.

    All numbers are finite and below 2**31, so that no computation with them overflows.

    Args:
        hf_config: Object that has the field.
        name: Name of the field.
        default: Value if the field is missing.
        least, most: Bounds of a number. By default an integer is at least 1 unless its default is smaller, another
            number at least 0.
        title: Name of the field in messages. Default: ``name``.

    Raises:
        CheckpointError: The value has another type, or is out of bounds.
    """
    value = hf_config.get(name, default)
    if title is None:
        title = name
    subject = f"config.json: {title} = {shortened(value)}"
    kinds: tuple[type, ...] = (type(default),)
    if isinstance(default, float):
        kinds = (int, float)  # many files hold 1 for 1.0
    # True and False are integers to Python.
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise CheckpointError(f"{subject}, expected {_KINDS[type(default)]}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if least is None:
        least = 0
        if isinstance(default, int):
            least = min(default, 1)
    if value < least:
        raise CheckpointError(f"{subject}, expected at least {least}")
    if most is None:
        most = MOST
    if not value <= most:  # also of NaN
        raise CheckpointError(f"{subject}, expected at most {most}")
    return value


def rotary_theta(hf_config: Mapping[str, Any], older: str, *, layer_type: str | None = None) -> float:
    """Returns the wavelengths' base, from ``rope_parameters`` or an older field.

    Args:
        hf_config: The config.json.
        older: Name of the field.
        layer_type: Type of layers, if the types have different bases.

    Raises:
        CheckpointError: A value has the wrong type.
    """
    rope = _rope_parameters(hf_config, layer_type)
    source, name = hf_config, older
    if "rope_theta" in rope:
        source, name = rope, "rope_theta"
    title = name
    if layer_type is not None:
        title = f"the {name} of {layer_type}"
    return float(config_value(source, name, 1.0, least=1.001, title=title))  # YaRN divides by its logarithm


def rotary_scaling(hf_config: Mapping[str, Any], *, layer_type: str | None = None) -> RotaryScaling | None:
    """Returns the scaling of rotary positions, as transformers 5.23 reads it (modeling_rope_utils.py).

    Args:
        hf_config: The config.json, with ``max_position_embeddings``.
        layer_type: Type of layers, if the types have different scalings.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    rope = _rope_parameters(hf_config, layer_type)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    subject = f"config.json: rope_type = {shortened(rope_type)}"
    if rope_type not in ("linear", "dynamic", "yarn"):
        raise CheckpointError(f"{subject} is not supported, only default, linear, dynamic and yarn are")
    if "factor" not in rope:
        raise CheckpointError(f"{subject} needs a factor")
    for source in (hf_config, rope):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise CheckpointError(f"{subject} is not supported with a partial_rotary_factor")
    for name, without_effect in (("mscale", 0), ("mscale_all_dim", 0), ("truncate", True)):
        if rope.get(name) not in (None, without_effect):
            raise CheckpointError(f"{subject} is not supported with {name} = {shortened(rope[name])}")
    factor = float(config_value(rope, "factor", 1.0, least=1))
    length = hf_config["max_position_embeddings"]
    if rope_type != "yarn":
        return RotaryScaling(rope_type=rope_type, factor=factor, original_length=length)
    given = {name: value for name, value in rope.items() if value is not None}
    if layer_type is None and "original_max_position_embeddings" in hf_config:
        given["original_max_position_embeddings"] = hf_config["original_max_position_embeddings"]
    return RotaryScaling(
        rope_type="yarn",
        factor=factor,
        original_length=config_value(given, "original_max_position_embeddings", length, least=1),
        attention_factor=float(config_value(given, "attention_factor", 0.1 * math.log(factor) + 1.0)),
        beta_fast=float(config_value(given, "beta_fast", 32.0, least=0.001)),
        beta_slow=float(config_value(given, "beta_slow", 1.0, least=0.001)),
    )


def _rope_parameters(hf_config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """Returns the object about rotary positions, of one type of layers if these have objects of their own.

    transformers reads one object in families whose layers are alike, and one for each type of layer in the others. It
    fails on the wrong form, or ignores it (EuroBERT), so that the model would compute other positions than stated. The
    older field ``rope_scaling`` replaces the one object, or is added to each of several (ModernBERT).

    Raises:
        CheckpointError: A field has another form.
    """
    name, value, added = "rope_parameters", hf_config["rope_parameters"], hf_config["rope_scaling"]
    if added is not None and layer_type is None:
        name, value, added = "rope_scaling", added, None
    if value is None:
        value = {}
    expected = "one object for all layers"
    if layer_type is not None:
        expected = f"an object for each layer type ({FULL}, {SLIDING})"
    error = CheckpointError(f"config.json: {name} = {shortened(value)}, expected {expected}")
    if not isinstance(value, dict):
        raise error
    if layer_type is None:
        if any(isinstance(entry, dict) for entry in value.values()):
            raise error
        return value
    if value.keys() - {FULL, SLIDING} or not all(isinstance(entry, dict) for entry in value.values()):
        raise error
    rope: Mapping[str, Any] = value.get(layer_type, {})
    if added is None:
        return rope
    if not isinstance(added, dict) or "rope_type" not in added:  # transformers does not read "type" here
        raise CheckpointError(f"config.json: rope_scaling = {shortened(added)}, expected an object with a rope_type")
    return {**rope, **added}


# ``Family.layer_fields`` for ``rotary_layers``, beside ``rope_theta``.
ROTARY_FIELDS: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 768, "num_attention_heads": 12, **dict.fromkeys(("head_dim", "rope_parameters", "rope_scaling"))}
)


def rotary_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``Family.of_layers`` with one base for all layers and an optional head size.

    Raises:
        CheckpointError: As ``rotary_theta`` and ``rotary_scaling`` do, or heads have an odd size.
    """
    theta = rotary_theta(config, "rope_theta")
    scaling = rotary_scaling(config)
    return {
        "head_dim": rotary_head_dim(config),
        "rotary_theta": (theta,) * layers,
        "rotary_scaling": (scaling,) * layers,
    }


def rotary_head_dim(config: Mapping[str, Any]) -> int:
    """Returns the size of a rotary head, from a config with ``ROTARY_FIELDS``.

    Raises:
        CheckpointError: The size is odd.
    """
    size: int = config["hidden_size"] // config["num_attention_heads"]
    if config["head_dim"] is not None:
        size = config_value(config, "head_dim", 1)
    # Each rotation turns a plane of two components.
    if size % 2:
        raise CheckpointError(f"config.json: rotary positions need heads of an even size, not {size}")
    return size


# The values of ``layer_types``, for layers that attend to all tokens and layers that attend to a window.
FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str] | None:
    """Returns the type of each layer, or None if the config does not name them.

    Raises:
        CheckpointError: ``layer_types`` does not name one of the two types for each layer.
    """
    types: Sequence[str] | None = config["layer_types"]
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not all(name in (FULL, SLIDING) for name in types):
        raise CheckpointError(
            f"config.json: layer_types must name one of {FULL}, {SLIDING} for each of the {layers} layers"
        )
    return types


def key_value_heads(config: Mapping[str, Any]) -> int:
    """Returns ``EncoderConfig.num_key_value_heads``. Default: the number of heads.

    Raises:
        CheckpointError: The number of heads is not a multiple of it.
    """
    heads: int = config["num_attention_heads"]
    if config["num_key_value_heads"] is None:
        return heads
    groups: int = config_value(config, "num_key_value_heads", 1)
    if heads % groups:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    return groups


def output_table_size(config: Mapping[str, Any]) -> int | None:
    """Returns ``EncoderConfig.output_embedding_size`` if embeddings may be untied."""
    if config_value(config, "tie_word_embeddings", False):
        return None
    size: int = config["hidden_size"]
    return size


def encoder_field(hf_config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """Returns the value of one entry of ``Family.fields`` in a config.json.

    Args:
        hf_config: The config.json.
        field: Our field, which decides the bounds.
        name: HF's name, or "" for a field that always has the default.
        default: Value if the field is missing.

    Raises:
        CheckpointError: As ``config_value`` does.
    """
    if not name:
        return default
    least, most = _BOUNDS.get(field, (None, None))
    if "dropout" in field:
        most = 1  # a probability
    return config_value(hf_config, name, default, least=least, most=most)


# BERT's fields and the defaults of its config class. Families list what differs. A field that a config.json lacks, for
# example because the file is older than the field, has this default, so a wrong one would build another model without
# any error.
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
    KeyMapping("encoder.embeddings.word", ("embeddings.word_embeddings",), WEIGHT),
    KeyMapping(
        "encoder.embeddings.position", ("embeddings.position_embeddings",), WEIGHT, only_with="absolute_positions"
    ),
    KeyMapping(
        "encoder.embeddings.token_type", ("embeddings.token_type_embeddings",), WEIGHT, only_with="type_vocab_size"
    ),
    KeyMapping("encoder.embeddings.norm", ("embeddings.LayerNorm",), only_with="embedding_norm"),
)


def layer_keys(
    prefix: str,
    *,
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output: str = "attention.output.dense",
    attention_norm: str = "attention.output.LayerNorm",
    intermediate: str = "intermediate.dense",
    output: str = "output.dense",
    output_norm: str = "output.LayerNorm",
) -> tuple[KeyMapping, ...]:
    """Returns the parameters of a layer, by HF's names below ``prefix``. By default they are BERT's names.

    Queries, keys and values are three layers in most families and one layer here, because one larger product is faster
    than three small ones.
    """
    return (
        KeyMapping("encoder.layers.{i}.attention.qkv", tuple(prefix + name for name in qkv)),
        KeyMapping("encoder.layers.{i}.attention.output", (prefix + attention_output,)),
        KeyMapping("encoder.layers.{i}.attention_norm", (prefix + attention_norm,)),
        KeyMapping("encoder.layers.{i}.intermediate", (prefix + intermediate,)),
        KeyMapping("encoder.layers.{i}.output", (prefix + output,)),
        KeyMapping("encoder.layers.{i}.output_norm", (prefix + output_norm,)),
    )


# The dropout of a head that follows the encoder's if the config sets none for the head.
CLASSIFIER_DROPOUT: Mapping[str, float | None] = MappingProxyType(
    {"classifier_dropout": None, "hidden_dropout_prob": 0.1}
)


def head_keys(*, dense: str, output: str) -> dict[str, tuple[KeyMapping, ...]]:
    """Returns the parameters of the usual heads. Only the sequence head differs.

    Args:
        dense, output: Full names of the modules of HF that are the sequence head's linear layers.
    """
    return {
        "sequence": (KeyMapping("head.dense", (dense,)), KeyMapping("head.output", (output,))),
        "token": (KeyMapping("head.output", ("classifier",)),),
        "span": (KeyMapping("head.output", ("qa_outputs",)),),
    }


def choice_keys(*, dense: str) -> dict[str, tuple[KeyMapping, ...]]:
    """Returns the parameters of the head of multiple choice.

    Args:
        dense: Full name of the module of HF that is the linear layer on the first token.
    """
    return {"choice": (KeyMapping("head.dense", (dense,)), KeyMapping("head.output", ("classifier",)))}


def vocabulary_keys(*, dense: str, norm: str, bias: str) -> tuple[KeyMapping, ...]:
    """Returns the parameters of a head over the vocabulary without its tied decoder.

    Args:
        dense, norm, bias: Full names of the modules of HF that hold them.
    """
    # The decoder is the table of word embeddings, so only its bias belongs to the head.
    return (
        KeyMapping("head.dense", (dense,)),
        KeyMapping("head.norm", (norm,)),
        KeyMapping("head", (bias,), ("bias",)),
    )


def pair_keys(*, pooler: str, pair: str) -> tuple[KeyMapping, ...]:
    """Returns the parameters for pairs in a pre-training head.

    Args:
        pooler: Full name of the module of HF that is the linear layer on the first token.
        pair: Full name of the module of HF that makes the two logits.
    """
    return (KeyMapping("head.pooler", (pooler,)), KeyMapping("head.pair", (pair,)))


def architectures(name: str) -> dict[str, str]:
    """Returns the classes of HF for a family's base model and heads.

    Args:
        name: What the names of the classes begin with.
    """
    return {
        "base": f"{name}Model",
        "sequence": f"{name}ForSequenceClassification",
        "token": f"{name}ForTokenClassification",
        "span": f"{name}ForQuestionAnswering",
        "masked-lm": f"{name}ForMaskedLM",
        "choice": f"{name}ForMultipleChoice",
    }

"""DeBERTa-v2, v3 and mDeBERTa (He et al., arXiv:2006.03654 and arXiv:2111.09543).

Attention reads the distances of tokens as well as their contents. This module reads which terms of the scores a config
asks for, and refuses those that the encoder does not compute.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from bert_tasks.data.issues import shortened
from bert_tasks.encoder.config import Activation, DisentangledConfig
from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    MOST_UNITS,
    WEIGHT,
    Family,
    KeyMapping,
    architectures,
    choice_keys,
    config_value,
    encoder_field,
    head_keys,
    layer_keys,
    vocabulary_keys,
)

# The head over the vocabulary has two sets of names. transformers writes and expects the first one unless config.json
# has ``legacy = false``. The published files have the second set, whatever their config says.
_LEGACY = {"dense": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"}
_CURRENT = {"dense": "lm_predictions.lm_head.dense", "norm": "lm_predictions.lm_head.LayerNorm"}
_LEGACY_BIAS, _CURRENT_BIAS = "cls.predictions", "lm_predictions.lm_head"
_BY_LEGACY_NAME: Mapping[str, str] = MappingProxyType(
    {_LEGACY["dense"]: _CURRENT["dense"], _LEGACY["norm"]: _CURRENT["norm"], _LEGACY_BIAS: _CURRENT_BIAS}
)
_HEADS: Mapping[str, tuple[KeyMapping, ...]] = MappingProxyType(
    {**head_keys(dense="pooler.dense", output="classifier"), **choice_keys(dense="pooler.dense")}
)


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the fields of distances, embedding width and convolution.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    hidden_size = config["hidden_size"]
    head_size = hidden_size // config["num_attention_heads"]
    config_value(config, "legacy", True)  # which ``variants`` reads
    for name, only in (("attention_head_size", head_size), ("pooler_hidden_size", hidden_size)):
        if config.get(name, only) != only:
            raise CheckpointError(f"config.json: {name} = {shortened(config[name])} is not supported, only {only} is")
    size, activation = config_value(config, "conv_kernel_size", 0, most=MOST_UNITS), config["conv_act"]
    if size and size % 2 == 0:
        raise CheckpointError(f"config.json: conv_kernel_size = {size}, expected an odd number")
    if activation not in get_args(Activation):
        raise CheckpointError(
            f"config.json: conv_act = {shortened(activation)}, expected one of {get_args(Activation)}"
        )
    embedding_size = hidden_size
    if config["embedding_size"] is not None:
        embedding_size = encoder_field(config, "embedding_size", "embedding_size", 1)
    disentangled = _disentangled(config)
    positions = "absolute"
    if disentangled is not None:
        positions = "disentangled"
    return {
        "embedding_size": embedding_size,
        "project_embeddings": embedding_size != hidden_size,
        # The published models have no table of positions. Attention alone knows the order of the tokens.
        "absolute_positions": config_value(config, "position_biased_input", True),
        "positions": positions,
        "disentangled": disentangled,
        "convolution_size": size,
        "convolution_act": activation,
    }


def _disentangled(config: Mapping[str, Any]) -> DisentangledConfig | None:
    """Returns the terms of the scores that read distances, or None if attention reads contents only.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    value = config["pos_att_type"]
    parts = value  # a list, or one text such as "c2p|p2c" in older files
    if isinstance(value, str):
        parts = value.lower().split("|")
    elif value is None:
        parts = []
    if not isinstance(parts, list) or not all(isinstance(term, str) for term in parts):
        raise CheckpointError(f"config.json: pos_att_type = {shortened(value)}, expected a list of c2p and p2c")
    kinds = {term.strip() for term in parts} - {""}
    if not kinds <= {"c2p", "p2c"}:
        raise CheckpointError(f"config.json: pos_att_type = {shortened(value)} is not supported, only c2p and p2c are")
    is_relative = config_value(config, "relative_attention", False)
    if is_relative != bool(kinds):
        raise CheckpointError(
            f"config.json: relative_attention = {is_relative} with pos_att_type = {shortened(value)} is not "
            "supported. Relative attention needs c2p, p2c or both"
        )
    if not is_relative:
        return None
    buckets = max(0, config_value(config, "position_buckets", -1))
    greatest = config_value(config, "max_relative_positions", -1)
    if greatest <= 0:
        greatest = config["max_position_embeddings"]
    # Half of the buckets are single distances, and the rest share the greater ones by their logarithm. It is divided by
    # the logarithm of the greatest distance relative to that half, which must not be 0.
    if buckets == 1 or greatest <= buckets // 2 + 1:
        raise CheckpointError(
            f"config.json: position_buckets = {buckets} for distances up to {greatest} is not supported. Expected at "
            "least 2, and half of them must be less than the greatest distance"
        )
    shared = config_value(config, "share_att_key", False)
    # The config lists norms of the embeddings of distances as a text with bars, in any case and with spaces.
    norms = config_value(config, "norm_rel_ebd", "none").lower().replace(" ", "").split("|")
    return DisentangledConfig(
        buckets=buckets,
        max_distance=greatest,
        content_to_position="c2p" in kinds,
        position_to_content="p2c" in kinds,
        shared=shared,
        norm="layer_norm" in norms,
    )


FAMILY = Family(
    model_type="deberta-v2",
    prefix="deberta.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 128100),
        "hidden_size": ("hidden_size", 1536),
        "num_hidden_layers": ("num_hidden_layers", 24),
        "num_attention_heads": ("num_attention_heads", 24),
        "intermediate_size": ("intermediate_size", 6144),
        "type_vocab_size": ("type_vocab_size", 0),
        "layer_norm_eps": ("layer_norm_eps", 1e-7),
    },
    layer_fields={
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "max_position_embeddings": 512,
        "relative_attention": False,
        "position_buckets": -1,
        "max_relative_positions": -1,
        "pos_att_type": None,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "position_biased_input": True,
        "embedding_size": None,
        "conv_kernel_size": 0,
        "conv_act": "tanh",
        "legacy": True,
    },
    of_layers=_of_layers,
    keys=(
        *EMBEDDING_KEYS,
        KeyMapping("encoder.embeddings.projection", ("embeddings.embed_proj",), WEIGHT, only_with="project_embeddings"),
        KeyMapping("encoder.positions.embeddings", ("encoder.rel_embeddings",), WEIGHT, only_with="disentangled"),
        KeyMapping("encoder.positions.norm", ("encoder.LayerNorm",), only_with="disentangled.norm"),
        KeyMapping("encoder.convolution.convolution", ("encoder.conv.conv",), only_with="convolution_size"),
        KeyMapping("encoder.convolution.norm", ("encoder.conv.LayerNorm",), only_with="convolution_size"),
        *layer_keys(
            "encoder.layer.{i}.",
            qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        ),
        KeyMapping(
            "encoder.layers.{i}.attention.position_key",
            ("encoder.layer.{i}.attention.self.pos_key_proj",),
            only_with="disentangled.own_keys",
        ),
        KeyMapping(
            "encoder.layers.{i}.attention.position_query",
            ("encoder.layer.{i}.attention.self.pos_query_proj",),
            only_with="disentangled.own_queries",
        ),
    ),
    pooler=None,
    heads={**_HEADS, "masked-lm": vocabulary_keys(**_LEGACY, bias=_LEGACY_BIAS)},
    architectures=architectures("DebertaV2"),
    # The discriminator of v3, for which transformers has no class, and tables of positions that are not used.
    pretraining=("cls.", "lm_predictions.", "mask_predictions.", "deberta.embeddings.position_embeddings."),
    aliases={current: legacy for legacy, current in _BY_LEGACY_NAME.items()},
    variants={
        ("legacy", False): {
            "heads": {**_HEADS, "masked-lm": vocabulary_keys(**_CURRENT, bias=_CURRENT_BIAS)},
            "aliases": _BY_LEGACY_NAME,
        }
    },
    decoder="cls.predictions.decoder",
    head_activation="gelu",
    sequence_dropout={"cls_dropout": None, "hidden_dropout_prob": 0.1},
    dense_dropout={"pooler_dropout": 0.0},
    choice_dropout={"cls_dropout": None, "hidden_dropout_prob": 0.1},
    choice_dense_dropout={"pooler_dropout": 0.0},
    token_dropout={"hidden_dropout_prob": 0.1},
    options={"norm_after_projection": True},
    only_values={"pooler_hidden_act": "gelu", "conv_groups": 1},
)

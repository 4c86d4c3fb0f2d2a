"""ModernBERT (Warner et al., arXiv:2412.13663), pre-norm with rotary positions and windows.

Every third layer attends to all tokens and the others to a window, and the two types have positions of different
wavelengths. Older files state this by rules and newer files by a list, and this module reads both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import (
    BERT_FIELDS,
    FULL,
    SLIDING,
    WEIGHT,
    Family,
    KeyMapping,
    architectures,
    config_value,
    layer_types,
    rotary_scaling,
    rotary_theta,
)

# Config field for the base of the wavelengths of each type of layer, in published files.
_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
_DROPOUT: Mapping[str, float | None] = {"classifier_dropout": 0.0}
# Every head begins with these two modules, and a file with any head has them.
_PREDICTION_HEAD = (KeyMapping("head.dense", ("head.dense",), WEIGHT), KeyMapping("head.norm", ("head.norm",), WEIGHT))
_CLASSIFIER = (*_PREDICTION_HEAD, KeyMapping("head.output", ("classifier",)))


def _layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Returns the type of each layer, from files of transformers 5 or older."""
    types = layer_types(config, layers)
    if types is not None:
        return types
    every = config_value(config, "global_attn_every_n_layers", 3)
    types = [SLIDING] * layers
    for layer in range(0, layers, every):
        types[layer] = FULL
    return types


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the window and the base of the wavelengths of each layer.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    types = _layer_types(config, layers)
    width = config_value(config, "local_attention", 128, least=2)
    size = config["hidden_size"] // config["num_attention_heads"]
    if size % 2:
        raise CheckpointError(f"config.json: rotary positions need heads of an even size, not {size}")
    theta = {layer_type: rotary_theta(config, name, layer_type=layer_type) for layer_type, name in _THETA.items()}
    scaling = {layer_type: rotary_scaling(config, layer_type=layer_type) for layer_type in _THETA}
    # The config counts the tokens of both sides together, and the encoder those of one side.
    windows = {SLIDING: width // 2, FULL: None}
    return {
        "attention_window": tuple(windows[layer_type] for layer_type in types),
        "rotary_theta": tuple(theta[layer_type] for layer_type in types),
        "rotary_scaling": tuple(scaling[layer_type] for layer_type in types),
    }


def _kept_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Returns the types of the kept layers, because the rule would give them others by their new numbers."""
    types = _layer_types(config, config["num_hidden_layers"])
    return {"layer_types": [types[layer] for layer in layers]}


FAMILY = Family(
    model_type="modernbert",
    prefix="model.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 50368),
        "num_hidden_layers": ("num_hidden_layers", 22),
        "intermediate_size": ("intermediate_size", 1152),
        "hidden_act": ("hidden_activation", "gelu"),
        "hidden_dropout_prob": ("embedding_dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
        # One field counts for the weights of attention and for its output.
        "attention_output_dropout": ("attention_dropout", 0.0),
        "feed_forward_dropout": ("", 0.0),
        "gate_dropout": ("mlp_dropout", 0.0),
        "max_position_embeddings": ("max_position_embeddings", 8192),
        "type_vocab_size": ("", 0),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "pad_token_id": ("pad_token_id", 50283),
        "initializer_cutoff": ("initializer_cutoff_factor", 2.0),
    },
    layer_fields={
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        **dict.fromkeys(("layer_types", "rope_parameters", "rope_scaling")),
    },
    of_layers=_of_layers,
    kept_layers=_kept_layers,
    keys=(
        KeyMapping("encoder.embeddings.word", ("embeddings.tok_embeddings",), WEIGHT),
        KeyMapping("encoder.embeddings.norm", ("embeddings.norm",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.qkv", ("layers.{i}.attn.Wqkv",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.output", ("layers.{i}.attn.Wo",), WEIGHT),
        # The embeddings are normalised already, so the first layer has no norm before attention.
        KeyMapping("encoder.layers.{i}.attention_norm", ("layers.{i}.attn_norm",), WEIGHT, first_layer=1),
        # One tensor holds the layer and then its gate, as in the encoder.
        KeyMapping("encoder.layers.{i}.intermediate", ("layers.{i}.mlp.Wi",), WEIGHT),
        KeyMapping("encoder.layers.{i}.output", ("layers.{i}.mlp.Wo",), WEIGHT),
        KeyMapping("encoder.layers.{i}.output_norm", ("layers.{i}.mlp_norm",), WEIGHT),
        KeyMapping("encoder.norm", ("final_norm",), WEIGHT),
    ),
    pooler=None,
    heads={
        **dict.fromkeys(("sequence", "token", "span", "choice"), _CLASSIFIER),
        "masked-lm": (*_PREDICTION_HEAD, KeyMapping("head", ("decoder",), ("bias",))),
    },
    architectures=architectures("ModernBert"),
    pretraining=("decoder.",),
    decoder="decoder",
    shared_head=("head.",),
    head_activation="gelu",
    head_pooling="classifier_pooling",
    prediction_head=True,
    vocabulary_activation="gelu",
    sequence_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    span_dropout=_DROPOUT,
    choice_dropout=_DROPOUT,
    options={
        "placement": "pre",
        "first_norm": False,
        "final_norm": True,
        "positions": "rotary",
        "absolute_positions": False,
        "mlp": "gated",
        "bias": False,
        "norm_bias": False,
        "head_bias": False,
    },
    has_segments=False,
    only_values={
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "classifier_activation": "gelu",
    },
)

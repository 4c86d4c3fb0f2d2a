"""UltraBERT (https://huggingface.co/dmis-lab/UltraBERT-150M), a EuroBERT with local windows.

Layers with windows have another base of rotary positions. Masked words have two linear layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bert_tasks.data.issues import shortened
from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import (
    FULL,
    SLIDING,
    WEIGHT,
    KeyMapping,
    architectures,
    config_value,
    key_value_heads,
    layer_types,
    output_table_size,
    rotary_head_dim,
    rotary_scaling,
    rotary_theta,
)
from bert_tasks.families.eurobert import FAMILY as EUROBERT

# The bases of the wavelengths, if the config has none.
_THETA = {SLIDING: 10_000.0, FULL: 2_560_000.0}
_CLASSIFIER = (KeyMapping("head.output", ("classifier",)),)


def _of_each_layer(config: Mapping[str, Any], name: str, layers: int) -> list[Any]:
    """Returns a list with one value for each layer, in files before transformers 5.

    Raises:
        CheckpointError: The list does not have one value for each layer.
    """
    values = config[name]
    if values is None:
        return []
    if not isinstance(values, list) or len(values) != layers:
        raise CheckpointError(f"config.json: {name} = {shortened(values)}, expected a list of {layers} numbers")
    return values


def _layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Returns the type of each layer, from a list of types, a list of windows, or the rule of the config class."""
    types = layer_types(config, layers)
    if types is not None:
        return types
    windows = _of_each_layer(config, "attention_windows", layers)
    if not windows:  # every third layer attends to all tokens, the first time in layer 2
        windows = [(layer + 1) % 3 for layer in range(layers)]
    types = [FULL] * layers
    for layer, window in enumerate(windows):
        if window:
            types[layer] = SLIDING
    return types


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the window, the base of the wavelengths and the heads of each layer.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    types = _layer_types(config, layers)
    # Published files list a window for each layer, and all windows of a model are equal. transformers writes one.
    widths = [width for width in _of_each_layer(config, "attention_windows", layers) if width]
    window = config["sliding_window"]
    if widths:
        window = widths[0]
    window = config_value({"sliding_window": window}, "sliding_window", 128)
    bases: dict[str, Any] = dict.fromkeys(_THETA, 10_000.0)
    if config["rope_parameters"] is None:  # else it states the bases, and not a list
        bases.update(_THETA)
        published = _of_each_layer(config, "rope_theta", layers)
        bases.update(zip(types, published, strict=False))
    theta, scaling = {}, {}
    for layer_type, base in bases.items():
        scaling[layer_type] = rotary_scaling(config, layer_type=layer_type)
        theta[layer_type] = rotary_theta({**config, "rope_theta": base}, "rope_theta", layer_type=layer_type)
    windows = {SLIDING: window, FULL: None}
    return {
        "attention_window": tuple(windows[layer_type] for layer_type in types),
        "rotary_theta": tuple(theta[layer_type] for layer_type in types),
        "rotary_scaling": tuple(scaling[layer_type] for layer_type in types),
        "head_dim": rotary_head_dim(config),
        "num_key_value_heads": key_value_heads(config),
        "output_embedding_size": output_table_size(config),
    }


def _kept_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Returns the lists of the config for the kept layers."""
    lists = {name: config[name] for name in ("attention_windows", "rope_theta") if isinstance(config[name], list)}
    lists["layer_types"] = _layer_types(config, config["num_hidden_layers"])
    return {name: [values[layer] for layer in layers] for name, values in lists.items()}


FAMILY = replace(
    EUROBERT,
    model_type="ultrabert",
    fields={
        **EUROBERT.fields,
        "vocab_size": ("vocab_size", 32000),
        "prediction_head_size": ("prediction_head_size", 768),
        "hidden_size": ("hidden_size", 4096),
        "num_hidden_layers": ("num_hidden_layers", 32),
        "num_attention_heads": ("num_attention_heads", 32),
        "intermediate_size": ("intermediate_size", 11008),
        "max_position_embeddings": ("max_position_embeddings", 32768),
        "layer_norm_eps": ("rms_norm_eps", 1e-6),
        "pad_token_id": ("pad_token_id", 0),
    },
    layer_fields={
        **EUROBERT.layer_fields,
        **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 128},
        **dict.fromkeys(("layer_types", "attention_windows", "rope_theta")),
    },
    of_layers=_of_layers,
    kept_layers=_kept_layers,
    heads={
        **dict.fromkeys(("sequence", "token"), _CLASSIFIER),
        "span": (KeyMapping("head.output", ("qa_outputs",)),),
        "masked-lm": (
            KeyMapping("head.inner", ("head.linear1",), WEIGHT),
            KeyMapping("head.dense", ("head.linear2",), WEIGHT),
            KeyMapping("head.decoder", ("head.decoder",), WEIGHT, only_with="output_embedding_size"),
        ),
    },
    architectures=architectures("Ultrabert"),
    pretraining=("head.",),
    file_names={"ultrabert.": ("model.",), "cls.": ("head.decoder.",)},
    decoder="head.decoder",
    poolings={"cls": "cls", "mean": "mean"},
    vocabulary_activation="gelu_new",
    sequence_dropout={"classifier_dropout": 0.0},
    token_dropout={"classifier_dropout": 0.0},
    options={**EUROBERT.options, "head_bias": False},
    head_options={"sequence_dense": False, "vocabulary_norm": False, "vocabulary_bias": False},
    only_values={"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
)

"""What is read of the configurations of families with rotary positions, and what is rejected by name.

Every value of a table is read as transformers reads it, or the message says which value is not computed.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from bert_tasks.model.encoder import Encoder
from support.hf_models import hf_config

# Published configurations, some from before transformers 5, without fields that say nothing about what is computed.
PUBLISHED: dict[str, dict[str, Any]] = {
    "eurobert": {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 18,
        "num_key_value_heads": 6,
        "intermediate_size": 4096,
        "rope_theta": 250000,
    },
    "gte": {
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "max_position_embeddings": 8192,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "vocab_size": 250048,
    },
    "nomic_bert": {
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "n_positions": 8192,
        "parallel_block": False,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": 30528,
    },
    "ultrabert": {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
    },
    "modernbert": {"global_attn_every_n_layers": 3, "local_attention": 128},
    "roformer": hf_config("roformer").to_dict(),
}
REJECTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "eurobert": [
        ({"tie_word_embeddings": None}, "tie_word_embeddings = None, expected true or false"),
        ({"num_key_value_heads": 4}, "num_attention_heads 18 is not a multiple of num_key_value_heads 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0, expected at least 1"),
        ({"head_dim": 5}, "rotary positions need heads of an even size, not 5"),
        ({"classifier_pooling": "last"}, "classifier_pooling = 'last', expected 'late' or 'bos' or 'mean'"),
    ],
    "gte": [
        ({"rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_type = 'ntk' is not supported, only default, linear,"),
        ({"rope_parameters": {"type": "ntk"}}, "rope_type = 'ntk' is not supported, only default, linear, dynamic and"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm' is not supported, only 'layer_norm' is"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True is not supported, only False is"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ({"pack_qkv": False}, "pack_qkv = False is not supported, only True is"),
    ],
    "nomic_bert": [
        ({"rotary_emb_base": 10000}, "rotary_emb_base = 10000 is not supported, only 1000 is"),
        ({"n_head": 16}, "n_head = 16 is not supported, only 12 is"),
        ({"activation_function": "gelu"}, "activation_function = 'gelu' is not supported, only 'swiglu' is"),
        ({"num_experts": 8}, "num_experts = 8 is not supported, only 0 is"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_type = 'ntk' is not supported, only default, linear, dynamic and"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\], expected one object for all layers"),
        ({"head_dim": 3}, "rotary positions need heads of an even size, not 3"),
    ],
    "ultrabert": [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = {.*} is not supported, only None is"),
        ({"rope_theta": 1e4}, r"rope_theta = 10000\.0, expected a list of 6 numbers"),
        ({"rope_theta": [1e4] * 5}, r"rope_theta = \[.*\], expected a list of 6 numbers"),
        ({"rope_theta": ["a"] * 6}, "the rope_theta of sliding_attention = 'a', expected a number"),
        ({"attention_windows": [64]}, r"attention_windows = \[64\], expected a list of 6 numbers"),
        ({"attention_windows": ["a"] * 6}, "sliding_window = 'a', expected an integer"),
        ({"sliding_window": 0}, "sliding_window = 0, expected at least 1"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must name one of .* for each of the 6 layers"),
        ({"num_key_value_heads": 5}, "num_attention_heads 12 is not a multiple of num_key_value_heads 5"),
        ({"head_dim": 5}, "rotary positions need heads of an even size, not 5"),
        ({"prediction_head_size": 0}, "prediction_head_size = 0, expected at least 1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, expected true or false"),
        ({"classifier_pooling": "late"}, "classifier_pooling = 'late', expected 'cls' or 'mean'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported, only False is"),
    ],
    "modernbert": [
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers = 0, expected at least 1"),
        ({"layer_types": ["full_attention"]}, "layer_types must name one of full_attention, sliding_attention for"),
        ({"layer_types": ["linear_attention"] * 22}, "layer_types must name one of"),
        ({"layer_types": "full_attention"}, "layer_types must name one of"),
        ({"local_attention": 1}, "local_attention = 1, expected at least 2"),
        ({"local_attention": 12.5}, "local_attention = 12.5, expected an integer"),
        ({"num_attention_heads": 256}, "rotary positions need heads of an even size, not 3"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\], expected an object for each layer type"),
        ({"rope_parameters": {"full_attention": 3}}, "expected an object for each layer type"),
        ({"local_rope_theta": 0}, "the local_rope_theta of sliding_attention = 0, expected at least 1"),
        ({"global_rope_theta": "big"}, "the global_rope_theta of full_attention = 'big', expected a number"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 10**400}}},
            "the rope_theta of full_attention = 1000.*0000",
        ),
        ({"classifier_pooling": "max"}, "classifier_pooling = 'max', expected 'cls' or 'mean'"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False is"),
        ({"norm_bias": True}, "norm_bias = True is not supported"),
        ({"classifier_activation": "relu"}, "classifier_activation = 'relu' is not supported"),
    ],
    "roformer": [
        ({"rotary_value": True}, "rotary_value = True is not supported, only False is"),
        ({"num_attention_heads": 4}, "rotary positions need heads of an even size, not 9"),
        ({"embedding_size": 0}, "embedding_size = 0, expected at least 1"),
    ],
}


def published(family: str) -> dict[str, Any]:
    return {"model_type": family, **PUBLISHED[family]}


@pytest.mark.every_family
@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configurations_are_read_as_in_transformers(family: str) -> None:
    config = published(family)
    assert encoder_config(config) == encoder_config(AutoConfig.for_model(**config).to_dict())


def test_what_published_configurations_mean() -> None:
    euro, gte, nomic, ultra = (
        encoder_config(published(name)) for name in ("eurobert", "gte", "nomic_bert", "ultrabert")
    )
    assert (euro.num_key_value_heads, euro.head_size, set(euro.rotary_theta)) == (6, 64, {250000.0})
    assert (gte.rotary_theta, gte.second_segment) == ((160000.0,) * 12, 0)
    assert (nomic.rotary_theta, nomic.usable_length) == ((1000.0,) * 12, 2048)
    assert (ultra.attention_window, ultra.rotary_theta) == ((128, 128, None) * 2, (1e4, 1e4, 2.56e6) * 2)
    assert (ultra.num_key_value_heads, ultra.head_size, ultra.usable_length) == (4, 64, 32768)
    assert (ultra.prediction_head_size, ultra.output_embedding_size, ultra.layer_norm_eps) == (768, 768, 1e-6)
    for family, size in (("gte", 305e6), ("nomic_bert", 137e6)):
        with torch.device("meta"):
            encoder = Encoder(published(family))
        assert sum(parameter.numel() for parameter in encoder.parameters()) == pytest.approx(size, rel=0.01)


@pytest.mark.every_family
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [(family, changes, message) for family, rows in REJECTED.items() for changes, message in rows],
)
def test_what_is_not_computed_is_rejected_by_name(family: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encoder_config(published(family) | changes)

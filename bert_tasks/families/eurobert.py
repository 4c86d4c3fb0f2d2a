"""EuroBERT (Boizard et al., arXiv:2503.05500), pre-norm with rotary positions.

It has RMSNorm, a gated feed-forward, groups of queries that share keys and values, and no biases.
"""

from collections.abc import Mapping
from typing import Any

from bert_tasks.families.base import (
    BERT_FIELDS,
    ROTARY_FIELDS,
    WEIGHT,
    Family,
    KeyMapping,
    architectures,
    key_value_heads,
    output_table_size,
    rotary_layers,
)


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the fields of rotary positions, groups of queries and an untied table.

    Raises:
        CheckpointError: A value has the wrong type, or is not supported by this encoder.
    """
    return {
        **rotary_layers(config, layers),
        "num_key_value_heads": key_value_heads(config),
        "output_embedding_size": output_table_size(config),
    }


FAMILY = Family(
    model_type="eurobert",
    prefix="model.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 128256),
        "hidden_act": ("hidden_act", "silu"),
        # Only attention has dropout.
        "hidden_dropout_prob": ("", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
        "max_position_embeddings": ("max_position_embeddings", 8192),
        "type_vocab_size": ("", 0),
        "layer_norm_eps": ("rms_norm_eps", 1e-5),
        "pad_token_id": ("pad_token_id", 128001),
    },
    layer_fields={
        **ROTARY_FIELDS,
        "num_key_value_heads": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    of_layers=_of_layers,
    keys=(
        KeyMapping("encoder.embeddings.word", ("embed_tokens",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention_norm", ("layers.{i}.input_layernorm",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.query", ("layers.{i}.self_attn.q_proj",), WEIGHT),
        # Queries may have more heads than keys and values, so the three cannot be split into equal parts.
        KeyMapping(
            "encoder.layers.{i}.attention.key_value",
            ("layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
            WEIGHT,
        ),
        KeyMapping("encoder.layers.{i}.attention.output", ("layers.{i}.self_attn.o_proj",), WEIGHT),
        # In a pre-norm layer the norm "after attention" is the one before the feed-forward.
        KeyMapping("encoder.layers.{i}.output_norm", ("layers.{i}.post_attention_layernorm",), WEIGHT),
        KeyMapping("encoder.layers.{i}.intermediate", ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"), WEIGHT),
        KeyMapping("encoder.layers.{i}.output", ("layers.{i}.mlp.down_proj",), WEIGHT),
        KeyMapping("encoder.norm", ("norm",), WEIGHT),
    ),
    pooler=None,
    heads={
        "sequence": (KeyMapping("head.dense", ("dense",)), KeyMapping("head.output", ("classifier",))),
        "token": (KeyMapping("head.output", ("classifier",)),),
        # With tied embeddings the table of the logits is the table of the words, and the file has no other.
        "masked-lm": (KeyMapping("head.decoder", ("lm_head",), WEIGHT, only_with="output_embedding_size"),),
    },
    architectures=architectures("EuroBert"),
    pretraining=("lm_head.",),
    decoder="lm_head",
    head_activation="gelu",
    head_pooling="classifier_pooling",
    # ``late`` computes the logits of every token and takes their mean.
    poolings={"late": "late", "bos": "cls", "mean": "mean"},
    sequence_dropout={},
    token_dropout={},
    choice_dropout={},
    options={
        "norm": "rms",
        "placement": "pre",
        "embedding_norm": False,
        "final_norm": True,
        "positions": "rotary",
        "absolute_positions": False,
        "mlp": "gated",
        "bias": False,
    },
    head_options={"vocabulary_dense": False, "vocabulary_norm": False, "vocabulary_bias": False},
    has_segments=False,
    # The config class descends from Llama's, and has fields of it that no published EuroBERT uses.
    only_values={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
)

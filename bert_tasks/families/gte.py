"""GTE (Zhang et al., arXiv:2407.19669), a BERT with rotary positions and gates."""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    WEIGHT_AND_BIAS,
    KeyMapping,
    architectures,
    vocabulary_keys,
)
from bert_tasks.families.nomic_bert import FAMILY as NOMIC_BERT


def _keys() -> tuple[KeyMapping, ...]:
    """Returns the parameters of NomicBERT, with biases in all linear layers but the one that makes the gate."""
    keys = []
    for row in NOMIC_BERT.keys:
        if row.module.endswith((".qkv", ".output")):
            row = replace(row, parameters=WEIGHT_AND_BIAS)
        keys.append(row)
    return tuple(keys)


FAMILY = replace(
    NOMIC_BERT,
    model_type="gte",
    prefix="gte.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 250048),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.0),
        # Dropout also acts between the gate and the last layer of the feed-forward.
        "gate_dropout": ("hidden_dropout_prob", 0.1),
        "max_position_embeddings": ("max_position_embeddings", 8192),
        "type_vocab_size": ("type_vocab_size", 1),
        "pad_token_id": ("pad_token_id", 1),
    },
    layer_fields={**NOMIC_BERT.layer_fields, "rope_theta": 160000.0},
    keys=_keys(),
    heads={
        **NOMIC_BERT.heads,
        "sequence": (KeyMapping("head.dense", ("gte.pooler.dense",)), KeyMapping("head.output", ("classifier",))),
        "masked-lm": vocabulary_keys(dense="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head.decoder"),
    },
    architectures=architectures("Gte"),
    pretraining=("lm_head.",),
    decoder="lm_head.decoder",
    vocabulary_activation="gelu",
    # The published files have the names of the code that they came with, and transformers converts them.
    file_names={
        "new.": ("",),
        "encoder.layer.": ("layers.",),
        "attention.qkv_proj.": NOMIC_BERT.file_names["attn.Wqkv."],
        "attention.o_proj.": ("self_attn.o_proj.",),
        "attn_ln.": ("post_attention_layernorm.",),
        "mlp_ln.": ("post_mlp_layernorm.",),
        # One tensor in the file holds the layer and then its gate, which are two modules in transformers.
        "mlp.up_gate_proj.": ("mlp.up_proj.", "mlp.gate_proj."),
        "lm_head.norm.": ("lm_head.layer_norm.",),
    },
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
    options={"positions": "rotary", "absolute_positions": False, "mlp": "gated", "intermediate_bias": False},
    # Fields of the code that published files came with. transformers reads none of them, whatever their values say.
    only_values={
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "pack_qkv": True,
    },
)

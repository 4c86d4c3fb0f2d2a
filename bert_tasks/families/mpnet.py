"""MPNet (Song et al., arXiv:2004.09297), a RoBERTa with scores by distance, no segments."""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    WEIGHT,
    KeyMapping,
    architectures,
    choice_keys,
    layer_keys,
)
from bert_tasks.families.roberta import FAMILY as ROBERTA

# Unlike RoBERTa's, the config class has no dropout for classifiers alone.
_DROPOUT = {"hidden_dropout_prob": 0.1}

FAMILY = replace(
    ROBERTA,
    model_type="mpnet",
    prefix="mpnet.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 30527),
        "type_vocab_size": ("", 0),
        "pad_token_id": ("pad_token_id", 1),
    },
    keys=(
        *EMBEDDING_KEYS,
        # One table of numbers for heads and buckets of distances, which all layers share.
        KeyMapping("encoder.positions.bias", ("encoder.relative_attention_bias",), WEIGHT),
        *layer_keys(
            "encoder.layer.{i}.",
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            attention_output="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
    ),
    heads={**ROBERTA.heads, **choice_keys(dense="mpnet.pooler.dense")},
    architectures=architectures("MPNet"),
    sequence_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    options={"positions": "relative"},
    # transformers' code computes with these two numbers whatever the config says.
    only_values={**ROBERTA.only_values, "relative_attention_num_buckets": 32, "pad_token_id": 1},
)

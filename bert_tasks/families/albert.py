"""ALBERT (Lan et al., 2020) with projected embeddings and shared layers."""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    KeyMapping,
    architectures,
    choice_keys,
    head_keys,
    layer_keys,
    pair_keys,
    vocabulary_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

# The modules stand beside the encoder under ``predictions``, not under ``cls.predictions`` as in BERT.
_MASKED_LM = vocabulary_keys(dense="predictions.dense", norm="predictions.LayerNorm", bias="predictions")

FAMILY = replace(
    BERT,
    model_type="albert",
    prefix="albert.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 30000),
        # Narrow embeddings and a projection keep the table of a large vocabulary small. The defaults are those of the
        # largest model (xxlarge).
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 4096),
        # The layers of a group share all parameters, and published models have one group.
        "num_hidden_groups": ("num_hidden_groups", 1),
        "num_attention_heads": ("num_attention_heads", 64),
        "intermediate_size": ("intermediate_size", 16384),
        "hidden_act": ("hidden_act", "gelu_new"),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.0),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.0),
    },
    keys=(
        *EMBEDDING_KEYS,
        KeyMapping("encoder.embeddings.projection", ("encoder.embedding_hidden_mapping_in",)),
        # A group could hold several inner layers, see ``inner_group_num`` below. Here it is always one.
        *layer_keys(
            "encoder.albert_layer_groups.{i}.albert_layers.0.",
            qkv=("attention.query", "attention.key", "attention.value"),
            attention_output="attention.dense",
            attention_norm="attention.LayerNorm",
            intermediate="ffn",
            output="ffn_output",
            output_norm="full_layer_layer_norm",
        ),
    ),
    pooler="pooler",
    heads={
        **head_keys(dense="albert.pooler", output="classifier"),
        **choice_keys(dense="albert.pooler"),
        "masked-lm": _MASKED_LM,
        "pretraining": _MASKED_LM + pair_keys(pooler="albert.pooler", pair="sop_classifier.classifier"),
    },
    architectures={**architectures("Albert"), "pretraining": "AlbertForPreTraining"},
    pretraining=("predictions.", "sop_classifier."),
    decoder="predictions.decoder",
    sequence_dropout={"classifier_dropout_prob": 0.1},
    token_dropout={"classifier_dropout_prob": 0.1, "hidden_dropout_prob": 0.0},
    pair_dropout={"classifier_dropout_prob": 0.1},
    choice_dropout={"classifier_dropout_prob": 0.1},
    pair_objectives=("sop",),  # the logits that transformers gives are named after them
    # The projection exists even if both widths are equal.
    options={"project_embeddings": True, "feed_forward_dropout": 0.0},
    only_values={**BERT.only_values, "inner_group_num": 1},
)

"""RoBERTa with norms before attention and feed-forward (arXiv:2202.08005)."""

from dataclasses import replace

from bert_tasks.families.base import EMBEDDING_KEYS, KeyMapping, architectures, choice_keys, layer_keys
from bert_tasks.families.roberta import FAMILY as ROBERTA

FAMILY = replace(
    ROBERTA,
    model_type="roberta-prelayernorm",
    prefix="roberta_prelayernorm.",
    # The norms stand before attention and feed-forward, so one more follows the last layer.
    keys=(
        *EMBEDDING_KEYS,
        *layer_keys("encoder.layer.{i}.", attention_norm="attention.LayerNorm", output_norm="intermediate.LayerNorm"),
        KeyMapping("encoder.norm", ("LayerNorm",)),
    ),
    heads={**ROBERTA.heads, **choice_keys(dense="roberta_prelayernorm.pooler.dense")},
    architectures=architectures("RobertaPreLayerNorm"),
    options={"placement": "pre", "final_norm": True},
)

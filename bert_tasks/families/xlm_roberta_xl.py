"""XLM-RoBERTa XL and XXL (Goyal et al., arXiv:2105.00572), with pre-norm layers."""

from dataclasses import replace

from bert_tasks.families.base import EMBEDDING_KEYS, KeyMapping, architectures, layer_keys
from bert_tasks.families.roberta import FAMILY as ROBERTA

FAMILY = replace(
    ROBERTA,
    model_type="xlm-roberta-xl",
    fields={
        **ROBERTA.fields,
        # The sizes of XL (3.5 billion parameters).
        "vocab_size": ("vocab_size", 250880),
        "hidden_size": ("hidden_size", 2560),
        "num_hidden_layers": ("num_hidden_layers", 36),
        "num_attention_heads": ("num_attention_heads", 32),
        "intermediate_size": ("intermediate_size", 10240),
        "max_position_embeddings": ("max_position_embeddings", 514),
        "type_vocab_size": ("type_vocab_size", 1),
        "layer_norm_eps": ("layer_norm_eps", 1e-5),
    },
    # The norms stand before attention and feed-forward, so one more follows the last layer.
    keys=(
        *EMBEDDING_KEYS,
        *layer_keys("encoder.layer.{i}.", attention_norm="attention.self_attn_layer_norm", output_norm="LayerNorm"),
        KeyMapping("encoder.norm", ("encoder.LayerNorm",)),
    ),
    architectures=architectures("XLMRobertaXL"),
    options={"placement": "pre", "embedding_norm": False, "final_norm": True, "feed_forward_dropout": 0.0},
)

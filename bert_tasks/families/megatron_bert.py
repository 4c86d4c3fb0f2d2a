"""Megatron-BERT (Shoeybi et al., arXiv:1909.08053), a BERT with pre-norm layers."""

from dataclasses import replace

from bert_tasks.families.base import BERT_FIELDS, EMBEDDING_KEYS, KeyMapping, architectures, layer_keys
from bert_tasks.families.bert import FAMILY as BERT

# Unlike BERT's, the config class has no dropout for classifiers alone.
_DROPOUT = {"hidden_dropout_prob": 0.1}

FAMILY = replace(
    BERT,
    model_type="megatron-bert",
    # The prefix stays "bert.", as in BERT. The defaults are the sizes of the 345M model.
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 29056),
        "hidden_size": ("hidden_size", 1024),
        "num_hidden_layers": ("num_hidden_layers", 24),
        "num_attention_heads": ("num_attention_heads", 16),
        "intermediate_size": ("intermediate_size", 4096),
    },
    # In these layers the norms stand before attention and feed-forward, so one more follows the last layer.
    keys=(
        *EMBEDDING_KEYS,
        *layer_keys("encoder.layer.{i}.", attention_norm="attention.ln", output_norm="ln"),
        KeyMapping("encoder.norm", ("encoder.ln",)),
    ),
    architectures={**architectures("MegatronBert"), "pretraining": "MegatronBertForPreTraining"},
    sequence_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    choice_dropout=_DROPOUT,
    options={"placement": "pre", "embedding_norm": False, "final_norm": True},
)

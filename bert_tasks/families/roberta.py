"""RoBERTa (Liu et al., 2019): BERT with positions that count from the padding id, and a classifier of its own."""

from dataclasses import replace

from bert_tasks.families.base import BERT_FIELDS, architectures, head_keys, vocabulary_keys
from bert_tasks.families.bert import FAMILY as BERT

FAMILY = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    fields={**BERT_FIELDS, "vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token_id", 1)},
    heads={
        **head_keys(dense="classifier.dense", output="classifier.out_proj"),
        "masked-lm": vocabulary_keys(dense="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head"),
    },
    architectures=architectures("Roberta"),
    pretraining=("lm_head.",),
    decoder="lm_head.decoder",
    vocabulary_activation="gelu",
    dropout_before_dense=True,
    positions_after_padding=True,
    has_segments=False,
)

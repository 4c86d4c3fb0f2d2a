"""RoBERTa (Liu et al., 2019), a BERT whose positions count from the padding id."""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    architectures,
    choice_keys,
    head_keys,
    vocabulary_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

FAMILY = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    fields={**BERT_FIELDS, "vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token_id", 1)},
    heads={
        **head_keys(dense="classifier.dense", output="classifier.out_proj"),
        **choice_keys(dense="roberta.pooler.dense"),
        "masked-lm": vocabulary_keys(dense="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head"),
    },
    architectures=architectures("Roberta"),
    pretraining=("lm_head.",),
    decoder="lm_head.decoder",
    vocabulary_activation="gelu",
    dense_dropout=CLASSIFIER_DROPOUT,
    choice_dropout={"hidden_dropout_prob": 0.1},
    positions_after_padding=True,
    has_segments=False,
)

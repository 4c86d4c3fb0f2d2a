"""RoBERTa (Liu et al., 2019): BERT with positions that count from the padding id, and a classifier of its own."""

from bert_tasks.families.base import (
    BERT_FIELDS,
    BERT_LAYER_KEYS,
    CLASSIFIER_DROPOUT,
    EMBEDDING_KEYS,
    Family,
    architectures,
    head_keys,
)

FAMILY = Family(
    model_type="roberta",
    prefix="roberta.",
    fields={**BERT_FIELDS, "vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token_id", 1)},
    keys=EMBEDDING_KEYS + BERT_LAYER_KEYS,
    pooler="pooler.dense",
    heads=head_keys(dense="classifier.dense", output="classifier.out_proj"),
    architectures=architectures("Roberta"),
    pretraining=("lm_head.",),
    head_activation="tanh",
    dropout_before_dense=True,
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
    positions_after_padding=True,
    has_segments=False,
)

"""BERT (Devlin et al., 2019)."""

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
    model_type="bert",
    prefix="bert.",
    fields=BERT_FIELDS,
    keys=EMBEDDING_KEYS + BERT_LAYER_KEYS,
    pooler="pooler.dense",
    heads=head_keys(dense="bert.pooler.dense", output="classifier"),
    architectures=architectures("Bert"),
    pretraining=("cls.",),
    head_activation="tanh",
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
)

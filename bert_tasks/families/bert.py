"""BERT (Devlin et al., 2019)."""

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    EMBEDDING_KEYS,
    Family,
    architectures,
    choice_keys,
    head_keys,
    layer_keys,
    pair_keys,
    vocabulary_keys,
)

_MASKED_LM = vocabulary_keys(
    dense="cls.predictions.transform.dense", norm="cls.predictions.transform.LayerNorm", bias="cls.predictions"
)

FAMILY = Family(
    model_type="bert",
    prefix="bert.",
    fields=BERT_FIELDS,
    keys=EMBEDDING_KEYS + layer_keys("encoder.layer.{i}."),
    pooler="pooler.dense",
    heads={
        **head_keys(dense="bert.pooler.dense", output="classifier"),
        **choice_keys(dense="bert.pooler.dense"),
        "masked-lm": _MASKED_LM,
        "pretraining": _MASKED_LM + pair_keys(pooler="bert.pooler.dense", pair="cls.seq_relationship"),
    },
    architectures={**architectures("Bert"), "pretraining": "BertForPreTraining"},
    pretraining=("cls.",),
    decoder="cls.predictions.decoder",
    head_activation="tanh",
    pair_objectives=("nsp", "sop"),
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
    choice_dropout=CLASSIFIER_DROPOUT,
)

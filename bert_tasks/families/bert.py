"""BERT (Devlin et al., arXiv:1810.04805), the family that most others differ from in a few lines."""

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

# The transform before the decoder, and the decoder's bias, which transformers stores beside the decoder.
_MASKED_LM = vocabulary_keys(
    dense="cls.predictions.transform.dense", norm="cls.predictions.transform.LayerNorm", bias="cls.predictions"
)

FAMILY = Family(
    model_type="bert",
    prefix="bert.",
    fields=BERT_FIELDS,
    keys=EMBEDDING_KEYS + layer_keys("encoder.layer.{i}."),
    # The pooler belongs to the base model in files, but only heads on the first token read it.
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
    # BERT was trained to tell the next sentence from a random one. Two sentences in the wrong order need the same head.
    pair_objectives=("nsp", "sop"),
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
    choice_dropout=CLASSIFIER_DROPOUT,
)

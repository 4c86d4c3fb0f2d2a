"""ELECTRA (Clark et al., 2020): BERT without a pooler, in small models with narrower embeddings."""

from bert_tasks.families.base import (
    BERT_FIELDS,
    BERT_LAYER_KEYS,
    CLASSIFIER_DROPOUT,
    EMBEDDING_KEYS,
    Family,
    KeyRow,
    architectures,
    head_keys,
)

FAMILY = Family(
    model_type="electra",
    prefix="electra.",
    fields={
        **BERT_FIELDS,
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 256),
        "num_attention_heads": ("num_attention_heads", 4),
        "intermediate_size": ("intermediate_size", 1024),
    },
    keys=(
        *EMBEDDING_KEYS,
        KeyRow("stack.embeddings.projection", ("embeddings_project",), only_with="project_embeddings"),
        *BERT_LAYER_KEYS,
    ),
    pooler=None,
    heads=head_keys(dense="classifier.dense", output="classifier.out_proj"),
    architectures=architectures("Electra"),
    pretraining=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    head_activation="gelu",
    dropout_before_dense=True,
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
)

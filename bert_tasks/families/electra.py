"""ELECTRA (Clark et al., 2020): BERT without a pooler, in small models with narrower embeddings."""

from dataclasses import replace

from bert_tasks.families.base import BERT_FIELDS, KeyRow, architectures, head_keys
from bert_tasks.families.bert import FAMILY as BERT

FAMILY = replace(
    BERT,
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
        *BERT.keys,
        KeyRow("stack.embeddings.projection", ("embeddings_project",), only_with="project_embeddings"),
    ),
    pooler=None,
    heads=head_keys(dense="classifier.dense", output="classifier.out_proj"),
    architectures=architectures("Electra"),
    pretraining=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    head_activation="gelu",
    dropout_before_dense=True,
)

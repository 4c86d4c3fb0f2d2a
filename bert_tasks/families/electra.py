"""ELECTRA (Clark et al., arXiv:2003.10555), a BERT without a pooler.

A generator fills masked tokens, and a discriminator of the same family tells which tokens were replaced. Both are
published, under one ``model_type``.
"""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    KeyMapping,
    architectures,
    choice_keys,
    head_keys,
    vocabulary_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

FAMILY = replace(
    BERT,
    model_type="electra",
    prefix="electra.",
    fields={
        **BERT_FIELDS,
        # The defaults of the config class are those of the small model.
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 256),
        "num_attention_heads": ("num_attention_heads", 4),
        "intermediate_size": ("intermediate_size", 1024),
    },
    keys=(
        *BERT.keys,
        KeyMapping("encoder.embeddings.projection", ("embeddings_project",), only_with="project_embeddings"),
    ),
    pooler=None,
    heads={
        **head_keys(dense="classifier.dense", output="classifier.out_proj"),
        **choice_keys(dense="sequence_summary.summary"),
        # The generator has the head over the vocabulary, and the discriminator one logit for each token.
        "masked-lm": vocabulary_keys(
            dense="generator_predictions.dense", norm="generator_predictions.LayerNorm", bias="generator_lm_head"
        ),
        "replaced-token": (
            KeyMapping("head.dense", ("discriminator_predictions.dense",)),
            KeyMapping("head.output", ("discriminator_predictions.dense_prediction",)),
        ),
    },
    architectures={**architectures("Electra"), "replaced-token": "ElectraForPreTraining"},
    pretraining=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    decoder="generator_lm_head",
    # The classifier and the generator compute gelu in transformers, whatever ``hidden_act`` says.
    head_activation="gelu",
    vocabulary_activation="gelu",
    dense_dropout=CLASSIFIER_DROPOUT,
    choice_dropout={"summary_last_dropout": 0.1},
    # The only summary for multiple choice that published models have.
    only_values={
        **BERT.only_values,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_proj_to_labels": False,
        "summary_activation": "gelu",
        "summary_first_dropout": 0,
    },
)

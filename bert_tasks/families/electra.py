"""ELECTRA (Clark et al., 2020): BERT without a pooler, in small models with narrower embeddings."""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    KeyMapping,
    TF1Names,
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
    head_activation="gelu",
    vocabulary_activation="gelu",
    dense_dropout=CLASSIFIER_DROPOUT,
    choice_dropout={"summary_last_dropout": 0.1},
    # Of the summaries that multiple choice can have in transformers, the one that all published models have.
    only_values={
        **BERT.only_values,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_proj_to_labels": False,
        "summary_activation": "gelu",
        "summary_first_dropout": 0,
    },
)

_DISCRIMINATOR = TF1Names(
    marker="electra/encoder/",
    config_file=None,
    renames=((r"/layer_(\d+)/", r"/layer/\1/"), (r"/dense_1/", "/dense_prediction/")),
    # The heads of run_finetuning.py are not those of HF.
    dropped=r"^(generator|generator_predictions|task_specific)/",
    sizes={
        "vocab_size": ("electra.embeddings.word_embeddings.weight", 0),
        "embedding_size": ("electra.embeddings.word_embeddings.weight", 1),
        "max_position_embeddings": ("electra.embeddings.position_embeddings.weight", 0),
        "type_vocab_size": ("electra.embeddings.token_type_embeddings.weight", 0),
        "hidden_size": ("electra.encoder.layer.0.intermediate.dense.weight", 1),
        "intermediate_size": ("electra.encoder.layer.0.intermediate.dense.weight", 0),
    },
    layers=r"^electra\.encoder\.layer\.(\d+)\.",
    head_size=64,  # get_generator_config in run_pretraining.py, and all published sizes
)
# The generator shares the discriminator's embeddings, or has its own.
_GENERATOR = replace(
    _DISCRIMINATOR,
    marker="generator/encoder/",
    renames=(
        (r"/layer_(\d+)/", r"/layer/\1/"),
        (r"^generator/", "electra/"),
        (r"^generator_predictions/output_bias$", "generator_lm_head/output_bias"),
    ),
    dropped=r"^(electra/encoder|electra/embeddings_project|discriminator_predictions|task_specific)/",
)
_UNTIED_GENERATOR = replace(
    _GENERATOR, marker="generator/embeddings/", dropped=r"^(electra|discriminator_predictions|task_specific)/"
)
GOOGLE = (_DISCRIMINATOR, _UNTIED_GENERATOR, _GENERATOR)

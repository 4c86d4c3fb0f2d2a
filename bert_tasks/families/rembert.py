"""RemBERT (Chung et al., arXiv:2010.12821) with a wide table for masked words.

The paper shows that word embeddings may be narrow for fine-tuning if the table for the masked words is wide and
separate in pre-training, so the two are not tied.
"""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    WEIGHT,
    KeyMapping,
    architectures,
    choice_keys,
    head_keys,
    vocabulary_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

_POOLER, _DECODER = "rembert.pooler.dense", "cls.predictions.decoder"
_DROPOUT = {"classifier_dropout_prob": 0.1}

FAMILY = replace(
    BERT,
    model_type="rembert",
    prefix="rembert.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 250300),
        # Narrow tables for the input, wide ones for the logits.
        "embedding_size": ("input_embedding_size", 256),
        "output_embedding_size": ("output_embedding_size", 1664),
        "hidden_size": ("hidden_size", 1152),
        "num_hidden_layers": ("num_hidden_layers", 32),
        "num_attention_heads": ("num_attention_heads", 18),
        "intermediate_size": ("intermediate_size", 4608),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.0),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.0),
    },
    # transformers has the projection inside its ``encoder``, and always, even for equal widths.
    keys=(*BERT.keys, KeyMapping("encoder.embeddings.projection", ("encoder.embedding_hidden_mapping_in",))),
    heads={
        **head_keys(dense=_POOLER, output="classifier"),
        **choice_keys(dense=_POOLER),
        # Here the decoder is a parameter of the head.
        "masked-lm": (
            *vocabulary_keys(dense="cls.predictions.dense", norm="cls.predictions.LayerNorm", bias=_DECODER),
            KeyMapping("head.decoder", (_DECODER,), WEIGHT),
        ),
    },
    architectures=architectures("RemBert"),
    pair_objectives=(),
    sequence_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    choice_dropout=_DROPOUT,
    options={"project_embeddings": True},
)

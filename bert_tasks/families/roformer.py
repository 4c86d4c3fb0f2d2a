"""RoFormer (Su et al., arXiv:2104.09864), a BERT with stored rotary positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    WEIGHT,
    KeyMapping,
    architectures,
    encoder_field,
    head_keys,
    layer_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

_DROPOUT = {"hidden_dropout_prob": 0.1}


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the width of the embeddings and the base of the wavelengths, which no config of this family states.

    Raises:
        CheckpointError: A head has an odd size, or the width is no positive integer.
    """
    hidden = config["hidden_size"]
    size = hidden // config["num_attention_heads"]
    if size % 2:
        raise CheckpointError(f"config.json: rotary positions need heads of an even size, not {size}")
    embedding_size = hidden
    if config["embedding_size"] is not None:
        embedding_size = encoder_field(config, "embedding_size", "embedding_size", 1)
    return {
        "embedding_size": embedding_size,
        "project_embeddings": embedding_size != hidden,
        "rotary_theta": (10_000.0,) * layers,
    }


FAMILY = replace(
    BERT,
    model_type="roformer",
    prefix="roformer.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 50000),
        "max_position_embeddings": ("max_position_embeddings", 1536),
    },
    layer_fields={"hidden_size": 768, "num_attention_heads": 12, "embedding_size": None},
    of_layers=_of_layers,
    keys=(
        *EMBEDDING_KEYS,
        KeyMapping("encoder.embeddings.projection", ("embeddings_project",), only_with="project_embeddings"),
        # A table of sines and cosines, which is saved although it is not trained.
        KeyMapping("encoder.positions", ("encoder.embed_positions",), WEIGHT),
        *layer_keys("encoder.layer.{i}."),
    ),
    pooler=None,
    heads={
        **head_keys(dense="classifier.dense", output="classifier.out_proj"),
        "masked-lm": BERT.heads["masked-lm"],
    },
    architectures={head: name for head, name in architectures("RoFormer").items() if head != "choice"},
    unsupported_heads={"choice": "the head of transformers reads the last column of a batch, which may be padding"},
    head_activation=None,  # the classifier computes ``hidden_act``
    pair_objectives=(),
    sequence_dropout=_DROPOUT,
    dense_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    choice_dropout={},
    options={"positions": "rotary-table", "absolute_positions": False},
    only_values={**BERT.only_values, "rotary_value": False},
)

"""ERNIE 1.0, 2.0, 3.0 (Sun et al., arXiv:1907.12412), a BERT with a task type."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bert_tasks.families.base import (
    WEIGHT,
    KeyMapping,
    architectures,
    choice_keys,
    config_value,
    head_keys,
    pair_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

_POOLER = "ernie.pooler.dense"
# transformers adds row 0 to every token unless the caller names another task, for which no task here has a value.
_TASK_TYPE = KeyMapping(
    "encoder.embeddings.task_type", ("embeddings.task_type_embeddings",), WEIGHT, only_with="task_type_vocab_size"
)


def _of_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the size of the table of task types, or 0 without ``use_task_id``."""
    rows = config_value(config, "task_type_vocab_size", 3)
    if not config_value(config, "use_task_id", False):
        rows = 0
    return {"task_type_vocab_size": rows}


FAMILY = replace(
    BERT,
    model_type="ernie",
    prefix="ernie.",
    layer_fields={"task_type_vocab_size": 3, "use_task_id": False},
    of_layers=_of_layers,
    keys=(*BERT.keys, _TASK_TYPE),
    heads={
        **head_keys(dense=_POOLER, output="classifier"),
        **choice_keys(dense=_POOLER),
        "masked-lm": BERT.heads["masked-lm"],
        "pretraining": BERT.heads["masked-lm"] + pair_keys(pooler=_POOLER, pair="cls.seq_relationship"),
    },
    architectures={**architectures("Ernie"), "pretraining": "ErnieForPreTraining"},
)

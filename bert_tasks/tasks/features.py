"""Packed batches of rows, with checked features of a task."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from bert_tasks.data.columns import Row
from bert_tasks.encoder import packing
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def checked_features(
    task: Task, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", config: EncoderConfig
) -> list[Feature]:
    """Returns the task's features of these rows.

    Raises:
        UsageError: An id is outside the model's embedding table. A checkpoint's own tokenizer is checked when it is
            loaded, but a task that is not built in, or a tokenizer that was set later, may return any id.
    """
    features = task.features(rows, tokenizer)
    tables = {
        "input_ids": ([feature["input_ids"] for feature in features], config.vocab_size),
        "token_type_ids": ([feature["token_type_ids"] for feature in features], config.type_vocab_size),
    }
    for name, (values, size) in tables.items():
        extremes = {extreme for ids in values if ids for extreme in (min(ids), max(ids))}
        outside = sorted(number for number in extremes if not 0 <= number < size)
        if size and outside:  # a model without segments ignores their ids
            raise UsageError(
                f"{type(task).__name__}: the {name} of a feature hold {outside[0]}, but the model has embeddings for 0 "
                f"to {size - 1} only. Correct the task's features, or use the tokenizer that belongs to the model"
            )
    return features


def collate(features: Sequence[Feature], *, position_offset: int, pad_groups: bool = True) -> PackedBatch:
    """Packs features into a batch (see ``pack``).

    Neighbours with the same ``row`` are the windows of one row. A feature that lacks one of the others' ``fields`` adds
    nothing to it.
    """
    names = sorted({name for feature in features for name in feature.get("fields", ())})
    return packing.pack(
        [feature["input_ids"] for feature in features],
        [feature["token_type_ids"] for feature in features],
        position_offset=position_offset,
        windows=[len(list(windows)) for _, windows in groupby(features, key=lambda feature: feature["row"])],
        labels=[() if labels is None else labels for labels in (feature.get("labels") for feature in features)],
        gather_positions=[feature.get("gather_positions") for feature in features],
        fields={name: [feature.get("fields", {}).get(name, ()) for feature in features] for name in names},
        pad_groups=pad_groups,
    )

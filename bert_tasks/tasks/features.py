"""Packed batches of rows, with checked features of a task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_tasks.data.columns import Row
from bert_tasks.encoder import packing
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import Feature, windows_by_row
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
    tokens = [feature["input_ids"] for feature in features]
    _check_ids(task, "input_ids", tokens, config.vocab_size)
    if config.type_vocab_size:  # a model without segments ignores their ids
        segments = [feature["token_type_ids"] for feature in features]
        _check_ids(task, "token_type_ids", segments, config.type_vocab_size)
    return features


def _check_ids(task: Task, name: str, ids_of_features: Sequence[Sequence[int]], size: int) -> None:
    """Raises UsageError if an id has no row in an embedding table of this size.

    Without the check, torch ends in an IndexError on a CPU, and on a GPU with an assertion that ends the process.
    """
    outside = set[int]()
    for ids in ids_of_features:
        if not ids:
            continue
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < size:
                outside.add(extreme)
    if outside:
        raise UsageError(
            f"{type(task).__name__}: the {name} of a feature hold {min(outside)}, but the model has embeddings for 0 "
            f"to {size - 1} only. Correct the task's features, or use the tokenizer that belongs to the model"
        )


def collate(features: Sequence[Feature], *, position_offset: int, pad_groups: bool = True) -> PackedBatch:
    """Packs features into a batch (see ``pack``).

    Neighbours with the same ``row`` are the windows of one row. A feature that lacks one of the others' ``fields`` adds
    nothing to it.
    """
    tokens: list[Sequence[int]] = []
    segments: list[Sequence[int]] = []
    labels: list[Sequence[float]] = []
    gather_positions: list[Sequence[int] | None] = []
    field_names = set[str]()
    for feature in features:
        tokens.append(feature["input_ids"])
        segments.append(feature["token_type_ids"])
        labels_of_feature: Sequence[float] | None = feature.get("labels")
        if labels_of_feature is None:  # absent, or None from Arrow
            labels_of_feature = ()
        labels.append(labels_of_feature)
        gather_positions.append(feature.get("gather_positions"))
        field_names.update(feature.get("fields", ()))
    fields: dict[str, list[Sequence[float]]] = {}
    for name in sorted(field_names):
        fields[name] = [feature.get("fields", {}).get(name, ()) for feature in features]
    return packing.pack(
        tokens,
        segments,
        position_offset=position_offset,
        windows=[len(windows) for windows in windows_by_row(features)],
        labels=labels,
        gather_positions=gather_positions,
        fields=fields,
        pad_groups=pad_groups,
    )

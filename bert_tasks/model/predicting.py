"""Prediction with a model in memory: rows in, one prediction per row out, in row order.

Owns batching for inference: rows are read in chunks, tokenised, sorted by length, run in packed batches, and put back
in order. Memory depends on the chunk, not on the number of rows. Must not know files or processes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.batching import longest_first
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.values import BadValueError, canonical
from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import Feature, Prediction, collate

if TYPE_CHECKING:
    from bert_tasks.model.task_model import TaskModel

CHUNK_ROWS = 1024
BATCH_TOKENS = 16384


def predict_rows(model: "TaskModel", rows: Iterable[Row]) -> Iterator[Prediction]:
    """Predictions as a stream; see ``TaskModel.predict``.

    Raises:
        UsageError: the model has no tokenizer.
        DataError: a row lacks a column or holds something else than its kind.
    """
    tokenizer = tokenizer_of(model)
    columns = model.task.columns
    inputs = [column.name for column in columns if not column.is_target]
    remaining = iter(rows)
    number = 0
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        for row in chunk:
            check_row(row, columns, number)
            number += 1
        texts = [{name: row[name] for name in inputs if name in row} for row in chunk]  # targets are not read
        features = model.task.features(texts, tokenizer)
        yield from model.task.decode(feature_logits(model, features), features, chunk)


def check_row(row: Row, columns: Sequence[Column], number: int) -> None:
    """Refuses a row that lacks a required text, before a tokenizer meets it.

    Raises:
        DataError: naming the row (counted from 0), the column and what is there instead.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"row {number}: expected a mapping with the task's columns, got {type(row).__name__}")
    for column in columns:
        if not column.required:
            continue
        if column.name not in row:
            raise DataError(f"row {number}: no column {column.name!r}; it has {', '.join(map(repr, row)) or 'none'}")
        try:
            canonical(row[column.name], column.kind)
        except BadValueError as error:
            raise DataError(f"row {number}: column {column.name!r}: {error}") from None


def tokenizer_of(model: "TaskModel") -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UsageError if it has none."""
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer: load one with tokenizer files, or set model.tokenizer")
    return model.tokenizer


def feature_logits(model: "TaskModel", features: Sequence[Feature], *, max_tokens: int = BATCH_TOKENS) -> list[Tensor]:
    """The head's logits of each feature, in feature order, float32 on the CPU. Dropout is off meanwhile."""
    lengths = [len(feature["input_ids"]) for feature in features]
    logits: dict[int, Tensor] = {}
    for batch in longest_first(lengths, max_tokens=max_tokens):
        logits |= zip(batch, batch_logits(model, [features[i] for i in batch]), strict=True)
    return [logits[i] for i in range(len(features))]


def batch_logits(model: "TaskModel", features: Sequence[Feature]) -> tuple[Tensor, ...]:
    """The logits of one packed batch, split by feature, float32 on the CPU. Dropout is off meanwhile."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            batch = collate(features, position_offset=model.config.position_offset).to(model.device)
            return tuple(model.packed_logits(batch).float().cpu())
    finally:
        model.train(was_training)

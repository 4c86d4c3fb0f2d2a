"""Giving freed memory back to the system.

Owns one call of the C library. Batches of ever new sizes leave holes in its heap, which then grows with the number of
rows though nothing is kept; glibc closes the holes when asked.

Prediction with a model in memory: rows in, one prediction per row out, in row order.

Owns batching for inference: rows are read in chunks, tokenised, sorted by length, run in packed batches, and put back
in order. Memory depends on the chunk, not on the number of rows. Must not know files or processes.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Column, Row, text_of_words
from bert_tasks.data.features import longest_first
from bert_tasks.data.stored_reading import known_names, renamed_row
from bert_tasks.data.validator import RowValidator, make_column_mapping
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.tasks.base import Feature, Prediction, Task, collate

if TYPE_CHECKING:
    from bert_tasks.model.task_model import TaskModel


def return_freed_memory() -> None:
    """Returns what the heap holds of freed tensors; does nothing where the C library is not glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None


Logits = Callable[[PackedBatch], Tensor]  # a batch's logits: [B, L], or [R, L] of a head that reads rows
# One row or several: mappings, texts, or tuples of the texts that a row needs.
Inputs = Row | str | tuple[str, ...] | Iterable[Row | str | tuple[str, ...]]

CHUNK_ROWS = 1024
BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 4096  # what a layer makes of so many stays in a processor's cache
_BATCH_LOGITS = 2**25


def predict_rows(
    model: "TaskModel",
    rows: Iterable[Row],
    *,
    run: Logits | None = None,
    first: int = 0,
    note: Callable[[Sequence[Feature]], None] = lambda features: None,
    logits: bool = False,
) -> Iterator[Prediction]:
    """Predictions as a stream; see ``TaskModel.predict``.

    Args:
        run: what runs a batch in place of the model (``model.onnx.logits_of``).
        first: the number of the first row, for messages.
        note: is shown the features of each chunk.
        logits: give the predictions their logits.

    Raises:
        UsageError: the model has no tokenizer, gives no logits, or its task gives ids that have no embedding.
        DataError: a row lacks a column or holds something else than its kind.
        CheckpointError: the model gives scores that are not finite.
    """
    tokenizer, task = tokenizer_of(model), model.task
    inputs = [column for column in task.columns if not column.is_label]
    names = known_names(model.reading, inputs)
    remaining = iter(rows)
    number = first
    while chunk := list(remaining if task.reads_neighbours else islice(remaining, CHUNK_ROWS)):
        read = valid_rows(chunk, inputs, first=number, names=names)
        if number:
            return_freed_memory()
        number += len(chunk)
        features = checked_features(task, read, tokenizer, model.config)
        note(features)
        found = feature_summaries(model, features, run=_finite(model.packed_logits if run is None else run))
        predictions = task.decode(found, features, read)
        yield from task.with_logits(predictions, found, features) if logits else predictions


def _finite(forward: Logits) -> Logits:
    """The same, but for logits that are not finite: no number can be made of them that means anything."""

    def checked(batch: PackedBatch) -> Tensor:
        logits = forward(batch)
        if not torch.isfinite(logits).all():
            raise CheckpointError("the model's scores are not finite numbers: its weights or its precision are broken")
        return logits

    return checked


def as_row(given: Row | str | tuple[str, ...], columns: Sequence[Column], number: int) -> Row:
    """The row that is given as such, as its text, or as a tuple of its texts in the order of the task's columns.

    Raises:
        DataError: naming the row and what it must be.
    """
    if isinstance(given, Mapping):
        return given
    words, text = text_of_words(columns)
    texts = [column.name for column in columns if column.required and column.kind in ("text", "words")]
    texts = [text.name if text is not None and words is not None and name == words.name else name for name in texts]
    values = given if isinstance(given, tuple) else (given,)
    if len(values) == len(texts) and all(isinstance(value, str) for value in values):
        return dict(zip(texts, values, strict=True))
    mapping = "{" + ", ".join(f'"{column.name}": ...' for column in columns if column.required) + "}"
    short = "a text" if len(texts) == 1 else f"a tuple of {' and '.join(texts)}"
    raise DataError(f"row {number}: expected a mapping such as {mapping}, or {short}, got {type(given).__name__}")


def as_rows(inputs: Inputs, columns: Sequence[Column]) -> Iterable[Row]:
    """The rows of what ``TaskModel.predict`` is given: one row or several.

    Raises:
        DataError: see ``as_row``.
    """
    texts = sum(column.required and column.kind in ("text", "words") for column in columns)
    is_one = isinstance(inputs, tuple) and texts == len(inputs) > 1 and all(isinstance(part, str) for part in inputs)
    is_one = is_one or isinstance(inputs, Mapping | str) or not isinstance(inputs, Iterable)
    several: Iterable[Any] = [inputs] if is_one else inputs
    return (as_row(given, columns, number) for number, given in enumerate(several))


def valid_rows(
    rows: Iterable[Row | str | tuple[str, ...]],
    columns: Sequence[Column],
    *,
    first: int = 0,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """The rows' values of some columns, validated and in the form that tasks read.

    Args:
        rows: the rows, as `as_row` takes them.
        columns: the columns that are read.
        first: the number of the first row, for messages.
        names: columns -> the names under which rows may have them instead.

    Raises:
        DataError: naming the first row that cannot be used, its first fault, and the column.
    """
    validator = RowValidator(make_column_mapping(columns))
    valid: list[Row] = []
    for number, given in enumerate(rows, start=first):
        row, faults = validator.validate(renamed_row(as_row(given, columns, number), names))
        if faults:
            raise DataError(f"row {number}: {faults[0]}")
        valid.append(row)
    return valid


def tokenizer_of(model: "TaskModel") -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UsageError if it has none."""
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer: load one with tokenizer files, or set model.tokenizer")
    return model.tokenizer


def checked_features(
    task: Task, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: EncoderConfig
) -> list[Feature]:
    """The task's features of these rows.

    Raises:
        UsageError: an id is outside the model's embedding table. A checkpoint's own tokenizer is checked when it is
            loaded; a task that is not built in, or a tokenizer that was set later, may give any id.
    """
    features = task.features(rows, tokenizer)
    _check_ids("input_ids", (feature["input_ids"] for feature in features), config.vocab_size, task)
    if config.type_vocab_size:
        _check_ids("token_type_ids", (feature["token_type_ids"] for feature in features), config.type_vocab_size, task)
    return features


def _check_ids(name: str, given: Iterable[Sequence[int]], size: int, task: Task) -> None:
    extremes = {extreme for ids in given if ids for extreme in (min(ids), max(ids))}
    outside = sorted(number for number in extremes if not 0 <= number < size)
    if outside:
        raise UsageError(
            f"{type(task).__name__}: the {name} of a feature hold {outside[0]}, but the model has embeddings for 0 to "
            f"{size - 1} only; correct the task's features, or use the tokenizer that belongs to the model"
        )


def feature_summaries(
    model: "TaskModel", features: Sequence[Feature], *, max_tokens: int | None = None, run: Logits | None = None
) -> list[Tensor]:
    """What decoding needs of each feature, in feature order. Dropout is off meanwhile."""
    lengths = [len(feature["input_ids"]) for feature in features]
    found: dict[int, Tensor] = {}
    room = batch_tokens(model) if max_tokens is None else max_tokens
    for batch in longest_first(lengths, max_tokens=room):
        chosen = [features[i] for i in batch]
        found |= zip(batch, summaries(model, *batch_logits(model, chosen, run=run), chosen), strict=True)
    return [found[i] for i in range(len(features))]


def batch_tokens(model: "TaskModel") -> int:
    """How many tokens are run together: fewer for a CRF, whose logits hold a matrix for each."""
    most = CPU_BATCH_TOKENS if model.device.type == "cpu" else BATCH_TOKENS
    if not isinstance(model.head, CRFHead):
        return most
    return max(1, min(most, _BATCH_LOGITS // model.head.transitions.numel()))


def batch_logits(
    model: "TaskModel", features: Sequence[Feature], *, run: Logits | None = None
) -> tuple[PackedBatch, Tensor]:
    """A packed batch and its logits, both on the model's device, logits in float32. Dropout is off meanwhile."""
    forward = model.packed_logits if run is None else run
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            batch = collate(features, position_offset=model.config.position_offset).to(model.device)
            return batch, forward(batch).float()
    finally:
        model.train(was_training)


def summaries(
    model: "TaskModel", batch: PackedBatch, logits: Tensor, features: Sequence[Feature]
) -> tuple[Tensor, ...]:
    """The task's summary of each feature's logits, on the CPU."""
    counts = batch.layout.gather_counts
    with torch.inference_mode():
        split = torch.split(logits, list(counts)) if model.head.per_token else logits.unbind()
        return tuple(summary.cpu() for summary in model.task.reduce_logits(split, features))

"""The features of rows, grouped into samples and batches.

A feature is one window of tokens that the encoder reads. A row whose text is longer than a window has several features,
and a sample is what a batch draws as a whole: all windows of a row, a single window, or all rows of a group.

This module owns the Arrow schema of features, the grouping into samples, and batches of a limited number of tokens. The
cache adds the rows and the tokenizer to the caller's key of features.

Shapes: R rows, F features, S samples. ``starts`` arrays have one entry more than what they number, so that item ``i``
is ``starts[i]`` to ``starts[i + 1] - 1``.
"""

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import ArrayLike, NDArray

from bert_tasks.data.arrow import ArrowRows, cache_folder, store, with_progress, write_batches
from bert_tasks.data.rows import Rows
from bert_tasks.storage import sha256_json

MakeFeatures = Callable[[list[dict[str, Any]], Any], Sequence[Mapping[str, Any]]]
_FEATURES_VERSION = 6  # part of the key. Raise it when the schema changes
_OPTIONAL = ("labels", "gather_positions", "word_ids", "offsets", "sentence_starts", "head")


def cached_features(
    table: Rows,
    *,
    features: MakeFeatures,
    tokenizer: Any,
    key: Mapping[str, Any],
    cache_dir: Path | None = None,
    batch_size: int | None = 1000,
) -> ArrowRows:
    """Returns the features of all rows, in row order.

    ``row`` counts over the whole table. Missing values are None, but ``lost_tokens`` and ``lost_answers`` are then 0.

    Args:
        features: Makes the features of a batch of rows, whose ``row`` counts within the batch.
        key: Plain values on which the features depend besides the rows and the tokenizer, such as task, settings,
            labels and package version.
        batch_size: Number of rows per call of ``features``. None means all at once.
    """
    # Labels are float64, because tags, positions and numbers share the column. Token ids need 32 bits, and segment ids,
    # which are 0 and 1, need 8.
    numbers = pyarrow.list_(pyarrow.int32())
    types = {"row": pyarrow.int64(), "input_ids": numbers, "token_type_ids": pyarrow.list_(pyarrow.int8())}
    types |= {"labels": pyarrow.list_(pyarrow.float64()), "gather_positions": numbers, "word_ids": numbers}
    types |= {"offsets": numbers, "sentence_starts": numbers, "head": pyarrow.string()}
    schema = pyarrow.schema({**types, "lost_tokens": pyarrow.int32(), "lost_answers": pyarrow.int32()})
    if len(table) == 0:
        return ArrowRows(schema.empty_table())
    fingerprint = sha256_json(table.fingerprint, tokenizer_content(tokenizer), dict(key), _FEATURES_VERSION)

    def batches() -> Iterator[dict[str, list[Any]]]:
        first, size = 0, batch_size
        if size is None:
            size = len(table)
        for rows in with_progress(table.rows.tables(size=size), f"Tokenizing {table.source}", len(table)):
            batch_features = features(rows.to_pylist(), tokenizer)
            columns: dict[str, list[Any]] = {"row": [feature["row"] + first for feature in batch_features]}
            for name in ("input_ids", "token_type_ids"):
                columns[name] = [feature[name] for feature in batch_features]
            for name in _OPTIONAL:
                columns[name] = [feature.get(name) for feature in batch_features]
            for name in ("lost_tokens", "lost_answers"):
                columns[name] = [feature.get(name, 0) for feature in batch_features]
            yield columns
            first += len(rows)

    def write(path: Path) -> None:
        write_batches(path, batches(), schema)

    return store(cache_folder(cache_dir, "features"), fingerprint, write).rows


def tokenizer_content(tokenizer: Any) -> str:
    """Returns a digest of a tokenizer's behaviour, whatever its files are called.

    Truncation and padding of the backend do not count, because each call sets them anew.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # an earlier call leaves them in the backend
        backend.pop(name, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return sha256_json(backend, special, tokenizer.truncation_side)


Numbers = NDArray[np.int64]
SampleUnit = Literal["row", "window", "group"]
Item = TypeVar("Item")

# Columns for a batch, and columns for decoding.
_FOR_TRAINING = (
    "row",
    "input_ids",
    "token_type_ids",
    "labels",
    "gather_positions",
    "word_ids",
    "sentence_starts",
    "head",
)
_FOR_DECODING = ("row", "gather_positions", "word_ids", "offsets", "head")


def number_array(column: pyarrow.ChunkedArray) -> NDArray[Any]:
    """Returns a column of numbers without missing values as an array.

    ``to_numpy`` of pyarrow does the same, but imports pandas if it is installed, which takes longer than reading.
    """
    return np.from_dlpack(column.combine_chunks())


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Features of a table grouped into samples of rows, windows or groups of rows.

    Memory holds five arrays at most. Everything else stays in the file.

    Attributes:
        features: Memory-mapped features in row order. ``trained`` and ``decoded`` have some of its columns.
        tokens: ``[F]``, number of tokens of each feature.
        starts: ``[S + 1]``, index of each sample's first feature in ``order``, and the number of features at the end.
        lengths: ``[S]``, number of tokens of each sample, all its windows together.
        row_starts: ``[R + 1]``, index of each row's first feature, and the number of features at the end.
        tables: Number of rows of each table that was joined, in order. Empty for one table.
        order: ``[F]``, features of all samples, one sample after another. None means row order.
    """

    features: ArrowRows
    trained: ArrowRows
    decoded: ArrowRows
    tokens: Numbers
    starts: Numbers
    lengths: Numbers
    row_starts: Numbers
    tables: tuple[int, ...] = ()
    order: Numbers | None = None

    @classmethod
    def of(cls, features: ArrowRows, unit: SampleUnit = "row", *, count: int = 0) -> Self:
        """Reads all lengths once.

        Args:
            features: Features of a table, as ``cached_features`` numbers its rows.
            unit: Unit of a sample. Groups are rows until ``grouped``.
            count: Number of rows. The last rows may have no feature.
        """
        token_lists = features.column("input_ids")  # only the offsets of the lists are read
        tokens = number_array(pyarrow.compute.list_value_length(token_lists)).astype(np.int64)
        rows = number_array(features.column("row"))
        return cls._of_counts(features, tokens, np.bincount(rows, minlength=count), unit)

    @classmethod
    def _of_counts(cls, features: ArrowRows, tokens: Numbers, counts: ArrayLike, unit: SampleUnit) -> Self:
        """Makes samples from ``counts``, the number of features of each row."""
        row_starts = np.append(0, np.cumsum(counts, dtype=np.int64))
        starts = row_starts
        if unit == "window":
            starts = np.arange(len(tokens) + 1)
        return cls(
            features=features,
            trained=features.select_columns([name for name in _FOR_TRAINING if name in features.column_names]),
            decoded=features.select_columns([name for name in _FOR_DECODING if name in features.column_names]),
            tokens=tokens,
            starts=starts,
            lengths=np.diff(np.append(0, np.cumsum(tokens, dtype=np.int64))[starts]),
            row_starts=row_starts,
        )

    def of_rows(self, rows: Numbers) -> Self:
        """Returns the samples of some rows, numbered from 0 in their new order."""
        counts = np.diff(self.row_starts)[rows]
        ends = np.cumsum(counts, dtype=np.int64)
        # The features of all rows at once: each row's first feature minus its place in the result, plus the places.
        indices = np.repeat(self.row_starts[rows] - ends + counts, counts) + np.arange(counts.sum())
        unit: SampleUnit = "row" if self.starts is self.row_starts else "window"
        return self._of_counts(self.features.select(indices), self.tokens[indices], counts, unit)

    def grouped(self, groups: Sequence[Hashable]) -> Self:
        """Returns the samples whose rows are whole groups, ordered by their first rows.

        Args:
            groups: Group of each row. Its rows need not be neighbours.
        """
        numbers: dict[Hashable, int] = {}
        by_row = np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)
        by_feature = np.repeat(by_row, np.diff(self.row_starts))
        order = np.argsort(by_feature, kind="stable")  # a stable sort keeps the windows of a row in their order
        starts = np.append(0, np.cumsum(np.bincount(by_feature, minlength=len(numbers)), dtype=np.int64))
        lengths = np.diff(np.append(0, np.cumsum(self.tokens[order], dtype=np.int64))[starts])
        return replace(self, starts=starts, lengths=lengths, order=order)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def by_table(self) -> list[Numbers]:
        """Returns the samples of each joined table, groups with their first row's table."""
        starts = self.row_starts[np.append(0, np.cumsum(self.tables, dtype=np.int64))]
        firsts = self.starts[:-1]
        if self.order is not None:
            firsts = self.order[firsts]
        tables = np.split(np.arange(len(self)), np.searchsorted(firsts, starts[1:-1]))
        return [table for table in tables if len(table)]

    def indices(self, samples: Iterable[int]) -> list[int]:
        """Returns the numbers of all features of some samples, in that order."""
        numbers: list[int] = []
        for sample in samples:
            numbers += range(self.starts[sample], self.starts[sample + 1])
        if self.order is None:
            return numbers
        return [int(number) for number in self.order[numbers]]

    def rows(self, samples: Iterable[int]) -> list[int]:
        """Returns the numbers of the rows of some samples, ascending, from 0."""
        features = self.indices(samples)
        rows = np.searchsorted(self.row_starts, features, side="right") - 1
        return sorted(set(rows.tolist()))

    def features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the training columns of all features of some samples, in that order.

        ``row`` is the same for all features of a sample. A sample that occurs twice is two rows.
        """
        numbers = list(samples)
        features = self.trained[self.indices(numbers)]
        if self.order is None and len(set(numbers)) == len(numbers):
            return features
        # Features name their row, which is not the sample if a group has several rows or a sample occurs twice.
        rows = np.repeat(np.arange(len(numbers)), np.diff(self.starts)[numbers]).tolist()
        return [{**feature, "row": row} for feature, row in zip(features, rows, strict=True)]

    def whole_features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """Returns all features of some samples, with the columns for decoding."""
        return self.features[self.indices(samples)]

    def decoded_rows(self, first: int, end: int) -> list[dict[str, Any]]:
        """Returns the decoding columns of rows ``first`` to ``end - 1``, numbered from 0."""
        records = self.decoded[self.row_starts[first] : self.row_starts[end]]
        rows = np.repeat(np.arange(end - first), np.diff(self.row_starts[first : end + 1])).tolist()
        return [{**record, "row": row} for record, row in zip(records, rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Tokens and answers that no window of some rows holds.

    Attributes:
        rows: Number of all rows.
        cut_rows: Number of rows with tokens that no window holds.
        lost_answers: Number of answers that no window holds whole.
    """

    rows: int
    cut_rows: int
    lost_answers: int = 0

    @classmethod
    def of(cls, features: ArrowRows, *, rows: int) -> Self:
        """Counts over all features of this number of rows."""
        names = ("row", "lost_tokens", "lost_answers")
        counts = {name: number_array(features.column(name)).astype(np.int64) for name in names}
        cut_rows = len(np.unique(counts["row"][counts["lost_tokens"] > 0]))
        return cls(rows=rows, cut_rows=cut_rows, lost_answers=int(counts["lost_answers"].sum()))

    def share(self, count: int) -> str:
        """Returns a count of rows with its share, such as ``3 of 200 (1.5%)``."""
        return f"{count} of {self.rows} ({count / max(self.rows, 1):.1%})"


def filled_batches(items: Iterable[Item], length: Callable[[Item], int], *, max_tokens: int) -> Iterator[list[Item]]:
    """Yields batches of neighbours of at most ``max_tokens``, or one longer item.

    A limit of tokens bounds the memory of a step whatever the lengths are, which a number of rows does not.
    """
    batch: list[Item] = []
    room = max_tokens
    for item in items:
        size = length(item)
        if batch and size > room:
            yield batch
            batch, room = [], max_tokens
        batch.append(item)
        room -= size
    if batch:
        yield batch


def token_batches(order: Iterable[int], lengths: Sequence[int] | Numbers, *, max_tokens: int) -> list[list[int]]:
    """Returns ``filled_batches`` of indices in an order."""
    return list(filled_batches(order, lambda index: int(lengths[index]), max_tokens=max_tokens))


def longest_first(lengths: ArrayLike, *, max_tokens: int) -> list[list[int]]:
    """Returns all indices in batches of similar length, the longest batch first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return token_batches(np.argsort(-sizes, kind="stable").tolist(), sizes.tolist(), max_tokens=max_tokens)


def filling_order(lengths: ArrayLike, *, max_tokens: int) -> list[int]:
    """Orders all indices so that ``filled_batches`` makes nearly full batches.

    The longest come first. Free room in a batch goes to the longest of the others that fit, so that nearly all batches
    have the same number of tokens, for which the products of layers are prepared once.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    waiting: dict[int, deque[int]] = {}  # length -> the indices of this length, the longest first
    for index in np.argsort(-sizes, kind="stable").tolist():
        waiting.setdefault(int(sizes[index]), deque()).append(index)
    order: list[int] = []
    while waiting:
        room = max(max_tokens, next(iter(waiting)))  # an item above the limit is a batch of its own
        for size in list(waiting):
            while size <= room and waiting[size]:
                order.append(waiting[size].popleft())
                room -= size
            if not waiting[size]:
                del waiting[size]
    return order

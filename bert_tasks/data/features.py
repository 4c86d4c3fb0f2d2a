"""Features of a table: computed once and cached, grouped into samples, and cut into batches.

Owns the Arrow schema of features, which features belong to one sample (the windows of a long text are read together),
and batches of a limited number of tokens. To the key that the caller gives, the cache adds the rows and the tokenizer.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.data.records import rows_of
from bert_tasks.data.table import RowTable, cache_folder, store
from bert_tasks.storage import sha256_json
from bert_tasks.terminal import message_stream

if TYPE_CHECKING:
    from datasets import Dataset

MakeFeatures = Callable[[list[dict[str, Any]], Any], Sequence[Mapping[str, Any]]]
_VERSION = 4  # part of the key: raise it when the schema changes
_OPTIONAL = ("labels", "gather_positions", "word_ids", "offsets")


def cached_features(
    table: RowTable,
    *,
    features: MakeFeatures,
    tokenizer: Any,
    key: Mapping[str, Any],
    cache_dir: Path | None = None,
    batch_size: int | None = 1000,
) -> "Dataset":
    """The features of all rows, in row order; ``row`` counts over the whole table.

    What a feature lacks is None; ``lost_tokens`` and ``lost_answers`` are then 0.

    Args:
        features: makes the features of a batch of rows, whose ``row`` counts within the batch.
        key: what the features depend on besides the rows and the tokenizer, as plain values: task, settings, labels,
            package version.
        batch_size: rows per call of ``features``; None: all at once.
    """
    import datasets
    from datasets import Features, List, Value

    numbers = List(Value("int32"))
    schema = Features(
        {"row": Value("int64"), "input_ids": numbers, "token_type_ids": List(Value("int8"))}
        | {"labels": List(Value("float64")), "gather_positions": numbers, "word_ids": numbers, "offsets": numbers}
        | {"lost_tokens": Value("int32"), "lost_answers": Value("int32")}
    )
    if len(table) == 0:
        return datasets.Dataset.from_dict({name: [] for name in schema}, features=schema)
    fingerprint = sha256_json(table.fingerprint, tokenizer_content(tokenizer), dict(key), _VERSION)

    def make(batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        made = features(rows_of(batch), tokenizer)
        return {
            "row": [feature["row"] + indices[0] for feature in made],
            "input_ids": [feature["input_ids"] for feature in made],
            "token_type_ids": [feature["token_type_ids"] for feature in made],
            **{name: [feature.get(name) for feature in made] for name in _OPTIONAL},
            **{name: [feature.get(name, 0) for feature in made] for name in ("lost_tokens", "lost_answers")},
        }

    def write(path: Path) -> None:
        # Bars would fill a log file, and those of several processes each other's lines.
        visible = message_stream().isatty() and os.environ.get("RANK", "0") == "0"
        hides = not visible and not datasets.are_progress_bars_disabled()
        if hides:
            datasets.disable_progress_bars()
        try:
            table.rows.map(
                make,
                batched=True,
                batch_size=batch_size,
                with_indices=True,
                remove_columns=table.rows.column_names,
                features=schema,
                new_fingerprint=fingerprint,
                cache_file_name=str(path),
                load_from_cache_file=False,
                desc=f"Tokenizing {table.source}",
            )
        finally:
            if hides:
                datasets.enable_progress_bars()

    return store(cache_folder(cache_dir, "features"), fingerprint, write).rows


def tokenizer_content(tokenizer: Any) -> str:
    """A digest of what a tokenizer does, whatever its files are called.

    Truncation and padding of the backend are left out: they are set anew by each call, and change with it.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):
        backend.pop(name, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return sha256_json(type(tokenizer).__name__, backend, special, tokenizer.truncation_side)


Numbers = NDArray[np.int64]

# What a batch is made of, and what decoding needs.
_FOR_TRAINING = ("row", "input_ids", "token_type_ids", "labels", "gather_positions")
_FOR_DECODING = ("row", "gather_positions", "word_ids", "offsets")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Features of a table grouped into samples: a row's windows together, or each window for itself.

    In memory are four arrays at most; everything else stays in the file.

    Attributes:
        features: memory-mapped, in row order; ``trained`` and ``decoded`` are those of its columns.
        tokens: the number of tokens of each feature.
        starts: index of each sample's first feature, and the number of features at the end.
        lengths: tokens of each sample, all its windows together.
        row_starts: index of each row's first feature, and the number of features at the end.
    """

    features: "Dataset"
    trained: "Dataset"
    decoded: "Dataset"
    tokens: Numbers
    starts: Numbers
    lengths: Numbers
    row_starts: Numbers

    @classmethod
    def of(cls, features: "Dataset", unit: Literal["row", "window"] = "row") -> Self:
        """Reads all lengths once. Rows count from 0 without gaps, as ``cached_features`` numbers them."""
        import pyarrow.compute

        token_lists = features.with_format("arrow")[:].column("input_ids")  # only the offsets of the lists are read
        tokens = np.asarray(pyarrow.compute.list_value_length(token_lists), np.int64)
        rows = np.asarray(features.with_format("numpy", columns=["row"])[:]["row"], dtype=np.int64)
        row_starts = np.concatenate([[0], np.cumsum(np.bincount(rows), dtype=np.int64)])
        starts = row_starts if unit == "row" else np.arange(len(tokens) + 1)
        return cls(
            features=features,
            trained=features.select_columns([name for name in _FOR_TRAINING if name in features.column_names]),
            decoded=features.select_columns([name for name in _FOR_DECODING if name in features.column_names]),
            tokens=tokens,
            starts=starts,
            lengths=np.diff(np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])[starts]),
            row_starts=row_starts,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def indices(self, samples: Iterable[int]) -> list[int]:
        """The numbers of all features of some samples, in that order."""
        return [i for sample in samples for i in range(self.starts[sample], self.starts[sample + 1])]

    def rows(self, samples: Iterable[int]) -> list[int]:
        """The numbers of the rows that some samples are of, ascending, from 0."""
        starts = self.starts[list(samples)]
        return sorted(set((np.searchsorted(self.row_starts, starts, side="right") - 1).tolist()))

    def features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """What training needs of all features of some samples, in that order."""
        return rows_of(self.trained[self.indices(samples)])

    def whole_features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """All features of some samples, in that order, with what decoding needs."""
        return rows_of(self.features[self.indices(samples)])

    def decoded_rows(self, first: int, end: int) -> list[dict[str, Any]]:
        """What decoding needs of the features of rows ``first`` to ``end - 1``; ``row`` counts from 0 there."""
        records = rows_of(self.decoded[self.row_starts[first] : self.row_starts[end]])
        return [{**record, "row": record["row"] - first} for record in records]


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """What is truncated: what no window of some rows holds.

    Attributes:
        rows: the number of all rows.
        cut_rows: the number of rows with tokens that no window holds.
        lost_answers: answers that no window holds whole.
    """

    rows: int
    cut_rows: int
    lost_answers: int = 0

    @classmethod
    def of(cls, features: "Dataset", *, rows: int) -> Self:
        """Counts over all features of so many rows."""
        columns = features.with_format("numpy", columns=["row", "lost_tokens", "lost_answers"])[:]
        counts = {name: np.asarray(column, dtype=np.int64) for name, column in columns.items()}
        cut_rows = len(np.unique(counts["row"][counts["lost_tokens"] > 0]))
        return cls(rows=rows, cut_rows=cut_rows, lost_answers=int(counts["lost_answers"].sum()))

    def share(self, count: int) -> str:
        """A count of rows with its share: ``3 of 200 (1.5%)``."""
        return f"{count} of {self.rows} ({count / max(self.rows, 1):.1%})"


def token_batches(order: Iterable[int], lengths: Sequence[int] | Numbers, *, max_tokens: int) -> list[list[int]]:
    """Batches of neighbours in an order, of at most ``max_tokens`` tokens; a longer one is a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def longest_first(lengths: ArrayLike, *, max_tokens: int) -> list[list[int]]:
    """All indices in batches of similar length, which depend on the data alone; the longest come first, so that a lack
    of memory is seen early."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return token_batches(np.argsort(-sizes, kind="stable").tolist(), sizes.tolist(), max_tokens=max_tokens)

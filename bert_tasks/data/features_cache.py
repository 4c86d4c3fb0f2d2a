"""The features of a table, computed once and kept.

Owns the key under which features are kept, their Arrow schema and the numbering of rows over batches. Must
not know how a task makes features; it gets a function for that.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.data.records import rows_of
from bert_tasks.data.table import RowTable, cache_folder, digest, open_or_write
from bert_tasks.terminal import message_stream

if TYPE_CHECKING:
    from datasets import Dataset, Features

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

    Args:
        features: makes the features of a batch of rows, whose ``row`` counts within the batch.
        key: everything else the features depend on, as plain values: task, settings, labels, package version.
        batch_size: rows per call of ``features``; None: all at once.

    What a feature lacks is None there; ``lost_tokens`` and ``lost_answers`` are 0.
    """
    from datasets import Dataset

    if len(table) == 0:
        return Dataset.from_dict({name: [] for name in features_schema()}, features=features_schema())
    fingerprint = digest(table.fingerprint, tokenizer_content(tokenizer), dict(key), _VERSION)

    def make(batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        made = features(rows_of(batch), tokenizer)
        return _columns(made, offset=indices[0])

    def write(path: Path) -> None:
        with progress_bars_on_terminals():
            table.rows.map(
                make,
                batched=True,
                batch_size=batch_size,
                with_indices=True,
                remove_columns=table.rows.column_names,
                features=features_schema(),
                new_fingerprint=fingerprint,
                cache_file_name=str(path),
                load_from_cache_file=False,
                desc=f"Tokenizing {table.source}",
            )

    return open_or_write(cache_folder(cache_dir, "features"), fingerprint, write)


@contextmanager
def progress_bars_on_terminals() -> Iterator[None]:
    """Silences the bars of `datasets` where they would fill a log file, and on all processes but the first."""
    import datasets

    visible = message_stream().isatty() and os.environ.get("RANK", "0") == "0"
    if visible or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def features_schema() -> "Features":
    from datasets import Features, List, Value

    return Features(
        {
            "row": Value("int64"),
            "input_ids": List(Value("int32")),
            "token_type_ids": List(Value("int8")),
            "labels": List(Value("float64")),
            "gather_positions": List(Value("int32")),
            "word_ids": List(Value("int32")),
            "offsets": List(Value("int32")),
            "lost_tokens": Value("int32"),
            "lost_answers": Value("int32"),
        }
    )


def tokenizer_content(tokenizer: Any) -> str:
    """A digest of what a tokenizer does, whatever its files are called.

    Truncation and padding of the backend are left out: they are set anew by each call, and change with it.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):
        backend.pop(name, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest(type(tokenizer).__name__, backend, special, tokenizer.truncation_side)


def _columns(made: Sequence[Mapping[str, Any]], *, offset: int) -> dict[str, list[Any]]:
    return {
        "row": [feature["row"] + offset for feature in made],
        "input_ids": [feature["input_ids"] for feature in made],
        "token_type_ids": [feature["token_type_ids"] for feature in made],
        **{name: [feature.get(name) for feature in made] for name in _OPTIONAL},
        **{name: [feature.get(name, 0) for feature in made] for name in ("lost_tokens", "lost_answers")},
    }

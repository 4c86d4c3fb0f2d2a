"""Checks on labels and the data report.

Owns which label values are acceptable, how unknown ones are reported, and what is counted about a data set
before training. Must not know how files are read or how a model is trained.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bert_tasks.data.columns import Column
from bert_tasks.data.labels import MOST_LABELS, LabelCensus, is_integer
from bert_tasks.data.problems import Problems, raise_problems, suggestion
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from bert_tasks.data.splits import Splits
    from bert_tasks.data.table import RowTable


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Features of one split: the row of each, its length in tokens, and how many of its row are lost."""

    rows: Sequence[int]
    lengths: Sequence[int]
    lost: Sequence[int]

    @classmethod
    def of(cls, features: "Dataset") -> "TokenCounts":
        lengths = [len(ids) for batch in features.iter(batch_size=1000) for ids in batch["input_ids"]]
        return cls(rows=list(features["row"]), lengths=lengths, lost=list(features["lost_tokens"]))


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What is known of one split; token figures are None when no features were given."""

    name: str
    rows: int
    label_counts: dict[str, int]
    token_lengths: dict[str, float] | None
    truncated_share: float | None
    duplicates: int
    conflicts: int
    empty_texts: int
    also_in_train: int


@dataclass(frozen=True, kw_only=True)
class DataReport:
    splits: tuple[SplitReport, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        return [line for split in self.splits for line in _split_lines(split)]


def infer_labels(table: "RowTable", columns: Sequence[Column]) -> tuple[str, ...]:
    """The distinct labels of a table: in numeric order if all are integers, else sorted as text.

    Raises:
        DataError: if they look like numbers or ids, or differ in letter case only.
    """
    census = _census(table, columns)
    found = set(census.counts)
    if len(found) > MOST_LABELS or (census.rows >= 100 and len(found) > census.rows / 2):
        raise DataError(
            f"{table.source}: {len(found)} different labels in {census.rows} rows look like numbers or ids; "
            "for regression set problem_type = 'regression'"
        )
    folded: dict[str, str] = {}
    for name in sorted(found):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{table.source}: the labels {other!r} and {name!r} differ in letter case only; "
                "write one of them, or state both in settings.labels"
            )
    is_numeric = all(is_integer(name) for name in found)
    return tuple(sorted(found, key=int) if is_numeric else sorted(found))


def check_labels(tables: Sequence["RowTable"], columns: Sequence[Column], labels: Sequence[str]) -> None:
    """Raises one report of all rows, over all tables, whose label is none of ``labels``."""
    column = _label_column(columns)
    if column is None:
        return
    found = []
    for table in tables:
        problems = Problems(source=table.source)
        _census(table, columns).report(problems, column.name, labels)
        found.append(problems)
    raise_problems(found)


def check_splits(splits: "Splits", *, columns: Sequence[Column], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels to train on, after checking that the splits can be trained and evaluated with them.

    Without ``labels`` those of the training rows are taken. Columns without labels give an empty tuple.

    Raises:
        DataError: for no training or validation rows, unknown labels, a single class, or a class that only
            validation rows have.
    """
    tables = [splits.train, *splits.validation.values()]
    for table in tables:
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows")
    column = _label_column(columns)
    if column is None:
        return ()
    known = tuple(labels) if len(labels) > 0 else infer_labels(splits.train, columns)
    _check_only_in_validation(splits, columns, known)
    check_labels(tables, columns, known)
    _check_enough_classes(splits.train, column, columns, known)
    return known


def data_report(
    splits: "Splits",
    tokens: Mapping[str, TokenCounts] | None = None,
    *,
    columns: Sequence[Column],
    labels: Sequence[str] = (),
) -> DataReport:
    """What to know of the data before training; ``tokens`` is keyed by the names that `named_splits` gives.

    Texts count as the same if they are equal apart from letter case and outer spaces. A row conflicts if an
    earlier row of its split has the same text and another target.
    """
    tokens = {} if tokens is None else tokens
    train_keys: set[bytes] = set()
    reports = []
    for name, table in named_splits(splits):
        report = _split_report(name, table, tokens.get(name), columns, labels, train_keys)
        reports.append(report)
    return DataReport(splits=tuple(reports))


def named_splits(splits: "Splits") -> list[tuple[str, "RowTable"]]:
    """The tables with names for people: train, validation (or validation_NAME for named sets)."""
    named = [(f"validation_{name}" if name != "" else "validation", table) for name, table in splits.validation.items()]
    return [("train", splits.train), *named]


def _split_report(
    name: str,
    table: "RowTable",
    tokens: TokenCounts | None,
    columns: Sequence[Column],
    labels: Sequence[str],
    train_keys: set[bytes],
) -> SplitReport:
    targets: dict[bytes, str] = {}
    duplicates = conflicts = empty = overlap = 0
    for key, is_empty, target in _keyed_rows(table, columns):
        empty += is_empty
        overlap += key in train_keys
        duplicates += key in targets
        conflicts += targets.setdefault(key, target) != target
    if name == "train":
        train_keys.update(targets)
    counts = _census(table, columns).counts
    order = labels if len(labels) > 0 else sorted(counts)
    return SplitReport(
        name=name,
        rows=len(table),
        label_counts={label: counts[label] for label in order},
        token_lengths=None if tokens is None else _length_figures(tokens.lengths),
        truncated_share=None if tokens is None else _truncated_share(tokens, len(table)),
        duplicates=duplicates,
        conflicts=conflicts,
        empty_texts=empty,
        also_in_train=overlap,
    )


def _keyed_rows(table: "RowTable", columns: Sequence[Column]) -> Iterator[tuple[bytes, bool, str]]:
    """For each row a digest of its texts, whether a required one is empty, and its target as text."""
    texts = [column for column in columns if column.kind == "text"]
    targets = [column.name for column in columns if column.is_target]
    for row in table:
        values = [_folded(row.get(column.name)) for column in texts]
        key = hashlib.blake2b("\0".join(values).encode(), digest_size=16).digest()
        is_empty = any(value == "" for value, column in zip(values, texts, strict=True) if column.required)
        yield key, is_empty, repr([row.get(name) for name in targets])


def _folded(text: str | None) -> str:
    return "" if text is None else text.strip().casefold()


def _length_figures(lengths: Sequence[int]) -> dict[str, float]:
    import numpy as np

    if len(lengths) == 0:
        return {}
    low, median, high, top = np.percentile(lengths, [0, 50, 95, 100])
    return {"min": float(low), "median": float(median), "p95": float(high), "max": float(top)}


def _truncated_share(tokens: TokenCounts, rows: int) -> float:
    cut = {row for row, lost in zip(tokens.rows, tokens.lost, strict=True) if lost > 0}
    return len(cut) / rows if rows > 0 else 0.0


def _split_lines(split: SplitReport) -> list[str]:
    lines = [f"{split.name}: {split.rows} rows"]
    if split.label_counts:
        shares = [f"{label} {count} ({count / split.rows:.0%})" for label, count in split.label_counts.items()]
        lines.append(f"  labels: {', '.join(shares)}")
    if split.token_lengths:
        figures = ", ".join(f"{name} {value:g}" for name, value in split.token_lengths.items())
        lines.append(f"  tokens: {figures}; {split.truncated_share:.1%} of the rows truncated")
    found = {
        "with an empty text": split.empty_texts,
        "with a text that an earlier row has": split.duplicates,
        "with a text that an earlier row has with another target": split.conflicts,
        "with a text that also stands in train": split.also_in_train,
    }
    return lines + [f"  {count} rows {what}" for what, count in found.items() if count > 0]


def _census(table: "RowTable", columns: Sequence[Column]) -> LabelCensus:
    census = LabelCensus()
    column = _label_column(columns)
    if column is None or column.name not in table.rows.column_names:
        return census
    for batch in table.rows.select_columns([column.name, "line"]).iter(batch_size=1000):
        for value, line in zip(batch[column.name], batch["line"], strict=True):
            census.add(value, line, column)
    return census


def _label_column(columns: Sequence[Column]) -> Column | None:
    return next((column for column in columns if column.kind in ("label", "labels")), None)


def _check_only_in_validation(splits: "Splits", columns: Sequence[Column], labels: Sequence[str]) -> None:
    trained = _census(splits.train, columns).counts
    for table in splits.validation.values():
        counts = _census(table, columns).counts
        new = [name for name in counts if name not in trained and (name in labels or not suggestion(name, labels))]
        if new:
            named = ", ".join(f"{name!r} ({counts[name]} rows)" for name in sorted(new))
            raise DataError(
                f"{table.source}: {named} stand only in validation, where no model can know them; "
                f"add some to {splits.train.source} or take these out"
            )


def _check_enough_classes(train: "RowTable", column: Column, columns: Sequence[Column], labels: Sequence[str]) -> None:
    counts = _census(train, columns).counts
    least = 2 if column.kind == "label" else 1
    if len(counts) < least:
        only = f"only the label {next(iter(counts))!r}" if counts else "no label"
        raise DataError(f"{train.source}: {only} in {len(train)} rows; training needs at least {least} classes")
    if len(labels) < least:
        raise DataError(f"settings.labels names {len(labels)} label; training needs at least {least}")

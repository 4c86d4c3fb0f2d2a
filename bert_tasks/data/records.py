"""What every reader yields: records as they stand in the file, before any value is judged.

Owns the type, and the parsing of JSON lines and parquet files. Must not know tasks, labels or canonical
values.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from bert_tasks.errors import DataError


class Record(NamedTuple):
    """One row: its line in the file, its cells by column name, and what is wrong with it as a whole.

    A row to skip is counted and not read. ``name`` finds a row that has no line of its own, in messages. ``raw`` is the
    text of a row whose cells are not known.
    """

    line: int
    cells: Mapping[str, Any]
    fault: str | None = None
    skip: bool = False
    name: str | None = None
    raw: str | None = None


class Records(NamedTuple):
    """The rows of a source; ``columns`` is None where only the rows themselves tell."""

    columns: tuple[str, ...] | None
    rows: Iterator[Record]


@contextmanager
def open_text(path: Path, *, encoding: str, newline: str) -> Iterator[TextIO]:
    """The file as text without its byte order mark; undecodable bytes become surrogates, to be reported."""
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        codecs.lookup(codec)
    except LookupError as error:
        raise DataError(f"{path}: {error}; state a Python encoding such as 'utf-8' or 'latin-1'") from error
    try:
        with path.open(encoding=codec, errors="surrogateescape", newline=newline) as lines:
            yield lines
    except UnicodeError as error:
        raise DataError(f"{path}: not a text in {encoding!r} ({error}); state the file's encoding") from error


@contextmanager
def json_records(path: Path, *, encoding: str) -> Iterator[Records]:
    with open_text(path, encoding=encoding, newline="\n") as lines:
        yield Records(None, _json_rows(lines, path))


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        if number == 1 and line.lstrip().startswith("["):
            raise DataError(f"{path}: holds a JSON array; write one object a line (jsonl)")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Record(number, {}, f"not valid JSON: {error}", raw=line.removesuffix("\n"))
            continue
        if isinstance(value, dict):
            yield Record(number, value)
        else:
            yield Record(number, {}, 'expected an object such as {"text": "..."}', raw=line.removesuffix("\n"))


@contextmanager
def parquet_records(path: Path, *, wanted: Sequence[str] | None = None) -> Iterator[Records]:
    """Rows of a parquet file with the wanted columns, or all of them.

    Label ids become names where `datasets` wrote these into the file's metadata.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            present = [name for name in columns if wanted is None or name in wanted]
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1000, columns=present))
            yield Records(columns, _numbered(batches, _class_names(file.schema_arrow)))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read ({str(error).splitlines()[0]})") from error


def dataset_records(rows: Any) -> Records:
    """Rows of a `datasets.Dataset`; label ids become names."""
    batches = (rows_of(batch) for batch in rows.iter(batch_size=1000))
    return Records(tuple(rows.column_names), _numbered(batches, _feature_class_names(rows.features)))


def rows_of(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A batch of columns as a list of rows."""
    return [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def in_batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        yield batch


def _numbered(batches: Iterable[list[dict[str, Any]]], class_names: Mapping[str, list[str]]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for cells in batch:
            number += 1
            for column, names in class_names.items():
                if column in cells:
                    cells[column] = _named(cells[column], names)
            yield Record(number, cells)


def _named(value: Any, names: list[str]) -> Any:
    """The name of a class id, or of each id in a list; -1 says that the label is hidden."""
    if isinstance(value, list):
        return [_named(part, names) for part in value]
    if value is None or value == -1:
        return None
    return names[value] if 0 <= value < len(names) else value


def _class_names(schema: Any) -> Mapping[str, list[str]]:
    from datasets import Features

    metadata = schema.metadata
    if metadata is None or b"huggingface" not in metadata:
        return {}
    return _feature_class_names(Features.from_arrow_schema(schema))


def _feature_class_names(features: Mapping[str, Any]) -> Mapping[str, list[str]]:
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: list(feature.names) for name, feature in inner.items() if isinstance(feature, ClassLabel)}

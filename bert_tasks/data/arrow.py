"""Rows in Arrow files, which are memory-mapped, selected by number, and cached.

In the cache, ``<key>.json`` names an Arrow file, its number of rows, its sha256 and notes. A damaged, truncated or
deleted file counts as missing. Files are written under a temporary name and moved to their final name, data first, so
that processes that write and read at the same time never meet an unfinished file.

``datasets`` does the same, but its import takes more than a second. It is imported for data sets of the hub only.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import pyarrow
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.progress import Progress

from bert_tasks.environment import cache_folders
from bert_tasks.errors import DataError
from bert_tasks.storage import atomic_path, sha256_file
from bert_tasks.terminal import message_stream

Write = Callable[[Path], Sequence[str] | None]  # writes the Arrow file and returns the notes to store beside it
_BATCH = 1000


class ArrowRows:
    """Rows of an Arrow table, such as ``rows[3]``, ``rows[2:5]`` or ``rows[[4, 0]]``.

    Selected rows are a list of numbers beside the table, so that a shuffled or smaller data set needs no second copy of
    the texts.

    Attributes:
        files: Files that hold the rows. Empty for rows in memory.
    """

    def __init__(
        self,
        table: pyarrow.Table,
        *,
        files: Sequence[Path] = (),
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self.files = tuple(files)
        self._table = table
        self._indices = indices
        self._batches: list[pyarrow.RecordBatch] = table.to_batches()
        self._starts = np.cumsum([0, *map(len, self._batches)])  # the number of each batch's first row, for a search

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Opens a file of an Arrow stream, memory-mapped."""
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            return cls(stream.read_all(), files=[path])

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], schema: pyarrow.Schema | None = None) -> Self:
        """Copies columns into memory. Without a schema their types are inferred."""
        return cls(pyarrow.table(dict(columns), schema=schema))

    @classmethod
    def joined(cls, parts: Sequence["ArrowRows"]) -> "ArrowRows":
        """Joins the rows of several tables. A column that a table lacks is None there."""
        tables = [rows.table() for rows in parts]
        files: dict[Path, None] = {}
        for rows in parts:
            files |= dict.fromkeys(rows.files)
        return cls(pyarrow.concat_tables(tables, promote_options="default"), files=list(files))

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, in the order of the table."""
        return list(self._table.column_names)

    def __len__(self) -> int:
        if self._indices is None:
            return len(self._table)
        return len(self._indices)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, key: slice | Sequence[int]) -> list[dict[str, Any]]: ...

    def __getitem__(self, key: int | slice | Sequence[int]) -> dict[str, Any] | list[dict[str, Any]]:
        # A range knows negative numbers, steps and the IndexError of Python's lists.
        if isinstance(key, int):
            number = range(len(self))[key]
            return self[[number]][0]
        if isinstance(key, slice):
            key = range(len(self))[key]
        rows: list[dict[str, Any]] = self.table(key).to_pylist()
        return rows

    def select(self, rows: ArrayLike) -> Self:
        """Returns the rows with these numbers, in this order."""
        return type(self)(self._table, files=self.files, indices=self._places(rows))

    def _places(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Returns the numbers in the table of rows with these numbers."""
        numbers = np.asarray(rows, dtype=np.int64)
        if self._indices is None:
            return numbers
        return self._indices[numbers]

    def select_columns(self, names: Sequence[str]) -> Self:
        """Returns the same rows with some of the columns, without a copy."""
        return type(self)(self._table.select(list(names)), files=self.files, indices=self._indices)

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Returns the values of a column, without a copy if no rows are selected."""
        return self.select_columns([name]).table().column(0)

    def values(self, name: str) -> list[Any]:
        """Returns the values of a column as Python objects."""
        values: list[Any] = self.column(name).to_pylist()
        return values

    def tables(self, names: Sequence[str] | None = None, *, size: int = _BATCH) -> Iterator[pyarrow.Table]:
        """Yields all rows in tables of ``size`` rows, with some columns or all (None)."""
        rows = self
        if names is not None:
            rows = self.select_columns(names)
        for start in range(0, len(rows), size):
            end = min(start + size, len(rows))
            yield rows.table(range(start, end))

    def table(self, rows: "Sequence[int] | NDArray[np.int64] | None" = None) -> pyarrow.Table:
        """Returns the rows with these numbers, in this order. Default: all rows."""
        if rows is None and self._indices is None:
            return self._table
        if rows is None:
            rows = np.arange(len(self))
        if self._indices is None and isinstance(rows, range) and rows.step == 1:
            return self._table.slice(rows.start, len(rows))  # a view, without a copy
        return self._gathered(self._places(rows))

    def _gathered(self, places: NDArray[np.int64]) -> pyarrow.Table:
        """Returns a copy of the rows at these places of the table.

        ``pyarrow.Table.take`` would copy whole columns for it, because it joins all batches of texts or lists first. So
        it takes a time that grows with the file for each few rows, and fails for a column of more than 2 GiB.
        """
        owners = np.searchsorted(self._starts, places, side="right") - 1  # the batch of each row
        within = places - self._starts[owners]  # its place in the batch
        rows = zip(owners.tolist(), within.tolist(), strict=True)
        parts = [self._batches[owner].slice(index, 1) for owner, index in rows]
        return pyarrow.Table.from_batches(parts, self._table.schema).combine_chunks()


def write_batches(path: Path, batches: Iterable[Mapping[str, Sequence[Any]]], schema: pyarrow.Schema) -> None:
    """Writes batches of columns into a file of an Arrow stream."""
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for columns in batches:
            stream.write_table(pyarrow.table(dict(columns), schema=schema))


def with_progress(tables: Iterable[pyarrow.Table], description: str, total: int) -> Iterator[pyarrow.Table]:
    """Yields tables, and shows a bar of their rows on a terminal."""
    if not message_stream().isatty() or os.environ.get("RANK", "0") != "0":  # torchrun numbers its processes so
        yield from tables
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(description, total=total)
        for table in tables:
            yield table
            progress.advance(bar, len(table))


def cache_folder(cache_dir: Path | None, name: str) -> Path:
    """Returns a folder of the cache, which is by default in the cache of ``datasets``.

    Raises:
        DataError: The folder cannot be made.
    """
    if cache_dir is None:
        cache_dir = cache_folders()["HF_DATASETS_CACHE"]
    folder = cache_dir / "bert_tasks" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


class StoredRows(NamedTuple):
    """Rows in the cache.

    Attributes:
        path, sha256: Arrow file and its digest.
        notes: Notes of the writer.
    """

    rows: ArrowRows
    path: Path
    sha256: str
    notes: tuple[str, ...]


def store(folder: Path, key: str | None, write: Write) -> StoredRows:
    """Opens the rows stored under a key, after ``write(path)`` if they are missing.

    Without a key they are always written, and cannot be opened again.

    Raises:
        DataError: The cache cannot be written.
    """
    if key is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged, so it is written again
            entry = json.loads((folder / f"{key}.json").read_text())
            path = folder / Path(entry["file"]).name  # the name alone, so that an entry leads to no other folder
            if sha256_file(path) == entry["sha256"]:
                rows = ArrowRows.from_file(path)
                if len(rows) == entry["rows"]:
                    return StoredRows(rows, path, entry["sha256"], tuple(entry["notes"]))
    name = key
    if name is None:
        name = secrets.token_hex(16)
    try:
        path = folder / f"{name}.arrow"
        with atomic_path(path, durable=False) as temporary:  # reading compares the digest
            written = write(temporary)
            content = sha256_file(temporary)
        notes: tuple[str, ...] = ()
        if written is not None:
            notes = tuple(written)
        rows = ArrowRows.from_file(path)
        if key is not None:
            entry = {"file": path.name, "rows": len(rows), "sha256": content, "notes": notes}
            with atomic_path(folder / f"{key}.json", durable=False) as temporary:
                temporary.write_text(json.dumps(entry))
    except OSError as error:
        raise _not_writable(folder, error) from error
    return StoredRows(rows, path, content, notes)


def _not_writable(folder: Path, error: OSError) -> DataError:
    """Returns the error of a cache in which no file can be written, for example because the disk is full."""
    return DataError(
        f"{folder}: the cache cannot be written ({error}). Set HF_DATASETS_CACHE to a folder with enough space"
    )


def read_batches(path: Path, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of an Arrow file in order, in the batches of the writer.

    A file of any size needs the memory of one batch. The pages of a memory-mapped file would stay in memory until the
    system needs them.
    """
    with pyarrow.OSFile(str(path), "rb") as file, pyarrow.ipc.open_stream(file) as batches:
        for batch in batches:
            yield batch.select(columns).to_pylist()

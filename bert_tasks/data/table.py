"""A store of Arrow files that checks itself: `<key>.json` names an Arrow file, its row count, sha256 and notes.

Owns where cached tables lie and how they are written and verified. Must not know what the rows mean. A
damaged, truncated or deleted file counts as absent. Files are written under a temporary name and moved into
place, data first, so that concurrent writers and readers never meet a half-written one.

The rows of one source in canonical form, memory-mapped.

Owns access to rows by number, in order and in batches. Must not know where they came from or what they are
for.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bert_tasks.data.columns import FAULT, BadValueError, Column, canonical, with_words
from bert_tasks.data.problems import Problems, raise_problems
from bert_tasks.data.records import Record, rows_of
from bert_tasks.data.validator import checked_together, fault_of
from bert_tasks.errors import DataError
from bert_tasks.paths import exists
from bert_tasks.storage import atomic_path, move, sha256_file, sha256_json, temporary_path

if TYPE_CHECKING:
    from datasets import Dataset, Features

Write = Callable[[Path], Sequence[str] | None]  # writes the Arrow file; the notes are kept beside it


class Stored(NamedTuple):
    rows: "Dataset"
    path: Path
    content: str  # sha256 of the Arrow file
    notes: tuple[str, ...]


def cache_folder(cache_dir: Path | None, part: str) -> Path:
    if cache_dir is None:
        import datasets

        cache_dir = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache_dir / "bert_tasks" / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def open_or_write(folder: Path, key: str, write: Write) -> "Dataset":
    """The rows stored under a key, written by ``write`` if they are not there or not sound."""
    return kept_or_written(folder, key, write).rows


def kept_or_written(folder: Path, key: str, write: Write) -> Stored:
    """As `open_or_write`, with the notes that were taken when the rows were written."""
    kept = _sound(folder, key)
    return kept if kept is not None else store(folder, key, write)


def open_sound(folder: Path, key: str) -> "Dataset | None":
    kept = _sound(folder, key)
    return None if kept is None else kept.rows


def _sound(folder: Path, key: str) -> Stored | None:
    from datasets import Dataset

    try:
        note = json.loads((folder / f"{key}.json").read_text())
        path = folder / Path(note["file"]).name
        if sha256_file(path) != note["sha256"]:
            return None
        rows = Dataset.from_file(str(path))
        kept = Stored(rows, path, note["sha256"], tuple(note["notes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if len(rows) == note["rows"] else None


def store(folder: Path, key: str | None, write: Write) -> Stored:
    """Writes rows through ``write(path)`` and opens them; without a key they are kept by content only."""
    from datasets import Dataset

    with _explained(folder), temporary_path(folder / "rows.arrow") as temporary:
        told = write(temporary)
        notes = () if told is None else tuple(told)
        content = sha256_file(temporary)
        path = folder / f"{content}.arrow"
        move(temporary, path, durable=False)  # reading compares the digest
    rows = Dataset.from_file(str(path))
    if key is not None:
        about = {"file": path.name, "rows": len(rows), "sha256": content, "notes": notes}
        with _explained(folder), atomic_path(folder / f"{key}.json", durable=False) as temporary:
            temporary.write_text(json.dumps(about))
    return Stored(rows, path, content, notes)


def streamed(path: Path, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of an Arrow file in order, in the batches they were written in.

    Read so, a file of any size passes through the memory of one batch; pages of a mapped file would stay until the
    system needs them.
    """
    import pyarrow

    with pyarrow.OSFile(str(path), "rb") as file, pyarrow.ipc.open_stream(file) as batches:
        for batch in batches:
            yield batch.select(columns).to_pylist()


def blocks(
    path: Path, columns: Sequence[str], size: int, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """As ``streamed``, in blocks of ``size`` rows with their numbers; of those that are not wanted nothing is made."""
    import pyarrow

    number, held, room = 0, [], size
    with pyarrow.OSFile(str(path), "rb") as file, pyarrow.ipc.open_stream(file) as batches:
        for batch in batches:
            rest = batch.select(columns)
            while rest.num_rows:
                held.append(rest.slice(0, room))
                rest = rest.slice(held[-1].num_rows)
                room -= held[-1].num_rows
                if room == 0:
                    if wanted(number):
                        yield number, [row for part in held for row in part.to_pylist()]
                    number, held, room = number + 1, [], size
    if held and wanted(number):
        yield number, [row for part in held for row in part.to_pylist()]


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"{folder}: the cache cannot be written ({error}); set HF_DATASETS_CACHE to a folder with room")


_BATCH = 1000
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split of a data set on the hub. ``commit`` and ``licence`` (as its page states it) are None where unknown."""

    dataset: str
    config: str | None
    split: str
    commit: str | None
    licence: str | None


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Rows with the columns' names that the task uses, and ``line``: where a row stands in its file, from 1.

    A target column that the source does not have is absent; a single missing target is None. ``source`` names
    the file in messages. ``fingerprint`` is a sha256 over the contents and the way they were read. ``notes`` are for
    people: what was left out when the rows were read. ``file`` is the Arrow file that holds these rows and no others,
    if there is one: reading them in order then leaves no pages of it in memory. ``hub`` says where on the hub they are.
    ``faults`` holds what is wrong with rows that were left out (``without_faults``).
    """

    rows: "Dataset"
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    file: Path | None = None
    hub: HubSplit | None = None
    faults: "Dataset | None" = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        source: str = "rows",
        columns: Sequence[Column] | None = None,
        targets: Literal["required", "optional"] = "optional",
        *,
        skips: bool = False,
    ) -> "RowTable":
        """A table of rows in memory; with ``columns`` values are checked and made canonical as in files.

        Raises:
            BadRowsError: naming all the rows that cannot be used; with ``targets="required"`` those without one too.
                With ``skips`` only if no row can be used; else such rows are in the table, with a column ``FAULT``.
        """
        from datasets import Dataset

        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"{source}:{number}: expected a dict such as {{'text': '...'}}, not {row!r:.60}")
        numbered = [{**row, "line": number} for number, row in enumerate(rows, start=1)]
        if columns is None:
            table = Dataset.from_list(numbered)
        else:
            numbered = _checked(numbered, columns, source, targets, skips=skips)
            schema = table_schema(columns, [FAULT] if skips else [])
            table = Dataset.from_dict({name: [row.get(name) for row in numbered] for name in schema}, features=schema)
            table = without_absent(table, columns)
        return cls(rows=table, source=source, fingerprint=sha256_json(numbered))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.file is not None and exists(self.file):
            batches = streamed(self.file, self.rows.column_names)
        else:
            batches = self.batches(_BATCH)
        for batch in batches:
            yield from batch

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The wanted ones of the blocks of ``size`` rows, each with its number, in order."""
        if self.file is not None and exists(self.file):
            yield from blocks(self.file, self.rows.column_names, size, wanted)
            return
        for number in range(-(-len(self) // size)):
            if wanted(number):
                end = min((number + 1) * size, len(self))
                yield number, rows_of(self.rows[number * size : end])

    def batches(self, size: int) -> Iterator[list[dict[str, Any]]]:
        for batch in self.rows.iter(batch_size=size):
            yield rows_of(batch)

    def without_faults(self) -> "RowTable":
        """The rows that can be used, without the column ``FAULT``; the others are counted in a note."""
        if FAULT not in self.rows.column_names:
            return self
        lines = [fault is not None for fault in self.rows[FAULT]]
        good = replace(self, rows=self.rows.remove_columns([FAULT]))
        if not any(lines):
            return good
        bad = [index for index, is_bad in enumerate(lines) if is_bad]
        shown = ", ".join(str(line) for line in self.rows.select(bad[:_SHOWN])["line"]) + (
            ", ..." if len(bad) > _SHOWN else ""
        )
        note = f"{len(bad)} of {len(lines)} rows cannot be used and were left out (line {shown})"
        kept = good.select([index for index, is_bad in enumerate(lines) if not is_bad])
        return replace(kept, notes=(*self.notes, note), faults=self.rows.select(bad).select_columns([FAULT]))

    def reject_lines(self) -> Iterator[str]:
        """A JSON line for each row that was left out: its file, its line, what is wrong with it, and the row itself."""
        if self.faults is not None:
            for batch in self.faults.iter(batch_size=_BATCH):
                for fault in batch[FAULT]:
                    yield json.dumps({"file": self.source, **json.loads(fault)}) + "\n"

    def select(self, indices: Sequence[int]) -> "RowTable":
        chosen = [int(index) for index in indices]
        fingerprint = sha256_json(self.fingerprint, chosen)
        return replace(self, rows=self.rows.select(chosen), fingerprint=fingerprint, file=None)


def table_schema(columns: Sequence[Column], texts: Sequence[str] = ()) -> "Features":
    """The types of a table's columns; ``texts`` names more columns."""
    from datasets import Features, List, Value

    types: dict[str, Any] = dict.fromkeys(("text", "id", "label"), Value("string")) | {"number": Value("float64")}
    types |= dict.fromkeys(("labels", "words", "tags"), List(Value("string")))
    types["answers"] = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
    more = {"line": Value("int64")} | dict.fromkeys(texts, Value("string"))
    return Features({column.name: types[column.kind] for column in columns} | more)


def without_absent(rows: "Dataset", columns: Sequence[Column]) -> "Dataset":
    """The rows without the columns that need not be there and hold no value at all."""
    table = rows.data
    names = [column.name for column in columns if not column.required]
    return rows.remove_columns([name for name in names if table.column(name).null_count == table.num_rows])


def _checked(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column], source: str, targets: str, *, skips: bool
) -> list[dict[str, Any]]:
    problems = Problems(source=source)
    needed = {column.name for column in columns if column.is_target and targets == "required"}
    checked = []
    rejected = 0
    for row in rows:
        of_row = Problems(source=source)
        values = _checked_row(row, columns, of_row, needed)
        problems.extend(of_row)
        if skips and of_row.count:
            rejected += 1
            record = Record(row["line"], {name: value for name, value in row.items() if name != "line"})
            values = {"line": row["line"], FAULT: fault_of(record, [problem.reason for problem in of_row.first])}
        checked.append(values)
    if not skips or rejected == len(rows):
        raise_problems([problems])
    return checked


def _checked_row(
    row: dict[str, Any], columns: Sequence[Column], problems: Problems, needed: set[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {"line": row["line"]}
    cells = with_words(row, columns, {})
    for column in columns:
        value = cells.get(column.name)
        values[column.name] = None
        if value is None and column.name in needed:
            others = ", ".join(name for name in row if name != "line")
            problems.add(row["line"], f"no value; the row has {others}", column=column.name)
            continue
        if value is None and not column.required:
            continue
        try:
            values[column.name] = canonical(value, column.kind)
        except BadValueError as error:
            problems.add(row["line"], str(error), column=column.name, value=value)
    values, faults = checked_together(values, columns)
    for fault in faults:
        problems.add(row["line"], fault.what, column=fault.column, value=fault.value)
    return values

"""Reading of files and hub data sets into tables of canonical rows.

Owns how a source becomes a `RowTable`: format, column mapping, validation of every value, and the report of
all bad rows. Must not know models, tokenizers or training. Rows are streamed into a memory-mapped Arrow file,
so memory stays flat; an unchanged file read in the same way is not parsed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_tasks.data.arrow_cache import cache_folder, digest, file_digest, open_or_write, store
from bert_tasks.data.columns import Column
from bert_tasks.data.delimited import plain_records, quoted_records
from bert_tasks.data.formats import Format, file_format, named_format
from bert_tasks.data.labels import LabelCensus
from bert_tasks.data.problems import Problems, did_you_mean, raise_problems
from bert_tasks.data.records import Record, Records, dataset_records, json_records, parquet_records
from bert_tasks.data.table import RowTable, table_schema, without_absent
from bert_tasks.data.values import BadValueError, canonical
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Targets = Literal["required", "optional"]
_BATCH = 1000
_VERSION = 1  # part of the cache's key: raise it when reading changes


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A column of the task and what it is called in the source."""

    column: Column
    name: str
    mapped: bool
    needed: bool


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to take out of a source and how to judge it."""

    fields: tuple[_Field, ...]
    label_names: Mapping[str, str]
    labels: Sequence[str] | None
    source: str


def read_table(
    source: str | Path,
    *,
    columns: Sequence[Column],
    names: Mapping[str, str] | None = None,
    format: str | None = None,
    targets: Targets = "required",
    labels: Sequence[str] | None = None,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    cache_dir: Path | None = None,
) -> RowTable:
    """Reads one file.

    Args:
        names: what the task's columns are called in the file, where that differs. format: one of `FORMATS`;
        None goes by the file's extension. targets: "optional" reads files for prediction, whose targets may
        be missing. labels: the known label names, which every label must be; an empty sequence says that they
        will be inferred
            from the rows (numbers among names are then refused); None leaves labels unchecked.

    Raises:
        BadRowsError: naming all the rows that cannot be used.
        DataError: if the file as a whole cannot be used.
    """
    path = _existing_file(Path(source))
    layout = file_format(format, path)
    plan = _plan(columns, names, layout.columns, layout, targets, labels, display_name(path))
    options = {"encoding": encoding, "delimiter": delimiter, "format": layout.name, "version": _VERSION}
    content = _content(path, encoding)
    fingerprint = digest(content, options, [asdict(field) for field in plan.fields], labels)

    def write(target: Path) -> None:
        with _records(path, layout, plan, encoding, delimiter) as records:
            _write_rows(records, plan, target)

    rows = open_or_write(cache_folder(cache_dir, "tables"), fingerprint, write)
    return RowTable(rows=without_absent(rows, columns), source=plan.source, fingerprint=fingerprint)


def read_hub(
    dataset: str,
    *,
    columns: Sequence[Column],
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    names: Mapping[str, str] | None = None,
    format: str | None = None,
    targets: Targets = "required",
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
) -> RowTable:
    """Reads one split of a data set on the hub (or in a folder laid out like one); see `read_table`.

    Class ids become the names the data set gives them; -1 says that a label is hidden.
    """
    layout = None if format is None else named_format(format)
    hub_columns: Mapping[str, str] = {} if layout is None else layout.hub_columns
    source = "/".join(part for part in (dataset, config, split) if part is not None)
    plan = _plan(columns, names, hub_columns, layout, targets, labels, source)
    records = dataset_records(_hub_rows(dataset, config, split, revision))
    stored = store(cache_folder(cache_dir, "tables"), None, lambda target: _write_rows(records, plan, target))
    return RowTable(rows=without_absent(stored.rows, columns), source=source, fingerprint=stored.content)


def hub_splits(dataset: str, *, config: str | None = None, revision: str | None = None) -> list[str]:
    import datasets

    try:
        return list(datasets.get_dataset_split_names(dataset, config, revision=revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error


def display_name(path: Path) -> str:
    """The path as short as it can be said from the current folder."""
    path = path.absolute()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _hub_rows(dataset: str, config: str | None, split: str, revision: str | None) -> "Dataset":
    import datasets

    try:
        return datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error


def _unusable_dataset(dataset: str, config: str | None, error: Exception) -> DataError:
    reason = str(error if error.__cause__ is None else error.__cause__).strip().rstrip(".")
    name = dataset if config is None else f"{dataset} (config {config!r})"
    return DataError(
        f"{name}: the data set cannot be loaded: {reason}; check its name, config and split, "
        "or read local files with data.dir or data.train"
    )


def _existing_file(path: Path) -> Path:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.is_file())[:10]
        held = ", ".join(inside) if inside else "no files"
        raise DataError(f"{path}: a folder where a file was expected; it holds {held}")
    if not path.exists():
        folder = path.parent
        names = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
        missing = f"no such file{did_you_mean(path.name, names)}" if folder.is_dir() else f"no folder {folder}"
        raise DataError(f"{path}: {missing}")
    return path


def _content(path: Path, encoding: str) -> str:
    """The sha256 of the file, after a look at whether it can be what it claims to be."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff") and not encoding.lower().startswith(("utf-16", "utf16")):
            raise DataError(f"{path}: the file is in UTF-16; set encoding = 'utf-16'")
        if start == b"PK\x03\x04" or start[:2] == b"\x1f\x8b":
            raise DataError(f"{path}: a compressed file or a spreadsheet; unpack it or export it as csv")
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}") from error


def _plan(
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
    usual_names: Mapping[str, str],
    layout: Format | None,
    targets: Targets,
    labels: Sequence[str] | None,
    source: str,
) -> _Plan:
    names = {} if names is None else names
    known = [column.name for column in columns]
    for name in names:
        if name not in known:
            raise DataError(f"columns: the task reads {', '.join(known)}, no {name!r}{did_you_mean(name, known)}")
    fields = tuple(
        _Field(
            column=column,
            name=names.get(column.name, usual_names.get(column.name, column.name)),
            mapped=column.name in names,
            needed=column.required or (column.is_target and targets == "required"),
        )
        for column in columns
    )
    label_names: Mapping[str, str] = {} if layout is None else layout.label_names
    return _Plan(fields=fields, label_names=label_names, labels=labels, source=source)


def _records(
    path: Path, layout: Format, plan: _Plan, encoding: str, delimiter: str | None
) -> AbstractContextManager[Records]:
    if layout.name == "parquet":
        return parquet_records(path, wanted=[field.name for field in plan.fields])
    if layout.name == "jsonl":
        return json_records(path, encoding=encoding)
    cut = layout.delimiter if delimiter is None else delimiter
    if cut is None:
        raise DataError(f"{path}: format {layout.name!r} needs a delimiter")
    if layout.quoted:
        return quoted_records(path, delimiter=cut, encoding=encoding)
    return plain_records(path, layout, delimiter=cut, encoding=encoding)


def _write_rows(records: Records, plan: _Plan, target: Path) -> None:
    """Streams the canonical rows into an Arrow file, or raises with every problem that was found."""
    import pyarrow

    if records.columns is not None:
        _check_columns(records.columns, plan)
    judge = _Judge(plan, set() if records.columns is None else set(records.columns))
    schema = table_schema([field.column for field in plan.fields]).arrow_schema
    with pyarrow.OSFile(str(target), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in _batches(judge.rows(records.rows)):
            stream.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
    judge.finish()


class _Judge:
    """Turns records into rows, keeping what is wrong with them and how often each label stands."""

    def __init__(self, plan: _Plan, seen: set[str]) -> None:
        self.plan = plan
        self.seen = seen
        self.count = 0
        self.problems = Problems(source=plan.source)
        self.census = LabelCensus()

    def rows(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        for record in records:
            self.count += 1
            if record.fault is not None:
                self.problems.add(record.line, record.fault)
                continue
            self.seen.update(record.cells)
            row = {field.column.name: self._value(record, field) for field in self.plan.fields}
            yield row | {"line": record.line}

    def finish(self) -> None:
        if self.count == 0:
            raise DataError(f"{self.plan.source}: no rows; there is nothing below the header")
        if self.seen:
            _check_columns(tuple(self.seen), self.plan)
        label_columns = [field.name for field in self.plan.fields if field.column.kind in ("label", "labels")]
        if self.plan.labels is not None and label_columns:
            self.census.report(self.problems, label_columns[0], self.plan.labels)
        raise_problems([self.problems])

    def _value(self, record: Record, field: _Field) -> Any:
        raw = record.cells.get(field.name)
        if raw is None and not field.column.required and not field.needed:
            return None
        try:
            value = self._named(canonical(raw, field.column.kind), field.column)
            if value is None and field.needed:
                raise BadValueError(f"missing {field.column.kind}")
        except BadValueError as error:
            self.problems.add(record.line, str(error), column=field.name, value=raw)
            return None
        self.census.add(value, record.line, field.column)
        return value

    def _named(self, value: Any, column: Column) -> Any:
        names = self.plan.label_names
        if column.kind != "label" or not names or value is None or value in names.values():
            return value
        if value == "-1":
            return None
        if value not in names:
            raise BadValueError(f"expected one of {', '.join(names)}")
        return names[value]


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _check_columns(present: tuple[str, ...], plan: _Plan) -> None:
    missing = [field for field in plan.fields if field.needed and field.name not in present]
    if not missing:
        return
    if len(present) == 1:
        other = next((mark for mark in (";", "\t", ",", "|") if mark in present[0]), None)
        if other is not None:
            raise DataError(f"{plan.source}: one column only, {present[0]!r}; set delimiter = {other!r}")
    there = ", ".join(repr(name) for name in sorted(present))
    lines = [f"{plan.source}: no column {field.name!r}{did_you_mean(field.name, present)}" for field in missing]
    example = f'{missing[0].column.name} = "NAME"'
    raise DataError(
        "\n".join(
            [
                *lines,
                f"  the columns there are: {there}",
                f"  say which one to read: [data.columns] {example}",
            ]
        )
    )

"""Reading of rows from any source: files, data sets of the hub, tables and rows in memory.

All rows pass through ``read``: a format parses the source into batches, a conversion checks each value and gives it the
task's names, and the result is stored. Files are streamed into a memory-mapped Arrow file, so memory does not grow with
them. An unchanged file that is read in the same way is not parsed again. pandas need not be installed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import pyarrow

from bert_tasks.data.arrow import ArrowRows, cache_folder, store, write_batches
from bert_tasks.data.batch import MOST_ROWS, Batches, Record, in_batches
from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.columns import RECORD, REJECT, Column, Columns, PassthroughColumns, Row, as_row, without_labels
from bert_tasks.data.conversion import Conversion
from bert_tasks.data.formats import Format, file_format, folder_format, named_format
from bert_tasks.data.formats.hub import HubSplit
from bert_tasks.data.issues import first_few, missing_path
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import arrow_batches, dataset_batches
from bert_tasks.data.rows import Rows, row_schema, without_absent
from bert_tasks.data.shared_conversion import SharedConversion
from bert_tasks.data.split_column import missing_column, of_split
from bert_tasks.errors import DataError
from bert_tasks.storage import check_path, sha256_file, sha256_json

_VERSION = 8  # part of the cache's key and of the fingerprint. Raise it when reading changes
_DEFAULTS: Mapping[str, Any] = {
    "columns": {},
    "encoding": "utf-8",
    "header": True,
    "label_separator": LABEL_SEPARATOR,
}


class Frame(Protocol):
    """A table with named columns, a pandas DataFrame or a ``datasets.Dataset``."""

    @property
    def shape(self) -> Any: ...

    def __len__(self) -> int: ...


Source = str | Path | HubSplit | Iterable[Row | str | tuple[str, ...]] | Frame


def read(
    source: Source,
    columns: Columns,
    options: ReadOptions | None = None,
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    require_labels: bool = True,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    passthrough: PassthroughColumns = "none",
    skip_errors: bool = False,
    name: str | None = None,
) -> Rows:
    """Reads the rows of a source, and checks each value.

    Args:
        source: A file, or a folder that is a source as a whole, a split of a data set of the hub, a pandas DataFrame, a
            pyarrow Table, a ``datasets.Dataset``, or rows in the forms that ``as_row`` accepts.
        columns: The columns that the task reads, or those of each of several tasks, which read the rows in one pass.
        options: Options to read a file, and names of columns.
        others: The task's columns -> the names that rows in memory may have for them instead.
        require_labels: False reads rows for prediction. Labels may then be missing, and each line of a text file is a
            text.
        labels: Known label names, which every label must be (but not every tag, see ``check_splits``). An empty
            sequence means that they will be inferred from the rows, so numbers among names are errors. None means that
            labels are not checked.
        cache_dir: Folder for the rows of files. None means the cache of ``datasets``.
        passthrough: Columns of the source that each row carries along in a column ``RECORD``.
        skip_errors: Keep rows that cannot be used without their values, with the reason in a column ``REJECT``, unless
            no row can be used.
        name: Name of the source in messages.

    Returns:
        The rows, under the task's names.

    Raises:
        RowIssues: Some rows cannot be used. The error has all of them.
        DataError: The source as a whole cannot be used.

    Examples:
        >>> columns = [Column(name="text", kind="text"), Column(name="label", kind="label", required=False)]
        >>> read([{"text": "a fine film", "label": "positive"}], columns)[0]
        {'text': 'a fine film', 'label': 'positive', 'line': 1}
    """
    if options is None:
        options = ReadOptions()
    how: dict[str, Any] = {"require_labels": require_labels, "passthrough": passthrough, "skip_errors": skip_errors}
    if isinstance(source, HubSplit):
        return _read_hub(source, columns, options, labels=labels, cache_dir=cache_dir, **how)
    if isinstance(source, str | Path):
        return _read_file(Path(source), columns, options, labels=labels, cache_dir=cache_dir, name=name, **how)
    if name is None:
        name = "rows"
    conversion = conversion_of(columns, options, others=others, labels=labels, **how)
    batches = rows_in_memory(source, columns, name)
    if options.split_column is not None:
        batches = of_split(batches, options.split_column, options.split, name)
    return _read_memory(batches, conversion, name, may_be_empty=not require_labels)


def _read_file(
    source: Path,
    columns: Columns,
    options: ReadOptions,
    *,
    labels: Sequence[str] | None,
    cache_dir: Path | None,
    name: str | None,
    require_labels: bool,
    **how: Any,
) -> Rows:
    """Reads a file, or opens the rows that an earlier reading stored."""
    path = existing_file(source)
    format = file_format(options.format, path, columns)
    if require_labels and options.document is None:
        options = replace(options, document="blank-line")
    if name is None:
        name = _shown_path(path)
    conversion = conversion_of(columns, options, format=format, labels=labels, require_labels=require_labels, **how)
    # What the checks of the values depend on, as plain values for the key. The known labels are apart, because a model
    # has none before its first run, and the same rows must have the same fingerprint in a second run.
    described: Any
    known_labels: Any = labels
    if isinstance(columns, Mapping):
        described = [require_labels, {task: asdict(replace(head, labels=())) for task, head in columns.items()}]
        known_labels = [labels, {task: head.labels for task, head in columns.items()}]
    else:
        described = [asdict(field) for field in conversion.fields]
    # A default that is stated is the same reading, and what does not apply to the format changes nothing. So neither
    # may lead to another key.
    parsing = asdict(options)
    for option, default in _DEFAULTS.items():
        if parsing[option] is None:
            parsing[option] = default
    parsing["format"] = format.name
    if not format.has_documents:
        parsing["document"] = None
    fingerprint = sha256_json(_digests(path, format), parsing, described, how, _VERSION)

    def write(target: Path) -> tuple[str, ...]:
        columns_to_read = None
        if not format.is_text:
            columns_to_read = _columns_to_read(conversion, options)
        with format.open(path, options, columns_to_read=columns_to_read) as batches:
            if options.split_column is not None:
                batches = of_split(batches, options.split_column, options.split, name)
            return _write(batches, conversion, name, target)

    try:
        stored = store(cache_folder(cache_dir, "tables"), sha256_json(fingerprint, known_labels), write)
    except MemoryError as error:  # its own message is empty
        error.add_note(f"while {name} was read")
        raise
    rows = without_absent(stored.rows, columns)
    return Rows(rows=rows, source=name, fingerprint=fingerprint, notes=stored.notes, file=stored.path)


def _shown_path(path: Path) -> str:
    """Returns a path for messages, from the current folder if it is inside."""
    here, absolute = Path.cwd(), path.absolute()
    if absolute.is_relative_to(here):
        return str(absolute.relative_to(here))
    return str(absolute)


def _digests(path: Path, format: Format) -> list[Any]:
    """Returns the digests of all files that are read for a path, with their names if it is a folder.

    Raises:
        DataError: A file cannot be read.
    """
    try:
        files = [file for file in format.files(path) if file.exists()]
        digests: list[Any] = list(map(sha256_file, files))
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from error
    if not path.is_dir():
        return digests
    names = [str(file.relative_to(path.parent)) for file in files]  # names of folders may be labels
    return list(zip(names, digests, strict=True))


def _columns_to_read(conversion: Conversion, options: ReadOptions) -> list[str] | None:
    """Returns the columns that a format which stores columns reads. None for all."""
    # Several tasks may lack any of their columns in a row, so that the columns that are needed are not known before.
    if conversion.passthrough == "all" or isinstance(conversion.read_columns, Mapping):
        return None
    names = [field.name for field in conversion.fields]
    if conversion.passthrough != "none":
        names += conversion.passthrough
    if options.split_column is not None:
        names.append(options.split_column)
    return names


def _read_hub(
    source: HubSplit,
    columns: Columns,
    options: ReadOptions,
    *,
    labels: Sequence[str] | None,
    cache_dir: Path | None,
    **how: Any,
) -> Rows:
    """Reads a split of a data set of the hub."""
    format = None
    if options.format is not None:
        format = named_format(options.format)
        format = replace(format, columns=format.hub_columns)
    conversion = conversion_of(columns, options, labels=labels, format=format, **how)
    batches, origin = source.open()
    write = partial(_write, batches, conversion, source.name)
    # ``datasets`` has a cache of its own, so the rows are written once more and never looked up. Their digest is the
    # fingerprint.
    stored = store(cache_folder(cache_dir, "tables"), None, write)
    rows = without_absent(stored.rows, columns)
    return Rows(
        rows=rows,
        source=source.name,
        fingerprint=stored.sha256,
        notes=stored.notes,
        file=stored.path,
        hub=origin,
    )


def _schema(conversion: Conversion) -> pyarrow.Schema:
    """Returns the types of the columns that a conversion yields."""
    texts = []
    if conversion.passthrough != "none":
        texts.append(RECORD)
    if conversion.skip_errors:
        texts.append(REJECT)
    return row_schema(conversion.read_columns, texts)


def _write(batches: Batches, conversion: Conversion, source: str, target: Path) -> tuple[str, ...]:
    """Streams the checked rows into an Arrow file and returns the notes."""
    write_batches(target, conversion.checked(batches, source), _schema(conversion))
    return (*batches.notes, *conversion.notes)


def _read_memory(batches: Batches, conversion: Conversion, source: str, *, may_be_empty: bool) -> Rows:
    """Reads rows in memory, which stay there. No rows are right for a prediction, and a mistake for training."""
    schema = _schema(conversion)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    batch_list = list(batches.batches)
    if batch_list or not may_be_empty:
        for checked in conversion.checked(batches._replace(batches=iter(batch_list)), source):
            for name in columns:
                columns[name] += checked[name]
    rows = ArrowRows.from_columns(columns, schema)
    fingerprint = sha256_json(columns)  # of the values, because rows in memory have no file with a digest
    rows = without_absent(rows, conversion.read_columns)
    return Rows(rows=rows, source=source, fingerprint=fingerprint, notes=conversion.notes)


def rows_in_memory(data: Any, columns: Columns | None, source: str = "rows") -> Batches:
    """Returns the rows of a list, a DataFrame, a pyarrow Table or a Dataset.

    Class ids of a Dataset become names, missing values None, and an index no column.

    Args:
        data: The rows.
        columns: The columns that are read, by which a row may be a text or a tuple of texts. None leaves rows as they
            are.
        source: Name of the rows in messages.

    Raises:
        DataError: The data have another type, or a column of a DataFrame holds values of several types.
    """
    if type(data).__module__.startswith("datasets."):  # which is imported then, and takes a second otherwise
        from datasets import DatasetDict, IterableDataset, IterableDatasetDict

        if isinstance(data, DatasetDict | IterableDataset | IterableDatasetDict):
            raise DataError(f"{source}: cannot read {type(data).__name__}. Pass a Dataset, such as one split.")
        return dataset_batches(data)
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a DataFrame, told without an import of pandas
        try:
            data = pyarrow.Table.from_pandas(data.rename(columns=str), preserve_index=False)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
            raise DataError(
                f"{source}: a column of the DataFrame holds values of several types ({error}). Convert it to one type"
            ) from error
    if isinstance(data, pyarrow.Table):
        return arrow_batches(data)
    if isinstance(data, Rows):
        return Batches(None, in_batches(Record(row["line"], row) for row in data))
    if not isinstance(data, Iterable):
        raise DataError(
            f"{source}: expected a file, a list of dicts such as {{'text': '...'}}, a pandas DataFrame or a "
            f"datasets.Dataset, not {type(data).__name__}"
        )
    return Batches(None, in_batches(_given_records(data, columns)))


def _given_records(rows: Iterable[Any], columns: Columns | None) -> Iterator[Record]:
    """Yields the rows of a list, numbered from 1. A text or a tuple is what a prediction reads of these columns."""
    if columns is None:
        for number, row in enumerate(rows, start=1):
            yield Record(number, row)
        return
    inputs = without_labels(columns)
    for number, row in enumerate(rows):
        yield Record(number + 1, as_row(row, inputs, number))


def given_rows(data: Any, source: str = "rows") -> Iterable[Any]:
    """Returns the rows of data in memory as the caller wrote them, with the rows of tables as dicts."""
    if not is_frame(data):
        if not isinstance(data, Iterable):
            rows_in_memory(data, None, source)  # which raises
        rows: Iterable[Any] = data
        return rows
    records = []
    for batch in rows_in_memory(data, None, source).batches:
        records += [batch.record(row).cells for row in range(len(batch))]
    return records


def index_of(data: object) -> Any:
    """Returns the index of a pandas DataFrame or Series. None for other data."""
    if not hasattr(data, "iloc"):  # a list has a method ``index``
        return None
    return getattr(data, "index", None)


def is_frame(data: object) -> TypeGuard[Frame]:
    """Returns True for a pandas DataFrame, a pyarrow Table or a Dataset, whose items are no rows."""
    return hasattr(data, "shape") and (hasattr(data, "columns") or hasattr(data, "column_names"))


def column_values(path: Path, options: ReadOptions, column: str) -> Iterator[Any]:
    """Yields the cells of a column of a file, and None for a row without it.

    Raises:
        DataError: The file is not readable, or its header has no such column.
    """
    format = file_format(options.format, existing_file(path))
    with format.open(path, options, columns_to_read=[column]) as batches:
        if batches.columns is not None and column not in batches.columns:
            raise missing_column(column, batches.columns, str(path))
        for batch in batches.batches:
            for row in range(len(batch)):
                if row not in batch.issues:
                    yield batch.record(row).cells.get(column)


def matching_files(name: str | Path) -> list[Path]:
    """Returns the files that a pattern such as ``part-*.csv`` matches, in order, or the path itself.

    Raises:
        DataError: No file matches the pattern.
    """
    if not has_magic(str(name)) or Path(name).exists():  # a file may be called "reviews[1].csv"
        return [Path(name)]
    files = sorted(path for path in map(Path, glob(str(name), recursive=True)) if path.is_file())
    if not files:
        raise DataError(f"{name}: no file matches this pattern")
    return files


def existing_file(path: Path) -> Path:
    """Returns the path of a regular file (to read twice) or of a folder that is a source as a whole.

    Raises:
        DataError: The path does not exist, or is a folder, a pipe or a device. The message names its type.
    """
    check_path(path, DataError)
    if folder_format(path) is not None:
        return path
    if path.is_dir():
        inside = "no files"
        names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        if names:
            inside = first_few(names, 10)
        raise DataError(f"{path}: a folder where a file was expected. It holds {inside}")
    if not path.exists():
        raise DataError(f"{path}: {missing_path(path)}")
    if not path.is_file():
        raise DataError(
            f"{path}: a pipe or a device where a file was expected, because files are read several times. Save its "
            "content to a file (`predict` alone reads pipes, as standard input)"
        )
    return path


def column_names(path: Path, options: ReadOptions, columns: Columns | None = None) -> list[str]:
    """Returns the names of a file's columns, from the header or the first row.

    Args:
        path: Path of the file.
        options: Options to read it.
        columns: Columns that the task reads, if it is known.

    Raises:
        DataError: The file is not readable.
    """
    format = file_format(options.format, existing_file(path), columns)
    with format.open(path, options) as batches:
        return peeked(batches)[1]


def peeked(batches: Batches) -> tuple[Batches, list[str]]:
    """Returns the same batches, and the columns in the header or the first row."""
    if batches.columns is not None:
        return batches, list(batches.columns)
    first = next(batches.batches, None)
    if first is None:
        return batches, []
    return batches._replace(batches=chain([first], batches.batches)), list(first.record(0).cells)


def conversion_of(columns: Columns, options: ReadOptions | None = None, **how: Any) -> Conversion:
    """Returns the conversion of a task's rows (see ``Conversion``) or of rows that several tasks share.

    Raises:
        DataError: See ``Conversion``.
    """
    if not isinstance(columns, Mapping):
        return Conversion(columns, options, **how)
    how.pop("labels", None)  # each task has labels of its own
    how.pop("others", None)
    return SharedConversion(columns, options, **how)


def valid_rows(
    rows: Iterable[Row],
    columns: Columns,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    most: int = MOST_ROWS,
) -> Iterator[Row]:
    """Yields the rows' values of some columns, checked for tasks.

    Args:
        rows: The rows.
        columns: Columns to read.
        names: Columns -> other names that rows may use for them.
        most: The largest number of rows that are taken before the first of them is yielded.

    Raises:
        DataError: A row cannot be used. The message names its number from 0, its first error, and the column.
    """
    if isinstance(columns, Mapping):
        conversion: Conversion = SharedConversion(columns)
    else:
        conversion = _input_conversion(tuple(columns), tuple(names.items()))
    records = (Record(number, row) for number, row in enumerate(rows))
    for batch in in_batches(records, most):
        converted = conversion.convert(batch)
        for row, number in enumerate(batch.lines):
            problems = converted.problems.get(row)
            if problems:
                raise DataError(f"row {number}: {problems[0].text}")
            yield converted.row(row)


@lru_cache(maxsize=16)
def _input_conversion(columns: tuple[Column, ...], names: tuple[tuple[str, str], ...]) -> Conversion:
    """Returns the conversion of rows in memory. It is made once, because a call may predict a single row."""
    return Conversion(columns, others=dict(names))

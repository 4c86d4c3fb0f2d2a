"""Sources of rows, which are files, data sets of the hub, and tables in memory.

Owns how a source becomes a ``RowTable``, which includes its parser, its storage, and the names of a model's training
data for data that are read later. Rows are streamed into a memory-mapped Arrow file, so memory does not grow with them.
An unchanged file that is read in the same way is not parsed again. pandas need not be installed.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import glob, has_magic
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, TypeGuard, TypeVar

import pyarrow
from huggingface_hub import constants
from yaml import YAMLError

from bert_tasks.data import limits
from bert_tasks.data.arrow import cache_folder, row_batches, store, write_batches
from bert_tasks.data.cells import LABEL_SEPARATOR, joined_names
from bert_tasks.data.columns import (
    PASSTHROUGH,
    ROW_ERROR,
    Column,
    Columns,
    PassthroughColumns,
    Row,
    read_for_others,
    source_columns,
)
from bert_tasks.data.formats import Format, file_format, folder_format, named_format
from bert_tasks.data.problems import did_you_mean, first_few, missing_path
from bert_tasks.data.records import (
    Document,
    ParseOptions,
    Records,
    RowLines,
    arrow_records,
    dataset_records,
    open_text,
)
from bert_tasks.data.split_column import SplitName, missing_column, records_of_split
from bert_tasks.data.table import RowTable, table_schema, without_absent
from bert_tasks.data.validator import RowValidator, SharedValidator, row_validator
from bert_tasks.errors import DataError, UsageError
from bert_tasks.storage import check_path, sha256_file, sha256_json

if TYPE_CHECKING:
    from datasets import Dataset

GivenRow = TypeVar("GivenRow")  # a row as the caller wrote it, as a dict, a text or a tuple of texts

_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = 6  # part of the cache's key and of the fingerprint. Raise it when reading changes


class Frame(Protocol):
    """A table with named columns, a pandas DataFrame or a ``datasets.Dataset``."""

    @property
    def shape(self) -> Any: ...

    def __len__(self) -> int: ...


def rows_in_memory(data: Iterable[GivenRow] | Frame, source: str = "rows") -> Iterable[GivenRow | Row]:
    """Returns the rows of a list, a DataFrame, a pyarrow Table or a Dataset.

    Rows of a list are not checked. Class ids of a Dataset become names, missing values None, and an index no column.

    Raises:
        DataError: The data have another type, or a column of a DataFrame holds values of several types.
    """
    if type(data).__module__.startswith("datasets."):  # which is imported then, and takes a second otherwise
        from datasets import DatasetDict, IterableDataset, IterableDatasetDict

        if isinstance(data, DatasetDict | IterableDataset | IterableDatasetDict):
            raise DataError(f"{source}: cannot read {type(data).__name__}. Pass a Dataset, such as one split.")
        return [record.cells for record in dataset_records(data).rows]
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        frame: Any = data
        try:
            data = pyarrow.Table.from_pandas(frame.rename(columns=str), preserve_index=False)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
            raise DataError(
                f"{source}: a column of the DataFrame holds values of several types ({error}). Convert it to one type"
            ) from error
    if isinstance(data, pyarrow.Table):
        return [record.cells for record in arrow_records(data).rows]
    if isinstance(data, Iterable):
        return data
    raise DataError(
        f"{source}: expected a file, a list of dicts such as {{'text': '...'}}, a pandas DataFrame or a "
        f"datasets.Dataset, not {type(data).__name__}"
    )


def index_of(data: object) -> Any:
    """Returns the index of a pandas DataFrame or Series. None for other data."""
    return getattr(data, "index", None) if hasattr(data, "iloc") else None


def is_frame(data: object) -> TypeGuard[Frame]:
    """Returns True for a pandas DataFrame, a pyarrow Table or a Dataset, whose items are no rows."""
    return hasattr(data, "shape") and (hasattr(data, "columns") or hasattr(data, "column_names"))


class ReadingArguments(TypedDict, total=False):
    """Keyword arguments of public functions to read data, as in `ReadOptions`."""

    columns: Mapping[str, Any] | None
    format: str | None
    delimiter: str | None
    encoding: str | None
    header: bool | None
    label_separator: str | None
    split_column: str | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions(ParseOptions):
    """Options to read a file.

    Attributes:
        columns: The task's columns -> the file's columns, if the names differ. The columns of CoNLL files are numbers,
            "0" for the words. ``document.text`` is a text inside an object. Several names, in a list or with commas
            between them, are labels of 0 and 1 or choices in columns of their own.
        format: Name of a format, such as ``glue/sst2``. Default: by the file's extension.
        delimiter: Delimiter of a csv file, ``\\t`` for a tab. Default: as the extension says.
        encoding: Encoding of a text file, unless its byte order mark says another. Default: UTF-8.
        header: True if the first line of a csv file names the columns. Default: true. Otherwise they are "0", "1", ...
        label_separator: Separator of several labels in one cell. Default: ``;``.
        document: A document in a file of text, which is the lines between blank lines ("blank-line"), a "line", or the
            "file". Default: "blank-line" for training and evaluation, "line" for prediction.
        split_column: Column with the split of each row, such as ``split`` with train, dev (or validation) and test.
            Training uses the train rows and validates on the dev rows. Evaluation and prediction read the test rows.
            Default: all rows.
        split: The split that is read if ``split_column`` is set. Default: the test rows.

    Example:
        >>> evaluate("runs/first", "reviews.csv", columns={"text": "review"}, delimiter=";")
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    columns: Mapping[str, Any] | None = None
    format: str | None = None
    label_separator: str | None = None
    split_column: str | None = None
    split: SplitName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            object.__setattr__(self, "columns", joined_names(self.columns))

    @classmethod
    def from_arguments(
        cls, function: Callable[..., object], arguments: ReadingArguments, *, document: Document | None = None
    ) -> "ReadOptions":
        """Returns the options from keyword arguments of a public function.

        Raises:
            UsageError: An argument is unknown. The message suggests a similar one.
        """
        options = ReadingArguments.__annotations__
        unknown = next((name for name in arguments if name not in options), None)
        if unknown is not None:
            hint = did_you_mean(unknown, {**signature(function).parameters, **options})
            raise UsageError(f"{function.__name__}: unknown argument '{unknown}'{hint}")
        return cls(**arguments, document=document)

    def has(self, column: str) -> bool:
        """Returns True if the options or the format name a column of the task."""
        format_columns = {} if self.format is None else named_format(self.format).columns
        return column in format_columns or (self.columns is not None and column in self.columns)

    def training_names(self, train: str | Path | None, columns: Columns | None = None) -> dict[str, str]:
        """Returns the training data's names of the task's columns, for the model.

        Args:
            train: File with the training rows. None if they came from the hub or from memory.
            columns: The columns that are read. Several tasks have their names in ``HeadColumns``.
        """
        if isinstance(columns, Mapping):
            return {}
        usual: Mapping[str, str] = {}
        if train is not None:
            usual = file_format(self.format, Path(train), columns).columns
        elif self.format is not None:
            usual = named_format(self.format).hub_columns
        names = {**usual, **({} if self.columns is None else self.columns)}
        return {task: name for task, name in names.items() if task != name}

    def with_names(
        self, names: Mapping[str, str], columns: Sequence[Column], present: Collection[str]
    ) -> "ReadOptions":
        """Returns the options with the model's remembered names that are not set here.

        Args:
            names: The task's columns -> the names of the training data. Names that are not present are skipped.
            columns: The columns that the task reads.
            present: The columns of the data.
        """
        kinds = {column.name: column.type for column in columns}
        given_names = {} if self.columns is None else self.columns
        remembered = {column.name: names[column.name] for column in columns if column.name in names}
        unread = read_for_others(columns, given_names, remembered)
        fitting = {
            task: name
            for task, name in remembered.items()
            if task not in unread and kinds[task].columns_in(name, present)
        }
        return (
            replace(self, columns={**fitting, **given_names}) if fitting or given_names else replace(self, columns=None)
        )

    def _for_table(self, path: Path, names: Mapping[str, str], columns: Columns) -> "ReadOptions":
        """Returns options for a table if the first line of a text file names a column."""
        if self.format is not None or not file_format(None, existing_file(path), columns).has_documents:
            return self
        headers = {*names.values(), *(column.name for column in source_columns(columns))}
        with open_text(path, encoding=self.encoding, newline="\n") as file:
            lines = RowLines(file, path, limits.LARGEST_ROW)
            line = next(lines, "").rstrip("\r\n")
        mark = next((mark for mark in "\t;|," if mark in line and set(line.split(mark)) & headers), None)
        formats = {None: self, "\t": replace(self, format="tsv")}
        return formats.get(mark, replace(self, format="csv", delimiter=mark))

    def for_file(self, path: str | Path, names: Mapping[str, str], columns: Columns) -> "ReadOptions":
        """Returns the options for a file. See ``with_names``."""
        try:
            options = self._for_table(Path(path), names, columns)
            if isinstance(columns, Mapping) or not names:
                return options
            return options.with_names(names, columns, column_names(Path(path), options, columns))
        except DataError:  # reading the file reports it, with the name that the caller gives the file
            return self


def read_table(
    source: str | Path,
    *,
    columns: Columns,
    reading: ReadOptions | None = None,
    require_labels: bool = True,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    passthrough: PassthroughColumns = "none",
    skip_errors: bool = False,
    name: str | None = None,
) -> RowTable:
    """Reads one file.

    Args:
        source: The file.
        columns: The columns that the task reads, or those of each of several tasks, which read the file in one pass.
        reading: Options to read the file.
        require_labels: False reads files for prediction. Labels may then be missing, and each line of a text file is a
            text.
        labels: Known label names, which every label must be (but not every tag, see ``check_splits``). An empty
            sequence means that they will be inferred from the rows, so numbers among names are errors. None means that
            labels are not checked.
        cache_dir: Folder for rows. None means the cache of ``datasets``.
        passthrough: Columns of the file that each row carries along in a column ``PASSTHROUGH``.
        skip_errors: Store rows that cannot be used, with the reason in a column ``ROW_ERROR``, unless no row can be
            used.
        name: Name of the file in messages.

    Raises:
        RowErrors: Some rows cannot be used. The error has all of them.
        DataError: The file as a whole cannot be used.
    """
    path = existing_file(Path(source))
    options = ReadOptions() if reading is None else reading
    separator = LABEL_SEPARATOR if options.label_separator is None else options.label_separator
    layout = file_format(options.format, path, columns)
    if require_labels and options.document is None:
        options = replace(options, document="blank-line")
    if name is None:
        here, absolute = Path.cwd(), path.absolute()
        name = str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
    settings: dict[str, Any] = {"layout": layout, "require_labels": require_labels, "label_separator": separator}
    settings |= {"passthrough": passthrough, "skip_errors": skip_errors}
    described: Any
    if isinstance(columns, Mapping):
        validator: RowValidator = SharedValidator(columns, **settings)
        described = [require_labels, {task: asdict(head) for task, head in columns.items()}]
        is_spread = True  # they may read any column
    else:
        validator = RowValidator(columns, options.columns, labels=labels, **settings)
        described = [asdict(field) for field in validator.fields]
        # A choice may have its own column, and a name may stand for several columns.
        is_spread = any(field.column.type.is_numbered or set(",.") & set(field.name) for field in validator.fields)
    carried = validator.passthrough
    columns_to_read = None
    if carried != "all" and not is_spread:
        columns_to_read = [*(field.name for field in validator.fields), *([] if carried == "none" else carried)]
        if options.split_column is not None:
            columns_to_read.append(options.split_column)
    try:
        files = [file for file in layout.files(path) if file.exists()]
        names = [str(file.relative_to(path.parent)) for file in files]  # names of folders may be labels
        digests: list[Any] = list(map(sha256_file, files))
        if path.is_dir():
            digests = list(zip(names, digests, strict=True))
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from error
    parsing = asdict(options) | {
        "columns": {} if options.columns is None else options.columns,
        "encoding": "utf-8" if options.encoding is None else options.encoding,
        "header": options.header is not False,
        "label_separator": separator,
        "format": layout.name,
        "document": options.document if layout.has_documents else None,
    }
    fingerprint = sha256_json(digests, parsing, described, labels, passthrough, skip_errors, _VERSION)
    records = _opened(path, layout, options, columns_to_read, name)
    try:
        stored = store(cache_folder(cache_dir, "tables"), fingerprint, partial(_write_rows, records, validator, name))
    except MemoryError as error:
        error.add_note(f"while {name} was read")
        raise
    rows = without_absent(stored.rows, columns)
    return RowTable(rows=rows, source=name, fingerprint=fingerprint, notes=stored.notes, file=stored.path)


@contextmanager
def _opened(
    path: Path, layout: Format, options: ReadOptions, columns_to_read: Sequence[str] | None, source: str
) -> Iterator[Records]:
    """Opens the records of a file, or those of one split."""
    with layout.open(path, options, columns_to_read=columns_to_read) as records:
        if options.split_column is None:
            yield records
        else:
            yield records_of_split(records, options.split_column, options.split, source)


def column_values(path: Path, options: ReadOptions, column: str) -> Iterator[Any]:
    """Yields the cells of a column of a file, and None for a row without it.

    Raises:
        DataError: The file is not readable, or its header has no such column.
    """
    layout = file_format(options.format, existing_file(path))
    with layout.open(path, options, columns_to_read=[column]) as records:
        if records.columns is not None and column not in records.columns:
            raise missing_column(column, records.columns, str(path))
        for record in records.rows:
            if record.fault is None and record.skip is None:
                yield record.cells.get(column)


def read_hub(
    dataset: str,
    *,
    columns: Columns,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    names: Mapping[str, str] | None = None,
    format: str | None = None,
    require_labels: bool = True,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    passthrough: PassthroughColumns = "none",
    skip_errors: bool = False,
) -> RowTable:
    """Reads one split of a data set on the hub or in a folder with its layout.

    See ``read_table``. Class ids become the names that the data set defines for them. -1 means that a label is hidden.
    """
    layout = None if format is None else named_format(format)
    source = "/".join(segment for segment in (dataset, config, split) if segment is not None)
    validator = row_validator(
        columns,
        names,
        labels=labels,
        layout=None if layout is None else replace(layout, columns=layout.hub_columns),
        require_labels=require_labels,
        passthrough=passthrough,
        skip_errors=skip_errors,
    )
    rows = _hub_rows(dataset, config, split, revision)
    records = nullcontext(dataset_records(rows))
    stored = store(cache_folder(cache_dir, "tables"), None, partial(_write_rows, records, validator, source))
    commit = None if Path(dataset).exists() else _commit(rows)
    hub = None
    if commit is not None:
        hub = {"dataset": dataset, "config": config, "split": split, "commit": commit}
        hub["licence"] = _licence(dataset, commit)
    rows = without_absent(stored.rows, columns)
    return RowTable(rows=rows, source=source, fingerprint=stored.sha256, notes=stored.notes, file=stored.path, hub=hub)


def _write_rows(
    opened: AbstractContextManager[Records], validator: RowValidator, source: str, target: Path
) -> tuple[str, ...]:
    """Streams the canonical rows into an Arrow file and returns the notes."""
    texts = [PASSTHROUGH] if validator.passthrough != "none" else []
    texts += [ROW_ERROR] if validator.skip_errors else []
    schema = table_schema(validator.read_columns, texts)
    with opened as records:
        batches = row_batches(validator.rows(records, source))
        columns = ({name: [row.get(name) for row in batch] for name in schema.names} for batch in batches)
        write_batches(target, columns, schema)
    return (*records.notes, *validator.notes)


def hub_splits(dataset: str, *, config: str | None = None, revision: str | None = None) -> list[str]:
    """Returns the names of a data set's splits."""
    import datasets

    try:
        return list(datasets.get_dataset_split_names(dataset, config, revision=revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error


def _hub_rows(dataset: str, config: str | None, split: str, revision: str | None) -> "Dataset":
    import datasets
    from huggingface_hub.file_download import repo_folder_name

    if revision is not None and Path(dataset).exists():
        raise DataError(f"{dataset} is a folder here and not on the hub, so it has no revision {revision!r}. Remove it")
    try:
        rows = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error
    if datasets.config.HF_HUB_OFFLINE and revision is not None:
        # Offline `datasets` takes the newest commit that it prepared, whatever revision is asked for. A branch or tag
        # is the commit that it was when the hub was last asked.
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        name = folder / "refs" / revision
        if _commit(rows) not in (revision, name.read_text("utf-8").strip() if name.is_file() else ""):
            raise DataError(
                f"{dataset} (revision {revision}): HF_HUB_OFFLINE is set, and the newest revision in the cache of "
                "data sets is another one. Unset HF_HUB_OFFLINE once, or read local files with data.dir or data.train"
            )
    return rows


def _commit(rows: "Dataset") -> str | None:
    """Returns the commit of the hub's data set from the folder of its prepared rows."""
    folders = {Path(file["filename"]).parent.name for file in rows.cache_files}
    commits = [name for name in folders if _COMMIT.fullmatch(name)]
    return commits[0] if len(commits) == len(folders) == 1 else None


def _licence(dataset: str, commit: str) -> str | None:
    """Returns the licence in the metadata of the data set's page, if it is cached."""
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    page = try_to_load_from_cache(dataset, "README.md", repo_type="dataset", revision=commit)
    try:
        licence = DatasetCard.load(page).data.license if isinstance(page, str) else None
    except (OSError, ValueError, YAMLError):  # a page that cannot be read
        return None
    return ", ".join(map(str, licence)) if isinstance(licence, list) else licence


def _unusable_dataset(dataset: str, config: str | None, error: Exception) -> DataError:
    reason = str(error if error.__cause__ is None else error.__cause__).strip().rstrip(".")
    name = dataset if config is None else f"{dataset} (config {config!r})"
    return DataError(
        f"{name}: the data set cannot be loaded. Check its name, config and split, or read local files with data.dir "
        f"or data.train ({reason})"
    )


def matching_files(name: str | Path) -> list[Path]:
    """Returns the files that a pattern such as ``part-*.csv`` matches, in order, or the path itself.

    Raises:
        DataError: No file matches the pattern.
    """
    if not has_magic(str(name)) or Path(name).exists():
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
        inside = first_few(sorted(entry.name for entry in path.iterdir() if entry.is_file()), 10)
        raise DataError(f"{path}: a folder where a file was expected. It holds {inside if inside else 'no files'}")
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
    with format.open(path, options) as records:
        return peeked(records)[1]


def peeked(records: Records) -> tuple[Records, list[str]]:
    """Returns the same records, and the columns in the header or the first row."""
    if records.columns is not None:
        return records, list(records.columns)
    first = next(records.rows, None)
    if first is None:
        return records, []
    return records._replace(rows=chain([first], records.rows)), list(first.cells)

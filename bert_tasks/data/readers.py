"""Sources of rows: files, data sets of the hub, and tables in memory.

Owns how a source becomes a `RowTable`: which parser reads it and where its rows are stored. Rows are streamed into a
memory-mapped Arrow file, so memory does not grow with them; an unchanged file that is read in the same way is not
parsed again. pandas need not be installed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from bert_tasks.data.columns import FAULT, LABEL_SEPARATOR, PASSTHROUGH, Column, PassthroughColumns, Row
from bert_tasks.data.conll import conll_records, conllu_records
from bert_tasks.data.formats import Format, file_format, named_format
from bert_tasks.data.problems import first_few, missing_path
from bert_tasks.data.records import (
    Records,
    csv_records,
    dataset_records,
    json_records,
    parquet_records,
    plain_records,
    squad_records,
    text_records,
)
from bert_tasks.data.table import (
    HubSplit,
    RowTable,
    cache_folder,
    store,
    table_schema,
    without_absent,
)
from bert_tasks.data.validator import ColumnMapping, RowValidator, make_column_mapping
from bert_tasks.errors import DataError
from bert_tasks.paths import exists, is_file, is_folder
from bert_tasks.storage import sha256_file, sha256_json

if TYPE_CHECKING:
    from datasets import Dataset

GivenRow = TypeVar("GivenRow")  # a row as the caller wrote it: a dict, a text, a tuple of texts

_BATCH = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = 3  # part of the cache's key and of the fingerprint: raise it when reading changes


class Frame(Protocol):
    """A table with named columns: a pandas DataFrame or a `datasets.Dataset`."""

    @property
    def shape(self) -> Any: ...

    def __len__(self) -> int: ...


def rows_in_memory(data: Iterable[GivenRow] | Frame, source: str = "rows") -> Iterable[GivenRow | Row]:
    """The rows of a list, of a DataFrame or of a Dataset; those of a list are not looked at.

    Class ids of a Dataset become names. Missing values of a DataFrame become None; its index is no column.

    Raises:
        DataError: it is something else, or a column of a DataFrame holds values of several types.
    """
    import pyarrow
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(data, DatasetDict | IterableDatasetDict):
        raise DataError(f"{source}: a {type(data).__name__} holds several splits: pass one of {', '.join(data)}")
    if isinstance(data, IterableDataset):
        raise DataError(f"{source}: an IterableDataset has no length: pass list(data), or a Dataset")
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        frame: Any = data
        try:
            data = Dataset.from_pandas(frame.rename(columns=str), preserve_index=False)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
            raise DataError(
                f"{source}: a column of the DataFrame holds values of several types ({error}); convert it to one type"
            ) from error
    if isinstance(data, Dataset):
        return [record.cells for record in dataset_records(data).rows]
    if isinstance(data, Iterable):
        return data
    raise DataError(
        f"{source}: expected a file, a list of dicts such as {{'text': '...'}}, a pandas DataFrame or a "
        f"datasets.Dataset, not {type(data).__name__}"
    )


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        columns: the task's columns -> the file's, where the names differ. The columns of CoNLL files are called by
            their number, that of the words "0".
        format: such as ``glue/sst2``; default: by the file's extension.
        delimiter: of a csv file, where it is not the usual one of its extension; ``\\t``, as it is typed, is a tab.
        encoding: of a text file, unless its byte order mark says another; default: UTF-8.
        header: whether the first line of a csv file names the columns, which is the default; else they are called
            "0", "1" and so on.
        label_separator: what separates several labels in one cell; default: ``;``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    columns: Mapping[str, str] | None = None
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    label_separator: str | None = None

    def __post_init__(self) -> None:
        if self.delimiter == "\\t":  # neither a shell nor a literal string of TOML makes a tab of it
            object.__setattr__(self, "delimiter", "\t")

    @property
    def codec(self) -> str:
        """The encoding to read a text file in."""
        return "utf-8" if self.encoding is None else self.encoding

    @property
    def has_header(self) -> bool:
        """Whether the first line of a csv file names the columns."""
        return self.header is None or self.header

    def has(self, column: str) -> bool:
        """Whether a column of the task is named here, or by the format."""
        known = {} if self.format is None else named_format(self.format).columns
        return column in known or (self.columns is not None and column in self.columns)


def read_table(
    source: str | Path,
    *,
    columns: Sequence[Column],
    reading: ReadOptions | None = None,
    require_labels: bool = True,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    passthrough: PassthroughColumns = "none",
    skip_faulty: bool = False,
    name: str | None = None,
) -> RowTable:
    """Reads one file.

    Args:
        source: the file.
        columns: what the task reads.
        reading: how to read the file.
        require_labels: False reads files for prediction, whose labels may be missing.
        labels: the known label names, which every label must be (but not every tag: see `check_splits`); an empty
            sequence says that they will be inferred from the rows (numbers among names are then refused); None
            leaves labels unchecked.
        cache_dir: where rows are stored; None: the cache of `datasets`.
        passthrough: which of the file's columns each row carries along in a column ``PASSTHROUGH``.
        skip_faulty: rows that cannot be used are in the table, with the reason in a column ``FAULT``, unless no row
            can be used.
        name: the file's name in messages.

    Raises:
        BadRowsError: rows that cannot be used, all of them.
        DataError: the file as a whole cannot be used.
    """
    path = existing_file(Path(source))
    options = ReadOptions() if reading is None else reading
    separator = LABEL_SEPARATOR if options.label_separator is None else options.label_separator
    layout = file_format(options.format, path)
    mapping = make_column_mapping(
        columns,
        options.columns,
        usual_names=layout.columns,
        layout=layout,
        require_labels=require_labels,
        labels=labels,
        source=_display_name(path) if name is None else name,
        passthrough=passthrough,
        skip_faulty=skip_faulty,
        label_separator=separator,
    )

    def write(target: Path) -> tuple[str, ...]:
        with file_records(path, layout, options, wanted=mapping.source_columns()) as records:
            return _write_rows(records, mapping, target)

    # Runs keep fingerprints in run.json, so these values and their names stay as they are.
    stated = {} if options.columns is None else options.columns
    fields = [{**asdict(field), "mapped": field.column.name in stated} for field in mapping.fields]
    how: dict[str, Any] = {
        "columns": None,
        "encoding": options.codec,
        "delimiter": options.delimiter,
        "header": options.has_header,
    }
    how |= {"label_separator": separator, "format": layout.name, "version": _VERSION}
    carried = [] if passthrough == "none" and not skip_faulty else [passthrough, skip_faulty]
    fingerprint = sha256_json(_file_digest(path), how, fields, labels, *carried)
    stored = store(cache_folder(cache_dir, "tables"), fingerprint, write)
    rows = without_absent(stored.rows, columns)
    return RowTable(rows=rows, source=mapping.source, fingerprint=fingerprint, notes=stored.notes, file=stored.path)


def read_hub(
    dataset: str,
    *,
    columns: Sequence[Column],
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    names: Mapping[str, str] | None = None,
    format: str | None = None,
    require_labels: bool = True,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    skip_faulty: bool = False,
) -> RowTable:
    """Reads one split of a data set on the hub (or in a folder laid out like one); see `read_table`.

    Class ids become the names that the data set gives them; -1 says that a label is hidden.
    """
    layout = None if format is None else named_format(format)
    mapping = make_column_mapping(
        columns,
        names,
        usual_names=None if layout is None else layout.hub_columns,
        layout=layout,
        require_labels=require_labels,
        labels=labels,
        source="/".join(part for part in (dataset, config, split) if part is not None),
        skip_faulty=skip_faulty,
    )
    rows = _hub_rows(dataset, config, split, revision)
    stored = store(cache_folder(cache_dir, "tables"), None, partial(_write_rows, dataset_records(rows), mapping))
    commit = None if exists(Path(dataset)) else _commit(rows)
    hub = None
    if commit is not None:
        licence = _licence(dataset, commit)
        hub = HubSplit(dataset=dataset, config=config, split=split, commit=commit, licence=licence)
    return RowTable(
        rows=without_absent(stored.rows, columns),
        source=mapping.source,
        fingerprint=stored.sha256,
        notes=stored.notes,
        file=stored.path,
        hub=hub,
    )


def _write_rows(records: Records, mapping: ColumnMapping, target: Path) -> tuple[str, ...]:
    """Streams the canonical rows into an Arrow file and returns the notes, or raises with every fault."""
    import pyarrow

    validator = RowValidator(mapping, records.columns)
    texts = [*([] if mapping.passthrough == "none" else [PASSTHROUGH]), *([FAULT] if mapping.skip_faulty else [])]
    schema = table_schema([field.column for field in mapping.fields], texts).arrow_schema
    rows = validator.rows(records.rows)
    with pyarrow.OSFile(str(target), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        while batch := list(islice(rows, _BATCH)):
            stream.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
    return validator.finish()


def hub_splits(dataset: str, *, config: str | None = None, revision: str | None = None) -> list[str]:
    """The names of a data set's splits."""
    import datasets

    try:
        return list(datasets.get_dataset_split_names(dataset, config, revision=revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error


def _hub_rows(dataset: str, config: str | None, split: str, revision: str | None) -> "Dataset":
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if revision is not None and exists(Path(dataset)):
        raise DataError(f"{dataset} is a folder here and not on the hub, so it has no revision {revision!r}: remove it")
    try:
        rows = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error
    if datasets.config.HF_HUB_OFFLINE and revision is not None:
        # Offline `datasets` takes the newest commit that it prepared, whatever revision is asked for.
        wanted: str | None = revision
        if not _COMMIT.fullmatch(revision):  # a branch or tag: the commit it meant when the hub was last asked
            folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
            try:
                wanted = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
            except OSError:
                wanted = None
        if wanted is None or wanted != _commit(rows):
            raise DataError(
                f"{dataset} (revision {revision}): HF_HUB_OFFLINE is set, and the newest revision in the cache of "
                "data sets is another one: unset HF_HUB_OFFLINE once, or read local files with data.dir or data.train"
            )
    return rows


def _commit(rows: "Dataset") -> str | None:
    """The commit of the hub's data set: the name of the folder where `datasets` keeps the rows it prepared."""
    folders = {Path(file["filename"]).parent.name for file in rows.cache_files}
    commits = [name for name in folders if _COMMIT.fullmatch(name)]
    return commits[0] if len(commits) == len(folders) == 1 else None


def _licence(dataset: str, commit: str) -> str | None:
    """The licence in the metadata of the data set's page, if the page is in the cache; the hub is not asked again."""
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from yaml import YAMLError

    page = try_to_load_from_cache(dataset, "README.md", repo_type="dataset", revision=commit)
    try:
        licence = (metadata_load(page) or {}).get("license") if isinstance(page, str) else None
    except (OSError, ValueError, YAMLError):  # a page that cannot be read
        return None
    names = licence if isinstance(licence, list) else [licence]
    return ", ".join(map(str, names)) if licence else None


def _unusable_dataset(dataset: str, config: str | None, error: Exception) -> DataError:
    reason = str(error if error.__cause__ is None else error.__cause__).strip().rstrip(".")
    name = dataset if config is None else f"{dataset} (config {config!r})"
    return DataError(
        f"{name}: the data set cannot be loaded: {reason}; check its name, config and split, "
        "or read local files with data.dir or data.train"
    )


def existing_file(path: Path) -> Path:
    """The path, if it is a regular file, which can be read several times.

    Raises:
        DataError: there is nothing, a folder, a pipe or a device; the message says which.
    """
    if is_folder(path):
        inside = first_few(sorted(entry.name for entry in path.iterdir() if is_file(entry)), 10)
        raise DataError(f"{path}: a folder where a file was expected; it holds {inside if inside else 'no files'}")
    if not exists(path):
        raise DataError(f"{path}: {missing_path(path)}")
    if not is_file(path):
        raise DataError(
            f"{path}: a pipe or a device where a file was expected, because files are read several times; save its "
            "content to a file (`predict` alone reads pipes, as standard input)"
        )
    return path


def _display_name(path: Path) -> str:
    """The path relative to the current folder, where it is below it."""
    path = path.absolute()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _file_digest(path: Path) -> str:
    """The sha256 of a file, after a look at whether it is a zip file or spreadsheet."""
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                raise DataError(f"{path}: a zip file or a spreadsheet; unpack it, or export it as csv")
        return sha256_file(path)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}") from error


def file_records(
    path: Path, layout: Format, options: ReadOptions, *, wanted: Sequence[str] | None = None
) -> AbstractContextManager[Records]:
    """The records of a file in its format. Of parquet files only the ``wanted`` columns are read; None: all."""
    encoding = options.codec
    if layout.delimiter is None and not options.has_header:
        raise DataError(f"{path}: header = false is for csv and tsv files; {layout.name} has no header line")
    match layout.name:
        case "parquet":
            return parquet_records(path, wanted=wanted)
        case "jsonl":
            return json_records(path, encoding=encoding)
        case "squad":
            return squad_records(path, encoding=encoding)
        case "text":
            return text_records(path, encoding=encoding)
        case "conll":
            return conll_records(path, encoding=encoding)
        case "conllu":
            return conllu_records(path, encoding=encoding)
    delimiter = layout.delimiter if options.delimiter is None else options.delimiter
    if delimiter is None:
        raise DataError(f"{path}: format {layout.name!r} needs a delimiter")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise DataError(
            f"{path}: delimiter = {delimiter!r}: expected one character that is neither a quote nor a line end"
        )
    if layout.quoted:
        return csv_records(path, delimiter=delimiter, encoding=encoding, header=options.has_header)
    return plain_records(path, layout, delimiter=delimiter, encoding=encoding, header=options.has_header)


def column_names(path: Path, options: ReadOptions) -> list[str]:
    """The names of a file's columns: those of its header, or of its first row.

    Raises:
        DataError: the file cannot be read.
    """
    layout = file_format(options.format, existing_file(path))
    with file_records(path, layout, options) as records:
        return peeked(records)[1]


def peeked(records: Records) -> tuple[Records, list[str]]:
    """The same records, and the names of their columns: those of the header, or of the first row."""
    if records.columns is not None:
        return records, list(records.columns)
    first = next(records.rows, None)
    if first is None:
        return records, []
    return Records(None, chain([first], records.rows)), list(first.cells)

"""Rows that lie in memory as something else than a list of dicts: pandas DataFrames and data sets of `datasets`.

Owns what of these is understood, and what is said of all else. Must not know tasks or files; pandas need not be there.

Reading of files and hub data sets into tables of canonical rows.

Owns how a source becomes a `RowTable`: which parser reads it, and where the rows are kept. Must not know what valid
values are, models, tokenizers or training. Rows are streamed into a memory-mapped Arrow file, so memory stays flat; an
unchanged file read in the same way is not parsed again.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from bert_tasks.data.columns import FAULT, KEPT, LABEL_SEPARATOR, Column, PassthroughColumns, Row
from bert_tasks.data.conll import conll_records, conllu_records
from bert_tasks.data.formats import Format, file_format, named_format
from bert_tasks.data.problems import missing_path
from bert_tasks.data.records import (
    Records,
    dataset_records,
    in_batches,
    json_records,
    parquet_records,
    plain_records,
    quoted_records,
    squad_records,
    text_records,
)
from bert_tasks.data.table import (
    HubSplit,
    RowTable,
    cache_folder,
    kept_or_written,
    store,
    table_schema,
    without_absent,
)
from bert_tasks.data.validator import ColumnMapping, RowValidator, Targets, check_columns, make_column_mapping
from bert_tasks.errors import DataError
from bert_tasks.paths import exists, is_file, is_folder
from bert_tasks.storage import sha256_file, sha256_json

if TYPE_CHECKING:
    from datasets import Dataset

Given = TypeVar("Given")  # a row as the caller wrote it: a dict, a text, a tuple of texts


class Frame(Protocol):
    """A table with named columns: a pandas DataFrame or a `datasets.Dataset`."""

    @property
    def shape(self) -> Any: ...

    def __len__(self) -> int: ...


def rows_in_memory(data: Iterable[Given] | Frame, source: str = "rows") -> Iterable[Given | Row]:
    """The rows of a list of dicts or texts, which are not looked at, of a DataFrame, or of a Dataset (classes by name).

    Raises:
        DataError: it is something else, or a column of a DataFrame holds values of several types.
    """
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(data, DatasetDict | IterableDatasetDict):
        raise DataError(f"{source}: a {type(data).__name__} holds several splits: give one of {', '.join(data)}")
    if isinstance(data, IterableDataset):
        raise DataError(f"{source}: an IterableDataset has no length: give list(data), or a Dataset")
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        data = _of_pandas(data, source)
    if isinstance(data, Dataset):
        return [record.cells for record in dataset_records(data).rows]
    if isinstance(data, Iterable):
        return data
    raise DataError(
        f"{source}: expected a file, a list of dicts such as {{'text': '...'}}, a pandas DataFrame or a "
        f"datasets.Dataset, not {type(data).__name__}"
    )


def _of_pandas(frame: Any, source: str) -> "Dataset":
    """Missing values become None; the index, which is no column, is left out."""
    import pyarrow
    from datasets import Dataset

    try:
        return Dataset.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        raise DataError(f"{source}: the DataFrame has a column of mixed types ({error}); give it one type") from error


_BATCH = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = 3  # part of the cache's key: raise it when reading changes


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        columns: the task's columns -> the file's, where the names differ.
        format: such as ``glue/sst2``; default: by the file's extension.
        delimiter: of a csv file, where it is not the extension's; ``\\t``, as it is typed, is a tab.
        encoding: of a text file, unless a byte order mark in it says another; default: UTF-8.
        header: whether a csv file's first line names the columns, as by default; else they are called "0", "1" and so
            on.
        label_separator: what stands between several labels in one cell; default: ``;``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    columns: Mapping[str, str] | None = None
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    label_separator: str | None = None

    def __post_init__(self) -> None:
        if self.delimiter == "\\t":  # no shell, and no literal string of TOML, makes a tab of it
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
        """Whether a column of the task is named here, or known of the format."""
        known = {} if self.format is None else named_format(self.format).columns
        return column in known or (self.columns is not None and column in self.columns)


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
    header: bool = True,
    label_separator: str = LABEL_SEPARATOR,
    cache_dir: Path | None = None,
    keep: PassthroughColumns = "none",
    skips: bool = False,
    called: str | None = None,
) -> RowTable:
    """Reads one file.

    Args:
        names: what the task's columns are called in the file, where that differs; in CoNLL files columns are
            called by their number, the word's being "0".
        format: one of `FORMATS`; None goes by the file's extension.
        targets: "optional" reads files for prediction, whose targets may be missing.
        labels: the known label names, which every label must be (but not every tag: see `check_splits`); an empty
            sequence says that they will be inferred from the rows (numbers among names are then refused); None
            leaves labels unchecked.
        encoding, delimiter, header, label_separator: see `ReadOptions`.
        keep: which of the file's columns each row carries along in a column ``KEPT``.
        skips: rows that cannot be used are in the table, with the reason in a column ``FAULT``, unless all are such.
        called: the file's name in messages.

    Raises:
        BadRowsError: naming all the rows that cannot be used.
        DataError: if the file as a whole cannot be used.
    """
    path = existing_file(Path(source))
    layout = file_format(format, path)
    told = display_name(path) if called is None else called
    how = ReadOptions(encoding=encoding, delimiter=delimiter, header=header, label_separator=label_separator)
    plan = make_column_mapping(
        columns,
        names,
        layout.columns,
        layout,
        targets,
        labels,
        told,
        keep=keep,
        skips=skips,
        label_separator=label_separator,
    )
    options = {**asdict(how), "format": layout.name, "version": _VERSION}
    content = _content(path)
    carried = [] if keep == "none" and not skips else [keep, skips]
    fingerprint = sha256_json(content, options, [asdict(field) for field in plan.fields], labels, *carried)
    write = partial(_write_file, path, layout, how, plan)
    stored = kept_or_written(cache_folder(cache_dir, "tables"), fingerprint, write)
    rows = without_absent(stored.rows, columns)
    return RowTable(rows=rows, source=plan.source, fingerprint=fingerprint, notes=stored.notes, file=stored.path)


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
    skips: bool = False,
) -> RowTable:
    """Reads one split of a data set on the hub (or in a folder laid out like one); see `read_table`.

    Class ids become the names the data set gives them; -1 says that a label is hidden.
    """
    layout = None if format is None else named_format(format)
    hub_columns: Mapping[str, str] = {} if layout is None else layout.hub_columns
    source = "/".join(part for part in (dataset, config, split) if part is not None)
    plan = make_column_mapping(columns, names, hub_columns, layout, targets, labels, source, skips=skips)
    rows = _hub_rows(dataset, config, split, revision)
    records = dataset_records(rows)
    stored = store(cache_folder(cache_dir, "tables"), None, lambda target: _write_rows(records, plan, target))
    return RowTable(
        rows=without_absent(stored.rows, columns),
        source=source,
        fingerprint=stored.content,
        notes=stored.notes,
        file=stored.path,
        hub=_hub_split(dataset, config, split, rows),
    )


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

    if revision is not None and exists(Path(dataset)):
        raise DataError(f"{dataset} is here and not on the hub, and has no revision {revision!r}: leave it out")
    try:
        rows = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error
    if datasets.config.HF_HUB_OFFLINE and revision is not None:
        _check_cached_revision(dataset, revision, _commit(rows))
    return rows


def _check_cached_revision(dataset: str, revision: str, commit: str | None) -> None:
    """Offline `datasets` takes the newest commit that it prepared, whatever revision is asked for."""
    wanted = revision if _COMMIT.fullmatch(revision) else _cached_commit(dataset, revision)
    if commit is None or wanted != commit:
        raise DataError(
            f"{dataset} (revision {revision}): HF_HUB_OFFLINE is set, and the data set's cache holds another revision "
            "as its newest: unset HF_HUB_OFFLINE once, or read local files with data.dir or data.train"
        )


def _cached_commit(dataset: str, revision: str) -> str | None:
    """The commit that a branch or tag meant when the hub was last asked."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
    try:
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _commit(rows: "Dataset") -> str | None:
    """The commit of the hub's data set: the name of the folder where `datasets` keeps the rows it prepared."""
    folders = {Path(file["filename"]).parent.name for file in rows.cache_files}
    found = [name for name in folders if _COMMIT.fullmatch(name)]
    return found[0] if len(found) == len(folders) == 1 else None


def _hub_split(dataset: str, config: str | None, split: str, rows: "Dataset") -> HubSplit | None:
    """Where the rows are on the hub; None for a folder laid out like a data set."""
    commit = _commit(rows)
    if commit is None or exists(Path(dataset)):
        return None
    licence = _licence(dataset, commit)
    return HubSplit(dataset=dataset, config=config, split=split, commit=commit, licence=licence)


def _licence(dataset: str, commit: str) -> str | None:
    """What the header of the data set's page says, if the page is in the cache; the hub is not asked again."""
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from yaml import YAMLError

    page = try_to_load_from_cache(dataset, "README.md", repo_type="dataset", revision=commit)
    try:
        licence = (metadata_load(page) or {}).get("license") if isinstance(page, str) else None
    except (OSError, ValueError, YAMLError):  # a page that is no good says nothing
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
    """The path, if a regular file is there, which may be read several times.

    Raises:
        DataError: there is nothing, a folder, a pipe or a device; it says what there is.
    """
    if is_folder(path):
        inside = sorted(entry.name for entry in path.iterdir() if is_file(entry))[:10]
        held = ", ".join(inside) if inside else "no files"
        raise DataError(f"{path}: a folder where a file was expected; it holds {held}")
    if not exists(path):
        raise DataError(f"{path}: {missing_path(path)}")
    if not is_file(path):
        raise DataError(
            f"{path}: a pipe or a device where a file was expected, because files are read several times; save its "
            "content to a file (`predict` alone reads pipes, as standard input)"
        )
    return path


def _content(path: Path) -> str:
    """The sha256 of the file, after a look at whether it can be what it claims to be."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PK\x03\x04":
            raise DataError(f"{path}: a zip file or a spreadsheet; unpack it or export it as csv")
        return sha256_file(path)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}") from error


def file_records(
    path: Path, layout: Format, how: ReadOptions, *, wanted: Sequence[str] | None = None
) -> AbstractContextManager[Records]:
    """The rows of a file as its format has them. Of parquet only the ``wanted`` columns are read; None: all."""
    encoding = how.codec
    if layout.delimiter is None and not how.has_header:
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
    cut = layout.delimiter if how.delimiter is None else how.delimiter
    if cut is None:
        raise DataError(f"{path}: format {layout.name!r} needs a delimiter")
    if len(cut) != 1 or cut in '"\r\n':
        raise DataError(f"{path}: delimiter = {cut!r}: expected one character that is no quote and no line end")
    if layout.quoted:
        return quoted_records(path, delimiter=cut, encoding=encoding, header=how.has_header)
    return plain_records(path, layout, delimiter=cut, encoding=encoding, header=how.has_header)


def column_names(path: Path, how: ReadOptions) -> list[str]:
    """The names that the file's header gives, or its first row.

    Args:
        path: The file.
        how: How it is read.

    Raises:
        DataError: the file cannot be read.
    """
    layout = file_format(how.format, existing_file(path))
    with file_records(path, layout, how) as records:
        return peeked(records)[1]


def peeked(records: Records) -> tuple[Records, list[str]]:
    """The same records, and the names of their columns: those of the header, or of the first row."""
    if records.columns is not None:
        return records, list(records.columns)
    first = next(records.rows, None)
    if first is None:
        return records, []
    return Records(None, chain([first], records.rows)), list(first.cells)


def wanted_columns(plan: ColumnMapping) -> list[str] | None:
    """The columns of a source that a plan reads; None: all."""
    if plan.carried == "all":
        return None
    kept = [] if plan.carried == "none" else plan.carried
    return [*(field.name for field in plan.fields), *kept]


def _write_file(path: Path, layout: Format, how: ReadOptions, plan: ColumnMapping, target: Path) -> tuple[str, ...]:
    with file_records(path, layout, how, wanted=wanted_columns(plan)) as records:
        return _write_rows(records, plan, target)


def _write_rows(records: Records, plan: ColumnMapping, target: Path) -> tuple[str, ...]:
    """Streams the canonical rows into an Arrow file, or raises with every problem that was found; gives the notes."""
    import pyarrow

    if records.columns is not None:
        check_columns(records.columns, plan)
    judge = RowValidator(plan, set() if records.columns is None else set(records.columns))
    texts = [*([] if plan.keep == "none" else [KEPT]), *([FAULT] if plan.skips else [])]
    schema = table_schema([field.column for field in plan.fields], texts).arrow_schema
    with pyarrow.OSFile(str(target), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in in_batches(judge.rows(records.rows), _BATCH):
            stream.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
    return judge.finish()

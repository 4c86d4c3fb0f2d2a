"""Which rows train and which validate.

Owns the description of a data set as a recipe states it, and where its files are looked for. Must not know how files
are laid out, models or training.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import expected_files, files_of_split, named_format
from bert_tasks.data.problems import SKIP_HINT, BadRowsError, Problems, missing_path
from bert_tasks.data.readers import Reading, hub_splits, read_hub, read_table
from bert_tasks.data.set_aside import set_aside
from bert_tasks.data.stored_reading import training_reading
from bert_tasks.data.table import RowTable
from bert_tasks.data.values import LABEL_SEPARATOR
from bert_tasks.errors import DataError
from bert_tasks.paths import is_file, is_folder

_VALIDATION_NAMES = ("validation", "dev", "valid")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where the rows are: one of a hub data set, a folder with train.* and dev.*, or files."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    dataset: str | None = None
    """A data set of the hub."""
    config: str | None = None
    """Its configuration, such as `sst2`."""
    revision: str | None = None
    """Its branch, tag or commit."""
    dir: str | None = None
    """A folder with train.* and dev.* (or validation.*, valid.*)."""
    train: str | None = None
    """A file with the training rows."""
    validation: str | dict[str, str] | None = None
    """A split's name, a file's name in `dir`, or a path, as fits; a table of them gives several named sets. Without it
    the format may know of several (MNLI's matched and mismatched)."""
    format: str | None = None
    """How the files are laid out; without it as their extension says."""
    columns: dict[str, str] = field(default_factory=dict)
    """The task's columns -> those of the files; a CoNLL file's are called by their number, the word's being "0"."""
    validation_share: float = 0.1
    """Share of the training rows that is set aside where no validation rows are given or found; rows with the same
    texts stay together."""
    encoding: str = "utf-8"
    """Of text files; a byte order mark in a file decides its encoding, whatever stands here."""
    delimiter: str | None = None
    """Of csv files, such as `;`."""
    header: bool = True
    """Whether the first line of csv and tsv files names the columns; without a header these are called "0", "1", ..."""
    label_separator: str = LABEL_SEPARATOR
    """What stands between several labels in one cell, such as `|`; lists of JSON or Python need none."""

    on_error: Literal["fail", "skip"] = "fail"
    """What becomes of rows that cannot be used: `fail` names them all and stops; `skip` leaves them out of training and
    validation, counts them, and writes each with its reason to `rejects.jsonl` in the output folder. A label that is
    none of the stated labels stops the run in any case."""

    def __post_init__(self) -> None:
        sources = {"dataset": self.dataset, "dir": self.dir, "train": self.train}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            stated = " and ".join(given) if given else "none of them"
            raise ValueError(f"expected exactly one of dataset, dir, train; {stated} given")
        for name in ("config", "revision"):
            if getattr(self, name) is not None and self.dataset is None:
                raise ValueError(f"{name} belongs to dataset, and {given[0]} is given")
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share = {self.validation_share}: expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training rows, and validation rows by name; the name is empty where there is one unnamed set."""

    train: RowTable
    validation: dict[str, RowTable]


def stored_reading(spec: DataSpec) -> Reading:
    """What a model that is trained on these rows should remember of how they were read."""
    given = Reading(
        columns=spec.columns,
        format=spec.format,
        delimiter=spec.delimiter,
        encoding=spec.encoding,
        header=None if spec.header else False,
        label_separator=None if spec.label_separator == LABEL_SEPARATOR else spec.label_separator,
    )
    return training_reading(given, None if spec.dataset is not None else _places(spec)[0])


def load_splits(
    spec: DataSpec,
    *,
    columns: Sequence[Column],
    seed: int,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
) -> Splits:
    """Reads all splits; `read_table` says what ``labels`` does.

    Raises:
        BadRowsError: one report over all files.
        DataError: if a file, folder or data set cannot be used.
    """
    train, validation = _places(spec)
    shared: dict[str, Any] = {"columns": columns, "names": spec.columns, "format": spec.format}
    shared |= {"labels": labels, "cache_dir": cache_dir, "skips": spec.on_error == "skip"}

    of_files = {name: getattr(spec, name) for name in ("encoding", "delimiter", "header", "label_separator")}

    def read(place: str) -> RowTable:
        if spec.dataset is None:
            return read_table(place, **shared, **of_files)
        return read_hub(spec.dataset, config=spec.config, split=place, revision=spec.revision, **shared)

    tables = _read_all(read, [train, *validation.values()], hint=SKIP_HINT if spec.on_error == "fail" else None)
    if not validation:
        train_rows, validation_rows = set_aside(tables[0], columns, spec.validation_share, seed)
        return Splits(train=train_rows, validation={"": validation_rows})
    return Splits(train=tables[0], validation=dict(zip(validation, tables[1:], strict=True)))


def _read_all(read: Callable[[str], RowTable], places: Iterable[str], *, hint: str | None) -> list[RowTable]:
    tables: list[RowTable] = []
    bad: list[Problems] = []
    for place in places:
        try:
            tables.append(read(place).without_faults())
        except BadRowsError as error:
            bad.extend(error.found)
    if bad:
        raise BadRowsError(bad, hint)
    return tables


def _places(spec: DataSpec) -> tuple[str, dict[str, str]]:
    """Where training and validation rows are read: split names of a hub data set, else paths."""
    stated = {"": spec.validation} if isinstance(spec.validation, str) else spec.validation
    if spec.train is not None:
        return spec.train, {} if stated is None else stated
    if spec.dataset is not None:
        return "train", _hub_validation(spec) if stated is None else stated
    folder = _existing_folder(Path(str(spec.dir)))
    train = _file_in(folder, ("train",), spec.format)
    if train is None:
        raise DataError(f"{folder}: no file {expected_files('train', spec.format)}; {_held(folder)}")
    named = _usual_validation(spec.format, folder) if stated is None else stated
    if named is not None:
        return str(train), {name: str(folder / place) for name, place in named.items()}
    found = _file_in(folder, _VALIDATION_NAMES, spec.format)
    return str(train), {} if found is None else {"": str(found)}


def _usual_validation(format: str | None, folder: Path) -> Mapping[str, str] | None:
    """The format's named sets, if the folder holds any of them."""
    usual = {} if format is None else named_format(format).validation
    return usual if any(is_file(folder / place) for place in usual.values()) else None


def _hub_validation(spec: DataSpec) -> dict[str, str]:
    usual = {} if spec.format is None else named_format(spec.format).hub_validation
    if usual:
        return dict(usual)
    splits = hub_splits(str(spec.dataset), config=spec.config, revision=spec.revision)
    return {"": "validation"} if "validation" in splits else {}


def _existing_folder(folder: Path) -> Path:
    if is_file(folder):
        raise DataError(f"{folder}: a file where a folder was expected; give it as data.train")
    if not is_folder(folder):
        raise DataError(f"{folder}: {missing_path(folder, 'folder')}")
    return folder


def _file_in(folder: Path, splits: Sequence[str], format: str | None) -> Path | None:
    found = [path for split in splits for path in files_of_split(folder, split, format)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder}: {names} could all be meant; state data.train and data.validation")
    return found[0] if found else None


def _held(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"the folder holds {shown}" if names else "the folder is empty"

"""Training and validation rows, their files, and the split for validation.

This module describes a data set in a recipe, searches its files, and decides which rows a random split spreads evenly
and which it keeps together. A split that ignores this reports figures that are too good, because copies of a validation
row are in the training rows, or figures that say nothing, because a rare label is on one side only.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from glob import escape
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.cells import LABEL_SEPARATOR, joined_names
from bert_tasks.data.columns import (
    FOLD_GROUP,
    Column,
    Columns,
    HeadColumns,
    PassthroughColumns,
    first_column,
    has_labels,
    head_column,
)
from bert_tasks.data.formats import expected_files, files_of_split, named_format
from bert_tasks.data.formats.hub import HubSplit, hub_splits
from bert_tasks.data.issues import SKIP_HINT, RowIssues, counted, first_few, missing_path
from bert_tasks.data.kinds import CONTEXT, Answers, Choices, ClassKind, LabelKind, Tags, TextKind, Words
from bert_tasks.data.options import Document, ReadOptions, SplitName
from bert_tasks.data.reading import column_names, column_values, matching_files, read
from bert_tasks.data.rows import Rows
from bert_tasks.data.split_column import SPLIT_COLUMNS, count_splits, is_split_column
from bert_tasks.data.trained_reading import TrainedReading, training_names
from bert_tasks.data.words import context_texts
from bert_tasks.errors import DataError, argument
from bert_tasks.storage import sha256

_GROUP = "group"
DOCUMENT = "document"  # the column with the document of a sentence
_SAMPLE_SEED = 0  # not the run's, so that runs with several seeds are trained on the same rows


def train_validation_split(table: Rows, columns: Columns, share: float, seed: int) -> tuple[Rows, Rows]:
    """Splits rows into training and validation rows.

    Every label is on both sides if there are enough rows of it. Rows with the same texts (see ``row_keys``) stay
    together, as do questions on one context, rows of one group, and the sentences of a document if there are enough
    documents (as many as shares in the whole).

    Raises:
        DataError: There are too few rows or contexts.
    """
    keys = row_keys(table, columns)["text"].tolist()
    groups, group_type = row_groups(table, columns, keys, share)
    parts = divide(row_strata(table, columns), groups, (1 - share, share), seed)
    train, validation = np.flatnonzero(parts == 0).tolist(), np.flatnonzero(parts == 1).tolist()
    if not train or not validation:
        apart = _APART[group_type]
        if group_type == "text" and first_column(columns, ClassKind) is not None:
            apart = f"of one class {apart}"
        raise DataError(
            f"{table.source}: too few rows to split off validation rows ({counted(len(table), 'row')}, no two {apart})"
            ". Add rows or set data.validation"
        )
    return table.select(train), table.select(validation)


# Names of the common property of rows in different groups of a kind.
_APART = {
    "group": "in different groups",
    "context": "on different contexts",
    "question": "on different contexts",
    "document": "with different words",
    "sentence": "with different words",
    "text": "with different texts",
}


def row_groups(table: Rows, columns: Columns, keys: Sequence[int], share: float) -> tuple[Sequence[Hashable], str]:
    """Returns the group of each row whose rows stay together, and a word for groups.

    Groups that share a text are joined, unless too many rows were linked so.

    Args:
        keys: Digests of the rows' texts.
        share: Share of the rows to split off. Contexts and documents are groups if there are enough of them.
    """
    names = table.rows.column_names
    if FOLD_GROUP in names:
        return _linked(_or_own(table.rows.values(FOLD_GROUP)), keys, share), "group"
    grouped = first_column(columns, Answers, Choices, Tags)
    if grouped is not None:
        name, noun = _group_of(grouped)
        if isinstance(grouped.type, Tags) and CONTEXT in names and any(table.rows.values(CONTEXT)):
            name, noun = CONTEXT, "context"  # as for answers
        values = []
        if name in names:
            values = table.rows.values(name)
        # Answers are always grouped by their context, or a model is asked about contexts that it was trained on. For
        # the others it depends on the number of groups: one of two documents would be half of the rows.
        if noun != name and len(set(values)) * share < 1:
            return keys, noun
        return _linked(_or_own(values), keys, share), name
    if _GROUP in names:
        return _linked(table.rows.values(_GROUP), keys, share), "group"
    return keys, "text"


def _group_of(column: Column) -> tuple[str, str]:
    """Returns the column whose rows stay together beside a column, and the word for the groups of rows without it."""
    if isinstance(column.type, Tags):
        return DOCUMENT, "sentence"
    if isinstance(column.type, Answers):
        return CONTEXT, "context"
    return CONTEXT, "question"


def _or_own(groups: Iterable[str | None]) -> list[Hashable]:
    """Returns the groups, with a separate group for each row that has none."""
    own: list[Hashable] = []
    for index, group in enumerate(groups):
        if group is None or not group.strip():
            own.append(index)
        else:
            own.append(group)
    return own


_KEYS = np.dtype([("text", np.uint64), ("label", np.uint64), ("empty", np.bool_)])


def row_keys(table: Rows, columns: Columns) -> NDArray[Any]:
    """Returns for each row digests of its texts and label, and a flag for empty texts.

    They need 17 bytes per row. Rows with the same texts, in the sense of ``data_report``, have the same 64 bits in the
    field ``text``. Two of 100 million different texts have them by chance once in 3,700 such data sets.
    """
    if isinstance(columns, Mapping):
        return _shared_keys(table, columns)
    has_choices = first_column(columns, Choices) is not None  # they may belong to an optional question
    texts = [column for column in columns if isinstance(column.type, TextKind) and (column.required or has_choices)]
    has_words = first_column(columns, Words) is not None  # they may have a context
    labels = [column.name for column in columns if column.is_label]
    keys = np.empty(len(table), dtype=_KEYS)
    for index, row in enumerate(table):
        folded = []
        is_empty = False
        for column in texts:
            parts: Sequence[str] = ()
            if row.get(column.name) is not None:
                parts = column.type.texts(row[column.name])
            # casefold also unites "ß" and "ss", which lower does not.
            text = " ".join(parts).strip().casefold()
            is_empty = is_empty or (column.required and text == "")
            folded.append(text)
        if has_words:
            folded += [text.strip().casefold() for text in context_texts(row).values()]
        # The null character separates the texts, so that ("a b", "c") and ("a", "b c") differ.
        keys[index] = (_digest("\0".join(folded)), _digest(repr([row.get(name) for name in labels])), is_empty)
    return keys


def _digest(text: str) -> int:
    """Returns the first 64 bits of a text's digest. Python's own ``hash`` differs from process to process."""
    return int(sha256(text)[:16], 16)


def _shared_keys(table: Rows, heads: Mapping[str, HeadColumns]) -> NDArray[Any]:
    """Returns the keys of rows that several tasks share, by the texts of all tasks. Labels do not count."""
    keys = np.empty(len(table), dtype=_KEYS)
    for index, row in enumerate(table):
        folded = []
        is_empty = False
        for name, head in heads.items():
            values = row[head_column(name)]
            text = ""  # of a row that the task does not read, which is no empty text
            if values is not None:
                text = " ".join(_texts_of(values, head.columns)).strip().casefold()
                is_empty = is_empty or text == ""
            folded.append(text)
        keys[index] = (_digest("\0".join(folded)), 0, is_empty)
    return keys


def _texts_of(row: Mapping[str, Any], columns: Sequence[Column]) -> list[str]:
    """Returns all texts of a row, also those of optional columns."""
    texts: list[str] = []
    for column in columns:
        if isinstance(column.type, TextKind) and row.get(column.name) is not None:
            texts += column.type.texts(row[column.name])
    return texts


def divide(
    strata: Sequence[Sequence[str]], groups: Sequence[Hashable], shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Returns the part of each row, from 0. All rows of a group are in one part.

    Each group goes to the part that it brings nearest to its shares of all rows and of the rows of each stratum, large
    and rare groups first. This is the iterative stratification of Sechidis et al. 2011, "On the Stratification of
    Multi-Label Data" (https://doi.org/10.1007/978-3-642-23808-6_10), for groups instead of rows. Groups whose sizes are
    within a factor of two come in random order. The only group of a stratum goes to the first of two parts, and two
    groups go to both.

    Args:
        strata: Names to spread evenly, for each row.
        groups: Group of each row.
        shares: Share of each part in the rows.
        seed: Seed of the order of the groups.
    """
    units, names = dict[Hashable, int](), dict[str, int]()
    unit_of = np.array([units.setdefault(group, len(units)) for group in groups], np.int64)
    cells = []
    for row, parts in enumerate(strata):
        for name in parts:
            cells.append((row, names.setdefault(name, len(names))))
    rows, columns = np.array(cells, np.int64).reshape(-1, 2).T
    # The last column counts all rows of a group, whatever their strata are.
    rows, columns = np.append(rows, np.arange(len(unit_of))), np.append(columns, np.full(len(unit_of), len(names)))
    # The rows of each group in each stratum, and all of its rows, as a matrix [groups, strata + 1] whose zeros are left
    # out: the groups, columns and values of its entries, by group and column.
    width = len(names) + 1
    entries, entry_counts = np.unique(unit_of[rows] * width + columns, return_counts=True)
    entry_units, entry_columns = np.divmod(entries, width)
    added_rows = entry_counts.astype(np.float64)
    starts = np.searchsorted(entry_units, np.arange(len(units) + 1))
    totals = np.bincount(entry_columns, weights=added_rows, minlength=width)
    smallest = np.full(width, np.inf)
    np.minimum.at(smallest, entry_columns, added_rows)
    targets = np.outer(shares, totals)  # [parts, strata + 1]
    if len(shares) == 2:
        # A tenth of a rare label is less than one row, so the second part wants at least its smallest group, and
        # leaves at least as much to the first.
        targets[1] = np.minimum(np.maximum(targets[1], smallest), totals - smallest)
        targets[0] = totals - targets[1]
    targets[:, -1] = targets[:, :-1].sum(axis=1) * (totals[-1] / max(totals[:-1].sum(), 1))
    targets = np.maximum(targets, 1e-9)  # they are divisors
    missing, part_of = targets.copy(), np.zeros(len(units), np.int64)
    order = np.random.default_rng(seed).permutation(len(units))
    rarity = totals  # of a group, the number of rows of its rarest stratum
    if units:
        rarity = np.minimum.reduceat(totals[entry_columns], starts[:-1])
    size_class = np.frexp(added_rows[entry_columns == len(names)])[1]  # the power of two above the size
    for unit in order[np.lexsort((rarity[order], -size_class[order]))]:  # by size class, then by rarity
        of_unit = slice(starts[unit], starts[unit + 1])
        columns, added = entry_columns[of_unit], added_rows[of_unit]
        # Decrease of the squared distances from the target numbers, relative to these numbers.
        best_part = (added * (2 * missing[:, columns] - added) / targets[:, columns]).sum(axis=1).argmax()
        part_of[unit] = best_part
        missing[best_part, columns] -= added
    return part_of[unit_of]


def _linked(groups: Sequence[Hashable], keys: Sequence[int], share: float) -> Sequence[Hashable]:
    """Joins groups that share a key, unless that links too many rows.

    Groups and keys are the nodes of a graph with an edge for each row. A connected component is a group of the result.
    """
    from scipy.sparse import coo_array, csgraph  # slow to import, and needed for few data sets

    numbers = dict[tuple[str, Hashable], int]()
    group_nodes = [numbers.setdefault(("group", group), len(numbers)) for group in groups]
    key_nodes = [numbers.setdefault(("key", key), len(numbers)) for key in keys]
    graph = coo_array((np.ones(len(groups)), [group_nodes, key_nodes]), shape=(len(numbers), len(numbers)))
    _, components = csgraph.connected_components(graph, directed=False)
    linked: list[int] = components[group_nodes].tolist()
    # Short sentences that many documents hold would make one group of them all.
    most = max([share * len(groups), *Counter(groups).values()])
    if max(Counter(linked).values(), default=0) > most:
        return groups
    return linked


def row_strata(table: Rows, columns: Columns) -> list[Sequence[str]]:
    """Returns the labels, the tenth of the numbers, or the answerability of each row.

    Of several tasks, they are those of the first. Rows without its label are a stratum.
    """
    if isinstance(columns, Mapping):
        return _shared_strata(table, columns)
    for column in columns:
        if isinstance(column.type, LabelKind) and column.name in table.rows.column_names:
            strata = column.type.strata(table.rows.values(column.name))
            if strata is not None:
                return strata
    return [("",)] * len(table)


def _shared_strata(table: Rows, heads: Mapping[str, HeadColumns]) -> list[Sequence[str]]:
    """Returns the strata of rows that several tasks share, which are those of the first task."""
    name, head = next(iter(heads.items()))
    strata: list[Sequence[str]] = [("",)] * len(table)
    rows = table.rows.values(head_column(name))
    for column in head.columns:
        if not isinstance(column.type, LabelKind):
            continue
        labelled = [number for number, row in enumerate(rows) if row is not None and row[column.name] is not None]
        if not labelled:
            continue
        found = column.type.strata([rows[number][column.name] for number in labelled])
        if found is None:
            continue
        for number, names in zip(labelled, found, strict=True):
            strata[number] = names
        return strata
    return strata


VALIDATION_NAMES = ("validation", "dev", "valid")
_SHARD = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Source of the rows, a hub data set, a folder with train.* and dev.*, or files."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    dataset: str | None = None
    """A data set of the hub."""
    config: str | None = None
    """Its configuration, such as `sst2`."""
    revision: str | None = None
    """Its branch, tag or commit."""
    dir: str | None = None
    """A folder with train.* and dev.* (or validation.*, valid.*)."""
    train: str | tuple[str, ...] | None = None
    """A file with the training rows, several files, or a pattern such as `part-*.csv`."""
    validation: str | dict[str, str] | None = None
    """A split's name, a file's name in `dir`, a path or a pattern of paths. A table of them defines several named
    sets. Without it the format may define several (MNLI's matched and mismatched)."""
    format: str | None = None
    """The format of the files. Default: by their extension."""
    columns: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The task's columns -> columns of the files. CoNLL's are called by their number, the words' column "0".
    `"document.text"` is a text inside an object. Several columns are labels, each 0 or 1, or choices."""
    validation_share: float = 0.1
    """Share of the training rows that is used for validation if there are no validation rows. Rows with the same texts
    stay together."""
    max_rows: int | None = None
    """The number of training rows for a quick try, a random sample that is the same for every seed and keeps the order
    of the rows. It has a row of each label, if there are so many. Validation rows are split off from it, but rows of
    `validation` are all read. Default: all rows."""
    encoding: str = "utf-8"
    """The encoding of text files. A byte order mark in a file takes precedence."""
    delimiter: str | None = None
    """The delimiter of csv files, such as `;`."""
    header: bool = True
    """The first line of csv and tsv files names the columns. Without a header they are called "0", "1", ..."""
    label_separator: str = LABEL_SEPARATOR
    """Separator of several labels in one cell, such as `|`. Lists in JSON or Python form need none."""
    split_column: str | None = None
    """Column of `train` with the split of each row: train, dev (or validation, valid, val) or test. The dev rows are
    used for validation, and the test rows are not read. `evaluate --split-column` evaluates on them."""
    document: Document = "blank-line"
    """Document in a file of text (.txt), which is the lines between blank lines, a line, or the file. Each line of a
    document is a sentence."""

    tasks: "dict[str, DataSpec]" = field(default_factory=dict)
    """The rows of tasks with separate data. Set them in the sections `[tasks.NAME.data]`."""
    on_error: Literal["fail", "skip"] = "fail"
    """Action for rows that cannot be used. `fail` names them all and stops. `skip` skips them in training and
    validation, counts them, and writes each with its reason to `rejects.jsonl` in the output folder. An unknown label
    always stops the run."""

    def __post_init__(self) -> None:
        sources = {"dataset": self.dataset, "dir": self.dir, "train": self.train}
        present = [name for name, value in sources.items() if value is not None]
        if self.tasks and not present:
            return
        if not present:
            raise ValueError("expected exactly one of dataset, dir, train, but none of them is set")
        if len(present) > 1:
            raise ValueError(f"expected exactly one of dataset, dir, train, but {' and '.join(present)} are set")
        # An empty path is the current folder for Python, which nobody means.
        if not sources[present[0]] or (isinstance(self.train, tuple) and "" in self.train):
            noun = "data set" if present[0] == "dataset" else "path"
            raise ValueError(f"{present[0]} is empty. Name a {noun}")
        for name in ("config", "revision"):
            if getattr(self, name) is not None and self.dataset is None:
                raise ValueError(f"{name} belongs to dataset, but {present[0]} is set")
        if self.split_column is not None and (self.train is None or self.validation is not None):
            reason = "train is not" if self.train is None else "validation names another file"
            raise ValueError(f"split_column divides the rows of train, but {reason} set. Remove one of them")
        object.__setattr__(self, "columns", joined_names(self.columns))  # the class is frozen
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share = {self.validation_share} is not a share between 0 and 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows = {self.max_rows} is no number of rows. Expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training rows, and validation rows by name, which is empty for one unnamed set.

    Attributes:
        held_out: Rows of a fold, which the run does not read.
        division: Description of the division into folds, in words.
    """

    train: Rows
    validation: dict[str, Rows]
    held_out: Rows | None = None
    division: str = ""

    def labelled(self, name: str, head: HeadColumns) -> "Splits":
        """Returns the rows of one of several tasks that have its label."""
        validation = {key: table.of_head(name).labelled(head.columns) for key, table in self.validation.items()}
        return Splits(train=self.train.of_head(name).labelled(head.columns), validation=validation)


def trained_names(spec: DataSpec, columns: Columns) -> dict[str, str]:
    """Returns the names of columns that a model trained on these rows remembers."""
    if isinstance(columns, Mapping):
        return {}  # each task has the names of its columns
    return training_names(_read_options(spec), _first_training_file(spec), columns)


def trained_reading(spec: DataSpec) -> TrainedReading:
    """Returns how the training rows are read, which a model trained on them remembers.

    Tasks with rows of their own may read different files, so that nothing is remembered of them.
    """
    if spec.tasks:
        return TrainedReading()
    return TrainedReading.of(_read_options(spec), _first_training_file(spec), spec.on_error)


def _first_training_file(spec: DataSpec) -> Path | None:
    """Returns the file from which the options and the names of columns are remembered. None for the hub's rows."""
    if spec.dataset is not None:
        return None
    names, _ = split_files(spec)
    return matching_files(names[0])[0]


def _read_options(spec: DataSpec) -> ReadOptions:
    """Returns the options of reading that a data set states, without the split, which differs between its tables."""
    options = {option.name: getattr(spec, option.name) for option in fields(ReadOptions) if option.name != "split"}
    if spec.document == "blank-line":
        options["document"] = None  # the default of training, and not of prediction
    return ReadOptions(**options)


def load_splits(
    spec: DataSpec,
    *,
    columns: Columns,
    seed: int,
    **options: Any,
) -> Splits:
    """Reads splits as ``load_tables`` does, and splits off missing validation rows."""
    if spec.tasks and isinstance(columns, Mapping):
        return _load_tasks(spec, columns, seed=seed, **options)
    tables = load_tables(spec, columns=columns, **options)
    if tables.validation:
        return tables
    train, validation = train_validation_split(tables.train, columns, spec.validation_share, seed)
    return Splits(train=train, validation={"": validation})


def _load_tasks(spec: DataSpec, heads: Mapping[str, HeadColumns], **options: Any) -> Splits:
    """Reads the rows that tasks share, and the rows of tasks with separate data."""
    shared = {name: head for name, head in heads.items() if name not in spec.tasks}
    sources = []
    if shared:
        sources.append(("data", replace(spec, tasks={}), shared))
    for name, head in heads.items():
        if name in spec.tasks:
            sources.append((f"tasks.{name}.data", spec.tasks[name], {name: head}))
    splits, bad = [], RowIssues()
    for section, source, of_source in sources:
        try:
            splits.append(load_splits(source, columns=of_source, **options))
        except RowIssues as error:
            bad.extend(error)
            bad.advice = error.advice.replace("data.on_error", f"{section}.on_error")
    bad.raise_if_any()
    return joined_splits(splits)


def joined_splits(splits: Sequence[Splits]) -> Splits:
    """Joins the rows of several sources, one after another.

    Raises:
        DataError: The sources have different validation sets.
    """
    names = splits[0].validation.keys()
    for other in splits[1:]:
        if other.validation.keys() != names:
            sets = f"{_named_sets(names)} versus {_named_sets(other.validation)}"
            raise DataError(
                f"{splits[0].train.source} and {other.train.source} have different validation sets ({sets}). Name the "
                "same sets for each task"
            )
    validation = {name: Rows.joined([each.validation[name] for each in splits]) for name in names}
    return Splits(train=Rows.joined([each.train for each in splits]), validation=validation)


def _named_sets(names: Collection[str]) -> str:
    """Returns the names of validation sets in words."""
    if any(names):
        return " and ".join(names)
    return "one without a name"


def load_tables(
    spec: DataSpec,
    *,
    columns: Columns,
    labels: Sequence[str] | None = None,
    cache_dir: Path | None = None,
    unlabelled: bool = False,
    group: Column | None = None,
    group_name: str = "",
    passthrough: PassthroughColumns = "none",
) -> Splits:
    """Reads all splits, perhaps without validation rows.

    Args:
        labels, passthrough: See ``read``.
        unlabelled: Training rows may lack labels.
        group: A further column of the training rows, which is called ``group_name`` in the files.

    Raises:
        RowIssues: One report over all files.
        DataError: A file, folder or data set cannot be used.
    """
    train, validation = split_files(spec)
    if spec.dataset is None:
        files: list[str] = []
        for name in train:
            files += map(str, matching_files(name))
        train = tuple(dict.fromkeys(files))  # two patterns may match one file
    notes: tuple[str, ...] = ()
    if spec.split_column is not None:
        counts = split_counts(spec, spec.split_column)
        validation = {}
        if counts["validation"]:
            validation = {"": train[0]}
        notes = split_notes(counts, spec.split_column)
    shared: dict[str, Any] = {"labels": labels, "cache_dir": cache_dir, "skip_errors": spec.on_error == "skip"}
    shared["passthrough"] = passthrough

    def read_one(name: str, split: SplitName) -> Rows:
        """Reads one file, or one split of a data set of the hub."""
        is_train = split == "train"
        # With require_labels the lines of a corpus form documents. Without it each line is a text, as for prediction.
        shared["require_labels"] = not (is_train and unlabelled and has_labels(columns))
        read_columns, names = columns, joined_names(spec.columns)
        if is_train and group is not None and not isinstance(columns, Mapping):
            read_columns, names = [*columns, group], {**names, group.name: group_name}
        if spec.dataset is None:
            reading = replace(_read_options(spec), columns=names, split=split)
            return read(name, read_columns, reading, **shared)
        source = HubSplit(dataset=spec.dataset, config=spec.config, split=name, revision=spec.revision)
        return read(source, read_columns, ReadOptions(columns=names, format=spec.format), **shared)

    # The problems of all files are collected before the first of them ends the run, so that a user corrects them once.
    bad = RowIssues()

    def read_all(names: Iterable[str], split: SplitName) -> list[Rows]:
        """Reads several files, and collects the problems of their rows in ``bad``."""
        tables = []
        for name in names:
            try:
                tables.append(read_one(name, split).without_errors())
            except RowIssues as error:
                bad.extend(error)
        return tables

    trained = read_all(train, "train")
    sets = {}
    for name, source in validation.items():
        names = [source]
        if spec.dataset is None:
            names = list(map(str, matching_files(source)))
        sets[name] = read_all(names, "validation")
    if spec.on_error == "fail":
        bad.advice = SKIP_HINT
    bad.raise_if_any()
    joined = {name: Rows.joined(tables) for name, tables in sets.items()}
    train_rows = sampled(Rows.joined(trained), columns, spec.max_rows)
    train_rows = replace(train_rows, notes=(*train_rows.notes, *notes))
    return Splits(train=train_rows, validation=joined)


def split_counts(spec: DataSpec, column: str) -> Counter[SplitName]:
    """Returns the number of rows in each split of the training file.

    Args:
        spec: Where the file is.
        column: The column with the split of each row.

    Raises:
        DataError: The file has no such column or no training rows, or there are several files.
    """
    files = _training_files(spec)
    if len(files) != 1:
        raise DataError(f"split_column = {column!r} divides the rows of one file, but train names {len(files)} files")
    return count_splits(column_values(files[0], _read_options(spec), column), column, str(files[0]))


def _training_files(spec: DataSpec) -> list[Path]:
    """Returns the files with the training rows, in the order of their patterns."""
    files: list[Path] = []
    for name in split_files(spec)[0]:
        files += matching_files(name)
    return files


def split_notes(counts: Mapping[SplitName, int], column: str) -> tuple[str, ...]:
    """Returns the note on the test rows, which training does not read."""
    if counts["test"] == 0:
        return ()
    rows = counted(counts["test"], "test row")
    option = argument("split_column", column)
    return (
        f"{rows} (by the column {column!r}) left out of training. Evaluate the model on the same file with {option}",
    )


def unread_splits(spec: DataSpec) -> list[str]:
    """Returns notes on columns that divide the training rows, which the settings do not use.

    Only columns with a usual name are read.
    """
    if spec.dataset is not None or spec.split_column is not None or spec.tasks:
        return []
    reading, notes = _read_options(spec), list[str]()
    used = joined_names(spec.columns).values()
    for file in _training_files(spec):
        for name in column_names(file, reading):
            if name not in used and name.strip().lower() in SPLIT_COLUMNS:
                values = set(map(str, column_values(file, reading, name)))
                notes += _unread_split_notes(name, values, file.name)
    return notes


def _unread_split_notes(column: str, values: Collection[str], source: str) -> list[str]:
    """Returns the note on a column of splits or folds that nothing reads, if it is one.

    Such a column is easy to miss, and then the official test rows are trained on.
    """
    if is_split_column(column, values):
        named = ", ".join(sorted(values))
        setting = f'data.split_column = "{column}"'
        return [f"{source}: the column {column!r} divides the rows ({named}), but training uses all. Set {setting}"]
    if len(values) > 1 and all(value.isdecimal() for value in values):
        advice = "To validate on one of them, write 'train' and 'dev' into a column and name it in data.split_column"
        return [f"{source}: the column {column!r} seems to number folds, but it is not read. {advice}"]
    return []


def sampled(table: Rows, columns: Columns, count: int | None) -> Rows:
    """Returns a random sample of the rows of a table in their order, with a row of each label if there are so many.

    Args:
        table: The rows.
        columns: The columns that were read, which say what the labels are.
        count: Number of rows of the sample. None keeps all rows, as does a number that is not lower than theirs.
    """
    if count is None or count >= len(table):
        return table
    strata = row_strata(table, columns)
    order = np.random.default_rng(_SAMPLE_SEED).permutation(len(table)).tolist()
    seen = set[str]()
    first_of_label, others = list[int](), list[int]()
    for row in order:
        if seen.issuperset(strata[row]):
            others.append(row)
        else:
            first_of_label.append(row)
        seen.update(strata[row])
    # The rows with new labels come first, so that the sample has as many labels as its size permits.
    kept = sorted([*first_of_label, *others][:count])
    note = f"a random sample of {count:,} of {counted(len(table), 'row')} (max_rows)"
    return replace(table.select(kept), notes=(*table.notes, note), sample=note)


def split_files(spec: DataSpec) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the sources of rows, as split names of a hub data set, or as paths and patterns of paths.

    Returns:
        The sources of the training rows. Then the name of each validation set -> its source, of which there may be
        none.

    Raises:
        DataError: The folder has no training file, or several files that are not parts of one split.
    """
    sources = spec.validation
    if isinstance(sources, str):
        sources = {"": sources}
    format = None
    if spec.format is not None:
        format = named_format(spec.format)
    if spec.train is not None:
        names = spec.train
        if isinstance(names, str):
            names = (names,)
        if sources is None:
            sources = {}
        return names, sources
    if spec.dataset is not None:
        if sources is None and format is not None and format.hub_validation:
            sources = dict(format.hub_validation)
        if sources is None:
            sources = {}
            if "validation" in hub_splits(spec.dataset, config=spec.config, revision=spec.revision):
                sources = {"": "validation"}
        return ("train",), sources
    folder = Path(str(spec.dir))
    if folder.is_file():
        raise DataError(f"{folder}: a file where a folder was expected")
    if not folder.is_dir():
        raise DataError(f"{folder}: {missing_path(folder, 'folder')}")
    train = _file_in(folder, ("train",), spec.format)
    if train is None:
        raise _no_training_file(folder, spec.format)
    if sources is None and format is not None:
        named = dict(format.validation)
        if any((folder / name).is_file() for name in named.values()):
            sources = named
    if sources is not None:
        return (train,), {name: str(folder / file) for name, file in sources.items()}
    validation = _file_in(folder, VALIDATION_NAMES, spec.format)
    if validation is None:
        return (train,), {}
    return (train,), {"": validation}


def _no_training_file(folder: Path, format: str | None) -> DataError:
    """Returns the error of a folder without training rows, with what it holds."""
    contents = "The folder is empty"
    names = sorted(entry.name for entry in folder.iterdir())
    if names:
        contents = f"The folder holds {first_few(names, 10)}"
    advice = f"Name a file, or several by a pattern such as {str(folder / '*.csv')!r}"
    return DataError(f"{folder}: no file {expected_files('train', format)}. {contents}. {advice}")


def _pattern_of_shards(paths: Sequence[Path]) -> str | None:
    """Returns the pattern of several files that are a split together, such as the hub's train-00000-of-00002.parquet.

    They are the files of a folder with the name of the split, or have a number.
    """
    if len(paths) < 2 or len({(path.parent, path.suffix) for path in paths}) > 1:
        return None
    # The pattern is expanded by glob, so a bracket in the name of a folder must stand for itself.
    folder, extension = escape(str(paths[0].parent)), paths[0].suffix
    if paths[0].parent.name in ("train", *VALIDATION_NAMES):
        return f"{folder}/*{extension}"
    stems = {_SHARD.sub("", path.stem) for path in paths}
    is_numbered = all(_SHARD.search(path.stem) for path in paths)
    if not is_numbered or len(stems) != 1:
        return None
    return f"{folder}/{stems.pop()}-*-of-*{extension}"


def _file_in(folder: Path, splits: Sequence[str], format: str | None) -> str | None:
    """Returns the file of a split, or the pattern of its files, or None if the folder has neither."""
    paths: list[Path] = []
    for split in splits:
        paths += files_of_split(folder, split, format)
    pattern = _pattern_of_shards(paths)
    if pattern is not None:
        return pattern
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{folder}: {names} all match. Set data.train and data.validation")
    if not paths:
        return None
    return str(paths[0])

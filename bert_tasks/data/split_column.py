"""A column that says to which split each row of a file belongs.

Data sets are often one file with such a column. Training then reads its train rows, validation its dev rows, and
evaluation its test rows, so that one path names all three. This module owns the usual names of splits, the rows of one
split, and the numbers of rows in each.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bert_tasks.data.batch import MISSING, Batch, Batches, Record
from bert_tasks.data.issues import did_you_mean, first_few, shortened
from bert_tasks.data.options import SplitName
from bert_tasks.errors import DataError

# Names that people give to the column, in lower case.
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "fold", "dataset_split", "data_split", "usage")

_VALUES: Mapping[str, SplitName] = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "tst", "held-out", "heldout"), "test"),
}
_SHOWN = 5


def split_name(cell: Any) -> SplitName | None:
    """Returns the split that a cell names, in any letter case, or None.

    Examples:
        >>> split_name("Dev")
        'validation'
    """
    return _VALUES.get(str(cell).strip().lower())


def is_split_column(name: str, values: Iterable[Any]) -> bool:
    """Returns True if the values name several splits, with training rows unless the column is called so.

    Args:
        name: Name of the column.
        values: Its different values.
    """
    # Another value, such as "maybe", shows that the column is something else.
    splits = {split_name(value) for value in values}
    if len(splits) < 2 or None in splits:
        return False
    return "train" in splits or name.strip().lower() in SPLIT_COLUMNS


def count_splits(values: Iterable[Any], column: str, source: str) -> Counter[SplitName]:
    """Returns the number of rows in each split.

    Args:
        values: The cells of the column.
        column: Name of the column.
        source: Name of the rows in messages.

    Raises:
        DataError: A cell names no split, or there are no training rows.
    """
    counts = Counter[Any](map(_key, values))
    unknown = [name for name in counts if split_name(name) is None]
    if unknown:
        found = first_few(map(shortened, unknown), _SHOWN)
        raise DataError(
            f"{source}: the column {column!r} of the splits has the values {found}. Write one of {', '.join(_VALUES)} "
            "into each row, or read all rows, without split_column."
        )
    splits = Counter[SplitName]()
    for name, count in counts.items():
        split = split_name(name)
        if split is not None:
            splits[split] += count
    if splits["train"] == 0:
        found = ", ".join(f"{count} {name}" for name, count in splits.items())
        raise DataError(
            f"{source}: the column {column!r} names no training rows (it has {found} rows). Write 'train' into some "
            "rows, or name a file with training rows."
        )
    return splits


def _key(value: Any) -> str:
    """Returns the name under which a cell is counted. No value is counted as an empty one."""
    if value is None:
        return ""
    return str(value)


def of_split(batches: Batches, column: str, split: SplitName | None, source: str) -> Batches:
    """Returns the rows of one split, of the test rows by default.

    Raises:
        DataError: The source has no such column.
    """
    if batches.columns and column not in batches.columns:
        raise missing_column(column, batches.columns, source)
    return batches._replace(batches=_batches_of_split(batches.batches, column, split, source))


def _batches_of_split(batches: Iterable[Batch], column: str, split: SplitName | None, source: str) -> Iterator[Batch]:
    """Yields the rows of one split. A split without rows is an error at the end."""
    wanted: SplitName = "test"
    if split is not None:
        wanted = split
    found = False
    seen = Counter[str]()
    for batch in batches:
        cells = batch.cells.get(column, [MISSING] * len(batch))
        names: list[SplitName | None] = []
        for row, cell in enumerate(cells):
            # A row that cannot be read belongs to the training rows, where it is reported once.
            if row in batch.issues:
                names.append("train")
                continue
            if cell is MISSING:
                raise missing_column(column, batch.record(row).cells, f"{source}:{batch.lines[row]}")
            names.append(split_name(cell))
            if names[-1] != wanted:
                seen[str(cell)] += 1
        of_wanted = batch.where([name == wanted for name in names])
        if len(of_wanted) > 0:
            found = True
            yield of_wanted
    if not found:
        values = first_few(map(repr, seen), _SHOWN)
        raise DataError(f"{source}: no {wanted} rows. The column {column!r} has the values {values}.")


def rows_of_split(rows: Iterable[Any], column: str, split: SplitName | None, source: str) -> list[Any]:
    """Returns the rows in memory of one split, of the test rows by default.

    Raises:
        DataError: A row has no such column.
    """
    records = []
    for number, row in enumerate(rows, start=1):
        cells: Mapping[str, Any] = {}  # a text or a tuple has no column of splits
        if isinstance(row, Mapping):
            cells = row
        records.append(Record(number, cells))
    of_split: list[Any] = []
    for batch in _batches_of_split([Batch.of(records)], column, split, source):
        of_split += [batch.record(row).cells for row in range(len(batch))]
    return of_split


def missing_column(column: str, present: Iterable[str], source: str) -> DataError:
    """Returns the error of a source without the column of splits."""
    names = list(present)
    problem = f"{source}: no column {column!r}, which would name the split of each row{did_you_mean(column, names)}"
    mark = "" if problem.endswith("?") else "."
    return DataError(f"{problem}{mark} The columns are {', '.join(map(repr, names))}")

"""Whether a guessed task can be trained on the rows of its files, and what a recipe must state for that.

Owns the choice between stopping at rows that cannot be used and leaving them out, and whether the labels must be
stated. Must not know how a task is guessed or how a recipe is written.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bert_tasks.data.checks import check_splits, named_splits
from bert_tasks.data.columns import Column
from bert_tasks.data.kept import FAULT
from bert_tasks.data.problems import BadRowsError
from bert_tasks.data.splits import DataSpec, Splits, load_splits
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

_LONGEST_REASON = 160


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a recipe must state so that ``check`` and ``train`` accept its rows.

    Attributes:
        left_out: how many rows cannot be used; above 0 the recipe needs ``on_error = "skip"``.
        rows: how many there are, with those.
        states_labels: whether the labels must be stated, because they cannot be taken from the rows.
        notes: what is wrong, and where.
    """

    left_out: int = 0
    rows: int = 0
    states_labels: bool = False
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> str:
        return share(self.left_out, self.rows)


def try_rows(
    spec: DataSpec, task: str, settings: Mapping[str, Any], *, known: Sequence[str], found: Sequence[str], seed: int
) -> Trial:
    """Reads all rows as a run will, and checks them.

    Args:
        spec: The files and how they are read.
        task: The name of the task.
        settings: Its settings, without labels.
        known: Labels that the format has; empty: they are taken from the rows.
        found: Labels that the rows seem to have.
        seed: Of the rows that are set aside for validation.

    Returns:
        What the recipe must state.

    Raises:
        DataError: The rows cannot be trained on, whatever is stated.
    """
    from bert_tasks.recipe import load_task_class  # imported late: torch comes with the tasks

    columns = load_task_class(task)(**settings).columns
    try:
        return _trial(_splits(spec, columns, seed, known))
    except DataError as error:
        if known or not found:
            raise
        refused = error
    try:
        return _trial(_splits(spec, columns, seed, found), refused)
    except DataError:
        raise refused from None


def _splits(spec: DataSpec, columns: Sequence[Column], seed: int, labels: Sequence[str]) -> Splits:
    """The checked rows, without those that cannot be used."""
    try:
        splits = load_splits(spec, columns=columns, seed=seed, labels=labels)
    except BadRowsError:
        splits = load_splits(replace(spec, on_error="skip"), columns=columns, seed=seed, labels=labels)
    check_splits(splits, columns=columns, labels=labels)
    return splits


def _trial(splits: Splits, refused: DataError | None = None) -> Trial:
    """What was read; ``refused`` says why it could not be read without stated labels."""
    by_source: dict[str, list[RowTable]] = {}
    for _, table in named_splits(splits):
        by_source.setdefault(table.source, []).append(table)  # rows that were set aside are of the same source
    left_out = {source: tables[0].faults for source, tables in by_source.items()}
    count = sum(len(faults) for faults in left_out.values() if faults is not None)
    return Trial(
        left_out=count,
        rows=count + sum(len(table) for tables in by_source.values() for table in tables),
        states_labels=refused is not None,
        notes=(*_refusal(refused), *_notes(by_source)),
    )


def _refusal(refused: DataError | None) -> Iterator[str]:
    if refused is not None:
        lines = [line.strip() for line in str(refused).splitlines()]
        yield f"settings.labels is stated, because: {lines[-1] if len(lines) > 1 else lines[0]}"


def _notes(by_source: Mapping[str, Sequence[RowTable]]) -> Iterator[str]:
    for source, tables in by_source.items():
        faults = tables[0].faults
        if faults is None:
            continue
        rows = len(faults) + sum(map(len, tables))
        first = json.loads(faults[0][FAULT])
        reason = (
            first["reason"] if len(first["reason"]) <= _LONGEST_REASON else f"{first['reason'][:_LONGEST_REASON]}..."
        )
        yield (
            f"{source}: {share(len(faults), rows)} cannot be used and will be left out, the first in line "
            f"{first['line']}: {reason}"
        )


def share(count: int, of: int) -> str:
    """A count of rows in words."""
    return f"{count} of {of} rows ({count / of:.0%})"

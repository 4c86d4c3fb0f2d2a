"""Folds of cross-validation, with training and validation rows for each.

Each row is held out in exactly one fold, and predicted by a model that did not see it. This holds only if rows that
repeat each other are in one fold, so the rows are divided by groups (``splits.row_groups``, ``splits.divide``).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bert_tasks.data.columns import FOLD_GROUP, Column, first_column
from bert_tasks.data.features import Numbers
from bert_tasks.data.issues import counted, first_few
from bert_tasks.data.kinds import Answers, ClassKind, ColumnKind, Label, Labels, Number
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits, divide, row_groups, row_keys, row_strata, train_validation_split
from bert_tasks.errors import DataError

_SHOWN = 3  # labels in a message
_ARTICLE = "title"  # SQuAD's name of the article that a question is about
# Kinds whose strata the folds spread evenly -> the name of the strata.
_SPREAD: Mapping[type[ColumnKind], str] = {
    Label: "labels",
    Labels: "sets of labels",
    Number: "tenths of the numbers",
    Answers: "questions with and without an answer",
}
_TOGETHER = {
    "group": "rows of one group",
    "context": "rows on one context",
    "question": "rows with the same texts",
    "document": "sentences of one document",
    "sentence": "sentences with the same words",
    "text": "rows with the same texts",
}


@dataclass(frozen=True, kw_only=True)
class Folds:
    """The folds of a table.

    Attributes:
        numbers: Fold of each row, from 1.
        summary: Description of values spread evenly and rows kept together.
    """

    numbers: Numbers
    summary: str


def group_column(columns: Sequence[Column], group_name: str | None) -> tuple[Column | None, str]:
    """Returns the further column that keeps rows together, and its name in the files.

    Questions of one article belong together if the files name it.
    """
    if group_name is not None:
        return Column(name=FOLD_GROUP, kind="id"), group_name
    if first_column(columns, Answers) is None:
        return None, ""
    return Column(name=FOLD_GROUP, kind="id", required=False), _ARTICLE


def fold_splits(
    tables: Splits, columns: Sequence[Column], folds: Folds, fold: int, *, share: float, seed: int
) -> Splits:
    """Returns the splits in which one fold is held out and the others train.

    Without validation rows a share of the others selects the best model, so that no choice depends on the rows that are
    held out.

    Args:
        tables: All rows, from ``load_tables``.
        fold: Number of the fold, from 1.
        share, seed: Share and seed of the validation rows.

    Raises:
        DataError: There are too few rows for the share.
    """
    # Parts of one table share its features, so that the rows are tokenised once for all folds.
    held_out = tables.train.select_part(np.flatnonzero(folds.numbers == fold).tolist())
    train = tables.train.select_part(np.flatnonzero(folds.numbers != fold).tolist())
    validation = tables.validation
    if not validation:
        train, rows = train_validation_split(train, columns, share, seed)
        validation = {"": rows}
    return Splits(train=train, validation=validation, held_out=held_out, division=folds.summary)


def make_folds(table: Rows, columns: Sequence[Column], *, count: int, seed: int) -> Folds:
    """Divides rows into folds, each row into one.

    Rows of one group, context or document stay together (see ``row_groups``), and rows with the same texts, unless too
    many groups share texts. The summary then counts the rows whose texts are also in other folds. The folds have equal
    shares of labels, sets of labels, tenths of numbers, or questions with and without answers.

    Args:
        count: Number of folds.
        seed: Selects one of the possible divisions.

    Raises:
        DataError: There are too few rows or groups, or a label that only one fold would have.
    """
    keys = row_keys(table, columns)["text"].tolist()
    groups, group_type = row_groups(table, columns, keys, 1 / count)
    units = len(set(groups))
    if units < count:
        sizes = f"{counted(len(table), 'row')} and {counted(units, f'different {group_type}')}"
        raise DataError(f"{table.source}: {sizes} are too few for {count} folds, as a {group_type} is never divided")
    strata = row_strata(table, columns)
    numbers = divide(strata, groups, [1 / count] * count, seed)
    if len(np.unique(numbers)) < count:
        raise DataError(
            f"{table.source}: {count} folds would leave one empty, as a {group_type} is never divided. Set fewer folds"
        )
    summary = f"{count} folds: "
    column = first_column(columns, *_SPREAD)
    if column is not None:
        if isinstance(column.type, ClassKind):
            _check_labels(strata, numbers, table.source)
        even = next(name for kind, name in _SPREAD.items() if isinstance(column.type, kind))
        summary += f"{even} are spread evenly, "
    summary += f"{_TOGETHER[group_type]} stay together"
    folds = _folds_of([[key] for key in keys], numbers)
    divided = sum(len(folds[key]) > 1 for key in keys)
    if divided > 0:
        has = "row has" if divided == 1 else "rows have"
        summary += f". {divided} {has} texts that are also in other folds, because too many groups share texts"
    return Folds(numbers=numbers + 1, summary=summary)


def _folds_of(values: Iterable[Iterable[Hashable]], numbers: Numbers) -> dict[Hashable, set[int]]:
    """Returns the folds of the rows that have each value."""
    folds: dict[Hashable, set[int]] = {}
    for row, number in zip(values, numbers.tolist(), strict=True):
        for value in row:
            folds.setdefault(value, set()).add(number)
    return folds


def _check_labels(values: Sequence[Sequence[str]], numbers: Numbers, source: str) -> None:
    """Raises DataError if all rows of a label are in one fold."""
    folds = _folds_of(values, numbers)
    names = sorted(set[str]().union(*values))
    # The empty name is the stratum of rows without a label.
    alone = [repr(name) for name in names if name and len(folds[name]) == 1]
    if alone:
        raise DataError(
            f"{source}: one fold would have all rows with the label {first_few(alone, _SHOWN)}, which its model could "
            "not learn. Add such rows of other groups, or remove them"
        )

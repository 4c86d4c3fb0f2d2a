"""Folds of cross-validation: which rows are held out together, and the training and validation rows beside them.

Owns what folds spread evenly and what they keep together. The libraries scikit-learn and iterative-stratification
divide the rows; they are imported where folds are made.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.columns import FOLD_GROUP, Column, first_column
from bert_tasks.data.problems import counted, first_few
from bert_tasks.data.splits import Splits, row_groups, row_keys, train_validation_split
from bert_tasks.data.table import Numbers, RowTable
from bert_tasks.errors import DataError, UsageError

_LIBRARIES = {"sklearn": "scikit-learn", "iterstrat": "iterative-stratification"}
_QUANTILES = 10
_SHOWN = 3  # labels in a message
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
        numbers: the fold of each row, from 1.
        summary: what was spread evenly and kept together, in words.
    """

    numbers: Numbers
    summary: str


def group_column(columns: Sequence[Column], stated: str | None) -> tuple[Column | None, str]:
    """The column beside the task's that keeps rows together, and its name in the files.

    Questions of one article belong together where the files name it.
    """
    if stated is not None:
        return Column(name=FOLD_GROUP, kind="id"), stated
    article = next((column.type.article_column for column in columns if column.type.article_column), None)
    return (None, "") if article is None else (Column(name=FOLD_GROUP, kind="id", required=False), article)


def fold_splits(
    tables: Splits, columns: Sequence[Column], folds: Folds, fold: int, *, share: float, seed: int
) -> Splits:
    """The rows of one fold are held out; the others train.

    Without validation rows a share of the others picks the best model, so that nothing is chosen on the rows that are
    held out.

    Args:
        tables: all rows, as ``load_tables`` gives them.
        fold: from 1.
        share, seed: of the validation rows.

    Raises:
        DataError: there are too few rows for that.
    """
    held_out = tables.train.select_part(np.flatnonzero(folds.numbers == fold).tolist())
    train = tables.train.select_part(np.flatnonzero(folds.numbers != fold).tolist())
    validation = tables.validation
    if not validation:
        train, rows = train_validation_split(train, columns, share, seed)
        validation = {"": rows}
    return Splits(train=train, validation=validation, held_out=held_out, division=folds.summary)


def make_folds(table: RowTable, columns: Sequence[Column], *, count: int, seed: int) -> Folds:
    """Divides rows into folds, each row into one.

    Rows of one group, context or document stay together (see ``row_groups``), and rows with the same texts, unless too
    many groups share texts; the summary then counts the rows whose texts are also in other folds. Spread evenly are
    labels, sets of labels (Sechidis et al. 2011), tenths of numbers, or questions with and without answers.

    Args:
        count: of the folds.
        seed: which of the possible divisions.

    Raises:
        UsageError: a library is not installed.
        DataError: there are too few rows or groups, or a label that only one fold would have.
    """
    missing = [name for module, name in _LIBRARIES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed, needed for folds: pip install '.[folds]'")
    keys = row_keys(table, columns)["text"].tolist()
    groups, kind = row_groups(table, columns, keys, 1 / count)
    numbered: dict[Hashable, int] = {}
    units = np.array([numbered.setdefault(group, len(numbered)) for group in groups], dtype=np.int64)  # of each row
    if len(numbered) < count:
        found = f"{counted(len(table), 'row')}, {counted(len(numbered), f'different {kind}')}"
        raise DataError(f"{table.source}: {found}: too few for {count} folds, as a {kind} is never divided")
    sets = first_column(columns, lambda kind: kind.is_set)
    if sets is not None:
        values = [[] if names is None else list(names) for names in table.rows[sets.name]]
        numbers, even = _by_sets(values, units, count, seed), "sets of labels"
    else:
        strata, even = _strata(table, columns)
        numbers = _by_strata(strata, units, count, seed)
        values = [[label] for label in strata] if even == "labels" else []
    if len(np.unique(numbers)) < count:
        raise DataError(f"{table.source}: {count} folds would leave one empty, as a {kind} is never divided: try fewer")
    _check_labels(values, numbers, table.source)
    spread = f"{even} are spread evenly, " if even else ""
    summary = f"{count} folds: {spread}{_TOGETHER[kind]} stay together"
    divided = _count_divided(keys, numbers)
    if divided > 0:
        has = "row has" if divided == 1 else "rows have"
        summary += f"; {divided} {has} texts that are also in other folds, because too many groups share texts"
    return Folds(numbers=numbers + 1, summary=summary)


def _count_divided(keys: Sequence[int], numbers: Numbers) -> int:
    """The number of rows whose texts are also in another fold."""
    folds: dict[int, set[int]] = {}
    for key, number in zip(keys, numbers.tolist(), strict=True):
        folds.setdefault(key, set()).add(number)
    return sum(len(folds[key]) > 1 for key in keys)


def _strata(table: RowTable, columns: Sequence[Column]) -> tuple[list[str], str]:
    """What to spread evenly, for each row, and its name."""
    column = first_column(columns, lambda kind: kind.strata_name)
    if column is None:
        return [""] * len(table), ""
    return column.type.strata(list(table.rows[column.name])), column.type.strata_name


def _by_strata(strata: Sequence[str], units: Numbers, count: int, seed: int) -> Numbers:
    """The fold of each row, from 0."""
    from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold

    codes = np.unique(np.array(strata, dtype=str), return_inverse=True)[1]
    if np.bincount(codes).max() < count:  # too few of each to be spread
        codes = np.zeros_like(codes)
    is_single, has_groups = codes.max() == 0, int(units.max()) + 1 < len(units)
    if has_groups and is_single:
        return _by_size(units, count, seed)
    if has_groups:
        splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    else:
        splitter = (KFold if is_single else StratifiedKFold)(count, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a label has fewer rows than there are folds, and is in some
        parts = [held_out for _, held_out in splitter.split(np.zeros(len(codes)), codes, units)]
    return _numbered(parts, len(codes))


def _by_size(units: Numbers, count: int, seed: int) -> Numbers:
    """The fold of each row, from 0: folds of about equally many rows.

    Each group goes to the smallest fold so far, large groups first. Groups whose sizes are within a factor of two come
    in random order: by size alone, as in GroupKFold of scikit-learn, the seed would decide nothing, and in random
    order, as in its variant that shuffles, the folds would differ in size.
    """
    sizes = np.bincount(units)
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-np.frexp(sizes[order])[1], kind="stable")]
    rows, folds = np.zeros(count, dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    for group in order:
        folds[group] = rows.argmin()
        rows[folds[group]] += sizes[group]
    return folds[units]


def _by_sets(values: Sequence[Sequence[str]], units: Numbers, count: int, seed: int) -> Numbers:
    """The fold of each row, from 0; a group has the labels of all its rows, and no label counts as one."""
    from iterstrat.ml_stratifiers import MultilabelStratifiedKFold

    names = sorted({label for labels in values for label in labels})
    place = {label: index for index, label in enumerate(names)}
    has = np.zeros((int(units.max()) + 1, len(names) + 1), dtype=np.int64)  # [groups, labels + 1]
    for unit, labels in zip(units.tolist(), values, strict=True):
        has[unit, [place[label] for label in labels]] = 1
    has[:, -1] = has[:, :-1].sum(axis=1) == 0
    splitter = MultilabelStratifiedKFold(n_splits=count, shuffle=True, random_state=seed)
    parts = [held_out for _, held_out in splitter.split(has, has)]
    return _numbered(parts, len(has))[units]


def _numbered(parts: Sequence[NDArray[np.int64]], count: int) -> Numbers:
    numbers = np.full(count, -1, dtype=np.int64)
    for number, part in enumerate(parts):
        numbers[part] = number
    return numbers


def _check_labels(values: Sequence[Sequence[str]], numbers: Numbers, source: str) -> None:
    """Raises DataError if all rows of a label are in one fold, whose model would then not know it."""
    folds: dict[str, set[int]] = {}
    for labels, number in zip(values, numbers.tolist() if values else [], strict=True):
        for label in labels:
            folds.setdefault(label, set()).add(number)
    alone = [repr(label) for label, found in sorted(folds.items()) if len(found) == 1 and label]
    if alone:
        raise DataError(
            f"{source}: one fold would have all rows with the label {first_few(alone, _SHOWN)}, which its model could "
            "not learn: add rows of other groups with it, or remove it"
        )

"""The validation rows that are taken out of the training rows when none are given.

Owns what such a split spreads evenly and what it must not tear apart. Must not know where rows come from.
"""

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from bert_tasks.data.columns import Column, column_of
from bert_tasks.data.row_checks import CONTEXT
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

_DOCUMENT, _GROUP = "document", "group"


def set_aside(table: RowTable, columns: Sequence[Column], share: float, seed: int) -> tuple[RowTable, RowTable]:
    """Training and validation rows.

    Every label is on both sides as far as there are rows of it. Questions on one context stay together, as do rows
    of one group, and the sentences of a document where there are documents enough (as many as shares in the whole).

    Raises:
        DataError: if there are too few rows or contexts.
    """
    if column_of(columns, "answers") is not None:
        train, validation = grouped_split(list(table.rows[CONTEXT]), _answerable(table, columns), share, seed)
        parts = "on different contexts"
    elif column_of(columns, "tags") is not None:
        groups = _documents(table, share)
        train, validation = grouped_split(groups, [""] * len(groups), share, seed)
        parts = "in all"
    elif _GROUP in table.rows.column_names:
        train, validation = grouped_split(list(table.rows[_GROUP]), _strata(table, columns), share, seed)
        parts = "in different groups"
    else:
        train, validation = stratified_split(_strata(table, columns), share, seed)
        parts = "of one class"
    if not train or not validation:
        raise DataError(
            f"{table.source}: {len(table)} rows, no two {parts}, are too few to set some aside; "
            "add rows or give data.validation"
        )
    return table.select(train), table.select(validation)


def stratified_split(labels: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of training and validation rows, each in order.

    Every label with two rows or more is on both sides; a single row of its kind trains.
    """
    chance = random.Random(seed)
    groups: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    validation: set[int] = set()
    for group in groups.values():
        count = min(max(round(len(group) * share), 1), len(group) - 1)
        validation.update(chance.sample(group, count))
    return [index for index in range(len(labels)) if index not in validation], sorted(validation)


def grouped_split(
    groups: Sequence[Hashable], strata: Sequence[str], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of training and validation rows, each in order; all rows of a group are on one side.

    Groups come in random order and validate if that brings the validation rows of the strata, and of all, nearer to
    their share. Of two groups or more both sides get one.
    """
    sizes: dict[Hashable, Counter[str | None]] = {}  # None counts all rows of a group
    for group, stratum in zip(groups, strata, strict=True):
        sizes.setdefault(group, Counter()).update((stratum, None))
    order = list(sizes)
    random.Random(seed).shuffle(order)
    wanted = {stratum: share * count for stratum, count in Counter([*strata, *[None] * len(strata)]).items()}
    missing = dict(wanted)
    chosen: set[Hashable] = set()
    for group in order:
        if _brings_nearer(sizes[group], missing, wanted):
            chosen.add(group)
            for part, count in sizes[group].items():
                missing[part] -= count
    smallest = {min(order, key=lambda group: sizes[group][None])} if len(order) > 1 else set()
    if not chosen:
        chosen = smallest
    elif len(chosen) == len(order):
        chosen -= smallest if smallest else chosen
    validation = [index for index, group in enumerate(groups) if group in chosen]
    return [index for index, group in enumerate(groups) if group not in chosen], validation


def _brings_nearer(
    sizes: Counter[str | None], missing: Mapping[str | None, float], wanted: Mapping[str | None, float]
) -> bool:
    """Whether a group takes more off the deviations than it adds, each as a part of what its stratum wants."""
    gains = (
        (abs(missing[stratum]) - abs(missing[stratum] - count)) / wanted[stratum] for stratum, count in sizes.items()
    )
    return sum(gains) > 0


def _answerable(table: RowTable, columns: Sequence[Column]) -> list[str]:
    column = column_of(columns, "answers")
    return [] if column is None else [str(len(value["text"]) > 0) for value in table.rows[column.name]]


def _documents(table: RowTable, share: float) -> list[Hashable]:
    """What must stay together of each sentence: its document, or its own number."""
    if _DOCUMENT not in table.rows.column_names:
        return list(range(len(table)))
    documents = list(table.rows[_DOCUMENT])
    if len(set(documents)) * share < 1:
        return list(range(len(table)))
    return [index if document is None else document for index, document in enumerate(documents)]


def _strata(table: RowTable, columns: Sequence[Column]) -> list[str]:
    """What to spread evenly: the label, or the rarest label of a set; rows without labels are all alike."""
    column = column_of(columns, "label", "labels")
    if column is None:
        return [""] * len(table)
    values = table.rows[column.name]
    if column.kind == "label":
        return list(values)
    sets = list(values)
    counts = Counter(label for names in sets for label in names)
    return [min(names, key=lambda label: (counts[label], label), default="") for names in sets]

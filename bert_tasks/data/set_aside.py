"""The validation rows that are taken out of the training rows when none are given.

Owns what such a split spreads evenly and what it must not tear apart. Must not know where rows come from.
"""

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from bert_tasks.data.checks import text_keys
from bert_tasks.data.columns import Column, column_of
from bert_tasks.data.row_checks import CONTEXT
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

_DOCUMENT, _GROUP = "document", "group"


def set_aside(table: RowTable, columns: Sequence[Column], share: float, seed: int) -> tuple[RowTable, RowTable]:
    """Training and validation rows.

    Every label is on both sides as far as there are rows of it. Rows with the same texts (see ``text_keys``) stay
    together, as do questions on one context, rows of one group, and the sentences of a document where there are
    documents enough (as many as shares in the whole).

    Raises:
        DataError: if there are too few rows or contexts.
    """
    keys = text_keys(table, columns).tolist()
    if column_of(columns, "answers") is not None:
        groups = _linked(list(table.rows[CONTEXT]), keys, share)
        train, validation = grouped_split(groups, _answerable(table, columns), share, seed)
        parts = "on different contexts"
    elif column_of(columns, "tags") is not None:
        documents = _documents(table, share)
        groups = keys if documents is None else _linked(documents, keys, share)
        train, validation = grouped_split(groups, [""] * len(groups), share, seed)
        parts = "with different words"
    elif _GROUP in table.rows.column_names:
        groups = _linked(list(table.rows[_GROUP]), keys, share)
        train, validation = grouped_split(groups, _strata(table, columns), share, seed)
        parts = "in different groups"
    else:
        train, validation = stratified_split(_strata(table, columns), share, seed, groups=keys)
        parts = "of one class with different texts"
    if not train or not validation:
        raise DataError(
            f"{table.source}: {len(table)} rows, no two {parts}, are too few to set some aside; "
            "add rows or give data.validation"
        )
    return table.select(train), table.select(validation)


def stratified_split(
    labels: Sequence[str], share: float, seed: int, *, groups: Sequence[Hashable] | None = None
) -> tuple[list[int], list[int]]:
    """Indices of training and validation rows, each in order; all rows of a group are on one side.

    Every label with two groups or more is on both sides; a single group of its kind trains. A group counts as its first
    row's label. Without groups each row is one.
    """
    chance = random.Random(seed)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(range(len(labels)) if groups is None else groups):
        members.setdefault(group, []).append(index)
    strata: dict[str, list[list[int]]] = {}
    for indices in members.values():
        strata.setdefault(labels[indices[0]], []).append(indices)
    validation: set[int] = set()
    for stratum in strata.values():
        for indices in _some_of(stratum, share, chance):
            validation.update(indices)
    return [index for index in range(len(labels)) if index not in validation], sorted(validation)


def _some_of(groups: Sequence[list[int]], share: float, chance: random.Random) -> list[list[int]]:
    """Random groups that hold about a share of all rows: at least one, and not all; none of a single group."""
    rows = sum(map(len, groups))
    count = min(max(round(rows * share), 1), len(groups) - 1)
    if rows == len(groups):
        return chance.sample(groups, count)
    chosen: list[list[int]] = []
    missing = rows * share
    for group in chance.sample(groups, len(groups)):
        if len(chosen) + 1 < len(groups) and len(group) < 2 * missing:  # that brings the rows nearer to their share
            chosen.append(group)
            missing -= len(group)
    return chosen if chosen or len(groups) == 1 else [min(groups, key=len)]


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


def _documents(table: RowTable, share: float) -> list[Hashable] | None:
    """What must stay together of each sentence: its document, or its own number; None: there are too few documents."""
    if _DOCUMENT not in table.rows.column_names:
        return None
    documents = list(table.rows[_DOCUMENT])
    if len(set(documents)) * share < 1:
        return None
    return [index if document is None else document for index, document in enumerate(documents)]


def _linked(groups: Sequence[Hashable], keys: Sequence[int], share: float) -> Sequence[Hashable]:
    """The groups, of which those with rows of the same key become one.

    The groups stay as they are if that would link more rows than the validation rows or the largest group have: short
    sentences that many documents hold would make one group of them all.
    """
    parents: dict[tuple[str, Hashable], tuple[str, Hashable]] = {}

    def root(node: tuple[str, Hashable]) -> tuple[str, Hashable]:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]
            node = parents[node]
        return node

    for group, key in zip(groups, keys, strict=True):
        parents[root(("group", group))] = root(("key", key))
    linked = [root(("group", group)) for group in groups]
    most = max([share * len(groups), *Counter(groups).values()])
    return linked if max(Counter(linked).values(), default=0) <= most else groups


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

"""What each row adds to the sums that numbers follow from; rows that add the same are one group.

Owns grouping and summing. Thousands of labels make thousands of sums, and a row adds to a few of them: only addends
that are not 0 are held. Must not know what is summed, or chance.

Shape legend: S rows, G groups of equal rows, Z addends that are not 0, K sums, R replicates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Addends:
    """Addend ``z`` is ``value[z]``, of the rows of ``group[z]`` to the sum ``column[z]``.

    Attributes:
        of_row: ``[S]``, the group of each row.
        columns: K, how many sums there are.
    """

    of_row: Integers
    group: Integers
    column: Integers
    value: Floats
    columns: int

    @classmethod
    def of(cls, rows: Floats) -> Self:
        """Of all addends of each row, ``[S, K]``."""
        groups, of_row = np.unique(rows, axis=0, return_inverse=True)
        group, column = np.nonzero(groups)
        return cls(of_row=of_row, group=group, column=column, value=groups[group, column], columns=rows.shape[1])

    @classmethod
    def of_counts(cls, rows: Iterable[Mapping[int, int]], columns: int) -> Self:
        """Of rows that say how much they add to which sums."""
        known: dict[tuple[tuple[int, int], ...], int] = {}
        of_row = [known.setdefault(tuple(sorted(row.items())), len(known)) for row in rows]
        found = [(group, column, count) for row, group in known.items() for column, count in row]
        group, column, value = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return cls(
            of_row=np.array(of_row, dtype=np.int64),
            group=group,
            column=column,
            value=value.astype(np.float64),
            columns=columns,
        )

    @cached_property
    def sizes(self) -> Integers:
        """``[G]``, the rows of each group."""
        return np.bincount(self.of_row)

    @property
    def width(self) -> int:
        """The longest of a replicate's vectors."""
        return max(len(self.sizes), len(self.value), self.columns)

    @property
    def total(self) -> Floats:
        """``[K]`` over all rows."""
        found: Floats = self.sums(self.sizes[None])[0]
        return found

    def sums(self, counts: Integers | Floats) -> Floats:
        """``[R, G] -> [R, K]``: so many rows of each group."""
        return gathered(counts[:, self.group] * self.value, self.column, self.columns)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The same rows in two groupings: groups of rows that are equal in both.

    Attributes:
        sizes: ``[G]``, the rows of each group.
        places: ``[G]`` each, what group of the first and of the second it is part of.
    """

    first: Addends
    second: Addends
    sizes: Integers
    places: tuple[Integers, Integers]

    @classmethod
    def of(cls, first: Addends, second: Addends) -> Self:
        both, sizes = np.unique(np.stack([first.of_row, second.of_row]), axis=1, return_counts=True)
        return cls(first=first, second=second, sizes=sizes, places=(both[0], both[1]))

    @property
    def width(self) -> int:
        return max(len(self.sizes), self.first.width, self.second.width)

    def sums(self, counts: Integers) -> tuple[Floats, Floats]:
        """``[R, G] -> [R, K]`` of the first and of the second."""
        first, second = (
            one.sums(gathered(counts, place, len(one.sizes)))
            for one, place in zip((self.first, self.second), self.places, strict=True)
        )
        return first, second


def gathered(values: Integers | Floats, place: Integers, size: int) -> Floats:
    """``[R, Z] -> [R, size]``: the sum of the values that belong to each place."""
    found = np.zeros((len(values), size))
    if len(place):
        order = np.argsort(place, kind="stable")
        present, starts = np.unique(place[order], return_index=True)
        found[:, present] = np.add.reduceat(values[:, order], starts, axis=1)
    return found

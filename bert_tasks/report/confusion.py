"""What was taken for what: counts of (true, answered) pairs, and the part of the matrix that fits on a page.

Owns which classes are shown. Must not know tasks or how a page is laid out.

Shape legend: L classes that occur.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

SHOWN = 25  # classes of a matrix that fits on a page
MOST_CELLS = 40_000  # of the full matrix
LISTED = 12  # of the most frequent mistakes


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``counts[i][j]``: rows (or words) of ``labels[i]`` that were answered ``labels[j]``."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def digits(self) -> int:
        """Of the largest count."""
        return max((len(str(count)) for row in self.counts for count in row), default=1)


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Pairs of a true and an answered class.

    Attributes:
        unit: what is counted: rows or words.
        labels: the classes that occur on either side, in their order; all classes where there are few.
        pairs: (true, answered, count), the most frequent first; right answers are among them.
    """

    unit: str
    labels: tuple[str, ...]
    pairs: tuple[tuple[str, str, int], ...]

    @classmethod
    def of(cls, truths: Sequence[str], answers: Sequence[str], labels: Sequence[str], unit: str) -> Self:
        counted = Counter(zip(truths, answers, strict=True))
        pairs = tuple((truth, answer, count) for (truth, answer), count in counted.most_common())
        occurring = {*truths, *answers}
        kept = tuple(label for label in labels if len(labels) <= SHOWN or label in occurring)
        return cls(unit=unit, labels=kept, pairs=pairs)

    @property
    def mistakes(self) -> tuple[tuple[str, str, int], ...]:
        """The most frequent pairs of two classes."""
        return tuple(pair for pair in self.pairs if pair[0] != pair[1])[:LISTED]

    @property
    def left_out(self) -> int:
        """How many classes ``matrix`` shows as one."""
        return 0 if len(self.labels) <= SHOWN else len(self.labels) - SHOWN + 1

    @property
    def matrix(self) -> Matrix:
        """All classes, or those with the most mistakes and, in the last row and column, all others as one."""
        if not self.left_out:
            return self._counted(self.labels)
        wrong: Counter[str] = Counter()
        for truth, answer, count in self.pairs:
            if truth != answer:
                wrong.update({truth: count, answer: count})
        worst = set(sorted(self.labels, key=lambda label: -wrong[label])[: SHOWN - 1])
        return self._counted(tuple(label for label in self.labels if label in worst), rest=f"{self.left_out} others")

    @property
    def full(self) -> Matrix | None:
        """All classes, where ``matrix`` leaves some out; None for more than a page can hold."""
        fits = len(self.labels) ** 2 <= MOST_CELLS
        return self._counted(self.labels) if self.left_out and fits else None

    def _counted(self, labels: tuple[str, ...], rest: str | None = None) -> Matrix:
        shown = labels if rest is None else (*labels, rest)
        place = {label: number for number, label in enumerate(labels)}
        counts = [[0] * len(shown) for _ in shown]  # [L, L]
        for truth, answer, count in self.pairs:
            counts[place.get(truth, len(shown) - 1)][place.get(answer, len(shown) - 1)] += count
        return Matrix(labels=shown, counts=tuple(map(tuple, counts)))

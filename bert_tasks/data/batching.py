"""Features as samples, and samples as batches of a limited number of tokens.

Owns which features belong to one sample (the windows of a long text are read together) and the cutting of an order into
batches. Must not know models, devices or processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Features of a table grouped by row: sample ``i`` is row ``i``.

    Attributes:
        features: memory-mapped, in row order.
        starts: index of each sample's first feature, and the number of features at the end.
        lengths: tokens of each sample, all its windows together.
        longest: tokens of the longest window.
    """

    features: "Dataset"
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, features: "Dataset") -> Self:
        windows: list[int] = []
        lengths: list[int] = []
        longest = 0
        for batch in features.select_columns(["row", "input_ids"]).iter(batch_size=1000):
            for row, ids in zip(batch["row"], batch["input_ids"], strict=True):
                if row == len(windows):
                    windows.append(0)
                    lengths.append(0)
                windows[row] += 1
                lengths[row] += len(ids)
                longest = max(longest, len(ids))
        starts = tuple(accumulate(windows, initial=0))
        return cls(features=features, starts=starts, lengths=tuple(lengths), longest=longest)

    def __len__(self) -> int:
        return len(self.lengths)

    def features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """All features of some samples, in that order."""
        wanted = [i for sample in samples for i in range(self.starts[sample], self.starts[sample + 1])]
        columns = self.features[wanted]
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def token_batches(order: Iterable[int], lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Neighbours of an order in batches of at most ``max_tokens`` tokens; one that is longer goes alone."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def longest_first(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """All indices in batches of similar length that depend on the data alone; a lack of memory shows early."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return token_batches(order, lengths, max_tokens=max_tokens)

"""Features as samples, and samples as batches of a limited number of tokens.

Owns which features belong to one sample (the windows of a long text are read together) and the cutting of an order into
batches. Must not know models, devices or processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

from bert_tasks.data.records import rows_of

if TYPE_CHECKING:
    from datasets import Dataset


# What a batch is made of, and what decoding needs.
_FOR_TRAINING = ("row", "input_ids", "token_type_ids", "labels", "reads")
_FOR_DECODING = ("row", "reads", "origins")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Features of a table grouped into samples: a row's windows together, or each window for itself.

    Attributes:
        features: memory-mapped, in row order; ``trained`` and ``decoded`` are those of its columns.
        starts: index of each sample's first feature, and the number of features at the end.
        lengths: tokens of each sample, all its windows together.
        longest: tokens of the longest window.
        row_starts: index of each row's first feature, and the number of features at the end.
    """

    features: "Dataset"
    trained: "Dataset"
    decoded: "Dataset"
    starts: Sequence[int]
    lengths: Sequence[int]
    longest: int
    row_starts: Sequence[int]

    @classmethod
    def of(cls, features: "Dataset", unit: Literal["row", "window"] = "row") -> Self:
        """Reads all lengths once. Rows count from 0 without gaps, as ``cached_features`` numbers them."""
        windows: list[int] = []
        tokens: list[int] = []  # of each feature
        for batch in features.select_columns(["row", "input_ids"]).iter(batch_size=1000):
            for row, ids in zip(batch["row"], batch["input_ids"], strict=True):
                if row == len(windows):
                    windows.append(0)
                windows[row] += 1
                tokens.append(len(ids))
        row_starts = list(accumulate(windows, initial=0))
        starts = row_starts if unit == "row" else range(len(tokens) + 1)
        return cls(
            features=features,
            trained=features.select_columns([name for name in _FOR_TRAINING if name in features.column_names]),
            decoded=features.select_columns([name for name in _FOR_DECODING if name in features.column_names]),
            starts=starts,
            lengths=[sum(tokens[start:end]) for start, end in pairwise(starts)],
            longest=max(tokens, default=0),
            row_starts=row_starts,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def indices(self, samples: Iterable[int]) -> list[int]:
        """The numbers of all features of some samples, in that order."""
        return [i for sample in samples for i in range(self.starts[sample], self.starts[sample + 1])]

    def features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """What training needs of all features of some samples, in that order."""
        return rows_of(self.trained[self.indices(samples)])

    def whole_features_of(self, samples: Iterable[int]) -> list[dict[str, Any]]:
        """All features of some samples, in that order, with what decoding needs."""
        return rows_of(self.features[self.indices(samples)])

    def decoded_rows(self, first: int, end: int) -> list[dict[str, Any]]:
        """What decoding needs of the features of rows ``first`` to ``end - 1``; ``row`` counts from 0 there."""
        records = rows_of(self.decoded[self.row_starts[first] : self.row_starts[end]])
        return [{**record, "row": record["row"] - first} for record in records]


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

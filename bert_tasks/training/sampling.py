"""The samples of each optimizer step and rank, and the learning-rate schedule.

Owns the arithmetic of order. Its pure functions of seed, epoch and lengths let a run resume without the state of a data
loader, and any number of processes sees the same batches. A sample is given by its index into ``lengths``, which holds
the number of tokens of each sample.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.data.features import Samples
from bert_tasks.recipe.schema import LearningRateSchedule, OptimSection

BUCKET_BATCHES = 50  # of how many batches the samples are sorted together


def _token_starts(sizes: NDArray[np.int64], tokens: int) -> list[int]:
    """Returns the starts of batches that hold at most ``tokens`` tokens. A larger sample is a batch of its own."""
    ends = np.cumsum(sizes).tolist()
    starts: list[int] = []
    start = before = 0
    while start < len(ends):
        starts.append(start)
        # The sums ascend, so the first sample that no longer fits is found by bisection.
        start = max(start + 1, bisect_right(ends, before + tokens, lo=start))
        before = ends[start - 1]
    return starts


class SampleOrder:
    """The batches of all steps of a run, a function of lengths, batch size and seed.

    If batches are limited by their tokens, an epoch has another number of steps than the next one. How many there are
    in the epochs so far is counted when it is needed, which takes a fraction of a second for a million samples.

    Args:
        lengths: Number of tokens of each sample.
        samples: Number of samples in a batch.
        tokens: Maximum number of tokens in a batch, instead. A sample with more tokens is a batch of its own.
        seed: Seed of the run.
        tables: Samples that are drawn together, and how many of each table an epoch has. All together an epoch has as
            many as there are samples.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        samples: int | None = None,
        tokens: int | None = None,
        seed: int,
        tables: Sequence[tuple[NDArray[np.int64], int]] = (),
    ) -> None:
        self._lengths, self._samples, self._tokens = np.asarray(lengths, dtype=np.int64), samples, tokens
        self._seed, self._tables = seed, tables
        self._first = [0]  # step of each epoch, as far as they are known
        self._latest: tuple[int, list[list[int]]] | None = None

    @classmethod
    def of(cls, samples: Samples, optim: OptimSection, *, seed: int) -> Self:
        """Returns the batches that the settings ask for."""
        tables: list[tuple[NDArray[np.int64], int]] = []
        if optim.sampling != "proportional":
            by_table = samples.by_table
            counts = drawn_counts([len(table) for table in by_table], optim.sampling)
            tables = list(zip(by_table, counts, strict=True))
        sizes = {"samples": optim.batch_size, "tokens": optim.batch_tokens}
        return cls(samples.lengths, **sizes, seed=seed, tables=tables)

    def batches(self, first: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """Yields the steps from ``first`` to ``end - 1``, each with its samples."""
        step = first
        while step < end:
            epoch = self.epoch_of(step)
            start = self.first_step(epoch)
            for batch in self.epoch(epoch)[step - start : end - start]:
                yield step, batch
                step += 1

    def first_step(self, epoch: int) -> int:
        """Returns the number of steps before an epoch."""
        if self._samples is not None:
            return epoch * math.ceil(len(self._lengths) / self._samples)  # the last, smaller batch is a step, too
        while len(self._first) <= epoch:
            self._first.append(self._first[-1] + len(self.epoch(len(self._first) - 1)))
        return self._first[epoch]

    def epoch_of(self, step: int) -> int:
        """Returns the epoch that a step is in."""
        if self._samples is not None:
            return step // self.first_step(1)
        while self._first[-1] <= step:
            self.first_step(len(self._first))
        return bisect_right(self._first, step) - 1

    def ends_epoch(self, steps: int) -> bool:
        """Returns True if an epoch is complete after this number of steps."""
        return steps > 0 and self.first_step(self.epoch_of(steps)) == steps

    def epoch(self, epoch: int) -> list[list[int]]:
        """Returns the random batches of an epoch, each of samples of similar length.

        The shuffled order is cut into buckets of about 50 batches. Each bucket is sorted by length before the order is
        cut into batches, and the batches are shuffled. So micro-batches have sequences of similar length, and the order
        stays random. If batches have a number of samples, at most one batch is smaller, which may be anywhere in the
        epoch.
        """
        if self._latest is not None and self._latest[0] == epoch:
            return self._latest[1]
        lengths, tokens = self._lengths, self._tokens
        # A named bit generator, because NumPy may change the one that `default_rng` returns.
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        drawn = self._drawn(epoch) if self._tables else len(lengths)  # a number stands for all samples below it
        order = rng.permutation(drawn)
        if tokens is None:
            samples = 1 if self._samples is None else self._samples
            buckets = np.arange(len(order)) // (BUCKET_BATCHES * samples)
        else:
            # A sample is in the bucket in which its first token falls.
            buckets = (np.cumsum(lengths[order]) - lengths[order]) // (BUCKET_BATCHES * tokens)
        # By bucket, then by length. Samples of equal length keep their order.
        order = order[np.argsort(buckets * (lengths.max(initial=0) + 1) + lengths[order], kind="stable")]
        starts = list(range(0, len(order), samples)) if tokens is None else _token_starts(lengths[order], tokens)
        members, ends = order.tolist(), [*starts[1:], len(order)]
        batches = [members[starts[index] : ends[index]] for index in rng.permutation(len(starts)).tolist()]
        self._latest = epoch, batches
        return batches

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        """Returns the samples of an epoch, if tables are drawn in other proportions than their sizes.

        Each table is read from its beginning to its end, in a new random order each time. An epoch continues where the
        one before has stopped, so a large table is read as a whole before any of its samples comes again.
        """
        drawn = []
        for number, (members, count) in enumerate(self._tables):
            first = epoch * count  # the number of samples of this table in the epochs before
            passes = range(first // len(members), -(-(first + count) // len(members)))
            orders: list[NDArray[np.int64]] = []
            for number_of_pass in passes:
                seed = np.random.SeedSequence([self._seed, number], spawn_key=(number_of_pass,))
                orders.append(np.random.Generator(np.random.PCG64(seed)).permutation(members))
            start = first % len(members)
            drawn.append(np.concatenate(orders)[start : start + count])
        return np.concatenate(drawn)

    def epochs(self, steps: int) -> float:
        """Returns the number of epochs in this number of steps."""
        epoch = self.epoch_of(steps)
        first = self.first_step(epoch)
        return epoch + (steps - first) / (self.first_step(epoch + 1) - first)


def drawn_counts(sizes: Sequence[int], sampling: Literal["equal"] | float) -> list[int]:
    """Returns how many samples of an epoch come from each table.

    ``sampling`` is a temperature, with which they are proportional to size ** (1 / temperature), or "equal", with which
    there are as many of each (Raffel et al., arXiv:1910.10683, 3.5.2). All together they are as many as the samples.
    """
    exponent = 0.0 if sampling == "equal" else 1.0 / sampling
    shares = np.asarray(sizes, dtype=np.float64) ** exponent
    exact = shares / shares.sum() * sum(sizes)
    # Rounding down loses some samples. They go to the tables whose counts have lost the largest fractions.
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: sum(sizes) - int(counts.sum())]
    counts[largest] += 1
    return [int(count) for count in counts]


def rank_share(
    batch: Sequence[int], lengths: Sequence[int] | NDArray[np.int64], *, rank: int, world_size: int
) -> list[int]:
    """Returns the samples of ``batch`` for ``rank``, longest first, or none if there are fewer samples than ranks.

    The sorted samples are dealt out like cards, so that all ranks have about as many tokens.
    """
    return sorted(batch, key=lambda sample: lengths[sample], reverse=True)[rank::world_size]


def learning_rate_factor(
    step: int, schedule: LearningRateSchedule, *, total_steps: int, warmup_steps: int, decay_steps: int
) -> float:
    """Returns the learning rate's factor at ``step``, counted from 0.

    The factor rises to 1 over the warm-up, then follows the schedule. It equals the schedules of transformers with
    warm-up, whose first step has factor 0. ``wsd`` (warm-up, stable, decay; Hu et al., arXiv:2404.06395) stays at 1 and
    falls linearly to 0 over the last ``decay_steps``, which begin no earlier than the warm-up ends.
    """
    if step < warmup_steps:
        return step / warmup_steps
    left, after_warmup = total_steps - step, max(1, total_steps - warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":  # half a period, from 1 down to 0
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, 1.0 - left / after_warmup)))
    falling_steps = after_warmup
    if schedule == "wsd":
        falling_steps = max(1, min(decay_steps, after_warmup))
    return max(0.0, min(1.0, left / falling_steps))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Returns the seed of one step on one rank, a well-mixed number below 2**63, which torch accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step, rank))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1

"""Which samples form each optimizer step and each rank's share of it, and the learning-rate schedule.

Owns the arithmetic of order: pure functions of (seed, epoch, lengths), so that a run resumes without loader state and
any number of processes sees the same batches. A sample is its index into ``lengths``, the tokens of each sample.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.recipe.schema import LearningRateSchedule

BUCKET_BATCHES = 50


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """What a batch holds: so many samples, or as many as have so many tokens, of which one is given.

    A sample with more tokens than that is a batch of its own.
    """

    samples: int | None = None
    tokens: int | None = None


def epoch_batches(lengths: ArrayLike, size: BatchSize, *, seed: int, epoch: int) -> list[list[int]]:
    """The optimizer batches of an epoch: random, yet each of samples of similar length.

    The shuffled order is cut into buckets of about 50 batches; each is sorted by length before the order is cut into
    batches, and the batches are shuffled. With a number of samples at most one batch is smaller; it may be anywhere in
    the epoch.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = rng.permutation(len(sizes))
    if size.tokens is None:
        samples = 1 if size.samples is None else size.samples
        buckets = np.arange(len(order)) // (BUCKET_BATCHES * samples)
    else:
        buckets = (np.cumsum(sizes[order]) - sizes[order]) // (BUCKET_BATCHES * size.tokens)
    # By bucket, then by length; equal ones stay as they were.
    order = order[np.argsort(buckets * (sizes.max(initial=0) + 1) + sizes[order], kind="stable")]
    starts = list(range(0, len(order), samples)) if size.tokens is None else _token_starts(sizes[order], size.tokens)
    members, ends = order.tolist(), [*starts[1:], len(order)]
    return [members[starts[index] : ends[index]] for index in rng.permutation(len(starts)).tolist()]


def _token_starts(sizes: NDArray[np.int64], tokens: int) -> list[int]:
    """Where batches of at most ``tokens`` tokens start; a larger sample is alone."""
    ends = np.cumsum(sizes).tolist()
    starts: list[int] = []
    start = before = 0
    while start < len(ends):
        starts.append(start)
        start = max(start + 1, bisect_right(ends, before + tokens, lo=start))
        before = ends[start - 1]
    return starts


class SampleOrder:
    """The batches of all steps of a run, a function of the samples' lengths, the size of a batch and the seed.

    An epoch of batches with a number of tokens has another number of steps than the next one. How many there are in
    the epochs so far is counted when it is needed, which takes a fraction of a second for a million samples.

    Args:
        lengths: tokens of each sample.
        size: of a batch.
        seed: of the run.
    """

    def __init__(self, lengths: ArrayLike, size: BatchSize, *, seed: int) -> None:
        self._lengths, self._size, self._seed = np.asarray(lengths, dtype=np.int64), size, seed
        self._first = [0]  # step of each epoch, as far as they are known
        self._latest: tuple[int, list[list[int]]] | None = None

    def batches(self, first: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """The steps from ``first`` to ``end - 1``, each with its samples."""
        step = first
        while step < end:
            epoch = self.epoch_of(step)
            for batch in self._epoch(epoch)[step - self.first_step(epoch) : end - self.first_step(epoch)]:
                yield step, batch
                step += 1

    def first_step(self, epoch: int) -> int:
        """The number of steps before an epoch."""
        if self._size.samples is not None:
            return epoch * math.ceil(len(self._lengths) / self._size.samples)  # the last, smaller batch is a step, too
        while len(self._first) <= epoch:
            self._first.append(self._first[-1] + len(self._epoch(len(self._first) - 1)))
        return self._first[epoch]

    def epoch_of(self, step: int) -> int:
        """The epoch that a step is in."""
        if self._size.samples is not None:
            return step // self.first_step(1)
        while self._first[-1] <= step:
            self.first_step(len(self._first))
        return bisect_right(self._first, step) - 1

    def ends_epoch(self, steps: int) -> bool:
        """Whether an epoch is complete after so many steps."""
        return steps > 0 and self.first_step(self.epoch_of(steps)) == steps

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, epoch_batches(self._lengths, self._size, seed=self._seed, epoch=epoch)
        return self._latest[1]

    def epochs(self, steps: int) -> float:
        """How many epochs so many steps are."""
        epoch = self.epoch_of(steps)
        first = self.first_step(epoch)
        return epoch + (steps - first) / (self.first_step(epoch + 1) - first)


def rank_share(
    batch: Sequence[int], lengths: Sequence[int] | NDArray[np.int64], *, rank: int, world_size: int
) -> list[int]:
    """The samples of ``batch`` that ``rank`` computes, longest first; none if the batch is too small."""
    return sorted(batch, key=lambda sample: lengths[sample], reverse=True)[rank::world_size]


def learning_rate_factor(
    step: int, schedule: LearningRateSchedule, *, total_steps: int, warmup_steps: int, decay_steps: int
) -> float:
    """The learning rate's factor at ``step``, counted from 0: up to 1 over the warm-up, then as the schedule says.

    Equals transformers' schedules with warm-up; the first step of a warm-up has factor 0. ``wsd`` (warm-up, stable,
    decay) stays at 1 and falls linearly to 0 over the last ``decay_steps`` (Hu et al., arXiv:2404.06395); they begin no
    earlier than the warm-up ends.
    """
    if step < warmup_steps:
        return step / warmup_steps
    left, after_warmup = total_steps - step, max(1, total_steps - warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, 1.0 - left / after_warmup)))
    return max(0.0, min(1.0, left / (after_warmup if schedule == "linear" else max(1, min(decay_steps, after_warmup)))))


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed for the random numbers of one step on one rank; well mixed and below 2**63."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step, rank))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1

"""Which samples form each optimizer step and each rank's share of it, and the learning-rate schedule.

Owns the arithmetic of order: pure functions of (seed, epoch, lengths), so that a run resumes without loader state and
any number of processes sees the same batches. A sample is its index into ``lengths``, the tokens of each sample.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_tasks.recipe.schema import LearningRateSchedule

BUCKET_BATCHES = 50


def epoch_batches(lengths: ArrayLike, *, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The optimizer batches of an epoch: random, yet each of samples of similar length.

    The shuffled order is cut into buckets of 50 batches; each is sorted by length before it is cut into
    batches, and the batches are shuffled. At most one batch is smaller than ``batch_size``; it may be anywhere
    in the epoch.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = rng.permutation(len(sizes))
    batches: list[list[int]] = []
    bucket_size = BUCKET_BATCHES * batch_size
    for start in range(0, len(order), bucket_size):
        bucket = order[start : start + bucket_size]
        bucket = bucket[np.argsort(sizes[bucket], kind="stable")]
        batches += [bucket[at : at + batch_size].tolist() for at in range(0, len(bucket), batch_size)]
    return [batches[index] for index in rng.permutation(len(batches))]


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
    """A seed for the random numbers of one step on one rank, well mixed and below 2**63."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step, rank))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1

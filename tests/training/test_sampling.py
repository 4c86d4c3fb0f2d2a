"""Order, shares and schedule: coverage, determinism, equality with transformers' schedule."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from bert_tasks.data.features import longest_first, token_batches
from bert_tasks.training import sampling

quick = settings(max_examples=25, deadline=None, database=None)


def random_lengths(count, seed):
    return np.random.default_rng(seed).integers(1, 60, size=count).tolist()


lengths_of_samples = st.builds(random_lengths, st.integers(0, 600), st.integers(0, 1000))


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


@quick
@given(lengths_of_samples, st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_and_one_partial_batch(lengths, batch_size, seed, epoch):
    batches = sampling.SampleOrder(lengths, samples=batch_size, seed=seed).epoch(epoch)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), batch_size)
    assert sorted(map(len, batches)) == [rest] * (rest > 0) + [batch_size] * full
    assert batches == sampling.SampleOrder(lengths, samples=batch_size, seed=seed).epoch(epoch)
    assert all(type(sample) is int for sample in flat(batches))


def test_seeds_and_epochs_have_orders_of_their_own():
    lengths = [5] * 200
    orders = {
        str(sampling.SampleOrder(lengths, samples=4, seed=seed).epoch(epoch)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


@pytest.mark.parametrize("size", [{"samples": 32}, {"tokens": 2048}], ids=str)
def test_batches_are_even_in_length_but_not_in_order_of_length(size):
    lengths = np.random.default_rng(0).integers(5, 128, size=20_000)
    batches = sampling.SampleOrder(lengths, **size, seed=1).epoch(0)
    assert np.mean([np.ptp(lengths[batch]) for batch in batches]) < 6  # a random batch of 32 spans about 115
    if "tokens" in size:
        assert np.mean([lengths[batch].sum() for batch in batches]) > 0.97 * 2048
    means = np.array([lengths[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


def test_the_partial_batch_may_stand_anywhere():
    epochs = [sampling.SampleOrder(np.arange(41), samples=8, seed=0).epoch(epoch) for epoch in range(60)]
    assert {[len(batch) for batch in batches].index(1) for batches in epochs} == set(range(6))


@quick
@given(lengths_of_samples, st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_batches_of_tokens_hold_every_sample_once_and_as_many_as_fit(lengths, tokens, seed, epoch):
    batches = sampling.SampleOrder(lengths, tokens=tokens, seed=seed).epoch(epoch)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[sample] for sample in batch) <= tokens for batch in batches)
    # No two neighbours in the order of lengths would fit together: at most two batches are half empty or less.
    sums = [sum(lengths[sample] for sample in batch) for batch in batches]
    assert sum(2 * total + 2 * 60 < tokens for total in sums) <= 1 + sum(lengths) // (50 * tokens)
    assert all(type(sample) is int for sample in flat(batches))


@quick
@given(
    st.builds(random_lengths, st.integers(1, 80), st.integers(0, 1000)),
    st.one_of(
        st.builds(lambda count: {"tokens": count}, st.integers(1, 300)),
        st.builds(lambda count: {"samples": count}, st.integers(1, 9)),
    ),
    st.integers(0, 30),
)
def test_the_order_of_a_run_is_that_of_its_epochs_from_any_step(lengths, size, first):
    """Epochs of a number of tokens differ in their number of steps."""
    epochs = [sampling.SampleOrder(lengths, **size, seed=3).epoch(epoch) for epoch in range(40)]
    steps = [
        (epoch, position, batch) for epoch, batches in enumerate(epochs) for position, batch in enumerate(batches)
    ][:40]
    order = sampling.SampleOrder(lengths, **size, seed=3)
    assert list(order.batches(first, 36)) == [(step, steps[step][2]) for step in range(first, 36)]
    for step, (epoch, position, _) in enumerate(steps[:36]):
        fresh = sampling.SampleOrder(lengths, **size, seed=3)
        assert (fresh.epoch_of(step), fresh.first_step(epoch)) == (epoch, step - position)
        assert fresh.ends_epoch(step) == (step > 0 and position == 0)
        assert fresh.epochs(step) == pytest.approx(epoch + position / len(epochs[epoch]))


def test_a_run_resumes_after_a_million_samples_at_once():
    lengths = np.random.default_rng(0).integers(10, 128, size=1_000_000)
    order = sampling.SampleOrder(lengths, tokens=16384, seed=1)
    began = time.process_time()
    first = order.first_step(1)
    step, batch = next(order.batches(first + 5, first + 6))
    assert (step, lengths[batch].sum() <= 16384) == (first + 5, True)
    assert time.process_time() - began < 10  # about 0.7 s on one processor


@quick
@given(lengths_of_samples, st.integers(1, 5))
def test_ranks_share_a_batch_evenly_and_without_overlap(lengths, world_size):
    batch = list(range(len(lengths)))[::-1]
    shares = [sampling.rank_share(batch, lengths, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(flat(shares)) == sorted(batch)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    tokens = [sum(lengths[sample] for sample in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@quick
@given(lengths_of_samples, st.integers(1, 100))
def test_micro_batches_keep_the_order_and_the_limit(lengths, max_tokens):
    samples = list(range(len(lengths)))
    groups = token_batches(samples, lengths, max_tokens=max_tokens)
    assert flat(groups) == samples
    sizes = [sum(lengths[sample] for sample in group) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        assert size <= max_tokens or len(group) == 1
    for size, following in zip(sizes, groups[1:], strict=False):
        assert size + lengths[following[0]] > max_tokens


@quick
@given(lengths_of_samples, st.integers(1, 100), st.integers(1, 5))
def test_evaluation_batches_cover_all_samples_longest_first(lengths, max_tokens, world_size):
    batches = longest_first(lengths, max_tokens=max_tokens)
    order = [lengths[sample] for sample in flat(batches)]
    assert order == sorted(lengths, reverse=True)
    shared = flat(batches[rank::world_size] for rank in range(world_size))
    assert sorted(flat(shared)) == list(range(len(lengths)))


def test_samples_of_equal_length_keep_the_order_of_the_data():
    assert longest_first([2, 3, 2, 3], max_tokens=4) == [[1], [3], [0, 2]]


@pytest.mark.parametrize(("total", "ratio"), [(10, 0.0), (37, 0.06), (7, 1.0), (1, 0.1)])
@pytest.mark.parametrize(
    ("ours", "name"),
    [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("constant", "constant_with_warmup"),
        ("wsd", "warmup_stable_decay"),
    ],
)
def test_schedules_equal_those_of_transformers(ours, name, total, ratio):
    warmup = math.ceil(total * ratio)
    decay = max(1, min(math.ceil(total * 0.3), total - warmup))
    options = {"num_decay_steps": decay, "decay_type": "linear"} if ours == "wsd" else {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options)
    for step in range(total):
        factor = sampling.learning_rate_factor(
            step, ours, total_steps=total, warmup_steps=warmup, decay_steps=math.ceil(total * 0.3)
        )
        if ours == "linear":
            assert factor == theirs.get_last_lr()[0]
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_step_seeds_differ_and_fit_torch():
    seeds = [sampling.step_seed(seed, step, rank) for seed in range(3) for step in range(200) for rank in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    ones = np.mean([seed.bit_count() for seed in seeds])
    assert 30 < ones < 33  # 31.5 if every bit is random
    torch.manual_seed(max(seeds))
    assert sampling.step_seed(7, 3, 1) == sampling.step_seed(7, 3, 1)

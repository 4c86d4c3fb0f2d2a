"""The CRF's arithmetic against the sum over every path, one by one."""

from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bert_tasks.encoder.crf import (
    best_labels,
    compressed,
    log_likelihood,
    log_partition,
    marginals,
    restored,
)

LABELS = 3
COUNTS = ((1,), (4,), (2, 4, 1, 3), (3, 3), (1, 1, 5))


def logits_of(counts: tuple[int, ...], *, labels: int = LABELS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(sum(counts), labels + 2, labels, generator=generator, dtype=torch.float64)


def head_logits(words: int, *, labels: int = LABELS, seed: int = 0) -> Tensor:
    """As the head makes them: a label's own score is added to all rows but the last."""
    generator = torch.Generator().manual_seed(seed)
    transitions = torch.randn(labels + 2, labels, generator=generator, dtype=torch.float64)
    emissions = torch.randn(words, labels, generator=generator, dtype=torch.float64)
    emissions = torch.cat([emissions[:, None].expand(-1, labels + 1, -1), torch.zeros(words, 1, labels)], dim=1)
    return emissions + transitions


def parts(logits: Tensor, counts: tuple[int, ...]) -> list[Tensor]:
    return [logits[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def score(chain: Tensor, path: tuple[int, ...]) -> float:
    """Word by word, as the module's docstring says it."""
    rows = [0, *[label + 1 for label in path[:-1]]]
    within = sum(float(word[row, label]) for word, row, label in zip(chain, rows, path, strict=True))
    return within + float(chain[-1, -1, path[-1]])


def all_paths(chain: Tensor) -> dict[tuple[int, ...], float]:
    labels = chain.shape[-1]
    return {path: score(chain, path) for path in product(range(labels), repeat=len(chain))}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("seed", [0, 1])
class TestAgainstEveryPath:
    def test_partition_and_likelihood(self, counts: tuple[int, ...], seed: int) -> None:
        logits = logits_of(counts, seed=seed)
        labels = torch.randint(LABELS, (sum(counts),), generator=torch.Generator().manual_seed(seed))
        totals, likelihoods = log_partition(logits, counts), log_likelihood(logits, labels, counts)
        assert likelihoods.shape == (len(counts),)
        for chain, path, total, log in zip(
            parts(logits, counts), parts(labels, counts), totals.tolist(), likelihoods.tolist(), strict=True
        ):
            paths = all_paths(chain)
            expected = torch.tensor(list(paths.values()), dtype=torch.float64).logsumexp(0).item()
            assert total == pytest.approx(expected, abs=1e-12)
            assert log == pytest.approx(paths[tuple(path.tolist())] - expected, abs=1e-12)

    def test_marginals(self, counts: tuple[int, ...], seed: int) -> None:
        logits = logits_of(counts, seed=seed)
        probabilities = marginals(logits, counts)
        assert probabilities.shape == (sum(counts), LABELS)
        for chain, of_chain in zip(parts(logits, counts), parts(probabilities, counts), strict=True):
            paths = all_paths(chain)
            weights = torch.tensor(list(paths.values()), dtype=torch.float64).softmax(0).tolist()
            expected = torch.zeros(len(chain), LABELS, dtype=torch.float64)
            for path, weight in zip(paths, weights, strict=True):
                for word, label in enumerate(path):
                    expected[word, label] += weight
            assert torch.allclose(of_chain, expected, rtol=0, atol=1e-12)

    def test_best_path(self, counts: tuple[int, ...], seed: int) -> None:
        logits = logits_of(counts, seed=seed)
        for chain, best in zip(parts(logits, counts), parts(best_labels(logits, counts), counts), strict=True):
            paths = all_paths(chain)
            assert tuple(best.tolist()) == max(paths, key=paths.__getitem__)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_chains_do_not_know_each_other(counts: list[int], labels: int) -> None:
    sizes = tuple(counts)
    logits = logits_of(sizes, labels=labels)
    alone = parts(logits, sizes)
    partitions = torch.cat([log_partition(chain, [len(chain)]) for chain in alone])
    assert torch.allclose(log_partition(logits, sizes), partitions, atol=1e-12)
    sure = torch.cat([marginals(chain, [len(chain)]) for chain in alone])
    assert torch.allclose(marginals(logits, sizes), sure, atol=1e-12)
    assert torch.equal(best_labels(logits, sizes), torch.cat([best_labels(chain, [len(chain)]) for chain in alone]))


def test_gradients() -> None:
    counts = (1, 3)
    labels = torch.tensor([0, 1, 1, 0])
    logits = logits_of(counts, labels=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: log_likelihood(values, labels, counts), (logits,))


def test_marginals_are_the_gradient_of_the_partition() -> None:
    counts = (3, 1, 4)
    logits = logits_of(counts).requires_grad_()
    (gradient,) = torch.autograd.grad(log_partition(logits, counts).sum(), logits)
    assert torch.allclose(gradient[:, :-1].sum(1), marginals(logits.detach(), counts), atol=1e-12)


def test_large_scores_do_not_overflow() -> None:
    logits = 1e4 * logits_of((3, 5)).float()
    assert log_partition(logits, (3, 5)).isfinite().all()
    assert marginals(logits, (3, 5)).sum(1).tolist() == pytest.approx([1.0] * 8)


def test_summaries_hold_all_that_the_head_says() -> None:
    """Windows of one model, of any number of words, share the transitions."""
    logits, counts = head_logits(9), (0, 4, 0, 2, 3)
    windows = [compressed(window_logits) for window_logits in parts(logits, counts)]
    assert [len(window) for window in windows] == [0, LABELS + 2 + 4, 0, LABELS + 2 + 2, LABELS + 2 + 3]
    assert torch.allclose(restored(windows), logits, atol=1e-12)
    assert restored(windows[:1]).shape == (0, LABELS + 2, LABELS)

"""Dropout from random words: the right share, unbiased words, exact gradients, torch's seed."""

import pytest
import torch

from bert_tasks.encoder import dropout
from bert_tasks.encoder.cpu import keep_mask, keep_scale, random_bits, uses_random_bits
from bert_tasks.encoder.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.9])
def test_the_share_of_words_that_keep_is_the_rounded_probability(p: float) -> None:
    every_word = torch.arange(-(2**15), 2**15).to(torch.int16)
    keeping = int(keep_mask(every_word, p, out=torch.empty(2**16, dtype=torch.float64)).sum())
    assert abs(keeping / 2**16 - (1 - p)) <= 2**-17
    assert keep_scale(p) == 2**16 / keeping


def test_every_bit_of_every_word_is_fair() -> None:
    torch.manual_seed(0)
    words = random_bits((4 * 40_000,)).view(-1, 4).int()  # four words come from one draw
    for lane in range(4):
        for bit in range(16):
            share = ((words[:, lane] >> bit) & 1).float().mean().item()
            assert abs(share - 0.5) < 0.015, (lane, bit)  # 6 standard errors


def test_neighbouring_words_are_independent() -> None:
    torch.manual_seed(0)
    drops = 1 - keep_mask(random_bits((200_000,)), 0.1, out=torch.empty(200_000))
    together = (drops[1:] * drops[:-1]).mean().item()
    assert together == pytest.approx(0.01, abs=0.0015)


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (2, 3, 5)])
def test_words_have_any_shape(shape: tuple[int, ...]) -> None:
    assert random_bits(shape).shape == shape


def test_kept_elements_grow_by_exactly_what_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = Dropout(0.1).train()(torch.ones(500, 400, dtype=torch.float64))
    values = out.unique().tolist()
    assert values == [0.0, 2**16 / (2**16 - 6554)]
    assert out.mean().item() == pytest.approx(1.0, abs=0.005)


def test_the_gradient_passes_where_the_value_did() -> None:
    rows = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.3).train()(rows)
    (gradient,) = torch.autograd.grad(out, rows, torch.full_like(out, 2.0))
    torch.testing.assert_close(gradient * rows, 2 * out, rtol=1e-12, atol=0)
    assert 0 < int((gradient == 0).sum()) < gradient.numel()


def test_bfloat16_rounds_the_result_and_not_the_scale() -> None:
    rows = torch.randn(50, 40).bfloat16().requires_grad_()
    torch.manual_seed(0)
    half = Dropout(0.1).train()(rows)
    (gradient,) = torch.autograd.grad(half, rows, torch.ones_like(half))
    torch.manual_seed(0)
    exact = Dropout(0.1).train()(rows.detach().float())
    assert torch.equal(half, exact.bfloat16())
    assert torch.equal(gradient != 0, exact != 0)


def test_masks_follow_torchs_seed() -> None:
    module, rows = Dropout(0.5).train(), torch.ones(64)
    torch.manual_seed(3)
    first, second = module(rows), module(rows)
    torch.manual_seed(3)
    assert torch.equal(module(rows), first)
    assert not torch.equal(first, second)


def test_nothing_is_drawn_outside_training_or_for_probability_0() -> None:
    rows = torch.ones(5)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(rows) is rows
    assert Dropout(0.0).train()(rows) is rows
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("dtype", "p"), [(torch.float16, 0.5), (torch.float32, 1e-6), (torch.float32, 1.0)])
def test_what_words_cannot_do_is_torchs(dtype: torch.dtype, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.ones(1000, dtype=dtype)
    assert not uses_random_bits(rows, p)
    monkeypatch.setattr(dropout, "random_bits", lambda shape: pytest.fail("words were drawn"))
    dropped = (Dropout(p).train()(rows) == 0).float().mean().item()
    assert dropped == pytest.approx(p, abs=0.1)

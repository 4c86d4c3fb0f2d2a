"""Attention with dropped weights on the CPU against the plain formula with the same words."""

import pytest
import torch
from torch import Tensor

from bert_tasks.encoder import attention
from bert_tasks.encoder import attention as module
from bert_tasks.encoder.attention import attend, attention_with_dropout
from bert_tasks.encoder.cpu import keep_mask, keep_scale, random_bits
from bert_tasks.encoder.packing import pack

BATCH, HEADS, SIZE = 5, 3, 4


def plain(qkv: Tensor, mask: Tensor | None, factors: Tensor) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, A, T, D]
    scores = query @ key.transpose(-1, -2) / SIZE**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return ((scores.softmax(-1) * factors) @ value).transpose(1, 2)


def both(length: int, *, masked: bool, p: float = 0.3) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(context, gradient) of ours and of the formula, dropped by the same words."""
    torch.manual_seed(length)
    qkv = torch.randn(BATCH, length, 3, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([length, length - 1, 1, length // 2, length])
    mask = (torch.arange(length) < lengths[:, None])[:, None, None] if masked else None
    outer = torch.randn(BATCH, length, HEADS, SIZE, dtype=torch.float64)
    torch.manual_seed(1)
    ours = attention_with_dropout(qkv, mask, p)
    torch.manual_seed(1)
    words = random_bits((BATCH * HEADS, length, length))
    factors = keep_mask(words, p, out=torch.empty(words.shape, dtype=torch.float64)) * keep_scale(p)
    theirs = plain(qkv, mask, factors.view(BATCH, HEADS, length, length))
    return (ours, *torch.autograd.grad(ours, qkv, outer)), (theirs, *torch.autograd.grad(theirs, qkv, outer))


@pytest.mark.parametrize(("piece", "masked", "length"), [(1, True, 7), (200, False, 33), (2**18, True, 33)])
def test_values_and_gradients_are_those_of_the_formula(
    length: int, masked: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    ours, theirs = both(length, masked=masked)
    for value, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [7, 33])
def test_bfloat16_drops_the_same_weights_and_stays_near(length: int) -> None:
    torch.manual_seed(length)
    qkv = torch.randn(3, length, 3, HEADS, SIZE).bfloat16().requires_grad_()
    mask = (torch.arange(length) < torch.tensor([length, length - 1, 1])[:, None])[:, None, None]
    torch.manual_seed(1)
    half = attention_with_dropout(qkv, mask, 0.3)
    torch.manual_seed(1)
    exact = attention_with_dropout(qkv.float(), mask, 0.3)
    outer = torch.randn_like(exact)
    results = [(out.detach(), *torch.autograd.grad(out, qkv, outer.to(out.dtype))) for out in (half, exact)]
    for value, expected in zip(*results, strict=True):
        assert float((value - expected).abs().max()) <= 0.02 * float(expected.abs().max())


def test_packed_rows_come_here_and_almost_no_dropout_is_almost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    def counting(qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
        handled.append(len(qkv))
        return attention_with_dropout(qkv, mask, p)

    monkeypatch.setattr(attention, "attention_with_dropout", counting)
    ids = [[0] * length for length in (5, 1, 7, 3, 7, 16, 15)]
    layout = pack(ids, ids, position_offset=0).layout
    qkv = torch.randn(sum(map(len, ids)), 3, HEADS, SIZE, dtype=torch.float64)
    torch.manual_seed(0)
    dropped, state = attend(qkv, layout, dropout=2**-16), torch.get_rng_state()
    assert sum(handled) == len(ids), "torch's own, slow dropout took some sequences"
    torch.testing.assert_close(dropped, attend(qkv, layout, dropout=0.0), rtol=2**-15, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state), "no random numbers without dropout"
    assert sum(handled) == len(ids), "without dropout torch's kernel is the faster one"
    torch.manual_seed(0)
    assert not torch.equal(attend(qkv, layout, dropout=0.5), dropped)


def test_the_words_are_drawn_once_and_used_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counting(shape: torch.Size) -> Tensor:
        drawn.append(shape.numel())
        return random_bits(shape)

    monkeypatch.setattr(module, "random_bits", counting)
    qkv = torch.randn(2, 6, 3, HEADS, SIZE, requires_grad=True)
    attention_with_dropout(qkv, None, 0.1).sum().backward()
    assert drawn == [2 * HEADS * 6 * 6]

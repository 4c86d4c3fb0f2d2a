"""Attention over packed rows: the right neighbours, exact gradients, the right kernel."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_tasks.encoder import packing
from bert_tasks.encoder.attention import _pad, _unpad, attend, attention_backend
from bert_tasks.encoder.packing import Packed, Padded, Regroup, pack
from support.largest_tensor import LargestTensor

RAGGED = (5, 1, 7, 3, 7, 16, 15)


def layout_of(lengths: Sequence[int]) -> Packed:
    ids = [[0] * length for length in lengths]
    return pack(ids, ids, position_offset=0).layout


def random_qkv(rows: int, *, heads: int = 2, size: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, heads, size, generator=generator, dtype=torch.float64)


def plain_attention(qkv: Tensor, layout: Packed, *, window: int | None = None) -> Tensor:
    """The textbook formula, one sequence and head at a time."""
    contexts = []
    for start, stop in zip(layout.cu_seqlens[:-1].tolist(), layout.cu_seqlens[1:].tolist(), strict=True):
        query, key, value = qkv[start:stop].unbind(1)  # [T, A, D]
        places = torch.arange(stop - start)
        far = (places[:, None] - places).abs() > (stop if window is None else window)
        heads = [
            torch.softmax((query[:, a] @ key[:, a].T / query.shape[-1] ** 0.5).masked_fill(far, -torch.inf), dim=-1)
            @ value[:, a]
            for a in range(qkv.shape[2])
        ]
        contexts.append(torch.cat(heads, dim=-1))
    return torch.cat(contexts)


@pytest.mark.parametrize("lengths", [RAGGED, (4,), (1, 1, 1), (6, 6, 6), (40, 39, 38, 1)])
@pytest.mark.parametrize("slack", [0.0, 0.125, 1.0])
def test_packed_rows_attend_within_their_sequence(
    lengths: tuple[int, ...], slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "GROUP_SLACK", slack)
    layout = layout_of(lengths)
    qkv = random_qkv(sum(lengths))
    torch.testing.assert_close(attend(qkv, layout, dropout=0.0), plain_attention(qkv, layout), rtol=0, atol=1e-12)


def test_padded_rows_attend_to_real_tokens_only() -> None:
    qkv = random_qkv(2 * 6)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    context = attend(qkv, Padded(batch=2, length=6, mask=mask), dropout=0.0)[mask.flatten()]
    expected = plain_attention(qkv[mask.flatten()], layout_of((5, 3)))
    swapped = plain_attention(torch.cat([qkv[6:9], qkv[:6][mask[0]]]), layout_of((5, 3)))
    torch.testing.assert_close(context, torch.cat([swapped[3:], swapped[:3]]), rtol=0, atol=1e-12)
    assert not torch.allclose(context, expected)


def test_what_else_is_in_the_batch_does_not_matter() -> None:
    layout = layout_of(RAGGED)
    qkv = random_qkv(sum(RAGGED))
    together = attend(qkv, layout, dropout=0.0)
    for first, length in zip(layout.first_rows.tolist(), RAGGED, strict=True):
        rows = slice(first, first + length)
        alone = attend(qkv[rows].contiguous(), layout_of((length,)), dropout=0.0)
        torch.testing.assert_close(together[rows], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slack", [0.125, 1.0])
def test_gradients_are_those_of_finite_differences(slack: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "GROUP_SLACK", slack)
    layout = layout_of((2, 1, 4, 3))
    qkv = random_qkv(10, heads=1, size=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: attend(rows, layout, dropout=0.0), (qkv,))


def ragged_regroup() -> Regroup:
    regroup = layout_of(RAGGED).regroup
    assert regroup is not None
    return regroup


def test_gradients_of_padding_are_not_wanted() -> None:
    """Attention masks padding, so rows get the gradients of their own place alone."""
    regroup = ragged_regroup()
    rows = random_qkv(sum(RAGGED)).requires_grad_()
    padded = _pad(rows, regroup.gather, regroup.scatter)
    assert torch.equal(padded, rows[regroup.gather])
    weights = torch.randn(padded.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((padded * weights).sum(), rows)
    (expected,) = torch.autograd.grad((rows[regroup.gather][regroup.scatter] * weights[regroup.scatter]).sum(), rows)
    assert torch.equal(gradient, expected)


def test_regrouping_has_exact_gradients() -> None:
    regroup = ragged_regroup()
    real = torch.zeros(len(regroup.gather), 1, dtype=torch.float64)
    real[regroup.scatter] = 1.0
    rows = random_qkv(sum(RAGGED), heads=1, size=1).flatten(1)[:, :1].contiguous().requires_grad_()
    padded = random_qkv(len(regroup.gather), heads=1, size=1).flatten(1)[:, :1].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda packed: _pad(packed, regroup.gather, regroup.scatter) * real, (rows,))
    assert torch.autograd.gradcheck(lambda groups: _unpad(groups, regroup.scatter), (padded,))
    assert torch.equal(_unpad(_pad(rows, regroup.gather, regroup.scatter), regroup.scatter), rows)


@pytest.mark.parametrize("lengths", [RAGGED, (4,), (1, 1, 1), (40, 39, 38, 1), (16,), (33, 2)])
@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_a_token_attends_to_a_window_of_its_sequence(lengths: tuple[int, ...], window: int) -> None:
    layout = layout_of(lengths)
    qkv = random_qkv(sum(lengths))
    expected = plain_attention(qkv, layout, window=window)
    torch.testing.assert_close(attend(qkv, layout, dropout=0.0, window=window), expected, rtol=0, atol=1e-12)
    if max(lengths) > window + 1:
        for other in (window - 1, window + 1):
            assert not torch.allclose(plain_attention(qkv, layout, window=other), expected)


def test_a_window_of_a_padded_layout_counts_columns() -> None:
    """The second sequence is padded on the left, the first has a hole, which counts."""
    qkv = random_qkv(2 * 6)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
    context = attend(qkv, Padded(batch=2, length=6, mask=mask), dropout=0.0, window=2)
    assert context.isfinite().all()
    alone = plain_attention(qkv[9:], layout_of((3,)), window=2)
    torch.testing.assert_close(context[9:], alone, rtol=0, atol=1e-12)
    near = plain_attention(qkv[[1, 3, 4, 5]], layout_of((4,)))  # what the token in column 3 attends to
    torch.testing.assert_close(context[3], near[1], rtol=0, atol=1e-12)


def test_gradients_of_a_window_are_those_of_finite_differences() -> None:
    layout = layout_of((5, 1, 3))
    qkv = random_qkv(9, heads=1, size=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: attend(rows, layout, dropout=0.0, window=1), (qkv,))


@pytest.mark.parametrize("rows", [2048, 8192])
def test_the_memory_of_a_window_grows_with_the_rows(rows: int) -> None:
    """Forward and backward: not even the mask is a square."""
    qkv = random_qkv(rows, heads=1, size=8).float().requires_grad_()
    with LargestTensor() as seen:
        torch.autograd.backward(attend(qkv, layout_of((rows,)), dropout=0.0, window=64).sum())
    assert seen.elements <= 4 * 64 * rows


def test_dropout_of_a_window_draws_new_attention_weights() -> None:
    layout, qkv = layout_of((30, 7)), random_qkv(37)
    torch.manual_seed(0)
    dropped = attend(qkv, layout, dropout=0.5, window=3)
    assert not torch.allclose(dropped, attend(qkv, layout, dropout=0.0, window=3))
    torch.manual_seed(0)
    assert torch.equal(dropped, attend(qkv, layout, dropout=0.5, window=3))
    padded = Padded(batch=1, length=37, mask=torch.ones(1, 37, dtype=torch.bool))
    assert attend(qkv, padded, dropout=0.5, window=3).isfinite().all()


def test_dropout_draws_new_attention_weights() -> None:
    layout = layout_of((6, 6))
    qkv = random_qkv(12)
    torch.manual_seed(0)
    dropped = attend(qkv, layout, dropout=0.5)
    assert not torch.allclose(dropped, attend(qkv, layout, dropout=0.0))
    torch.manual_seed(0)
    assert torch.equal(dropped, attend(qkv, layout, dropout=0.5))


CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [8, 32, 64, 256])
def test_cuda_takes_the_flash_kernel_where_it_fits(dtype: torch.dtype, head_size: int) -> None:
    assert attention_backend(device=CUDA, dtype=dtype, head_size=head_size, dropout=0.0) == "varlen"
    assert attention_backend(device=CUDA, dtype=dtype, head_size=head_size, dropout=1e-6) == "jagged"
    assert attention_backend(device=CUDA, dtype=dtype, head_size=head_size, dropout=0.0, window=64) == "varlen"
    assert attention_backend(device=CUDA, dtype=dtype, head_size=head_size, dropout=1e-6, window=64) == "grouped"


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "dropout"),
    [
        ("cuda", torch.float32, 64, 0.0),
        ("cuda", torch.float64, 64, 0.0),
        ("cuda", torch.bfloat16, 9, 0.0),
        ("cuda", torch.bfloat16, 36, 0.0),
        ("cuda", torch.bfloat16, 264, 0.0),
        ("cuda", torch.float32, 64, 0.1),
        ("cuda", torch.float16, 36, 0.1),
        ("cpu", torch.bfloat16, 64, 0.1),
        ("cpu", torch.bfloat16, 64, 0.0),
        ("cpu", torch.float32, 64, 0.0),
    ],
)
def test_all_else_takes_the_grouped_path(device: str, dtype: torch.dtype, head_size: int, dropout: float) -> None:
    backend = attention_backend(device=torch.device(device), dtype=dtype, head_size=head_size, dropout=dropout)
    assert backend == "grouped"


@pytest.mark.parametrize("has_more_results", [False, True])
def test_what_the_variable_length_kernel_returns_is_read(
    has_more_results: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself needs a GPU; it may return the context alone or with further results."""
    layout, qkv = layout_of(RAGGED), random_qkv(sum(RAGGED))
    expected = plain_attention(qkv, layout)

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, window_size: tuple[int, int]
    ) -> Tensor | tuple[Tensor, None]:
        assert starts.tolist() == layout.cu_seqlens.tolist()
        left, right = window_size
        assert left == right
        window = None if left == -1 else left
        context = plain_attention(torch.stack([query, key, value], dim=1), layout, window=window).view_as(query)
        return (context, None) if has_more_results else context

    monkeypatch.setattr("bert_tasks.encoder.attention.attention_backend", lambda **_: "varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.testing.assert_close(attend(qkv, layout, dropout=0.0), expected, rtol=0, atol=1e-12)
    near = plain_attention(qkv, layout, window=3)
    torch.testing.assert_close(attend(qkv, layout, dropout=0.0, window=3), near, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("lengths", [RAGGED, (4,), (1, 1, 1)])
def test_nested_tensors_keep_sequences_apart(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where torch takes the textbook formula for them. The flash kernel itself needs a GPU."""
    layout, qkv = layout_of(lengths), random_qkv(sum(lengths)).requires_grad_()
    weights = random_qkv(sum(lengths), seed=1)[:, 0].flatten(1)
    expected = plain_attention(qkv, layout)
    monkeypatch.setattr("bert_tasks.encoder.attention.attention_backend", lambda **_: "jagged")
    context = attend(qkv, layout, dropout=0.0)
    torch.testing.assert_close(context, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((found * weights).sum(), qkv)[0] for found in (context, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    torch.manual_seed(0)
    draws = torch.stack([attend(qkv.detach(), layout, dropout=0.25) for _ in range(100)])
    assert not torch.equal(draws[0], draws[1])
    errors = (draws.mean(dim=0) - expected).abs() / (draws.std(dim=0) / 10 + 1e-12)
    assert errors.max() < 5.0


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [32, 64])
def test_nested_tensors_drop_weights_without_bias_on_a_gpu(head_size: int) -> None:
    """The mean of many draws in bfloat16 is attention without dropout, in value and in gradient."""
    lengths = (17, 1, 128, 9)
    layout = layout_of(lengths).to(CUDA)
    qkv = random_qkv(sum(lengths), heads=2, size=head_size).to(CUDA)
    leaf = qkv.bfloat16().requires_grad_()
    draws = torch.stack([attend(leaf, layout, dropout=0.25).float() for _ in range(400)])
    exact = attend(qkv, layout, dropout=0.0).float()
    errors = (draws.mean(dim=0) - exact).abs() / (draws.std(dim=0) / 20 + 0.01)
    assert errors.max() < 6.0
    (gradient,) = torch.autograd.grad(draws.mean(), leaf)
    assert torch.isfinite(gradient).all()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("head_size", [32, 64])
def test_the_variable_length_kernel_agrees_with_the_grouped_path(
    head_size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in bfloat16, each against float32: neither is further from it than bfloat16's rounding explains."""
    lengths = (17, 1, 128, 9, 120, 64, 2, 126)
    layout = layout_of(lengths).to(CUDA)
    qkv = random_qkv(sum(lengths), heads=4, size=head_size).to(CUDA, torch.bfloat16)
    weights = random_qkv(sum(lengths), heads=4, size=head_size, seed=1)[:, 0].flatten(1).to(CUDA)

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.clone().requires_grad_()
        context = attend(leaf, layout, dropout=0.0, window=window)
        (gradient,) = torch.autograd.grad((context.float() * weights.float()).sum(), leaf)
        return context.float(), gradient.float()

    exact = run(qkv.float())
    varlen = run(qkv)
    monkeypatch.setattr("bert_tasks.encoder.attention.attention_backend", lambda **_: "grouped")
    grouped = run(qkv)
    for expected, one, other in zip(exact, varlen, grouped, strict=True):
        scale = float(expected.abs().max())
        assert float((one - expected).abs().max()) <= 0.02 * scale
        assert float((other - expected).abs().max()) <= 0.02 * scale
        assert float((one - other).abs().max()) <= 0.02 * scale

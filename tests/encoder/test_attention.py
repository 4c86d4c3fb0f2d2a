"""Attention over packed rows: the right neighbours, exact gradients, the right kernel."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_tasks.encoder import attention, packing
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


@pytest.mark.parametrize(
    ("lengths", "slack"), [(RAGGED, 0.0), (RAGGED, 0.125), (RAGGED, 1.0), ((1, 1, 1), 0.125), ((40, 39, 38, 1), 0.125)]
)
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


def test_regrouping_has_exact_gradients() -> None:
    regroup = ragged_regroup()
    real = torch.zeros(len(regroup.pad_index), 1, dtype=torch.float64)
    real[regroup.unpad_index] = 1.0
    rows = random_qkv(sum(RAGGED), heads=1, size=1).flatten(1)[:, :1].contiguous().requires_grad_()
    padded = random_qkv(len(regroup.pad_index), heads=1, size=1).flatten(1)[:, :1].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda packed: _pad(packed, regroup.pad_index, regroup.unpad_index) * real, (rows,))
    assert torch.autograd.gradcheck(lambda groups: _unpad(groups, regroup.unpad_index), (padded,))
    assert torch.equal(_unpad(_pad(rows, regroup.pad_index, regroup.unpad_index), regroup.unpad_index), rows)


@pytest.mark.parametrize(
    ("lengths", "window"), [(RAGGED, 1), (RAGGED, 3), ((1, 1, 1), 2), ((40, 39, 38, 1), 8), ((16,), 8), ((33, 2), 2)]
)
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


@pytest.mark.parametrize("rows", [1024, 2048])
def test_the_memory_of_a_window_grows_with_the_rows(rows: int) -> None:
    """Forward and backward: not even the mask is a square."""
    qkv = random_qkv(rows, heads=1, size=8).float().requires_grad_()
    with LargestTensor() as seen:
        torch.autograd.backward(attend(qkv, layout_of((rows,)), dropout=0.0, window=64).sum())
    assert seen.elements <= 4 * 64 * rows


def test_padding_far_from_any_token_has_finite_gradients_with_dropout() -> None:
    """A query of the padding has no key within the window, and a softmax over nothing is not a number."""
    qkv = random_qkv(37).requires_grad_()
    padded = Padded(batch=1, length=37, mask=torch.arange(37)[None] >= 20)
    context = attend(qkv, padded, dropout=0.5, window=3)
    (gradient,) = torch.autograd.grad(context[20:].sum(), qkv)
    assert context.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("window", [None, 3])
def test_dropout_draws_new_attention_weights(window: int | None) -> None:
    layout, qkv = layout_of((30, 7)), random_qkv(37)
    torch.manual_seed(0)
    dropped = attend(qkv, layout, dropout=0.5, window=window)
    assert not torch.allclose(dropped, attend(qkv, layout, dropout=0.0, window=window))
    torch.manual_seed(0)
    assert torch.equal(dropped, attend(qkv, layout, dropout=0.5, window=window))


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "has_scores", "backend"),
    [
        ("cuda", torch.float16, 8, False, "flash"),
        ("cuda", torch.bfloat16, 256, False, "flash"),
        ("cuda", torch.float32, 64, False, "grouped"),
        ("cuda", torch.bfloat16, 36, False, "grouped"),
        ("cuda", torch.float16, 264, False, "grouped"),
        ("cuda", torch.bfloat16, 64, True, "grouped"),
        ("cpu", torch.bfloat16, 64, False, "grouped"),
    ],
)
def test_cuda_takes_the_flash_kernel_where_it_fits(
    device: str, dtype: torch.dtype, head_size: int, has_scores: bool, backend: str
) -> None:
    on_device = torch.device(device)
    chosen = attention_backend(device=on_device, dtype=dtype, head_size=head_size, has_scores=has_scores)
    assert chosen == backend


def test_the_flash_kernel_gets_the_rows_where_sequences_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself needs a GPU (tests/gpu)."""
    layout, qkv = layout_of(RAGGED), random_qkv(sum(RAGGED))

    def kernel(rows: Tensor, starts: Tensor, longest: int, dropout: float, window: int | None) -> Tensor:
        assert (starts.tolist(), longest, dropout) == (layout.cu_seqlens.tolist(), max(RAGGED), 0.25)
        return plain_attention(rows, layout, window=window).view(len(rows), *rows.shape[2:])

    monkeypatch.setattr("bert_tasks.encoder.attention.attention_backend", lambda **_: "flash")
    monkeypatch.setattr("bert_tasks.encoder.attention.flash_attention", kernel)
    for window in (None, 3):
        context = attend(qkv, layout, dropout=0.25, window=window)
        torch.testing.assert_close(context, plain_attention(qkv, layout, window=window), rtol=0, atol=1e-12)


class KernelCalls(TorchDispatchMode):
    """The arguments and results of torch's flash kernels, by the name of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **({} if kwargs is None else kwargs))
        if "flash_attention" in str(func):
            self.calls[str(func)] = args, dict(kwargs), result
        return result


def test_the_flash_kernel_repeats_its_forward_pass_in_backward() -> None:
    """The backward kernel gets the window, the dropout and the random state of the forward kernel."""
    qkv = torch.randn(12, 3, 2, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device="meta")
    with KernelCalls() as kernels:
        attention.flash_attention(qkv, starts, 7, 0.25, 3).sum().backward()
    (forward, windows, results), (backward, again, _) = kernels.calls.values()
    assert windows == again == {"window_size_left": 3, "window_size_right": 3}
    assert forward[3:9] == (starts, starts, 7, 7, 0.25, False)
    assert backward[6:] == (starts, starts, 7, 7, 0.25, False, *results[2:4])


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_order_of_additions_is_fixed_for_one_kernel_only(before: tuple[bool, bool]) -> None:
    enabled, warns = before
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    try:
        with attention._deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
    finally:
        torch.use_deterministic_algorithms(False)

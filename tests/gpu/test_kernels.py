"""The attention kernels on the device: FlashAttention and the grouped path against the formula."""

import pytest
import torch
from torch import Tensor

from bert_tasks.encoder import attention
from bert_tasks.encoder.attention import attend, attention_backend
from bert_tasks.encoder.packing import Packed, pack
from support.gpu import DEVICE, needs_cuda

LENGTHS = (17, 1, 128, 9, 120, 64, 2, 126)
HALF = (torch.bfloat16, torch.float16)
WINDOWS = (None, 16)


def layout_on_device() -> Packed:
    ids = [[0] * length for length in LENGTHS]
    return pack(ids, ids, position_offset=0).layout.to(DEVICE)


def random_qkv(size: int, *, heads: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), 3, heads, size, generator=generator, dtype=torch.float64).to(DEVICE)


def formula(qkv: Tensor, window: int | None) -> Tensor:
    """``[N, 3, A, D] -> [N, H]``, one sequence at a time, the shortest first."""
    contexts = []
    for rows in qkv.split(sorted(LENGTHS)):
        query, key, value = rows.permute(1, 2, 0, 3).unbind(0)  # [A, T, D]
        places = torch.arange(len(rows), device=qkv.device)
        far = (places[:, None] - places).abs() > (len(rows) if window is None else window)
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).masked_fill(far, -torch.inf).softmax(-1)
        contexts.append((weights @ value).transpose(0, 1).flatten(1))
    return torch.cat(contexts)


def value_and_gradient(qkv: Tensor, outer: Tensor, *, dropout: float = 0.0, window: int | None = None) -> Tensor:
    """Context and gradient in one tensor, float32."""
    leaf = qkv.detach().requires_grad_()
    context = attend(leaf, layout_on_device(), dropout=dropout, window=window)
    (gradient,) = torch.autograd.grad((context * outer.to(context.dtype)).sum(), leaf)
    return torch.cat([context.detach().float().flatten(), gradient.float().flatten()])


def exact(qkv: Tensor, outer: Tensor, window: int | None) -> Tensor:
    leaf = qkv.detach().requires_grad_()
    context = formula(leaf, window)
    (gradient,) = torch.autograd.grad((context * outer).sum(), leaf)
    return torch.cat([context.detach().flatten(), gradient.flatten()]).float()


def outer_of(qkv: Tensor) -> Tensor:
    return random_qkv(qkv.shape[-1], seed=1)[:, 0].flatten(1)


@pytest.mark.parametrize("window", WINDOWS)
def test_grouped_path_is_the_formula(window: int | None) -> None:
    qkv = random_qkv(32)
    outer = outer_of(qkv)
    difference = value_and_gradient(qkv, outer, window=window) - exact(qkv, outer, window)
    assert difference.abs().max() < 1e-5  # float32's rounding of the results


@needs_cuda
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_flash_is_the_formula_up_to_rounding(size: int, window: int | None, dtype: torch.dtype) -> None:
    qkv = random_qkv(size).to(dtype)
    outer = outer_of(qkv)
    assert attention_backend(device=DEVICE, dtype=dtype, head_size=size) == "flash"
    expected = exact(qkv.double(), outer, window)
    difference = value_and_gradient(qkv, outer, window=window) - expected
    assert difference.abs().max() < 0.02 * expected.abs().max()


@needs_cuda
@pytest.mark.parametrize("window", WINDOWS)
def test_flash_and_the_grouped_path_agree(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = random_qkv(64).bfloat16()
    outer = outer_of(qkv)
    flash = value_and_gradient(qkv, outer, window=window)
    monkeypatch.setattr(attention, "attention_backend", lambda **_: "grouped")
    grouped = value_and_gradient(qkv, outer, window=window)
    assert (flash - grouped).abs().max() < 0.02 * grouped.abs().max()


@needs_cuda
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["flash", "grouped"])
def test_dropped_weights_have_the_right_mean(kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of many draws is attention without dropout, in value and in gradient."""
    monkeypatch.setattr(attention, "attention_backend", lambda **_: kernel)
    qkv = random_qkv(32, heads=2).bfloat16()
    outer = outer_of(qkv.expand(-1, -1, 2, -1))[:, :64]
    expected = exact(qkv.double(), outer, window)
    torch.manual_seed(0)
    draws = torch.stack([value_and_gradient(qkv, outer, dropout=0.25, window=window) for _ in range(400)])
    errors = (draws.mean(0) - expected).abs() / (draws.std(0) / 20 + 0.01 * expected.abs().max())
    assert errors.max() < 6.0
    spread = draws.std(0)[: qkv.shape[0] * 64]
    assert spread.mean() > 0.05  # weights were dropped


@needs_cuda
def test_flash_repeats_its_bits() -> None:
    """The same seed drops the same weights, and gradients are summed in a fixed order."""
    qkv = random_qkv(64).bfloat16()
    outer = outer_of(qkv)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(value_and_gradient(qkv, outer, dropout=0.1))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.are_deterministic_algorithms_enabled()

"""Linear layers through oneDNN equal ``F.linear``, and the library follows the processor and the variables."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bert_tasks import environment
from bert_tasks.encoder import cpu
from bert_tasks.encoder.config import Activation
from bert_tasks.encoder.cpu import matmul_library
from bert_tasks.encoder.linear import ACTIVATIONS, Linear, linear, linear_activation
from bert_tasks.errors import UsageError

SHAPES = [(1, 3, 5, True), (7, 32, 32, False), (200, 48, 16, True), (130, 16, 64, True)]


@pytest.fixture
def undecided() -> Iterator[None]:
    """Each test decides anew."""
    matmul_library.cache_clear()
    yield
    matmul_library.cache_clear()


@pytest.fixture
def onednn(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_TASKS_MATMUL", "onednn")
    assert matmul_library() == "onednn"


def products(x: torch.Tensor, layer: Linear, output: torch.Tensor) -> list[torch.Tensor]:
    """The output of a layer and the gradients of its input, weight and bias."""
    gradient = torch.linspace(-1, 1, output.numel()).view_as(output)
    inputs = [x, layer.weight] if layer.bias is None else [x, layer.weight, layer.bias]
    return [output, *torch.autograd.grad(output, inputs, gradient)]


@pytest.mark.parametrize(("rows", "inputs", "outputs", "bias"), SHAPES)
def test_products_and_gradients_equal_those_of_torch(
    onednn: None, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(rows)
    layer = Linear(inputs, outputs, bias=bias)
    x = torch.randn(rows, inputs, requires_grad=True)
    ours = products(x, layer, layer(x))
    assert "OneDNN" in type(layer(x).grad_fn).__name__
    for value, expected in zip(ours, products(x, layer, F.linear(x, layer.weight, layer.bias)), strict=True):
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= 2e-6 * expected.abs().max()
    for value, again in zip(ours, products(x, layer, layer(x)), strict=True):
        assert torch.equal(value, again)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_products_over_nothing_are_those_of_torch(onednn: None, rows: int, inputs: int, outputs: int) -> None:
    layer = Linear(1, 1)
    layer.weight, layer.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))
    x = torch.randn(rows, inputs, requires_grad=True)
    ours = products(x, layer, layer(x))
    for value, expected in zip(ours, products(x, layer, F.linear(x, layer.weight, layer.bias)), strict=True):
        assert torch.equal(value, expected)
    with torch.no_grad():
        assert torch.equal(linear_activation(layer, x, "gelu"), F.gelu(F.linear(x, layer.weight, layer.bias)))


def test_inputs_may_have_any_number_of_dimensions_and_any_strides(onednn: None) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for x in (torch.randn(2, 3, 8), torch.randn(8), torch.randn(8, 5).t(), torch.randn(10, 8)[::2], torch.empty(0, 8)):
        assert torch.allclose(linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)
    for shape in ((4, 8), (8,)):
        x = torch.randn(shape, requires_grad=True)
        (gradient,) = torch.autograd.grad(linear(x, weight, bias).sum(), x)  # its gradient is an expanded scalar
        assert torch.allclose(gradient, weight.sum(0).expand(shape), atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_without_gradients_is_that_of_torch(
    onednn: None, monkeypatch: pytest.MonkeyPatch, activation: Activation
) -> None:
    torch.manual_seed(0)
    layer, x, calls = Linear(8, 5), torch.randn(70, 8), []

    def recorded(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return product(*arguments)

    product = cpu._product
    monkeypatch.setattr(cpu, "_product", recorded)
    with torch.no_grad():
        result = linear_activation(layer, x, activation)
    assert len(calls[0]) == (5 if "gelu" in activation else 3)  # GELU is part of the product
    expected = linear_activation(layer, x, activation)
    assert len(calls[1]) == 3
    assert expected.requires_grad
    assert torch.allclose(expected, ACTIVATIONS[activation](F.linear(x, layer.weight, layer.bias)), atol=1e-6)
    assert torch.allclose(result, expected, atol=1e-6)
    assert not torch.allclose(result, layer(x), atol=0.1)


def test_a_layer_with_a_hook_or_in_a_wrapper_is_called(onednn: None) -> None:
    layer, x, seen = Linear(8, 5), torch.randn(70, 8), []
    with torch.no_grad():
        wrapped = linear_activation(nn.Sequential(layer, nn.Identity()), x, "gelu")
        layer.register_forward_hook(lambda _, __, output: seen.append(output))
        hooked = linear_activation(layer, x, "gelu")
    assert torch.equal(F.gelu(seen[0]), hooked)
    assert torch.equal(wrapped, hooked)


def test_frozen_parameters_get_no_gradient(onednn: None) -> None:
    layer = Linear(4, 3)
    layer.weight.requires_grad_(False)
    layer(torch.randn(5, 4)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize(
    ("shape", "outputs", "bias", "multiple"),
    [((1, 24), 40, True, 64), ((130, 24), 40, False, 128), ((1100, 24), 24, True, 128), ((3, 5, 24), 40, True, 64)],
)
def test_bfloat16_under_autocast_is_near_and_gradients_of_weights_are_float32(
    shape: tuple[int, ...], outputs: int, bias: bool, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_MULTIPLE", multiple)
    torch.manual_seed(0)
    layer = Linear(24, outputs, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    assert output.shape == (*shape[:-1], outputs)
    assert "BFloat16" in type(output.grad_fn).__name__
    exact = F.linear(x, layer.weight, layer.bias)
    leaves, outer = [x, *layer.parameters()], torch.randn(exact.shape).bfloat16()
    results = [
        (value.detach(), *torch.autograd.grad(value, leaves, outer.to(value.dtype))) for value in (output, exact)
    ]
    for value, other in zip(*results, strict=True):
        assert float((value - other).abs().max()) <= 0.02 * float(other.abs().max())
    assert all(gradient.dtype == torch.float32 for gradient in results[0][1:])


@pytest.mark.parametrize("multiple", [64, 128])
@pytest.mark.parametrize("rows", [1, 64, 129, 512, 513, 1153])
def test_blocks_have_few_sizes_and_hold_all_rows(rows: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MULTIPLE", multiple)
    numbers = torch.arange(1, rows + 1).view(rows, 1)
    blocks = list(cpu._blocks(numbers))
    assert {len(block) for block in blocks} <= set(range(multiple, 513, multiple))
    joined = torch.cat(blocks)
    assert torch.equal(joined[:rows], numbers)
    assert joined[rows:].count_nonzero() == 0
    assert len(joined) - rows < multiple


def test_a_weight_is_converted_once_while_it_is_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[torch.Tensor] = []
    layer, x = Linear(8, 6), torch.randn(5, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)  # it does not count as a change in torch 2.13
    apply = cpu._bfloat16

    def recorded(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        converted.append(copy)
        return apply(rows, weight, bias, copy)

    monkeypatch.setattr(cpu, "_bfloat16", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with cpu.reuse_bfloat16_weights():
                layer(x).sum().backward()
                layer(x).sum().backward()
            optimizer.step()
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert not torch.equal(layer(x), before)
    first, again, second, *_ = converted
    assert first is again
    assert second is not first
    assert not torch.equal(second, first)


def test_all_else_takes_the_product_of_torch(onednn: None) -> None:
    layer, x = Linear(4, 3), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.double()(x.double()).dtype == torch.float64
        assert layer.float()(x[:0]).shape == (0, 3)
    assert layer.double()(x.double()).grad_fn.name() == "AddmmBackward0"
    assert layer.to("meta", torch.float32)(x.to("meta")).device.type == "meta"
    exported = torch.export.export(Linear(4, 3), (x,))
    assert "mkldnn" not in str(exported.graph)
    compiled = torch.compile(lambda rows: linear_activation(layer, rows, "gelu"), backend="eager", fullgraph=True)
    layer.to_empty(device="cpu")
    assert "AddmmBackward0" in str(compiled(x).grad_fn.next_functions)


def test_a_torch_without_the_operator_takes_its_own_product(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_TASKS_MATMUL", "onednn")

    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", missing)
    layer, x = Linear(4, 3), torch.randn(5, 4)
    assert matmul_library() == "mkl"
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("vendor", "instructions", "variables", "library"),
    [
        ("AuthenticAMD", "AVX512", {}, "onednn"),
        ("AuthenticAMD", "AVX2", {}, "mkl"),
        ("GenuineIntel", "AVX512", {}, "mkl"),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", "AVX512", {}, "mkl"),
        ("AuthenticAMD", "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "mkl"),
        ("AuthenticAMD", "AVX512", {"ONEDNN_MAX_CPU_ISA": "avx512_core_bf16"}, "onednn"),
        ("AuthenticAMD", "AVX512", {"ONEDNN_MAX_CPU_ISA": "ALL"}, "onednn"),
        ("AuthenticAMD", "AVX512", {"BERT_TASKS_MATMUL": "mkl"}, "mkl"),
        ("GenuineIntel", "AVX2", {"BERT_TASKS_MATMUL": "onednn"}, "onednn"),
    ],
)
def test_processor_and_variables_decide(
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    instructions: str,
    variables: dict[str, str],
    library: str,
) -> None:
    for name in ("BERT_TASKS_MATMUL", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpu, "_is_intel", lambda: "GenuineIntel" in vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert matmul_library() == library


@pytest.mark.slow
def test_whole_models_and_runs_pass_their_tests_with_the_other_library() -> None:
    """Parity, gradients, accumulation and repetition. training/test_resuming.py resumes with the other library."""
    other = "mkl" if matmul_library() == "onednn" else "onednn"
    names = ("model/test_parity", "model/test_gradients", "training/test_steps", "training/test_repeating")
    tests = Path(__file__).parents[1]
    files = [f"{tests / name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *files]
    command += ["-c", tests.parent / "pyproject.toml", "--rootdir", tests.parent]
    done = subprocess.run(command, env=os.environ | {"BERT_TASKS_MATMUL": other}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(("library", "capacities"), [("mkl", [None, "7"]), ("onednn", ["64", "7"])])
def test_the_first_product_limits_the_caches_that_the_user_does_not(
    undecided: None, monkeypatch: pytest.MonkeyPatch, library: str, capacities: list[str | None]
) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv(names[0])
    monkeypatch.setenv("BERT_TASKS_MATMUL", library)
    Linear(2, 2)(torch.randn(3, 2))
    assert [os.environ.get(name) for name in names] == capacities


def test_an_unknown_library_is_refused(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_TASKS_MATMUL", "blas")
    with pytest.raises(UsageError, match="BERT_TASKS_MATMUL is 'blas', expected 'mkl' or 'onednn'"):
        matmul_library()
    report = environment.environment()["torch"]["matmul_library"]  # for a bug report
    assert "BERT_TASKS_MATMUL is 'blas'" in report


@pytest.mark.parametrize(
    ("capabilities", "limit", "reason"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, None, None),
        ({"avx512_bf16": False, "amx_bf16": True}, "ALL", None),
        ({"avx512_bf16": True}, "AVX512_CORE_BF16", None),
        ({"architecture": "aarch64"}, None, None),
        ({"avx512_bf16": False, "amx_bf16": False}, None, "this processor lacks"),
        ({"avx512_bf16": True, "amx_bf16": True}, "avx2", "ONEDNN_MAX_CPU_ISA=AVX2 excludes"),
    ],
)
def test_where_bfloat16_is_slower_a_note_says_why(monkeypatch, capabilities, limit, reason):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    described = {"architecture": "x86_64", **capabilities}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: described, raising=False)
    note = cpu.slow_bfloat16()
    assert note is None if reason is None else reason in note

"""Fast computation on a CPU with oneDNN, random bits and two threads.

**float32.** ``F.linear`` uses MKL, whose code for processors of other makers than Intel stops at AVX2. oneDNN, which
torch also contains, uses AVX-512 on them and is up to twice as fast, with the same rounding error. ``matmul_library``
chooses the library.

**bfloat16.** Under autocast oneDNN computes every product, and two costs come close to the products' cost. oneDNN
compiles code for each number of rows, which takes longer than running it, so rows are cut into blocks of few sizes
(``_blocks``). The weights are converted, but only once while ``reuse_bfloat16_weights`` is open. The copies belong to
the open context and to no parameter, because optimizers change parameters without telling.

**Dropout.** torch draws one random float per element, which costs several times as much as the rest of dropout. Here
four elements share one 64-bit draw of torch's generator, so ``torch.manual_seed`` fixes the masks as usual. A
probability is rounded to a multiple of 1/65536, and kept elements are scaled by exactly the rounded probability.

**Two batches at the same time.** Evaluation and prediction use two Python threads, each with half of torch's threads.
If one batch has all of torch's threads, they wait for each other at the end of every operation, and undivided work
(compiling a product for a new shape, Python itself) uses one of them. Two batches wait for each other only at their
end.

Shape legend: N rows, I inputs, O outputs.
"""

import os
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.jit._trace import is_tracing
from torch.nn import functional as F

from bert_tasks.errors import UsageError
from bert_tasks.variables import limit_primitive_caches

MatmulLibrary = Literal["mkl", "onednn"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def processor() -> Mapping[str, object]:
    """Returns what torch knows of the processor and its instructions, which is nothing in torch 2.10."""
    description = getattr(torch.cpu, "get_capabilities", dict)
    result: Mapping[str, object] = description()
    return result


# Rows of a product in bfloat16, of a block and of the multiple to which the last block is padded. With AMX
# there are fewer sizes, because compiling for one more takes many times as long as the product.
_BLOCK, _MULTIPLE = 512, 64
if processor().get("amx_bf16"):
    _MULTIPLE = 128
# id of a parameter -> its copy in bfloat16, or None while weights may change.
_BFLOAT16_WEIGHTS: ContextVar[dict[int, Tensor] | None] = ContextVar("_BFLOAT16_WEIGHTS", default=None)
# Values of ONEDNN_MAX_CPU_ISA that leave out the products in bfloat16 of later processors.
_WITHOUT_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
_VALUES = 2**16  # of 16 random bits
_WORKERS = 2  # batches that are computed at the same time


@cache
def matmul_library() -> MatmulLibrary:
    """Returns the library that multiplies float32 matrices on the CPU.

    MKL does not use the AVX-512 instructions of processors that are not Intel's, but oneDNN does. On other processors
    both are equally fast. Nothing is timed, so equal machines and variables compute equal results. The variable
    ``BERT_TASKS_MATMUL`` takes precedence over the processor, and ``ONEDNN_MAX_CPU_ISA`` limits the instructions. A
    torch without oneDNN uses its default library. If the result is oneDNN, the first call limits its caches.

    Raises:
        UsageError: ``BERT_TASKS_MATMUL`` is neither ``mkl`` nor ``onednn``.
    """
    library = os.environ.get("BERT_TASKS_MATMUL", "")
    if library not in ("", *get_args(MatmulLibrary)):
        raise UsageError(f"the environment variable BERT_TASKS_MATMUL is {library!r}, expected 'mkl' or 'onednn'")
    if not library:
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
        has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        is_limited = limit not in ("DEFAULT", "ALL") and not limit.startswith("AVX512")
        library = "mkl"
        if has_avx512 and not is_limited and not _is_intel():
            library = "onednn"
    if library == "mkl":
        return "mkl"
    limit_primitive_caches()
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(2, 2), torch.zeros(2, 2), None, "none", [], None)
    except (AttributeError, NotImplementedError, RuntimeError):  # another version of torch, or one without oneDNN
        return "mkl"
    return "onednn"


def _is_intel() -> bool:
    """Returns True for a processor of Intel, for which MKL uses AVX-512."""
    with suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "GenuineIntel" in platform.processor()


def slow_bfloat16() -> str | None:
    """Returns a note for the user if bfloat16 is slower than float32 on this CPU, as far as torch knows it."""
    capabilities = processor()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    has_instructions = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    is_supported = has_instructions or capabilities.get("architecture") != "x86_64"
    if is_supported and limit not in _WITHOUT_BFLOAT16:
        return None
    reason = "this processor lacks"
    if is_supported:
        reason = f"ONEDNN_MAX_CPU_ISA={limit} excludes"
    return f"bf16 is slower than float32 here, because {reason} the instructions for it (avx512_bf16, AMX)"


def is_eager_on_cpu(rows: Tensor) -> bool:
    """Returns True if this matrix is on the CPU and is neither traced nor compiled."""
    is_traced = torch.compiler.is_compiling() or is_tracing()  # type: ignore[no-untyped-call]  # torch
    return rows.device.type == "cpu" and rows.dim() > 1 and not is_traced


def linear_on_cpu(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``F.linear`` of ``is_eager_on_cpu`` rows with ``matmul_library``."""
    if _takes_onednn(rows, weight):
        return _onednn(rows, weight, bias)
    if _takes_bfloat16(rows, weight):
        return _bfloat16(rows.bfloat16(), weight, bias, _bfloat16_copy(weight))
    return F.linear(rows, weight, bias)


def gelu_linear_on_cpu(rows: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """Computes the GELU of ``linear_on_cpu`` without gradients.

    Args:
        form: "none" (erf) or "tanh".
    """
    if _takes_onednn(rows, weight):
        return _product(rows, weight, bias, "gelu", form)
    gelu: Tensor = torch.ops.aten.gelu_(linear_on_cpu(rows, weight, bias), approximate=form)
    return gelu


@contextmanager
def reuse_bfloat16_weights() -> Iterator[None]:
    """Converts each weight to bfloat16 once while weights do not change."""
    token = _BFLOAT16_WEIGHTS.set({})
    try:
        yield
    finally:
        _BFLOAT16_WEIGHTS.reset(token)


def _takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Returns True if oneDNN multiplies these float32 matrices."""
    is_float32 = rows.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    is_empty = 0 in (rows.numel(), weight.numel())  # oneDNN rejects products over nothing, here or in the gradient
    return is_float32 and not is_empty and matmul_library() == "onednn"


def _takes_bfloat16(rows: Tensor, weight: Tensor) -> bool:
    """Returns True if autocast would compute this product in bfloat16."""
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return False
    is_cast = {rows.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
    return is_cast and rows.numel() > 0


@torch.no_grad()
def _bfloat16_copy(weight: Tensor) -> Tensor:
    """Returns a weight in bfloat16, the stored copy while ``reuse_bfloat16_weights`` is open."""
    copies = _BFLOAT16_WEIGHTS.get()
    if copies is None or not isinstance(weight, nn.Parameter):  # which lives longer than the context
        return weight.bfloat16()
    copy = copies.get(id(weight))
    if copy is None:
        copy = weight.bfloat16()
        copies.update({id(weight): copy})
    return copy


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", form: str | None = None
) -> Tensor:
    """Multiplies ``[..., I], [O, I] -> [..., O]`` with oneDNN, also transposed views."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], form)
    return product


class _OneDNN(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        saved_rows: Tensor | None = rows
        if not ctx.needs_input_grad[1]:
            saved_rows = None  # only the gradient of the weight reads them, so a frozen layer keeps none
        ctx.save_for_backward(saved_rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        flat = gradient.flatten(0, -2)  # [N, O]
        rows_gradient = weight_gradient = bias_gradient = None
        if of_rows:
            rows_gradient = _product(gradient, weight.t(), None)
        if of_weight:
            weight_gradient = _weight_gradient(flat, rows.flatten(0, -2))
        if of_bias:
            bias_gradient = flat.sum(0)
        return rows_gradient, weight_gradient, bias_gradient


def _weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """Multiplies ``[N, O], [N, I] -> [O, I]`` with oneDNN.

    The operator copies its first matrix if it is a transposed view, which takes up to a third of the time. So it is the
    gradient, or the rows, whose product is transposed, to copy less.
    """
    (count, outputs), inputs = gradient.shape, rows.shape[1]
    if count * outputs <= (count + outputs) * inputs:
        return _product(gradient.t(), rows.t(), None)
    return _product(rows.t(), gradient.t(), None).t()


_onednn: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _OneDNN.apply


class _BFloat16(torch.autograd.Function):
    """A linear layer whose three products are computed in bfloat16.

    The gradients of weight and bias do not change their type. ``copy`` is the weight in the products. The weight itself
    is an input for its gradient, summed over blocks in its type.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor) -> Tensor:
        saved_rows: Tensor | None = rows
        if not ctx.needs_input_grad[1]:
            saved_rows = None
        ctx.save_for_backward(saved_rows, weight, copy)
        if bias is not None:
            bias = bias.bfloat16()
        return _block_product(_blocks(rows), copy.t(), bias, rows.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight, copy = ctx.saved_tensors
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        blocks = tuple(_blocks(gradient))
        rows_gradient = weight_gradient = bias_gradient = None
        if of_weight:
            # Added in the type of the weight, because a sum of many blocks in bfloat16 would lose digits.
            products = (left.t() @ right for left, right in zip(blocks, _blocks(rows), strict=True))
            weight_gradient = next(products).to(weight.dtype)
            for product in products:
                weight_gradient += product
        if of_rows:
            rows_gradient = _block_product(blocks, copy, None, gradient.shape[:-1])
        if of_bias:
            bias_gradient = gradient.flatten(0, -2).sum(0).to(weight.dtype)
        return rows_gradient, weight_gradient, bias_gradient, None


def _block_product(blocks: Iterable[Tensor], matrix: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """Returns ``[*shape, O]``, the product of blocks ``[..., I]`` and ``[I, O]``."""
    outputs, count = matrix.shape[1], shape.numel()
    product = matrix.new_empty(count + -count % _MULTIPLE, outputs)
    for block, out in zip(blocks, torch.split(product, _BLOCK), strict=True):
        if bias is None:
            torch.mm(block, matrix, out=out)
        else:
            torch.addmm(bias, block, matrix, out=out)
    return product[:count].view(*shape, outputs)


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Cuts ``[..., I]`` into blocks of 512 rows and a padded last block.

    The last block is padded to a multiple of 64 rows, or of 128 with AMX. So the products of a layer have few shapes,
    whatever the lengths of the data.
    """
    *whole, last = torch.split(rows.flatten(0, -2), _BLOCK)
    yield from whole
    yield F.pad(last, (0, 0, 0, -len(last) % _MULTIPLE))


_bfloat16: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] = _BFloat16.apply


def uses_random_bits(hidden: Tensor, p: float) -> bool:
    """Returns True if dropout of this tensor with probability ``p`` draws random bits."""
    is_drawn = 0 < round(p * _VALUES) < _VALUES
    return is_drawn and hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64, torch.bfloat16)


def random_bits(shape: Sequence[int]) -> Tensor:
    """Draws ``int16`` numbers from the CPU's generator, every value equally likely."""
    count = torch.Size(shape).numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:count].view(shape)


def keep_mask(bits: Tensor, p: float, *, out: Tensor) -> Tensor:
    """Writes 1 into ``out`` (any floating type) if the bits keep an element, else 0."""
    return torch.ge(bits, round(p * _VALUES) - _VALUES // 2, out=out)


def keep_scale(p: float) -> float:
    """Returns the factor of kept elements, which preserves the expected value."""
    return _VALUES / (_VALUES - round(p * _VALUES))


def map_batches(
    function: Callable[[Item], Result], batches: Iterable[Item], *, device: torch.device
) -> Generator[Result, None, None]:
    """Applies ``function`` to each batch and yields the results in order.

    On a CPU two batches run at the same time if torch's threads can be divided. Threads know the context variables of
    the caller, but not torch's modes (inference, autocast), which ``function`` sets. A single batch gets all of torch's
    threads.

    Args:
        batches: Read when they are needed, a few ahead.
        device: The device on which ``function`` computes.

    Raises:
        Exception: The error of ``function``, after the batches that have begun.
    """
    threads = torch.get_num_threads()
    remaining = iter(batches)
    first = list(islice(remaining, 2))
    if len(first) < 2 or device.type != "cpu" or threads % _WORKERS != 0:
        yield from map(function, chain(first, remaining))
        return
    pool = _pool(os.getpid(), threads // _WORKERS)
    pending: deque[Future[Result]] = deque()
    try:
        for batch in chain(first, remaining):
            pending.append(pool.submit(copy_context().run, function, batch))
            if len(pending) == 2 * _WORKERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
        torch.set_num_threads(threads)  # a worker that has begun meanwhile has changed what later threads begin with


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Returns the workers of a process, each with ``threads`` threads of torch.

    The workers persist, because oneDNN caches its preparations for each thread. A forked process has no workers.
    """
    return ThreadPoolExecutor(_WORKERS, "bert_tasks", initializer=_begin, initargs=(threads,))


def _begin(threads: int) -> None:
    """Sets the number of torch's threads in a new worker."""
    torch.get_num_threads()  # first, because the first use in a thread sets the number that all threads begin with
    torch.set_num_threads(threads)

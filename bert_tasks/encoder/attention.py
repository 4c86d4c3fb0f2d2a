"""Self-attention over packed or padded tokens.

``attend`` and ``attend_cls_query`` separate the sequences, and ``attend`` chooses the kernel. A layer passes queries,
keys and values in one tensor, because one product makes them and one gather regroups them. On the CPU, training with
attention dropout uses ``attention_with_dropout``, because torch has no fast kernel there that drops attention weights.
If a token attends to a window of its sequence, work and memory grow with N and not with T * T.

Shape legend: N tokens (rows of a layout), B sequences, T padded length, A heads, D head size, H = A * D, M = B * A, P
rows of the padded groups, W window, C blocks of rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bert_tasks.encoder.cpu import keep_mask, keep_scale, random_bits, uses_random_bits
from bert_tasks.encoder.dropout import drop
from bert_tasks.encoder.packing import Packed, Padded
from bert_tasks.encoder.positions import Scores

Backend = Literal["grouped", "flash"]

# Attention weights of one piece, 1 MiB in float32. Larger pieces leave the cache, smaller pieces cost more calls.
_PIECE = 2**18


def attention_backend(*, device: torch.device, dtype: torch.dtype, head_size: int, has_scores: bool = False) -> Backend:
    """Returns the kernel for packed tokens, which does not change the mathematics.

    ``flash`` is torch's FlashAttention-2 for CUDA (Dao, arXiv:2307.08691). It computes in half precision, needs a head
    size that is a multiple of 8 up to 256, and adds nothing to the scores.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    fits = head_size % 8 == 0 and head_size <= 256
    if torch.cuda.is_available() and device.type == "cuda":
        fits = fits and torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    if device.type == "cuda" and is_half and fits and not has_scores:
        return "flash"
    return "grouped"


def attend(
    qkv: Tensor,
    layout: Packed | Padded,
    *,
    dropout: float,
    window: int | None = None,
    scores: Scores | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes scaled dot-product attention inside each sequence.

    Args:
        qkv: ``[N, 3, A, D]`` queries, keys and values.
        layout: Layout of the sequences.
        dropout: Probability of dropping an attention weight. Use 0 outside training.
        window: Number of tokens on each side that a token attends to. None means all. In a padded layout, columns are
            counted instead of tokens.
        scores: Terms to add to the scaled products of queries and keys. None means no terms.
        scale: Factor of these products. Default: ``1 / sqrt(D)``.

    Returns:
        ``[N, H]`` context. At the padding of a padded layout it has no meaning.
    """
    if isinstance(layout, Padded):
        mask = layout.mask[:, None, None, :]  # [B, 1, 1, T]
        if window is not None:
            mask = _within(window, mask, layout.length, mask.device)
        return attend_padded(qkv, layout.batch, layout.length, mask, dropout, scores, scale)
    if window is not None and max(layout.lengths) <= window + 1:
        window = None
    has_scores = scores is not None or scale is not None
    backend = attention_backend(device=qkv.device, dtype=qkv.dtype, head_size=qkv.shape[-1], has_scores=has_scores)
    if backend == "flash":
        return flash_attention(qkv, layout.cu_seqlens, max(layout.lengths), dropout, window).flatten(1)
    if window is not None and not has_scores:
        return _attend_window(qkv, layout.sequence_of_row, window, dropout)
    regroup, qkv = layout.regroup, pad_groups(qkv, layout)  # [P, 3, A, D]
    # The gradient of a split is one concatenation, the gradient of a slice is as large as the whole.
    parts = torch.split(qkv, [group.rows for group in layout.groups])
    contexts = []
    for group, rows in zip(layout.groups, parts, strict=True):
        allowed = group.mask
        if window is not None:
            allowed = _within(window, group.mask, group.length, rows.device)
        contexts.append(attend_padded(rows, group.sequences, group.length, allowed, dropout, scores, scale))
    context = contexts[0]
    if len(contexts) > 1:  # else a copy would cost as much as it does for several groups
        context = torch.cat(contexts)  # [P, H]
    if regroup is None:
        return context
    return _unpad(context, regroup.unpad_index)


def _within(window: int, mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Returns the mask ``[B, 1, T, T]`` of allowed keys at most ``window`` away."""
    columns = torch.arange(length, device=device)
    distance = (columns[:, None] - columns).abs()  # [T, T]
    near = distance <= window
    if mask is None:
        return near[None, None]
    # A token of the padding attends to itself, because a softmax over nothing would not be a number.
    return (mask & near) | (distance == 0)


def attend_cls_query(query: Tensor, key_value: Tensor, layout: Packed, *, dropout: float) -> Tensor:
    """Computes the attention of each first token, for heads that read no other.

    In the last layer this needs 1 / T of the queries, and of the products with keys and values.

    Args:
        query: ``[B, A, D]`` of the first tokens, in the order of the rows (``layout.cu_seqlens``).
        key_value: ``[N, 2, A, D]`` keys and values of all tokens.

    Returns:
        ``[B, H]`` context, in the order of the rows.
    """
    key_value = pad_groups(key_value, layout)  # [P, 2, A, D]
    queries = torch.split(query, [group.sequences for group in layout.groups])
    parts = torch.split(key_value, [group.rows for group in layout.groups])
    contexts = []
    for group, first, rows in zip(layout.groups, queries, parts, strict=True):
        rows = rows.view(group.sequences, group.length, *key_value.shape[1:])
        key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)  # [sequences, A, T, D]
        context = _attend_heads(first.unsqueeze(2), key, value, group.mask, dropout)  # [sequences, A, 1, D]
        contexts.append(context)
    return torch.cat(contexts).flatten(1)


def pad_groups(rows: Tensor, layout: Packed) -> Tensor:
    """Arranges packed rows in groups, ``[N, ...] -> [P, ...]``, padded with row 0."""
    if layout.regroup is None:
        return rows
    return _pad(rows, layout.regroup.pad_index, layout.regroup.unpad_index)


def _attend_window(qkv: Tensor, sequence_of_row: Tensor, window: int, dropout: float) -> Tensor:
    """Attends to neighbours at most ``window`` away, ``[N, 3, A, D] -> [N, H]``.

    The packed rows are cut into blocks of 2 W queries that may span several sequences. The keys of a block are its rows
    and W rows on each side, and a mask keeps the keys of the same sequence within the window.
    """
    rows, _, heads, size = qkv.shape
    block = 2 * window
    missing = -rows % block
    padded = F.pad(qkv, (0, 0, 0, 0, 0, 0, window, window + missing))  # [W + C * block + W, 3, A, D]
    query, key_value = torch.split(padded, [1, 2], dim=1)
    query = query.narrow(0, window, rows + missing).view(-1, block, heads, size).transpose(1, 2)  # [C, A, block, D]
    key, value = key_value.unfold(0, 2 * block, block).permute(1, 0, 2, 4, 3).unbind(0)  # [C, A, 2 * block, D]
    # Padding is a sequence of its own, so that each of its queries has a key and its softmax is a number.
    sequences = F.pad(sequence_of_row, (window, window + missing), value=-1)
    of_query = sequences.narrow(0, window, rows + missing).view(-1, 1, block, 1)
    of_key = sequences.unfold(0, 2 * block, block)[:, None, None, :]  # [C, 1, 1, 2 * block]
    places = torch.arange(2 * block, device=qkv.device)
    distance = (places.narrow(0, window, block)[:, None] - places).abs()  # [block, 2 * block]
    mask = (of_query == of_key) & (distance <= window)  # [C, 1, block, 2 * block]
    context = _attend_heads(query, key, value, mask, dropout)
    return context.transpose(1, 2).reshape(-1, heads * size).narrow(0, 0, rows)


def attend_padded(
    qkv: Tensor,
    batch: int,
    length: int,
    mask: Tensor | None,
    dropout: float,
    scores: Scores | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attends in padded sequences, ``[B * T, 3, A, D] -> [B * T, H]``."""
    _, _, heads, size = qkv.shape
    qkv = qkv.view(batch, length, 3, heads, size)
    is_plain = scores is None and scale is None and (mask is None or mask.shape[2] == 1)
    if is_plain and uses_random_bits(qkv, dropout):
        exact = qkv
        if qkv.dtype == torch.bfloat16:
            # oneDNN would compile products in bfloat16 for each length, which costs more than they gain.
            exact = qkv.float()
        return attention_with_dropout(exact, mask, dropout).view(batch * length, heads * size).to(qkv.dtype)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, A, T, D]
    if scores is not None:
        added = scores(query, key)  # broadcastable to [B, A, T, T]
        if mask is not None:
            added = added.masked_fill(~mask, torch.finfo(added.dtype).min)
        mask = added
    context = _attend_heads(query, key, value, mask, dropout, scale)
    return context.transpose(1, 2).reshape(batch * length, heads * size)


def _attend_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None
) -> Tensor:
    """Computes ``scaled_dot_product_attention``, or the formula with our dropout.

    Args:
        query, key, value: ``[..., A, T, D]``. The query's T may differ.
        mask: Broadcastable to ``[..., A, T, T]``. Holds True at keys that may be attended to, or numbers to add. None
            means all.
    """
    if not uses_random_bits(query, dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    dtype = query.dtype
    if dtype == torch.bfloat16:  # see attend_padded
        query, key, value = query.float(), key.float(), value.float()
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    weights = (query * scale) @ key.transpose(-2, -1)  # [..., A, T, T]
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        weights = weights + mask
    return (drop(weights.softmax(-1), dropout) @ value).to(dtype)


class _Pad(torch.autograd.Function):
    """Pads packed rows to groups. Attention masks padding, so it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        return rows.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (unpad_index,) = ctx.saved_tensors
        return gradient.index_select(0, unpad_index), None, None


class _Unpad(torch.autograd.Function):
    """Arranges padded groups as packed rows. Padding gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        ctx.padded_rows = rows.shape[0]
        return rows.index_select(0, unpad_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (unpad_index,) = ctx.saved_tensors
        padded = gradient.new_zeros(ctx.padded_rows, *gradient.shape[1:])
        return padded.index_copy_(0, unpad_index, gradient), None


_pad: Callable[[Tensor, Tensor, Tensor], Tensor] = _Pad.apply
_unpad: Callable[[Tensor, Tensor], Tensor] = _Unpad.apply


class _FlashAttention(torch.autograd.Function):
    """FlashAttention with dropout, which ``torch.nn.attention.varlen`` does not have.

    Args:
        qkv: ``[N, 3, A, D]`` queries, keys and values on a CUDA device, in half precision.
        starts: ``[B + 1]`` int32, the rows at which the sequences start.
        longest: Length of the longest sequence in tokens.
        dropout: Probability of dropping a weight.
        window: Number of tokens on each side that a token attends to. None means all.

    Returns:
        ``[N, A, D]`` context.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, starts: Tensor, longest: int, dropout: float, window: int | None) -> Tensor:
        query, key, value = qkv.unbind(1)  # [N, A, D]
        sides = {"window_size_left": window, "window_size_right": window}
        context, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, dropout, False, False, **sides
        )
        ctx.save_for_backward(qkv, context, logsumexp, starts, seed, offset)
        ctx.options = longest, dropout, sides
        return cast("Tensor", context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, context, logsumexp, starts, seed, offset = ctx.saved_tensors
        longest, dropout, sides = ctx.options
        inputs = (gradient.contiguous(), *qkv.unbind(1), context, logsumexp, starts, starts, longest, longest, dropout)
        with _deterministic():
            gradients = torch.ops.aten._flash_attention_backward(*inputs, False, seed, offset, **sides)
        return torch.stack(gradients, dim=1), None, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Makes the flash kernel add in a fixed order, so that two runs have equal bits."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


flash_attention: Callable[[Tensor, Tensor, int, float, int | None], Tensor] = _FlashAttention.apply


class _AttentionWithDropout(torch.autograd.Function):
    """Attention that drops weights with probability ``p``.

    It computes what ``scaled_dot_product_attention`` does, in pieces whose weights stay in the processor's cache, and
    stores each weight with its random bits for the backward pass.

    Args:
        qkv: ``[B, T, 3, A, D]`` queries, keys and values on the CPU, float32 or float64.
        mask: ``[B, 1, 1, T]`` True at keys that may be attended to. None means all.
        p: Probability of dropping a weight.

    Returns:
        ``[B, T, A, D]`` context.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
        batch, length, _, heads, size = qkv.shape
        query, key, value = by_head = qkv.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, size)
        weights = qkv.new_empty(batch * heads, length, length)  # [M, T, T]
        bits = random_bits(weights.shape)
        context = torch.empty_like(query)  # [M, T, D]
        piece = max(1, _PIECE // length**2)  # matrices whose weights stay in the cache
        pieces = (torch.split(tensor, piece) for tensor in (query, key, value, weights, bits, context))
        biases: Iterable[Tensor | None] = repeat(None)
        if mask is not None:  # 0 at keys that may be attended to, else the lowest number
            of_keys = torch.zeros_like(mask, dtype=qkv.dtype).masked_fill_(~mask, torch.finfo(qkv.dtype).min)
            of_keys = of_keys.expand(-1, heads, 1, -1).reshape(-1, 1, length)  # [M, 1, T]
            biases = torch.split(of_keys, piece)
        for q, k, v, weight, bit, out, bias in zip(*pieces, biases, strict=False):
            beta = 1
            if bias is None:
                bias, beta = weight, 0  # with 0 the function does not read this input, which it still demands
            torch.baddbmm(bias, q, k.transpose(1, 2), beta=beta, alpha=1 / math.sqrt(size), out=weight)
            torch.softmax(weight, -1, out=weight)
            factors = keep_mask(bit, p, out=torch.empty_like(weight))
            torch.bmm(factors.mul_(weight), v, out=out)
        context *= keep_scale(p)
        ctx.save_for_backward(by_head, weights, bits)
        ctx.p = p
        return context.view(batch, heads, length, size).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by_head, weights, bits = ctx.saved_tensors
        batch, length, heads, size = gradient.shape
        gradients = torch.empty_like(by_head)  # [3, M, T, D]
        of_context = (gradient.transpose(1, 2) * keep_scale(ctx.p)).reshape(-1, length, size)  # [M, T, D]
        tensors = (*by_head, weights, bits, of_context, *gradients)
        pieces = (torch.split(tensor, max(1, _PIECE // length**2)) for tensor in tensors)
        for q, k, v, weight, bit, outer, of_q, of_k, of_v in zip(*pieces, strict=True):
            factors = keep_mask(bit, ctx.p, out=torch.empty_like(weight))
            torch.bmm((weight * factors).transpose(1, 2), outer, out=of_v)
            of_weight = torch.bmm(outer, v.transpose(1, 2)).mul_(factors)
            of_score = torch._softmax_backward_data(of_weight, weight, -1, weight.dtype)
            torch.bmm(of_score, k, out=of_q)
            torch.bmm(of_score.transpose(1, 2), q, out=of_k)
        gradients[:2] *= 1 / math.sqrt(size)
        return gradients.view(3, batch, heads, length, size).permute(1, 3, 0, 2, 4).contiguous(), None, None


attention_with_dropout: Callable[[Tensor, Tensor | None, float], Tensor] = _AttentionWithDropout.apply

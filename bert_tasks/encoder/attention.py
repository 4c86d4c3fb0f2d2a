"""Self-attention over packed or padded tokens.

``attend`` and ``attend_cls_query`` keep the sequences apart, and ``attend`` chooses the kernel. A layer passes queries,
keys and values in one tensor, because one product makes them and one gather regroups them. On the CPU, training with
attention dropout uses ``attention_with_dropout``, because torch has no fast kernel there that drops attention weights.
If a packed token attends to a window of its sequence, work and memory grow with N * W and not with N * T, unless a
layer adds terms to the scores.

Shape legend: N tokens (rows of a layout), B sequences, T padded length, A heads, D head size, H = A * D, M = B * A, P
rows of the padded groups, W window, C blocks of rows. Where a function handles one group, B and T are the group's.
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

# Attention weights of one piece of ``attention_with_dropout``, 1 MiB in float32. Larger pieces do not fit into the
# cache, smaller pieces cost more calls.
_PIECE = 2**18


def attention_backend(*, device: torch.device, dtype: torch.dtype, head_size: int, has_scores: bool = False) -> Backend:
    """Returns the fastest kernel that can handle packed tokens.

    All kernels compute the same formula, up to rounding. ``grouped`` calls ``attend_padded`` for each group of the
    layout, or attends to neighbours in blocks if there is a window. ``flash`` is torch's FlashAttention-2 for CUDA
    (Dao, arXiv:2307.08691), one call for all sequences. It computes in half precision, needs a head size that is a
    multiple of 8 up to 256, adds nothing to the scores, and is called with their default scale.

    Args:
        device, dtype, head_size: Those of the queries.
        has_scores: The layer adds terms to the scores or has its own scale.
    """
    if device.type != "cuda" or has_scores:
        return "grouped"
    if dtype not in (torch.float16, torch.bfloat16) or head_size % 8 != 0 or head_size > 256:
        return "grouped"
    # Without a GPU the capability is unknown, and the answer is the one for a recent GPU.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):  # older than Ampere
        return "grouped"
    return "flash"


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

    A padded layout is one call with a mask. Packed tokens use the flash kernel if they can. Otherwise a window without
    ``scores`` and ``scale`` is computed in blocks, and everything else in one call for each group of the layout.

    Args:
        qkv: ``[N, 3, A, D]`` queries, keys and values.
        layout: Layout of the sequences. The rows of ``qkv`` are in its order.
        dropout: Probability of dropping an attention weight. Use 0 outside training.
        window: Number of tokens on each side that a token attends to. None means all. In a padded layout, columns are
            counted instead of tokens.
        scores: Terms to add to the scaled products of queries and keys. None means no terms.
        scale: Factor of these products. Default: ``1 / sqrt(D)``.

    Returns:
        ``[N, H]`` context, in the order of the rows. At the padding of a padded layout it has no meaning.
    """
    if isinstance(layout, Padded):
        mask = layout.mask[:, None, None, :]  # [B, 1, 1, T]
        if window is not None:
            mask = _window_mask(window, mask, layout.length, mask.device)
        return attend_padded(qkv, layout.batch, layout.length, mask, dropout, scores, scale)
    if window is not None and max(layout.lengths) <= window + 1:
        window = None  # because every window holds its whole sequence
    has_scores = scores is not None or scale is not None
    backend = attention_backend(device=qkv.device, dtype=qkv.dtype, head_size=qkv.shape[-1], has_scores=has_scores)
    if backend == "flash":
        return flash_attention(qkv, layout.cu_seqlens, max(layout.lengths), dropout, window).flatten(1)
    if window is not None and not has_scores:
        return _attend_window(qkv, layout.sequence_of_row, window, dropout)
    padded_qkv = pad_groups(qkv, layout)  # [P, 3, A, D]
    # A split and not slices. Its gradient is one concatenation, that of every slice would be as large as padded_qkv.
    qkv_by_group = torch.split(padded_qkv, [group.rows for group in layout.groups])
    contexts = []
    for group, group_qkv in zip(layout.groups, qkv_by_group, strict=True):
        group_mask = group.mask
        if window is not None:
            group_mask = _window_mask(window, group_mask, group.length, group_qkv.device)
        contexts.append(attend_padded(group_qkv, group.sequences, group.length, group_mask, dropout, scores, scale))
    context = contexts[0]
    if len(contexts) > 1:  # because torch.cat would copy a single context
        context = torch.cat(contexts)  # [P, H]
    if layout.regroup is None:
        return context
    return _unpad(context, layout.regroup.unpad_index)


def _window_mask(window: int, mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Limits a mask of keys to those at most ``window`` columns away from the query.

    Args:
        mask: ``[B, 1, 1, T]`` True at real tokens. None means that all are.

    Returns:
        ``[B, 1, T, T]``, or ``[1, 1, T, T]`` if ``mask`` is None. True at keys that a query may attend to.
    """
    columns = torch.arange(length, device=device)
    distance = (columns[:, None] - columns).abs()  # [T, T]
    is_near = distance <= window
    if mask is None:
        return is_near[None, None]
    # A token of the padding attends to itself, because a softmax over nothing would not be a number.
    return (mask & is_near) | (distance == 0)


def attend_cls_query(query: Tensor, key_value: Tensor, layout: Packed, *, dropout: float) -> Tensor:
    """Computes the attention of the first token of each sequence only.

    It is for the last layer under a head that reads no other token. It needs 1 / T of the queries, and of the products
    with keys and values.

    Args:
        query: ``[B, A, D]`` of the first tokens, in the order of the rows (``layout.cu_seqlens``).
        key_value: ``[N, 2, A, D]`` keys and values of all tokens.
        layout: Layout of the sequences.
        dropout: Probability of dropping an attention weight. Use 0 outside training.

    Returns:
        ``[B, H]`` context, in the order of the rows.
    """
    key_value = pad_groups(key_value, layout)  # [P, 2, A, D]
    query_by_group = torch.split(query, [group.sequences for group in layout.groups])
    key_value_by_group = torch.split(key_value, [group.rows for group in layout.groups])
    contexts = []
    for group, group_query, group_rows in zip(layout.groups, query_by_group, key_value_by_group, strict=True):
        group_key_value = group_rows.view(group.sequences, group.length, *key_value.shape[1:])  # [B, T, 2, A, D]
        key, value = group_key_value.permute(2, 0, 3, 1, 4).unbind(0)  # [B, A, T, D]
        single_query = group_query.unsqueeze(2)  # [B, A, 1, D]
        contexts.append(_attend_heads(single_query, key, value, group.mask, dropout))
    return torch.cat(contexts).flatten(1)


def pad_groups(rows: Tensor, layout: Packed) -> Tensor:
    """Arranges packed rows in groups, ``[N, ...] -> [P, ...]``.

    The padding holds copies of row 0, which get no gradient. If no group needs padding, this returns ``rows`` itself.
    """
    if layout.regroup is None:
        return rows
    return _pad(rows, layout.regroup.pad_index, layout.regroup.unpad_index)


def _attend_window(qkv: Tensor, sequence_of_row: Tensor, window: int, dropout: float) -> Tensor:
    """Attends to neighbours at most ``window`` away, ``[N, 3, A, D] -> [N, H]``.

    The packed rows are cut into blocks of 2 W queries that may span several sequences. The keys of a block, its span,
    are its own rows and W rows on each side, and a mask keeps the keys of the same sequence within the window. Shorter
    blocks would copy each key more often, longer blocks would compute more products that the mask discards.

    Args:
        sequence_of_row: ``[N]`` the index of each row's sequence.
    """
    row_count, _, heads, head_size = qkv.shape
    block = 2 * window
    span = 2 * block  # W + block + W
    missing = -row_count % block  # rows until the last block is full
    # F.pad takes the last dimension first. The last pair is for the rows.
    padded = F.pad(qkv, (0, 0, 0, 0, 0, 0, window, window + missing))  # [W + C * block + W, 3, A, D]
    query, key_value = torch.split(padded, [1, 2], dim=1)
    query = query.narrow(0, window, row_count + missing)  # [C * block, 1, A, D]
    query = query.view(-1, block, heads, head_size).transpose(1, 2)  # [C, A, block, D]
    spans = key_value.unfold(0, span, block)  # [C, 2, A, D, span], views that overlap
    key, value = spans.permute(1, 0, 2, 4, 3).unbind(0)  # [C, A, span, D]
    # Padding is a sequence of its own, so that each of its queries has a key and its softmax is a number.
    sequences = F.pad(sequence_of_row, (window, window + missing), value=-1)
    query_sequence = sequences.narrow(0, window, row_count + missing).view(-1, 1, block, 1)  # [C, 1, block, 1]
    key_sequence = sequences.unfold(0, span, block)[:, None, None, :]  # [C, 1, 1, span]
    key_place = torch.arange(span, device=qkv.device)
    query_place = key_place.narrow(0, window, block)
    distance = (query_place[:, None] - key_place).abs()  # [block, span]
    mask = (query_sequence == key_sequence) & (distance <= window)  # [C, 1, block, span]
    context = _attend_heads(query, key, value, mask, dropout)  # [C, A, block, D]
    return context.transpose(1, 2).reshape(-1, heads * head_size).narrow(0, 0, row_count)


def attend_padded(
    qkv: Tensor,
    batch: int,
    length: int,
    mask: Tensor | None,
    dropout: float,
    scores: Scores | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attends in padded sequences, ``[B * T, 3, A, D] -> [B * T, H]``.

    Args:
        qkv: Queries, keys and values, sequence after sequence.
        batch: Number of sequences.
        length: Padded length.
        mask: ``[B, 1, 1, T]``, or ``[B, 1, T, T]`` if it depends on the query, where B may be 1. True at keys that may
            be attended to. None means all.
        dropout, scores, scale: See ``attend``.
    """
    _, _, heads, head_size = qkv.shape
    qkv = qkv.view(batch, length, 3, heads, head_size)
    has_query_mask = mask is not None and mask.shape[2] != 1
    is_plain = scores is None and scale is None and not has_query_mask  # what attention_with_dropout computes
    if is_plain and uses_random_bits(qkv, dropout):
        dtype = qkv.dtype
        if dtype == torch.bfloat16:
            # oneDNN would compile products in bfloat16 for each length, which costs more than they gain.
            qkv = qkv.float()
        context = attention_with_dropout(qkv, mask, dropout)  # [B, T, A, D]
        return context.view(batch * length, heads * head_size).to(dtype)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, A, T, D]
    if scores is not None:
        terms = scores(query, key)  # broadcastable to [B, A, T, T]
        if mask is not None:
            # The kernel takes one mask, so the terms at the other keys are as low as the dtype can hold.
            terms = terms.masked_fill(~mask, torch.finfo(terms.dtype).min)
        mask = terms
    context = _attend_heads(query, key, value, mask, dropout, scale)  # [B, A, T, D]
    return context.transpose(1, 2).reshape(batch * length, heads * head_size)


def _attend_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None
) -> Tensor:
    """Computes ``scaled_dot_product_attention``.

    With dropout on the CPU it computes the formula step by step, because torch's kernel draws its random numbers slowly
    (``encoder/cpu.py``).

    Args:
        query, key, value: ``[..., A, T, D]``. The query's T may differ.
        mask: Broadcastable to ``[..., A, T, T]`` (query, key). Holds True at keys that may be attended to, or numbers
            to add. None means all.
        dropout: Probability of dropping an attention weight.
        scale: Factor of the products. Default: ``1 / sqrt(D)``.

    Returns:
        ``[..., A, T, D]`` context, with the query's T and dtype.
    """
    if not uses_random_bits(query, dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    dtype = query.dtype
    if dtype == torch.bfloat16:  # see attend_padded
        query, key, value = query.float(), key.float(), value.float()
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    products = (query * scale) @ key.transpose(-2, -1)  # [..., A, T, T]
    if mask is not None and mask.dtype == torch.bool:
        products = products.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        products = products + mask
    weights = drop(products.softmax(-1), dropout)
    return (weights @ value).to(dtype)


class _Pad(torch.autograd.Function):
    """Arranges packed rows as padded groups. The gradient of the padding is discarded.

    Padding holds copies of row 0, but attention masks them, so they contribute nothing to its gradient. Therefore the
    backward pass can be a gather of the real rows. ``index_select`` would add all copies, on a GPU in any order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        return rows.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (unpad_index,) = ctx.saved_tensors
        return gradient.index_select(0, unpad_index), None, None


class _Unpad(torch.autograd.Function):
    """Arranges padded groups as packed rows. Padding gets a gradient of zero.

    No row of the groups is read twice, so the backward pass can copy the rows where ``index_select`` would add them.
    """

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
        cu_seqlens: ``[B + 1]`` int32, the rows at which the sequences start, and N at the end.
        max_length: Length of the longest sequence in tokens.
        dropout: Probability of dropping a weight.
        window: Number of tokens on each side that a token attends to. None means all.

    Returns:
        ``[N, A, D]`` context.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, window: int | None
    ) -> Tensor:
        query, key, value = qkv.unbind(1)  # [N, A, D]
        # Each pair is for queries and for keys, which are the same tokens here.
        sequences = (cu_seqlens, cu_seqlens, max_length, max_length)
        is_causal, return_debug_mask = False, False
        sides = {"window_size_left": window, "window_size_right": window}
        context, logsumexp, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *sequences, dropout, is_causal, return_debug_mask, **sides
        )
        # The backward kernel draws the dropped weights again from the random state. It demands ``unused``, too.
        ctx.save_for_backward(qkv, context, logsumexp, cu_seqlens, random_state, unused)
        ctx.options = max_length, dropout, is_causal, sides
        return cast("Tensor", context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, context, logsumexp, cu_seqlens, random_state, unused = ctx.saved_tensors
        max_length, dropout, is_causal, sides = ctx.options
        query, key, value = qkv.unbind(1)
        inputs = (gradient.contiguous(), query, key, value, context, logsumexp)
        sequences = (cu_seqlens, cu_seqlens, max_length, max_length)
        with _deterministic():
            gradients = torch.ops.aten._flash_attention_backward(
                *inputs, *sequences, dropout, is_causal, random_state, unused, **sides
            )
        return torch.stack(gradients, dim=1), None, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Asks for deterministic algorithms inside the block, for a flash kernel that adds in a fixed order.

    torch's flash kernel follows the setting only without ``warn_only``; with it, the kernel warns and adds in any order
    (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/attention_backward.cu). The
    caller's setting returns at the end, because it holds for the whole process.
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)


flash_attention: Callable[[Tensor, Tensor, int, float, int | None], Tensor] = _FlashAttention.apply


class _AttentionWithDropout(torch.autograd.Function):
    """Attention that drops weights, for a CPU.

    It computes what ``scaled_dot_product_attention`` does, in pieces of a few matrices whose weights stay in the
    processor's cache. For the backward pass it stores all weights before dropout and their random bits, of which it
    makes the factors F again.

    In formulas, W = softmax(Q K^T / sqrt(D)) and context = keep_scale * (W * F) V, where F is 1 at kept weights and 0
    at dropped ones.

    Args:
        qkv: ``[B, T, 3, A, D]`` queries, keys and values on the CPU, float32 or float64.
        mask: ``[B, 1, 1, T]`` True at keys that may be attended to. None means all.
        dropout: Probability of dropping a weight.

    Returns:
        ``[B, T, A, D]`` context.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        batch, length, _, heads, head_size = qkv.shape
        by_head = qkv.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, head_size)  # [3, M, T, D]
        query, key, value = by_head
        weights = qkv.new_empty(batch * heads, length, length)  # [M, T, T]
        bits = random_bits(weights.shape)
        context = torch.empty_like(query)  # [M, T, D]
        piece_size = max(1, _PIECE // length**2)  # matrices of one piece
        pieces = (torch.split(tensor, piece_size) for tensor in (query, key, value, weights, bits, context))
        biases: Iterable[Tensor | None] = repeat(None)
        if mask is not None:  # 0 at keys that may be attended to, else the lowest number
            key_bias = torch.zeros_like(mask, dtype=qkv.dtype).masked_fill_(~mask, torch.finfo(qkv.dtype).min)
            key_bias = key_bias.expand(-1, heads, 1, -1).reshape(-1, 1, length)  # [M, 1, T]
            biases = torch.split(key_bias, piece_size)
        scale = 1 / math.sqrt(head_size)
        # Results are written into pieces of ``weights`` and ``context``. Not strict, because repeat(None) has no end.
        for q, k, v, weight, bit, out, bias in zip(*pieces, biases, strict=False):
            beta = 1
            if bias is None:
                bias, beta = weight, 0  # with 0 the function does not read this input, which it still demands
            torch.baddbmm(bias, q, k.transpose(1, 2), beta=beta, alpha=scale, out=weight)
            torch.softmax(weight, -1, out=weight)
            factors = keep_mask(bit, dropout, out=torch.empty_like(weight))
            torch.bmm(factors.mul_(weight), v, out=out)
        context *= keep_scale(dropout)
        ctx.save_for_backward(by_head, weights, bits)
        ctx.dropout, ctx.piece_size = dropout, piece_size
        return context.view(batch, heads, length, head_size).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by_head, weights, bits = ctx.saved_tensors
        batch, length, heads, head_size = gradient.shape
        d_contexts = gradient.transpose(1, 2) * keep_scale(ctx.dropout)  # [B, A, T, D]
        d_contexts = d_contexts.reshape(-1, length, head_size)  # [M, T, D]
        gradients = torch.empty_like(by_head)  # [3, M, T, D], of queries, keys and values
        tensors = (*by_head, weights, bits, d_contexts, *gradients)
        pieces = (torch.split(tensor, ctx.piece_size) for tensor in tensors)
        # d_x is the gradient of x. Gradients of the inputs are written into pieces of ``gradients``.
        for q, k, v, weight, bit, d_context, d_q, d_k, d_v in zip(*pieces, strict=True):
            factors = keep_mask(bit, ctx.dropout, out=torch.empty_like(weight))
            torch.bmm((weight * factors).transpose(1, 2), d_context, out=d_v)
            d_weight = torch.bmm(d_context, v.transpose(1, 2)).mul_(factors)
            d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
            torch.bmm(d_score, k, out=d_q)
            torch.bmm(d_score.transpose(1, 2), q, out=d_k)
        gradients[:2] *= 1 / math.sqrt(head_size)  # the scores' scale, for queries and keys
        by_row = gradients.view(3, batch, heads, length, head_size).permute(1, 3, 0, 2, 4)  # [B, T, 3, A, D]
        return by_row.contiguous(), None, None


attention_with_dropout: Callable[[Tensor, Tensor | None, float], Tensor] = _AttentionWithDropout.apply

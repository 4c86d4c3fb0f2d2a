"""Attention with dropout of its weights on the CPU, where torch has no fast kernel for it.

Owns one autograd function. The sequences are handled in pieces whose weights stay in the processor's cache; of every
weight four bytes and its random word are kept for the backward pass. The mathematics are those of
``scaled_dot_product_attention``, the probabilities those of dropout.py.

Shape legend: B sequences, T length, A heads, D head size, M = B * A.

Self-attention over packed or padded rows.

Owns ``attend``, the one place that knows where sequences begin and end, and the choice of kernel. A layer hands over
queries, keys and values side by side, because they are made by one product and regrouped by one gather.

Shape legend: N rows, A heads, D head size, H = A * D, P rows of the padded groups.
"""

import math
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.encoder.dropout import keep_mask, keep_scale, random_bits, uses_random_bits
from bert_tasks.encoder.packing import Packed, Padded, Regroup

# Weights of one piece: 1 MiB in float32. Larger pieces leave the cache, smaller ones cost more calls.
_PIECE = 2**18


def attention_with_dropout(qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Context ``[B, T, A, D]`` of attention whose weights are dropped with probability ``p``.

    Args:
        qkv: ``[B, T, 3, A, D]`` queries, keys and values on the CPU, float32 or float64.
        mask: ``[B, 1, 1, T]`` True at keys that may be seen; None: all.
    """
    context: Tensor = _AttentionWithDropout.apply(qkv, mask, p)  # type: ignore[no-untyped-call]  # torch
    return context


class _AttentionWithDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
        batch, length, _, heads, size = qkv.shape
        query, key, value = by_head = qkv.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, size)
        weights = qkv.new_empty(batch * heads, length, length)
        words = random_bits(weights.shape)
        context = torch.empty_like(query)  # [M, T, D]
        biases = repeat(None) if mask is None else _in_pieces(_bias(mask, heads, qkv.dtype), length)
        for q, k, v, weight, word, out, bias in zip(
            *(_in_pieces(tensor, length) for tensor in (query, key, value, weights, words, context)),
            biases,
            strict=False,
        ):
            torch.softmax(_scores(q, k, bias, out=weight), -1, out=weight)
            factors = keep_mask(word, p, out=torch.empty_like(weight))
            torch.bmm(factors.mul_(weight), v, out=out)
        context *= keep_scale(p)
        ctx.save_for_backward(by_head, weights, words)
        ctx.p = p
        return context.view(batch, heads, length, size).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by_head, weights, words = ctx.saved_tensors
        batch, length, heads, size = gradient.shape
        gradients = torch.empty_like(by_head)  # [3, M, T, D]
        of_context = (gradient.transpose(1, 2) * keep_scale(ctx.p)).reshape(-1, length, size)  # [M, T, D]
        tensors = (*by_head, weights, words, of_context, *gradients)
        for q, k, v, weight, word, outer, of_q, of_k, of_v in zip(
            *(_in_pieces(tensor, length) for tensor in tensors), strict=True
        ):
            factors = keep_mask(word, ctx.p, out=torch.empty_like(weight))
            torch.bmm((weight * factors).transpose(1, 2), outer, out=of_v)
            of_weight = torch.bmm(outer, v.transpose(1, 2)).mul_(factors)
            of_score = torch._softmax_backward_data(of_weight, weight, -1, weight.dtype)
            torch.bmm(of_score, k, out=of_q)
            torch.bmm(of_score.transpose(1, 2), q, out=of_k)
        gradients[:2] *= 1 / math.sqrt(size)
        return gradients.view(3, batch, heads, length, size).permute(1, 3, 0, 2, 4).contiguous(), None, None


def _in_pieces(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """``[M, ...]`` as views of as many matrices each as have ``_PIECE`` weights."""
    return torch.split(tensor, max(1, _PIECE // (length * length)))


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    """``[M, T, T]`` scaled products, with what keeps masked keys from being seen."""
    scale = 1 / math.sqrt(query.shape[-1])
    if bias is None:
        return torch.baddbmm(out, query, key.transpose(1, 2), beta=0, alpha=scale, out=out)
    return torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale, out=out)


def _bias(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)  # [B, 1, 1, T]
    return hidden.expand(-1, heads, 1, -1).reshape(-1, 1, mask.shape[-1])


Backend = Literal["grouped", "varlen"]


def attention_backend(*, device: torch.device, dtype: torch.dtype, head_size: int, dropout: float) -> Backend:
    """The kernel for packed rows: ``varlen`` (CUDA's variable-length flash attention) or ``grouped``.

    The variable-length kernel of torch 2.13 takes half precision and head sizes that are multiples of 8 up to 256, and
    hard-codes dropout 0. Everything else, attention dropout while training included, takes the grouped path, so that no
    choice of kernel changes the mathematics.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    fits = head_size % 8 == 0 and head_size <= 256
    return "varlen" if device.type == "cuda" and half and fits and dropout == 0.0 else "grouped"


def attend(qkv: Tensor, layout: Packed | Padded, *, dropout: float) -> Tensor:
    """Scaled dot-product attention inside each sequence.

    Args:
        qkv: ``[N, 3, A, D]`` queries, keys and values.
        layout: where the sequences lie among the rows.
        dropout: probability of dropping an attention weight; 0 outside training.

    Returns:
        ``[N, H]`` context rows. Rows of a padded layout that hold no token are not meaningful.
    """
    if isinstance(layout, Padded):
        mask = layout.mask[:, None, None, :]  # [B, 1, 1, T]
        return _attend_rectangle(qkv, layout.batch, layout.length, mask, dropout)
    backend = attention_backend(device=qkv.device, dtype=qkv.dtype, head_size=qkv.shape[-1], dropout=dropout)
    return _attend_varlen(qkv, layout) if backend == "varlen" else _attend_groups(qkv, layout, dropout)


def attend_first(query: Tensor, key_value: Tensor, layout: Packed, *, dropout: float) -> Tensor:
    """Attention of each sequence's first token alone, for heads that read nothing else.

    Args:
        query: ``[B, A, D]`` of the first tokens, in the order of the rows (``layout.offsets``).
        key_value: ``[N, 2, A, D]`` keys and values of all rows.

    Returns:
        ``[B, H]`` context rows, in the order of the rows.
    """
    if layout.regroup is not None:
        key_value = _pad(key_value, layout.regroup)  # [P, 2, A, D]
    contexts = []
    for group, first in zip(
        layout.groups, torch.split(query, [group.sequences for group in layout.groups]), strict=True
    ):
        rows = key_value[group.rows].view(group.sequences, group.length, *key_value.shape[1:])
        key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)  # [sequences, A, T, D]
        context = F.scaled_dot_product_attention(
            first.unsqueeze(2), key, value, attn_mask=group.mask, dropout_p=dropout
        )  # [sequences, A, 1, D]
        contexts.append(context)
    return torch.cat(contexts).flatten(1)


def _attend_groups(qkv: Tensor, layout: Packed, dropout: float) -> Tensor:
    if layout.regroup is not None:
        qkv = _pad(qkv, layout.regroup)  # [P, 3, A, D]
    contexts = [
        _attend_rectangle(qkv[group.rows], group.sequences, group.length, group.mask, dropout)
        for group in layout.groups
    ]
    context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return context if layout.regroup is None else _unpad(context, layout.regroup)


def _attend_rectangle(qkv: Tensor, batch: int, length: int, mask: Tensor | None, dropout: float) -> Tensor:
    _, _, heads, size = qkv.shape
    qkv = qkv.view(batch, length, 3, heads, size)
    if uses_random_bits(qkv, dropout):
        return attention_with_dropout(qkv, mask, dropout).view(batch * length, heads * size)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, A, T, D]
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return context.transpose(1, 2).reshape(batch * length, heads * size)


def _attend_varlen(qkv: Tensor, layout: Packed) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv.unbind(1)  # [N, A, D]
    context = varlen_attn(query, key, value, layout.offsets, layout.offsets, layout.longest, layout.longest)
    if isinstance(context, tuple):  # only with return_aux, which is not asked for
        context, *_ = context
    return context.flatten(1)


class _Pad(torch.autograd.Function):
    """Packed rows into padded groups. Padding shows row 0 and attention masks it, so its gradient is not wanted."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return gradient.index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """Padded groups back into packed rows; padding gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.padded_rows = rows.shape[0]
        return rows.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scatter,) = ctx.saved_tensors
        padded = gradient.new_zeros(ctx.padded_rows, *gradient.shape[1:])
        return padded.index_copy_(0, scatter, gradient), None


def _pad(rows: Tensor, regroup: Regroup) -> Tensor:
    padded: Tensor = _Pad.apply(rows, regroup.gather, regroup.scatter)  # type: ignore[no-untyped-call]  # torch
    return padded


def _unpad(rows: Tensor, regroup: Regroup) -> Tensor:
    packed: Tensor = _Unpad.apply(rows, regroup.scatter)  # type: ignore[no-untyped-call]  # torch
    return packed

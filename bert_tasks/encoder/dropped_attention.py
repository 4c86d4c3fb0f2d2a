"""Attention with dropout of its weights on the CPU, where torch has no fast kernel for it.

Owns one autograd function. The sequences are handled in pieces whose weights stay in the processor's cache; of every
weight four bytes and its random word are kept for the backward pass. The mathematics are those of
``scaled_dot_product_attention``, the probabilities those of dropout.py.

Shape legend: B sequences, T length, A heads, D head size, M = B * A.
"""

import math
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from bert_tasks.encoder.dropout import keep_scale, kept, random_words

# Weights of one piece: 1 MiB in float32. Larger pieces leave the cache, smaller ones cost more calls.
_PIECE = 2**18


def dropped_attention(qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Context ``[B, T, A, D]`` of attention whose weights are dropped with probability ``p``.

    Args:
        qkv: ``[B, T, 3, A, D]`` queries, keys and values on the CPU, float32 or float64.
        mask: ``[B, 1, 1, T]`` True at keys that may be seen; None: all.
    """
    context: Tensor = _DroppedAttention.apply(qkv, mask, p)  # type: ignore[no-untyped-call]  # torch
    return context


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
        batch, length, _, heads, size = qkv.shape
        query, key, value = by_head = qkv.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, size)
        weights = qkv.new_empty(batch * heads, length, length)
        words = random_words(weights.shape)
        context = torch.empty_like(query)  # [M, T, D]
        biases = repeat(None) if mask is None else _in_pieces(_bias(mask, heads, qkv.dtype), length)
        for q, k, v, weight, word, out, bias in zip(
            *(_in_pieces(tensor, length) for tensor in (query, key, value, weights, words, context)),
            biases,
            strict=False,
        ):
            torch.softmax(_scores(q, k, bias, out=weight), -1, out=weight)
            factors = kept(word, p, out=torch.empty_like(weight))
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
            factors = kept(word, ctx.p, out=torch.empty_like(weight))
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

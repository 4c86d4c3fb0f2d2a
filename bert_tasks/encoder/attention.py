"""Self-attention over packed or padded rows.

Owns ``attend``, the one place that knows where sequences begin and end, and the choice of kernel. A layer hands over
queries, keys and values side by side, because they are made by one product and regrouped by one gather.

Shape legend: N rows, A heads, D head size, H = A * D, P rows of the padded groups.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.encoder.dropout import draws_words
from bert_tasks.encoder.dropped_attention import dropped_attention
from bert_tasks.encoder.packing import Packed, Padded, Regroup

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
    if draws_words(qkv, dropout):
        return dropped_attention(qkv, mask, dropout).view(batch * length, heads * size)
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

"""Batches without padding, with all tokens one after another and a layout.

A layout tells attention and pooling where sequences begin and end. Training and prediction use ``Packed``. The
HF-shaped call and export use ``Padded``, because they have no data-dependent shapes. The layout is made on the host,
before the forward pass.

Shape legend: N tokens, B sequences, T padded length, R tokens that a head reads, P rows of the padded groups. A row is
a row of the layers' ``[N, H]`` input.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

# Share of its longest sequence by which a group may be padded, for attention alone. Attention is a small part of a
# layer's work, so a little padding is cheaper than one more kernel call per layer.
GROUP_SLACK = 0.125


@dataclass(frozen=True, kw_only=True)
class _Movable:
    """A record of tensors, of mappings to tensors, of such records, and of values that stay on the host."""

    def to(self, device: torch.device) -> Self:
        """Returns a copy on a device. Copies from pinned memory do not wait."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
            elif isinstance(value, _Movable):
                moved[field.name] = value.to(device)
            elif isinstance(value, tuple) and value and isinstance(value[0], _Movable):
                moved[field.name] = tuple(item.to(device) for item in value)
            elif isinstance(value, Mapping):
                moved[field.name] = {name: tensor.to(device, non_blocking=True) for name, tensor in value.items()}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Group(_Movable):
    """Sequences of near-equal length that attention handles in one call.

    Attributes:
        sequences: Number of sequences.
        length: Length of the longest sequence.
        mask: ``[sequences, 1, 1, length]``, True at real tokens, or None if all lengths are equal.
    """

    sequences: int
    length: int
    mask: Tensor | None

    @property
    def rows(self) -> int:
        """The number of rows of the group, after ``Packed.regroup`` if it is set."""
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class Regroup(_Movable):
    """The permutation that brings packed rows into padded groups, with its inverse.

    Attributes:
        pad_index: ``[P]`` the packed row for each row of the padded groups (row 0 at padding).
        unpad_index: ``[N]`` the index of each packed row in the padded groups.
    """

    pad_index: Tensor
    unpad_index: Tensor


@dataclass(frozen=True, kw_only=True)
class Packed(_Movable):
    """The layout of sequences one after another, the shortest first.

    The order makes neighbours nearly equal in length, so that attention can handle them in groups. ``lengths``,
    ``first_rows`` and ``gather_positions`` are in the caller's order of sequences, and so are tensors that are gathered
    by them.

    Attributes:
        lengths: Number of tokens of each sequence, on the host.
        first_rows: ``[B]`` row of each sequence's first token.
        caller_order: ``[B]`` the index of each of the caller's sequences in the order of the rows.
        sequence_of_row: ``[N]`` the index of the sequence that a row belongs to.
        row_lengths: ``[B]`` the lengths of the sequences in the order of the rows.
        cu_seqlens: ``[B + 1]`` int32 running sum of ``row_lengths``, for variable-length kernels.
        gather_positions: ``[R]`` the rows that a head with logits per token reads, sequence after sequence.
        gather_counts: Number of ``gather_positions`` of each sequence, on the host.
        groups: A partition of the rows.
        regroup: Padding of the groups. None if no group needs padding.
    """

    lengths: tuple[int, ...]
    first_rows: Tensor
    caller_order: Tensor
    sequence_of_row: Tensor
    row_lengths: Tensor
    cu_seqlens: Tensor
    gather_positions: Tensor
    gather_counts: tuple[int, ...]
    groups: tuple[Group, ...]
    regroup: Regroup | None


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A rectangle of ``batch`` x ``length`` rows, as in the HF-shaped call.

    Attributes:
        mask: ``[B, T]`` True at real tokens. Holes are allowed.
    """

    batch: int
    length: int
    mask: Tensor


Layout = Packed | Padded


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tokens that a head reads, so that the last layer computes no others.

    Attributes:
        rows: ``[R]`` the rows of the tokens.
        first_tokens: The tokens are the first of every sequence, in the caller's order. On a CPU the last layer then
            computes no other queries.
    """

    rows: Tensor
    first_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedBatch(_Movable):
    """The input of one forward pass.

    Attributes:
        input_ids, position_ids, token_type_ids: ``[N]`` in the order of the layout's rows.
        layout: Layout of the sequences.
        windows: Number of sequences of each row, in the caller's order. The windows of a long text are neighbours.
        labels: Labels of all sequences one after another, float64. Empty without labels.
        label_counts: Number of ``labels`` of each sequence.
        fields: Further numbers that the loss reads, by name, of all sequences one after another, float64.
    """

    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor
    layout: Packed
    windows: tuple[int, ...]
    labels: Tensor
    label_counts: tuple[int, ...]
    fields: Mapping[str, Tensor]

    @property
    def labelled_rows(self) -> list[int]:
        """Returns the numbers of the rows whose first window has labels."""
        # The windows of a text have one label together, which its first window holds.
        firsts = accumulate(self.windows[:-1], initial=0)
        return [row for row, first in enumerate(firsts) if self.label_counts[first]]


def pack(
    input_ids: Sequence[Sequence[int]],
    token_type_ids: Sequence[Sequence[int]],
    *,
    position_offset: int,
    windows: Sequence[int] | None = None,
    labels: Sequence[Sequence[float]] | None = None,
    gather_positions: Sequence[Sequence[int] | None] | None = None,
    fields: Mapping[str, Sequence[Sequence[float]]] | None = None,
    pad_groups: bool = True,
) -> PackedBatch:
    """Packs sequences into one batch, on the host.

    Args:
        input_ids: Token ids of each sequence, including special tokens. No sequence may be empty.
        token_type_ids: Segment ids, of the same lengths.
        position_offset: Position id of a first token (``EncoderConfig.position_offset``).
        windows: Number of sequences of each row. Default: each sequence is a row.
        labels: Labels of each sequence. Default: none.
        gather_positions: Tokens of each sequence that a head with logits per token reads. Default: all.
        fields: Further numbers of each sequence, by name. Default: none.
        pad_groups: See ``group_rows``.

    Raises:
        ValueError: There is no sequence, one is empty, or ids and segments differ in length.
    """
    lengths = tuple(map(len, input_ids))
    if not lengths or min(lengths) == 0:
        raise ValueError("a batch needs at least one sequence, and no sequence may be empty")
    if lengths != tuple(map(len, token_type_ids)):
        raise ValueError("input_ids and token_type_ids differ in length")
    row_lengths, by_length = torch.tensor(lengths).sort(stable=True)
    starts = _starts(row_lengths)
    caller_order = by_length.argsort()  # the inverse permutation
    first_rows = starts.index_select(0, caller_order)
    gathered: list[Sequence[int]] = [range(length) for length in lengths]
    if gather_positions is not None:
        for index, positions in zip(range(len(lengths)), gather_positions, strict=True):
            if positions is not None:
                gathered[index] = positions
    gather_counts = tuple(map(len, gathered))
    groups, regroup = group_rows(row_lengths, pad_groups=pad_groups)
    layout = Packed(
        lengths=lengths,
        first_rows=first_rows,
        caller_order=caller_order,
        sequence_of_row=torch.repeat_interleave(row_lengths),
        row_lengths=row_lengths,
        cu_seqlens=F.pad(row_lengths.cumsum(0), (1, 0)).int(),
        gather_positions=_concatenate(gathered) + first_rows.repeat_interleave(torch.tensor(gather_counts)),
        gather_counts=gather_counts,
        groups=groups,
        regroup=regroup,
    )
    if labels is None:
        labels = [()] * len(lengths)
    if windows is None:
        windows = (1,) * len(lengths)
    if fields is None:
        fields = {}
    return PackedBatch(
        input_ids=_concatenate([input_ids[i] for i in by_length.tolist()]),
        position_ids=_count_from_zero(row_lengths) + position_offset,
        token_type_ids=_concatenate([token_type_ids[i] for i in by_length.tolist()]),
        layout=layout,
        windows=tuple(windows),
        labels=_concatenate(labels, torch.float64),
        label_counts=tuple(map(len, labels)),
        fields={name: _concatenate(values, torch.float64) for name, values in fields.items()},
    )


def device_tensor(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies ``[n]`` numbers to a device without waiting for the copy."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def _concatenate(sequences: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns ``[n]``, the numbers of all sequences one after another."""
    typecode = "d"
    if dtype == torch.int64:
        typecode = "q"
    numbers = array(typecode, chain.from_iterable(sequences))
    if not numbers:  # torch takes no empty buffer
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(numbers, dtype=dtype)  # which is faster than a tensor of a list


def _starts(lengths: Tensor) -> Tensor:
    """Returns ``[B]``, the starts of sequences of these lengths."""
    return lengths.cumsum(0) - lengths


def _count_from_zero(lengths: Tensor) -> Tensor:
    """Returns ``[N]``, the numbers 0, 1, ... of each sequence of these lengths."""
    return torch.arange(int(lengths.sum())) - _starts(lengths).repeat_interleave(lengths)


def group_rows(row_lengths: Tensor, *, pad_groups: bool = True) -> tuple[tuple[Group, ...], Regroup | None]:
    """Cuts sequences sorted by length into groups of near-equal length.

    Args:
        row_lengths: ``[B]`` lengths in ascending order.
        pad_groups: Allow sequences of several lengths in a group. Without this there are more groups, but their rows
            are not copied and need no mask.

    Returns:
        The groups, and the padding of their rows, or None if the lengths of every group are equal.
    """
    lengths, slack = row_lengths.tolist(), 0.0
    if pad_groups:
        slack = GROUP_SLACK
    cuts = [0]
    for number, length in enumerate(lengths):
        if length - lengths[cuts[-1]] > slack * length:
            cuts.append(number)
    groups = []
    for start, end in pairwise([*cuts, len(lengths)]):
        longest, mask = lengths[end - 1], None
        if lengths[start] != longest:
            mask = (torch.arange(longest) < row_lengths[start:end, None])[:, None, None, :]
        groups.append(Group(sequences=end - start, length=longest, mask=mask))
    if all(group.mask is None for group in groups):
        return tuple(groups), None
    sizes = torch.tensor([(group.length, group.sequences) for group in groups])
    padded_lengths = sizes[:, 0].repeat_interleave(sizes[:, 1])  # [B]
    unpad_index = _starts(padded_lengths).repeat_interleave(row_lengths) + _count_from_zero(row_lengths)  # [N]
    pad_index = torch.zeros(int(padded_lengths.sum()), dtype=torch.int64)  # [P]
    pad_index.index_copy_(0, unpad_index, torch.arange(len(unpad_index)))
    return tuple(groups), Regroup(pad_index=pad_index, unpad_index=unpad_index)

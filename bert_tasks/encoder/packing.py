"""Batches without padding: the tokens of all sequences one after another, and where each sequence lies.

A layout tells attention and pooling where sequences begin and end: ``Packed`` in training and prediction, ``Padded`` in
the HF-shaped call and in export, which have no data-dependent shapes. Everything here is made on the host, before the
forward pass.

Shape legend: N tokens, B sequences, T padded length, R tokens that a head reads, P rows of the padded groups. A row is
a row of the layers' ``[N, H]`` input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

# The share of its longest sequence by which a group may be padded, for attention alone. Attention is a small part of a
# layer's work, so a little padding is cheaper than one more kernel call per layer.
GROUP_SLACK = 0.125


@dataclass(frozen=True, kw_only=True)
class _Movable:
    """A record of tensors (also by name), of such records, and of values that stay on the host."""

    def to(self, device: torch.device) -> Self:
        """The same record on a device; copies from pinned memory do not wait."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
            elif isinstance(value, _Movable):
                moved[field.name] = value.to(device)
            elif isinstance(value, tuple) and value and isinstance(value[0], _Movable):
                moved[field.name] = tuple(part.to(device) for part in value)
            elif isinstance(value, Mapping):
                moved[field.name] = {name: part.to(device, non_blocking=True) for name, part in value.items()}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Group(_Movable):
    """Sequences of near-equal length that attention handles in one call.

    Attributes:
        sequences: the number of sequences.
        length: of the longest sequence.
        mask: ``[sequences, 1, 1, length]``, True at real tokens; None if all lengths are equal.
    """

    sequences: int
    length: int
    mask: Tensor | None

    @property
    def rows(self) -> int:
        """How many rows the group has, after ``Packed.regroup`` where that is set. The groups' rows are neighbours."""
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class Regroup(_Movable):
    """The permutation that brings packed rows into padded groups, with its inverse.

    Attributes:
        gather: ``[P]`` for each row of the padded groups the packed row that it shows (row 0 at padding).
        scatter: ``[N]`` for each packed row its place in the padded groups.
    """

    gather: Tensor
    scatter: Tensor


@dataclass(frozen=True, kw_only=True)
class Packed(_Movable):
    """Sequences one after another, the shortest first.

    ``lengths``, ``first_rows`` and ``gather_positions`` are in the order in which the caller gave the sequences, and so
    is what is gathered by them.

    Attributes:
        lengths: tokens of each sequence, on the host.
        first_rows: ``[B]`` row of each sequence's first token.
        order: ``[B]`` the place of each sequence in the order of the rows.
        sequence_of_row: ``[N]`` the place of the sequence that a row belongs to.
        row_lengths: ``[B]`` the lengths of the sequences in the order of the rows.
        cu_seqlens: ``[B + 1]`` int32 running sum of ``row_lengths``, for variable-length kernels.
        gather_positions: ``[R]`` the rows that a head with logits per token reads, sequence after sequence.
        gather_counts: how many of ``gather_positions`` belong to each sequence, on the host.
        groups: a partition of the rows.
        regroup: how the groups are padded; None if no group needs padding.
    """

    lengths: tuple[int, ...]
    first_rows: Tensor
    order: Tensor
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
        mask: ``[B, T]`` True at real tokens; holes are allowed.
    """

    batch: int
    length: int
    mask: Tensor


Layout = Packed | Padded


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tokens whose states a head reads from the last layer, which then skips the others.

    Attributes:
        rows: ``[R]`` their rows.
        first_tokens: they are the first token of every sequence, in the caller's order. On a CPU the last layer then
            computes no other queries.
    """

    rows: Tensor
    first_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedBatch(_Movable):
    """The input of one forward pass.

    Attributes:
        input_ids, position_ids, token_type_ids: ``[N]`` in the order of the layout's rows.
        layout: where the sequences are.
        windows: the number of sequences of each row, in the caller's order; the windows of a long text are
            neighbours.
        labels: the labels of all sequences one after another, float64; empty without labels.
        label_counts: how many of ``labels`` belong to each sequence.
        fields: further numbers that a task's loss reads, by name: those of all sequences one after another, float64.
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
        """The numbers of the rows that have labels: those whose first window has some."""
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
    """Packs sequences into one batch.

    Args:
        input_ids: token ids of each sequence, special tokens included; none may be empty.
        token_type_ids: segment ids, of the same lengths.
        position_offset: position id of a first token (``EncoderConfig.position_offset``).
        windows: the number of sequences of each row; default: each sequence is a row.
        labels: of each sequence; default: none.
        gather_positions: the tokens of each sequence that a head with logits per token reads; default: all.
        fields: name -> further numbers of each sequence; default: none.
        pad_groups: see ``group_rows``.

    Raises:
        ValueError: there is no sequence, one is empty, or ids and segments differ in length.
    """
    lengths = tuple(len(ids) for ids in input_ids)
    if not lengths or min(lengths) == 0:
        raise ValueError("a batch needs at least one sequence, and no sequence may be empty")
    if lengths != tuple(len(types) for types in token_type_ids):
        raise ValueError("input_ids and token_type_ids differ in length")
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    row_lengths = [lengths[i] for i in by_length]
    offsets = [0, *accumulate(row_lengths)]
    place = [0] * len(lengths)
    for position, i in enumerate(by_length):
        place[i] = position
    starts = [offsets[p] for p in place]
    chosen = [None] * len(lengths) if gather_positions is None else gather_positions
    gathered = [range(length) if part is None else part for length, part in zip(lengths, chosen, strict=True)]
    groups, regroup = group_rows(row_lengths, pad_groups=pad_groups)
    layout = Packed(
        lengths=lengths,
        first_rows=torch.tensor(starts),
        order=torch.tensor(place),
        sequence_of_row=torch.repeat_interleave(torch.tensor(row_lengths)),
        row_lengths=torch.tensor(row_lengths),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        gather_positions=torch.tensor(
            [start + i for start, part in zip(starts, gathered, strict=True) for i in part]
        ).long(),
        gather_counts=tuple(map(len, gathered)),
        groups=groups,
        regroup=regroup,
    )
    per_sequence = [[]] * len(lengths) if labels is None else labels
    return PackedBatch(
        input_ids=torch.tensor([token for i in by_length for token in input_ids[i]]),
        position_ids=torch.tensor([p + position_offset for length in row_lengths for p in range(length)]),
        token_type_ids=torch.tensor([kind for i in by_length for kind in token_type_ids[i]]),
        layout=layout,
        windows=(1,) * len(lengths) if windows is None else tuple(windows),
        labels=_concatenated(per_sequence),
        label_counts=tuple(len(values) for values in per_sequence),
        fields={name: _concatenated(values) for name, values in ({} if fields is None else fields).items()},
    )


def _concatenated(per_sequence: Sequence[Sequence[float]]) -> Tensor:
    """``[n]`` the numbers of all sequences, float64."""
    return torch.tensor([number for numbers in per_sequence for number in numbers], dtype=torch.float64)


def group_rows(row_lengths: Sequence[int], *, pad_groups: bool = True) -> tuple[tuple[Group, ...], Regroup | None]:
    """Cuts sequences sorted by length into groups of near-equal length.

    Args:
        row_lengths: the lengths in order.
        pad_groups: whether a group may contain sequences of several lengths. Without this there are more groups, but
            their rows are not copied and need no mask.

    Returns:
        The groups, and how their rows are padded, or None when the lengths of every group are equal already.
    """
    cuts, slack = [0], GROUP_SLACK if pad_groups else 0.0
    for position, length in enumerate(row_lengths):
        if length - row_lengths[cuts[-1]] > slack * length:
            cuts.append(position)
    members = [row_lengths[start:end] for start, end in pairwise([*cuts, len(row_lengths)])]
    groups = []
    for group in members:
        mask = None
        if group[0] != group[-1]:
            mask = (torch.arange(group[-1]) < torch.tensor(group)[:, None])[:, None, None, :]
        groups.append(Group(sequences=len(group), length=group[-1], mask=mask))
    if sum(group.rows for group in groups) == sum(row_lengths):
        return tuple(groups), None
    gather: list[int] = []
    scatter: list[int] = []
    row = 0
    for group in members:
        for length in group:
            scatter += range(len(gather), len(gather) + length)
            gather += [*range(row, row + length), *[0] * (group[-1] - length)]
            row += length
    return tuple(groups), Regroup(gather=torch.tensor(gather), scatter=torch.tensor(scatter))

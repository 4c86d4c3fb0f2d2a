"""Packed layouts hold every token once, in groups that attention can take, and answer in the caller's order."""

import random
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch, pack

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)
FEW = settings(max_examples=20, deadline=None, database=None, derandomize=True)


def numbered(lengths: Sequence[int], *, position_offset: int = 0) -> PackedBatch:
    """A batch whose token ids say where they come from: 1000 x sequence + position."""
    ids = [[1000 * sequence + position for position in range(length)] for sequence, length in enumerate(lengths)]
    types = [[sequence % 2] * length for sequence, length in enumerate(lengths)]
    return pack(ids, types, position_offset=position_offset)


def sequences(batch: PackedBatch) -> list[list[int]]:
    """The ids of each sequence, in the caller's order, read through the layout."""
    starts = batch.layout.first_rows.tolist()
    return [
        batch.input_ids[start : start + length].tolist()
        for start, length in zip(starts, batch.layout.lengths, strict=True)
    ]


@FEW
@given(LENGTHS, st.integers(0, 3))
def test_every_token_stands_once_in_its_sequence_with_its_segment_and_position(lengths: list[int], offset: int) -> None:
    batch = numbered(lengths, position_offset=offset)
    assert sequences(batch) == [[1000 * i + p for p in range(length)] for i, length in enumerate(lengths)]
    assert len(batch.input_ids) == sum(lengths)
    assert batch.token_type_ids.tolist() == [(token // 1000) % 2 for token in batch.input_ids.tolist()]
    assert batch.position_ids.tolist() == [token % 1000 + offset for token in batch.input_ids.tolist()]


@FEW
@given(LENGTHS)
def test_places_and_offsets_agree(lengths: list[int]) -> None:
    layout = numbered(lengths).layout
    rows = layout.row_lengths.tolist()
    assert rows == sorted(lengths)
    assert [rows[index] for index in layout.caller_order.tolist()] == lengths == list(layout.lengths)
    assert layout.cu_seqlens.tolist() == [sum(rows[:i]) for i in range(len(rows) + 1)]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.sequence_of_row.tolist() == [index for index, length in enumerate(rows) for _ in range(length)]


@FEW
@given(LENGTHS)
def test_groups_partition_the_rows(lengths: list[int]) -> None:
    layout = numbered(lengths).layout
    rows = sum(lengths) if layout.regroup is None else len(layout.regroup.pad_index)
    assert rows == sum(group.rows for group in layout.groups)
    assert all(group.rows == group.sequences * group.length for group in layout.groups)
    assert sum(group.sequences for group in layout.groups) == len(lengths)
    remaining = sorted(lengths)
    for group in layout.groups:
        members, remaining = remaining[: group.sequences], remaining[group.sequences :]
        assert members[-1] == group.length
        assert members[-1] - members[0] <= packing.GROUP_SLACK * members[-1]
        if group.mask is None:
            assert members[0] == members[-1]
        else:
            assert group.mask.shape == (group.sequences, 1, 1, group.length)
            assert group.mask.sum(dim=-1).flatten().tolist() == members


@FEW
@given(LENGTHS)
def test_regrouping_is_undone(lengths: list[int]) -> None:
    layout = numbered(lengths).layout
    if layout.regroup is None:
        assert all(group.mask is None for group in layout.groups)
        return
    gather, scatter = layout.regroup.pad_index, layout.regroup.unpad_index
    assert gather[scatter].tolist() == list(range(sum(lengths)))
    masks = [
        torch.ones(group.sequences * group.length, dtype=torch.bool) if group.mask is None else group.mask.flatten()
        for group in layout.groups
    ]
    real = torch.cat(masks)
    assert torch.equal(real.nonzero().squeeze(1), scatter)
    assert torch.count_nonzero(gather[~real]) == 0


@pytest.mark.parametrize(("slack", "groups"), [(0.0, 5), (0.125, 4), (1.0, 1)])
def test_slack_decides_how_many_groups_there_are(slack: float, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "GROUP_SLACK", slack)
    layout = numbered([16, 1, 15, 30, 1, 7]).layout
    assert len(layout.groups) == groups
    assert (layout.regroup is None) == (slack == 0.0)


@FEW
@given(LENGTHS)
def test_groups_without_padding_have_one_length_each_and_move_no_rows(lengths: list[int]) -> None:
    groups, regroup = packing.group_rows(torch.tensor(sorted(lengths)), pad_groups=False)
    assert regroup is None
    assert all(group.mask is None for group in groups)
    assert [length for group in groups for length in [group.length] * group.sequences] == sorted(lengths)
    assert len(groups) == len(set(lengths))


def test_a_group_is_padded_by_at_most_an_eighth_of_its_longest() -> None:
    assert len(numbered([14, 16]).layout.groups) == 1
    assert len(numbered([13, 16]).layout.groups) == 2


def test_labels_windows_and_further_numbers_stay_in_the_callers_order() -> None:
    ids = [[5, 6, 7], [8], [9, 9]]
    numbers = {"noise": [[0.5, 0.1], [], [1.0]], "pair": [[0.0], [1.0], [1.0]]}
    batch = pack(ids, ids, position_offset=2, windows=[2, 1], labels=[[0.5], [], [2.0, 3.0]], fields=numbers)
    assert batch.labels.tolist() == [0.5, 2.0, 3.0]
    assert (batch.label_counts, batch.windows) == ((1, 0, 2), (2, 1))
    assert {name: values.tolist() for name, values in batch.fields.items()} == {
        "noise": [0.5, 0.1, 1.0],
        "pair": [0.0, 1.0, 1.0],
    }
    assert {values.dtype for values in (batch.labels, *batch.fields.values())} == {torch.float64}
    plain = pack(ids, ids, position_offset=0)
    assert (plain.windows, plain.label_counts, plain.labels.numel(), plain.fields) == ((1, 1, 1), (0, 0, 0), 0, {})


@FEW
@given(LENGTHS, st.randoms(use_true_random=False))
def test_what_is_read_stays_in_the_callers_order(lengths: list[int], chance: random.Random) -> None:
    ids = [[1000 * i + p for p in range(length)] for i, length in enumerate(lengths)]
    positions = [
        None if chance.random() < 0.2 else sorted(chance.sample(range(n), chance.randint(0, n))) for n in lengths
    ]
    batch = pack(ids, ids, position_offset=0, gather_positions=positions)
    expected = [
        sequence if read is None else [sequence[p] for p in read] for sequence, read in zip(ids, positions, strict=True)
    ]
    assert batch.input_ids[batch.layout.gather_positions].tolist() == [
        token for sequence in expected for token in sequence
    ]
    assert batch.layout.gather_counts == tuple(map(len, expected))
    assert batch.layout.gather_positions.dtype == torch.long


@pytest.mark.parametrize(
    ("ids", "types", "message"),
    [
        ([], [], "needs at least one sequence"),
        ([[1], []], [[0], []], "no sequence may be empty"),
        ([[1, 2]], [[0]], "differ in length"),
        ([[1], [2]], [[0]], "differ in length"),
    ],
)
def test_what_cannot_be_packed(ids: list[list[int]], types: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(ids, types, position_offset=0)


def test_moving_a_batch_moves_every_tensor() -> None:
    ids = [[7] * length for length in (16, 15, 3)]
    batch = pack(ids, ids, position_offset=0, fields={"noise": [[0.5], [], [1.0]]}).to(torch.device("meta"))
    devices = []

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            devices.append(value.device.type)
        elif is_dataclass(value):
            for field in fields(value):
                visit(getattr(value, field.name))
        elif isinstance(value, dict | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    visit(batch)
    assert devices == ["meta"] * 14

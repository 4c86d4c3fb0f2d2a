"""Positions beside the embeddings: what is added to the scores, and when the encoder asks for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from bert_tasks.encoder.attention import attend
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.encoder.packing import Layout, PackedBatch, Padded, Selection, pack
from bert_tasks.encoder.positions import Scores
from bert_tasks.families import encoder_config
from support.hf_models import hf_config, widen

RAGGED = (5, 1, 7, 3, 7, 16, 15)


def random_qkv(rows: int, *, heads: int = 2, size: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, heads, size, generator=generator, dtype=torch.float64)


def distances(query: Tensor, key: Tensor) -> Tensor:
    """``[1, A, T, T]`` minus a tenth of the distance, times the number of the head."""
    places = torch.arange(query.shape[2], dtype=query.dtype)
    heads = torch.arange(1, query.shape[1] + 1, dtype=query.dtype)
    return (-0.1 * heads[:, None, None] * (places[:, None] - places).abs())[None]


def of_content(query: Tensor, key: Tensor) -> Tensor:
    """``[B, A, T, T]`` other than symmetric, and different for each sequence."""
    return query.sum(-1).tanh()[..., None] + 2 * key.sum(-1).sin()[..., None, :]


def plain(qkv: Tensor, scores: Scores, scale: float) -> Tensor:
    """The textbook formula for one sequence, ``[T, 3, A, D] -> [T, H]``."""
    query, key, value = qkv.permute(1, 2, 0, 3)  # [A, T, D]
    logits = scale * query @ key.transpose(1, 2) + scores(query[None], key[None])[0]
    return (logits.softmax(-1) @ value).transpose(0, 1).flatten(1)


def packed(lengths: Sequence[int]) -> PackedBatch:
    ids = [[3 + (7 * position + row) % 100 for position in range(length)] for row, length in enumerate(lengths)]
    return pack(ids, [[0] * length for length in lengths], position_offset=0)


@pytest.mark.parametrize("scores", [distances, of_content])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_scores_are_added_within_each_sequence(scores: Scores, scale: float | None) -> None:
    layout, qkv = packed(RAGGED).layout, random_qkv(sum(RAGGED)).requires_grad_()
    assert any(group.mask is not None for group in layout.groups)
    context = attend(qkv, layout, dropout=0.0, scores=scores, scale=scale)
    factor = 3**-0.5 if scale is None else scale
    parts = torch.split(qkv, sorted(RAGGED))
    expected = torch.cat([plain(sequence, scores, factor) for sequence in parts])
    torch.testing.assert_close(context, expected, rtol=0, atol=1e-12)
    weights = random_qkv(sum(RAGGED))[:, 0].flatten(1)
    gradients = [torch.autograd.grad((value * weights).sum(), qkv)[0] for value in (context, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores", [distances, of_content])
def test_scores_of_a_padded_layout_count_columns(scores: Scores) -> None:
    """Tokens on both sides of a hole in the mask are as far apart as their columns."""
    qkv = random_qkv(2 * 6)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    context = attend(qkv, Padded(batch=2, length=6, mask=mask), dropout=0.0, scores=scores, scale=0.5)
    for row in range(2):
        sequence, real = qkv[6 * row : 6 * row + 6], mask[row]

        def masked(query: Tensor, key: Tensor, real: Tensor = real) -> Tensor:
            return scores(query, key).masked_fill(~real, -torch.inf)

        expected = plain(sequence, masked, 0.5)
        torch.testing.assert_close(context[6 * row : 6 * row + 6][real], expected[real], rtol=0, atol=1e-12)


def test_weights_are_dropped_beside_scores() -> None:
    layout, qkv = packed((6, 5)).layout, random_qkv(11)
    exact = attend(qkv, layout, dropout=0.0, scores=of_content)
    torch.manual_seed(0)
    draws = torch.stack([attend(qkv, layout, dropout=0.25, scores=of_content) for _ in range(200)])
    assert not torch.equal(draws[0], draws[1])
    errors = (draws.mean(dim=0) - exact).abs() / (draws.std(dim=0) / 200**0.5 + 1e-12)
    assert errors.max() < 5.0


@dataclass
class Counted:
    """Positions that turn queries around and add distances to the scores."""

    layers: list[nn.Module] = field(default_factory=list)

    def apply(self, attention: nn.Module, qkv: Tensor) -> tuple[Tensor, Scores | None]:
        self.layers.append(attention)
        return qkv * torch.tensor([-1.0, 1.0, 1.0], dtype=qkv.dtype)[:, None, None], distances


class CountedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Layout, Counted]] = []

    def forward(self, position_ids: Tensor, layout: Layout) -> Counted:
        counter = Counted()
        self.calls.append((position_ids, layout, counter))
        return counter


def tiny(**changes: object) -> EncoderConfig:
    return replace(encoder_config(hf_config("bert", hidden_size=16, num_hidden_layers=3).to_dict()), **changes)


def encoder_of(config: EncoderConfig, positions: nn.Module | None = None) -> TransformerEncoder:
    encoder = TransformerEncoder(config).double()
    widen(encoder, seed=0)
    encoder.positions = positions
    return encoder.eval()


def run(encoder: TransformerEncoder, batch: PackedBatch, selection: Selection | None = None) -> Tensor:
    ids = (batch.input_ids, batch.position_ids, batch.token_type_ids)
    hidden: Tensor = encoder(*ids, batch.layout, selection=selection)
    return hidden


def test_the_encoder_asks_once_for_all_layers() -> None:
    module, batch = CountedModule(), packed(RAGGED)
    encoder = encoder_of(tiny(), module)
    run(encoder, batch)
    ((position_ids, layout, counter),) = module.calls
    assert position_ids is batch.position_ids
    assert layout is batch.layout
    assert counter.layers == [layer.attention for layer in encoder.layers]
    assert not torch.allclose(run(encoder, batch), run(encoder_of(tiny()), batch))


def test_embeddings_without_a_table_of_positions() -> None:
    encoder, batch = encoder_of(tiny(absolute_positions=False)), packed(RAGGED)
    assert encoder.embeddings.position is None
    moved = replace(batch, position_ids=batch.position_ids.flip(0))
    assert torch.equal(run(encoder, moved), run(encoder, batch))
    assert not torch.equal(run(encoder_of(tiny()), moved), run(encoder_of(tiny()), batch))

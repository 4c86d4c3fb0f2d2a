"""Any combination of the encoder's options is computed, in packed and in padded layouts."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_tasks.encoder.config import DisentangledConfig, EncoderConfig, HeadConfig
from bert_tasks.encoder.heads import select_first_tokens
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.encoder.packing import Packed, PackedBatch, Padded, pack
from support.sampling import slow_except

LENGTHS = (7, 1, 12, 3, 12)
LAYERS = 3
DISENTANGLED = DisentangledConfig(
    buckets=8, max_distance=16, content_to_position=True, position_to_content=True, shared=True, norm=True
)
OPTIONS: dict[str, Sequence[Any]] = {
    "norm": ("layer", "rms"),
    "placement": ("post", "pre"),
    "embedding_norm": (True, False),
    "first_norm": (True, False),
    "final_norm": (True, False),
    "positions": ("absolute", "rotary", "rotary-interleaved", "rotary-table", "relative", "disentangled"),
    "absolute_positions": (True, False),
    "mlp": ("dense", "gated"),
    "attention_window": (None, (None, 2, 2), (1, 3, None)),
    "bias": (True, False),
    "norm_bias": (True, False),
    "hidden_act": ("gelu", "gelu_new", "relu", "silu"),
    "embedding_size": (16, 12),
    "norm_after_projection": (True, False),
    "type_vocab_size": (2, 0),
    "convolution_size": (0, 3),
    "layer_order": ((0, 1, 2), (0, 1, 1)),
    "num_attention_heads": (2, 4),
    "num_key_value_heads": (None, 1, 2),
    "head_dim": (None, 6),
    "intermediate_bias": (True, False),
}


def drawn(seed: int) -> EncoderConfig:
    chance = random.Random(seed)
    options = {name: chance.choice(values) for name, values in OPTIONS.items()}
    return EncoderConfig(
        vocab_size=40,
        hidden_size=16,
        project_embeddings=options["embedding_size"] != 16,
        intermediate_size=20,
        max_position_embeddings=16,
        position_offset=0,
        pad_token_id=0,
        layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0,
        attention_output_dropout=0.0,
        feed_forward_dropout=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        head=HeadConfig(activation="tanh", sequence_dropout=0.0, token_dropout=0.0),
        disentangled=DISENTANGLED if options["positions"] == "disentangled" else None,
        rotary_theta=(100.0, 10.0, 100.0) if options["positions"].startswith("rotary") else (),
        **options,
    )


def make_encoder(config: EncoderConfig, seed: int) -> TransformerEncoder:
    torch.manual_seed(seed)
    encoder = TransformerEncoder(config).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def sequences(config: EncoderConfig) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 40, (length,), generator=generator).tolist() for length in LENGTHS]
    types = max(config.type_vocab_size, 1)
    return ids, [[position % types for position in range(length)] for length in LENGTHS]


def run(encoder: TransformerEncoder, batch: PackedBatch) -> Tensor:
    """``[N, H]`` in the order in which the sequences were given."""
    states: Tensor = encoder(batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout)
    layout = batch.layout
    assert isinstance(layout, Packed)
    rows = zip(layout.first_rows.tolist(), layout.lengths, strict=True)
    return torch.cat([states[first : first + length] for first, length in rows])


def padded_run(encoder: TransformerEncoder, ids: list[list[int]], types: list[list[int]]) -> Tensor:
    longest = max(LENGTHS)
    filled = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    segments = torch.tensor([row + [0] * (longest - len(row)) for row in types])
    mask = torch.tensor([[True] * length + [False] * (longest - length) for length in LENGTHS])
    positions = torch.arange(longest).expand(len(LENGTHS), -1)
    layout = Padded(batch=len(LENGTHS), length=longest, mask=mask)
    states: Tensor = encoder(filled.flatten(), positions.flatten(), segments.flatten(), layout)
    return states[mask.flatten()]


def gradients(encoder: TransformerEncoder, states: Tensor) -> dict[str, Tensor]:
    encoder.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (weights * states).sum().backward()
    grads = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    return {name: torch.zeros(()) if grad is None else grad.clone() for name, grad in grads.items()}


# The others run with `make test-slow`. These have every value of every option, and in 123 a product of the first tokens
# alone has no bias.
QUICK = (0, 3, 15, 17, 34, 39, 123)


def test_the_quick_combinations_have_every_value_of_every_option() -> None:
    configs = [drawn(seed) for seed in QUICK]
    for name, values in OPTIONS.items():
        assert {getattr(config, name) for config in configs} == set(values), name


@pytest.mark.parametrize("seed", slow_except(range(124), *QUICK))
def test_any_combination_is_computed(seed: int) -> None:
    config = drawn(seed)
    encoder = make_encoder(config, seed)
    ids, types = sequences(config)
    batch = pack(ids, types, position_offset=0)

    whole = run(encoder, batch)
    packed = gradients(encoder, whole)
    padded = padded_run(encoder, ids, types)
    close = {"rtol": 1e-9, "atol": 1e-9}
    assert whole.isfinite().all()
    torch.testing.assert_close(padded, whole, **close)
    torch.testing.assert_close(gradients(encoder, padded), packed, **close)

    states = encoder(
        batch.input_ids,
        batch.position_ids,
        batch.token_type_ids,
        batch.layout,
        selection=select_first_tokens(batch.layout),
    )
    torch.testing.assert_close(states, torch.stack([rows[0] for rows in whole.split(LENGTHS)]), **close)

    backwards = run(encoder, pack(ids[::-1], types[::-1], position_offset=0)).split(LENGTHS[::-1])[::-1]
    torch.testing.assert_close(torch.cat(backwards), whole, **close)
    alone = run(encoder, pack(ids[2:3], types[2:3], position_offset=0))
    torch.testing.assert_close(alone, whole.split(LENGTHS)[2], **close)

    encoder.gradient_checkpointing = True
    torch.testing.assert_close(gradients(encoder.train(), run(encoder, batch)), packed, **close)

    again = make_encoder(config, seed + 1)
    again.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(run(again.eval(), batch), whole, rtol=0, atol=0)


def test_gradients_are_those_of_finite_differences() -> None:
    """One direction of each of some combinations: autograd's derivative is the quotient of differences."""
    for seed in QUICK[:6]:
        config = drawn(seed)
        encoder = make_encoder(config, seed)
        batch = pack(*sequences(config), position_offset=0)
        grads = gradients(encoder, run(encoder, batch))
        step = 1e-6
        generator = torch.Generator().manual_seed(seed)
        direction = {
            name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in encoder.named_parameters()
        }
        slope = sum(float((grads[name] * value).sum()) for name, value in direction.items())
        totals = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, parameter in encoder.named_parameters():
                    parameter.add_(sign * step * direction[name])
                states = run(encoder, batch)
                totals.append(
                    float((torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states) * states).sum())
                )
                for name, parameter in encoder.named_parameters():
                    parameter.sub_(sign * step * direction[name])
        assert (totals[0] - totals[1]) / (2 * step) == pytest.approx(slope, rel=1e-4), seed

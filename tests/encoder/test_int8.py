"""An encoder in int8: near to float32 in every family, the same for a row in any batch, and apart from its original.

Shape legend: N rows, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bert_tasks.encoder import int8
from bert_tasks.encoder.cpu import map_batches
from bert_tasks.encoder.int8 import Int8FeedForward, Int8Linear, int8_encoder, range_shapes, record_ranges
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.encoder.linear import Linear
from bert_tasks.encoder.packing import PackedBatch, Selection
from bert_tasks.errors import NotFiniteScoresError
from bert_tasks.model.encoder import Encoder
from support.hf_models import FAMILIES, HFBatch, hf_config, hf_model, random_batch
from support.int8 import needs_int8
from support.parity import ours_from, packed_batch
from support.sampling import slow_except

LENGTHS = (17, 1, 30, 9, 2)
BATCH_TOLERANCE = 2e-3


def encoder_of(family: str, **settings: Any) -> Encoder:
    config = hf_config(family, num_hidden_layers=2, **settings)
    model: Encoder = ours_from(hf_model(family, dtype=torch.float32, config=config), "base")
    return model


def batch_of(model: Encoder, lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> PackedBatch:
    return packed_batch(model, random_batch(str(model.hf_config["model_type"]), lengths=tuple(lengths), seed=seed))


def states_of(encoder: TransformerEncoder, batch: PackedBatch, **options: Any) -> Tensor:
    with torch.inference_mode():
        states: Tensor = encoder(
            batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout, **options
        )  # [N, H]
    return states


def ranges_of(model: Encoder) -> dict[str, Tensor]:
    """Recorded on other sequences than those that are compared."""
    with record_ranges(model.encoder) as ranges:
        states_of(model.encoder, batch_of(model, range(1, 41), seed=5))
    return ranges


def error_of(states: Tensor, exact: Tensor) -> float:
    return float((states - exact).norm() / exact.norm())


# Deliberate faults. Each changes an encoder in int8, given the original.


def skip_a_layer(encoder: TransformerEncoder, _: TransformerEncoder) -> None:
    encoder.layers[0].forward = lambda hidden, *_: hidden


def move_zeros(encoder: TransformerEncoder, _: TransformerEncoder) -> None:
    for module in encoder.modules():
        if isinstance(module, Int8Linear):
            module._offset += 16


def forget_scales_of_outputs(encoder: TransformerEncoder, _: TransformerEncoder) -> None:
    for module in encoder.modules():
        if isinstance(module, Int8Linear):
            packed, scales, zeros = module.product._weight
            module.product._weight = (packed, torch.full_like(scales, float(scales.mean())), zeros)


def forget_middles_and_zeros(encoder: TransformerEncoder, original: TransformerEncoder) -> None:
    modules = dict(encoder.named_modules())
    for name, layer in int8._linear_layers(original):
        module = modules.get(name)
        if isinstance(module, Int8Linear):
            module.product._bias = int8._bias(layer)


def forget_wide_inputs(encoder: TransformerEncoder, _: TransformerEncoder) -> None:
    for module in encoder.modules():
        if isinstance(module, Int8FeedForward):
            module._second_wide_weight = torch.zeros_like(module._second_wide_weight)


FAULTS: Mapping[str, Callable[[TransformerEncoder, TransformerEncoder], None]] = {
    fault.__name__: fault
    for fault in (skip_a_layer, move_zeros, forget_scales_of_outputs, forget_middles_and_zeros, forget_wide_inputs)
}
# The families hold the exact and the approximate GELU, gates, layers without biases, shared layers (ALBERT) and shared
# keys (EuroBERT). Another activation has no operator of its own.
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "relu": ("bert", {"hidden_act": "relu"}),
    "one group of layers": ("albert", {"num_hidden_groups": 1}),
}


@needs_int8
@pytest.mark.every_family
@pytest.mark.parametrize("case", slow_except(CASES, "bert", "albert", "eurobert", "relu"))
def test_states_are_near_those_of_float32(case: str) -> None:
    family, settings = CASES[case]
    model = encoder_of(family, **settings)
    batch, ranges = batch_of(model), ranges_of(model)
    assert {name: tuple(each.shape) for name, each in ranges.items()} == range_shapes(model.encoder)
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    exact = states_of(model.encoder, batch)
    error = error_of(states_of(int8_encoder(model.encoder, ranges), batch), exact)
    is_gated = model.config.mlp == "gated"
    # The product of a gate and its input multiplies their errors, and these weights are large.
    assert 1e-4 < error < (0.2 if is_gated else 0.1)
    for name, fault in FAULTS.items():
        faulty = int8_encoder(model.encoder, ranges)
        has_gelu = any(isinstance(module, Int8FeedForward) for module in faulty.modules())
        if name == "forget_wide_inputs" and not has_gelu:
            continue
        fault(faulty, model.encoder)
        assert error_of(states_of(faulty, batch), exact) > 4 * error, name
    assert torch.equal(states_of(model.encoder, batch), exact), "the original computes in float32 as before"
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())


def spread_of(states: Tensor) -> float:
    """What a difference is compared with: how far states are from their mean."""
    return float((states - states.mean(0)).norm())


@needs_int8
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_lose_little(has_bias: bool) -> None:
    """Tighter than for whole encoders: rounding in one direction or too coarse a scale is seen.

    Inputs have other means and spreads. One is constant, one is 0, and one is 30 times as large. A few inputs of the
    second product are 10 times as large as others.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = Linear(384, 256, bias=has_bias), Linear(256, 48, bias=has_bias)
    rows = torch.randn(200, 384, generator=generator) * torch.rand(384, generator=generator) * 3
    rows += torch.randn(384, generator=generator)
    rows[:, 0], rows[:, 1] = 7, 0
    rows[:, 2] *= 30
    with torch.inference_mode():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        first.weight[:3] *= 10
        second.weight[:, :3] /= 10
        exact, inner = first(rows), functional.gelu(first(rows))
        ranges, inner_ranges = (torch.stack([each.amin(0), each.amax(0)]) for each in (rows, inner))
        assert (Int8Linear(first, ranges)(rows) - exact).norm() < 0.02 * spread_of(exact)
        layer: Any = SimpleNamespace(intermediate=first, output=second, activation="gelu")
        exact = second(inner)
        assert (Int8FeedForward(layer, ranges, inner_ranges)(rows) - exact).norm() < 0.03 * spread_of(exact)


@needs_int8
def test_weights_that_are_not_in_int8_are_shared() -> None:
    model = encoder_of("bert")
    quantized = int8_encoder(model.encoder.train(), ranges_of(model))
    assert not quantized.training
    assert model.encoder.training
    originals = dict(model.encoder.named_parameters())
    assert "embeddings.word.weight" in dict(quantized.named_parameters())
    for name, parameter in quantized.named_parameters():
        assert parameter is originals[name]
    products = {f"{name}.weight" for name, _ in int8._linear_layers(model.encoder)}
    assert products.isdisjoint(dict(quantized.named_parameters())), "weights in float32 are freed"


@needs_int8
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_sequence_is_the_same_in_any_batch(family: str) -> None:
    """Scales are fixed, so no row depends on others.

    The last bits of the products in float32 (attention, and a few inputs of the second feed-forward product) depend on
    the shape of a batch, so a number in the middle between two codes may be rounded to the other one.
    """
    model = encoder_of(family)
    quantized = int8_encoder(model.encoder, ranges_of(model))
    sequences = random_batch(family, lengths=LENGTHS)

    def states_of_sequences(numbers: Sequence[int]) -> Sequence[Tensor]:
        parts = (sequences.input_ids, sequences.attention_mask, sequences.token_type_ids)
        input_ids, attention_mask, token_type_ids = (part[list(numbers)] for part in parts)
        batch = packed_batch(
            model, HFBatch(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        )
        states = states_of(quantized, batch).index_select(0, batch.layout.gather_positions)
        return states.split(list(batch.layout.lengths))

    together = states_of_sequences(range(len(LENGTHS)))
    for numbers in ((3,), (0,), (4, 2, 0), (1, 0, 3, 2, 4)):
        for number, states in zip(numbers, states_of_sequences(numbers), strict=True):
            assert error_of(states, together[number]) < BATCH_TOLERANCE


@needs_int8
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_only_selected_rows_of_the_last_layer_are_computed(family: str) -> None:
    model = encoder_of(family)
    quantized, batch = int8_encoder(model.encoder, ranges_of(model)), batch_of(model)
    states = states_of(quantized, batch)
    first = batch.layout.cu_seqlens[:-1].index_select(0, batch.layout.caller_order)
    for selection in (
        Selection(rows=torch.tensor([], dtype=torch.long)),
        Selection(rows=torch.tensor([4, 1])),
        Selection(rows=first, first_tokens=True),
    ):
        selected = states_of(quantized, batch, selection=selection)
        assert selected.shape == (len(selection.rows), states.shape[1])
        assert torch.allclose(selected, states.index_select(0, selection.rows), atol=1e-2)


@needs_int8
@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_not_rounded(value: float, family: str) -> None:
    """In float32 the NaN of one token reaches all others. The token that is read must not hide it here, either."""
    model = encoder_of(family)
    quantized, batch = int8_encoder(model.encoder, ranges_of(model)), batch_of(model, (5,))
    selection = Selection(rows=torch.tensor([0]), first_tokens=True)
    assert states_of(quantized, batch, selection=selection, depth=1).isfinite().all()
    with torch.no_grad():  # of a token behind the first
        model.encoder.embeddings.word.weight[batch.input_ids[4]] = value
    with pytest.raises(NotFiniteScoresError, match="the model's states are not finite"):
        states_of(quantized, batch, selection=selection, depth=1)


def test_ranges_are_recorded_in_two_threads(two_threads: None) -> None:
    model = encoder_of("bert")
    batches = [batch_of(model, seed=seed) for seed in range(8)]
    with record_ranges(model.encoder) as ranges:
        states = list(map_batches(partial(states_of, model.encoder), batches, device=torch.device("cpu")))
    expected: dict[str, Tensor] = {}
    for batch, result in zip(batches, states, strict=True):
        with record_ranges(model.encoder) as of_batch:
            assert torch.allclose(states_of(model.encoder, batch), result, atol=1e-5)
        for name, each in of_batch.items():
            so_far = expected.get(name, each)
            expected[name] = torch.stack([so_far[0].minimum(each[0]), so_far[1].maximum(each[1])])
    assert ranges.keys() == expected.keys()
    for name, each in ranges.items():
        assert torch.allclose(each, expected[name], atol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.encoder.modules())

"""CUDA graphs of the layers: shapes that hold a batch, padding that changes nothing, and gradients that add up.

Capturing needs a GPU (tests/gpu). Here a graph repeats its recorded operations on the CPU.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert_tasks.encoder import attention, graphs
from bert_tasks.encoder.graphs import GraphShape, LayerGraphs
from bert_tasks.encoder.layers import TransformerEncoder, initialize
from bert_tasks.encoder.packing import PackedBatch, Selection, pack
from bert_tasks.families import encoder_config
from support.hf_models import hf_config

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None, database=None)
@given(LENGTHS)
def test_a_shape_holds_its_batch_and_follows_from_the_lengths(lengths: list[int]) -> None:
    shape = GraphShape.of(lengths)
    assert shape == GraphShape.of(lengths[::-1])
    assert sum(lengths) <= shape.rows <= max(128, 1.5 * sum(lengths))
    assert shape.rows in {factor * 2**power for factor in (2, 3) for power in range(15)}  # so there are few shapes
    starts = shape.starts(lengths)
    assert len(starts) == shape.sequences + 1
    sizes = starts.diff().tolist()
    assert sizes[: len(lengths)] == sorted(lengths)
    assert sum(sizes) == shape.rows
    assert 0 <= min(sizes) <= max(sizes) <= shape.longest


class _Recording(TorchDispatchMode):
    """Stands for ``torch.cuda.graph``: notes the operations that run inside it."""

    def __init__(self, graph: "_RecordedGraph", **_: Any) -> None:
        super().__init__()
        self.calls = graph.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {} if kwargs is None else kwargs
        result = func(*args, **options)
        self.calls.append((partial(func, *args, **options), result))
        return result


class _RecordedGraph:
    """Stands for ``torch.cuda.CUDAGraph``: repeats operations on the tensors that they had when they were recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call, result in self.calls:
                for old, new in zip(tree_leaves(result), tree_leaves(call()), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def plain_flash(qkv: Tensor, starts: Tensor, longest: int, dropout: float, window: int | None) -> Tensor:
    """Attention within each sequence, which reads the starts on the device as the kernel does."""
    places = torch.arange(len(qkv))
    sequence = torch.searchsorted(starts, places, right=True)
    distance = (places[:, None] - places).abs()
    hidden = (sequence[:, None] != sequence) | (distance > (longest if window is None else window))
    query, key, value = qkv.permute(1, 2, 0, 3).unbind(0)
    weights = (query @ key.transpose(1, 2) / qkv.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what captures on a GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _Recording)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(graphs, "_capture_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    monkeypatch.setattr(attention, "attention_backend", lambda **_: "flash")
    monkeypatch.setattr(attention, "flash_attention", plain_flash)


def encoder_of(family: str) -> TransformerEncoder:
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    config = encoder_config(hf_config(family, **settings).to_dict())
    torch.manual_seed(0)
    encoder = TransformerEncoder(config).double().train()
    initialize(encoder, config)
    return encoder


def batch_of(*lengths: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    return pack(ids, [[0] * length for length in lengths], position_offset=0)


def gradients_of(encoder: TransformerEncoder, batches: list[PackedBatch]) -> dict[str, Tensor]:
    """The sums over batches of the gradients of a function of all tokens, in one batch of the first tokens."""
    encoder.zero_grad(set_to_none=True)
    if encoder.graphs is not None:
        encoder.graphs.begin_step()
    for batch in batches:
        selection = Selection(rows=batch.layout.first_rows) if batch is BATCHES[1] else None
        inputs = (batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout)
        output = encoder(*inputs, selection=selection)
        torch.autograd.backward((output * torch.arange(output.shape[1])).sin().sum())
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


BATCHES = [batch_of(5, 17, 3), batch_of(30, 30), batch_of(9, 4, 20)]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_gradients_of_graphs_are_those_of_the_layers(family: str) -> None:
    """Several batches of a step, some of one shape, and two steps."""
    encoder = encoder_of(family)
    expected = gradients_of(encoder, BATCHES)
    encoder.use_graphs(torch.bfloat16)
    with torch.autocast("cuda", enabled=False):
        encoder.graphs._layers = encoder.run_layers  # type: ignore[union-attr]  # in float64
        for _ in range(2):
            computed = gradients_of(encoder, BATCHES)
            assert computed.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(computed[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    assert len(encoder.graphs._graphs) == 2  # type: ignore[union-attr]


@pytest.mark.usefixtures("captured")
def test_batches_that_no_graph_can_run_take_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of("bert")
    encoder.use_graphs(torch.bfloat16)
    used: LayerGraphs = encoder.graphs  # type: ignore[assignment]
    used._layers = encoder.run_layers
    used.begin_step()
    batch = BATCHES[0]
    inputs = (batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout)
    first = encoder(*inputs)
    assert len(used._graphs) == 1
    second = encoder(*inputs)  # the backward pass of the first has not run, and what it needs must stay
    torch.testing.assert_close(first, second)
    assert "Replay" in type(first.grad_fn).__name__
    assert "Replay" not in type(second.grad_fn).__name__
    used.begin_step()
    monkeypatch.setattr(graphs, "MOST_ROWS", 10)
    assert "Replay" not in type(encoder(*inputs).grad_fn).__name__
    monkeypatch.undo()
    with torch.no_grad():
        assert not encoder(*inputs).requires_grad
    assert "Replay" not in type(encoder.eval()(*inputs).grad_fn).__name__


@pytest.mark.usefixtures("captured")
def test_frozen_embeddings_weights_that_move_and_copies() -> None:
    encoder = encoder_of("bert")
    encoder.embeddings.requires_grad_(False)
    expected = gradients_of(encoder, BATCHES)
    encoder.use_graphs(torch.bfloat16)
    used: LayerGraphs = encoder.graphs  # type: ignore[assignment]
    used._layers = encoder.run_layers
    computed = gradients_of(encoder, BATCHES)
    assert computed.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    graphs_before = dict(used._graphs)
    used.begin_step()
    assert used._graphs == graphs_before
    assert copy.deepcopy(encoder).graphs is None
    weight = encoder.layers[0].output.weight
    weight.data = weight.data.clone()
    used.begin_step()
    assert not used._graphs
    encoder.graphs = None
    encoder.requires_grad_(False)
    encoder.use_graphs(torch.bfloat16)
    assert encoder.graphs is None


@pytest.mark.usefixtures("captured")
def test_a_second_backward_pass_is_an_error() -> None:
    encoder = encoder_of("bert")
    encoder.use_graphs(torch.bfloat16)
    encoder.graphs._layers = encoder.run_layers  # type: ignore[union-attr]
    encoder.graphs.begin_step()  # type: ignore[union-attr]
    batch = BATCHES[0]
    total = encoder(batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout).sum()
    torch.autograd.backward(total, retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.backward(total)

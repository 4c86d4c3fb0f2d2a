"""The encoder on packed rows: independent of the batch, the same bits twice, mixed precision, initial weights."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from bert_tasks.encoder import packing
from bert_tasks.encoder.config import Pooling
from bert_tasks.encoder.layers import TransformerEncoder, initialize
from bert_tasks.encoder.linear import ACTIVATIONS
from bert_tasks.encoder.packing import PackedBatch, pack
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.hf_models import FAMILIES, hf_config, widen

LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)


def random_ids(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 120, (length,), generator=generator).tolist() for length in lengths]


def batch_of(ids: Sequence[list[int]], *, position_offset: int) -> PackedBatch:
    return pack(ids, [[0] * len(tokens) for tokens in ids], position_offset=position_offset)


def task_model(family: str, *, pooling: Pooling = "cls", dtype: torch.dtype = torch.float64) -> TaskModel:
    task = SequenceClassification.of(labels=("a", "b", "c"), max_length=48, pooling=pooling)
    model = TaskModel(hf_config(family).to_dict(), task).to(dtype).eval()
    widen(model, seed=0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["cls", pytest.param("attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_logits_do_not_depend_on_order_or_company(family: str, pooling: Pooling) -> None:
    model, ids = task_model(family, pooling=pooling), random_ids()
    offset = model.config.position_offset
    together = model(batch_of(ids, position_offset=offset))
    backwards = model(batch_of(ids[::-1], position_offset=offset))
    torch.testing.assert_close(backwards.flip(0), together, rtol=0, atol=1e-12)
    for i, tokens in enumerate(ids):
        alone = model(batch_of([tokens], position_offset=offset))
        torch.testing.assert_close(alone, together[i : i + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("slack", [0.0, 1.0])
def test_logits_and_gradients_do_not_depend_on_the_groups(slack: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = task_model("bert"), random_ids()

    def run() -> tuple[Tensor, ...]:
        logits = model(batch_of(ids, position_offset=0))
        return logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))

    usual = run()
    monkeypatch.setattr(packing, "GROUP_SLACK", slack)
    for reference, other in zip(usual, run(), strict=True):
        torch.testing.assert_close(other, reference, rtol=1e-12, atol=1e-10)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("pooling", ["cls", pytest.param("attention", marks=pytest.mark.slow)])
def test_two_threads_give_the_same_bits_twice(pooling: Pooling) -> None:
    """Few different tokens, so that many rows add up in one row of a table; enough rows to be split over threads."""
    config = hf_config("bert", hidden_size=64, num_hidden_layers=1).to_dict()
    task = SequenceClassification.of(labels=("a", "b", "c"), max_length=48, pooling=pooling)
    model = TaskModel(config, task).train()
    ids = [[3 + token % 4 for token in tokens] for tokens in random_ids(LENGTHS * 3)]
    batch = batch_of(ids, position_offset=0)

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        return torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))

    assert all(torch.equal(gradient, other) for gradient, other in zip(gradients(), gradients(), strict=True))


@pytest.mark.parametrize(
    ("family", "pooling"),
    [*((family, "cls") for family in FAMILIES), *(("bert", pooling) for pooling in ("mean", "max", "attention"))],
)
def test_bfloat16_stays_near_single_precision(family: str, pooling: Pooling) -> None:
    """At the initial weights that training starts from; bfloat16 has 8 bits."""
    task = SequenceClassification.of(labels=("a", "b", "c"), max_length=48, pooling=pooling)
    torch.manual_seed(0)
    model = TaskModel(hf_config(family).to_dict(), task).eval()
    batch = batch_of(random_ids(), position_offset=model.config.position_offset)
    exact = model(batch)
    exact_gradient = torch.autograd.grad(exact.square().sum(), model.head.output.weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = model(batch)
    gradient = torch.autograd.grad(near.float().square().sum(), model.head.output.weight)[0]
    assert near.dtype == torch.bfloat16
    assert not torch.equal(near.float(), exact)
    for value, other in ((near.detach().float(), exact.detach()), (gradient, exact_gradient)):
        assert float((value - other).abs().max()) <= 0.05 * float(other.abs().max())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_activations() -> None:
    at = torch.tensor([-1.0, 0.5], dtype=torch.float64)
    erf = 0.5 * at * (1 + torch.erf(at / 2**0.5))
    cubic = 0.5 * at * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (at + 0.044715 * at**3)))
    torch.testing.assert_close(ACTIVATIONS["gelu"](at), erf)
    torch.testing.assert_close(ACTIVATIONS["gelu_new"](at), cubic)
    assert ACTIVATIONS["relu"](at).tolist() == [0.0, 0.5]
    assert torch.equal(ACTIVATIONS["tanh"](at), torch.tanh(at))
    assert float((erf - cubic).abs().max()) > 1e-5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "modernbert"])  # test_modernbert.py
@torch.no_grad()
def test_initial_weights(family: str) -> None:
    model = TaskModel(hf_config(family).to_dict(), SequenceClassification.of(labels=("a", "b"), max_length=48))
    initialize(model, model.config)
    for module in model.modules():
        bias = getattr(module, "bias", None)
        assert not isinstance(bias, Tensor) or torch.count_nonzero(bias) == 0
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
        elif isinstance(module, nn.Linear):
            assert 0.012 < float(module.weight.std()) < 0.028
        elif isinstance(module, nn.Embedding) and module.num_embeddings > 3:
            assert 0.018 < float(module.weight.std()) < 0.022


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_no_buffers_but_in_files(family: str) -> None:
    table = ["encoder.positions.weight"] if family == "roformer" else []
    assert [name for name, _ in task_model(family).named_buffers()] == table


def test_dropout_is_for_training_only() -> None:
    model, batch = task_model("bert"), batch_of(random_ids(), position_offset=0)
    assert isinstance(model.encoder, TransformerEncoder)
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.equal(model(batch), model(batch))

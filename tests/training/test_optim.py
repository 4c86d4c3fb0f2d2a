"""Parameter groups, freezing and clipping on small models whose names do not tell what a module is."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bert_tasks.errors import UsageError
from bert_tasks.training import optim
from bert_tasks.training.step import clip_and_scale


class Tower(nn.Module):
    """Embeddings, three layers and a head; the norms' names do not say that they are norms."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.full_layer = nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.ModuleDict({"dense": nn.Linear(4, 4), "sa": nn.LayerNorm(4)}) for _ in range(3))
        self.classifier = nn.Linear(4, 2)

    def parameter_depths(self):
        def depth(name):
            if name.startswith("layers."):
                return int(name.split(".")[1]) + 1
            return 4 if name.startswith("classifier") else 0

        return {name: depth(name) for name, _ in self.named_parameters()}


class Shared(Tower):
    """Its three layers are two groups of weights: layers 1 and 2 share theirs."""

    def __init__(self):
        super().__init__()
        del self.layers[2]

    def parameter_depths(self):
        return {name: {1: 2, 2: 3}.get(depth, depth) for name, depth in super().parameter_depths().items()}


def settings_by_name(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }


def grouped(model, **options):
    groups = optim.parameter_groups(model, learning_rate=1e-3, weight_decay=0.01, **options)
    assert sum(len(group["params"]) for group in groups) == len(settings_by_name(model, groups))
    return groups


def test_biases_and_norms_do_not_decay_and_tied_weights_stand_in_one_group_once():
    model = Tower()
    model.layers[1]["dense"].weight = model.layers[0]["dense"].weight
    groups = grouped(model)
    settings = settings_by_name(model, groups)
    assert set(settings) == {name for name, _ in model.named_parameters()}
    decayed = {name for name, (_, decay) in settings.items() if decay == 0.01}
    assert decayed == {"words.weight", "classifier.weight"} | {f"layers.{i}.dense.weight" for i in (0, 2)}
    assert {decay for _, decay in settings.values()} == {0.0, 0.01}
    assert {rate for rate, _ in settings.values()} == {1e-3}
    assert len(groups) == 2


def test_rates_fall_layer_by_layer_below_the_head():
    model = Tower()
    settings = settings_by_name(model, grouped(model, layerwise_lr_decay=0.5))
    depths = model.parameter_depths()
    assert {name: rate for name, (rate, _) in settings.items()} == pytest.approx(
        {name: 1e-3 * [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1][depths[name]] for name in depths}
    )


@pytest.mark.parametrize("decay", [None, 0.9])
def test_the_head_may_have_its_own_rate(decay):
    model = Tower()
    settings = settings_by_name(model, grouped(model, layerwise_lr_decay=decay, head_learning_rate=0.1))
    plain = settings_by_name(model, grouped(model, layerwise_lr_decay=decay))
    for name, (rate, _) in settings.items():
        assert rate == (0.1 if name.startswith("classifier") else plain[name][0])


@pytest.mark.parametrize(
    ("embeddings", "layers", "frozen"),
    [(True, 2, ("words", "full_layer", "layers.0", "layers.1")), (False, 1, ("layers.0",))],
)
def test_frozen_parameters_are_left_out(embeddings, layers, frozen):
    model = Tower()
    optim.freeze(model, embeddings=embeddings, layers=layers)
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert left == {name for name, _ in model.named_parameters() if not name.startswith(frozen)}
    assert set(settings_by_name(model, grouped(model))) == left


def test_shared_layers_freeze_together_or_not_at_all():
    model = Shared()
    with pytest.raises(UsageError, match="expected 0 or one of 2, 3"):
        optim.freeze(model, embeddings=False, layers=1)
    assert all(parameter.requires_grad for parameter in model.parameters())
    optim.freeze(model, embeddings=False, layers=2)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("layers.0")}
    for layers in (-1, 4):
        with pytest.raises(UsageError, match="expected 0 or one of 1, 2, 3"):
            optim.freeze(Tower(), embeddings=False, layers=layers)


def give_gradients(model, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (scale * noise).to(parameter.dtype)


@pytest.mark.parametrize(("scale", "max_norm"), [(0.01, 1.0), (1.0, 0.3), (100.0, 1.0), (100.0, None)])
def test_clipping_equals_scaling_then_clip_grad_norm(scale, max_norm):
    ours, theirs = Tower().double(), Tower().double()
    give_gradients(ours, scale)
    give_gradients(theirs, scale)
    factor = torch.tensor(1 / 7, dtype=torch.float64)
    norm = clip_and_scale(ours.parameters(), factor=factor, max_norm=max_norm)
    for parameter in theirs.parameters():
        parameter.grad *= factor
    limit = math.inf if max_norm is None else max_norm
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for our_parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our_parameter.grad, other.grad, rtol=0, atol=1e-12)


def test_parameters_without_gradients_are_left_alone():
    model = Tower()
    factor = torch.tensor(0.5, dtype=torch.float64)
    assert clip_and_scale(model.parameters(), factor=factor, max_norm=1.0) == 0
    model.classifier.weight.grad = torch.full((2, 4), 0.1)
    clip_and_scale(model.parameters(), factor=factor, max_norm=1.0)
    torch.testing.assert_close(model.classifier.weight.grad, torch.full((2, 4), 0.05))
    assert model.classifier.bias.grad is None
    assert model.classifier.weight.grad.dtype == torch.float32  # whatever the type of the factor


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad, max_norm):
    model = Tower()
    give_gradients(model)
    model.words.weight.grad[0, 0] = bad
    norm = clip_and_scale(model.parameters(), factor=torch.tensor(0.5), max_norm=max_norm)
    assert not norm.isfinite()


class NoValueReachesTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a tensor's value was read"
        return func(*args, **({} if kwargs is None else kwargs))


def test_clipping_does_not_wait_for_the_device():
    model = Tower()
    give_gradients(model)
    factor = torch.tensor(0.5)
    with NoValueReachesTheHost():
        norm = clip_and_scale(model.parameters(), factor=factor, max_norm=1.0)
        with pytest.raises(AssertionError, match="was read"):
            norm.item()

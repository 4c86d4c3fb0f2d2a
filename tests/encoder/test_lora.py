"""Adapters compute what the library peft computes on transformers' models; merged weights compute the same."""

import math

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from bert_tasks import TaskModel
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.linear import Linear
from bert_tasks.encoder.lora import Adapters, LoraLinear
from bert_tasks.families import family_of, parameter_map
from support.hf_models import FAMILIES, LONG_FAMILIES, Head, hf_model, random_batch
from support.parity import hf_output, ours_from, packed_batch, packed_output

LENGTHS, LABELS = (17, 1, 30, 9, 2, 16), (0, 2, 1, 1, 0, 2)
EVERY = ("query", "key", "value", "attention_output", "intermediate", "output")
RANK, ALPHA, STEPS = 3, 5.0, 4
OPTIM = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}


def adapters_of(model: TaskModel, targets: tuple[str, ...] = EVERY, **changes: object) -> Adapters:
    """Adapters with large random matrices B, in a frozen encoder."""
    options = {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "seed": 0} | changes
    adapters = Adapters(model.encoder, targets=targets, **options)
    model.encoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with adapters.attached(), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return adapters


class Theirs:
    """transformers' model with peft's adapters, whose matrices are copies of ours.

    ModernBERT has one layer for q, k and v in transformers, too. There peft gets adapters of three times the rank, with
    A stacked and B in blocks; the gradients outside the blocks are set to 0.
    """

    def __init__(self, model: PreTrainedModel, ours: TaskModel, adapters: Adapters, head: Head) -> None:
        names = parameter_map(family_of(ours.hf_config), ours.config, head=head, pooler=False)
        self.modules: dict[str, tuple[str, str]] = {}  # our parameter before ".query" and so on -> theirs
        with adapters.attached():
            our_parameters = dict(ours.named_parameters())
        adapted: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        for name, matrix in our_parameters.items():
            if ".lora_A." in name:
                layer, block = name.split(".lora_A.")
                sources = names[f"{layer}.weight"]
                position = EVERY[3 - len(sources) : 3].index(block) if len(sources) > 1 else 0
                source = sources[position].removesuffix(".weight")
                other = our_parameters[name.replace("lora_A", "lora_B")]
                if len(sources) == 1 and layer.endswith("qkv") and source not in adapted:  # those without are empty
                    none = (matrix.detach()[:0], other.detach()[:, :0])
                    adapted[source] = dict.fromkeys(EVERY[:3], none)
                adapted.setdefault(source, {})[block] = (matrix, other)
        ranks = {source: RANK * len(blocks) for source, blocks in adapted.items()}
        alphas = {source: ALPHA * len(blocks) for source, blocks in adapted.items()}
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=[*adapted], rank_pattern=ranks, alpha_pattern=alphas
        )
        self.model: PreTrainedModel = peft.inject_adapter_in_model(config, model).eval()
        self.masks: dict[nn.Parameter, Tensor] = {}
        self.pairs: list[tuple[str, nn.Parameter, list[nn.Parameter]]] = []
        for source, blocks in adapted.items():
            layer = self.model.get_submodule(source)
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            parts_a, parts_b = zip(*blocks.values(), strict=True)
            a.data = torch.cat([factor.detach() for factor in parts_a])
            b.data = torch.block_diag(*(factor.detach() for factor in parts_b))
            assert layer.scaling["default"] == pytest.approx(ALPHA / RANK)
            self.masks[b] = torch.block_diag(*(torch.ones_like(factor) for factor in parts_b))
            self.pairs += [(f"{source} A", a, [*parts_a]), (f"{source} B", b, [*parts_b])]
        parameters = dict(self.model.named_parameters())
        for name in (name for name in names if name.startswith("head.")):
            (source,) = names[name]
            self.pairs.append((source, parameters[source].requires_grad_(True), [our_parameters[name]]))
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        assert trained == {id(theirs) for _, theirs, _ in self.pairs}
        assert {id(parameter) for _, _, parts in self.pairs for parameter in parts if parameter.numel()} == {
            id(parameter) for parameter in our_parameters.values() if parameter.requires_grad
        }

    def apart(self, *, gradients: bool) -> float:
        """The largest difference of gradients or weights, in units of the largest value."""
        largest, difference = 0.0, 0.0
        for name, theirs, ours in self.pairs:
            expected = theirs.grad * self.masks.get(theirs, 1.0) if gradients else theirs.detach()
            parts = [parameter.grad if gradients and parameter.numel() else parameter.detach() for parameter in ours]
            tensor = torch.cat(parts) if name.endswith(" A") else torch.block_diag(*parts).view_as(expected)
            largest = max(largest, float(expected.abs().max()))
            difference = max(difference, float((tensor - expected).abs().max()))
        return difference / largest

    def mask_gradients(self) -> None:
        for parameter, mask in self.masks.items():
            parameter.grad *= mask


# These have two layers for our intermediate one, and peft an adapter for each.
TWO_LAYERS = ("eurobert", "nomic_bert", "gte", "ultrabert")
QUICK = ("roberta", "albert")  # of which the second shares layers
CASES = [
    pytest.param(family, "sequence", EVERY, marks=() if family in QUICK else pytest.mark.slow)
    for family in FAMILIES
    if family not in LONG_FAMILIES
]
CASES += [("bert", "token", ("query", "value")), ("modernbert", "sequence", EVERY), ("deberta-v2", "token", EVERY)]
CASES += [
    pytest.param(family, "sequence", targets, marks=pytest.mark.slow)
    for family in LONG_FAMILIES
    for targets in (
        [name for name in EVERY if family not in TWO_LAYERS or name != "intermediate"],
        ("query", "value"),
    )
]


@pytest.mark.parametrize(("family", "head", "targets"), CASES)
def test_logits_loss_gradients_and_adamw_steps_are_those_of_peft(
    family: str, head: Head, targets: tuple[str, ...]
) -> None:
    stock = hf_model(family, head)
    ours = ours_from(stock, head)
    adapters = adapters_of(ours, targets)
    theirs = Theirs(stock, ours, adapters, head)
    batch = random_batch(family, lengths=LENGTHS)
    packed = packed_batch(ours, batch, [[float(label)] for label in LABELS] if head == "sequence" else None)
    with adapters.attached():
        parameters = [parameter for parameter in ours.parameters() if parameter.requires_grad]
    optimizers = [AdamW(parameters, **OPTIM), AdamW([pair[1] for pair in theirs.pairs], **OPTIM)]
    for step in range(STEPS):
        logits = hf_output(theirs.model, batch)
        if head == "sequence":
            expected = nn.functional.cross_entropy(logits, torch.tensor(LABELS))
        else:
            expected = logits[batch.attention_mask.bool()].square().sum() / sum(LENGTHS)
        with adapters.attached():
            assert (packed_output(ours, batch) - logits)[batch_mask(logits, batch)].abs().max() <= 1e-10
            (term,) = ours.task.output.loss(ours(packed), packed)
            loss = term.total / term.count
            loss.backward()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        assert theirs.apart(gradients=True) <= 1e-10, step
        theirs.mask_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert theirs.apart(gradients=False) <= 1e-10


def batch_mask(logits: Tensor, batch: object) -> Tensor:
    """Real tokens of ``[B, T, L]``, all of ``[B, L]``."""
    return batch.attention_mask.bool() if logits.dim() == 3 else torch.ones(len(logits), dtype=torch.bool)


@torch.no_grad()  # with gradients a frozen layer may round in another way
@pytest.mark.parametrize("family", ["roberta", "albert", "modernbert", "deberta-v2"])
def test_merged_weights_compute_the_same_and_are_taken_back(family: str) -> None:
    ours = ours_from(hf_model(family, "sequence"), "sequence")
    packed = packed_batch(ours, random_batch(family, lengths=LENGTHS))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    plain, adapters = ours(packed), adapters_of(ours)
    with adapters.attached():
        adapted = ours(packed)
    assert torch.equal(ours(packed), plain)
    assert (adapted - plain).abs().max() > 1e-3
    adapters.merge()
    assert (ours(packed) - adapted).abs().max() <= 1e-10
    assert ours.state_dict().keys() == before.keys()
    with adapters.attached():
        assert torch.equal(ours(packed), adapted)
    assert (ours(packed) - adapted).abs().max() <= 1e-10
    adapters.remove()
    assert torch.equal(ours(packed), plain)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_new_adapters_change_nothing_and_are_drawn_from_the_seed_as_peft_draws_them() -> None:
    ours = ours_from(hf_model("roberta", "sequence", dtype=torch.float32), "sequence")
    packed = packed_batch(ours, random_batch("roberta", lengths=LENGTHS))
    plain, drawn = ours(packed), []
    for seed in (0, 0, 1):
        adapters = Adapters(ours.encoder, rank=8, alpha=8.0, dropout=0.1, targets=("query", "value"), seed=seed)
        with adapters.attached():
            assert torch.equal(ours(packed), plain)
            drawn.append([value.detach() for name, value in ours.named_parameters() if "lora_A" in name])
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not any(map(torch.equal, drawn[0], drawn[2]))
    largest = max(float(value.abs().max()) for value in drawn[0])
    bound = 1 / math.sqrt(ours.config.hidden_size)  # of kaiming_uniform with a = sqrt(5)
    assert 0.95 * bound < largest <= bound


def test_each_adapter_drops_its_inputs_by_a_mask_of_its_own() -> None:
    torch.manual_seed(0)
    plain, rows = Linear(40, 12), torch.randn(50, 40)
    blocks = {"query": range(4), "value": range(8, 12)}
    layer = LoraLinear(plain, blocks, rank=2, alpha=6.0, dropout=0.5, generator=torch.Generator().manual_seed(0))
    for matrix in layer.lora_B.values():
        nn.init.normal_(matrix)
    torch.manual_seed(3)
    output = layer(rows)
    torch.manual_seed(3)
    expected, masks = plain(rows), [Dropout(0.5)(torch.ones_like(rows)) for _ in blocks]
    for (name, block), mask in zip(blocks.items(), masks, strict=True):
        expected[:, block.start : block.stop] += 3.0 * (rows * mask) @ layer.lora_A[name].T @ layer.lora_B[name].T
    assert not torch.equal(*masks)
    torch.testing.assert_close(output, expected)
    torch.manual_seed(3)
    parts = layer.parts((rows[:5], rows), (4, 8))
    assert [list(projection.shape) for projection in parts] == [[5, 4], [50, 8]]
    layer.eval()
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.merged(), layer.bias))


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_frozen_layers_compute_no_gradients_of_weights_and_keep_no_rows(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr("bert_tasks.encoder.cpu.matmul_library", lambda: library)
    rows, layer = torch.randn(7, 5, requires_grad=True), Linear(5, 3).requires_grad_(False)
    for autocast in (False, True):
        kept: list[Tensor] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda t: t
            ),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            output = layer(rows)
        assert kept
        assert not any(tensor.shape == rows.shape for tensor in kept)
        (gradient,) = torch.autograd.grad(output.float().sum(), rows)
        assert layer.weight.grad is None
        torch.testing.assert_close(gradient, layer.weight.sum(0).expand(7, 5), rtol=0.02, atol=0.02)

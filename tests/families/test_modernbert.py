"""ModernBERT's configurations as published and as transformers 5 writes them, and what only this family has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, ModernBertForSequenceClassification

from bert_tasks.encoder import layers, positions
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.packing import pack
from bert_tasks.encoder.positions import RotaryAngles
from bert_tasks.errors import UsageError
from bert_tasks.families import converted_config, encoder_config
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification
from support.hf_models import (
    Head,
    HFBatch,
    hf_config,
    hf_model,
    lacks,
    random_batch,
)
from support.largest_tensor import LargestTensor
from support.parity import Model, in_our_names, ours_from, packed_batch, packed_difference, shaped_difference
from support.small_checkpoints import edit_config, save_checkpoint
from support.stopped_runs import digests, events, run, stopped

pytestmark = pytest.mark.skipif(lacks("modernbert"), reason="its reference is transformers 5.3 or newer")
LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)
PUBLISHED = {"model_type": "modernbert", "global_attn_every_n_layers": 3, "local_attention": 128}


def read(**changes: object) -> EncoderConfig:
    return encoder_config({**PUBLISHED, **changes})


def test_layers_of_published_configs() -> None:
    config = read(global_rope_theta=160000.0, local_rope_theta=10000.0, num_hidden_layers=7)
    assert config.attention_window == (None, 64, 64, None, 64, 64, None)
    assert config.rotary_theta == (160000.0, 10000.0, 10000.0, 160000.0, 10000.0, 10000.0, 160000.0)
    assert config.layer_order == tuple(range(7))
    assert (config.placement, config.mlp, config.bias, config.absolute_positions) == ("pre", "gated", False, False)


def test_both_forms_of_the_config_are_one() -> None:
    """What transformers 5 makes of a published config and saves says the same."""
    for changes in (
        {},
        {"global_attn_every_n_layers": 1},
        {"local_rope_theta": 5000, "global_rope_theta": 7e4, "num_hidden_layers": 8, "global_attn_every_n_layers": 4},
    ):
        published = {**PUBLISHED, **changes}
        written = AutoConfig.for_model(**published).to_dict()
        assert set(written["layer_types"]) <= {"full_attention", "sliding_attention"}
        written |= {"global_attn_every_n_layers": 2, "global_rope_theta": 3.0, "local_rope_theta": 3.0}
        assert encoder_config(written) == encoder_config(published)


def compared(head: Head = "sequence", **changes: Any) -> tuple[nn.Module, Model, HFBatch]:
    theirs = hf_model("modernbert", head, config=hf_config("modernbert", **changes))
    return theirs, ours_from(theirs, head), random_batch("modernbert", lengths=LENGTHS)


def test_dropout_after_attention_is_that_of_the_attention_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probability for both in transformers; here each weight is kept, so that outputs can be compared."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, rows: rows * (1 + self.p) if self.training else rows)
    monkeypatch.setattr(layers.Dropout, "forward", nn.Dropout.forward)
    theirs, ours, batch = compared(attention_dropout=0.2)
    theirs.train()
    ours.train()
    for layer in ours.encoder.layers:
        assert (layer.attention.dropout, layer.attention_dropout.p) == (0.2, 0.2)
        layer.attention.dropout = 0.0
    assert packed_difference(theirs, ours, batch) <= 1e-10


@torch.no_grad()
def test_initial_weights_are_drawn_as_in_transformers() -> None:
    """Narrower before residual connections and in heads, and cut at two standard deviations of the whole."""
    torch.manual_seed(0)
    config = hf_config("modernbert", hidden_size=96, vocab_size=2000)
    theirs = ModernBertForSequenceClassification(config)
    ours = TaskModel(config.to_dict(), SequenceClassification.of(labels=("a", "b", "c"), max_length=48))
    expected = in_our_names(dict(theirs.named_parameters()), theirs, "sequence")
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        if value.numel() > 200:
            assert float(value.std()) == pytest.approx(float(expected[name].std()), rel=0.15), name
            assert float(value.abs().max()) == pytest.approx(float(expected[name].abs().max()), rel=0.15), name
        elif value.dim() == 1:
            assert torch.equal(value, expected[name])


def test_a_file_with_another_head_gives_the_part_that_all_heads_share(tmp_path: Path, by_kind: dict[str, Any]) -> None:
    """Published files hold the head for masked tokens, with whose dense layer transformers' classifiers begin."""
    tokenizer = by_kind["modern"]
    save_checkpoint(tmp_path / "base", "modernbert", tokenizer)
    masked = TaskModel.from_pretrained(tmp_path / "base", task=MaskedLanguageModeling.of(max_length=16))
    masked.save_pretrained(tmp_path / "masked")
    task = SequenceClassification.of(labels=("a", "b"), max_length=16)
    model = TaskModel.from_pretrained(tmp_path / "masked", task=task)
    assert model.load_report is not None
    assert model.load_report.new == ("classifier.weight", "classifier.bias")
    assert model.load_report.dropped == ("decoder.bias",)
    assert torch.equal(model.head.get_parameter("dense.weight"), masked.head.get_parameter("dense.weight"))


@pytest.mark.slow
def test_a_stopped_run_with_every_dropout_ends_with_the_same_bits(tmp_path: Path, by_kind: dict[str, Any]) -> None:
    save_checkpoint(tmp_path / "base", "modernbert", by_kind["modern"])
    rates = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")
    edit_config(tmp_path / "base", **dict.fromkeys(rates, 0.1))
    run(tmp_path / "whole", tmp_path / "base")
    stopped(3, tmp_path / "run", tmp_path / "base")
    run(tmp_path / "run", tmp_path / "base", head_seed=5)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    assert events(tmp_path / "run") == events(tmp_path / "whole")


@torch.no_grad()
def test_queries_keys_and_values_of_the_last_layer_are_those_of_its_normalised_input() -> None:
    _, ours, batch = compared("token")
    packed, seen = packed_batch(ours, batch), []
    ours.encoder.layers[-1].attention.qkv.register_forward_hook(lambda *call: seen.append(call[2]))
    _, states = ours.forward_states(packed)
    projections = ours.encoder.last_queries_keys_values(states)
    assert torch.equal(projections.flatten(1), seen[0])


def test_a_family_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="unknown family 'brt', did you mean 'bert'"):
        converted_config(hf_config("bert").to_dict(), layers=(0, 1), family="brt")


def test_kept_layers_stay_global_or_local() -> None:
    config = hf_config("modernbert").to_dict()
    for base_config in (config, {**config, "layer_types": None, "rope_parameters": None}):
        student = encoder_config(converted_config(base_config, layers=(0, 2, 3), family=None))
        assert student.attention_window == (None, 3, None)
        assert student.rotary_theta == (160000.0, 10000.0, 160000.0)


def set_layers(only: tuple[int, ...], path: str, **values: object) -> Callable[[TaskModel], None]:
    """Sets attributes of a module of some layers."""

    def edit(model: TaskModel) -> None:
        for index in only:
            for name, value in values.items():
                setattr(model.encoder.layers[index].get_submodule(path), name, value)

    return edit


def set_module(path: str, module: nn.Module) -> Callable[[TaskModel], None]:
    return lambda model: model.set_submodule(path, module, strict=True)


@torch.no_grad()
def halves_swapped(model: TaskModel) -> None:
    for layer in model.encoder.layers:
        layer.intermediate.weight.copy_(torch.cat(layer.intermediate.weight.chunk(2)[::-1]))


# Faults that only this family can have. The others are in tests/model/test_mutations.py.
EDITS: dict[str, Callable[[TaskModel], None]] = {
    "one theta for all": set_layers((0, 1, 2, 3), "attention", theta=160000.0),
    "window one too narrow": set_layers((1, 2), "attention", window=2),
    "window one too wide": set_layers((1, 2), "attention", window=4),
    "window in a global layer": set_layers((3,), "attention", window=3),
    "gate and activated half swapped": halves_swapped,
    "final norm missing": set_module("encoder.norm", nn.Identity()),
    "layer 0 has a norm": set_module("encoder.layers.0.attention_norm", nn.LayerNorm(36, dtype=torch.float64)),
    "head without a norm": set_module("head.norm", nn.Identity()),
}


def negated(rows: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    first, second = rows.chunk(2, dim=-1)
    return first * cosines - second * sines, second * cosines - first * sines


ANGLES = RotaryAngles._cosines_and_sines
PATCHES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "second half turned the other way": (positions, "rotate_halves", negated),
    "angles in single precision": (
        RotaryAngles,
        "_cosines_and_sines",
        lambda *arguments: tuple(part.float().double() for part in ANGLES(*arguments)),
    ),
}


@pytest.mark.parametrize("name", [*EDITS, *PATCHES])
def test_a_fault_makes_parity_fail_by_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, batch = compared()
    assert isinstance(ours, TaskModel)
    if name in EDITS:
        EDITS[name](ours)
    else:
        monkeypatch.setattr(*PATCHES[name])
    for difference in (shaped_difference, packed_difference):
        assert not difference(theirs, ours, batch) <= 1e-9


def test_mean_and_first_token_differ() -> None:
    theirs, ours, batch = compared(classifier_pooling="mean")
    left = random_batch("modernbert", lengths=LENGTHS, side="left")
    for padded in (batch, left):  # distances alone count
        assert shaped_difference(theirs, ours, padded) <= 1e-10
        assert packed_difference(theirs, ours, padded) <= 1e-10
    ours.head.pooling = "cls"
    assert packed_difference(theirs, ours, batch) > 1e-3


@pytest.mark.parametrize("window", [64, 65])
def test_the_published_window_is_64_tokens_on_each_side(window: int) -> None:
    config = hf_config("modernbert", num_hidden_layers=2, max_position_embeddings=200, local_attention=128)
    theirs = hf_model("modernbert", "token", config=config)
    ours = ours_from(theirs, "token")
    assert isinstance(ours, TaskModel)
    set_layers((1,), "attention", window=window)(ours)
    batch = random_batch("modernbert", lengths=(200, 66, 131))
    for difference in (shaped_difference, packed_difference):
        apart = difference(theirs, ours, batch)
        assert apart <= 1e-10 if window == 64 else apart > 1e-9


@pytest.mark.slow
def test_no_tensor_of_8192_tokens_is_a_square() -> None:
    """In a forward and backward pass of the whole model: the largest is the inner states of the feed-forward."""
    config = hf_config("modernbert", num_hidden_layers=2, max_position_embeddings=8192, local_attention=128)
    ours = ours_from(hf_model("modernbert", "token", dtype=torch.float32, config=config), "token")
    ids = torch.randint(3, 120, (8192,), generator=torch.Generator().manual_seed(0)).tolist()
    packed = pack([ids], [[0] * 8192], position_offset=0)
    with LargestTensor() as seen:
        torch.autograd.backward(ours.train()(packed).sum())
    assert 8192 * 2 * 56 <= seen.elements <= 8192 * 4 * 64

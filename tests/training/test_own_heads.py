"""Heads that transformers lacks, made by a task of the user: drawn, trained, saved and loaded as the user built them.

And models whose modules a library has wrapped, which are refused before training.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import Head, select_first_tokens
from bert_tasks.encoder.packing import Layout, Selection
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.model.loading import restore
from bert_tasks.tasks import SequenceClassification
from support.sampling import slow_except
from support.training_runs import LABELS, distance, load_model, make_rows, weights_of

QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
PRIOR = (-0.25, 0.75)


class TwoLayers(Head):
    """No layer is called ``output``; initial values, tied weights, and buffers of floats, whole numbers and neither."""

    temperature: Tensor
    prior: Tensor

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width, momentum=0.0)
        self.scores = nn.Linear(width, labels)
        with torch.no_grad():
            self.scores.bias.copy_(torch.tensor(PRIOR))
        self.register_buffer("temperature", torch.tensor(2.0), persistent=False)
        self.register_buffer("prior", torch.tensor([3, 4]))

    def select(self, layout: Layout) -> Selection:
        return select_first_tokens(layout)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.scores(self.again(torch.relu(self.first(hidden)))) / self.temperature
        return logits + 0.0 * self.norm.weight.sum() + 0.0 * self.norm.bias.sum()


@dataclass(frozen=True, kw_only=True)
class OwnHead(SequenceClassification):
    name: ClassVar[str] = "own-head"
    head_kind: ClassVar[HeadKind | None] = None

    def head(self, config: EncoderConfig) -> Any:
        return TwoLayers(config.hidden_size, len(self.output.labels))


@dataclass(frozen=True, kw_only=True)
class MisnamedHead(OwnHead):
    name: ClassVar[str] = "misnamed-head"
    head_kind: ClassVar[HeadKind | None] = "sequence"


TASK = OwnHead.of(labels=LABELS, max_length=40)


def quick_fit(model: TaskModel, folder: Path, **changes: Any) -> None:
    fit(model, make_rows(24), make_rows(9, seed=1), output_dir=folder, **{**QUICK, **changes})


def test_an_own_head_keeps_its_initial_values(checkpoint: Path) -> None:
    model = load_model(checkpoint, TASK)
    torch.manual_seed(0)
    expected = TwoLayers(model.config.hidden_size, 2).state_dict()
    assert {name: value.tolist() for name, value in model.head.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert model.head.scores.bias.tolist() == list(PRIOR)
    assert model.head.again.weight is model.head.first.weight
    assert model.head.temperature == 2.0
    new_model = TaskModel(model.hf_config, TASK)
    assert new_model.head.scores.bias.tolist() == list(PRIOR)


def test_an_own_head_is_trained_saved_and_loaded(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(checkpoint, TASK)
    quick_fit(model, tmp_path / "run")
    again = TaskModel.from_pretrained(tmp_path / "run" / "model", task=OwnHead)
    assert again.head.again.weight is again.head.first.weight
    state, saved = model.state_dict(), again.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in state)
    assert evaluate(again, make_rows(9, seed=1)) == evaluate(model, make_rows(9, seed=1))


def test_a_head_that_is_not_the_one_it_names_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Task\.head_kind is 'sequence', but the head has no head\.dense\.bias.*Set head_kind"
    ):
        load_model(checkpoint, MisnamedHead.of(labels=LABELS, max_length=40))


# A new head is drawn from the run's seed


def test_fit_draws_a_new_head_from_its_seed_alone(checkpoint: Path, tmp_path: Path) -> None:
    def trained(name: str, seed: int, noise: int) -> tuple[dict[str, Tensor], str]:
        torch.manual_seed(noise)
        model = TaskModel.from_pretrained(checkpoint, task=TASK)
        state = torch.get_rng_state()
        draw_new_head(model, seed)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(noise)
        quick_fit(model, tmp_path / name, seed=seed)
        return weights_of(model), json.loads((tmp_path / name / "run.json").read_text())["initial_weights"]

    first, again, other = trained("first", 7, 1), trained("again", 7, 2), trained("other", 8, 2)
    assert all(torch.equal(first[0][name], again[0][name]) for name in first[0])
    assert first[1] == again[1] != other[1]


def test_a_head_that_was_trained_or_set_is_not_drawn_again(checkpoint: Path, tmp_path: Path) -> None:
    trained, changed = load_model(checkpoint), load_model(checkpoint)
    quick_fit(trained, tmp_path, seed=7)
    changed.head.output.bias.data.fill_(0.5)
    for model in (trained, changed, TaskModel.from_pretrained(tmp_path / "model")):
        before = weights_of(model)
        draw_new_head(model, 8)
        assert distance(weights_of(model), before) == 0


# Wrapped models


class Wrapper(nn.Module):
    """What peft puts in a layer's place: the layer is ``base_layer``, with matrices of its own beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))
        return output


def wrap_encoder(model: TaskModel) -> None:
    model.encoder.layers[0].intermediate = Wrapper(model.encoder.layers[0].intermediate)


def wrap_head(model: TaskModel) -> None:
    model.head.dense = Wrapper(model.head.dense)


def parametrise(model: TaskModel) -> None:
    nn.utils.parametrizations.weight_norm(model.head.output)


def resize(model: TaskModel) -> None:
    model.encoder.embeddings.position = nn.Embedding(20, model.config.hidden_size)


CHANGES = {
    "encoder": (wrap_encoder, "encoder.layers.0.intermediate.base_layer.bias"),
    "head": (wrap_head, "head.dense.bias"),
    "parametrised": (parametrise, "head.output.parametrizations.weight.original0"),
    "resized": (resize, "encoder.embeddings.position.weight"),
}


@pytest.mark.parametrize("change", slow_except(CHANGES, "encoder", "resized"))
def test_a_wrapped_model_is_refused_before_training_and_saving(change: str, checkpoint: Path, tmp_path: Path) -> None:
    load_model(checkpoint).save_pretrained(tmp_path / "saved")
    model = load_model(checkpoint)
    apply, named = CHANGES[change]
    apply(model)
    for action in (
        lambda: quick_fit(model, tmp_path / "run"),
        lambda: model.save_pretrained(tmp_path / "folder"),
        lambda: restore(model, tmp_path / "saved"),
    ):
        with pytest.raises(UsageError, match=r"merge_and_unload\(\)") as error:
            action()
        assert named in str(error.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "folder").exists()


# Numbers of 64 bits


def test_a_float64_checkpoint_is_loaded_as_float32_with_its_new_head(checkpoint: Path, tmp_path: Path) -> None:
    trained = load_model(checkpoint)
    trained.double().save_pretrained(tmp_path / "double")
    rows = make_rows(9)
    for task in (trained.task, TASK, None):
        model = TaskModel.from_pretrained(tmp_path / "double", task=task)
        assert {value.dtype for value in model.parameters()} == {torch.float32}
        assert len(model.predict(rows)) == 9
    quick_fit(TaskModel.from_pretrained(tmp_path / "double", task=TASK), tmp_path / "run")


def test_restoring_keeps_the_models_own_precision(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(checkpoint).double()
    with torch.no_grad():
        model.head.output.weight += 1e-12
    before = weights_of(model)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        model.head.output.weight.zero_()
    restore(model, tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_values_beyond_float32_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(checkpoint).double()
    with torch.no_grad():
        model.head.output.weight[0, 0] = 1e300
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"too large for torch\.float32"):
        TaskModel.from_pretrained(tmp_path / "saved")

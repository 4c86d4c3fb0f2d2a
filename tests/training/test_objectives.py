"""An objective of two weighted terms with a parameter of its own: gradients, resuming, and what is saved."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bert_tasks import TaskModel
from bert_tasks.data.reading import read
from bert_tasks.data.splits import Splits
from bert_tasks.errors import StoppedError, UsageError
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.training.loop import Trainer
from bert_tasks.training.objectives import Supervised, parameter_depths
from bert_tasks.training.step import OptimizerSteps
from support.runs import digests, events
from support.stopped_runs import signalling
from support.training_runs import (
    WEIGHTED_TASK,
    LengthAndLabel,
    load_model,
    make_rows,
    make_steps,
    walk,
)


class Other(LengthAndLabel):
    pass


def objective_of(checkpoint, **options):
    return LengthAndLabel(load_model(checkpoint, WEIGHTED_TASK).double(), **options).double()


@pytest.mark.parametrize(
    ("unlabelled", "shortest"), [((2, 5), 8), (range(9), 8), ((2, 5), 100)], ids=["both", "lengths only", "labels only"]
)
def test_the_gradient_is_that_of_the_weighted_sum_of_means(wide_checkpoint, unlabelled, shortest):
    """A term that counts nothing in the whole batch is left out."""
    rows = make_rows(9, unlabelled=unlabelled)
    objective = objective_of(wide_checkpoint, shortest=shortest)
    reference = copy.deepcopy(objective)
    steps = make_steps(
        objective.model,
        rows,
        objective=objective,
        batch_size=9,
        max_grad_norm=None,
        micro_batch_tokens=30,
        vocabulary_rows="all",
    )
    _, batch = next(steps.batches())
    terms = steps.backward(0, batch)
    gradients = {name: parameter.grad for name, parameter in objective.named_parameters()}
    result = steps.update(0, batch, terms)  # scales the gradients in place before the optimizer drops them

    reference_steps = make_steps(reference.model, rows, objective=reference, batch_size=9)
    seen = []
    reference.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    reference_steps.backward(0, batch)
    reference.zero_grad(set_to_none=True)
    (packed,) = seen
    loss = sum(term.weight * term.total / term.count for term in reference(packed) if term.count > 0)
    loss.backward()
    assert result.values[0].item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in reference.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        torch.testing.assert_close(gradients[name].to_dense(), expected, rtol=1e-9, atol=1e-12)


def trainer(checkpoint, folder, objective_class=LengthAndLabel, *, head_seed=0, **changes):
    model = load_model(checkpoint, WEIGHTED_TASK, seed=head_seed)
    rows = make_rows(8, unlabelled=(2,))
    tables = [read(split_rows, model.task.columns, require_labels=False) for split_rows in (rows, make_rows(6, seed=1))]
    optim = {"epochs": 2, "batch_size": 3, "learning_rate": 1e-3, "micro_batch_tokens": 30, **changes}
    return Trainer(
        objective=objective_class(model),
        splits=Splits(train=tables[0], validation={"": tables[1]}),
        optim=OptimSection(**optim),
        run=RunSection(output_dir=str(folder), logging_steps=1, keep_checkpoints=True),
    )


@pytest.fixture(scope="module")
def straight(dropout_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("objective") / "run"
    trainer(dropout_checkpoint, folder).train(progress=False)
    return folder


def test_a_stopped_run_ends_with_the_same_bits(straight, dropout_checkpoint, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSteps, "update", signalling(OptimizerSteps.update, 4))
        with pytest.raises(StoppedError):
            trainer(dropout_checkpoint, tmp_path).train(progress=False)
    trainer(dropout_checkpoint, tmp_path, head_seed=5).train(progress=False)
    assert digests(tmp_path) == digests(straight)
    assert events(tmp_path) == events(straight)
    moments = load_file(straight / "checkpoints" / "ckpt-6" / "optimizer.safetensors")
    assert moments["objective.slope/step"] == 6


def test_only_the_model_is_saved(straight):
    saved = TaskModel.from_pretrained(straight / "model", task=type(WEIGHTED_TASK))
    stored = load_file(straight / "checkpoints" / "ckpt-6" / "weights.safetensors")
    assert stored.keys() == {*dict(saved.named_parameters()), "objective.slope"}
    assert stored["objective.slope"] != 0
    assert not any("slope" in name for name in load_file(straight / "model" / "model.safetensors"))


def test_a_run_is_not_resumed_with_another_objective(straight, dropout_checkpoint):
    with pytest.raises(UsageError, match="differs in objective"):
        trainer(dropout_checkpoint, straight, Other, epochs=3).train(progress=False)


def test_checkpoints_of_the_tasks_own_loss_bear_the_models_names(checkpoint):
    model = load_model(checkpoint)
    objective = Supervised(model)
    assert list(objective.checkpoint_parameters()) == [name for name, _ in model.named_parameters()]
    named = {f"model.{name}": depth for name, depth in parameter_depths(model).items()}
    assert objective.parameter_depths() == named
    with_more = LengthAndLabel(model)
    assert with_more.parameter_depths() == {**named, "slope": max(named.values())}


# What a step sees


def test_random_numbers_follow_the_feature_not_its_place():
    keys = FeatureKeys(seed=1, epoch=2, numbers=(5, 9))
    draws = [keys.generator(i).random(4).tolist() for i in (0, 1)]
    assert draws[0] != draws[1]
    again = FeatureKeys(seed=1, epoch=2, numbers=(9, 3, 5))
    assert [again.generator(i).random(4).tolist() for i in (2, 0)] == draws
    for other in (FeatureKeys(seed=2, epoch=2, numbers=(5,)), FeatureKeys(seed=1, epoch=3, numbers=(5,))):
        assert other.generator(0).random(4).tolist() != draws[0]
    assert isinstance(keys.generator(0), np.random.Generator)


class Masking(Supervised):
    """Records what it prepares, and shortens every other feature."""

    def __init__(self, model):
        super().__init__(model)
        self.prepared, self.batches = [], []

    def prepare(self, features, keys, corpus):
        drawn = [keys.generator(i).random() for i in range(len(features))]
        self.prepared += zip([keys.epoch] * len(features), keys.numbers, drawn, strict=True)
        assert [corpus[n]["input_ids"] for n in keys.numbers] == [feature["input_ids"] for feature in features]
        return [
            {**feature, "input_ids": feature["input_ids"][:2], "token_type_ids": feature["token_type_ids"][:2]}
            if draw < 0.5
            else feature
            for feature, draw in zip(features, drawn, strict=True)
        ]

    def forward(self, batch):
        self.batches.append(batch.layout.lengths)
        return super().forward(batch)


def test_a_step_sees_prepared_features_and_cuts_micro_batches_after_that(checkpoint):
    whole, narrow = (Masking(load_model(checkpoint)) for _ in range(2))
    for objective, sizes in (
        (whole, {"micro_batch_tokens": 16384, "batch_size": 4}),
        (narrow, {"micro_batch_tokens": 20, "batch_size": 3}),
    ):
        walk(make_steps(objective.model, make_rows(12), objective=objective, epochs=2, **sizes))
    assert sorted(whole.prepared) == sorted(narrow.prepared)
    assert len({draw for _, _, draw in whole.prepared}) == 24
    assert any(2 in lengths for lengths in narrow.batches)
    # one more sample would not have fitted
    assert all(sum(lengths) <= 20 or len(lengths) == 1 for lengths in narrow.batches)
    assert sum(map(len, narrow.batches)) == 24
    assert len(narrow.batches) < 24

"""An optimizer of one's own: by fit, by a recipe, resumed with the same bits; and the hooks of a callback."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from bert_tasks import TrainerCallback, fit, load_recipe, train
from bert_tasks.errors import RecipeError, UsageError
from support.runs import digests, events
from support.sampling import slow_except
from support.stopped_runs import run, stopped
from support.training_runs import load_model, make_rows, make_steps, weights_of

ROWS = make_rows(16)
QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
MODULE = """
import torch

class Lion(torch.optim.Optimizer):
    'Chen et al., arXiv:2302.06675; counts its steps in a group and in a plain number.'

    def __init__(self, groups, beta1=0.9, beta2=0.99):
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "beta1": beta1, "beta2": beta2, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                moment = state["moment"]
                # A bias that only the restored numbers give: a resumed run that counts from 0 has other weights.
                push = 1 + 1 / state["count"] + 1 / group["steps"]
                update = (moment * group["beta1"] + parameter.grad * (1 - group["beta1"])).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * push)
                moment.lerp_(parameter.grad, 1 - group["beta2"])

def nothing(groups):
    return None

def half(groups):
    return torch.optim.SGD(groups[0]["params"][:1])

def broken(groups):
    raise ValueError("needs a number")
"""


@pytest.fixture
def lion(tmp_path, monkeypatch):
    (tmp_path / "toy_optimizers.py").write_text(MODULE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "toy_optimizers:Lion"
    sys.modules.pop("toy_optimizers", None)


def factory(name):
    module, _, factory = name.partition(":")
    return getattr(importlib.import_module(module), factory)


def test_fit_and_a_recipe_train_with_an_optimizer_of_ones_own(wide_checkpoint, tmp_path, lion, capfd):
    models = [load_model(wide_checkpoint) for _ in range(3)]
    for number, optimizer in enumerate((factory(lion), lion, "adamw")):
        folder, quick = tmp_path / str(number), {**QUICK, "progress": True}
        fit(models[number], ROWS, ROWS[:4], output_dir=folder, optimizer=optimizer, **quick)
    assert capfd.readouterr().err.count("all rows of the word embeddings are trained, because the optimizer") == 2
    weights = [weights_of(model) for model in models]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert not torch.equal(weights[0]["head.dense.weight"], weights[2]["head.dense.weight"])
    lines = (json.dumps(row) for row in ROWS)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), "utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""task = "sequence-classification"
model.name = "{wide_checkpoint}"
settings = {{labels = ["negative", "positive"], max_length = 40}}
data.train = "rows.jsonl"
run.output_dir = "run"
optim = {{optimizer = "{lion}", epochs = 1, batch_size = 8}}
""",
        "utf-8",
    )
    assert train(load_recipe(recipe), progress=False).steps == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["settings"]["optim.optimizer"] == lion


@pytest.mark.parametrize("case", slow_except(["single", "adapters"], "single"))
def test_a_stopped_run_ends_with_the_same_bits(dropout_checkpoint, tmp_path, lion, case):
    run(tmp_path / "whole", dropout_checkpoint, case, optimizer=lion)
    stopped(4, tmp_path / "run", dropout_checkpoint, case, optimizer=lion)
    run(tmp_path / "run", dropout_checkpoint, case, head_seed=5, optimizer=lion)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    assert events(tmp_path / "run") == events(tmp_path / "whole")
    with pytest.raises(UsageError, match="was 'toy_optimizers:Lion'"):
        run(tmp_path / "run", dropout_checkpoint, case)


def test_a_step_that_is_not_finite_changes_nothing(wide_checkpoint, lion):
    model = load_model(wide_checkpoint)
    steps = make_steps(model, ROWS, batch_size=8, optimizer=lion)
    before, (_, batch) = weights_of(model), next(steps.batches())
    terms = steps.backward(0, batch)
    next(model.head.parameters()).grad.fill_(math.nan)
    assert steps.update(0, batch, terms).values[2] == 1
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    assert not steps.optimizer.accelerated.state


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        ("lion", RecipeError, "'lion' is neither 'adamw' nor 'module:name'"),
        ("nowhere:Lion", RecipeError, "cannot import optim.optimizer 'nowhere:Lion'"),
        ("toy_optimizers:Loin", RecipeError, "has no 'Loin', did you mean 'Lion'"),
        ("toy_optimizers:nothing", UsageError, "nothing returns a NoneType, expected a torch.optim.Optimizer"),
        ("toy_optimizers:half", UsageError, "half returns an optimizer of other parameters"),
        ("toy_optimizers:broken", UsageError, r"broken rejects the parameter groups \(needs a number"),
    ],
)
def test_what_makes_no_optimizer_is_named(wide_checkpoint, tmp_path, lion, optimizer, error, message):
    with pytest.raises(error, match=message):
        fit(load_model(wide_checkpoint), ROWS, ROWS[:4], output_dir=tmp_path / "run", optimizer=optimizer, **QUICK)


def test_constants_of_adamw_belong_to_adamw(wide_checkpoint, tmp_path, lion):
    options = {"optimizer": lion, "adam_beta1": 0.8}
    with pytest.raises(RecipeError, match="adam_beta1 belongs to AdamW"):
        fit(load_model(wide_checkpoint), ROWS, output_dir=tmp_path / "run", **options, **QUICK)


def test_hooks_see_steps_evaluations_and_checkpoints(checkpoint, tmp_path):
    class Hooks(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.saved: list[str] = []

        def on_step(self, trainer, log) -> None:
            assert trainer.state.step >= log.step
            self.steps.append(log.step)

        def on_evaluate(self, trainer, record) -> bool:
            return bool(record["step"] >= 4)

        def on_save(self, trainer, path: Path) -> None:
            assert (path / "manifest.json").is_file()
            self.saved.append(path.name)

    hooks = Hooks()
    result = fit(load_model(checkpoint), ROWS, ROWS[:4], output_dir=tmp_path, callback=hooks, **{**QUICK, "epochs": 3})
    assert (hooks.steps, hooks.saved) == ([0, 1, 2, 3], ["ckpt-2", "ckpt-4"])
    assert (result.steps, result.stopped_early) == (4, True)
    with pytest.raises(UsageError, match=r"callback: expected a function or a bert_tasks.TrainerCallback, got a int"):
        fit(load_model(checkpoint), ROWS, output_dir=tmp_path / "other", callback=3, **QUICK)

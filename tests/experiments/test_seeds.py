"""Several seeds of one recipe: the runs they leave, what is said of them together, and which count as collapsed."""

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks import load_recipe, train
from bert_tasks.errors import RecipeError, UsageError
from bert_tasks.experiments import seeds as module
from bert_tasks.experiments.seeds import (
    SeedRun,
    SeedsResult,
    dry_run_seeds,
    parse_seeds,
    seed_group,
    spreads,
    train_seeds,
)
from bert_tasks.tasks import SequenceClassification
from bert_tasks.training.state import FitResult
from support.recipes import recipe, write_with_data


@pytest.fixture
def folder(tmp_path, checkpoint):
    write_with_data(tmp_path, checkpoint, optim="epochs = 1\nbatch_size = 10", run="seed = 9")
    return tmp_path


def summary(folder):
    return json.loads((folder / "out" / "seeds.json").read_text("utf-8"))


def diverging(wrong_seed):
    """``train`` with a learning rate that one seed does not survive."""

    def run(run_recipe, **options):
        rate = 1e30 if run_recipe.run.seed == wrong_seed else run_recipe.optim.learning_rate
        optim = run_recipe.optim.model_copy(update={"learning_rate": rate, "epochs": 3})
        return train(run_recipe.model_copy(update={"optim": optim}), **options)

    return run


# The runs


def test_each_seed_is_a_run_of_its_own(folder):
    result = train_seeds(recipe(folder), [2, 1], progress=False)
    assert [run.seed for run in result.runs] == [2, 1]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["seed-1", "seed-2", "seeds.json"]
    assert load_recipe(folder / "out" / "seed-1" / "recipe.toml").run.seeds is None
    for run in result.runs:
        assert json.loads((run.output_dir / "run.json").read_text("utf-8"))["seed"] == run.seed
        assert (run.output_dir / "model" / "model.safetensors").is_file()
    alone = train(recipe(folder, "run.seed=2", f"run.output_dir={folder / 'alone'}"), progress=False)
    assert alone.metrics == result.runs[0].result.metrics
    assert alone.metrics["loss"] != result.runs[1].result.metrics["loss"]
    assert summary(folder) == json.loads(json.dumps(result.to_json()))


def test_finished_runs_are_reported_and_missing_ones_made(folder):
    first = train_seeds(recipe(folder), [1], progress=False)
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.safetensors")}
    again = train_seeds(recipe(folder, "run.seeds=[1, 2]"), progress=False)
    assert [run.result.reused for run in again.runs] == [True, False]
    assert again.runs[0].result.metrics == first.runs[0].result.metrics
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert summary(folder)["seeds"] == [1, 2]
    assert "complete already" in again.lines()[1]
    assert summary(folder)["notes"] == []
    repeated = train_seeds(recipe(folder), [1], overwrite=True, progress=False)
    assert not repeated.runs[0].result.reused
    assert repeated.runs[0].result.metrics == first.runs[0].result.metrics


def test_runs_of_other_seeds_stay_part_of_the_comparison(folder, monkeypatch):
    """Whatever seeds one command names, the folder's comparison is that of one command with all of them."""
    expected = train_seeds(recipe(folder, f"run.output_dir={folder / 'at once'}"), [1, 2], progress=False)
    for seed in (2, 1):
        result = train_seeds(recipe(folder), [seed], progress=False)
    assert [run.seed for run in result.runs] == summary(folder)["seeds"] == [1, 2]
    assert result.metrics == expected.metrics
    assert result.lines()[3:-1] == expected.lines()[3:-1]
    assert summary(folder)["notes"] == []
    monkeypatch.setattr(module, "train", diverging(2))
    assert [run.seed for run in train_seeds(recipe(folder), [2], overwrite=True, progress=False).failed] == [2]
    monkeypatch.setattr(module, "train", train)
    assert [run.seed for run in train_seeds(recipe(folder), [1], progress=False).runs] == [1]
    assert (
        "the run of seed 2 does not count. It has other settings (optim.epochs, optim.learning_rate)"
        in summary(folder)["notes"]
    )


def test_runs_that_cannot_be_compared_are_left_out(folder):
    diverging_recipe = recipe(folder, "optim.learning_rate=1e30")
    assert train_seeds(diverging_recipe, [1], progress=False).failed
    (folder / "out" / "seed-5").mkdir()
    (folder / "out" / "seed-6").mkdir()
    (folder / "out" / "seed-6" / "run.json").write_text("{")
    (folder / "out" / "seed-07").mkdir()
    shutil.copytree(folder / "out" / "seed-1", folder / "out" / "seed-4")
    (folder / "out" / "seed-4" / "metrics.json").write_text("{}")
    result = train_seeds(diverging_recipe, [2], progress=False)
    assert [run.seed for run in result.failed] == [1, 2]
    assert [note.partition(".")[0] for note in result.notes] == [f"the run of seed {n} does not count" for n in (4, 6)]
    (folder / "out" / "seeds.json").unlink()
    result = train_seeds(diverging_recipe, [2], progress=False)
    assert [run.seed for run in result.runs] == [2]
    assert "the run of seed 1 does not count. It is not finished. Train with that seed to resume it" in result.notes


def test_a_run_that_diverges_does_not_stop_the_others(folder, monkeypatch):
    monkeypatch.setattr(module, "train", diverging(1))
    result = train_seeds(recipe(folder), [1, 2], progress=False)
    assert [run.seed for run in result.failed] == [1]
    assert result.runs[0].failure.startswith("step ")
    assert result.metrics["accuracy"].runs == 1
    assert summary(folder)["failed"].keys() == {"1"}
    assert summary(folder)["metrics"]["accuracy"]["best_seed"] == 2
    text = "\n".join(result.lines())
    assert "diverged at step" in text
    assert "1 of 2 runs (seed 1) diverged" in text


def test_all_runs_may_diverge(folder):
    result = train_seeds(recipe(folder, "optim.learning_rate=1e30", "optim.epochs=3"), [1, 2], progress=False)
    assert len(result.failed) == 2
    assert result.metrics == {}
    assert result.metric == "accuracy"
    assert "2 of 2 runs (seeds 1, 2) diverged" in "\n".join(result.lines())


def test_other_validation_rows_are_noted(folder):
    text = (folder / "recipe.toml").read_text("utf-8").replace('validation = "dev.csv"\n', "validation_share = 0.3\n")
    same = train_seeds(recipe(folder), [1, 2], progress=False)
    assert same.notes == ()
    (folder / "recipe.toml").write_text(text.replace('"out"', '"other"'), "utf-8")
    result = train_seeds(recipe(folder), [1, 2], progress=False)
    assert len(result.notes) == 1
    assert "different validation rows" in result.lines()[-2]


def test_named_validation_sets(folder):
    text = (folder / "recipe.toml").read_text("utf-8")
    named = '[data.validation]\ntrain = "dev.csv"\nother = "train.csv"\n[optim]'
    (folder / "recipe.toml").write_text(text.replace('validation = "dev.csv"\n', "").replace("[optim]", named), "utf-8")
    assert train_seeds(recipe(folder), [4], progress=False).metric == "train/accuracy"
    result = train_seeds(
        recipe(folder, "run.metric_for_best_model=other/f1", f"run.output_dir={folder / 'b'}"), [4], progress=False
    )
    assert result.metric == "other/f1"
    assert not math.isnan(result.runs[0].metric("other/f1"))


# Before the first run


@pytest.mark.parametrize("content", ["run.json", "metrics.json", "thesis.tex"])
def test_a_folder_of_something_else_is_refused(folder, content):
    (folder / "out").mkdir()
    (folder / "out" / content).write_text("mine", "utf-8")
    expected = "contains no such runs" if content == "thesis.tex" else "holds a single run"
    for call in (train_seeds, dry_run_seeds):
        with pytest.raises(UsageError, match=expected):
            call(recipe(folder), [1])
    assert [path.name for path in (folder / "out").iterdir()] == [content]


def test_the_folder_of_the_last_seed_is_looked_at_first(folder):
    train_seeds(recipe(folder), [3], progress=False)
    changed = recipe(folder, "optim.learning_rate=2e-3")
    for call in (train_seeds, dry_run_seeds):
        with pytest.raises(UsageError, match="seed-3 holds a finished run"):
            call(changed, [1, 2, 3])
    assert not (folder / "out" / "seed-1").exists()


def test_a_folder_and_seeds_are_needed(folder):
    with pytest.raises(RecipeError, match=r"no seeds\. Set run\.seeds .*--seeds"):
        train_seeds(recipe(folder))
    text = (folder / "recipe.toml").read_text("utf-8").replace('output_dir = "out"\n', "")
    (folder / "recipe.toml").write_text(text, "utf-8")
    with pytest.raises(RecipeError, match="output_dir="):
        train_seeds(folder / "recipe.toml", [1])


@pytest.mark.parametrize(
    ("seeds", "message"), [([], "at least 1"), ([1, 2, 1], "1 appears more than once"), ([-1], "at least 0")]
)
def test_seeds_that_will_not_do(folder, seeds, message):
    with pytest.raises(RecipeError, match=message):
        seed_group(recipe(folder), seeds)
    with pytest.raises(RecipeError, match=message):
        recipe(folder, f"run.seeds={seeds}")


def test_seed_of_a_call_is_named_by_its_place(folder):
    with pytest.raises(RecipeError, match=r"^seeds\[1\] is 99999999999, expected less than 4294967296$"):
        train_seeds(recipe(folder), [1, 99999999999])


def test_parse_seeds():
    assert parse_seeds("3, 1,20") == (3, 1, 20)
    for text in ("", "1,", "1;2", "a", "1.5", "-1", "²", "9" * 5000):
        with pytest.raises(UsageError, match="whole numbers"):
            parse_seeds(text)


# The figures


def run_of(seed, *, failure=None, **metrics):
    """A run with these metrics."""
    if failure is not None:
        return SeedRun.of(seed, Path(), failure)
    result = FitResult(
        metrics=metrics,
        last_metrics=metrics,
        best_step=1,
        steps=2,
        stopped_early=False,
        train_seconds=0.0,
        notes=[],
        output_dir=Path(),
        tasks={"": SequenceClassification.of()},
        validation_sets=("",),
    )
    return SeedRun.of(seed, Path(), result)


def test_spread_of_four_runs():
    runs = [run_of(seed, accuracy=value, loss=1 - value) for seed, value in {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.6}.items()]
    spread = spreads(runs)["accuracy"]
    assert spread.mean == pytest.approx(0.675)
    assert spread.std == pytest.approx(math.sqrt((0.175**2 + 0.225**2 + 0.025**2 + 0.075**2) / 3))
    assert spread.median == pytest.approx(0.65)
    assert (spread.best, spread.best_seed, spread.runs) == (0.9, 2, 4)
    assert spreads(runs, {"loss"})["loss"].best_seed == 2
    assert spreads(runs)["loss"].best_seed == 1  # the name alone says nothing
    assert list(spreads(runs)) == ["accuracy", "loss"]


@settings(max_examples=20)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_spread_is_that_of_the_statistics_module(values):
    spread = spreads([run_of(seed, f1=value) for seed, value in enumerate(values)])["f1"]
    assert (spread.mean, spread.std) == (statistics.fmean(values), statistics.stdev(values))
    assert (spread.median, spread.best) == (statistics.median(values), max(values))
    assert values[spread.best_seed] == max(values)


def test_a_metric_that_is_not_a_number_has_no_mean_but_a_best():
    spread = spreads([run_of(1, pearson=math.nan), run_of(2, pearson=0.3)])["pearson"]
    assert (spread.best, spread.best_seed) == (0.3, 2)
    assert all(map(math.isnan, (spread.mean, spread.std, spread.median)))
    nothing = spreads([run_of(1, pearson=math.nan)])["pearson"]
    assert nothing.best_seed is None


def test_collapsed_runs_are_told_apart():
    whole = run_of(2, accuracy=0.5)
    said = whole.result.model_copy(update={"collapse": "predicts 'calm' for every row", "notes": ["try more epochs"]})
    collapsed = SeedRun.of(2, Path(), said)
    result = SeedsResult(
        output_dir=None,
        metric="accuracy",
        runs=(
            run_of(1, accuracy=0.8),
            collapsed,
            run_of(3, accuracy=0.9),
            run_of(4, failure="step 7: the loss is nan"),
        ),
    )
    assert result.metrics["accuracy"].mean == pytest.approx(2.2 / 3)
    content = result.to_json()
    assert content["metrics_without_collapsed"]["accuracy"]["mean"] == pytest.approx(0.85)
    assert content["collapsed"] == {"2": "predicts 'calm' for every row"}
    assert [run["value"] for run in content["runs"][:3]] == [0.8, 0.5, 0.9]
    assert content["runs"][3]["value"] is None
    lines = result.lines()
    assert lines[0].split() == ["seed", "accuracy", "best", "step"]
    assert "collapsed: predicts 'calm' for every row" in lines[2]
    assert ["metric", "mean", "std", "median", "best", "of", "seed"] in [line.split() for line in lines]
    assert "1 of 4 runs (seed 2) collapsed. The others have mean accuracy 0.8500, std 0.0707" in lines
    assert "try more epochs" in lines
    alone = replace(result, runs=(collapsed,))
    assert "1 of 1 runs (seed 2) collapsed. No other run is left" in alone.lines()
    assert replace(result, runs=result.runs[:1]).to_json()["metrics_without_collapsed"] is None

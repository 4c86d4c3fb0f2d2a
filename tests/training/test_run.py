"""A recipe's run: what it leaves on disk, when it is refused or not repeated, and the dry run."""

import json
import math
import os
import stat
from importlib.metadata import version

import pytest

from bert_tasks import TaskModel, evaluate, load_recipe, train
from bert_tasks.errors import DataError, RecipeError, UsageError
from bert_tasks.recipe.check import check
from bert_tasks.training.run import dry_run
from bert_tasks.training.step import OptimizerSteps
from support.recipes import write_csv, write_with_data
from support.training_runs import load_model, make_rows

LONG = " ".join(["harbour"] * 60)


@pytest.fixture
def folder(tmp_path, checkpoint):
    """A recipe, its data (one row too long for the model's windows) and nothing else."""
    optim = "epochs = 2\nbatch_size = 6\nwarmup_ratio = 0.2"
    write_with_data(tmp_path, checkpoint, optim=optim, run="seed = 7", dev=6)
    write_csv(tmp_path / "train.csv", [*make_rows(19), {"text": LONG, "label": "negative"}])
    return tmp_path


def recipe(folder, *overrides):
    return load_recipe(folder / "recipe.toml", overrides=overrides)


def listing(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_run_leaves_what_it_is_made_of(folder):
    run_recipe = recipe(folder, "run.logging_steps=1")
    result = train(run_recipe, progress=False)
    out = folder / "out"
    files = {"metrics.json", "metrics.jsonl", "model", "recipe.toml", "run.json"}
    assert {path.name for path in out.iterdir()} == files
    assert load_recipe(out / "recipe.toml") == run_recipe
    facts = json.loads((out / "run.json").read_text("utf-8"))
    assert facts["labels"] == ["negative", "positive"]
    assert (facts["seed"], facts["processes"], facts["device"], facts["rows"], facts["steps"]) == (7, 1, "cpu", 20, 8)
    assert facts["data"].keys() == {"train", "validation"}
    assert facts["data"]["train"]["source"].endswith("train.csv")
    assert all(len(table["fingerprint"]) == 64 for table in facts["data"].values())
    assert facts["versions"]["torch"] == version("torch")
    assert json.loads((out / "metrics.json").read_text("utf-8"))["metrics"] == result.metrics
    assert evaluate(out / "model", folder / "dev.csv") == pytest.approx(result.metrics)


def test_a_finished_run_is_reported_and_not_repeated(folder):
    first = train(recipe(folder), progress=False)
    before = listing(folder)
    assert train(recipe(folder), progress=False) == first.model_copy(update={"reused": True})
    changed = recipe(folder, "optim.learning_rate=1e-4")
    with pytest.raises(UsageError, match=r"holds a finished run that differs in optim\.learning_rate = 0\.0001"):
        train(changed, progress=False)
    with pytest.raises(UsageError, match="holds a finished run"):
        dry_run(changed)
    assert listing(folder) == before
    path = folder / "out" / "metrics.json"
    summary = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(summary | {"metrics": {"pearson": None, "loss": 0.5}}), "utf-8")
    metrics = train(recipe(folder), progress=False).metrics
    assert math.isnan(metrics["pearson"])  # JSON has null for a metric that was not a number
    assert metrics["loss"] == 0.5


def test_overwrite_repeats_a_finished_run(folder):
    first = train(recipe(folder), progress=False)
    (folder / "out" / "notes.txt").write_text("mine", "utf-8")
    again = train(recipe(folder), overwrite=True, progress=False)
    assert again.metrics == first.metrics
    assert len((folder / "out" / "metrics.jsonl").read_text("utf-8").splitlines()) == 3
    assert (folder / "out" / "notes.txt").read_text("utf-8") == "mine"
    changed = recipe(folder, "optim.learning_rate=1e-4", "optim.epochs=1")
    assert train(changed, overwrite=True, progress=False).steps == 4


def test_an_unfinished_run_goes_on(folder, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bert_tasks.training.evaluation.evaluate_samples", stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(folder, "run.save_steps=3"), progress=False)
    assert (folder / "out" / "run.json").exists()
    assert dry_run(recipe(folder)).state == "a run to resume from ckpt-3"
    with pytest.raises(UsageError, match=r"an unfinished run that differs in optim\.batch_size = 5 \(was 6\)"):
        train(recipe(folder, "optim.batch_size=5"), progress=False)
    assert train(recipe(folder), progress=False).steps == 8
    assert json.loads((folder / "out" / "run.json").read_text("utf-8"))["resumed_at"] == [3]
    assert dry_run(recipe(folder)).state == "this run is complete"
    assert dry_run(recipe(folder), overwrite=True).state == "a new run"


def test_a_run_needs_a_folder(folder):
    text = (folder / "recipe.toml").read_text("utf-8").replace('output_dir = "out"\n', "")
    (folder / "recipe.toml").write_text(text, "utf-8")
    with pytest.raises(RecipeError, match="output_dir="):
        train(recipe(folder), progress=False)
    with pytest.raises(RecipeError, match="output_dir="):
        dry_run(recipe(folder))


def test_data_that_cannot_be_used_leaves_no_folder(folder):
    (folder / "dev.csv").write_text("text,label\nfine,splendid\n", "utf-8")
    with pytest.raises(DataError, match="splendid"):
        train(recipe(folder), progress=False)
    assert not (folder / "out").exists()


def test_files_have_the_modes_that_the_umask_asks_for(folder):
    old = os.umask(0o077)
    try:
        train(recipe(folder, "optim.epochs=1"), progress=False)
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / "out").rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(modes, 0o600)
    assert {"model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl"} <= modes.keys()


# Without training


def test_a_dry_run_reports_and_writes_nothing(folder):
    before = listing(folder)
    plan = dry_run(recipe(folder))
    assert listing(folder) == before
    assert not (folder / "out").exists()
    assert (plan.steps, plan.warmup_steps) == (8, 2)
    model = load_model(recipe(folder).model.name)
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    text = "\n".join(plan.lines())
    assert "steps: 8 (2 of warm-up)" in text
    assert f"{plan.parameters:,}" in text
    assert "the dry run wrote no files" in text
    assert "5.0" in text  # one of twenty training rows is cut
    assert json.loads(json.dumps(plan.to_json()))["steps"] == 8


def test_a_dry_run_shows_the_first_row_that_training_sees(folder, monkeypatch):
    seen = []
    take = OptimizerSteps.backward

    def accumulate(steps, step, batch):
        seen.append(steps.samples.features_of(batch[:1])[0]["input_ids"])
        return take(steps, step, batch)

    monkeypatch.setattr(OptimizerSteps, "backward", accumulate)
    plan = dry_run(recipe(folder))
    train(recipe(folder), progress=False)
    tokenizer = TaskModel.from_pretrained(folder / "out" / "model").tokenizer
    assert plan.example == tokenizer.decode(seen[0])
    assert plan.example.startswith("<s>")


def test_training_says_how_many_rows_were_cut(folder, capsys):
    train(recipe(folder, "optim.epochs=1"))
    longest = recipe(folder).settings["max_length"]
    message = f"1 of 20 (5.0%) rows are longer than max_length = {longest} tokens and were truncated"
    assert f"train: {message}" in " ".join(capsys.readouterr().err.split())
    assert f"  {message}" in check(recipe(folder)).lines()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.metric_for_best_model=f2", r"metric_for_best_model is 'f2', expected one of .*accuracy"),
        ("optim.freeze_layers=99", r"freeze_layers is 99"),
    ],
)
def test_what_only_data_and_settings_together_tell_is_found_without_training(folder, override, message):
    with pytest.raises(UsageError, match=message):
        dry_run(recipe(folder, override))
    assert not (folder / "out").exists()

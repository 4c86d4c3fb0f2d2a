"""Hyper-parameter search: suggestions, a search that goes on, the folder, what is kept, and wrong folders."""

import json
import math
import re
import shutil
import signal
from dataclasses import replace
from importlib import util

import pytest

from bert_tasks import load_recipe
from bert_tasks.errors import CheckpointError, RecipeError, StoppedError, UsageError
from bert_tasks.experiments import search as module
from bert_tasks.experiments.search import search
from bert_tasks.experiments.study import Study, Trial
from bert_tasks.recipe.search import SearchSection
from bert_tasks.report import make_report
from support.recipes import recipe, write_csv, write_with_data
from support.runs import CONSOLE, TORCHRUN, Program
from support.runs import run as run_program
from support.training_runs import make_rows

SPACE = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
    "epochs": {"low": 1, "high": 3},
    "lr_scheduler_type": {"choices": ["linear", "cosine", "wsd"]},
}
FOLDER = [
    "baseline",
    "best.toml",
    "fresh",
    "recipe.toml",
    "search.json",
    "study.db",
    "trial-000",
    "trial-001",
    "trial-002",
]


def write_recipe(folder, checkpoint, search_section, *, epochs=1, run_section=""):
    optim, run = f"epochs = {epochs}\nbatch_size = 10", f"seed = 9\n{run_section}"
    return write_with_data(folder, checkpoint, optim=optim, run=run, sections=f"[search]\n{search_section}")


SEARCH = (
    "trials = 3\nfresh_seeds = 2\nlearning_rate = {low = 1e-4, high = 1e-2, log = true}\nbatch_size.choices = [5, 10]"
)


@pytest.fixture
def folder(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, SEARCH)
    return tmp_path


# Suggestions


def opened(path, *, seed=1, **section):
    study = Study(path, SearchSection.model_validate(section))
    study.open({"rows": 3}, start=None, seed=seed, lower_is_better=False)
    return study


def objective(values):
    return -abs(math.log(values["optim.learning_rate"] / 1e-4)) - values["optim.epochs"] / 4


def studied(path, sampler, pruner="none", *, seed=1, reopen=False):
    """Twelve trials of three evaluations, perhaps in a file that is opened anew for each."""
    section = {"sampler": sampler, "pruner": pruner, **SPACE}
    study = opened(path, seed=seed, **section)
    for _ in range(12):
        values = study.ask().values
        for evaluation in (1, 2, 3):
            score = objective(values) * (4 - evaluation)
            if study.prunes(score, evaluation, is_last=evaluation == 3):
                break
        study.end(score, note="", seconds=1.0)
        if reopen:
            study.close()
            study = opened(path, seed=seed, **section)
    trials = study.trials()
    study.close()
    return trials


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_follow_from_the_seed_and_never_repeat(sampler, tmp_path):
    """A search that goes on draws other values than at its beginning."""
    first, again, other = (
        [trial.values for trial in studied(tmp_path / f"{number}.db", sampler, seed=seed)]
        for number, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert first != other
    resumed = studied(tmp_path / "a #?%20.db", sampler, reopen=True)
    assert len({trial.values["optim.learning_rate"] for trial in resumed}) == 12


@pytest.mark.parametrize(("pruner", "evaluations"), [("median", {1, 2, 3}), ("halving", {1, 3})])
def test_pruned_trials_have_no_score(pruner, evaluations, tmp_path):
    trials = studied(tmp_path / "study.db", "random", pruner)
    assert {trial.state for trial in trials} == {"complete", "pruned"}
    for trial in trials:
        assert len(trial.scores) in evaluations
        assert (trial.score is None) == (trial.state == "pruned")
        assert trial.note.startswith("pruned after") == (trial.state == "pruned")
        assert trial.state == "complete" or len(trial.scores) < 3  # at the end there is nothing to save
    assert {trial.state for trial in studied(tmp_path / "none.db", "random")} == {"complete"}


def test_a_killed_trial_keeps_its_values_and_its_end(tmp_path):
    path, section = tmp_path / "study.db", {"sampler": "random", "pruner": "halving", **SPACE}
    study = opened(path, **section)
    for score in (0.9, 0.8, 0.7, 0.6):
        killed = study.ask()
        is_pruned = study.prunes(score, 1, is_last=False)
        if is_pruned:
            break
        study.end(score, note="", seconds=1.0)
    assert is_pruned
    study.close()
    study = opened(path, **section)
    assert study.ask() == killed
    assert study.prunes(0.99, 2, is_last=False)
    study.end(0.99, note="", seconds=1.0)
    assert study.trials()[-1].score is None
    assert study.trials()[-1].number == killed.number
    study.close()


def test_the_grid_is_walked_once(tmp_path):
    section = {"sampler": "grid", "epochs": SPACE["epochs"], "freeze_embeddings": {"choices": [True, False]}}
    seen = []
    for number in range(6):  # each time after a kill in the middle of a trial
        study = opened(tmp_path / "study.db", **section)
        values = study.ask().values
        study.close()
        study = opened(tmp_path / "study.db", **section)
        assert study.ask().values == values
        study.end([1.0, None][number % 2], note="", seconds=1.0)
        seen.append(tuple(values.values()))
        study.close()
    assert len(set(seen)) == 6
    assert all(type(value) is bool for _, value in seen)


def test_a_failed_trial_is_remembered_as_one(tmp_path):
    study = opened(tmp_path / "study.db", **SPACE)
    values = study.ask().values
    study.end(None, note="diverged", seconds=2.0)
    assert study.trials() == [Trial(number=0, values=values, state="failed", note="diverged", seconds=2.0)]
    study.close()


# Searches


@pytest.fixture(scope="module")
def searched(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("searched")
    path = write_recipe(folder, checkpoint, SEARCH)
    return folder, search(path, progress=False)


def test_the_folder_of_a_search(searched):
    folder, result = searched
    assert sorted(path.name for path in (folder / "out").iterdir() if path.suffix != ".html") == FOLDER
    assert [trial.number for trial in result.trials] == [0, 1, 2]
    assert result.trials[0].values == {"optim.learning_rate": 1e-3, "optim.batch_size": 10}  # the recipe as it is
    for trial in result.trials:
        run = folder / "out" / f"trial-{trial.number:03d}"
        best_recipe = load_recipe(run / "recipe.toml")
        assert (best_recipe.optim.learning_rate, best_recipe.run.seed) == (trial.values["optim.learning_rate"], 9)
        metrics = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]
        assert metrics[result.metric] == trial.score
        assert (run / "model" / "model.safetensors").exists() == (trial == result.best)
        assert not list(run.rglob("ckpt-*"))
    assert result.best.score == max(trial.score for trial in result.trials)
    assert result.run == folder / "out" / f"trial-{result.best.number:03d}"
    for seeds in (result.fresh, result.baseline):
        assert [run.seed for run in seeds.runs] == [10, 11]
    best = load_recipe(folder / "out" / "best.toml")
    assert best.optim.learning_rate == result.best.values["optim.learning_rate"]
    assert json.loads((folder / "out" / "search.json").read_text("utf-8"))["best"] == result.best.number


def test_lines_for_people(searched):
    _, result = searched
    text = "\n".join(result.lines())
    spread = result.fresh.metrics[result.metric]
    assert re.search(rf"tpe, 3 trials +{result.best.score:.4f} +{spread.mean:.4f} ", text)
    assert "the recipe as it is" in text
    assert "too good on average" in text
    assert f"model: {result.run / 'model'}" in result.lines()
    gone = replace(result, output_dir=result.output_dir / "gone")
    assert not any(line.startswith("model:") for line in gone.lines())


def test_fresh_seeds_that_diverge(searched, tmp_path, monkeypatch):
    shutil.copytree(searched[0], tmp_path / "copy")

    def diverge(searched_recipe, seeds, **options):
        result = original(searched_recipe, seeds, **options)
        return replace(result, runs=(result.runs[0], replace(result.runs[1], result=None, failure="at step 3")))

    original = module.train_seeds
    monkeypatch.setattr(module, "train_seeds", diverge)
    result = search(recipe(tmp_path / "copy"), progress=False)
    for name in ("fresh seeds", "the recipe as it is"):
        assert f"{name}: 1 of 2 runs (seed 11) diverged and are not counted" in result.notes
    assert result.to_json()["baseline"]["runs"] == 1
    page = make_report(tmp_path / "copy" / "out").output.read_text("utf-8")
    assert page.count("<td>\N{EN DASH}</td><td>1</td></tr>") == 2  # one run has no standard deviation


def test_the_report_of_an_unfinished_search(tmp_path):
    (tmp_path / "study.db").write_bytes(b"")
    with pytest.raises(UsageError, match=r"is not finished\. Run the same command again"):
        make_report(tmp_path)


def test_the_report_of_a_search(searched):
    folder, _ = searched
    page = make_report(folder / "out").output.read_text("utf-8")
    for text in ("optim.learning_rate", "fresh seeds: mean", "Trials"):
        assert text in page
    with pytest.raises(UsageError, match="holds a search"):
        make_report(folder / "out", data=folder / "dev.csv")
    content = (folder / "out" / "search.json").read_text("utf-8")
    (folder / "out" / "search.json").write_text(content[:-20], "utf-8")
    with pytest.raises(UsageError, match=r"search\.json is damaged"):
        make_report(folder / "out")
    (folder / "out" / "search.json").write_text(content, "utf-8")


def test_a_complete_search_is_reported_and_extended(searched, tmp_path, monkeypatch):
    folder, result = searched
    trained = []
    original = module.train
    monkeypatch.setattr(module, "train", lambda *args, **options: trained.append(args) or original(*args, **options))
    again = search(recipe(folder), progress=False)
    assert trained == []
    assert again.to_json() == result.to_json()
    shutil.copytree(folder, tmp_path / "copy")
    more = search(recipe(tmp_path / "copy", "search.trials=4", "search.fresh_seeds=0"), progress=False)
    assert len(trained) == 1
    assert more.trials[:3] == result.trials
    assert more.baseline is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.epochs=2", r"differs in optim.epochs = 2 \(was 1\)"),
        ("search.epochs={low = 1, high = 2}", "differs in search.optim"),
        ("run.seed=3", "differs in run.seed"),
        ("search.sampler=random", "differs in search.sampler = 'random' .was 'tpe'"),
        ("run.seeds=[1, 2]", "a search has its own seeds. Remove run.seeds"),
    ],
)
def test_another_search_in_the_folder(change, message, searched):
    folder, _ = searched
    with pytest.raises((UsageError, RecipeError), match=message):
        search(recipe(folder, change), progress=False)


def test_other_rows(searched, tmp_path):
    shutil.copytree(searched[0], tmp_path / "copy")
    write_csv(tmp_path / "copy" / "dev.csv", make_rows(9, seed=2))
    with pytest.raises(UsageError, match="differs in the rows of validation = "):
        search(recipe(tmp_path / "copy"), progress=False)


def test_a_damaged_study(searched, tmp_path):
    shutil.copytree(searched[0], tmp_path / "copy")
    (tmp_path / "copy" / "out" / "study.db").write_bytes(b"not SQLite" * 500)
    with pytest.raises(CheckpointError, match=r"study\.db: the trials cannot be read or written \(.*not a database"):
        search(recipe(tmp_path / "copy"), progress=False)
    again = search(recipe(tmp_path / "copy", "search.fresh_seeds=0"), overwrite=True, progress=False)
    assert [trial.score for trial in again.trials] == [trial.score for trial in searched[1].trials]


def test_folders_that_are_no_search(folder):
    (folder / "out").write_text("", "utf-8")
    with pytest.raises(UsageError, match="is a file"):
        search(recipe(folder), progress=False)
    (folder / "out").unlink()
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("", "utf-8")
    with pytest.raises(UsageError, match=r"contains no such runs \(it contains notes.txt\)"):
        search(recipe(folder), progress=False)
    (folder / "out" / "run.json").write_text("", "utf-8")
    with pytest.raises(UsageError, match="holds a single run"):
        search(recipe(folder), progress=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_the_user_s_recipe(folder, overwrite):
    before = (folder / "recipe.toml").read_text("utf-8")
    with pytest.raises(UsageError, match="contains no such runs"):
        search(recipe(folder, f"run.output_dir={folder}"), overwrite=overwrite, progress=False)
    assert (folder / "recipe.toml").read_text("utf-8") == before


def test_overwriting_removes_only_what_a_search_wrote(tmp_path):
    runs = ["trial-000", "trial-1000", "fresh/trial-000/seed-2", "baseline/seed-3"]
    kept = ["notes.txt", "fresh/notes.txt", "baseline/trial/run.json", "trial-007/notes.txt", "grid/run.json"]
    ours = ["study.db", "recipe.toml", "search.json", "best.toml", "report.html", "baseline/seeds.json"]
    ours += ["fresh/trial-000/seeds.json"]
    for name in (*(f"{run}/run.json" for run in runs), *kept, *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", "utf-8")
    module._remove(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*kept, "fresh", "baseline", "baseline/trial", "trial-007", "grid"}


def test_values_that_the_model_refuses_end_their_trial_only(tmp_path, checkpoint):
    """The recipe as it is, which has a length beyond the model's positions, too."""
    space = 'sampler = "grid"\nfresh_seeds = 1\nsettings.max_length = {choices = [40, 4096]}'
    path = write_recipe(tmp_path, checkpoint, space)
    result = search(load_recipe(path, overrides=["settings.max_length=4096"]), progress=False)
    trials = {trial.values["settings.max_length"]: trial for trial in result.trials}
    assert {length: trial.state for length, trial in trials.items()} == {40: "complete", 4096: "failed"}
    assert trials[4096].note.startswith("max_length = 4096, but the checkpoint has")
    assert result.fresh is not None
    assert result.baseline is None
    assert any(note.startswith("the recipe as it is cannot be trained (max_length") for note in result.notes)


def test_errors_that_are_not_of_the_values_stop_the_search(folder, monkeypatch):
    def fail(*args, **options):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        search(recipe(folder), progress=False)


def test_what_a_search_needs(folder, monkeypatch):
    plain = recipe(folder).model_copy(update={"search": None})
    with pytest.raises(RecipeError, match=r"Add a section \[search\]"):
        search(plain)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"optuna not installed, .*pip install '\.\[search\]'"):
        search(recipe(folder))


def test_trials_that_diverge_have_no_score(folder):
    """Of two learning rates one is far too high; the search continues, and says so."""
    text = (
        (folder / "recipe.toml")
        .read_text("utf-8")
        .replace("low = 1e-4, high = 1e-2, log = true", "choices = [1e-3, 1e30]")
    )
    (folder / "recipe.toml").write_text(text, "utf-8")
    grid = ("search.sampler=grid", "search.batch_size.choices=[4, 5]", "optim.epochs=3", "search.fresh_seeds=0")
    study = search(recipe(folder, *grid), progress=False)
    states = {trial.values["optim.learning_rate"]: (trial.state, trial.score is None) for trial in study.trials}
    assert len(study.trials) == 3
    assert states == {1e-3: ("complete", False), 1e30: ("failed", True)}
    assert all("diverged" in trial.note for trial in study.trials if trial.state == "failed")


def test_a_search_that_was_stopped_goes_on(folder, monkeypatch):
    """The trial that was stopped continues with its values, from its checkpoint."""
    options = ("optim.epochs=2", "search.fresh_seeds=0", "search.pruner=none", "search.batch_size.choices=[10, 20]")
    original = module._Pruning.on_evaluate

    def stop(callback, trainer, record):
        if trainer.output_dir.name == "trial-001":
            raise StoppedError("stopped", signal_number=signal.SIGTERM)
        return original(callback, trainer, record)

    with monkeypatch.context() as patch:
        patch.setattr(module._Pruning, "on_evaluate", stop)
        with pytest.raises(StoppedError):
            search(recipe(folder, *options), progress=False)
    stopped = load_recipe(folder / "out" / "trial-001" / "recipe.toml").optim
    result = search(recipe(folder, *options), progress=False)
    assert [trial.state for trial in result.trials] == ["complete"] * 3
    values = result.trials[1].values
    assert (stopped.learning_rate, stopped.batch_size) == (values["optim.learning_rate"], values["optim.batch_size"])
    assert len(result.trials[0].scores) == 2
    assert len(result.trials[1].scores) == 1  # of the second epoch, because the first is not repeated


# Whole programs

PRUNED = (
    "trials = 6\nfresh_seeds = 0\nsampler = 'random'\npruner = 'halving'\n"
    "learning_rate = {choices = [3e-3, 1e-9, 1e-8]}"
)
BY_LOSS = 'metric_for_best_model = "loss"'  # which differs between all trials, where the accuracy of few rows may not


def read_trials(folder):
    content = json.loads((folder / "out" / "search.json").read_text("utf-8"))
    keys = ("number", "values", "score", "scores", "state")
    return [{key: trial[key] for key in keys} for trial in content["trials"]]


@pytest.mark.slow
def test_pruning_ends_both_processes(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, PRUNED, epochs=4, run_section=BY_LOSS)
    done = run_program([*TORCHRUN, "search", tmp_path / "recipe.toml", "--no-report"], folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    trials = read_trials(tmp_path)
    states = {trial["state"] for trial in trials}
    assert states == {"complete", "pruned"}
    for trial in trials:
        run = tmp_path / "out" / f"trial-{trial['number']:03d}"
        metadata, summary = (json.loads((run / name).read_text("utf-8")) for name in ("run.json", "metrics.json"))
        assert metadata["processes"] == 2
        assert (summary["steps"] < metadata["steps"]) == (trial["state"] == "pruned")


@pytest.mark.slow
def test_kill_during_a_trial(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, PRUNED.replace("'random'", "'tpe'"), epochs=4, run_section=BY_LOSS)
    command = [*CONSOLE, "search", "--no-report", "--quiet", tmp_path / "recipe.toml"]
    program = Program(command, folder=tmp_path)
    run = tmp_path / "out" / "trial-004"
    program.until(lambda: (run / "metrics.jsonl").exists())
    program.send(signal.SIGKILL)
    program.wait()
    assert not (tmp_path / "out" / "search.json").exists()
    killed = load_recipe(run / "recipe.toml").optim.learning_rate
    done = run_program(command, folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    trials = read_trials(tmp_path)
    assert [trial["number"] for trial in trials] == list(range(6))
    assert trials[4]["values"]["optim.learning_rate"] == killed
    assert {trial["state"] for trial in trials} == {"complete", "pruned"}

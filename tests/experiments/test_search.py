"""Hyper-parameter search: suggestions that a kill does not change, the folder, what is kept, and wrong folders."""

import json
import math
import re
import shutil
import signal
from dataclasses import replace
from importlib import util

import pytest

from bert_tasks import api, load_recipe
from bert_tasks.errors import CheckpointError, RecipeError, UsageError
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
FOLDER = ["baseline", "best.toml", "recipe.toml", "search.json", "study.db", "tpe"]


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


def objective(values):
    return -abs(math.log(values["optim.learning_rate"] / 1e-4)) - values["optim.epochs"] / 4


def studied(path, sampler, pruner="median", seed=1, *, upset=lambda study: None):
    """Twelve trials of three evaluations, in a study that is opened anew for each, as after a kill."""
    section = SearchSection.model_validate({"pruner": pruner, **SPACE, "sampler": "tpe"})
    for _ in range(12):
        study = Study(path, sampler=sampler, search=section, start=None, seed=seed, lower_is_better=False)
        upset(study)
        number, values = study.suggest()
        scores, state = [], "complete"
        for evaluation in range(3):
            scores.append(objective(values) * (3 - evaluation))
            if study.prunes(scores):
                state = "pruned"
                break
        score = scores[-1] if state == "complete" else None
        study.add(Trial(number=number, values=values, score=score, scores=tuple(scores), state=state))
        trials = study.trials
        study.close()
    return trials


def killed(study):
    """A trial that was killed after two evaluations, or after the one that pruned it."""
    _, values = study.suggest()
    if not study.prunes([objective(values) * 3]):
        study.prunes([objective(values) * 3, objective(values) * 2])


@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "median"), ("tpe", "halving"), ("random", "none")])
def test_suggestions_and_pruning_do_not_depend_on_kills(sampler, pruner, tmp_path):
    calm = studied(tmp_path / "a #?%20.db", sampler, pruner)
    assert studied(tmp_path / "b.db", sampler, pruner, upset=killed) == calm
    assert len({trial.values["optim.learning_rate"] for trial in calm}) == 12
    assert any(trial.state == "pruned" for trial in calm) == (pruner != "none")


def test_other_seeds_suggest_other_values(tmp_path):
    first, two = (studied(tmp_path / f"{seed}.db", "random", "none", seed=seed) for seed in (1, 2))
    assert [trial.values for trial in first] != [trial.values for trial in two]


def test_the_grid_is_walked_once(tmp_path):
    section = SearchSection.model_validate(
        {"sampler": "grid", "epochs": SPACE["epochs"], "freeze_embeddings": {"choices": [True, False]}}
    )
    study = Study(tmp_path / "study.db", sampler="grid", search=section, start=None, seed=3, lower_is_better=True)
    seen = []
    for _ in range(6):
        number, values = study.suggest()
        seen.append(tuple(values.values()))
        study.add(Trial(number=number, values=values, score=1.0))
    study.close()
    assert len(set(seen)) == 6
    assert all(type(value) is bool for _, value in seen)


def test_a_failed_trial_is_remembered_as_one(tmp_path):
    section = SearchSection.model_validate(SPACE)
    study = Study(tmp_path / "study.db", sampler="tpe", search=section, start=None, seed=3, lower_is_better=True)
    number, values = study.suggest()
    trial = Trial(number=number, values=values, scores=(), state="failed", note="diverged", seconds=2.0)
    study.add(trial)
    assert study.trials == [trial]
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
    study = result.studies[0]
    assert [trial.number for trial in study.trials] == [0, 1, 2]
    assert study.trials[0].values == {"optim.learning_rate": 1e-3, "optim.batch_size": 10}  # the recipe as it is
    for trial in study.trials:
        run = folder / "out" / "tpe" / f"trial-{trial.number:03d}"
        best_recipe = load_recipe(run / "recipe.toml")
        assert (best_recipe.optim.learning_rate, best_recipe.run.seed) == (trial.values["optim.learning_rate"], 9)
        metrics = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]
        assert metrics[result.metric] == trial.score
        assert (run / "model" / "model.safetensors").exists() == (trial == study.best)
        assert not list(run.rglob("ckpt-*"))
    assert study.best.score == max(trial.score for trial in study.trials)
    assert study.run == folder / "out" / "tpe" / f"trial-{study.best.number:03d}"
    for seeds in (study.fresh, result.baseline):
        assert [run.seed for run in seeds.runs] == [10, 11]
    best = load_recipe(folder / "out" / "best.toml")
    assert best.optim.learning_rate == study.best.values["optim.learning_rate"]
    assert json.loads((folder / "out" / "search.json").read_text("utf-8"))["studies"][0]["best"] == study.best.number


def test_lines_for_people(searched):
    _, result = searched
    text = "\n".join(result.lines())
    spread = result.studies[0].fresh.metrics[result.metric]
    assert re.search(rf"tpe, 3 trials +{result.studies[0].best.score:.4f} +{spread.mean:.4f} ", text)
    assert "the recipe as it is" in text
    assert "too good on average" in text
    assert f"model: {result.studies[0].run / 'model'}" in result.lines()
    gone = replace(result, studies=(replace(result.studies[0], run=result.output_dir / "gone"),))
    assert not any(line.startswith("model:") for line in gone.lines())


def test_fresh_seeds_that_diverge(searched, tmp_path, monkeypatch):
    shutil.copytree(searched[0], tmp_path / "copy")

    def diverge(searched_recipe, seeds, **options):
        result = original(searched_recipe, seeds, **options)
        return replace(result, runs=(result.runs[0], replace(result.runs[1], result=None, failure="at step 3")))

    original = module.train_seeds
    monkeypatch.setattr(module, "train_seeds", diverge)
    result = search(recipe(tmp_path / "copy"), progress=False)
    for name in ("fresh seeds of tpe", "the recipe as it is"):
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
    assert more.studies[0].trials[:3] == result.studies[0].trials
    assert more.baseline is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.epochs=2", r"differs in optim.epochs = 2 \(was 1\)"),
        ("search.epochs={low = 1, high = 2}", "differs in search.optim"),
        ("run.seed=3", "differs in run.seed"),
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
    assert [trial.score for trial in again.studies[0].trials] == [
        trial.score for trial in searched[1].studies[0].trials
    ]


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
    runs = ["tpe/trial-000", "random/trial-001/seed-1", "tpe/fresh/trial-000/seed-2", "baseline/seed-3"]
    kept = ["notes.txt", "random/notes.txt", "baseline/trial/run.json", "tpe/trial-007/notes.txt", "grid/run.json"]
    ours = ["study.db", "recipe.toml", "search.json", "best.toml", "report.html", "baseline/seeds.json"]
    for name in (*(f"{run}/run.json" for run in runs), *kept, *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", "utf-8")
    module._remove(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*kept, "random", "baseline", "baseline/trial", "tpe", "tpe/trial-007", "grid"}


def test_values_that_the_model_refuses_end_their_trial_only(tmp_path, checkpoint):
    """The recipe as it is, which has a length beyond the model's positions, too."""
    space = 'sampler = "grid"\nfresh_seeds = 1\nsettings.max_length = {choices = [40, 4096]}'
    path = write_recipe(tmp_path, checkpoint, space)
    result = search(load_recipe(path, overrides=["settings.max_length=4096"]), progress=False)
    trials = {trial.values["settings.max_length"]: trial for trial in result.studies[0].trials}
    assert {length: trial.state for length, trial in trials.items()} == {40: "complete", 4096: "failed"}
    assert trials[4096].note.startswith("max_length = 4096, but the checkpoint has")
    assert result.studies[0].fresh is not None
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
    study = search(recipe(folder, *grid), progress=False).studies[0]
    states = {trial.values["optim.learning_rate"]: (trial.state, trial.score is None) for trial in study.trials}
    assert len(study.trials) == 3
    assert states == {1e-3: ("complete", False), 1e30: ("failed", True)}
    assert all("diverged" in trial.note for trial in study.trials if trial.state == "failed")


def test_seeds_of_a_trial_are_averaged_and_the_same_in_all(folder):
    result = search(recipe(folder, "search.seeds=2", "search.trials=2", "search.fresh_seeds=0"), progress=False)
    for trial in result.studies[0].trials:
        runs = sorted((folder / "out" / "tpe" / f"trial-{trial.number:03d}").iterdir())
        assert [run.name for run in runs] == ["seed-10", "seed-9"]
        scores = [json.loads((run / "metrics.json").read_text("utf-8"))["metrics"][result.metric] for run in runs]
        assert trial.score == pytest.approx(sum(scores) / 2, abs=1e-12)


def test_random_search_beside_it(folder, caplog):
    options = ("search.trials=2", "search.fresh_seeds=1", "search.baseline=false")
    result = search(recipe(folder, *options), compare_random=True, progress=False)
    api.write_after_run(folder / "out", report=False)
    assert [(study.sampler, len(study.trials)) for study in result.studies] == [("tpe", 2), ("random", 2)]
    assert all(study.fresh is not None for study in result.studies)
    for study in result.studies:  # each keeps its best model, with a card
        trials = folder / "out" / study.sampler
        assert list(trials.glob("trial-*/model/README.md")) == [study.run / "model" / "README.md"]
        assert list(trials.glob("trial-*/model")) == [study.run / "model"]
    assert caplog.messages == []
    again = search(recipe(folder, *options), progress=False)  # its trials are in the folder
    assert again.to_json() == result.to_json()


# Whole programs

PRUNED = (
    "trials = 6\nfresh_seeds = 0\nsampler = 'random'\npruner = 'halving'\n"
    "learning_rate = {choices = [3e-3, 1e-9, 1e-8]}"
)
BY_LOSS = 'metric_for_best_model = "loss"'  # which differs between all trials, where the accuracy of few rows may not


def read_trials(folder):
    content = json.loads((folder / "out" / "search.json").read_text("utf-8"))
    keys = ("number", "values", "score", "scores", "state")
    return [{key: trial[key] for key in keys} for trial in content["studies"][0]["trials"]]


@pytest.mark.slow
def test_pruning_ends_both_processes(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, PRUNED, epochs=4, run_section=BY_LOSS)
    done = run_program([*TORCHRUN, "search", tmp_path / "recipe.toml", "--no-report"], folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    trials = read_trials(tmp_path)
    states = {trial["state"] for trial in trials}
    assert states == {"complete", "pruned"}
    for trial in trials:
        run = tmp_path / "out" / "random" / f"trial-{trial['number']:03d}"
        metadata, summary = (json.loads((run / name).read_text("utf-8")) for name in ("run.json", "metrics.json"))
        assert metadata["processes"] == 2
        assert (summary["steps"] < metadata["steps"]) == (trial["state"] == "pruned")


@pytest.mark.slow
def test_kill_during_a_trial(tmp_path, checkpoint):
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        section = PRUNED.replace("'random'", "'tpe'")
        write_recipe(tmp_path / name, checkpoint, section, epochs=4, run_section=BY_LOSS)
    command = [*CONSOLE, "search", "--no-report", "--quiet"]
    assert run_program([*command, tmp_path / "calm" / "recipe.toml"], folder=tmp_path, seconds=240).code == 0
    program = Program([*command, tmp_path / "killed" / "recipe.toml"], folder=tmp_path)
    run = tmp_path / "killed" / "out" / "tpe" / "trial-004"
    program.until(lambda: (run / "metrics.jsonl").exists())
    program.send(signal.SIGKILL)
    program.wait()
    assert not (tmp_path / "killed" / "out" / "search.json").exists()
    done = run_program([*command, tmp_path / "killed" / "recipe.toml"], folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    assert read_trials(tmp_path / "killed") == read_trials(tmp_path / "calm")
    assert any(trial["state"] == "pruned" for trial in read_trials(tmp_path / "calm"))

"""Hyper-parameter search: suggestions, a search that goes on, the folder, what is kept, and wrong folders."""

import json
import math
import re
import shlex
import shutil
import signal

import pytest

from bert_tasks import load_recipe
from bert_tasks.errors import CheckpointError, RecipeError, StoppedError, UsageError
from bert_tasks.experiments import search as module
from bert_tasks.experiments.search import load_search, search
from bert_tasks.experiments.study import Study
from bert_tasks.recipe.search import SearchSection
from bert_tasks.report import make_report
from support.recipes import recipe, write_csv, write_with_data
from support.runs import CONSOLE, TORCHRUN, Program
from support.runs import run as run_program
from support.sampling import slow_except
from support.training_runs import make_rows

SPACE = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
    "epochs": {"low": 1, "high": 3},
    "lr_scheduler_type": {"choices": ["linear", "cosine", "wsd"]},
}
FOLDER = [
    "best.toml",
    "recipe.toml",
    "study.db",
    "trial-000",
    "trial-001",
    "trial-002",
]


def write_recipe(folder, checkpoint, search_section, *, epochs=1, run_section=""):
    optim, run = f"epochs = {epochs}\nbatch_size = 10", f"seed = 9\n{run_section}"
    return write_with_data(folder, checkpoint, optim=optim, run=run, sections=f"[search]\n{search_section}")


SEARCH = "trials = 3\nlearning_rate = {low = 1e-4, high = 1e-2, log = true}\nbatch_size.choices = [5, 10]"


@pytest.fixture
def folder(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, SEARCH)
    return tmp_path


# Suggestions


def opened(path, *, seed=1, **section):
    study = Study(path, SearchSection.model_validate(section))
    study.open({"rows": 3}, first={}, seed=seed, lower_is_better=False)
    return study


def tell(study, score, note=""):
    """Ends a trial, and returns it."""
    study.end(score, note)
    return study.trials()[-1]


def objective(values):
    return -abs(math.log(values["optim.learning_rate"] / 1e-4)) - values["optim.epochs"] / 4


TRIALS = 6  # of which tpe draws the last


def studied(path, sampler, pruner="none", *, seed=1, reopen=False):
    """Trials of three evaluations, or without a pruner of one, perhaps in a file that is opened anew for each."""
    section = {"sampler": sampler, "pruner": pruner, **SPACE}
    study = opened(path, seed=seed, **section)
    for _ in range(TRIALS if pruner == "none" else 12):
        _, values = study.ask()
        for evaluation in (3,) if pruner == "none" else (1, 2, 3):
            score = objective(values) * (4 - evaluation)
            if study.prunes(score, evaluation, is_last=evaluation == 3):
                break
        study.end(score, note="")
        if reopen:
            study = opened(path, seed=seed, **section)
    return study.trials()


@pytest.mark.parametrize("sampler", slow_except(["tpe", "random"], "tpe"))
def test_values_follow_from_the_seed_and_never_repeat(sampler, tmp_path):
    """A search that goes on draws other values than at its beginning."""
    first, again, other = (
        [trial.params for trial in studied(tmp_path / f"{number}.db", sampler, seed=seed)]
        for number, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert first != other
    resumed = studied(tmp_path / "a #?%20.db", sampler, reopen=True)
    assert len({trial.params["optim.learning_rate"] for trial in resumed}) == TRIALS


@pytest.mark.slow
@pytest.mark.parametrize(("pruner", "evaluations"), [("median", {1, 2, 3}), ("halving", {1, 3})])
def test_pruned_trials_have_no_score(pruner, evaluations, tmp_path):
    trials = studied(tmp_path / "study.db", "random", pruner)
    assert {trial.value is None for trial in trials} == {True, False}
    for trial in trials:
        reported = len(trial.intermediate_values)
        assert reported in evaluations
        assert trial.user_attrs.get("note", "").startswith("pruned after") == (trial.value is None)
        assert trial.value is not None or reported < 3  # at the end there is nothing to save


def test_a_killed_trial_keeps_its_values_and_its_end(tmp_path):
    path, section = tmp_path / "study.db", {"sampler": "random", "pruner": "halving", **SPACE}
    study = opened(path, **section)
    for score in (0.9, 0.8, 0.7, 0.6):
        killed = study.ask()
        is_pruned = study.prunes(score, 1, is_last=False)
        if is_pruned:
            break
        study.end(score, note="")
    assert is_pruned
    study = opened(path, **section)
    assert study.ask() == killed
    assert study.prunes(0.99, 2, is_last=False)
    ended = tell(study, 0.99)
    assert (ended.number, ended.value) == (killed[0], None)


def test_the_grid_is_walked_once(tmp_path):
    section = {"sampler": "grid", "epochs": {"low": 1, "high": 2}, "freeze_embeddings": {"choices": [True, False]}}
    seen = []
    for number in range(4):  # each time after a kill in the middle of a trial
        study = opened(tmp_path / "study.db", **section)
        asked = study.ask()
        study = opened(tmp_path / "study.db", **section)
        assert study.ask() == asked
        study.end([1.0, None][number % 2], note="")
        seen.append(tuple(asked[1].values()))
    assert len(set(seen)) == 4
    assert all(type(value) is bool for _, value in seen)


@pytest.mark.parametrize("sampler", slow_except(["tpe", "random"], "random"))
def test_the_first_trial_has_the_values_of_the_recipe(sampler, tmp_path):
    layers = ["every-other", [0, 1]]
    section = SearchSection.model_validate({"sampler": sampler, **SPACE, "model": {"layers": {"choices": layers}}})
    study = Study(tmp_path / "study.db", section)
    first = {"optim.epochs": 2, "model.layers": [0, 1]}  # Optuna draws the others
    study.open({}, first=first, seed=1, lower_is_better=False)
    _, values = study.ask()
    assert values == values | first
    assert values.keys() == section.space.keys()
    assert tell(study, 0.5).params == values
    others = set()
    for _ in range(8):
        others.add(str(study.ask()[1]["model.layers"]))
        study.end(0.5, note="")
    assert others == {"every-other", "[0, 1]"}


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
    assert result.trials[0].params == {"optim.learning_rate": 1e-3, "optim.batch_size": 10}  # the recipe as it is
    for trial in result.trials:
        run = folder / "out" / f"trial-{trial.number:03d}"
        best_recipe = load_recipe(run / "recipe.toml")
        assert (best_recipe.optim.learning_rate, best_recipe.run.seed) == (trial.params["optim.learning_rate"], 9)
        metrics = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]
        assert metrics[result.metric] == trial.value
        assert (run / "model" / "model.safetensors").exists() == (trial == result.best)
        assert not list(run.rglob("ckpt-*"))
    assert result.best.value == max(trial.value for trial in result.trials)
    content = json.loads(json.dumps(result.to_json()))
    assert content["best"] == result.best.number
    assert content["run"] == str(folder / "out" / f"trial-{result.best.number:03d}")
    assert content["trials"][content["best"]]["score"] == result.best.value
    best = load_recipe(folder / "out" / "best.toml")
    assert best.optim.learning_rate == result.best.params["optim.learning_rate"]
    assert load_search(folder / "out") == result
    lines = result.lines()
    assert lines[0].split() == ["trial", "accuracy", "optim.learning_rate", "optim.batch_size"]
    shown = rf"^{result.best.number} +{result.best.value:.4f} .* best$"
    assert re.search(shown, "\n".join(lines), re.MULTILINE)
    assert f"model: {result.output_dir / f'trial-{result.best.number:03d}' / 'model'}" in lines
    assert [shlex.split(command)[:2] for command in result.next] == [["bert-tasks", "train"]] * 2 + [
        ["bert-tasks", "report"]
    ]
    assert shlex.split(result.next[1])[2:5] == [str(folder / "out" / "recipe.toml"), "--seeds", "10,11,12"]


@pytest.mark.slow
def test_the_next_commands_compare_the_best_values_with_the_recipe(searched, tmp_path):
    """Each of them can be typed as it is, also in a folder with spaces."""
    copy = tmp_path / "a copy"
    shutil.copytree(searched[0], copy)
    result = search(recipe(copy), progress=False)
    for command in result.next:
        program, *arguments = shlex.split(command)
        assert program == "bert-tasks"
        assert command.strip() in "\n".join(result.lines())
        done = run_program([*CONSOLE, *arguments], folder=tmp_path, seconds=240)
        assert done.code == 0, done.err[-3000:]
    seeds = {name: json.loads((copy / f"out-{name}" / "seeds.json").read_text("utf-8")) for name in ("best", "recipe")}
    assert {name: content["seeds"] for name, content in seeds.items()} == {"best": [10, 11, 12], "recipe": [10, 11, 12]}
    rates = {name: load_recipe(copy / f"out-{name}" / "seed-10" / "recipe.toml").optim.learning_rate for name in seeds}
    assert rates == {"best": result.best.params["optim.learning_rate"], "recipe": 1e-3}


def test_the_report_of_a_search(searched):
    folder, _ = searched
    page = make_report(folder / "out").output.read_text("utf-8")
    for text in ("optim.learning_rate", "Best values", "Trials"):
        assert text in page
    with pytest.raises(UsageError, match="holds a search"):
        make_report(folder / "out", data=folder / "dev.csv")


def test_a_complete_search_is_reported_and_extended(searched, tmp_path, monkeypatch):
    folder, result = searched
    trained = []
    original = module.train
    monkeypatch.setattr(module, "train", lambda *args, **options: trained.append(args) or original(*args, **options))
    again = search(recipe(folder), progress=False)
    assert trained == []
    assert again.to_json() == result.to_json()
    shutil.copytree(folder, tmp_path / "copy")
    more = search(recipe(tmp_path / "copy", "search.trials=4"), progress=False)
    assert len(trained) == 1
    assert more.trials[:3] == result.trials


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.epochs=2", r"differs in optim.epochs = 2 \(was 1\)"),
        ("search.epochs={low = 1, high = 2}", "differs in search.optim"),
        ("run.seed=3", "differs in run.seed"),
        ("search.sampler=random", "differs in search.sampler = 'random' .was 'tpe'"),
        ("run.seeds=[1, 2]", "all trials have the seed run.seed. Remove run.seeds"),
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
    with pytest.raises(CheckpointError, match=r"study\.db: the trials cannot be read"):
        make_report(tmp_path / "copy" / "out")
    (again,) = search(recipe(tmp_path / "copy", "search.trials=1"), overwrite=True, progress=False).trials
    first = searched[1].trials[0]
    assert (again.params, again.value) == (first.params, first.value)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_the_user_s_recipe(folder, overwrite):
    before = (folder / "recipe.toml").read_text("utf-8")
    with pytest.raises(UsageError, match="contains no such runs"):
        search(recipe(folder, f"run.output_dir={folder}"), overwrite=overwrite, progress=False)
    assert (folder / "recipe.toml").read_text("utf-8") == before


def test_overwriting_removes_only_what_a_search_wrote(tmp_path):
    runs = ["trial-000", "trial-1000"]
    kept = ["notes.txt", "trial-007/notes.txt", "grid/run.json"]
    ours = ["study.db", "recipe.toml", "best.toml", "report.html"]
    for name in (*(f"{run}/run.json" for run in runs), *kept, *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", "utf-8")
    module._remove(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*kept, "trial-007", "grid"}


def test_values_that_the_model_refuses_end_their_trial_only(tmp_path, checkpoint):
    space = 'sampler = "grid"\nsettings.max_length = {choices = [40, 4096]}'
    path = write_recipe(tmp_path, checkpoint, space)
    result = search(load_recipe(path, overrides=["settings.max_length=4096"]), progress=False)
    trials = {trial.params["settings.max_length"]: trial for trial in result.trials}
    assert {length: trial.value is None for length, trial in trials.items()} == {40: False, 4096: True}
    assert trials[4096].user_attrs["note"].startswith("max_length = 4096, but the checkpoint has")


def test_errors_that_are_not_of_the_values_stop_the_search(folder, monkeypatch):
    def fail(*args, **options):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        search(recipe(folder), progress=False)


def test_each_command_ends_after_its_hours(folder):
    """It runs one trial at least, so that a search comes to an end."""
    counts = [len(search(recipe(folder, "search.hours=1e-9"), progress=False).trials) for _ in range(2)]
    assert counts == [1, 2]


def test_what_a_search_needs(folder, monkeypatch):
    plain = recipe(folder).model_copy(update={"search": None})
    with pytest.raises(RecipeError, match=r"Add a section \[search\]"):
        search(plain)
    monkeypatch.setattr("bert_tasks.environment.find_spec", lambda name: None)
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
    grid = ("search.sampler=grid", "search.batch_size.choices=[4, 5]", "optim.epochs=3")
    result = search(recipe(folder, *grid), progress=False)
    missing = {trial.params["optim.learning_rate"]: trial.value is None for trial in result.trials}
    assert len(result.trials) == 3
    assert missing == {1e-3: False, 1e30: True}
    assert all("diverged" in trial.user_attrs["note"] for trial in result.trials if trial.value is None)


def stop_in_trial(number, folder, monkeypatch, *options):
    """Stops a search at the first evaluation of a trial."""
    original = module._Pruning.on_evaluate

    def stop(callback, trainer, record):
        if trainer.output_dir.name == f"trial-{number:03d}":
            raise StoppedError("stopped", signal_number=signal.SIGTERM)
        return original(callback, trainer, record)

    with monkeypatch.context() as patch:
        patch.setattr(module._Pruning, "on_evaluate", stop)
        with pytest.raises(StoppedError):
            search(recipe(folder, *options), progress=False)


def test_a_search_that_was_stopped_goes_on(folder, monkeypatch):
    """The trial that was stopped continues with its values, from its checkpoint."""
    options = ("optim.epochs=2", "search.pruner=none", "search.batch_size.choices=[10, 20]")
    stop_in_trial(1, folder, monkeypatch, *options)
    stopped = load_recipe(folder / "out" / "trial-001" / "recipe.toml").optim
    page = make_report(folder / "out").output.read_text("utf-8")
    assert ">1 trial<" in page
    result = search(recipe(folder, *options), progress=False)
    assert all(trial.value is not None for trial in result.trials)
    values = result.trials[1].params
    assert (stopped.learning_rate, stopped.batch_size) == (values["optim.learning_rate"], values["optim.batch_size"])
    assert len(result.trials[0].intermediate_values) == 2
    assert len(result.trials[1].intermediate_values) == 1  # of the second epoch, because the first is not repeated


# Whole programs

PRUNED = "trials = 6\nsampler = 'random'\npruner = 'halving'\nlearning_rate = {choices = [3e-3, 1e-9, 1e-8]}"
BY_LOSS = 'metric_for_best_model = "loss"'  # which differs between all trials, where the accuracy of few rows may not


def read_trials(folder):
    return load_search(folder / "out").trials


@pytest.mark.slow
def test_pruning_ends_both_processes(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, PRUNED, epochs=4, run_section=BY_LOSS)
    done = run_program([*TORCHRUN, "search", tmp_path / "recipe.toml", "--no-report"], folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    trials = read_trials(tmp_path)
    assert {trial.value is None for trial in trials} == {True, False}
    for trial in trials:
        run = tmp_path / "out" / f"trial-{trial.number:03d}"
        metadata, summary = (json.loads((run / name).read_text("utf-8")) for name in ("run.json", "metrics.json"))
        assert metadata["processes"] == 2
        assert (summary["steps"] < metadata["steps"]) == (trial.value is None)


@pytest.mark.slow
def test_kill_during_a_trial(tmp_path, checkpoint):
    write_recipe(tmp_path, checkpoint, PRUNED.replace("'random'", "'tpe'"), epochs=4, run_section=BY_LOSS)
    command = [*CONSOLE, "search", "--no-report", "--quiet", tmp_path / "recipe.toml"]
    program = Program(command, folder=tmp_path)
    run = tmp_path / "out" / "trial-004"
    program.until(lambda: (run / "metrics.jsonl").exists())
    program.send(signal.SIGKILL)
    program.wait()
    assert not (tmp_path / "out" / "best.toml").exists()
    killed = load_recipe(run / "recipe.toml").optim.learning_rate
    done = run_program(command, folder=tmp_path, seconds=240)
    assert done.code == 0, done.err[-3000:]
    trials = read_trials(tmp_path)
    assert [trial.number for trial in trials] == list(range(6))
    assert trials[4].params["optim.learning_rate"] == killed
    assert {trial.value is None for trial in trials} == {True, False}

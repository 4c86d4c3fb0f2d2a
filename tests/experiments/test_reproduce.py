"""A run is trained again from its folder alone, and only equal bits count as equal."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tasks import fit
from bert_tasks.cli import main
from bert_tasks.errors import DataError, UsageError
from bert_tasks.experiments import reproduce as reproducing
from bert_tasks.experiments.reproduce import reproduce
from bert_tasks.experiments.seeds import train_seeds
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.storage import locked
from bert_tasks.training.loop import Trainer
from bert_tasks.training.run import train
from support.runs import TORCHRUN, Ended, digests, events, write_recipe
from support.runs import run as in_process
from support.training_runs import load_model, make_rows


@pytest.fixture(scope="module")
def original(dropout_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with dropout, which no test changes."""
    folder = tmp_path_factory.mktemp("original")
    train(load_recipe(write_recipe(folder, dropout_checkpoint, rows=24, epochs=2)), progress=False)
    return folder / "run"


@pytest.fixture
def copied(original: Path, dropout_checkpoint: Path, tmp_path: Path) -> Path:
    """Another one, to be changed: run.json and the data are its own."""
    train(load_recipe(write_recipe(tmp_path, dropout_checkpoint, rows=24, epochs=2)), progress=False)
    return tmp_path / "run"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return Ended(code, captured.out, captured.err)


def test_equal_bits(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    done = command(monkeypatch, capsys, "reproduce", original, "--output-dir", again)
    assert done.code in (0, None)
    assert done.out.splitlines() == [
        f"equal, bit for bit: {original} and {again}",
        "compared: metrics.json, metrics.jsonl, model/model.safetensors",
    ]
    assert "versions, machine, 1 threads, data and weights are the run's" in done.err
    assert (events(again), digests(again)) == (events(original), digests(original))
    finished = reproduce(original, output_dir=again, progress=False)  # it is there: nothing is trained
    assert finished.equal
    assert json.loads(json.dumps(finished.to_json()))["differences"] == []


def test_equal_bits_in_bfloat16(dropout_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, dropout_checkpoint, rows=24, epochs=1)
    text = recipe.read_text("utf-8").replace("[run]", 'mixed_precision = "bf16"\n[run]')
    recipe.write_text(text, "utf-8")
    train(load_recipe(recipe), progress=False)
    assert reproduce(tmp_path / "run", progress=False).equal


def test_the_current_folder_is_named_by_what_it_is_called(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    assert reproduce(".", progress=False).output_dir == copied.with_name(f"{copied.name}-reproduced")


def test_differences_are_a_table_and_exit_5(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (copied / "metrics.jsonl").read_text("utf-8").splitlines()
    third = json.loads(lines[2])
    lines[2] = json.dumps(third | {"loss": third["loss"] * (1 + 2**-50)})
    (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    weights = copied / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    facts = json.loads((copied / "run.json").read_text("utf-8"))
    rewrite(copied / "run.json", versions=facts["versions"] | {"torch": "1.0"}, cpu="Z80", initial_weights="abc")
    done = command(monkeypatch, capsys, "reproduce", copied)
    assert done.code == 5
    assert f"not equal: {copied} and {copied}-reproduced" in done.out
    assert re.search(r"^what +the run +now$", done.out, flags=re.MULTILINE)
    assert re.search(r"^metrics.jsonl, step 3: loss +0\.\d+", done.out, flags=re.MULTILINE)
    assert re.search(r"^model/model.safetensors \(sha256\) +\w{12}\.\.\. +\w{12}\.\.\.$", done.out, flags=re.MULTILINE)
    assert len(re.findall("^metrics", done.out, flags=re.MULTILINE)) == 1
    for line in (
        "differs: versions.torch: 1.0 before, 2.",
        "differs: cpu: Z80 before, ",
        "differs: weights before training",
    ):
        assert line in done.err
    assert "surroundings differ: cpu: Z80 before" in done.out
    shown = command(monkeypatch, capsys, "reproduce", copied, "--json", "--quiet")
    report = json.loads(shown.out)
    assert (shown.code, shown.err, report["equal"], len(report["differences"])) == (5, "", False, 2)


def test_changed_rows_are_refused_by_the_name_of_their_file(copied: Path) -> None:
    data = copied.parent / "dev.csv"
    data.write_text(data.read_text("utf-8") + "a wonderful ferry,positive\n", "utf-8")
    with pytest.raises(DataError, match=r"dev\.csv: the rows of validation differ from the run's") as error:
        reproduce(copied, progress=False)
    assert error.value.exit_code == 3
    assert not copied.with_name("run-reproduced").exists()


def test_threads_are_those_of_the_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained: two threads wait long for each other where the machine has no time for both."""
    rewrite(copied / "run.json", threads=2)
    used: list[int] = []

    def trained(*_: Any, **__: Any) -> None:
        used.append(torch.get_num_threads())
        raise UsageError("enough")

    monkeypatch.setattr(reproducing.Trainer, "train", trained)
    with pytest.raises(UsageError, match="enough"):
        reproduce(copied, progress=False)
    assert used == [2]
    assert torch.get_num_threads() == 1


def test_trackers_are_left_out(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = copied / "recipe.toml"
    recipe.write_text(recipe.read_text("utf-8").replace("trackers = []", 'trackers = ["tensorboard"]'), "utf-8")
    assert load_recipe(recipe).run.trackers == ("tensorboard",)
    used: list[Any] = []

    def trained(trainer: Trainer, **_: Any) -> None:
        used.append(trainer.run.trackers)
        raise UsageError("enough")

    monkeypatch.setattr(reproducing.Trainer, "train", trained)
    with pytest.raises(UsageError, match="enough"):
        reproduce(copied, progress=False)
    assert used == [()]


def test_a_run_whose_settings_changed_on_its_way_says_so(original: Path, copied: Path) -> None:
    recipe = copied.parent / "recipe.toml"
    train(load_recipe(recipe, overrides=["optim.epochs=3"]), progress=False)
    result = reproduce(copied, progress=False)
    assert not result.equal
    (cause,) = result.surroundings
    assert str(cause) == "settings at step 12: optim.epochs = 3 (was 2) before, set from step 0 on now"


def test_what_is_no_run_to_repeat(original: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r": no run\.json\. Expected the output folder of one run"):
        reproduce(tmp_path)
    with pytest.raises(UsageError, match=r"is the run itself\. Choose another folder"):
        reproduce(original, output_dir=original)
    rows = make_rows(8)
    fit(load_model(checkpoint), rows, rows, output_dir=tmp_path / "fit", epochs=1, progress=False)
    with pytest.raises(UsageError, match=r"has no recipe\.toml, so it was made by fit"):
        reproduce(tmp_path / "fit")
    (tmp_path / "fit" / "metrics.json").unlink()
    with pytest.raises(UsageError, match="a run that is not finished"):
        reproduce(tmp_path / "fit")
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    train_seeds(load_recipe(write_recipe(seeds, checkpoint, rows=8, epochs=1)), [3], progress=False)
    with pytest.raises(UsageError, match=r"no run\.json"):
        reproduce(seeds / "run")
    assert reproduce(seeds / "run" / "seed-3", progress=False).equal


def test_the_second_folder_is_locked_and_nobody_elses(original: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "again"), pytest.raises(UsageError, match="is in use by another run"):
        reproduce(original, output_dir=tmp_path / "again", progress=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("", "utf-8")
    with pytest.raises(UsageError, match="contains no run"):
        reproduce(original, output_dir=tmp_path / "mine", progress=False)


def test_the_second_folder_is_checked_before_the_data_are_read(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.setattr(reproducing, "prepare", lambda recipe: pytest.fail("the data are read"))
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        reproduce(original, output_dir=tmp_path / "mine", progress=False)


@pytest.mark.slow
def test_two_processes(dropout_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, dropout_checkpoint, rows=24, epochs=1)
    assert in_process([*TORCHRUN, "train", recipe], folder=tmp_path).code == 0
    again = in_process([*TORCHRUN, "reproduce", tmp_path / "run", "--output-dir", tmp_path / "two"], folder=tmp_path)
    assert again.code == 0, again.err
    assert again.out.count("equal, bit for bit") == 1
    alone = reproduce(tmp_path / "run", output_dir=tmp_path / "one", progress=False)
    assert [str(change) for change in alone.surroundings] == ["processes: 2 before, 1 now"]
    assert not alone.equal

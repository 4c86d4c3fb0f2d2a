"""Signals sent to real processes: the run is saved, and the command that is printed goes on with it."""

import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from support import runs

pytestmark = pytest.mark.slow  # they start processes; tests/training has signals within one


@pytest.mark.parametrize(
    ("number", "code", "options"), [(signal.SIGTERM, 143, []), (signal.SIGINT, 130, ["--set", "optim.epochs=3"])]
)
def test_a_signal_saves_and_the_printed_command_goes_on(
    recipe: Path, straight: Path, number: signal.Signals, code: int, options: list[str]
) -> None:
    """The command that is printed has the options of the first one, but for --overwrite."""
    folder = recipe.parent
    program = runs.Program([*runs.CONSOLE, "train", "--overwrite", recipe, *options], folder=folder)
    program.until(lambda: runs.steps_done(folder / "run") >= 4)
    program.send(number)
    sent = time.monotonic()
    ended = program.wait()
    assert time.monotonic() - sent < 10
    assert ended.code == code, ended.err
    assert f"stopped by {number.name} after step" in ended.err
    assert "Traceback" not in ended.err
    assert f"ckpt-{runs.steps_done(folder / 'run')}" == runs.newest(folder / "run").name
    command = shlex.split(ended.err.splitlines()[-1].removeprefix("resume: "))
    assert command == ["bert-tasks", "train", str(recipe), *options]
    again = runs.run([*runs.CONSOLE, *command[1:]], folder=folder)
    assert again.code == 0, again.err
    assert "resumed after step" in again.err
    assert runs.digests(folder / "run") == runs.digests(straight)
    assert runs.events(folder / "run") == runs.events(straight)


def test_a_second_signal_ends_at_once_and_loses_nothing_saved(recipe: Path) -> None:
    """The step takes 0.2 seconds a micro-batch, so both signals arrive within it."""
    folder = recipe.parent
    text = recipe.read_text("utf-8").replace('"sequence-classification"', '"support.faulty_task:FaultyTask"')
    recipe.write_text(text.replace("epochs = 3", "epochs = 30"), "utf-8")
    program = runs.Program([*runs.CONSOLE, "train", recipe], folder=folder, ROW_ERROR="slow")
    program.until(lambda: runs.steps_done(folder / "run") >= 8)
    program.send(signal.SIGTERM)
    program.send(signal.SIGTERM)
    time.sleep(0.02)
    program.send(signal.SIGTERM)
    assert program.wait(20).code == -signal.SIGTERM
    assert not (folder / "run" / "checkpoints").exists()


def test_a_signal_at_the_start_leaves_nothing_behind(recipe: Path) -> None:
    folder = recipe.parent
    program = runs.Program([*runs.CONSOLE, "train", recipe], folder=folder)
    time.sleep(1.0)
    program.send(signal.SIGTERM)
    assert program.wait(20).code == -signal.SIGTERM
    assert not (folder / "run" / "run.json").exists()
    assert runs.run([*runs.CONSOLE, "train", recipe], folder=folder).code == 0


def test_a_stopped_pair_of_processes_goes_on_exactly(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, whole = recipe.parent, tmp_path_factory.mktemp("whole")
    straight = [*runs.TORCHRUN, "train", recipe, "--output-dir", whole / "run"]
    assert runs.run(straight, folder=whole).code == 0
    program = runs.Program([*runs.TORCHRUN, "train", recipe], folder=folder)
    program.until(lambda: runs.steps_done(folder / "run") >= 4)
    os.kill(program.process.pid, signal.SIGTERM)
    ended = program.wait()
    assert ended.code != 0
    assert "stopped by SIGTERM after step" in ended.err
    assert "resume: start the same processes again" in ended.err
    assert runs.run([*runs.TORCHRUN, "train", recipe], folder=folder).code == 0
    assert runs.digests(folder / "run") == runs.digests(whole / "run")
    assert runs.events(folder / "run") == runs.events(whole / "run")


def test_two_runs_do_not_share_a_folder(recipe: Path) -> None:
    folder, second = recipe.parent, recipe.parent / "second"
    second.mkdir()
    program = runs.Program([*runs.CONSOLE, "train", recipe, "--set", "optim.epochs=200"], folder=folder)
    program.until(lambda: runs.steps_done(folder / "run") >= 1)
    refused = runs.run([*runs.CONSOLE, "train", recipe, "--set", "optim.epochs=200"], folder=second)
    assert refused.code == 2
    assert f"is in use by another run (process {program.process.pid} on " in refused.err
    program.send(signal.SIGKILL)
    program.wait()
    again = runs.Program([*runs.CONSOLE, "train", recipe, "--set", "optim.epochs=200"], folder=second)
    again.until(lambda: "resumed after step" in again.err.read_text() or "starts again" in again.err.read_text())
    again.send(signal.SIGTERM)
    assert again.wait().code == 143
    assert not (folder / "run" / "run.lock").exists()

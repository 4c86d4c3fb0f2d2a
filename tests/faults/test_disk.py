"""Disks that are full or not writable, through the console script."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_tasks.training.checkpoints import newest_checkpoint
from support import runs

pytestmark = pytest.mark.slow  # they start processes; tests/test_paths.py has errors of the disk within one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for the model and one checkpoint, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_disk_that_fills_up_keeps_what_was_saved(recipe: Path, straight: Path, small_disk: Path) -> None:
    size = sizes(runs.newest(straight))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(max(0, 3 * 2**20 - sizes(straight / "model") * 2 - int(size * 1.5))))
    command = [*runs.CONSOLE, "train", recipe, "--output-dir", small_disk / "run"]
    ended = runs.run(command, folder=recipe.parent)
    assert ended.code == 4, ended.err
    assert "no space left for " in ended.err
    assert "bytes of weights, " in ended.err
    assert "Traceback" not in ended.err
    checkpoint = newest_checkpoint(small_disk / "run" / "checkpoints")
    assert checkpoint is not None, ended.err
    assert not list((small_disk / "run" / "checkpoints").glob("*.tmp-*"))
    ballast.unlink()
    again = runs.run(command, folder=recipe.parent)
    assert again.code == 0, again.err
    assert runs.digests(small_disk / "run") == runs.digests(straight)


def test_a_tokenizer_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 * 2**20 - 20_000))
    corpus = small_disk.parent / "corpus.txt"
    corpus.write_text("\n".join(f"{number} birds sang" for number in range(999)), "utf-8")
    options = ["--type", "bpe", "--vocab-size", "1000", "--output", small_disk / "tok"]
    ended = runs.run([*runs.CONSOLE, "tokenizer", corpus, *options], folder=small_disk.parent)
    assert ended.code == 2, ended.err
    assert f"error: {small_disk}" in ended.err, ended.err
    assert "No space" in ended.err
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_every_file_of_a_run_has_the_mode_that_the_umask_gives(recipe: Path) -> None:
    script = f"umask 077; exec {runs.CONSOLE[0]} train {recipe} --set optim.epochs=1"
    ended = runs.run(["sh", "-c", script], folder=recipe.parent)
    assert ended.code == 0, ended.err
    files = [path for path in (recipe.parent / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_file_in_the_way_is_named(recipe: Path) -> None:
    (recipe.parent / "run").write_text("", "utf-8")
    ended = runs.run([*runs.CONSOLE, "train", recipe], folder=recipe.parent)
    assert (ended.code, "is a file, expected a folder" in ended.err) == (2, True)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that cannot be written: root may write whatever the mode is, but not on a read-only file system."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    if os.geteuid() != 0:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a read-only disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_read_only_folder_is_named(recipe: Path, closed: Path) -> None:
    ended = runs.run([*runs.CONSOLE, "train", recipe, "--output-dir", closed / "run"], folder=recipe.parent)
    assert (ended.code, "is not writable" in ended.err) == (2, True), ended.err


def test_a_folder_that_vanishes_ends_the_run_by_name(recipe: Path) -> None:
    folder = recipe.parent
    program = runs.Program([*runs.CONSOLE, "train", recipe, "--set", "optim.epochs=100"], folder=folder)
    program.until(lambda: runs.steps_done(folder / "run") >= 3)
    (folder / "run").rename(folder / "moved")
    ended = program.wait()
    assert ended.code not in (0, 1), ended.err
    assert str(folder / "run") in ended.err
    assert "Traceback" not in ended.err

"""Checkpoints as files: whole or not there, kept and removed by rule, and nothing of anybody else's touched."""

import contextlib
import errno
import json
import os
import shutil

import pytest
import torch

from bert_tasks.errors import CheckpointError
from bert_tasks.training import checkpoints as checkpointing
from bert_tasks.training.checkpoints import (
    RunState,
    checkpoints,
    newest_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)


def state(step):
    tensors = {"encoder.weight": torch.full((3, 4), float(step)), "head.bias": torch.arange(5)}
    return RunState(
        step=step, weights=tensors, optimizer={"head.bias/step": torch.tensor(2.0)}, progress={"a": [1, None]}
    )


def save(folder, step, *, best_step=0, keep_last=2):
    return save_checkpoint(folder, state(step), metadata={"seed": 1}, best_step=best_step, keep_last=keep_last)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path):
    path = save(tmp_path / "checkpoints", 7)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert (newest.path, newest.skipped, newest.state.step, newest.state.progress) == (path, (), 7, {"a": [1, None]})
    assert torch.equal(newest.state.weights["encoder.weight"], torch.full((3, 4), 7.0))
    assert newest.state.weights["head.bias"].dtype == torch.int64
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    assert (manifest["step"], manifest["seed"]) == (7, 1)
    assert {name: (path / name).stat().st_size for name in manifest["files"]} == {
        name: file["size"] for name, file in manifest["files"].items()
    }


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "ckpt-x").mkdir()
    (tmp_path / "ckpt-3").write_text("a file", "utf-8")
    assert newest_checkpoint(tmp_path) is None


def test_the_newest_by_number_is_taken(tmp_path):
    for step in (9, 10, 2):
        save(tmp_path, step, keep_last=9)
    assert [path.name for path in checkpoints(tmp_path)] == ["ckpt-2", "ckpt-9", "ckpt-10"]
    assert newest_checkpoint(tmp_path).state.step == 10


def test_what_is_newer_than_a_run_that_was_cut_back_is_left_and_replaced(tmp_path):
    for step in (1, 2, 5):
        save(tmp_path, step, keep_last=9)
    (tmp_path / "ckpt-5" / "state.json").write_text("{}", "utf-8")
    assert newest_checkpoint(tmp_path).state.step == 2
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["ckpt-3", "ckpt-5", "latest"]
    save(tmp_path, 5, keep_last=1)
    assert names(tmp_path) == ["ckpt-5", "latest"]
    assert newest_checkpoint(tmp_path).skipped == ()


def test_foreign_files_stay(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "ckpt-mine").write_text("mine", "utf-8")
    (tmp_path / "ckpt-2.tmp-9").mkdir()
    (tmp_path / "ckpt-1.old-9").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=1)
    remove_checkpoints(tmp_path, only_leftovers=True)
    assert names(tmp_path) == ["ckpt-3", "ckpt-mine", "latest", "notes"]
    remove_checkpoints(tmp_path)
    assert names(tmp_path) == ["ckpt-mine", "notes"]


@pytest.mark.parametrize("written", ["weights.safetensors", "optimizer.safetensors"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, written):
    save(tmp_path, 1)

    def full(tensors, path):
        if path.name == written:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    original = checkpointing.save_file
    monkeypatch.setattr(checkpointing, "save_file", full)
    with pytest.raises(CheckpointError, match=r"no space left for 92 bytes of weights, \d+ bytes free.*from ckpt-1"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["ckpt-1", "latest"]
    assert newest_checkpoint(tmp_path).state.step == 1


@pytest.mark.parametrize("point", ["replace", "fsync", "mkdir", "rmtree"])
def test_a_death_at_any_point_leaves_a_good_checkpoint(tmp_path, monkeypatch, point):
    """The last calls before each change of names die, one after another."""
    for step in (1, 2):
        save(tmp_path, step)

    class Death(BaseException):
        pass

    def dying(number):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise Death
            return originals[number](*arguments, **options)

        return call

    owner = shutil if point == "rmtree" else os
    originals = {point: getattr(owner, point)}
    for at in range(1, 9):
        left = at
        with monkeypatch.context() as patch:
            patch.setattr(owner, point, dying(point))
            with contextlib.suppress(Death):
                save(tmp_path, 2 + at)
        assert newest_checkpoint(tmp_path).state.step >= 2
        remove_checkpoints(tmp_path, only_leftovers=True)


def test_a_checkpoint_whose_successor_never_got_its_name_comes_back(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "ckpt-3").rename(tmp_path / "ckpt-3.replaced-9")
    remove_checkpoints(tmp_path, only_leftovers=True)
    assert newest_checkpoint(tmp_path).state.step == 3
    save(tmp_path, 3)
    (tmp_path / "ckpt-3.replaced-9").mkdir()
    remove_checkpoints(tmp_path, only_leftovers=True)
    assert names(tmp_path) == ["ckpt-3", "latest"]


def damage(path, fault):
    """``fault``: something that happens to the weights, or the content of the manifest."""
    weights = path / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    if fault == "cut":
        weights.write_bytes(content[:-1])
    elif fault == "bit":
        content[-5] ^= 1
        weights.write_bytes(content)
    elif fault in ("gone", "pipe"):
        weights.unlink()
        os.mkfifo(weights) if fault == "pipe" else None
    else:
        (path / "manifest.json").write_text(fault, "utf-8")


KINDS = ("cut", "bit", "gone", "pipe", "", "[]", '{"step": 2}', '{"step": 2, "files": {}}', '{"step": 3, "files": {}}')


@pytest.mark.parametrize("fault", KINDS)
def test_a_damaged_checkpoint_is_skipped_or_if_no_other_is_there_refused(tmp_path, fault):
    save(tmp_path, 1)
    damage(save(tmp_path, 2), fault)
    newest = newest_checkpoint(tmp_path)
    assert (newest.state.step, len(newest.skipped)) == (1, 1)
    assert "ckpt-2" in str(newest.skipped[0])
    (tmp_path / "ckpt-1" / "state.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used\. .*state\.json is damaged.*overwrite=True"):
        newest_checkpoint(tmp_path)
    assert names(tmp_path) == ["ckpt-1", "ckpt-2", "latest"]

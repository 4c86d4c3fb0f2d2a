"""Files and folders that appear whole or not at all, digests, and the lock of an output folder."""

import contextlib
import errno
import os
import pathlib
import resource
import socket
import stat
import subprocess
import sys

import pytest

from bert_tasks.errors import UsageError
from bert_tasks.storage import (
    atomic_folder,
    atomic_path,
    is_temporary,
    locked,
    remove_temporaries,
    sha256,
    sha256_file,
    sha256_json,
)

HOLD = """
import sys
from pathlib import Path
from bert_tasks.storage import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``run``."""
    command = [sys.executable, "-c", HOLD, tmp_path / "run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_folder_is_refused_and_its_holder_named(tmp_path, holder):
    told = rf"in use by another run \(process {holder.pid} on {socket.gethostname()}\)"
    with pytest.raises(UsageError, match=told), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "run.lock").exists()


def test_the_lock_of_a_dead_process_is_free(tmp_path, holder):
    holder.kill()
    holder.wait(60)
    assert f"process {holder.pid} " in (tmp_path / "run" / "run.lock").read_text("utf-8")
    with locked(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run" / "run.lock").read_text("utf-8")


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / "run.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a"):
        (tmp_path / "a" / "result").write_text("", "utf-8")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["result"]


def test_a_full_disk_is_no_matter_of_the_lock(tmp_path):
    """What is written there then fails by itself, and is told as its own kind of error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with locked(tmp_path):
            assert (tmp_path / "run.lock").stat().st_size == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(UsageError, match="cannot be created"), locked(tmp_path / "file" / "run"):
        pass


class Death(BaseException):
    """A process that ends here, as far as the code after it is concerned."""


def failing_at(number, original, error):
    """The function, whose ``number``-th call fails."""
    calls = iter(range(1, 1000))

    def call(*arguments, **options):
        if next(calls) == number:
            raise error
        return original(*arguments, **options)

    return call


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["open", "fsync", "replace", "write"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_file_is_the_old_one_or_the_new_one_and_nothing_is_left(tmp_path, monkeypatch, name, number, error):
    target = tmp_path / "result.json"
    target.write_text("old", "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing_at(number, getattr(os, name), error))
        with contextlib.suppress(OSError, KeyboardInterrupt), atomic_path(target) as temporary:
            temporary.write_text("new", "utf-8")
    assert target.read_text("utf-8") in ("old", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("content", "utf-8")
    assert order == ["fsync", "replace"]
    with atomic_path(tmp_path / "file", durable=False) as temporary:
        temporary.write_text("content", "utf-8")
    assert order == ["fsync", "replace", "replace"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["open", "mkdir", "fsync", "replace", "rename"])
@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("existing", [True, False])
def test_a_folder_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, name, number, error, existing):
    target, staging, replaced = (tmp_path / name for name in ("target", "staging", "replaced"))
    if existing:
        target.mkdir()
        (target / "file").write_text("old", "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing_at(number, getattr(os, name), error))
        with (
            contextlib.suppress(OSError, KeyboardInterrupt),
            atomic_folder(target, staging=staging, replaced=replaced) as folder,
        ):
            (folder / "file").write_text("new", "utf-8")
            (folder / "other").write_text("new", "utf-8")
    assert target.exists() or not existing
    if target.exists():
        content = {path.name: path.read_text("utf-8") for path in target.iterdir()}
        assert content in ({"file": "old"}, {"file": "new", "other": "new"})
    with atomic_folder(target, staging=staging, replaced=replaced) as folder:
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == [target]  # also if an error kept the first attempt from removing something


def test_a_folder_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace

    def named_fsync(file):
        order.append(os.readlink(f"/proc/self/fd/{file}").removeprefix(f"{tmp_path}").strip("/"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", named_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    with atomic_folder(tmp_path / "target", staging=tmp_path / "new", replaced=tmp_path / "old") as folder:
        (folder / "file").write_text("content", "utf-8")
    assert order == ["new/file", "new", "replace", ""]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_of_a_folder_have_the_mode_that_the_umask_gives(tmp_path, mask):
    before = os.umask(mask)
    try:
        with atomic_folder(tmp_path / "target", staging=tmp_path / "new", replaced=tmp_path / "old") as folder:
            (folder / "private").touch(mode=0o600)
            (folder / "open").touch()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "target").iterdir()}
    assert modes == {"private": 0o666 & ~mask, "open": 0o666 & ~mask}


def test_temporary_files_of_killed_processes_are_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", lambda path, missing_ok=False: None)
        for name in ("result.json", "other.json"):
            with contextlib.suppress(Death), atomic_path(tmp_path / name) as temporary:
                temporary.write_text("half", "utf-8")
                raise Death
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 2
    assert all(map(is_temporary, left))
    foreign = [".notes", "a.tmp-1", ".result.json.tmp-", ".result.json.tmp-1.txt"]
    for name in foreign:
        (tmp_path / name).touch()
    remove_temporaries(tmp_path, of=["result.json"])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == len(foreign) + 1
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)


def test_digests_are_those_of_sha256sum(tmp_path):
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256("abc") == sha256(b"abc") == sha256_file(tmp_path / "file") == abc
    assert sha256([b"a", b"", memoryview(b"bc")]) == abc
    assert sha256("ä") == sha256("ä".encode())


def test_a_digest_of_values_knows_content_and_order_of_lists_only():
    assert sha256_json({"a": 1, "b": [1, 2]}) == sha256_json({"b": [1, 2], "a": 1})
    others = [sha256_json({"a": 1, "b": [2, 1]}), sha256_json({"a": 1}, {"b": [1, 2]}), sha256_json([{"a": 1}])]
    assert len({*others, sha256_json({"a": 1, "b": [1, 2]})}) == 4

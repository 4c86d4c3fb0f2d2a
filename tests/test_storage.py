"""The lock of an output folder."""

import json
import os
import pathlib
import resource
import socket
import subprocess
import sys

import pytest

from bert_tasks import storage as locking
from bert_tasks.errors import UsageError
from bert_tasks.storage import locked

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
    assert json.loads((tmp_path / "run" / "run.lock").read_text("utf-8"))["pid"] == holder.pid
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "run.lock").read_text("utf-8"))["pid"] == os.getpid()


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / "run.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a"):
        (tmp_path / "a" / "result").write_text("", "utf-8")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["result"]


def test_a_newcomer_who_comes_while_the_folder_is_taken_away_harms_nobody(tmp_path, monkeypatch):
    def rmdir(path):
        (path / "run.lock").write_text("", "utf-8")
        original(path)

    original = pathlib.Path.rmdir
    monkeypatch.setattr(pathlib.Path, "rmdir", rmdir)
    with locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "run.lock").exists()


def test_a_lock_that_is_removed_while_it_is_taken_is_made_anew(tmp_path, monkeypatch):
    """The one who held it removes the file between our opening and locking it."""

    def flock(file, operation):
        if not raced:
            raced.append(True)
            (tmp_path / "run.lock").unlink()
        original(file, operation)

    raced, original = [], locking.fcntl.flock
    monkeypatch.setattr(locking.fcntl, "flock", flock)
    with locked(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text("utf-8"))["pid"] == os.getpid()
    assert raced


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(locking.errno.ENOLCK, "no locks")

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    with locked(tmp_path):
        pass


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
    with pytest.raises(UsageError, match="cannot be made"), locked(tmp_path / "file" / "run"):
        pass

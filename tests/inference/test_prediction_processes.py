"""Prediction through the console script: pipes, several processes, kill -9 and going on, full disks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_tasks.inference import predict_file
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support import runs
from support.training_runs import LABELS, make_rows

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "bert_tasks")
ROWS = 5000  # five parts


@pytest.fixture(scope="module")
def model(wide_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    task = SequenceClassification.of(labels=LABELS, max_length=32)
    TaskModel.from_pretrained(wide_checkpoint, task=task).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int) -> Path:
    rows = [{"id": number, **row} for number, row in enumerate(make_rows(count))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "new.jsonl", ROWS)


@pytest.fixture(scope="module")
def expected(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What this process writes. Nothing disturbs it."""
    folder = tmp_path_factory.mktemp("expected")
    predict_file(str(model), data, folder / "a.jsonl")
    return (folder / "a.jsonl").read_bytes()


def command(model: Path, data: object, output: object, *options: str) -> list[str]:
    return ["predict", str(model), str(data), "--output", str(output), *options]


def piped(arguments: list[str], content: bytes, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*runs.CONSOLE, *arguments], input=content, capture_output=True, check=False, env=environment, cwd=folder
    )


def rows_finished(output: Path) -> int:
    path = output.with_name(f"{output.name}.parts") / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_killed_prediction_goes_on_to_the_same_bytes(
    model: Path, data: Path, expected: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "a.jsonl"
    program = runs.Program([*runs.CONSOLE, *command(model, data, output)], folder=tmp_path)
    program.until(lambda: rows_finished(output) >= 1024)
    program.send(signal.SIGKILL)
    assert program.wait().code == -signal.SIGKILL
    assert not output.exists()
    ended = runs.run([*runs.CONSOLE, *command(model, data, output)], folder=tmp_path)
    assert ended.code == 0, ended.err
    assert "rows had been completed by an earlier attempt" in ended.err
    assert output.read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "err.txt", "out.txt"]


@pytest.mark.slow
def test_two_processes_write_the_file_of_one(model: Path, data: Path, expected: bytes, tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    program = runs.Program([*runs.TORCHRUN, *command(model, data, output)], folder=tmp_path)
    program.until(lambda: rows_finished(output) >= 1024)
    workers = list(children_of(program.process.pid))  # torchrun gives them sessions of their own
    assert len(workers) == 2
    for pid in (program.process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    program.process.wait()
    assert not output.exists()
    ended = runs.run([*runs.TORCHRUN, *command(model, data, output)], folder=tmp_path)
    assert ended.code == 0, ended.err
    first, counts = ended.out.splitlines()
    assert first == f"{ROWS} predictions: {output}"
    assert counts.startswith("labels of ")
    assert "completed by an earlier attempt" in ended.err
    assert output.read_bytes() == expected


def children_of(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent:
            yield int(path.parent.name)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "launcher"), [(1, runs.TORCHRUN), (1025, ACCELERATE)])
def test_fewer_parts_than_processes(count: int, launcher: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "few.jsonl", count)
    predict_file(str(model), data, tmp_path / "expected.csv")
    expected = (tmp_path / "expected.csv").read_bytes()
    assert expected.count(b"\n") == count + 1
    ended = runs.run([*launcher, *command(model, data, tmp_path / "a.csv")], folder=tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "a.csv").read_bytes() == expected


@pytest.mark.slow
def test_processes_fail_together(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    ended = runs.run([*runs.TORCHRUN, *command(model, tmp_path / "bad.jsonl", tmp_path / "a.csv")], folder=tmp_path)
    assert ended.err.count("bad.jsonl:1: missing text in column 'text'") == 1
    assert "exitcode  : 3" in ended.err
    ended = runs.run([*runs.TORCHRUN, *command(model, "-", "-", "--format", "jsonl")], folder=tmp_path)
    assert "several processes cannot share standard input" in ended.err


@pytest.mark.slow
def test_a_pipe_gives_the_lines_of_the_file(model: Path, data: Path, expected: bytes, tmp_path: Path) -> None:
    few = b"".join(data.read_bytes().splitlines(keepends=True)[:1000])
    done = piped(command(model, "-", "-", "--format", "jsonl"), few, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    expected_rows = [json.loads(line) for line in expected.splitlines()[:1000]]
    assert [(row["id"], row["label"]) for row in rows] == [(row["id"], row["label"]) for row in expected_rows]
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in expected_rows], abs=1e-5)
    assert done.stderr == b"1000 predictions\n"
    stored = piped(command(model, "-", tmp_path / "a.jsonl", "--format", "jsonl"), few, tmp_path)
    assert stored.returncode == 0, stored.stderr
    assert [row["id"] for row in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())] == [
        row["id"] for row in expected_rows
    ]


@pytest.mark.slow
def test_rows_come_out_while_others_are_still_to_come(model: Path, tmp_path: Path) -> None:
    """And a bad row ends the stream behind those before it, or goes to the rejects."""
    rejects = tmp_path / "r.jsonl"
    options = ("--format", "csv", "--on-error", "skip", "--rejects", str(rejects), "--output-format", "csv")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [*runs.CONSOLE, *command(model, "-", "-", *options)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        process.stdin.write(b"text,id\na ferry,1\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"line,text,id,label")
        assert process.stdout.readline().startswith(b"2,a ferry,1,")
        process.stdin.write(b"too,many,cells\nanother,2\n")
        process.stdin.close()
        assert process.stdout.readline().startswith(b"4,another,2,")
        assert process.wait(runs.PATIENCE) == 0
    assert json.loads(rejects.read_text())["raw"] == "too,many,cells"
    content = b'{"text": "a"}\n{"text": "b"}\n{"txt": "c"}\n{"text": "d"}\n'
    done = piped(command(model, "-", "-", "--format", "jsonl"), content, tmp_path)
    assert done.returncode == 3
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["a", "b"]
    assert b"standard input:3: missing text in column 'text'" in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(model: Path, data: Path, tmp_path: Path) -> None:
    script = '"$@" | head -n 3; echo "${PIPESTATUS[0]}"'
    arguments = [*runs.CONSOLE, *command(model, data, "-")]
    ended = runs.run(["bash", "-c", script, "bash", *arguments], folder=tmp_path)
    *lines, code = ended.out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1, 2]
    assert (code, ended.err) == ("141", "")


def ended_with_output(arguments: list[str], out: int) -> tuple[int, str]:
    """Code and standard error of a command whose standard output is ``out``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*runs.CONSOLE, *arguments]
    ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment, check=False, text=True)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_little_to_a_closed_pipe_ends_quietly_too(model: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        arguments = command(model, write_rows(tmp_path / "few.jsonl", 3), "-")
        assert ended_with_output(arguments, writing) == (141, "")
    finally:
        os.close(writing)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no device that is full")
def test_a_full_disk_behind_standard_output_is_told(model: Path, tmp_path: Path) -> None:
    arguments = command(model, write_rows(tmp_path / "few.jsonl", 3), "-")
    with Path("/dev/full").open("wb") as full:
        told = "error: cannot write the output (No space left on device)\n"
        assert ended_with_output(arguments, full.fileno()) == (2, told)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_is_gone_on_from(
    model: Path, data: Path, expected: bytes, small_disk: Path, tmp_path: Path
) -> None:
    output = small_disk / "a.jsonl"
    ended = runs.run([*runs.CONSOLE, *command(model, data, output)], folder=tmp_path)
    assert ended.code == 2, ended.err
    assert "no space left after " in ended.err
    assert "bytes free" in ended.err
    assert "The same command resumes" in ended.err
    assert not output.exists()
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    again = runs.run([*runs.CONSOLE, *command(model, data, output)], folder=tmp_path)
    assert again.code == 0, again.err
    assert "completed by an earlier attempt" in again.err
    assert output.read_bytes() == expected

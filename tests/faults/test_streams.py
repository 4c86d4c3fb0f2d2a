"""Standard streams that are full, closed or in another encoding: only a command's own result may fail."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
import urllib.request
from pathlib import Path

import pytest

from support import runs

BASH = "/bin/bash"
NAMES = ("--text", "text", "--label", "label")


def shell(line: str, *arguments: object, folder: Path, **environment: str) -> runs.Ended:
    """A line of bash, whose ``"$@"`` are the arguments; what it leaves to its streams is caught."""
    done = subprocess.run(
        [BASH, "-c", line, "bash", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        timeout=runs.PATIENCE,
    )
    return runs.Ended(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


pytestmark = pytest.mark.slow  # they start processes


def test_training_ends_whatever_becomes_of_its_progress(recipe: Path, straight: Path) -> None:
    ended = shell('"$@" 2> >(exit)', *runs.CONSOLE, "train", recipe, folder=recipe.parent)
    assert ended.code == 0, ended
    assert runs.digests(recipe.parent / "run") == runs.digests(straight)
    assert "model: " in ended.out


@pytest.mark.parametrize(
    "unwritable",
    [">/dev/full 2>/dev/full", "<&- >&- 2>&-"],
)
def test_predictions_in_a_file_are_whole(straight: Path, tmp_path: Path, unwritable: str) -> None:
    data, output = straight.parent / "dev.csv", tmp_path / "out.jsonl"
    command = [*runs.CONSOLE, "predict", straight, data, "--output", output]
    ended = shell(f'"$@" {unwritable}', *command, folder=tmp_path)
    assert ended.code == 0, ended
    assert len(output.read_text("utf-8").splitlines()) == 12


@pytest.mark.parametrize(
    ("command", "options", "unwritable"), [("predict", ["--output", "-"], ">/dev/full"), ("evaluate", [], ">&-")]
)
def test_a_result_that_cannot_be_written_is_said(
    straight: Path, tmp_path: Path, command: str, options: list[str], unwritable: str
) -> None:
    data = straight.parent / "dev.csv"
    ended = shell(f'"$@" {unwritable}', *runs.CONSOLE, command, straight, data, *options, folder=tmp_path)
    assert ended.code == 2, ended
    assert ended.err.splitlines()[-1].startswith("error: cannot write ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("command", "unwritable"),
    [(["train", "-h"], ">/dev/full"), (["env"], ">&-")],
)
def test_text_that_cannot_be_written_is_said(tmp_path: Path, unwritable: str, command: list[str]) -> None:
    ended = shell(f'"$@" {unwritable}', *runs.CONSOLE, *command, folder=tmp_path)
    assert ended.code == 2, ended
    assert re.fullmatch(r"error: cannot write to standard output \([\w ]+\)\n", ended.err)


@pytest.mark.parametrize("command", [["train", "-h"], ["env"]])
def test_a_reader_that_is_gone_is_not_told(tmp_path: Path, command: list[str]) -> None:
    ended = shell('"$@" | true; echo "${PIPESTATUS[0]}"', *runs.CONSOLE, *command, folder=tmp_path)
    assert ended == runs.Ended(0, "141\n", "")


def on_terminal(*command: object, folder: Path, messages: bool) -> str:
    """What a command sends to a terminal that its standard output is, and with ``messages`` its standard error too."""
    controller, others = pty.openpty()
    termios.tcsetwinsize(controller, (50, 1000))
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        stdout=others,
        stderr=others if messages else subprocess.PIPE,
        timeout=runs.PATIENCE,
    )
    os.close(others)
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(controller, "rb", buffering=0) as terminal:
        while chunk := terminal.read(4096):
            shown += chunk
    assert done.returncode == 0, (shown, done.stderr)
    return shown.decode()


def test_rows_do_not_act_on_a_terminal(straight: Path, tmp_path: Path) -> None:
    text = "a \x9b31mgood\u202e day\x1b[2J"
    shown = on_terminal(*runs.CONSOLE, "predict", straight, "--text", text, folder=tmp_path, messages=False)
    line = shown.strip("\r\n")
    assert line.isprintable()
    assert json.loads(line)["text"] == text


def test_progress_leaves_the_terminal_before_the_result_is_told(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\ngood\nbad\n")
    command = (*runs.CONSOLE, "predict", straight, "rows.csv", "--output", "out.csv")
    shown = on_terminal(*command, folder=tmp_path, messages=True)
    assert "2 of 2 rows" in shown
    lines = []
    for line in shown.removesuffix("\r\n").split("\r\n"):
        seen = ""
        for state in line.split("\r"):  # a carriage return: what follows is written over what is there
            seen = state + seen[len(state) :]
        lines.append(seen.strip())
    assert lines[0] == "2 predictions: out.csv"
    assert lines[1].startswith("labels: ")


def test_closed_standard_input_is_said(straight: Path, tmp_path: Path) -> None:
    ended = shell('"$@" <&-', *runs.CONSOLE, "predict", straight, folder=tmp_path)
    assert ended.code == 2, ended
    assert ended.err == "error: standard input is closed. Name a file, or send rows through a pipe\n"


def test_serve_serves(straight: Path, tmp_path: Path) -> None:
    port = 20000 + os.getpid() % 20000
    line = 'exec "$@" >&- 2>/dev/full'
    command = [*runs.CONSOLE, "serve", straight, "--port", port]
    server = subprocess.Popen([BASH, "-c", line, "bash", *map(str, command)], cwd=tmp_path, start_new_session=True)
    try:
        end, answer = time.monotonic() + runs.PATIENCE, None
        while answer is None:
            assert server.poll() is None
            assert time.monotonic() < end
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as opened:
                    answer = opened.status
            except OSError:
                time.sleep(0.2)
        assert answer == 200
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(runs.PATIENCE) == 0


@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        (["--help"], "ascii"),
        (["no-such-ĉommand"], "ascii"),
        (["init", "ĉ.csv", *NAMES], "ascii"),
    ],
)
def test_terminals_of_other_encodings(tmp_path: Path, encoding: str, command: list[str]) -> None:
    (tmp_path / "ĉ.csv").write_text(
        "text,label\n" + "".join(f"ĉu {row},jes ☃\nne {row},ne\n" for row in range(8)), "utf-8"
    )
    ended = shell('"$@"', *runs.CONSOLE, *command, folder=tmp_path, PYTHONIOENCODING=encoding)
    assert ended.code == (2 if command[0] == "no-such-ĉommand" else 0), ended
    assert "internal error" not in ended.err
    assert "Traceback" not in ended.err
    assert len(ended.out + ended.err) > 40


def test_json_is_json_in_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "text,label\n" + "".join(f"ĉu {row},jes ☃\x9b\nne {row},ne\n" for row in range(8)), "utf-8"
    )
    command = [*runs.CONSOLE, "init", "a.csv", *NAMES, "--json"]
    ended = shell('"$@"', *command, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert ended.code == 0, ended
    assert "jes ☃\x9b" in json.dumps(json.loads(ended.out), ensure_ascii=False)


def test_an_interrupted_prediction_says_so(straight: Path, tmp_path: Path) -> None:
    lines = ["text", *("a good day " * 6 for _ in range(60_000))]
    (tmp_path / "many.csv").write_text("\n".join(lines), "utf-8")
    output = tmp_path / "out.jsonl"
    command = [*runs.CONSOLE, "predict", straight, tmp_path / "many.csv", "--output", output]
    program = runs.Program(command, folder=tmp_path)
    rows = tmp_path / "out.jsonl.parts" / "rows.jsonl"
    program.until(lambda: rows.exists() and rows.stat().st_size > 0)
    program.send(signal.SIGINT)
    ended = program.wait()
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == (
        f"interrupted: {output} is not complete. Run the command again to resume from the rows in {rows.parent}"
    )
    assert "Traceback" not in ended.err

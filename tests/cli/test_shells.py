"""The command line in a shell: completion for bash, zsh and fish, and no colour where none is wanted."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(sys.executable).with_name("bert-tasks"))
COLOUR = re.compile(rb"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")


def completed(shell: str, *words: str) -> set[str]:
    """What the shell would offer for the last word, by the protocol of its completion script."""
    of_shell = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
        "fish": {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    extra = {"_BERT_TASKS_COMPLETE": f"complete_{shell}", **of_shell[shell]}
    done = subprocess.run([SCRIPT], env=os.environ | extra, capture_output=True, text=True, timeout=60, check=True)
    if shell == "zsh":
        return set(re.findall(r'"(\S+?)":"', done.stdout))
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options(shell: str) -> None:
    assert completed(shell, "bert-tasks", "re") >= {"reproduce"}
    assert completed(shell, "bert-tasks", "train", "r.toml", "--o") == {"--output-dir", "--overwrite"}


def test_values() -> None:
    assert completed("bash", "bert-tasks", "evaluate", "m", "--dtype", "in") == {"int8"}


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".bash_completions/bert-tasks.sh"),
        ("zsh", ".zfunc/_bert-tasks"),
        ("fish", ".config/fish/completions/bert-tasks.fish"),
    ],
)
def test_installing(shell: str, file: str, tmp_path: Path) -> None:
    extra = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [SCRIPT, "--install-completion", shell]
    done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=60, check=True)
    assert f"{shell} completion installed" in done.stdout
    assert f"_BERT_TASKS_COMPLETE=complete_{shell}" in (tmp_path / file).read_text("utf-8")


def on_a_terminal(**extra: str) -> bytes:
    """What ``--help`` writes to a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        os.execve(SCRIPT, [SCRIPT, "--help"], environment | {"TERM": "xterm-256color"} | extra)
    text = b""
    try:
        while block := os.read(terminal, 4096):
            text += block
    except OSError:  # how a terminal ends
        pass
    os.close(terminal)
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_colour_where_none_is_wanted() -> None:
    assert COLOUR.search(on_a_terminal())
    plain = on_a_terminal(NO_COLOR="1")
    assert b"reproduce" in plain
    assert COLOUR.search(plain) is None


def test_no_control_characters_in_a_pipe() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, timeout=60, check=True)
    assert b"\x1b" not in done.stdout

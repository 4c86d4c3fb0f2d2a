"""Paths that cannot be examined, disks that are full: every command ends with one line that names the file."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.cli import main
from bert_tasks.storage import os_error_message

COMMANDS = {
    "train": ("train", "PATH"),
    "train to": ("train", "recipe.toml", "--output-dir", "PATH"),
    "train on": ("train", "recipe.toml", "--set", "data.train=PATH"),
    "check": ("check", "recipe.toml", "--set", "data.dir=PATH"),
    "init": ("init", "PATH", "--output", "new.toml"),
    "init to": ("init", "train.csv", "--output", "PATH/recipe.toml"),
    "init with": ("init", "train.csv", "--output", "new.toml", "--model", "PATH"),
    "inspect": ("inspect", "PATH"),
    "evaluate": ("evaluate", "PATH", "train.csv"),
    "predict": ("predict", "PATH", "train.csv"),
    "predict to": ("predict", "model", "train.csv", "--output", "PATH/out.csv"),
    "predict from": ("predict", "model", "PATH", "--output", "out.csv"),
    "report": ("report", "PATH"),
    "export": ("export", "model", "--to", "onnx", "--output", "PATH"),
    "push": ("push", "PATH", "me/x"),
    "search": ("search", "PATH"),
    "search to": (
        "search",
        "recipe.toml",
        "--set",
        "search.epochs.low=1",
        "--set",
        "search.epochs.high=2",
        "--output-dir",
        "PATH",
    ),
    "serve": ("serve", "PATH"),
    "predict glue": ("predict", "PATH", "--format", "glue", "--output", "submission"),
}
RECIPE = """\
task = "sequence-classification"
[model]
name = "google-bert/bert-base-uncased"
[settings]
[data]
train = "train.csv"
validation = "train.csv"
[run]
output_dir = "run"
"""
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Calls a command in a folder with a recipe and rows; gives its exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("recipe.toml").write_text(RECIPE)
    Path("train.csv").write_text(
        "text,label\n" + "".join(f"film {n} is fine,good\nfilm {n} is dull,bad\n" for n in range(9))
    )

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bert-tasks", *arguments])
        try:
            main()
        except SystemExit as end:
            return (end.code if isinstance(end.code, int) else 1), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


def long_name(folder: Path) -> Path:
    return folder / ("n" * 300)


def long_path(folder: Path) -> Path:
    return folder / "/".join(["n" * 200] * 30)


HOSTILE = [long_name, long_path]


@pytest.mark.parametrize("make", HOSTILE)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_names_a_path_that_cannot_be_examined(
    command: str, make: Callable[[Path], Path], call: Call, tmp_path: Path
) -> None:
    path = str(make(tmp_path))
    code, message = call(*(argument.replace("PATH", path) for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message
    assert path[:100] in message.replace("\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_names_a_folder_that_may_not_be_searched(
    command: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "private" / "x")
    _forbid(monkeypatch, path)
    code, message = call(*(argument.replace("PATH", path) for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message
    assert path in message.replace("\n", "")


def _forbid(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    """Permissions do not bind root: the calls that look at the path fail as they do for other users."""

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *rest: object, **options: object) -> object:
            if isinstance(path, str | os.PathLike) and str(path).startswith(forbidden):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *rest, **options)

        return call

    for name in ("stat", "lstat", "open", "mkdir", "scandir", "listdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr("io.open", failing(open))


@pytest.mark.parametrize("command", ["train to", "train on", "check"])
def test_recipe_with_nul_in_a_path_is_refused(command: str, call: Call) -> None:
    code, message = call(*(argument.replace("PATH", '"a\\u0000b"') for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message


@given(name=st.none() | st.text(max_size=400), number=st.sampled_from([errno.ENOSPC, errno.EACCES, errno.EIO]))
def test_message_of_the_system_is_one_line(name: str | None, number: int) -> None:
    message = os_error_message(OSError(number, os.strerror(number), name))
    assert message.isprintable()
    assert message.endswith(os.strerror(number))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error", "rows.csv"), "error: rows.csv: Input/output error\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a", None, "b"), "error: a -> b: No space left on device\n"),
        (OSError(errno.EMFILE, "Too many open files"), "error: Too many open files\n"),
        (OSError("Can't load it.\nMore"), "error: Can't load it.\n"),
    ],
)
def test_error_of_the_system_ends_in_one_line(
    error: OSError, expected: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("bert_tasks.recipe.schema.load_recipe", fail)
    assert call("check", "recipe.toml") == (2, expected)

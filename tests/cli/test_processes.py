"""The command line in processes of its own: what it imports, and its two ways to be started."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import TaskModel
from bert_tasks.cli import app, entry

HEAVY = """
import sys
from bert_tasks.cli import main
sys.argv = ["bert-tasks", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
heavy = {"torch", "transformers", "datasets", "accelerate", "evaluate", "numpy", "pyarrow", "pandas"}
heavy |= {"scipy", "sklearn"}
sys.stderr.write(" ".join(sorted(heavy.intersection(sys.modules))))
"""
HEAVIEST = {"transformers", "datasets", "evaluate", "scipy", "sklearn"}  # which no light command needs


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


UNFINISHED_LINE = """
import sys
from bert_tasks.cli.app import standard_streams
with standard_streams():
    getattr(sys, sys.argv[1]).write("without a line feed, so that it is still buffered at the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_buffered_text_that_cannot_be_written_changes_no_exit_code(stream: str) -> None:
    """Python would end with 120 as it cannot flush the stream."""
    command = [sys.executable, "-c", UNFINISHED_LINE, stream]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = {stream: full}
        ended = subprocess.run(command, **streams, env=environment, timeout=60, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize("arguments", [("train", "--help"), pytest.param(("--version",), marks=pytest.mark.slow)])
def test_help_is_light(arguments: tuple[str, ...]) -> None:
    result = in_a_process("-c", HEAVY, *arguments)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "bert-tasks" in result.stdout


@pytest.mark.slow
def test_a_recipe_is_written_and_checked_without_heavy_libraries(embedded_model: Path, tmp_path: Path) -> None:
    """The import of transformers takes more than a second, and that of the others tenths of a second."""
    rows = [f"the {number}. text of a short file,{'xy'[number % 2]}\n" for number in range(40)]
    (tmp_path / "rows.csv").write_text("".join(["text,label\n", *rows]))
    recipe = tmp_path / "recipe.toml"
    TaskModel.from_pretrained(embedded_model, task="fill-mask")  # from now on its tokenizer is in the cache
    for arguments in (
        ("init", tmp_path / "rows.csv", "--model", embedded_model, "--output", recipe),
        ("check", recipe),
    ):
        result = in_a_process("-c", HEAVY, *arguments)
        assert result.returncode == 0, result.stderr
        assert not HEAVIEST.intersection(result.stderr.split())
    again = in_a_process("-c", HEAVY, "check", recipe)  # whose rows and features are in the cache
    assert "pandas" not in again.stderr.split()


@pytest.mark.slow
def test_a_text_is_predicted_without_transformers(embedded_model: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(embedded_model, task="sequence-classification", labels=["a", "b"])
    model.save_pretrained(tmp_path / "model")
    TaskModel.from_pretrained(tmp_path / "model")
    result = in_a_process("-c", HEAVY, "predict", tmp_path / "model", "--text", "one line")
    assert result.returncode == 0, result.stderr
    assert not HEAVIEST.intersection(result.stderr.split())


def test_module_and_console_script(tmp_path: Path) -> None:
    failed = in_a_process("-m", "bert_tasks", "inspect", tmp_path)
    assert failed.returncode == 4
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("error: ")
    script = Path(sys.executable).with_name("bert-tasks")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == f"bert-tasks {version('bert-tasks')}\n"
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("error", "said", "traced"),
    [
        (
            RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"),
            "error: lost the connection to process 0,",
            False,
        ),
        (RuntimeError("Timed out waiting 8000ms for recv"), "error: lost the connection to process 0,", False),
        (ArithmeticError("the barometer fell"), "error: internal error ArithmeticError (the barometer fell)", True),
        (TimeoutError("timed out"), "error: timed out", True),
        (MemoryError(), "error: out of memory.", False),
    ],
)
def test_only_the_process_that_failed_prints_a_traceback(
    error: Exception, said: str, traced: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str], *, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(entry, "app", fail)
    monkeypatch.setattr(entry, "exit_without_shutdown", sys.exit)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        entry.main()
    shown = capfd.readouterr().err
    assert f"process 1 of 2: {said}" in shown
    assert ("Traceback" in shown) == traced
    assert len(shown.splitlines()) == 1 or traced


def test_one_of_several_processes_trains_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("the birds sang\n")
    monkeypatch.setenv("RANK", "1")
    options = ["--type", "bpe", "--vocab-size", "270", "--output", str(tmp_path / "tok")]
    app.app(["tokenizer", str(tmp_path / "corpus.txt"), *options], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]

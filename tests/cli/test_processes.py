"""The command line in processes of its own: what it imports, and its two ways to be started."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HEAVY = """
import sys
from bert_tasks.cli import main
sys.argv = ["bert-tasks", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
heavy = {"torch", "transformers", "datasets", "accelerate", "evaluate", "numpy", "pyarrow"}
sys.stderr.write(" ".join(sorted(heavy.intersection(sys.modules))))
"""


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


UNFINISHED_LINE = """
import sys
from bert_tasks.cli.app import standard_streams
with standard_streams():
    getattr(sys, sys.argv[1]).write("without a line feed, so that it is still buffered at the end")
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_buffered_text_that_cannot_be_written_changes_no_exit_code(stream: str) -> None:
    """Python would end with 120 as it cannot flush the stream."""
    command = [sys.executable, "-c", UNFINISHED_LINE, stream]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = {stream: full}
        ended = subprocess.run(command, **streams, env=environment, timeout=60, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("train", "--help"), ("evaluate", "--help")])
def test_help_is_light(arguments: tuple[str, ...]) -> None:
    result = in_a_process("-c", HEAVY, *arguments)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "bert-tasks" in result.stdout


def test_module_and_console_script(tmp_path: Path) -> None:
    failed = in_a_process("-m", "bert_tasks", "inspect", tmp_path)
    assert failed.returncode == 4
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("error: ")
    script = Path(sys.executable).with_name("bert-tasks")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == f"bert-tasks {version('bert-tasks')}\n"
    assert shown.stderr == ""

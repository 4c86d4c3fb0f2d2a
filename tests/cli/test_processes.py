"""The command line in processes of its own: what it imports, and its two ways to be started."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

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

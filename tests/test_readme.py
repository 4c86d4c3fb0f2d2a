"""The README's code runs, in order, and prints what the README says (numbers by tolerance)."""

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXEMPT = ("git clone", "pip install", "make ")
NUMBER = re.compile(r"-?\d+\.\d+")
TOLERANCE = 0.1  # of printed accuracies and probabilities: processors round differently, and training magnifies it


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)]


def agrees(printed: str, expected: str) -> bool:
    """Equal text, with decimal numbers equal within the tolerance."""
    if NUMBER.sub("#", printed.strip()) != NUMBER.sub("#", expected.strip()):
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True)
    return all(math.isclose(float(ours), float(theirs), abs_tol=TOLERANCE) for ours, theirs in pairs)


@pytest.fixture(scope="module")
def readme(repository: Path) -> list[Block]:
    return blocks((repository / "README.md").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(repository / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_print_what_the_readme_says(readme: list[Block], workplace: Path) -> None:
    namespace: dict[str, object] = {}
    compared = 0
    for block, following in zip(readme, [*readme[1:], None], strict=True):
        if block.language != "python":
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.text, "README.md", "exec"), namespace)
        if following is not None and following.language == "text":
            assert agrees(output.getvalue(), following.text), output.getvalue()
            compared += 1
    assert compared == 2


def test_shell_blocks_run(readme: list[Block], workplace: Path) -> None:
    commands = [line for block in readme if block.language == "sh" for line in block.text.splitlines()]
    tried = [command for command in commands if not command.startswith(EXEMPT)]
    assert len(tried) == 7
    here = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for command in tried:
        done = subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    answers = Path("answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == 86


@pytest.mark.parametrize(
    ("printed", "expected", "verdict"),
    [("a 0.97\n", "a 0.95", True), ("a 0.97", "b 0.97", False), ("a 0.97", "a 0.7", False), ("a", "a 0.7", False)],
)
def test_comparison_of_outputs(printed: str, expected: str, verdict: bool) -> None:
    assert agrees(printed, expected) is verdict


def test_every_table_of_numbers_stands_beside_its_command(repository: Path) -> None:
    """A table of measurements names the script that made it, and that script exists; nothing is left to fill in."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    measured = text[text.index("## Measured") : text.index("## Development")]
    for task in ("SST-2", "CoLA"):
        assert re.search(rf"^\| {task},.*\d\d\.\d", measured, flags=re.MULTILINE)
    scripts = re.findall(r"python (benchmarks/\S+\.py)", measured)
    assert len(scripts) >= 2
    assert all((repository / script).is_file() for script in scripts)
    assert not re.findall(r"\b[A-Z]{3,}_[A-Z]{3,}\b", text.replace("BERT_TASKS_DATA", "").replace("HF_HUB_OFFLINE", ""))

"""The command line in a shell: completion, and no control characters in a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(sys.executable).with_name("bert-tasks"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("train r.toml --o", {"--output-dir", "--overwrite"}),
        ("evaluate m --dtype in", {"int8"}),
    ],
)
def test_commands_options_and_values_are_completed(words: str, offers: set[str]) -> None:
    """By the protocol of the script that typer installs for bash."""
    asked = {"_BERT_TASKS_COMPLETE": "complete_bash", "COMP_WORDS": f"bert-tasks {words}"}
    environment = os.environ | asked | {"COMP_CWORD": str(len(words.split()))}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == offers


@pytest.mark.slow
def test_no_control_characters_in_a_pipe() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, timeout=60, check=True)
    assert b"\x1b" not in done.stdout

"""The quickstart as a newcomer runs it: it learns, its control does not, and a second run reuses everything."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(folder: Path) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }  # two would wait for a core beside other tests
    command = [sys.executable, str(folder / "recipes" / "quickstart.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_learns_and_its_control_does_not(repository: Path, tmp_path: Path) -> None:
    """With one of its three seeds, so that it takes a third of the time."""
    shutil.copytree(repository / "recipes", tmp_path / "recipes")
    script = tmp_path / "recipes" / "quickstart.py"
    text = script.read_text(encoding="utf-8")
    assert text.count("SEEDS = (1, 2, 3)") == 1
    script.write_text(text.replace("SEEDS = (1, 2, 3)", "SEEDS = (1,)"), encoding="utf-8")
    first = run(tmp_path)  # exits with 1 if the accuracies are not as promised
    assert first.count("validation accuracy 0.") == 2
    assert "model: runs/quickstart/seed-1/model" in first
    assert (tmp_path / "runs" / "quickstart" / "seed-1" / "model" / "model.safetensors").is_file()
    started = time.monotonic()
    assert run(tmp_path) == first
    assert time.monotonic() - started < 60

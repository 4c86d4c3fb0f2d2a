"""The benchmark for a GPU runs on a CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def benchmark(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONSAFEPATH", None)  # the script imports the modules beside it
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_sides_run_on_a_small_model(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    sides = [argument for side in ("ours", "ours eager", "dynamic", "padded") for argument in ("--side", side)]
    benchmark("--device", "cpu", "--shape", "tiny", "--json", str(path), *sides)
    results = json.loads(path.read_text())["results"]
    assert len(results) == 2 * (4 + 2)
    assert all(result.get("tokens_per_second", 0) > 0 for result in results), results

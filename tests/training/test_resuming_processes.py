"""Two processes, stopped after every step of every kind of task, go on bit for bit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import stopped_runs
from support.runs import TESTS


@pytest.mark.slow
def test_two_processes_stopped_at_every_step_end_with_the_same_bits(
    dropout_checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "support.stopped_runs",
    ]
    done = subprocess.run(
        [*command, str(dropout_checkpoint), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8"))
        assert found["processes"] == 2
        assert len(found["cases"]) == len(stopped_runs.KINDS) * (stopped_runs.STEPS - 1)
        assert [case for case in found["cases"] if not all(case.values())] == []
    record_property("stopped on two processes", len(found["cases"]))

"""Two processes, stopped after every step and in every kind of task, go on bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support import runs, stopped_runs


@pytest.mark.slow
def test_two_stopped_processes_end_with_the_same_bits(
    dropout_checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = [*runs.TORCHRUN[:-1], "support.stopped_runs", dropout_checkpoint, tmp_path]
    ended = runs.run(command, folder=tmp_path, seconds=600)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8"))
        assert report["processes"] == 2
        assert len(report["cases"]) == sum(map(len, stopped_runs.STOPS.values()))
        assert [case for case in report["cases"] if not all(case.values())] == []
    record_property("stopped on two processes", len(report["cases"]))

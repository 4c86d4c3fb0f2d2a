"""The order of the test files: by their recorded time, the longest first, and the tests of a file together."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import durations


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    return tmp_path / "durations.json"


def item(node_id: str, *marks: str) -> Any:
    return SimpleNamespace(nodeid=node_id, keywords={"tests", *marks})


def report(node_id: str, seconds: float, *marks: str) -> Any:
    return SimpleNamespace(nodeid=node_id, keywords={"tests", *marks}, duration=seconds)


def test_long_files_come_first_and_stay_together(file: Path) -> None:
    file.write_text(json.dumps({"fast": {"b.py": 2.0, "c.py": 9.0}, "slow": {"a.py": 30.0, "b.py": 40.0}}))
    items = [item("a.py::x"), item("b.py::x"), item("b.py::y"), item("c.py::x"), item("new.py::x")]
    items.sort(key=durations.longest_first(items))
    assert [each.nodeid for each in items] == ["c.py::x", "b.py::x", "b.py::y", "a.py::x", "new.py::x"]
    slow = [item("a.py::z", "slow"), item("b.py::z", "gpu")]
    assert sorted(slow, key=durations.longest_first(slow)) == slow[::-1]


def test_a_run_replaces_the_times_of_its_kind(file: Path) -> None:
    file.write_text(json.dumps({"fast": {"gone.py": 5.0}, "slow": {"a.py": 30.0}}))
    recorder = durations.Recorder()
    for each in (report("b.py::x", 1.5), report("b.py::y", 1.51), report("c.py::x", 4.0), report("d.py::x", 0.2)):
        recorder.pytest_runtest_logreport(each)
    recorder.pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"fast": {"c.py": 4.0, "b.py": 3.0}, "slow": {"a.py": 30.0}}

"""Owns how long the files of tests take, as `make durations` measured it.

Workers take one file after the other. If a long one came last, the other workers would wait for it, so long ones first.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
SHORTEST = 1.0  # seconds; shorter files are not listed

# "fast" or "slow" -> path below the root of the repository -> seconds.
Durations = dict[str, dict[str, float]]


def read() -> Durations:
    return json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}


def longest_first(items: Sequence[pytest.Item]) -> Callable[[pytest.Item], float]:
    """Returns a key that sorts tests by the time of their file, the longest first. Those of one file stay together."""
    recorded, kinds = read(), defaultdict[str, set[str]](set)
    for item in items:
        kinds[file_of(item.nodeid)].add(kind_of(item.keywords))
    times = {file: sum(recorded.get(kind, {}).get(file, 0.0) for kind in found) for file, found in kinds.items()}
    return lambda item: -times[file_of(item.nodeid)]


def file_of(node_id: str) -> str:
    return node_id.partition("::")[0]


def kind_of(keywords: Iterable[str]) -> str:
    return "slow" if {"slow", "gpu"} & set(keywords) else "fast"


class Recorder:
    """Adds up the time of the tests of each file, and writes it at the end."""

    def __init__(self) -> None:
        self.seconds = {"fast": defaultdict[str, float](float), "slow": defaultdict[str, float](float)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[kind_of(report.keywords)][file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Replaces the times of a kind if tests of the kind ran."""
        written = read()
        for kind, files in self.seconds.items():
            if files:
                written[kind] = {file: round(time, 1) for file, time in files.items() if time >= SHORTEST}
        for kind, files in written.items():
            written[kind] = dict(sorted(files.items(), key=lambda entry: (-entry[1], entry[0])))
        FILE.write_text(json.dumps(written, indent=1) + "\n", "utf-8")

"""What the report's tests share: one finished run of every kind of task, and the page about it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.report_runs import KINDS, trained


@pytest.fixture(scope="session")
def run_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run by the name of its kind; nobody may change it."""

    @cache
    def train_once(name: str) -> Path:
        return trained(tmp_path_factory.mktemp(name), checkpoint, KINDS[name])

    return train_once

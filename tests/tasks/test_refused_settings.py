"""What is said of settings that a task cannot have: each case of refused_settings.txt."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.tasks import TASKS

LINES = Path(__file__).with_name("refused_settings.txt").read_text("utf-8").splitlines()
CASES = dict(zip(LINES[::2], LINES[1::2], strict=True))


def as_setting(value: Any) -> Any:
    """JSON has lists for the tuples of settings."""
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    name, _, text = case.partition(" ")
    settings = {key: as_setting(value) for key, value in json.loads(text).items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        TASKS[name].of(**settings)
    assert f"    {error.value}" == CASES[case]


def test_a_case_is_in_the_table_once() -> None:
    assert len(LINES) == 2 * len(CASES)

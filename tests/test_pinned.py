"""What users see of small models of every task and problem type is as the files in tests/pinned say."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from support.pinned import CASES, FOLDER, differences, observe, pinned_file, stable


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_users_see_the_same(name: str, tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    found = stable(observe(CASES[name], tmp_path, wordpiece_tokenizer), tmp_path)
    expected = json.loads(pinned_file(name).read_text("utf-8"))
    assert list(differences(expected, json.loads(json.dumps(found)))) == []


def test_every_file_belongs_to_a_case() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(pinned_file(name).name for name in CASES)


def test_differences_are_found() -> None:
    expected = {"a": [1.0, "loss 0.5 of 3"], "b": 1, "c": None}
    assert list(differences(expected, {"a": [1.00001, "loss 0.50001 of 3"], "b": 1, "c": None})) == []
    found = {"a": [1.1, "loss 0.6 of 3"], "b": 2, "d": None}
    assert len(list(differences(expected, found))) == 5

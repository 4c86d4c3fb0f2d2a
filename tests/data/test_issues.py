"""What is said of a path where nothing is: the name that was meant, among those of its kind."""

import os
from pathlib import Path

import pytest

from bert_tasks.data.issues import counted, missing_path


@pytest.mark.parametrize("path_type", ["file", "folder"])
def test_only_what_was_expected_there_is_suggested(path_type: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "rums").touch()
    expected = {"file": "rums", "folder": "runs"}[path_type]
    assert missing_path(tmp_path / "rusn", path_type) == f"no such {path_type}, did you mean {expected!r}?"
    assert missing_path(tmp_path / "far from it", path_type) == f"no such {path_type}"
    assert missing_path(tmp_path / "rusn", path_type, pattern="*.toml") == f"no such {path_type}"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "topics").mkdir()
    wrong = tmp_path / "topcis"
    assert missing_path(wrong / "dev.csv") == f"no such file. There is no folder {wrong}, did you mean 'topics'?"
    deep = tmp_path / "gone" / "further"
    assert missing_path(deep / "dev.csv") == f"no such file. There is no folder {deep}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_a_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        assert missing_path(tmp_path / "a" / "dev.csv") == "no such file"
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_a_count_agrees_with_its_noun(count: int, text: str) -> None:
    assert counted(count, "row") == text


# Nouns that every message has beside a count which can be 1.

"""study.db: every single edit of a cell is read or refused, and no other file is taken over."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.errors import CheckpointError
from bert_tasks.experiments.study import Study, Trial
from bert_tasks.recipe.search import SearchSection
from support.damage import REFUSED, cell_edits, exit_code

SPACE = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
    "epochs": {"low": 1, "high": 3},
    "lr_scheduler_type": {"choices": ["linear", "cosine", "wsd"]},
}
FACTS = {"the metric": "accuracy"}


def opened(path: Path, sampler: Any = "random") -> Study:
    section = SearchSection.model_validate({"sampler": sampler, **SPACE})
    study = Study(path, sampler=sampler, search=section, start=None, seed=1, lower_is_better=False)
    try:
        study.check_facts(FACTS)
    except BaseException:
        study.close()
        raise
    return study


def resume(path: Path) -> list[Trial]:
    """What a resumed search reads before its next trial."""
    study = opened(path)
    try:
        trials = study.trials
        study.suggest()
    finally:
        study.close()
    return trials


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete trial, a pruned and a failed one; read-only."""
    path = tmp_path_factory.mktemp("study") / "study.db"
    store = opened(path)
    for state, scores in (("complete", (0.5, 0.75)), ("pruned", (0.5,)), ("failed", ())):
        number, values = store.suggest()
        score = 0.75 if state == "complete" else None
        fields: dict[str, Any] = {"scores": scores, "state": state}
        store.add(Trial(number=number, values=values, score=score, note="n", seconds=1.5, **fields))
    store.close()
    return path


@pytest.mark.slow
def test_every_edit_of_a_cell_is_read_or_refused(study: Path, tmp_path: Path) -> None:
    before, edited = resume(study), tmp_path / "study.db"
    codes = {name: exit_code(lambda: resume(edited)) for name in cell_edits(study, edited, rows=3)}
    assert {name: code for name, code in codes.items() if code not in (0, *REFUSED)} == {}
    assert len(codes) > 300
    assert resume(study) == before


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE trial_user_attributes SET value_json = '\"x\"' WHERE key = 'seconds'", "could not convert string"),
        ("DELETE FROM trial_user_attributes WHERE key = 'state'", "state"),
        ("DELETE FROM trial_params WHERE param_name = 'optim.learning_rate'", "optim.learning_rate"),
        ("DELETE FROM study_user_attributes", "facts"),
    ],
)
def test_damage_is_reported(statement: str, reason: str, study: Path, tmp_path: Path) -> None:
    shutil.copyfile(study, tmp_path / "study.db")
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(CheckpointError, match=reason) as caught:
        resume(tmp_path / "study.db")
    assert str(caught.value).startswith(f"{tmp_path / 'study.db'}: the trials cannot be read or written (")


def test_another_sampler_adds_its_study(study: Path, tmp_path: Path) -> None:
    shutil.copyfile(study, tmp_path / "study.db")
    other = opened(tmp_path / "study.db", "tpe")
    assert other.trials == []
    other.close()
    assert resume(tmp_path / "study.db") == resume(study)

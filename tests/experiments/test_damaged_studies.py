"""The SQLite file of a search that was edited by hand: it is read, or refused with its name."""

import itertools
import math
import random
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial

from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.experiments.search import SearchResult
from bert_tasks.experiments.study import Study
from bert_tasks.recipe.search import SearchSection

SPACE = SearchSection.model_validate(
    {
        "trials": 8,
        "pruner": "median",
        "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
        "batch_size": {"low": 4, "high": 16},
        "warmup_ratio": {"choices": [0.0, 0.1]},
    }
)
VALUES = ("x", b"\xff\x00", None, 1e308, -1, "[]", 2.5)


def opened(path: Path) -> Study:
    study = Study(path, SPACE)
    study.open({"rows": 3}, first={}, seed=1, lower_is_better=False)
    return study


def used(path: Path) -> list[FrozenTrial]:
    """All that a search and its report do with the file."""
    study = opened(path)
    study.trials()
    study.ask()
    study.prunes(0.5, 1, is_last=False)
    study.end(0.5, note="")
    study.load()
    result = SearchResult(
        output_dir=path.parent, metric="accuracy", lower_is_better=False, trials=study.trials(), seed=1
    )
    assert result.to_json()
    assert result.lines()
    return list(result.trials)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.db"
    study = opened(path)
    for score in (0.5, 0.6, None, 0.7):
        study.ask()
        study.prunes(0.4, 1, is_last=True)
        study.end(score, note="")
    study.ask()
    return path


def edit(path: Path, table: str, column: str, value: object) -> bool:
    """Sets a cell of the last row of a table. Returns False if SQLite itself refuses it."""
    with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.Error):
        connection.execute("PRAGMA ignore_check_constraints = ON")
        newest = f"SELECT max(rowid) FROM {table}"
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ({newest})", (value,))
        connection.commit()
        return True
    return False


COLUMNS = (
    "trial_values.value",
    "trial_values.trial_id",
    "trial_params.param_value",
    "trial_params.distribution_json",
    "trial_intermediate_values.intermediate_value",
    "trial_intermediate_values.step",
    "trial_user_attributes.value_json",
    "trials.number",
    "trials.state",
    "studies.study_name",
    "study_directions.direction",
    "study_user_attributes.value_json",
    "version_info.schema_version",
    "alembic_version.version_num",
)
EDITS = list(itertools.product(COLUMNS, VALUES))


@pytest.mark.parametrize("edits", [random.Random(0).sample(EDITS, 8), pytest.param(EDITS, marks=pytest.mark.slow)])
def test_every_edit_is_read_or_refused(edits: list[tuple[str, object]], stored: Path, tmp_path: Path) -> None:
    for number, (place, value) in enumerate(edits):
        path = Path(shutil.copy(stored, tmp_path / f"{number}.db"))
        if not edit(path, *place.split("."), value):
            continue
        try:
            trials = used(path)
        except (CheckpointError, UsageError):
            continue
        assert all(trial.value is None or math.isfinite(trial.value) for trial in trials), (place, value)


@pytest.mark.parametrize("value", ["x", None, "inf"])
def test_a_score_that_is_no_number_is_refused(value: object, stored: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(stored, tmp_path / "study.db"))
    assert edit(path, "trial_values", "value", value)
    with pytest.raises(CheckpointError, match=r"study\.db: the trials cannot be read or written"):
        used(path)

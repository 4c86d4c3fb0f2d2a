"""One of two processes fails: the job ends soon, says which and why, and what was saved stays good."""

import time
from pathlib import Path

import pytest

from bert_tasks.run_dir.checkpoints import newest_checkpoint
from support import runs


@pytest.fixture
def faulty(recipe: Path) -> Path:
    """The recipe with a task that fails on process 1 after the first checkpoint."""
    text = recipe.read_text("utf-8").replace('"sequence-classification"', '"support.faulty_task:FaultyTask"')
    recipe.write_text(text + "save_steps = 2\n", "utf-8")
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "process 1 of 2: internal error: ArithmeticError: the barometer fell"),
        ("kill", "exitcode  : -9"),
        ("exit", "process 0 of 2: lost the connection to the other processes"),
    ],
)
def test_a_failing_process_ends_the_job(faulty: Path, fault: str, told: str) -> None:
    folder, began = faulty.parent, time.monotonic()
    ended = runs.run([*runs.TORCHRUN, "train", faulty], folder=folder, FAULT=fault, FAULTY_RANK="1")
    assert time.monotonic() - began < 60
    assert ended.code != 0
    assert told in ended.err
    if fault == "raise":
        assert 'faulty_task.py", line' in ended.err
        before, _, _ = ended.err.partition("the barometer fell")
        assert "lost the connection" not in before  # torchrun may end process 0 before it says so
    found = newest_checkpoint(folder / "run" / "checkpoints")
    assert found is not None
    assert found.state.step >= 2
    again = runs.run([*runs.TORCHRUN, "train", faulty], folder=folder, FAULT="none")
    assert again.code == 0, again.err
    assert f"resumed after step {found.state.step} " in again.err


@pytest.mark.slow
def test_a_hanging_process_ends_the_job_after_the_timeout(faulty: Path) -> None:
    command = [*runs.TORCHRUN, "train", faulty, "--dist-timeout", "8"]
    ended = runs.run(command, folder=faulty.parent, FAULT="hang", FAULTY_RANK="1")
    assert ended.code != 0
    assert "process 0 of 2: lost the connection to the other processes" in ended.err
    assert newest_checkpoint(faulty.parent / "run" / "checkpoints") is not None

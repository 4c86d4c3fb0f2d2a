"""One of two processes fails: the job ends soon, says which and why, and what was saved stays good."""

import time
from pathlib import Path

import pytest

from bert_tasks.training.checkpoints import newest_checkpoint
from support import runs

TRACEBACK = 'cli/entry.py", line'  # of a process; torchrun prints another one


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
        ("raise", "process 1 of 2: error: internal error ArithmeticError (the barometer fell)"),
        ("kill", "exitcode  : -9"),
        ("exit", "process 0 of 2: error: lost the connection to process 1, which failed first"),
    ],
)
def test_a_failing_process_ends_the_job(faulty: Path, fault: str, told: str) -> None:
    folder, began = faulty.parent, time.monotonic()
    ended = runs.run([*runs.TORCHRUN, "train", faulty], folder=folder, ROW_ERROR=fault, FAULTY_RANK="1")
    assert time.monotonic() - began < 60
    assert ended.code != 0
    assert told in ended.err
    assert ended.err.count(TRACEBACK) == (1 if fault == "raise" else 0)
    assert len([line for line in ended.err.splitlines() if "process 0 of 2: " in line]) <= 1
    if fault == "raise":
        assert 'faulty_task.py", line' in ended.err
        before, _, _ = ended.err.partition("the barometer fell")
        assert "lost the connection" not in before  # torchrun may end process 0 before it says so
    checkpoint = newest_checkpoint(folder / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.state.step >= 2


@pytest.mark.slow
def test_a_hanging_process_ends_the_job_after_the_timeout(faulty: Path) -> None:
    command = [*runs.TORCHRUN, "train", faulty, "--dist-timeout", "8"]
    ended = runs.run(command, folder=faulty.parent, ROW_ERROR="hang", FAULTY_RANK="1")
    assert ended.code != 0
    assert (
        "process 0 of 2: error: lost the connection to process 1, which failed first or does not respond" in ended.err
    )
    assert TRACEBACK not in ended.err
    assert newest_checkpoint(faulty.parent / "run" / "checkpoints") is not None

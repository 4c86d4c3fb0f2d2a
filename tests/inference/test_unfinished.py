"""Completed lines survive whatever ends an attempt, and any number of them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from bert_tasks.inference import WriteOptions
from bert_tasks.inference.sinks import LineEncoder, LineFile, unfinished_folder
from bert_tasks.model.task_model import TaskModel


@pytest.fixture(scope="module")
def encoder(model: TaskModel) -> LineEncoder:
    return LineEncoder(model, WriteOptions(), form="jsonl", renames={})


def opened(output: Path, encoder: LineEncoder, *, batch_rows: int = 1) -> LineFile:
    return LineFile(output, encoder, metadata={"input": "x"}, batch_rows=batch_rows, total=9)


def interrupted(output: Path, encoder: LineEncoder, lines: Sequence[bytes], *, on_disk: int) -> int:
    """Writes lines in an attempt that is interrupted once the disk holds a number of lines.

    Looks at the disk while the attempt goes on, as a kill would find it.
    """
    resumed = -1
    with suppress(KeyboardInterrupt), opened(output, encoder) as partial:
        resumed = partial.completed
        for line in lines:
            partial.append(line)
        assert partial.lines.read_bytes().count(b"\n") == on_disk
        raise KeyboardInterrupt
    return resumed


def test_an_attempt_that_ends_before_its_first_line_loses_none(encoder: LineEncoder, tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    assert interrupted(output, encoder, [b"0\n", b"1\n"], on_disk=2) == 0
    assert interrupted(output, encoder, [], on_disk=2) == 2
    assert interrupted(output, encoder, [b"2\n", b"3"], on_disk=3) == 2
    with opened(output, encoder, batch_rows=2) as partial:  # no incomplete line and no incomplete batch counts
        assert partial.completed == 2
        assert partial.lines.read_bytes() == b"0\n1\n"
    assert not unfinished_folder(output).exists()

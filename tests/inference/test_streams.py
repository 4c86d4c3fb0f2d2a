"""Rows that come one by one are answered soon, however steadily others follow."""

import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.options import ReadOptions
from bert_tasks.inference import WriteOptions, Written, streams
from bert_tasks.inference.prediction import PredictionRun
from bert_tasks.inference.predictor import Predictor
from bert_tasks.inference.writing import OutputDestination
from bert_tasks.model.task_model import TaskModel

ROWS = 60


class Counting(io.BytesIO):
    """The number of lines of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def write(self, lines: Any) -> int:
        self.rows.append(bytes(lines).count(b"\n"))
        return len(lines)


def stream(model: TaskModel, source: Path, out: io.BytesIO, *, explain: bool = False) -> Written:
    writing = WriteOptions()
    predictor = Predictor(model, explain=explain)
    run = PredictionRun(predictor, OutputDestination(out, "-", writing, None), writing)
    with source.open("rb") as file:
        return run.predict_stream(file, ReadOptions(format="jsonl"))


def test_a_steady_stream_is_not_held_back(model: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PATIENCE", 0.005)
    os.mkfifo(tmp_path / "pipe")

    def feed() -> None:
        with (tmp_path / "pipe").open("w") as file:
            for number in range(ROWS):
                file.write(f'{{"text": "{"home " * 40 if number % 3 == 0 else number}"}}\n')
                file.flush()
                time.sleep(0.01)

    threading.Thread(target=feed, daemon=True).start()
    out = Counting()
    done = stream(model, tmp_path / "pipe", out)
    assert done.rows == sum(out.rows) == ROWS
    assert done.truncated == ROWS // 3
    assert len(out.rows) > 1


def test_rows_are_answered_before_the_next_one_is_waited_for(model: TaskModel, tmp_path: Path) -> None:
    """The source waits for each answer before it sends another row."""
    os.mkfifo(tmp_path / "pipe")
    answered, out = threading.Semaphore(0), Counting()
    write, told = out.write, list[int]()

    def feed() -> None:
        with (tmp_path / "pipe").open("w") as file:
            for number in range(3):
                file.write(f'{{"text": "a{number}"}}\n')
                file.flush()
                told.append(answered.acquire(timeout=30))

    out.write = lambda lines: (write(lines), answered.release())[0]  # type: ignore[method-assign]
    threading.Thread(target=feed, daemon=True).start()
    assert stream(model, tmp_path / "pipe", out).rows == 3
    assert out.rows == [1, 1, 1]
    assert told == [True] * 3


def test_explained_rows_are_written_in_small_parts(model: TaskModel, tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", Counting()
    path.write_text('{"text": "home"}\n' * 40)
    stream(model, path, out, explain=True)
    assert sum(out.rows) == 40
    assert max(out.rows) <= 32


def test_what_fails_later_is_not_told_as_a_failure_to_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cache_folder", lambda *_: tmp_path)
    (tmp_path / "in").write_text("{}\n")
    with (
        (tmp_path / "in").open("rb") as source,
        pytest.raises(OSError, match="later"),
        streams.stored_input(source),
    ):
        raise OSError("later")

"""Rows that come one by one are answered soon, however steadily others follow."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.readers import ReadOptions
from bert_tasks.inference import streams
from bert_tasks.inference.output import Predictor, StreamWriter, WriteOptions
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.small_checkpoints import save_checkpoint

ROWS = 60


class Counting(StreamWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, lines: bytes) -> None:
        self.rows.append(lines.count(b"\n"))


@pytest.fixture
def work(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Predictor:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer)
    task = SequenceClassification(labels=("calm", "glad"), max_length=16)
    return Predictor(model=TaskModel.from_pretrained(tmp_path / "base", task=task), run=None, writing=WriteOptions())


def test_a_steady_stream_is_not_held_back(work: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")

    def feed() -> None:
        with (tmp_path / "pipe").open("w") as file:
            for number in range(ROWS):
                file.write(f'{{"text": "{"home " * 40 if number % 3 == 0 else number}"}}\n')
                file.flush()
                time.sleep(0.01)

    threading.Thread(target=feed, daemon=True).start()
    out = Counting()
    done = streams.predict_stream(work, ReadOptions(format="jsonl"), out, None, tmp_path / "pipe")
    assert done.rows == sum(out.rows) == ROWS
    assert done.truncated == ROWS // 3
    assert len(out.rows) > 1


def test_explained_rows_are_written_in_small_parts(work: Predictor, tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", Counting()
    path.write_text('{"text": "home"}\n' * 40)
    asked = replace(work, writing=WriteOptions(explain=True))
    streams.predict_stream(asked, ReadOptions(format="jsonl"), out, None, path)
    assert sum(out.rows) == 40
    assert max(out.rows) <= 32


def test_inputs_left_by_killed_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cache_folder", lambda *_: tmp_path)
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path in (old, new):
        path.write_text("{}\n")
    os.utime(old, (0, 0))
    with new.open("rb") as source, streams.stored_input(source, "jsonl") as path:
        assert path.read_text() == "{}\n"
    assert list(tmp_path.iterdir()) == [new]


def test_what_fails_later_is_not_told_as_a_failure_to_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cache_folder", lambda *_: tmp_path)
    (tmp_path / "in").write_text("{}\n")
    with (
        (tmp_path / "in").open("rb") as source,
        pytest.raises(OSError, match="later"),
        streams.stored_input(source, "jsonl"),
    ):
        raise OSError("later")

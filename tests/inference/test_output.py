"""Where an output may go, and what is refused before a model is loaded."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import ReadOptions, WriteOptions, predict_file
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SpanExtraction

LINE = '{"text": "a ferry", "i": 1, "id": 2}\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "new.jsonl"
    path.write_text(LINE)
    return path


def test_a_pipe_is_not_replaced_by_a_file(data: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="is a device or a pipe"):
        predict_file("no model", data, tmp_path / "pipe.jsonl")
    assert (tmp_path / "pipe.jsonl").is_fifo()


def test_rejects_go_to_a_pipe(model: TaskModel, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(LINE + "[1]\n")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writing = WriteOptions(on_error="skip", rejects=str(tmp_path / "pipe"))
    assert predict_file(model, tmp_path / "bad.jsonl", tmp_path / "a.jsonl", writing=writing).rows == 1
    assert json.loads(os.read(reader, 10_000))["line"] == 2
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_its_file_is_written(model: TaskModel, data: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
        predict_file(model, data, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "elsewhere" / name).stat().st_size > 0


def test_files_beside_the_output_are_not_the_input(base: Path, tmp_path: Path) -> None:
    reader = TaskModel.from_pretrained(base, task=SpanExtraction.of(max_length=32, max_query_length=8, doc_stride=4))
    content = '{"question": "a", "context": "b c"}'
    (tmp_path / "x.nbest.json").write_text(content)
    with pytest.raises(UsageError, match=r"x\.nbest\.json is both nbest\.json of the output and input"):
        predict_file(reader, tmp_path / "x.nbest.json", tmp_path / "x.json", reading=ReadOptions(format="jsonl"))
    assert (tmp_path / "x.nbest.json").read_text() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reading": {"delimiter": ";"}}, r"reading is .*, expected ReadOptions\(\.\.\.\)"),
        ({"writing": {"keep_columns": "none"}}, r"writing is .*, expected WriteOptions\(\.\.\.\)"),
        # Else the letters of a text would be looked for, here the columns i and d.
        (
            {"writing": WriteOptions(keep_columns="id")},
            "keep_columns is 'id', expected 'all', 'none' or a list of names",
        ),
        ({"writing": WriteOptions(keep_columns=None)}, "keep_columns is None, expected 'all', 'none' or a list"),  # type: ignore[arg-type]
    ],
)
def test_options_of_another_type(options: dict[str, Any], message: str, data: Path) -> None:
    with pytest.raises(UsageError, match=message):
        predict_file("no model", data, io.BytesIO(), **options)

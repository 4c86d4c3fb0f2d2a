"""Every use of the model of a run that is not finished says so."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_tasks import Encoder, TaskModel, evaluate, predict
from bert_tasks.errors import StoppedError
from bert_tasks.export import export
from bert_tasks.inference import embed_file
from bert_tasks.serving.server import load_served
from support import stopped_runs
from support.sampling import slow_except
from support.task_examples import EXAMPLES

ROWS = list(EXAMPLES["single"].rows)
NOTE = "the run is not finished (its last checkpoint is of step 4 of 6). This is its best model so far"

USES: dict[str, Callable[[Path, Path], object]] = {
    "predict": lambda run, _: predict(run, ["a text"]),
    "predict with the model's folder": lambda run, _: predict(run / "model", ["a text"]),
    "evaluate": lambda run, _: evaluate(run, ROWS),
    "embed": lambda run, folder: embed_file(run, ["a text"], folder / "out.jsonl"),
    "embed in memory": lambda run, _: Encoder.from_pretrained(run).embed("a text"),
    "export": lambda run, folder: export(run, to="transformers", output=folder / "exported"),
    "serve": lambda run, _: load_served(run, {}, task=None, settings={}, revision=None, dtype="float32"),
    "train further": lambda run, _: TaskModel.from_pretrained(run),
}


@pytest.fixture(scope="module")
def stopped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    error = stopped_runs.stopped(4, folder, checkpoint, eval_steps=2)
    assert isinstance(error, StoppedError)
    return folder


@pytest.mark.parametrize("use", slow_except(list(USES), "predict", "evaluate", "embed", "train further"))
def test_every_use_says_that_the_run_is_not_finished(
    use: str, stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    USES[use](stopped, tmp_path)
    notes = [record.getMessage() for record in caplog.records if NOTE in record.getMessage()]
    assert len(notes) == 1
    assert all(record.levelno == logging.WARNING for record in caplog.records if NOTE in record.getMessage())


def test_a_finished_run_and_a_copied_model_say_nothing(
    stopped: Path, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TaskModel.from_pretrained(stopped).save_pretrained(tmp_path / "copy")
    stopped_runs.run(tmp_path / "run", checkpoint)
    caplog.clear()
    predict(tmp_path / "copy", ["a text"])
    predict(tmp_path / "run", ["a text"])
    assert caplog.text == ""


def test_a_damaged_description_of_the_run_does_not_hide_its_model(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (stopped / "run.json").read_bytes()
    (stopped / "run.json").write_text("{")
    try:
        assert len(predict(stopped, ["a text"])) == 1
    finally:
        (stopped / "run.json").write_bytes(content)
    assert "the run is not finished. This is its best model so far" in caplog.text

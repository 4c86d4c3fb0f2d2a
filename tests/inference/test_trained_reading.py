"""How the training file was read applies to later files with its extension, unless the caller says otherwise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bert_tasks import Encoder, TaskModel, evaluate, fit, predict
from bert_tasks.cli.app import app
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.inference import embed_file, predict_file
from bert_tasks.report import make_report
from support.small_checkpoints import edit_config
from support.training_runs import make_rows

READING: dict[str, Any] = {"columns": {"text": "0", "label": "1"}, "delimiter": ";", "encoding": "latin-1"}
READING |= {"header": False}
EXPECTED = TrainedReading(extension=".tsv", delimiter=";", encoding="latin-1", header=False, on_error="skip")
NOTE = "read as the training file was, with delimiter = ';', encoding = 'latin-1', header = False"


def write(path: Path, count: int, *, seed: int = 0, bad: bool = True) -> Path:
    lines = [f"sch\xf6n {row['text']};{row['label']}" for row in make_rows(count, seed=seed)]
    lines += ["no label;"] if bad else []
    path.write_text("\n".join(lines) + "\n", "latin-1")
    return path


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on an unusual file from Python, saved and copied."""
    home = tmp_path_factory.mktemp("trained")
    model = TaskModel.from_pretrained(base, task="sequence-classification", max_length=16)
    file = write(home / "train.tsv", 12)
    fit(model, file, file, output_dir=home / "run", on_error="skip", epochs=1, progress=False, **READING)
    model.save_pretrained(home / "saved")
    return shutil.copytree(home / "saved", home / "copied")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "dev.tsv", 6, seed=3)


def test_a_saved_model_knows_how_its_training_file_was_read(folder: Path, tmp_path: Path) -> None:
    assert TaskModel.from_pretrained(folder).reading == EXPECTED
    assert TaskModel.from_pretrained(folder.parent / "run").reading == EXPECTED
    assert Encoder.from_pretrained(folder).reading == EXPECTED


def lines_of(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


USES: dict[str, Callable[[Path, Path, Path], object]] = {
    "evaluate": lambda model, data, _: evaluate(model, data, on_error="skip"),
    "predict": lambda model, data, _: len(predict(model, data)),
    "predict_file": lambda model, data, output: predict_file(model, data, output).rows,
    "embed": lambda model, data, output: embed_file(model, data, output).rows,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_reads_a_file_as_in_training(
    use: str, folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = USES[use](folder, data, tmp_path / "out.jsonl")
    assert f"{data}: {NOTE}" in caplog.text
    if use != "evaluate":
        assert result == 7
    copied = data.rename(data.with_suffix(".csv"))  # another extension than the training file's
    caplog.clear()
    with pytest.raises(DataError):
        USES[use](folder, copied, tmp_path / "other.jsonl")
    assert NOTE not in caplog.text


def test_report_and_export_read_a_file_as_in_training(folder: Path, data: Path, tmp_path: Path) -> None:
    report = make_report(folder.parent / "run", tmp_path / "report.html", data=data, mistakes=tmp_path / "wrong.csv")
    assert report.on_file is not None
    assert report.on_file.metrics == evaluate(folder, data)
    assert report.on_file.label_column == "1"
    with pytest.raises(DataError, match="missing label"):
        make_report(folder.parent / "run", tmp_path / "report.html", data=data, on_error="fail")
    with pytest.raises(UsageError, match="on_error: this says how a file is read"):
        make_report(folder.parent / "run", tmp_path / "report.html", on_error="skip")


def test_rows_that_cannot_be_used_are_left_out_as_in_training(
    folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = evaluate(folder, data)
    assert metrics == evaluate(folder, write(tmp_path / "good.tsv", 6, seed=3, bad=False))
    assert f"{data}: 1 of 7 rows cannot be used and were left out (line 7)" in caplog.text
    with pytest.raises(DataError, match="or pass on_error='skip' to leave such rows out"):
        evaluate(folder, data, on_error="fail")
    with pytest.raises(UsageError, match="on_error is 'retry'"):
        evaluate(folder, data, on_error="retry")  # type: ignore[arg-type]  # a value that a caller without types may pass
    model = TaskModel.from_pretrained(folder)
    model.reading = TrainedReading()
    with pytest.raises(DataError, match="missing label"):
        evaluate(model, data, **READING)
    assert evaluate(model, data, on_error="skip", **READING) == metrics


def test_the_command_line_reads_as_in_training(folder: Path, data: Path) -> None:
    run = CliRunner().invoke(app, ["evaluate", str(folder), str(data), "--json"])
    assert json.loads(run.stdout) == evaluate(folder, data)
    failed = CliRunner().invoke(app, ["evaluate", str(folder), str(data), "--on-error", "fail"])
    assert isinstance(failed.exception, DataError)


def test_a_caller_may_read_otherwise(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.tsv"
    path.write_text("".join(f"{row['text']}\t{row['label']}\n" for row in make_rows(6)), "utf-8")
    other = evaluate(folder, path, delimiter="\t", encoding="utf-8")  # the header is still as in training
    path.write_text("0\t1\n" + path.read_text("utf-8"), "utf-8")
    assert evaluate(folder, path, delimiter="\t", encoding="utf-8", header=True) == other
    assert evaluate(folder, path, format="tsv") == other  # another format has other options


def test_usual_options_are_not_stored(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = TaskModel.from_pretrained(base, task="sequence-classification", max_length=16)
    file = tmp_path / "train.csv"
    file.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in make_rows(6)), "utf-8")
    options: dict[str, Any] = {"output_dir": tmp_path / "run", "epochs": 1, "progress": False}
    fit(model, file, file, format="csv", header=True, label_separator=";", **options)
    assert model.reading == TrainedReading(extension=".csv")
    evaluate(model, file)
    assert "read as the training file" not in caplog.text


def test_a_format_that_is_not_registered_is_named(folder: Path, data: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(folder, tmp_path / "changed")
    entry = json.loads((folder / "config.json").read_text("utf-8"))["bert_tasks"]
    entry["reading"] |= {"format": "runes"}
    edit_config(changed, bert_tasks=entry)
    with pytest.raises(CheckpointError, match="had the format 'runes', which is not registered here"):
        evaluate(changed, data)
    assert len(predict(changed, ["a text"])) == 1

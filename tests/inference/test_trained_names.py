"""A run's folder as a model, which knows the names of its training data's columns."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bert_tasks import (
    Encoder,
    TaskModel,
    evaluate,
    load_recipe,
    predict,
    train,
)
from bert_tasks.cli.app import app
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.inference import predict_file
from bert_tasks.model.pretrained import saved_config
from support.small_checkpoints import edit_config
from support.training_runs import make_rows

NAMES = {"text": "Bewertung", "label": "Urteil"}


def write(path: Path, rows: list[dict[str, str]], *, delimiter: str = ",", encoding: str = "utf-8") -> Path:
    lines = [delimiter.join(["Bewertung", "Urteil"])]
    lines += [delimiter.join([f"schön {row['text']}", row["label"]]) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding)
    return path


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run on a file with other columns, delimiter and encoding than usual."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "train.csv", make_rows(12), delimiter=";", encoding="latin-1")
    (folder / "recipe.toml").write_text(
        f'task = "sequence-classification"\n[model]\nname = "{base}"\n[settings]\nmax_length = 16\n'
        '[data]\ntrain = "train.csv"\nvalidation = "train.csv"\ndelimiter = ";"\nencoding = "latin-1"\n'
        '[data.columns]\ntext = "Bewertung"\nlabel = "Urteil"\n'
        '[optim]\nepochs = 1\n[run]\noutput_dir = "first"\n',
        "utf-8",
    )
    train(load_recipe(folder / "recipe.toml"), progress=False)
    return folder / "first"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "new.csv", make_rows(6, seed=3), delimiter=";", encoding="latin-1")


def contents(predictions: Any) -> list[dict[str, Any]]:
    return [prediction.to_json() for prediction in predictions]


def test_evaluate_and_predict_need_no_options_again(run: Path, data: Path) -> None:
    plain = TaskModel.from_pretrained(run / "model")
    plain.columns, plain.reading = {}, TrainedReading()
    with pytest.raises(DataError):
        evaluate(plain, data)
    options: dict[str, Any] = {"columns": NAMES, "delimiter": ";", "encoding": "latin-1"}
    assert evaluate(run, data) == evaluate(plain, data, **options)
    assert contents(predict(run, data)) == contents(predict(plain, data, **options))


def test_options_of_the_caller_take_precedence(run: Path, data: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.csv", make_rows(6, seed=3))
    with pytest.raises(DataError, match="there is only one column"):
        predict(run, other)
    assert predict(run, other, delimiter=",", encoding="utf-8") == predict(run, data)


def test_the_file_that_is_written_keeps_its_columns(run: Path, data: Path, tmp_path: Path) -> None:
    assert predict_file(run, data, tmp_path / "out.jsonl").rows == 6
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert list(rows[0]) == ["Bewertung", "Urteil", "label", "score", "scores"]
    assert rows[0]["Bewertung"].startswith("schön ")


def test_files_of_other_kinds_and_with_the_tasks_names_are_read_too(run: Path, data: Path, tmp_path: Path) -> None:
    expected = contents(predict(run, data))
    texts = [line.rpartition(";")[0] for line in data.read_text("latin-1").splitlines()[1:]]
    tsv = tmp_path / "new.tsv"
    tsv.write_text("\n".join(["id\tBewertung", *(f"1\t{text}" for text in texts)]), "utf-8")
    jsonl = tmp_path / "new.jsonl"
    jsonl.write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    assert contents(predict(run, tsv)) == contents(predict(run, jsonl)) == expected
    path = tmp_path / "other.csv"
    path.write_text("\n".join(["Bewertung;text", *(f"x;{text}" for text in texts)]), "latin-1")
    assert contents(predict(run, path, columns={"text": "text"})) == expected


def test_rows_may_have_the_names_of_the_training_data(run: Path) -> None:
    model = TaskModel.from_pretrained(run)
    rows = make_rows(4)
    expected = contents(model.predict([{"text": row["text"]} for row in rows]))
    renamed = [{"Bewertung": row["text"], "Urteil": row["label"]} for row in rows]
    assert contents(model.predict(renamed)) == contents(predict(model, renamed)) == expected
    assert evaluate(model, renamed) == evaluate(model, rows)
    assert contents(model.predict([{"text": row["text"], "Bewertung": "x"} for row in rows])) == expected
    other = [{"text": "x", "body": row["text"]} for row in rows]
    assert contents(predict(model, other, columns={"text": "body"})) == expected
    with pytest.raises(DataError, match=r"missing text in column 'text'. The row has 'Text'"):
        model.predict([{"Text": "x"}])


def test_saved_loaded_and_trained_again(run: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(run)
    assert model.columns == NAMES
    model.save_pretrained(tmp_path / "copy")
    entry = saved_config(model.hf_config, model.head_tasks, model.reading)["bert_tasks"]
    edit_config(tmp_path / "copy", bert_tasks={**entry, "reading": {"columns": NAMES, "delimiter": ";"}})
    assert TaskModel.from_pretrained(tmp_path / "copy").columns == NAMES
    edit_config(tmp_path / "copy", bert_tasks={**entry, "reading": {"columns": {"text": 3}}})
    with pytest.raises(CheckpointError, match=r"key bert_tasks: reading\.columns must name columns"):
        TaskModel.from_pretrained(tmp_path / "copy")


def test_the_command_line_takes_the_folder_of_a_run(run: Path, data: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["evaluate", str(run), str(data), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == evaluate(run / "model", data)
    inspected = [runner.invoke(app, ["inspect", str(folder), "--json"]) for folder in (run, run / "model")]
    assert {result.exit_code for result in inspected} == {0}
    pushed = runner.invoke(app, ["push", str(run), "me/model", "--dry-run", "--json"])
    assert json.loads(pushed.stdout)["folder"] == str(run / "model")
    assert Encoder.from_pretrained(run).config == Encoder.from_pretrained(run / "model").config


def test_a_folder_of_seeds_is_not_guessed_from(run: Path, tmp_path: Path, data: Path) -> None:
    runs = tmp_path / "seeds"
    (runs / "seed-2").mkdir(parents=True)
    (runs / "seed-1").symlink_to(run)
    commands = {
        "inspect": [],
        "evaluate": [str(data)],
        "predict": [str(data), "--output", str(tmp_path / "out.csv")],
        "push": ["me/model", "--dry-run"],
        "export": ["--to", "onnx", "--output", str(tmp_path / "onnx")],
    }
    for command, options in commands.items():
        shown = CliRunner().invoke(app, [command, str(runs), *options])
        assert isinstance(shown.exception, CheckpointError), shown.output
        assert f"Name one of them, such as {runs}/seed-1" in str(shown.exception)


@pytest.mark.slow  # exports a graph
def test_exported_folders_remember_too(run: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from bert_tasks.export import export

    export(run, to="onnx", output=tmp_path / "onnx", data=data)
    assert [prediction["label"] for prediction in contents(predict(tmp_path / "onnx", data))] == [
        prediction["label"] for prediction in contents(predict(run, data))
    ]

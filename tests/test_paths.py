"""Paths that cannot be examined, disks that are full: every command ends with one line that names the file."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from bert_tasks import (
    Encoder,
    MultiTaskModel,
    TaskModel,
    WriteOptions,
    batch_predictor,
    evaluate,
    fit,
    load_recipe,
    predict,
    predict_file,
    train,
)
from bert_tasks.cards.card import write_card
from bert_tasks.cards.push import push
from bert_tasks.checkpoints.tokenizer_training import train_tokenizer
from bert_tasks.cli import main
from bert_tasks.errors import BertTasksError
from bert_tasks.export import export
from bert_tasks.init import init_recipe
from bert_tasks.report import make_report
from bert_tasks.storage import os_error_message
from support.small_checkpoints import save_checkpoint

COMMANDS = {
    "train": ("train", "PATH"),
    "train to": ("train", "recipe.toml", "--output-dir", "PATH"),
    "train on": ("train", "recipe.toml", "--set", "data.train=PATH"),
    "check": ("check", "recipe.toml", "--set", "data.dir=PATH"),
    "init": ("init", "PATH", "--output", "new.toml"),
    "init to": ("init", "train.csv", "--output", "PATH/recipe.toml"),
    "init with": ("init", "train.csv", "--output", "new.toml", "--model", "PATH"),
    "inspect": ("inspect", "PATH"),
    "evaluate": ("evaluate", "PATH", "train.csv"),
    "predict": ("predict", "PATH", "train.csv"),
    "predict to": ("predict", "model", "train.csv", "--output", "PATH/out.csv"),
    "predict from": ("predict", "model", "PATH", "--output", "out.csv"),
    "report": ("report", "PATH"),
    "export": ("export", "model", "--to", "onnx", "--output", "PATH"),
    "push": ("push", "PATH", "me/x"),
    "search": ("search", "PATH"),
    "search to": (
        "search",
        "recipe.toml",
        "--set",
        "search.epochs.low=1",
        "--set",
        "search.epochs.high=2",
        "--output-dir",
        "PATH",
    ),
    "serve": ("serve", "PATH"),
    "predict glue": ("predict", "PATH", "--format", "glue", "--output", "submission"),
}
RECIPE = """\
task = "sequence-classification"
[model]
name = "google-bert/bert-base-uncased"
[settings]
[data]
train = "train.csv"
validation = "train.csv"
[run]
output_dir = "run"
"""
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Calls a command in a folder with a recipe and rows; gives its exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("recipe.toml").write_text(RECIPE)
    Path("train.csv").write_text(
        "text,label\n" + "".join(f"film {n} is fine,good\nfilm {n} is dull,bad\n" for n in range(9))
    )

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bert-tasks", *arguments])
        try:
            main()
        except SystemExit as end:
            return (end.code if isinstance(end.code, int) else 1), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


def long_name(folder: Path) -> Path:
    return folder / ("n" * 300)


def long_path(folder: Path) -> Path:
    return folder / "/".join(["n" * 200] * 30)


# Every command with one of the two paths; the other half of the product is slow.
HOSTILE = [
    pytest.param(command, make, id=f"{command}-{make.__name__}", marks=[pytest.mark.slow] if is_second else [])
    for number, command in enumerate(COMMANDS)
    for make, is_second in ((long_name, number % 2 == 1), (long_path, number % 2 == 0))
]


@pytest.mark.parametrize(("command", "make"), HOSTILE)
def test_command_names_a_path_that_cannot_be_examined(
    command: str, make: Callable[[Path], Path], call: Call, tmp_path: Path
) -> None:
    path = str(make(tmp_path))
    code, message = call(*(argument.replace("PATH", path) for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message
    assert _shown(path[:100], tmp_path) in message.replace("\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_names_a_folder_that_may_not_be_searched(
    command: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "private" / "x")
    _forbid(monkeypatch, path)
    code, message = call(*(argument.replace("PATH", path) for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message
    assert _shown(path, tmp_path) in message.replace("\n", "")


def _shown(path: str, folder: Path) -> str:
    """Returns a path below the current folder as messages show it."""
    return path.removeprefix(f"{folder}{os.sep}")


def _forbid(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    """Permissions do not bind root: the calls that look at the path fail as they do for other users."""

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *rest: object, **options: object) -> object:
            if isinstance(path, str | os.PathLike) and str(path).startswith(forbidden):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *rest, **options)

        return call

    for name in ("stat", "lstat", "open", "mkdir", "scandir", "listdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr("io.open", failing(open))


@pytest.mark.parametrize("command", ["train to", "train on", "check"])
def test_recipe_with_nul_in_a_path_is_refused(command: str, call: Call) -> None:
    code, message = call(*(argument.replace("PATH", '"a\\u0000b"') for argument in COMMANDS[command]))
    assert code in (2, 3, 4), message
    assert "internal error" not in message


@given(name=st.none() | st.text(max_size=60), number=st.sampled_from([errno.ENOSPC, errno.EACCES, errno.EIO]))
def test_message_of_the_system_is_one_line(name: str | None, number: int) -> None:
    message = os_error_message(OSError(number, os.strerror(number), name))
    assert message.isprintable()
    assert message.endswith(os.strerror(number))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error", "rows.csv"), "error: rows.csv: Input/output error\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a", None, "b"), "error: a -> b: No space left on device\n"),
        (OSError(errno.EMFILE, "Too many open files"), "error: Too many open files\n"),
        (OSError("Can't load it.\nMore"), "error: Can't load it.\n"),
    ],
)
def test_error_of_the_system_ends_in_one_line(
    error: OSError, expected: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("bert_tasks.recipe.schema.load_recipe", fail)
    assert call("check", "recipe.toml") == (2, expected)


LONG, NULL, SURROGATE = "x" * 5000, "a\0b", "a\ud800b"
ROWS = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 4


def api_calls(path: str, model: TaskModel) -> dict[str, Callable[[], object]]:
    """Every function of the package that takes a path."""
    return {
        "train": lambda: train(path),
        "load_recipe": lambda: load_recipe(path),
        "TaskModel": lambda: TaskModel.from_pretrained(path),
        "Encoder": lambda: Encoder.from_pretrained(path),
        "MultiTaskModel": lambda: MultiTaskModel.from_pretrained(path),
        "save_pretrained": lambda: model.save_pretrained(path),
        "fit rows": lambda: fit(model, path, output_dir="out"),
        "fit validation": lambda: fit(model, ROWS, path, output_dir="out"),
        "fit folder": lambda: fit(model, ROWS, ROWS, output_dir=path, progress=False),
        "evaluate model": lambda: evaluate(path, ROWS),
        "evaluate data": lambda: evaluate(model, path),
        "evaluate adapter": lambda: evaluate("base", ROWS, task="sequence-classification", adapter=path),
        "predict model": lambda: predict(path, ROWS),
        "predict data": lambda: predict(model, path),
        "predict data to a file": lambda: predict_file(model, path, "out.jsonl"),
        "predict output": lambda: predict_file(model, ROWS, f"{path}.jsonl"),
        "predict rejects": lambda: predict_file(
            model, "rows.csv", "o.csv", writing=WriteOptions(on_error="skip", rejects=path)
        ),
        "batch_predictor": lambda: batch_predictor(path),
        "export": lambda: export(model, to="transformers", output=path),
        "export graph": lambda: export(model, to="onnx", output=path),
        "export model": lambda: export(path, to="onnx", output="out"),
        "make_report": lambda: make_report(path),
        "make_report file": lambda: make_report("run", f"{path}.html"),
        "write_card": lambda: write_card(path),
        "push": lambda: push(path, "a/b", dry_run=True),
        "init_recipe": lambda: init_recipe(path),
        "init_recipe output": lambda: init_recipe("rows.csv", output=path),
        "train_tokenizer": lambda: train_tokenizer([path], "out", type="wordpiece", vocab_size=100),
        "train_tokenizer output": lambda: train_tokenizer(["rows.csv"], path, type="wordpiece", vocab_size=100),
    }


@pytest.mark.parametrize("path", [LONG, "y/" * 3000, NULL, SURROGATE], ids=["name", "path", "null", "surrogate"])
def test_functions_refuse_paths_that_no_file_has(
    path: str, wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer)
    monkeypatch.chdir(tmp_path)
    model = TaskModel.from_pretrained("base", task="sequence-classification", labels=["good", "bad"], max_length=16)
    Path("rows.csv").write_text("text,label\na,good\nb,bad\n", "utf-8")
    for name, call in api_calls(path, model).items():
        with pytest.raises(BertTasksError) as refused:
            call()
        assert refused.value.exit_code in (2, 3, 4), name
        assert len(str(refused.value)) < 500, name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "rows.csv"]

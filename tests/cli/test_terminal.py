"""Whatever labels, columns, tensors, files and arguments are called, no command acts on the terminal."""

import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from bert_tasks.cli import main
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.small_checkpoints import edit_config, save_checkpoint
from support.small_tokenizers import LINES
from support.terminal_characters import acting

SEQUENCES = ("\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\x08\x08", "\u202egnp", "\u2066", "\x7f", "\u200b", "\ufeff")
HOSTILE = "".join(SEQUENCES)
LABELS = (f"calm{HOSTILE}", f"glad{HOSTILE}")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(scope="module")
def model(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("model")
    save_checkpoint(base, "albert", unigram_tokenizer)
    TaskModel.from_pretrained(base, task=SequenceClassification.of(labels=LABELS, max_length=32)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / f"data{HOSTILE}.jsonl"
    rows = [{"text": f"{line} {HOSTILE}", "label": LABELS[number % 2]} for number, line in enumerate(LINES * 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_labels_and_files(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    names = ("--text", "text", "--label", "label", "--model", model)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"text": "x", "label": f"other{HOSTILE}"}) + "\n", "utf-8")
    for arguments, expected in (
        (("init", data, *names, "--output", recipe), 0),
        (("init", data, *names, "--output", tmp_path / "second.toml", "--json"), 0),
        (("check", recipe), 0),
        (("check", recipe, "--json"), 0),
        (("evaluate", model, data), 0),
        (("evaluate", model, bad), 3),
        (("inspect", model, "--verbose"), 0),
        (("train", recipe, "--set", "optim.epochs=1", "--output-dir", tmp_path / f"run{HOSTILE}", "--no-report"), 0),
        (("train", tmp_path / f"no{HOSTILE}.toml"), 2),
        (("evaluate", model, tmp_path / f"no{HOSTILE}.csv"), 3),
        (("check", recipe, "--set", f"optim.{HOSTILE}=1"), 2),
        ((f"command{HOSTILE}",), 2),
        (("env", f"--option{HOSTILE}"), 2),
        (("evaluate", model, data, "--dtype", HOSTILE), 2),
    ):
        code, shown = run(capsys, monkeypatch, *arguments)
        assert code == expected, shown
        assert shown
        assert acting(shown) == set(), arguments


def test_tensors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, f"albert{HOSTILE}": next(iter(tensors.values())).clone()}, weights, metadata={"format": "pt"})
    for arguments in (("inspect", folder), ("inspect", folder, "--verbose"), ("inspect", folder, "--json")):
        _, shown = run(capsys, monkeypatch, *arguments)
        assert acting(shown) == set(), arguments
    edit_config(folder, model_type=f"bert{HOSTILE}")
    code, shown = run(capsys, monkeypatch, "inspect", folder)
    assert code == 4
    assert acting(shown) == set()


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="\0") | st.sampled_from(HOSTILE), min_size=1))
def test_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for arguments in ((text,), ("check", f"{text}.toml"), ("env", f"--{text}"), ("init", "--schema", "--task", text)):
        _, shown = run(capsys, monkeypatch, *arguments)
        assert acting(shown) == set(), arguments


def test_log_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        run(capsys, monkeypatch, "env")
        logging.getLogger("bert_tasks").warning("column %s", HOSTILE)
        handlers = root.handlers
    finally:
        root.handlers = before
    assert handlers
    record = logging.LogRecord("bert_tasks", logging.WARNING, "x.py", 1, "column %s", (HOSTILE,), None)
    assert acting(handlers[0].format(record)) == set()

"""Writers of folders that are killed in the middle: the same call works afterwards, and nothing else is left."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import Encoder, TaskModel, fit
from bert_tasks.checkpoints.tokenizer_training import train_tokenizer
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.export import export
from bert_tasks.model.exported import ExportedModel
from bert_tasks.training.checkpoints import RunState, newest_checkpoint, remove_checkpoints, save_checkpoint
from support import small_checkpoints
from support.task_examples import CLASSES, EXAMPLES

Write = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of a classifier, beside which are the run's adapters."""
    folder = tmp_path_factory.mktemp("model")
    small_checkpoints.save_checkpoint(folder / "base", "bert", wordpiece_tokenizer)
    trained = TaskModel.from_pretrained(folder / "base", task=EXAMPLES["single"].task)
    rows = list(CLASSES)
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 4, "lora_rank": 2, "save_adapter": True}
    fit(trained, rows, rows, output_dir=folder / "run", progress=False, **settings)
    return folder / "run" / "model"


@pytest.fixture(scope="module")
def opened(model: Path) -> TaskModel:
    return TaskModel.from_pretrained(model)


def save_run_state(target: Path) -> None:
    remove_checkpoints(target, only_leftovers=True)  # as a run does when it begins
    state = RunState(
        step=3,
        weights={"head.bias": torch.ones(3)},
        optimizer={"head.bias/step": torch.tensor(2.0)},
        progress={"course": {"best": {"f1": 0.5}}, "scaler": None},
    )
    save_checkpoint(target, state, metadata={"seed": 1}, best_step=3, keep_last=2)


def writer_and_reader(name: str, model: Path, opened: TaskModel, folder: Path) -> tuple[Write, Write]:
    """Returns what writes a folder, and what opens it."""
    match name:
        case "model":
            return opened.save_pretrained, TaskModel.from_pretrained
        case "encoder":
            return Encoder.from_pretrained(model).save_pretrained, Encoder.from_pretrained
        case "transformers":
            adapters = model.parent / "adapter"
            return lambda target: export(adapters, to="transformers", output=target), TaskModel.from_pretrained
        case "onnx":
            return lambda target: export(opened, to="onnx", output=target), ExportedModel.from_pretrained
        case "tokenizer":
            corpus = folder / "corpus.txt"
            corpus.write_text("a small film about the sea\n" * 20, "utf-8")
            options: dict[str, Any] = {"type": "wordpiece", "vocab_size": 60}
            return (
                lambda target: train_tokenizer([corpus], target, **options),
                lambda target: list((target / "tokenizer.json").read_text("utf-8")),
            )
        case _:
            return save_run_state, newest_checkpoint


def is_killed(write: Write, target: Path, function: str, number: int) -> bool:
    """Returns True if a process that writes was killed at its ``number``-th call of a function of ``os``."""
    process = os.fork()
    if process == 0:
        original, calls = getattr(os, function), 0

        def deadly(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, function, deadly)
        try:
            write(target)
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    "writer",
    [
        *("model", "encoder", "transformers", "tokenizer", "checkpoint"),
        pytest.param("onnx", marks=pytest.mark.slow),  # torch's exporter takes ten seconds
    ],
)
def test_a_writer_that_was_killed_writes_again(
    writer: str, function: str, model: Path, opened: TaskModel, tmp_path: Path
) -> None:
    write, read = writer_and_reader(writer, model, opened, tmp_path)
    target = tmp_path / "new" / "out"
    assert is_killed(write, target, function, 1)
    write(target)
    read(target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert [path.name for path in target.rglob("*") if path.name.startswith(".") or ".tmp-" in path.name] == []


# Four renames are those of files of the new folder, then the earlier folder makes room for it.
@pytest.mark.parametrize("number", [1, 5, 6, *(pytest.param(file, marks=pytest.mark.slow) for file in (2, 3, 4))])
def test_an_export_that_was_killed_while_it_replaces_another(number: int, opened: TaskModel, tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"

    def write(folder: Path) -> object:
        return export(opened, to="transformers", output=folder, overwrite=True)

    write(target)
    before = {path.name for path in target.iterdir()}
    assert is_killed(write, target, "replace", number)
    if target.exists():  # it is missing between the renames of two folders only
        assert {path.name for path in target.iterdir()} == before
    write(target)
    assert {path.name for path in target.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_weights_replace_exported_weights_only(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(model, to="transformers", output=target)
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        export(model, to="transformers", output=target)
    export(model, to="transformers", output=target, overwrite=True)
    (target / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match=r"has other files than those of an exported model \(notes\.txt\)"):
        export(model, to="transformers", output=target, overwrite=True)
    assert (target / "notes.txt").read_text("utf-8") == "mine"
    with pytest.raises(UsageError, match="is the model to export"):
        export(model, to="transformers", output=model, overwrite=True)
    with pytest.raises(UsageError, match="is the model to export"):
        export(model.parent, to="transformers", output=model, overwrite=True)


def test_a_failed_export_leaves_the_earlier_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    export(model, to="transformers", output=target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CheckpointError, match="cannot be written"):
            export(model, to="transformers", output=target, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

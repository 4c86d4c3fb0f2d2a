"""The page on troubleshooting shows the messages that the commands print."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_tasks.cli import entry
from bert_tasks.distributed import thread_hint
from support.documents import agrees, blocks

TRAIN = ("train", "recipes/quickstart.toml", "--quiet", "--set", "optim.max_steps=4", "--output-dir")
COMMANDS: dict[str, tuple[str, ...]] = {
    "The loss is NaN": (*TRAIN, "runs/nan", "--set", "optim.learning_rate=1e38"),
    "The model predicts one label": (*TRAIN, "runs/one", "--set", "optim.learning_rate=0.1"),
    "Unknown label": ("evaluate", "runs/first", "mis.csv"),
    "Missing column": ("evaluate", "runs/first", "col.csv"),
    "No model in the cache": ("inspect", "google-bert/bert-base-uncased"),
    "No tokenizer": ("predict", "notok", "mis.csv", "--output", "predictions.jsonl"),
    "The output folder exists": (*TRAIN, "full"),
    "The settings of a run changed": (*TRAIN, "runs/first", "--set", "optim.learning_rate=2e-5"),
    "A package is missing": (*TRAIN, "runs/tracked", "--set", 'run.trackers=["wandb"]'),
    "The folder is for another task": ("predict", "runs/first", "mis.csv", "--task", "ner", "--output", "p.jsonl"),
}
Call = Callable[..., str]


@pytest.fixture(scope="module")
def messages(repository: Path) -> dict[str, list[str]]:
    """The messages on the page by the heading of their section."""
    page = (repository / "docs" / "how_to" / "troubleshooting.md").read_text(encoding="utf-8")
    sections = [section.partition("\n") for section in page.split("\n## ")[1:]]
    texts = {heading: [block.text for block in blocks(text)] for heading, _, text in sections}
    return {heading: shown for heading, shown in texts.items() if shown}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Calls a command, and returns what it prints on standard error."""

    def call_command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bert-tasks", *arguments])
        with pytest.raises(SystemExit):
            entry.main()
        return capfd.readouterr().err

    return call_command


def test_every_message_is_tested(messages: dict[str, list[str]]) -> None:
    assert list(messages) == ["Out of memory", *list(COMMANDS)[:5], "Slow on a CPU", *list(COMMANDS)[5:]]
    counts = {heading: len(shown) for heading, shown in messages.items() if len(shown) > 1}
    assert counts == {"The output folder exists": 2}


def test_memory_and_threads(messages: dict[str, list[str]], call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str], *, standalone_mode: bool) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert messages["Slow on a CPU"] == [f"note: {thread_hint(2, 2, 2)}\n"]
    monkeypatch.setattr(entry, "app", fail)
    assert agrees(call("train"), messages["Out of memory"][0])


@pytest.mark.slow
def test_commands_print_the_messages(
    messages: dict[str, list[str]], call: Call, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(repository / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    Path("mis.csv").write_text("text,label\nGood room,prase\nBad soup,complaint\n")
    Path("col.csv").write_text("review,label\nGood room,praise\n")
    Path("full").mkdir()
    Path("full", "x").touch()
    call(*TRAIN, "runs/first")
    shutil.copytree("runs/first/model", "notok", ignore=shutil.ignore_patterns("tokenizer*"))
    for heading, command in COMMANDS.items():
        printed = call(*command)
        assert agrees(printed, messages[heading][0]), printed
    longer = call(*TRAIN, "runs/first", "--set", "optim.max_steps=8")
    assert agrees(longer, messages["The output folder exists"][1])

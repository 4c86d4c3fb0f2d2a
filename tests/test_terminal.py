"""Messages act on no terminal, and one that cannot be written is lost without a word, whatever the stream does."""

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bert_tasks.terminal import BestEffortStream, message_text, printable, printable_json, write_message
from bert_tasks.training.progress import Reporter
from bert_tasks.training.step import StepLog
from support.terminal_characters import acting

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x08\x9b31m\u202egnp.exe\u2066\x7f\udcff\u2028\ufeff\U000e0041\0"
TEXTS = st.text(st.characters() | st.sampled_from(HOSTILE))


@given(TEXTS)
def test_nothing_that_acts_is_left_and_the_rest_stays(text: str) -> None:
    shown = printable(text)
    assert not acting(shown)
    assert printable(shown) == shown
    expected = "".join(char.encode("unicode_escape").decode() if acting(char) else char for char in text)
    assert shown == expected


@pytest.mark.parametrize(
    "text", ["naïve café", "日本\u3000語", "मि\u200cत्र", "👩\u200d🔬", "1\u00a0000\u202f€", "a\tb\nc", "שלום"]
)
def test_words_of_all_scripts_are_left_alone(text: str) -> None:
    assert printable(text) == text
    assert printable_json(json.dumps(text, ensure_ascii=False)) == json.dumps(text, ensure_ascii=False)


@given(st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)), st.sampled_from([None, 2]))
def test_json_is_the_same_json(content: object, indent: int | None) -> None:
    text = printable_json(json.dumps(content, ensure_ascii=False, indent=indent))
    assert json.loads(text) == content
    assert not acting(text)
    assert printable(text) == text


def test_paths_below_the_current_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    (folder / "inner").mkdir(parents=True)
    monkeypatch.chdir(folder)
    texts = {
        f"model: {folder}/runs/x": "model: runs/x",
        f"{folder}/x.csv:2: no label ({folder}/y.csv)": "x.csv:2: no label (y.csv)",
        f"  bert-tasks serve '{folder}/runs/x'": "  bert-tasks serve 'runs/x'",
        # Paths that are not below the folder stay as they are.
        f"{folder}": f"{folder}",
        f"{folder}/ is full": f"{folder}/ is full",
        f"{folder}x/y": f"{folder}x/y",
        f"/mnt{folder}/y": f"/mnt{folder}/y",
        f"file://{folder}/y": f"file://{folder}/y",
        f"{tmp_path}/y": f"{tmp_path}/y",
    }
    assert {text: message_text(text) for text in texts} == texts
    assert message_text(f"{folder}/\x1b") == "\\x1b"
    monkeypatch.chdir("/")
    assert message_text("/tmp/x") == "/tmp/x"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert message_text(f"{gone}/x") == f"{gone}/x"


class Failing(io.StringIO):
    """A stream that fails after some characters, as a full disk, a closed pipe or a closed file does."""

    def __init__(self, error: Exception, room: int) -> None:
        super().__init__()
        self.error, self.room = error, room

    def write(self, text: str) -> int:
        if len(self.getvalue()) + len(text) > self.room:
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.room == 0:
            raise self.error


FAULTS = [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device"), ValueError("I/O on closed file")]


@pytest.mark.parametrize("error", FAULTS, ids=str)
@pytest.mark.parametrize("room", [0, 100])
def test_a_reporter_outlives_its_stream(error: Exception, room: int) -> None:
    stream = Failing(error, room)
    for is_terminal in (False, True):
        console = Console(file=BestEffortStream(stream), force_terminal=is_terminal, width=80)  # type: ignore[arg-type]
        reporter = Reporter(total_steps=9, logging_steps=1, console=console)
        for step in range(9):
            log = StepLog(step=step, loss=0.5, grad_norm=1.0, learning_rate=1e-5)
            reporter.step(log, epoch=0, tokens_per_second=1.0)
        reporter.evaluation(9, {"accuracy": 1.0}, best=True)
        reporter.note("note")
        reporter.close()
    assert len(stream.getvalue()) <= room


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@given(TEXTS)
def test_a_message_that_an_encoding_lacks_is_no_error(encoding: str, text: str) -> None:
    taken = io.BytesIO()
    stream = io.TextIOWrapper(taken, encoding=encoding, errors="strict", newline="")
    write_message(text, stream=stream)
    assert (len(taken.getvalue()) > len(text)) or (encoding, text.isascii()) == ("ascii", False)
    stream.detach()


def test_no_stream_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    write_message("nobody reads it")
    Reporter(total_steps=1, logging_steps=1).note("nor this")


@given(TEXTS)
def test_reporters_escape(text: str) -> None:
    for is_terminal in (False, True):
        stream = io.StringIO()
        reporter = Reporter(
            total_steps=1, logging_steps=1, console=Console(file=stream, width=10**6, force_terminal=is_terminal)
        )
        reporter.note(text)
        reporter.close()
        assert not acting(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())) - ({"\r"} if is_terminal else set())

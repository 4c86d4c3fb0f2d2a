"""Memory that is used up: exit code 4, what was done, and what to lower; never an internal error."""

import errno
import json
import struct
import sys
from pathlib import Path

import pytest
import torch

from bert_tasks.cli import entry
from support import runs

TORCH = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
SMALLER = "Choose a smaller model, or shorter texts (settings.max_length)."


def with_note(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "command", "said"),
    [
        (MemoryError(), "predict", f"error: out of memory. {SMALLER}\n"),
        (
            with_note(MemoryError(), "while a.csv was read"),
            "check",
            f"out of memory while a.csv was read. {SMALLER}",
        ),
        (RuntimeError(TORCH), "train", f"you tried to allocate 8 bytes). Lower optim.micro_batch_tokens. {SMALLER}"),
        (
            RuntimeError("not enough memory: 8 bytes"),
            "embed",
            "out of memory (not enough memory: ",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "search",
            "Lower optim.micro_batch_tokens.",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "serve", "Lower --batch-tokens."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "export", "error: out of memory ([Errno 12] Cannot allocate"),
    ],
)
def test_an_error_about_memory_ends_with_4(
    error: Exception, command: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str], *, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(entry, "app", fail)
    monkeypatch.setattr(sys, "argv", ["bert-tasks", command])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    shown = capfd.readouterr().err
    assert ended.value.code == 4
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_a_text_about_memory_in_another_error_stays_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str], *, standalone_mode: bool) -> None:
        raise KeyError("out of memory")

    monkeypatch.setattr(entry, "app", fail)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert (ended.value.code, "internal error KeyError" in capfd.readouterr().err) == (1, True)


@pytest.mark.slow
def test_weights_larger_than_the_address_space(tmp_path: Path) -> None:
    """A file with a hole, so that it takes no disk."""
    size = 10**10
    header = json.dumps({"a": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * size)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 9, **sizes}))
    script = f"ulimit -v 8000000; exec {runs.CONSOLE[0]} inspect {tmp_path}"
    ended = runs.run(["sh", "-c", script], folder=tmp_path)
    assert (ended.code, f"error: {tmp_path}: out of memory while the weights were read" in ended.err) == (4, True)
    assert len(ended.err.splitlines()) == 1

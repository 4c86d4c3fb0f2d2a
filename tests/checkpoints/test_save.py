"""Model folders as they are written: contents, modes, and what happens when writing fails."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.checkpoints import save
from bert_tasks.checkpoints.save import hf_tensors, read_head_tensors, save_folder
from bert_tasks.errors import CheckpointError

CONFIG = {"model_type": "bert", "_name_or_path": "/home/x", "torch_dtype": "float16", "id2label": {"0": "später"}}
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(2)}
HEAD = {"score.weight": torch.ones(1, 2)}


@pytest.fixture
def restore_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(folder: Path, **changes: Any) -> None:
    save_folder(folder, **{"config": CONFIG, "tensors": TENSORS, "tokenizer": None} | changes)


def test_tensors_are_split_under_their_names() -> None:
    qkv = torch.arange(24.0).reshape(6, 4)
    state = {"x.qkv.weight": qkv, "x.norm.weight": torch.nn.Parameter(torch.ones(3))}
    names = {"x.qkv.weight": ("bert.q", "bert.k", "bert.v"), "x.norm.weight": ("head.bert.norm",)}
    tensors = hf_tensors(state, names, strip_prefix="bert.")
    assert list(tensors) == ["q", "k", "v", "head.bert.norm"]
    assert torch.equal(torch.cat([tensors[name] for name in "qkv"]), qkv)
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.untyped_storage().data_ptr() in {weight.untyped_storage().data_ptr() for weight in state.values()}


def test_tied_and_transposed_tensors_are_copied(tmp_path: Path) -> None:
    """safetensors writes neither the same memory twice nor tensors that are not contiguous."""
    tied, square = torch.arange(6.0), torch.arange(4.0).reshape(2, 2)
    state = {"a": tied, "b": tied.view(2, 3), "c": tied[:2], "d": square.t(), "e": tied[1:]}
    write(tmp_path, tensors=hf_tensors(state, {name: (name,) for name in state}))
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["x.weight", "y.weight"])
def test_parameter_and_name_must_match(name: str) -> None:
    state: dict[str, Tensor] = {"x.weight": torch.ones(1)} if name == "x.weight" else {}
    names = {"y.weight": ("q",)} if name == "y.weight" else {}
    with pytest.raises(KeyError, match=name):
        hf_tensors(state, names)


def test_folder_holds_config_and_weights(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    write(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    text = (folder / "config.json").read_text("utf-8")
    expected = {"model_type": "bert", "id2label": {"0": "später"}, "dtype": "float32"}
    assert text == json.dumps(expected, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == TENSORS.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata().keys() == {"format", "tensors_sha256"}


@pytest.mark.usefixtures("restore_umask")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask(
    umask: int, mode: int, tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    os.umask(umask)
    write(tmp_path / "model", tokenizer=wordpiece_tokenizer, head_tensors=HEAD)
    files = list((tmp_path / "model").iterdir())
    assert len(files) == 5
    assert {oct(stat.S_IMODE(file.stat().st_mode)) for file in files} == {oct(mode)}


def test_head_tensors_come_back(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_head_tensors(tmp_path) is None
    write(tmp_path, head_tensors=HEAD)
    tensors = read_head_tensors(tmp_path)
    assert tensors is not None
    assert torch.equal(tensors["score.weight"], HEAD["score.weight"])
    (tmp_path / "task_head.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"task_head\.safetensors: empty"):
        read_head_tensors(tmp_path)


def test_earlier_weights_do_not_survive_and_foreign_files_do(tmp_path: Path) -> None:
    stale = [
        "task_head.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "pytorch_model-00002-of-00002.bin",
    ]
    foreign = ["notes.txt", "adapter_model.safetensors", "model-final.safetensors", "my_pytorch_model.bin"]
    for name in [*stale, *foreign]:
        (tmp_path / name).touch()
    write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, "config.json", "model.safetensors"])


def test_leftovers_of_a_killed_save_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".saving" / "deep").mkdir(parents=True)
    (tmp_path / ".saving" / "model.safetensors").write_bytes(b"half")
    write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_saved_folder_may_be_open_while_it_is_replaced(tmp_path: Path) -> None:
    """The weights of a loaded model are mapped from the file: it is replaced, never overwritten."""
    write(tmp_path)
    mapped = load_file(tmp_path / "model.safetensors")
    write(tmp_path, tensors={"a.weight": torch.full((2, 3), 9.0)})
    assert torch.equal(mapped["a.weight"], TENSORS["a.weight"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"no space left for 32 bytes of weights, \d+ bytes free"),
        (SafetensorError("I/O: No space left (os error 28)"), r"no space left for 32 bytes of weights, \d+ bytes free"),
        (
            SafetensorError("I/O: File too large (os error 27)"),
            r"files may not be larger here \(ulimit -f, .*\), with 32 bytes of weights",
        ),
    ],
)
def test_full_disk_keeps_the_old_files(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    write(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(save, "save_file", fail)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, config={"model_type": "albert"})
    assert re.fullmatch(rf"{tmp_path} cannot be written \({reason}\)", str(caught.value))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_full_disk_while_the_tokenizer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    def fail(path: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it

    monkeypatch.setattr(type(wordpiece_tokenizer), "save_pretrained", lambda self, path: fail(path))
    with pytest.raises(CheckpointError, match="no space left"):
        write(tmp_path, tokenizer=wordpiece_tokenizer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["model", "model/inner"])
def test_file_in_place_of_the_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(CheckpointError, match="a file is in the way of the folder"):
        write(tmp_path / name)

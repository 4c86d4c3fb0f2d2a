"""A changed bit in saved weights is noticed by whatever loads them, and files without our digest are read as ever."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import evaluate
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.checkpoints.load import read_safetensors, tensors_digest
from bert_tasks.checkpoints.save import save_folder
from bert_tasks.errors import CheckpointError
from bert_tasks.model.task_model import TaskModel
from support.small_checkpoints import copied, save_checkpoint

LABELS = ("calm", "glad")
ROWS = [{"text": "the old ferry", "label": "calm"}, {"text": "home along the shore", "label": "glad"}]
TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1, 2, 3]),
    "c": torch.tensor(0.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
}


def flip(path: Path, index: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1 << bit
    path.write_bytes(content)


def data_place(path: Path, key: str) -> int:
    """The first byte of a tensor in a safetensors file."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return 8 + length + int(json.loads(content[8 : 8 + length])[key]["data_offsets"][0])


@pytest.fixture(scope="module")
def saved(by_kind: dict[str, PreTrainedTokenizerBase], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose head is in task_head.safetensors."""
    stock, folder = tmp_path_factory.mktemp("stock"), tmp_path_factory.mktemp("ours")
    save_checkpoint(stock, "roberta", by_kind["bpe"])
    model = TaskModel.from_pretrained(
        stock, task="sequence-classification", labels=LABELS, pooling="attention", max_length=40
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of a few tensors and its content."""
    folder = tmp_path_factory.mktemp("flipped")
    save_folder(folder, config={}, tensors=TENSORS, tokenizer=None)
    path = folder / "model.safetensors"
    return path, path.read_bytes()


@settings(max_examples=80, deadline=None)
@given(index=st.integers(0), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused_or_changes_no_tensor(index: int, bit: int, small: tuple[Path, bytes]) -> None:
    path, content = small
    path.write_bytes(content)
    flip(path, index % len(content), bit)
    try:
        tensors = read_safetensors(path)
    except CheckpointError:
        return
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize(
    ("file", "key", "bit"),
    [
        ("model.safetensors", "encoder.layer.1.output.dense.weight", 0),
        ("task_head.safetensors", "head.score.weight", 7),
    ],
)
def test_inspect_and_evaluate_notice_a_flipped_bit(file: str, key: str, bit: int, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "model")
    flip(folder / file, data_place(folder / file, key), bit)
    message = rf"{file}: its tensors are not those that it was saved with"
    for action in (inspect_checkpoint, lambda name: evaluate(name, ROWS), TaskModel.from_pretrained):
        with pytest.raises(CheckpointError, match=message) as error:
            action(folder)
        assert error.value.exit_code == 4


def test_the_digest_does_not_depend_on_the_order_and_sees_names_shapes_and_dtypes() -> None:
    tensor = TENSORS["a.weight"]
    different: list[dict[str, Tensor]] = [
        {"a": tensor},
        {"b": tensor},
        {"a": tensor.reshape(3, 2)},
        {"a": tensor.view(torch.int32)},
        {"a": tensor, "b": tensor},
        {"a": -tensor},
        {"a": tensor.t()},
    ]
    assert len({tensors_digest(tensors) for tensors in different}) == len(different)
    assert tensors_digest(TENSORS) == tensors_digest(dict(reversed(TENSORS.items())))


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    written = set()
    for number in range(12):  # 1 in 2048 for two metadata in random order to agree by chance
        save_folder(tmp_path / str(number), config={}, tensors=TENSORS, tokenizer=None)
        written.add((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert len(written) == 1


def test_files_of_others_have_no_digest(saved: Path, tmp_path: Path) -> None:
    """transformers' metadata, none at all, and a folder of ours that another program saved anew."""
    folder = copied(saved, tmp_path / "model")
    weights = folder / "model.safetensors"
    with safe_open(weights, "pt") as file:
        assert file.metadata()["format"] == "pt"
    tensors = {name: value + 1 for name, value in load_file(weights).items()}
    for metadata in ({"format": "pt"}, None):
        save_file(tensors, weights, metadata=metadata)
        assert inspect_checkpoint(folder).problems == ()
        assert evaluate(folder, ROWS).keys() >= {"accuracy"}

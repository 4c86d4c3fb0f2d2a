"""Edited files and requests: a short round of every target, and contents that once broke something.

`make fuzz` tries the same targets at length.
"""

from pathlib import Path

import pytest
from onnx import ModelProto

import fuzzing
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.tasks import TASKS
from fuzzing import READERS, RECIPES, Target, attempt, binary_files, connections, fuzz, loaders, requests

FIXED = {**READERS, **RECIPES, **binary_files()}
LOADERS = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
EXAMPLES = 20
# Contents that once broke something at full length.
FOUND = {"model vocab.txt": [b"[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\nm\nn\no\n"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """What opens a model, an export, a run or one of their files."""
    return loaders(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("name", FIXED)
def test_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert attempt(FIXED[name], FIXED[name].valid, tmp_path)
    fuzz(FIXED[name], tmp_path, examples=EXAMPLES)


def test_models_and_checkpoints_are_read_or_refused(files: dict[str, Target], tmp_path: Path) -> None:
    assert {f"run {name}" for name in LOADERS} <= files.keys()
    assert {"model config.json", "model model.safetensors", "export model.onnx", "export export.json"} <= files.keys()
    for name, target in files.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        assert attempt(target, target.valid, folder), name
        fuzz(target, folder, examples=EXAMPLES // 4)


def test_bodies_of_requests_are_read_or_refused(tmp_path: Path) -> None:
    targets = requests(tmp_path)
    assert targets.keys() == {f"request {name}" for name in TASKS}
    for name, target in targets.items():
        assert attempt(target, target.valid, tmp_path), name
        fuzz(target, tmp_path, examples=EXAMPLES)


@pytest.mark.slow
def test_a_server_answers_or_closes_the_connection_and_goes_on(tmp_path: Path) -> None:
    with connections(tmp_path) as targets:
        for name, target in targets.items():
            assert attempt(target, target.valid, tmp_path), name
            fuzz(target, tmp_path, examples=15)


def test_a_refusal_that_acts_on_a_terminal_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(content: bytes, folder: Path) -> object:
        raise DataError(content.decode())

    target = Target(b"", refuse)
    assert not attempt(target, b"\x1b[2J", tmp_path)
    monkeypatch.setattr(fuzzing, "printable", str)
    with pytest.raises(AssertionError, match="x1b"):
        attempt(target, b"\x1b[2J", tmp_path)


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found_is_refused(name: str, files: dict[str, Target], tmp_path: Path) -> None:
    for content in FOUND[name]:
        assert not attempt(files[name], content, tmp_path)


@pytest.mark.parametrize(
    ("valid", "changed"),
    [
        (b"token_type_ids", b"\x1boken_type_ids"),
        (b"input_ids", b"\xffnput_ids"),
        (b"\x01B\x04axes", b"\x00B\x04axes"),
        (b"weightsZ", b"Weights\x1bZ"),
    ],
    ids=["another input", "a name that is not UTF-8", "a product that cannot be computed", "a missing tensor"],
)
def test_graphs_that_fuzzing_found_are_refused(
    valid: bytes, changed: bytes, files: dict[str, Target], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither onnxruntime nor its Python package may print: a graph's names would reach the terminal as they are."""
    target = files["export model.onnx"]
    content = target.valid.replace(valid, changed, 1)
    assert content != target.valid
    assert not attempt(target, content, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_graphs_with_other_shapes_are_refused(files: dict[str, Target], tmp_path: Path) -> None:
    """One answer for all rows together: nothing in the graph says so before it runs."""
    target = files["export model.onnx"]
    changed = ModelProto.FromString(target.valid)
    axes = next(tensor for tensor in changed.graph.initializer if tensor.name == "axes")
    axes.dims[:], axes.int64_data[:] = [2], [0, 1]
    with pytest.raises(CheckpointError, match=r"shape \(1, 2\), expected \(2, 2\)"):
        target.read(changed.SerializeToString(), tmp_path)

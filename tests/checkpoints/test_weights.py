"""Files of a model folder: what is read, and how each kind of damage is named."""

import errno
import io
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, read_config
from bert_tasks.checkpoints.load import read_weights
from bert_tasks.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(300, dtype=torch.bfloat16), "c": torch.tensor([7])}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
HTML = b"\n<!DOCTYPE html><html><body>404</body></html>"


class Evil:
    """Runs a command when it is unpickled without restrictions."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def torch_bytes(content: object, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def point(index: Path, shard: str) -> None:
    index.write_text(json.dumps({"weight_map": {"a": shard}}))


@pytest.mark.parametrize("zipped", [True, False])
def test_bin(zipped: bool, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(torch_bytes(TENSORS, zipped=zipped))
    assert_equal(read_weights(tmp_path), TENSORS)


def test_tied_tensors_and_parameters_of_bin(tmp_path: Path) -> None:
    tied = {"x": torch.nn.Parameter(TENSORS["a"]), "y": TENSORS["a"], "z": TENSORS["a"][1]}
    (tmp_path / "pytorch_model.bin").write_bytes(torch_bytes(tied))
    tensors = read_weights(tmp_path)
    assert_equal(tensors, {name: tensor.detach() for name, tensor in tied.items()})
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_safetensors_win_over_bin(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even read")
    save_file({"a": TENSORS["a"]}, tmp_path / "shard")
    point(tmp_path / "model.safetensors.index.json", "shard")
    assert read_weights(tmp_path).keys() == {"a"}
    save_file({"c": TENSORS["c"]}, tmp_path / "model.safetensors")
    assert read_weights(tmp_path).keys() == {"c"}


def test_no_weights_lists_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(CheckpointError) as caught:
        read_weights(tmp_path)
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5"):
        assert name in str(caught.value)


WHOLE = save({"a": TENSORS["a"], "b": TENSORS["b"]})
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")
LARGE = {"a": torch.ones(2000)}
# A file, its content, and what the message says of it.
DAMAGES = [
    ("model.safetensors", b"", r"empty \(0 bytes\)"),
    ("model.safetensors", WHOLE[:-100], "damaged or truncated"),
    ("model.safetensors", WHOLE[: HEADER - 10], "damaged or truncated"),
    ("model.safetensors", WHOLE[:5], "damaged or truncated"),
    ("model.safetensors", WHOLE + b"x" * 7, "damaged or truncated"),
    ("model.safetensors", LFS, "Run `git lfs pull`"),
    ("model.safetensors", HTML, "a web page"),
    ("model.safetensors", b"\x10" + bytes(7) + b"[" * 16 + bytes(9), "damaged or truncated"),
    ("model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000, "damaged or truncated"),
    ("model.safetensors", WHOLE.replace(b"F32", b"F99"), "damaged"),
    ("model.safetensors", WHOLE.replace(b"[2,3]", b"[2,9]"), "damaged"),
    ("pytorch_model.bin", b"", r"empty \(0 bytes\)"),
    ("pytorch_model.bin", torch_bytes(LARGE)[:-100], "damaged or truncated"),
    ("pytorch_model.bin", torch_bytes(LARGE, zipped=False)[:-100], "damaged or truncated"),
    ("pytorch_model.bin", LFS, "Run `git lfs pull`"),
    ("pytorch_model.bin", HTML, "a web page"),
    ("pytorch_model.bin", b"abcdefgh" * 30, "damaged"),
    ("pytorch_model.bin", bytes(range(1, 200)), "damaged"),
    ("pytorch_model.bin", torch_bytes({"a": 1}), "entry 'a' is a int"),
    ("pytorch_model.bin", torch_bytes({1: TENSORS["a"]}), "entry 1 is"),
    ("pytorch_model.bin", torch_bytes({"state_dict": TENSORS}), "entry 'state_dict' is a dict"),
    ("pytorch_model.bin", torch_bytes([TENSORS["a"]]), "found a list"),
    ("pytorch_model.bin", torch_bytes({"a": torch.eye(2).to_sparse()}), "not a plain dense tensor"),
    ("pytorch_model.bin", torch_bytes({"a": torch.empty(2, device="meta")}), "not a plain dense tensor"),
    ("config.json", b"", "empty"),
    ("config.json", b"{", "not valid JSON"),
    ("config.json", b"\xff\xfe{}", "not valid JSON"),
    ("config.json", b"[1]", "expected a JSON object, found a list"),
    ("config.json", b'{"layer_norm_eps": NaN}', "NaN is not a number in JSON"),
    ("config.json", b"[" * 100_000, "not valid JSON"),
    ("config.json", LFS, "git lfs pull"),
    ("config.json", HTML, "a web page"),
    ("config.json", b" " * (MAX_CONFIG_BYTES + 1), "too many"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_file_is_named(number: int, tmp_path: Path) -> None:
    name, content, reason = DAMAGES[number]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: .*{reason}"):
        read_config(tmp_path) if name == "config.json" else read_weights(tmp_path)


def test_a_compressed_bin_is_not_expanded(tmp_path: Path) -> None:
    content = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_bytes({"a": torch.zeros(10_000)}))) as whole,
        zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in whole.namelist():
            packed.writestr(entry, whole.read(entry))
    (tmp_path / "pytorch_model.bin").write_bytes(content.getvalue())
    with pytest.raises(CheckpointError, match=r"compressed, which torch.save never does\. It expands to 4\d{4} bytes"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "function"), [("model.safetensors", "load.load_file"), ("pytorch_model.bin", "load.torch.load")]
)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_weights_that_need_more_memory(
    name: str, function: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    (tmp_path / name).write_bytes(save(TENSORS) if name == "model.safetensors" else torch_bytes(TENSORS))
    monkeypatch.setattr(f"bert_tasks.checkpoints.{function}", fail)
    with pytest.raises(CheckpointError, match=r": out of memory while the weights were read \(.*alloc"):
        read_weights(tmp_path)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "pickle-0", "inst", "module"])
def test_code_in_bin_never_runs(form: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = {"a": TENSORS["a"], "b": Evil(canary)}
    content = {
        "zip": lambda: torch_bytes(evil),
        "legacy": lambda: torch_bytes(evil, zipped=False),
        "pickle": lambda: pickle.dumps({"b": Evil(canary)}),
        "pickle-0": lambda: pickle.dumps({"b": Evil(canary)}, protocol=0),
        "inst": lambda: b"(S'touch %s'\nios\nsystem\n." % str(canary).encode(),
        "module": lambda: torch_bytes(torch.nn.Linear(2, 2)),
    }[form]()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.bin: .*it contains Python code, which is never run") as caught:
        read_weights(tmp_path)
    assert not canary.exists()
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "x/a.safetensors", "..", ""])
def test_index_paths_stay_in_the_folder(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "x").mkdir(parents=True)
    for path in (tmp_path / "outside.safetensors", folder / "x" / "a.safetensors"):
        save_file({"a": TENSORS["a"]}, path)
    point(folder / "model.safetensors.index.json", shard.replace("/outside", f"{tmp_path}/outside"))
    with pytest.raises(CheckpointError, match=r"index\.json: .* not a plain file name"):
        read_weights(folder)


def test_shard_links_stay_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, tmp_path / "outside")
    (folder / "s.safetensors").symlink_to(tmp_path / "outside")
    point(folder / "model.safetensors.index.json", "s.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_weights(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"a": TENSORS["a"]}, repository / "blobs" / "ff")
    (snapshot / "s.safetensors").symlink_to("../../blobs/ff")
    point(snapshot / "model.safetensors.index.json", "s.safetensors")
    assert_equal(read_weights(snapshot), {"a": TENSORS["a"]})
    renamed = snapshot.parent.rename(repository / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_weights(renamed / "0123")
    renamed.rename(snapshot.parent)
    (tmp_path / "models--org--other").mkdir()
    save_file({"a": TENSORS["a"]}, tmp_path / "models--org--other" / "ff")
    (snapshot / "s.safetensors").unlink()
    (snapshot / "s.safetensors").symlink_to("../../../models--org--other/ff")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_weights(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "shard", "config.json"])
def test_pipe_does_not_hang(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    if name == "shard":
        point(tmp_path / "model.safetensors.index.json", "shard")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_config(tmp_path) if name == "config.json" else read_weights(tmp_path)


def test_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match="link to a file that does not exist"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "content", "reason"),
    [
        ("{}", TENSORS, "expected `weight_map`"),
        ('{"weight_map": []}', TENSORS, "expected `weight_map`"),
        ('{"weight_map": {"a": 1}}', TENSORS, "expected `weight_map`"),
        ('{"weight_map": {"a": "s"}}', {"z": TENSORS["a"]}, r"index\.json: a is missing from s"),
        ('{"weight_map": {"a": "s"}}', TENSORS, r"index\.json: b is not listed by the index but is in s"),
        ('{"weight_map": {"a": "gone"}}', TENSORS, r"/gone: No such file"),
    ],
)
def test_index_and_shards_must_agree(index: str, content: dict[str, torch.Tensor], reason: str, tmp_path: Path) -> None:
    save_file(content, tmp_path / "s")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason):
        read_weights(tmp_path)


def test_tensorflow_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bert_config.json").write_text("{}")
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds a TensorFlow checkpoint, which is not supported"):
        read_config(tmp_path)

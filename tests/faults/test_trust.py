"""Hostile folders and texts through the console script: nothing in them runs, and each is refused or read by name."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import runs

# They start processes.
pytestmark = pytest.mark.slow

CANARY = "import os, pathlib\npathlib.Path(os.environ['CANARY']).write_text('ran')\n"


class Payload:
    """Touches the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.canary, "ran")


@pytest.fixture
def model(straight: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight / "model", tmp_path / "model"))


def predict(model: Path, texts: list[str], folder: Path, **environment: str) -> runs.Ended:
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    command = [*runs.CONSOLE, "predict", model, data, "--output", folder / "answers.jsonl"]
    return runs.run(command, folder=folder, **environment)


@pytest.mark.parametrize("start", [runs.CONSOLE, (sys.executable, "-m", "bert_tasks")])
def test_modules_of_the_working_directory_do_not_run(straight: Path, tmp_path: Path, start: tuple[str, ...]) -> None:
    for name in ("torch", "transformers", "accuracy", "datasets", "evaluate", "numpy", "seqeval", "accelerate"):
        (tmp_path / f"{name}.py").write_text(CANARY, "utf-8")
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "accuracy.py").write_text(CANARY, "utf-8")
    data, canary = tmp_path / "dev.jsonl", tmp_path / "canary"
    data.write_text('{"text": "a wonderful ferry", "label": "positive"}\n' * 3, "utf-8")
    done = subprocess.run(
        [*start, "evaluate", straight / "model", data, "--json"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "CANARY": str(canary), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=runs.PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in json.loads(done.stdout)
    assert not canary.exists()


def test_code_named_by_a_model_folder_does_not_run(model: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (model / "evil.py").write_text(CANARY, "utf-8")
    for name, keys in (
        ("config.json", {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
    ):
        content = json.loads((model / name).read_text("utf-8"))
        attention = {"_attn_implementation": "evil/kernel", "_attn_implementation_internal": "evil/kernel"}
        (model / name).write_text(json.dumps({**content, **keys, **attention}), "utf-8")
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (model / name).write_bytes(pickle.dumps(Payload(canary)))
    ended = predict(model, ["a wonderful ferry"], tmp_path, CANARY=str(canary))
    assert ended.code in (0, 4), ended.err
    assert not canary.exists()


def test_a_run_with_pickles_in_its_checkpoints_does_not_open_them(recipe: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    assert runs.run([*runs.CONSOLE, "train", recipe], folder=tmp_path).code == 0
    for name in ("optimizer.bin", "scheduler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        (runs.newest(tmp_path / "run") / name).write_bytes(pickle.dumps(Payload(canary)))
    weights = runs.newest(tmp_path / "run") / "optimizer.safetensors"
    more = [*runs.CONSOLE, "train", recipe, "--set", "optim.epochs=4"]
    assert runs.run(more, folder=tmp_path).code == 0
    assert not canary.exists()
    weights = runs.newest(tmp_path / "run") / "optimizer.safetensors"
    weights.write_bytes(pickle.dumps(Payload(canary)))
    again = runs.run([*more[:-1], "optim.epochs=5"], folder=tmp_path)
    assert "NOT USED: " in again.err
    assert not canary.exists()


def test_tokens_do_not_reach_files_or_messages(recipe: Path, tmp_path: Path) -> None:
    secret = "hf_" + "Q" * 34
    ended = runs.run([*runs.CONSOLE, "--debug", "train", recipe], folder=tmp_path, HF_TOKEN=secret, MY_API_KEY=secret)
    assert ended.code == 0, ended.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]

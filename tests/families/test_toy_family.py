"""A family that is one data file: added to families/, it works on the command line with no other edit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

import bert_tasks
from support.small_checkpoints import save_checkpoint

# BERT under other names: of the family, a config field and all modules of a layer.
TOY = '''"""A family for a test."""

from bert_tasks.families.base import BERT_FIELDS, EMBEDDING_KEYS, Family, architectures, head_keys, layer_keys

FAMILY = Family(
    model_type="toy",
    prefix="toy.",
    fields={**BERT_FIELDS, "hidden_size": ("width", 768)},
    keys=EMBEDDING_KEYS
    + layer_keys(
        "blocks.{i}.",
        qkv=("q", "k", "v"),
        attention_output="o",
        attention_norm="norm_1",
        intermediate="up",
        output="down",
        output_norm="norm_2",
    ),
    pooler="first",
    heads=head_keys(dense="toy.first", output="scores"),
    architectures=architectures("Toy"),
    pretraining=(),
    head_activation="tanh",
    sequence_dropout={"dropout": 0.1},
    token_dropout={"dropout": 0.1},
)
'''
RENAMED = {
    "bert.": "toy.",
    "pooler.dense": "first",
    "classifier": "scores",
    "encoder.layer.": "blocks.",
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "o",
    "attention.output.LayerNorm": "norm_1",
    "intermediate.dense": "up",
    ".output.dense": ".down",
    ".output.LayerNorm": ".norm_2",
}
ROWS = [{"text": "the bird sang", "label": "yes"}, {"text": "a dog", "label": "no"}] * 4


def renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a copy of the package and one more file."""
    source = Path(bert_tasks.__file__).parent
    shutil.copytree(source, tmp_path / "lib" / "bert_tasks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lib" / "bert_tasks" / "families" / "toy.py").write_text(TOY)
    return tmp_path / "lib"


def run(library: Path, *arguments: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(library), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bert_tasks", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=library.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_family_in_one_file(library: Path, tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]) -> None:
    known, toy = tmp_path / "known", tmp_path / "toy"
    save_checkpoint(known, "bert", by_kind["wordpiece"], head="sequence", labels=("no", "yes", "maybe"), wide=True)
    shutil.copytree(known, toy)
    tensors = load_file(known / "model.safetensors")
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, toy / "model.safetensors")
    config = json.loads((known / "config.json").read_text())
    config |= {
        "model_type": "toy",
        "architectures": ["ToyForSequenceClassification"],
        "width": config.pop("hidden_size"),
    }
    (toy / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    for model in (known, toy):
        run(library, "predict", model, "--data", "rows.jsonl", "--output", f"{model.name}.jsonl")
    assert (tmp_path / "toy.jsonl").read_text() == (tmp_path / "known.jsonl").read_text()

    recipe = """
        task = "sequence-classification"
        [model]
        name = "toy"
        [settings]
        max_length = 40
        [data]
        train = "rows.jsonl"
        validation = "rows.jsonl"
        [optim]
        epochs = 1
        [run]
        output_dir = "run"
    """
    (tmp_path / "toy.toml").write_text(recipe)
    run(library, "train", "toy.toml")
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert saved.keys() == {renamed(name) for name in tensors}
    assert "toy (ToyForSequenceClassification)" in run(library, "inspect", tmp_path / "run" / "model")

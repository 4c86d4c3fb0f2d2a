"""Owns small models of every task, and where to reach them."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import fit
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.server import load_warm
from support.small_checkpoints import save_checkpoint
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES

ModelOf = Callable[[str], TaskModel]


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for family in ("bert", "electra"):
        save_checkpoint(folder / family, family, wordpiece_tokenizer, wide=True)
    return folder


@pytest.fixture(scope="package")
def model_of(base: Path) -> ModelOf:
    """A model of each kind in ``task_examples``, made once; tests must not change it."""

    @cache
    def model(case: str) -> TaskModel:
        torch.manual_seed(3)
        family, examples = ("bert", EXAMPLES) if case in EXAMPLES else ("electra", FAMILY_EXAMPLES)
        model = TaskModel.from_pretrained(base / family, task=examples[case].task)
        last = getattr(model.head, "output", model.encoder.embeddings.word)
        torch.nn.init.normal_(last.weight, std=0.5)
        return model

    return model


@pytest.fixture(scope="package")
def encoder(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, wide=True)
    return folder


@pytest.fixture(scope="package")
def embedder(encoder: Path) -> TaskModel:
    model, _ = load_warm(encoder, task="embedding", settings=None, revision=None, dtype="float32")
    return model.one_task()


@pytest.fixture(scope="package")
def folder_of(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(case: str) -> Path:
        target = tmp_path_factory.mktemp("saved") / case
        model_of(case).save_pretrained(target)
        return target

    return folder


@pytest.fixture(scope="package")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters; tests must not change it."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(base / "bert", folder / "base")
    model = TaskModel.from_pretrained(folder / "base", task=EXAMPLES["single"].task)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in EXAMPLES["single"].rows), "utf-8")
    lora: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 8.0, "save_adapter": True}
    fit(model, rows, rows, output_dir=folder / "run", epochs=1, batch_size=4, progress=False, **lora)
    return folder / "run"

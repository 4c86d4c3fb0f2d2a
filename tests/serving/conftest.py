"""Owns small models of every task, and where to reach them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.model.task_model import TaskModel
from support.small_checkpoints import save_checkpoint
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES

ModelOf = Callable[[str], TaskModel]


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, wide=True)
    return folder


@pytest.fixture(scope="package")
def model_of(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> ModelOf:
    """A model of each kind in ``task_examples``, made once; tests must not change it."""
    electra = tmp_path_factory.mktemp("electra")
    save_checkpoint(electra, "electra", wordpiece_tokenizer, wide=True)
    made: dict[str, TaskModel] = {}

    def model(kind: str) -> TaskModel:
        if kind not in made:
            torch.manual_seed(3)
            folder, examples = (checkpoint, EXAMPLES) if kind in EXAMPLES else (electra, FAMILY_EXAMPLES)
            made[kind] = TaskModel.from_pretrained(folder, task=examples[kind].task)
            last = getattr(made[kind].head, "output", made[kind].encoder.embeddings.word)
            torch.nn.init.normal_(last.weight, std=0.5)
        return made[kind]

    return model


@pytest.fixture(scope="package")
def folder_of(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def folder(kind: str) -> Path:
        target = tmp_path_factory.mktemp("saved") / kind
        model_of(kind).save_pretrained(target)
        return target

    return folder

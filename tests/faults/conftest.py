"""Owns what the tests of faults share: a tiny checkpoint with dropout, and an uninterrupted run to compare with."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import load_recipe, train
from support import runs
from support.training_runs import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), bpe_tokenizer, dropout=0.2)


@pytest.fixture(scope="session")
def straight(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed, made in this process."""
    folder = tmp_path_factory.mktemp("straight")
    train(load_recipe(runs.write_recipe(folder, checkpoint)), progress=False)
    return folder / "run"


@pytest.fixture
def recipe(checkpoint: Path, tmp_path: Path) -> Path:
    return runs.write_recipe(tmp_path, checkpoint)

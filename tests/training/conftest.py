"""Owns the tiny checkpoints that the tests of training start from."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from training import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Two layers at transformers' initialisation, no dropout: it learns quickly."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), bpe_tokenizer)


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Large weights, so that a wrong gradient shows; no dropout."""
    return save_checkpoint(tmp_path_factory.mktemp("wide"), bpe_tokenizer, wide=True)


@pytest.fixture(scope="session")
def dropout_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dropout"), bpe_tokenizer, dropout=0.2)

"""Owns the checkpoints of the GPU tests. Every test in this folder has the mark ``gpu``."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from support.gpu import save_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Without dropout, so that devices compute the same."""
    return save_checkpoint(tmp_path_factory.mktemp("plain"), "roberta", bpe_tokenizer)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """With dropout."""
    return save_checkpoint(tmp_path_factory.mktemp("random"), "roberta", bpe_tokenizer, dropout=0.1)


@pytest.fixture(scope="session")
def electra_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("electra"), "electra", bpe_tokenizer)

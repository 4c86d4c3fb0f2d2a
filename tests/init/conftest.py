"""Owns a small model for recipes that ``init`` writes."""

import pytest
from transformers import PreTrainedTokenizerBase

from support.small_checkpoints import save_checkpoint


@pytest.fixture(scope="package")
def base(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("albert")
    save_checkpoint(folder, "albert", unigram_tokenizer)
    return str(folder)

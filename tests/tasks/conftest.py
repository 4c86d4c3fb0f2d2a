"""Owns a small checkpoint folder of a family for the tests of tasks.

Families with BERT's WordPiece have the unigram pieces of ALBERT here, whose vocabulary is 1/30 of the size, so that a
step of training takes a fraction of the time. How tokenizers cut texts has tests of its own.
"""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from support.small_checkpoints import save_checkpoint, tokenizer_of


@pytest.fixture(scope="module")
def family_folder(
    request: pytest.FixtureRequest,
    by_kind: dict[str, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizer_of(request.param, by_kind)
    if tokenizer is by_kind["wordpiece"]:
        tokenizer = by_kind["unigram"]
    save_checkpoint(folder, request.param, tokenizer)
    return folder

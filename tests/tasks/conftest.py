"""Owns a small checkpoint folder of a family for the tests of tasks."""

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
    save_checkpoint(folder, request.param, tokenizer_of(request.param, by_kind))
    return folder

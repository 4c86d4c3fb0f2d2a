"""Owns a small checkpoint folder of each family for the tests of tasks."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from support.hf_models import FAMILIES
from support.small_checkpoints import save_checkpoint, tokenizer_of


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(
    request: pytest.FixtureRequest,
    by_kind: dict[str, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, request.param, tokenizer_of(request.param, by_kind))
    return folder

"""A classifier of sixteen tokens, and the checkpoint below it."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.small_checkpoints import save_checkpoint

LABELS = ("calm", "glad")


@pytest.fixture(scope="module")
def base(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roberta")
    save_checkpoint(folder, "roberta", bpe_tokenizer, wide=True)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> TaskModel:
    return TaskModel.from_pretrained(base, task=SequenceClassification.of(labels=LABELS, max_length=16))

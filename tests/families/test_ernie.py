"""ERNIE's table of task types, which a model has only with ``use_task_id``."""

import pytest
import torch

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import converted_config, encoder_config
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference


def read(**changes: object) -> EncoderConfig:
    return encoder_config({"model_type": "ernie", **changes})


def test_only_a_config_with_use_task_id_has_the_table() -> None:
    assert read().task_type_vocab_size == read(task_type_vocab_size=7).task_type_vocab_size == 0
    assert read(use_task_id=True).task_type_vocab_size == 3
    assert read(use_task_id=True, task_type_vocab_size=7).task_type_vocab_size == 7
    with pytest.raises(CheckpointError, match="use_task_id = 'no', expected true or false"):
        read(use_task_id="no")


def test_a_model_without_the_table_is_transformers() -> None:
    theirs = hf_model("ernie", config=hf_config("ernie", use_task_id=False))
    ours = ours_from(theirs, "base")
    assert not any("task_type" in name for name in ours.state_dict())
    assert packed_difference(theirs, ours, random_batch("ernie")) <= 1e-10


def test_row_0_is_added_to_every_token() -> None:
    """Rows of other task types change nothing. transformers' models read row 0 by default, too."""
    theirs = hf_model("ernie")
    ours = ours_from(theirs, "base")
    with torch.no_grad():
        theirs.embeddings.task_type_embeddings.weight[1:] += 1.0
    assert packed_difference(theirs, ours, random_batch("ernie")) <= 1e-10
    with torch.no_grad():
        theirs.embeddings.task_type_embeddings.weight[0] *= 2.0
    assert packed_difference(theirs, ours, random_batch("ernie")) > 1e-3


def test_a_model_with_the_table_is_no_bert() -> None:
    config = {"model_type": "ernie", "use_task_id": True}
    with pytest.raises(UsageError, match=r"cannot be converted to bert, .* task_type_vocab_size = 0 instead of 3"):
        converted_config(config, layers=[0, 1], family="bert")
    assert converted_config({"model_type": "ernie"}, layers=[0, 1], family="bert")["model_type"] == "bert"

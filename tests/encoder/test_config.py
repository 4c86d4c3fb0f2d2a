"""What an encoder's configuration says of itself."""

import pytest

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config


def test_sizes_that_follow_from_others() -> None:
    roberta = encoder_config({"model_type": "roberta", "max_position_embeddings": 514})
    assert roberta.head_size == 64
    assert roberta.usable_length == 512
    assert encoder_config({"model_type": "bert"}).usable_length == 512


def test_heads_of_different_sizes_are_refused() -> None:
    assert encoder_config({"model_type": "bert", "num_attention_heads": 8}).head_size == 96
    with pytest.raises(CheckpointError, match="hidden_size 768 is not a multiple of num_attention_heads 10"):
        encoder_config({"model_type": "bert", "num_attention_heads": 10})

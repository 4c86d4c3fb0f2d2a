"""EuroBERT's configurations, and how its sequence head pools."""

from typing import Any

import pytest
from transformers import AutoConfig

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference

# EuroBERT-610m, as files from before transformers 5 have it.
PUBLISHED: dict[str, Any] = {
    "model_type": "eurobert",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 18,
    "num_key_value_heads": 6,
    "intermediate_size": 4096,
    "rope_theta": 250000,
}


def test_published_configs() -> None:
    config = encoder_config(PUBLISHED)
    assert config == encoder_config(AutoConfig.for_model(**PUBLISHED).to_dict())
    assert (config.num_key_value_heads, config.head_size, set(config.rotary_theta)) == (6, 64, {250000.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = {.*} is not supported, only None is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn' is not supported, only 'default' is"),
        ({"num_key_value_heads": 4}, "num_attention_heads 18 is not a multiple of num_key_value_heads 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0, expected at least 1"),
        ({"head_dim": 5}, "rotary positions need heads of an even size, not 5"),
        ({"classifier_pooling": "last"}, "classifier_pooling = 'last', expected 'late' or 'bos' or 'mean'"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encoder_config(PUBLISHED | changes)


@pytest.mark.parametrize("pooling", ["late", "bos", "mean"])
def test_every_pooling_is_that_of_transformers(pooling: str) -> None:
    theirs = hf_model("eurobert", "sequence", config=hf_config("eurobert", classifier_pooling=pooling))
    ours, batch = ours_from(theirs, "sequence"), random_batch("eurobert")
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10

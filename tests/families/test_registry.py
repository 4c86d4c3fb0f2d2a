"""The table of families against transformers' config classes."""

import pytest
from transformers import AutoConfig

from bert_tasks.families import encoder_config
from support.hf_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_a_config_lacks_has_the_default_of_transformers(family: str) -> None:
    """A published config.json may leave out any field, dropouts of heads too."""
    assert encoder_config({"model_type": family}) == encoder_config(AutoConfig.for_model(family).to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropout_of_a_head_is_the_one_that_the_config_names(family: str) -> None:
    """None stands for a field that is not set: the next one applies, as in transformers."""
    named = {"seq_classif_dropout": 0.4} if family == "distilbert" else {"classifier_dropout": 0.4}
    named = {"classifier_dropout_prob": 0.4} if family == "albert" else named
    unset = dict.fromkeys(named)
    general = {"hidden_dropout_prob": 0.3}
    assert encoder_config({"model_type": family, **general, **named}).head.sequence_dropout == 0.4
    if family in ("bert", "roberta", "electra"):
        head = encoder_config({"model_type": family, **general, **unset}).head
        assert (head.sequence_dropout, head.token_dropout, head.span_dropout) == (0.3, 0.3, 0.0)

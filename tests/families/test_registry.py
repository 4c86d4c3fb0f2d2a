"""The table of families against transformers' config classes."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import FAMILIES as SUPPORTED
from bert_tasks.families import encoder_config, parameter_map
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, MultipleChoice, SpanExtraction, Task
from support.hf_models import FAMILIES, ROBERTAS, hf_config

# Whose heads have no dropout of their own.
WITHOUT_DROPOUT = ("mpnet", "megatron-bert", "eurobert", "roformer")


@pytest.mark.every_family
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_a_config_lacks_has_the_default_of_transformers(family: str) -> None:
    """A published config.json may leave out any field, dropouts of heads too."""
    assert encoder_config({"model_type": family}) == encoder_config(AutoConfig.for_model(family).to_dict())


@pytest.mark.every_family
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_DROPOUT])
def test_a_dropout_of_a_head_is_the_one_that_the_config_names(family: str) -> None:
    """None stands for a field that is not set: the next one applies, as in transformers."""
    names = {
        "distilbert": "seq_classif_dropout",
        "albert": "classifier_dropout_prob",
        "rembert": "classifier_dropout_prob",
        "deberta-v2": "cls_dropout",
    }
    named = {names.get(family, "classifier_dropout"): 0.4}
    unset = dict.fromkeys(named)
    general = {"hidden_dropout_prob": 0.3}
    assert encoder_config({"model_type": family, **general, **named}).head.sequence_dropout == 0.4
    if family in ("bert", "electra", "ernie", "deberta-v2", *ROBERTAS):
        head = encoder_config({"model_type": family, **general, **unset}).head
        assert (head.sequence_dropout, head.token_dropout, head.span_dropout) == (0.3, 0.3, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_of_any_size_makes_a_model_or_is_refused(family: str) -> None:
    """An untrusted config.json neither overflows nor occupies the loader for long."""
    spec = SUPPORTED[family]
    heads = [getattr(spec, field.name) for field in fields(spec) if field.name.endswith("_dropout")]
    names = {name for name, _ in spec.fields.values()}.union(spec.layer_fields, *heads)
    config = {**hf_config(family).to_dict(), "rope_parameters": None, "layer_types": None}
    for name in sorted(names):
        for value in (2**31 - 1, 2**31, 10**400, -(10**400), 1e300, float("inf"), float("nan")):
            changed = config | {name: value}
            try:
                parameter_map(spec, encoder_config(changed), head="base", pooler=False)
            except CheckpointError as error:
                message = str(error)
            else:
                message = ""
                with torch.device("meta"):
                    Encoder(changed)
            assert len(message) < 300
            assert message or value == 2**31 - 1 or not name, name


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_weights_that_are_all_zero_can_be_drawn(family: str) -> None:
    """transformers takes an initializer_range of 0, too."""
    model = Encoder(hf_config(family, initializer_range=0.0).to_dict())
    assert not model.encoder.embeddings.word.weight.any()


def test_another_encoder_is_rejected_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    with pytest.raises(CheckpointError, match=r"model_type is 'xlnet'\. Supported types are albert, bert, camembert"):
        inspect_checkpoint(tmp_path)


TASKS: dict[str, Task] = {
    "span": SpanExtraction.of(max_length=16, max_query_length=4, doc_stride=2),
    "choice": MultipleChoice.of(max_length=16),
    "masked-lm": MaskedLanguageModeling.of(max_length=16),
}
LACKING = [(family, head) for family in FAMILIES for head in TASKS if head not in SUPPORTED[family].heads]


@pytest.mark.every_family
@pytest.mark.parametrize(("family", "head"), LACKING)
def test_a_head_that_a_family_lacks_is_rejected_with_its_reason(family: str, head: str) -> None:
    with pytest.raises(UsageError) as error:
        TaskModel(hf_config(family).to_dict(), TASKS[head])
    reason = SUPPORTED[family].unsupported_heads.get(head)
    because = "" if reason is None else f", because {reason}"
    assert str(error.value) == f"{TASKS[head].name}: {family} models have no head of the kind {head!r}{because}"

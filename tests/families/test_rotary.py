"""Bases of rotary positions, in each form in which config.json may state them. Scaling is in test_rotary_scaling.py."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, shaped_difference

pytestmark = pytest.mark.every_family
ALIKE = ["eurobert", "nomic_bert", "gte"]  # one base for all layers
BY_TYPE = ["modernbert", "ultrabert"]  # a base for each type of layer
TYPES = ("full_attention", "sliding_attention")
FLAT = {"rope_type": "default", "rope_theta": 321.0}
NESTED = {"full_attention": {"rope_theta": 321.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
STATED: list[tuple[str, dict[str, Any]]] = [
    *((family, {"rope_parameters": FLAT}) for family in ALIKE),
    *((family, {"rope_parameters": {"rope_theta": 321.0}}) for family in ALIKE),
    *((family, {"rope_parameters": {}}) for family in ALIKE),
    *((family, {"rope_parameters": None, "rope_theta": 321.0}) for family in ALIKE),
    *((family, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 321.0}) for family in ALIKE),
    *((family, {"rope_parameters": NESTED}) for family in BY_TYPE),
    ("modernbert", {"rope_parameters": {}}),
    ("modernbert", {"rope_parameters": {"full_attention": {"rope_theta": 321.0}}}),
    ("modernbert", {"rope_parameters": None, "global_rope_theta": 321.0, "local_rope_theta": 7.0}),
    ("modernbert", {"rope_parameters": None, "rope_theta": 321.0}),  # which is no field of it
    ("ultrabert", {"rope_parameters": None, "rope_theta": [7.0, 7.0, 321.0, 7.0]}),
    ("ultrabert", {"rope_parameters": {"full_attention": {"rope_theta": 321.0}, "sliding_attention": {}}}),
    ("ultrabert", {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 321.0}}}),
]


@pytest.mark.parametrize(("family", "stated"), STATED)
def test_bases_are_those_of_transformers(family: str, stated: dict[str, Any]) -> None:
    theirs = hf_model(family, config=hf_config(family, **copy.deepcopy(stated)))
    written = theirs.config.to_dict()
    ours = encoder_config({**written, **stated}).rotary_theta
    assert ours == encoder_config(written).rotary_theta
    is_read = family != "modernbert" or "rope_theta" not in stated
    assert (321.0 in ours) == (is_read and "321.0" in str(stated))
    assert shaped_difference(theirs, ours_from(theirs, "base"), random_batch(family)) <= 1e-10


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        *((family, FLAT) for family in BY_TYPE),
        *((family, {"rope_type": "linear", "factor": 4.0, "rope_theta": 321.0}) for family in BY_TYPE),
        *((family, {**NESTED, "rope_type": "linear"}) for family in BY_TYPE),
        *((family, {"full_attention": None, "sliding_attention": FLAT}) for family in BY_TYPE),
        *((family, NESTED) for family in ALIKE),
        *((family, {**FLAT, "full_attention": {"rope_type": "linear"}}) for family in ALIKE),
    ],
)
def test_the_form_of_other_families_is_rejected(family: str, parameters: dict[str, Any]) -> None:
    """transformers rejects most of them, too. In EuroBERT, NomicBERT and GTE it ignores objects of types of layers."""
    expected = "one object for all layers" if family in ALIKE else "an object for each layer type"
    with pytest.raises(CheckpointError, match=f"rope_parameters = .*, expected {expected}"):
        encoder_config({**hf_config(family).to_dict(), "rope_parameters": parameters})


@pytest.mark.parametrize("family", BY_TYPE)
def test_transformers_rejects_one_object_for_all_layers(family: str) -> None:
    """If it reads it one day, so must we."""
    with pytest.raises((KeyError, StrictDataclassError)):
        AutoModel.from_config(AutoConfig.for_model(family, **_SMALL, rope_parameters=dict(FLAT)))


_SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 8, "vocab_size": 9}
SCALED = ["longrope", "llama3", "proportional", "unknown"]
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "rope_parameters": lambda rope: {"rope_parameters": {"rope_type": rope, "factor": 2.0, "rope_theta": 1e4}},
    "old name": lambda rope: {"rope_parameters": {"type": rope, "factor": 2.0}},
    "layer type": lambda rope: {"rope_parameters": {"sliding_attention": {"rope_type": rope}}},
    "rope_scaling": lambda rope: {"rope_scaling": {"type": rope, "factor": 2.0}},
    "both": lambda rope: {"rope_parameters": None, "rope_scaling": {"rope_type": rope, "factor": 2.0}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", [*ALIKE, *BY_TYPE])
def test_other_scalings_are_rejected_by_name_wherever_they_are_stated(family: str, place: str) -> None:
    for rope in SCALED:
        config = {**hf_config(family).to_dict(), **PLACES[place](rope)}
        with pytest.raises(CheckpointError, match=f"config.json: rope_.*{rope}"):
            encoder_config(config)

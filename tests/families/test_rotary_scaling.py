"""Rotary positions scaled for long inputs are those of transformers, in each form in which config.json may state them.

The reference computes the frequencies with transformers' own functions (``hf_frequencies``), for a new model.
"""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from bert_tasks.encoder.int8 import int8_encoder, record_ranges
from bert_tasks.encoder.packing import Packed, Padded
from bert_tasks.encoder.positions import scaled_frequencies, sequence_lengths
from bert_tasks.errors import CheckpointError
from bert_tasks.export import TOLERANCE, export
from bert_tasks.families import encoder_config, family_of, parameter_map
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling
from support.hf_models import HFBatch, hf_config, hf_frequencies, hf_model, lacks, random_batch
from support.int8 import needs_int8
from support.parity import (
    hf_output,
    in_our_names,
    ours_from,
    packed_batch,
    packed_difference,
    packed_output,
    packed_rows,
    shaped_difference,
    shaped_output,
)
from support.sampling import slow_except
from support.small_checkpoints import edit_config, save_checkpoint
from support.stopped_runs import digests, run, stopped

pytestmark = pytest.mark.every_family
ALIKE = ["eurobert", "nomic_bert", "gte"]  # one scaling for all layers
BY_TYPE = ["modernbert", "ultrabert"]  # a scaling for each type of layer
ORIGINAL = 20
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 3.0},
}


def scaled(family: str, kind: str, *, length: int = ORIGINAL) -> PreTrainedModel:
    """A tagger whose full layers, or all layers, are scaled from ``length`` tokens to four times as many."""
    rope: dict[str, Any] = {"rope_theta": 300.0, **SCALINGS[kind]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = length
    if family in BY_TYPE:
        sliding = {"rope_type": "linear", "factor": 1.5, "rope_theta": 300.0}  # another scaling of the same base
        rope = {"full_attention": rope, "sliding_attention": sliding}
    longest = 4 * length if kind == "yarn" else length
    return hf_model(family, "token", config=hf_config(family, rope_parameters=rope, max_position_embeddings=longest))


CASES = [(family, kind) for kind in SCALINGS for family in [*ALIKE, *BY_TYPE]]
QUICK = (("eurobert", "dynamic"), ("modernbert", "yarn"), ("gte", "linear"))
SAMPLED = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("family", "kind"), SAMPLED)
def test_logits_and_gradients_beyond_the_original_length_are_those_of_transformers(family: str, kind: str) -> None:
    theirs = scaled(family, kind, length=128)
    ours, batch = ours_from(theirs, "token"), random_batch(family, lengths=(512,))
    assert ours.config.usable_length >= 512
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    expected, logits = hf_output(theirs, batch), packed_output(ours, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.autograd.backward(expected.square().sum())
    torch.autograd.backward(logits.square().sum())
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in grads.values())
    for name, gradient in in_our_names(grads, theirs, "token").items():
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-9 * largest, msg=name)


@pytest.mark.parametrize(("family", "kind"), [param for param in SAMPLED if "dynamic" not in param.values])
def test_ragged_batches_are_those_of_transformers(family: str, kind: str) -> None:
    theirs = scaled(family, kind)
    ours, batch = ours_from(theirs, "token"), random_batch(family, lengths=(17, 1, 80, 30))
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", slow_except([*ALIKE, *BY_TYPE], "modernbert"))
def test_with_dynamic_scaling_a_row_does_not_depend_on_the_others(family: str, side: Any) -> None:
    """It is what transformers computes for this row alone. For a batch it takes the longest row's length."""
    theirs, lengths = scaled(family, "dynamic"), (17, 1, 80, 30, ORIGINAL, ORIGINAL + 1)
    ours, batch = ours_from(theirs, "token"), random_batch(family, lengths=lengths, side=side)
    of_batch, packed = shaped_output(ours, batch), packed_output(ours, batch)
    together = hf_output(theirs, batch)
    for row, length in enumerate(lengths):
        real = batch.attention_mask[row].bool()
        parts = {name: value[row : row + 1, real] for name, value in vars(batch).items()}
        alone = hf_output(theirs, HFBatch(**parts))[0]
        for output in (of_batch, packed):
            torch.testing.assert_close(output[row, real], alone, rtol=0, atol=1e-10)
        apart = float((together[row, real] - alone).abs().max())
        assert apart <= 1e-10 if length in (1, 80) else apart > 1e-4


def test_the_lengths_of_sequences_need_their_starts_only() -> None:
    """The layout of a CUDA graph has no others, and some of its sequences may be empty."""
    nothing = torch.empty(0, dtype=torch.int64)
    names = ("first_rows", "caller_order", "sequence_of_row", "row_lengths", "gather_positions")
    tensors = dict.fromkeys(names, nothing)
    starts = torch.tensor([0, 1, 4, 9, 9, 9], dtype=torch.int32)
    layout = Packed(**tensors, lengths=(5,), cu_seqlens=starts, gather_counts=(), groups=(), regroup=None)
    assert sequence_lengths(torch.zeros(9, dtype=torch.int64), layout).tolist() == [1, *[3] * 3, *[5] * 5]
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    padded = Padded(batch=3, length=5, mask=mask)
    found = sequence_lengths(torch.arange(5).repeat(3), padded).view(3, 5)[:, 0].tolist()
    assert found[:2] == [4, 2]  # a hole has a position of its own
    assert found[2] <= 1


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_training_step_waits_for_no_number(kind: str) -> None:
    """On the meta device, a number that the host needs is an error."""
    ours = ours_from(scaled("modernbert", kind), "token").train()
    packed = packed_batch(ours, random_batch("modernbert", lengths=(17, 1, 80, 30))).to(torch.device("meta"))
    torch.autograd.backward(ours.to("meta")(packed).sum())
    assert ours.get_parameter("encoder.layers.0.attention.qkv.weight").grad.shape == (108, 36)


def drawn(chance: random.Random) -> dict[str, Any]:
    """Any scaling, with or without the fields that have defaults."""
    kind = chance.choice(("linear", "dynamic", "yarn"))
    rope: dict[str, Any] = {"rope_type": kind, "factor": chance.choice((1, 2.0, chance.uniform(1, 40)))}
    if chance.random() < 0.7:
        rope["rope_theta"] = chance.choice((10_000.0, 160_000, chance.uniform(2, 1e6)))
    if kind == "yarn":
        fields = {
            "original_max_position_embeddings": chance.choice((1, 50, 8192)),
            "beta_fast": chance.choice((None, 32, chance.uniform(1, 100))),
            "beta_slow": chance.choice((None, 1, chance.uniform(0.01, 1))),
            "attention_factor": chance.choice((None, 1.0, chance.uniform(0.1, 2))),
            "mscale": chance.choice((None, 0)),
            "truncate": True,
        }
        rope |= {name: value for name, value in fields.items() if chance.random() < 0.6}
    return rope


@pytest.mark.parametrize("seed", range(4))
def test_any_scaling_has_the_frequencies_of_transformers(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        family, layer_type, rope = chance.choice(("eurobert", "modernbert")), None, drawn(chance)
        stated: dict[str, Any] = {"rope_parameters": copy.deepcopy(rope), "max_position_embeddings": 64}
        if family == "modernbert":
            layer_type = "full_attention"
            stated["rope_parameters"] = {layer_type: stated["rope_parameters"], "sliding_attention": {}}
        theirs = hf_config(family, hidden_size=16 * 6, head_dim=16, **copy.deepcopy(stated))
        ours = encoder_config({**theirs.to_dict(), **stated})
        assert ours == encoder_config(theirs.to_dict())
        length, scaling, theta = chance.choice((1, 64, 65, 1000)), ours.rotary_scaling[0], ours.rotary_theta[0]
        assert scaling is not None
        layout = Padded(batch=1, length=length, mask=torch.ones(1, length).bool())
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
            expected, factor = hf_frequencies(theirs, dtype, length=length, layer_type=layer_type)
            plain = 1.0 / theta ** (torch.arange(0, 16, 2, dtype=dtype) / 16)
            found = scaled_frequencies(plain, theta, scaling, torch.arange(length), layout)
            torch.testing.assert_close(found.expand(length, -1)[0], expected, rtol=tolerance, atol=0)
            assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


needs_current_modernbert = pytest.mark.skipif(lacks("modernbert"), reason="an older ModernBERT is no reference")
# What semantic-router's training of mmBERT with 32,768 tokens sets before it loads mmBERT base, and mmBERT base itself:
# https://github.com/vllm-project/semantic-router/blob/main/src/training/model_embeddings/mmbert_32k/configs/foundation.json
# https://huggingface.co/jhu-clsp/mmBERT-base/blob/main/config.json
MMBERT_32K: dict[str, Any] = {
    "model_type": "modernbert",
    "vocab_size": 256_000,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000,
    "local_rope_theta": 160_000,
    "pad_token_id": 0,
    "max_position_embeddings": 32_768,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


@needs_current_modernbert
def test_mmbert_with_32768_tokens() -> None:
    theirs = AutoConfig.for_model(**copy.deepcopy(MMBERT_32K))
    config = encoder_config(MMBERT_32K)
    assert config == encoder_config(theirs.to_dict())
    assert (config.usable_length, set(config.rotary_theta)) == (32_768, {160_000.0})
    (scaling,) = set(config.rotary_scaling)  # both types of layers
    assert scaling is not None
    assert (scaling.factor, scaling.original_length) == (4.0, 8192)
    assert scaling.attention_factor == pytest.approx(1.138629436)  # 0.1 ln 4 + 1
    with torch.device("meta"):
        reference = AutoModelForMaskedLM.from_config(theirs)
        model = TaskModel(MMBERT_32K, MaskedLanguageModeling.of(max_length=32_768))
        states = model.encoder(*torch.zeros(3, 16_384, dtype=torch.int64), Padded(batch=1, length=16_384, mask=MASK))
    assert states.shape == (16_384, 768)
    names = parameter_map(family_of(MMBERT_32K), config, head="masked-lm", pooler=False)
    shapes = {name: value.shape for name, value in reference.state_dict().items()}
    for name, sources in names.items():
        assert (
            model.get_parameter(name).shape == torch.cat([torch.empty(shapes[s], device="meta") for s in sources]).shape
        )


MASK = torch.ones(1, 16_384, dtype=torch.bool, device="meta")


@needs_current_modernbert
def test_mmbert_has_the_frequencies_of_a_stock_model() -> None:
    rotary = ModernBertRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(MMBERT_32K)))
    scaling = encoder_config(MMBERT_32K).rotary_scaling[0]
    assert scaling is not None
    plain = 1.0 / 160_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    found = scaled_frequencies(plain, 160_000.0, scaling, torch.arange(1), Padded(batch=1, length=1, mask=MASK))
    for layer_type in ("full_attention", "sliding_attention"):
        torch.testing.assert_close(found, getattr(rotary, f"{layer_type}_inv_freq"), rtol=1e-6, atol=0)
        assert getattr(rotary, f"{layer_type}_attention_scaling") == scaling.attention_factor
    # In 8,192 tokens, planes up to the ninth turn at least 32 times, and those from the twentieth on not even once.
    assert torch.equal(found[:10], plain[:10])
    torch.testing.assert_close(found[20:], plain[20:] / 4)
    assert ((found < plain) & (found > plain / 4))[10:20].all()


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0}
STATED: list[tuple[str, dict[str, Any]]] = [
    *((family, {"rope_scaling": YARN, "rope_theta": 77.0}) for family in ALIKE),
    *((family, {"rope_scaling": {"type": "linear", "factor": 3}}) for family in ALIKE),
    *((family, {"rope_scaling": YARN, "original_max_position_embeddings": 9}) for family in ALIKE),
    ("gte", {"rope_parameters": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 9}),
    ("modernbert", {"rope_scaling": YARN}),
    ("modernbert", {"rope_scaling": {**YARN, "rope_theta": 9.0}, "original_max_position_embeddings": 9}),
    ("modernbert", {"rope_scaling": YARN, "global_rope_theta": 77.0}),
    (
        "modernbert",
        {
            "rope_scaling": YARN,
            "rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}},
        },
    ),
    ("modernbert", {"rope_parameters": {"full_attention": YARN}}),
    ("ultrabert", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}),
]


@pytest.mark.parametrize(("family", "stated"), STATED)
def test_every_form_of_the_fields_is_read_as_in_transformers(family: str, stated: dict[str, Any]) -> None:
    written = hf_config(family, **{"rope_parameters": None, **copy.deepcopy(stated)}).to_dict()
    file = {**hf_config(family).to_dict(), "rope_parameters": None, **stated}
    ours = encoder_config(file)
    assert ours == encoder_config(written)
    assert any(ours.rotary_scaling)


SMALL_BASE = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}}
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    *((family, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is") for family in ALIKE),
    ("eurobert", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "only default, linear, dynamic and yarn"),
    ("eurobert", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type = \['yarn'\] is not supported"),
    ("eurobert", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn' needs a factor"),
    ("eurobert", {"rope_parameters": {"rope_type": "yarn", "factor": None}}, "factor = None, expected a number"),
    ("eurobert", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor = 0.5, expected at least 1"),
    ("eurobert", {"rope_parameters": {**YARN, "beta_fast": 0}}, "beta_fast = 0, expected at least 0.001"),
    ("eurobert", {"rope_parameters": {**YARN, "beta_slow": "a"}}, "beta_slow = 'a', expected a number"),
    ("eurobert", {"rope_parameters": {**YARN, "mscale": 0.7}}, "not supported with mscale = 0.7"),
    ("eurobert", {"rope_scaling": {**YARN, "mscale_all_dim": 1}}, "not supported with mscale_all_dim = 1"),
    ("eurobert", {"rope_parameters": {**YARN, "truncate": False}}, "not supported with truncate = False"),
    ("gte", {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "= 0, expected at least 1"),
    ("gte", {"rope_parameters": YARN, "original_max_position_embeddings": None}, "= None, expected an integer"),
    ("gte", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "not supported with a partial_rotary_factor"),
    ("gte", {"rope_scaling": YARN, "partial_rotary_factor": [1]}, "not supported with a partial_rotary_factor"),
    ("gte", {"rope_scaling": [YARN]}, r"rope_scaling = \[.*\], expected one object for all layers"),
    ("modernbert", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling = .*, expected an object with a"),
    ("modernbert", {"rope_scaling": 3}, "rope_scaling = 3, expected an object with a rope_type"),
    ("modernbert", {"rope_parameters": SMALL_BASE}, "the rope_theta of full_attention = 1.0, expected at least 1.001"),
    *(
        (family, {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}}, "with truncate = False")
        for family in BY_TYPE
    ),
    ("ultrabert", {"rope_scaling": YARN}, "rope_scaling = .* is not supported, only None is, because transformers"),
]


@pytest.mark.parametrize(("family", "stated", "message"), REJECTED)
def test_what_is_not_computed_is_rejected_in_one_line(family: str, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        encoder_config({**hf_config(family).to_dict(), "rope_parameters": None, **stated})
    assert "\n" not in str(error.value)


def test_transformers_ignores_what_is_rejected_in_modernbert() -> None:
    """If it reads these fields one day, so must we."""
    named = AutoConfig.for_model("modernbert", rope_scaling={"type": "yarn", "factor": 2.0})
    assert named.rope_parameters["full_attention"]["rope_type"] == "default"


@pytest.fixture(params=[("modernbert", "yarn"), ("eurobert", "dynamic")], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path: Path, by_kind: dict[str, Any]) -> Path:
    """A tagger in the form of older files, for 12 tokens that are scaled to 48."""
    family, kind = request.param
    save_checkpoint(tmp_path / "base", family, by_kind["modern"], head="token", labels=("O", "B-X", "I-X"), wide=True)
    scaling = {**SCALINGS[kind], "factor": 4.0}
    length = 12
    if kind == "yarn":
        scaling["original_max_position_embeddings"], length = 12, 48
    edit_config(tmp_path / "base", rope_parameters=None, rope_scaling=scaling, max_position_embeddings=length)
    return tmp_path / "base"


@torch.no_grad()
def test_a_saved_model_is_opened_by_transformers(folder: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(folder, task="token-classification", max_length=40).eval()
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved").eval()
    again = TaskModel.from_pretrained(tmp_path / "saved").eval()
    ids = torch.randint(5, 40, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = model(ids)
    assert torch.equal(again(ids), logits)
    torch.testing.assert_close(theirs(ids).logits, logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_exported_model_is_equal_at_every_length(folder: Path, tmp_path: Path) -> None:
    """``export`` compares its graph with the model on rows of all lengths."""
    model = TaskModel.from_pretrained(folder, task="token-classification", max_length=48)
    words = [f"word {number}" for number in range(40)]
    rows = [{"words": words[: 1 + number % 20]} for number in range(60)]
    exported = export(model, to="onnx", output=tmp_path / "graph", data=rows)
    parity = exported.record["parity"]
    assert parity["longest"] == 48
    assert parity["max_difference"] <= TOLERANCE * max(1.0, parity["largest_logit"])


@needs_int8
@torch.no_grad()
@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_scaled_positions_in_int8(kind: str) -> None:
    theirs = scaled("modernbert", kind).float()
    ours, batch = ours_from(theirs, "token"), random_batch("modernbert", lengths=(17, 1, 80, 30))
    packed = packed_batch(ours, batch)

    def states(encoder: Any) -> Tensor:
        hidden: Tensor = encoder(packed.input_ids, packed.position_ids, packed.token_type_ids, packed.layout)
        return hidden

    with record_ranges(ours.encoder) as ranges:
        exact = states(ours.encoder)
    rounded = states(int8_encoder(ours.encoder, ranges))
    assert float((rounded - exact).square().mean().sqrt() / exact.std()) <= 0.2
    assert packed_rows(ours, packed).isfinite().all()


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "whole", folder)
    stopped(3, tmp_path / "run", folder)
    run(tmp_path / "run", folder, head_seed=5)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")

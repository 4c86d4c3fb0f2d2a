"""Keys and values of checkpoints: what loads, what is refused, and that saving gives the same files back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from bert_tasks.checkpoints.load import CheckpointMatch, match_weights, module_tensors
from bert_tasks.encoder.heads import PerTokenHead, SequenceHead
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.errors import CheckpointError
from bert_tasks.families import FAMILIES as FAMILY_DATA
from bert_tasks.families import encoder_config, family_of, parameter_map
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, MultipleChoice, ReplacedTokens, Task
from support.hf_models import (
    FAMILIES,
    HEADS,
    PREFIX,
    WITH_CHOICE,
    Head,
    has_head,
    hf_class,
    hf_config,
    hf_model,
    with_current_names,
)

# Pre-training classes of transformers with their families.
PRETRAINING = [(family, f"{PREFIX[family]}ForMaskedLM") for family in FAMILIES]
PRETRAINING += [(family, f"{PREFIX[family]}ForPreTraining") for family in ("bert", "albert", "electra")]
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DEBERTA = {
    "vocab_size": 128100,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
DEBERTA_XLARGE = {"hidden_size": 1536, "num_attention_heads": 24, "intermediate_size": 6144, "conv_kernel_size": 3}
# Published models that have other modules than the defaults of their class, or fields of older versions.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"defaults of {family}": (family, {}) for family in FAMILIES},
    "roberta-base": ("roberta", ROBERTA),
    "xlm-roberta-base": ("xlm-roberta", ROBERTA | {"vocab_size": 250002}),
    "electra-base-discriminator": ("electra", {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12}),
    "ernie-3.0-base-zh": ("ernie", {"max_position_embeddings": 2048, "type_vocab_size": 4, "use_task_id": True}),
    "ModernBERT-base": (
        "modernbert",
        {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 128},
    ),
    "EuroBERT-610m": ("eurobert", {"hidden_size": 1152, "num_attention_heads": 18, "num_key_value_heads": 6}),
    "deberta-v3-base": ("deberta-v2", DEBERTA),
    "deberta-v2-xlarge": ("deberta-v2", DEBERTA | DEBERTA_XLARGE),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, expected at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": -36}, "hidden_size = -36"),
        ({"hidden_size": "36"}, "hidden_size = '36'"),
        ({"pad_token_id": 120}, "pad_token_id = 120 is not below vocab_size"),
        ({"num_labels": 10**9}, "num_labels = 1000000000, expected at most 1000000"),
        ({"num_labels": "3"}, "num_labels = '3', expected an integer"),
        ({"type_vocab_size": -1}, "type_vocab_size = -1, expected at least 0"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob = 1.5, expected at most 1"),
        ({"classifier_dropout": 2}, "classifier_dropout = 2, expected at most 1"),
        ({"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 2}, "leaves no position for a token"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "albert", "num_hidden_groups": 0}, "num_hidden_groups = 0"),
        ({"is_decoder": True}, "is_decoder = True is not supported"),
    ],
)
def test_config_that_makes_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        encoder_config(hf_config("bert").to_dict() | change)


def small_model(family: str, head: Head = "base") -> PreTrainedModel:
    return hf_model(family, head, dtype=torch.float32)


def match(model: PreTrainedModel, tensors: dict[str, Tensor], *, head: str = "base", **options: Any) -> CheckpointMatch:
    """Matches ``tensors`` with a model of the shape of ``model`` (its pooler included)."""
    config = model.config.to_dict()
    family = family_of(config)
    names = parameter_map(family, encoder_config(config), head=head, pooler=family.pooler is not None)
    shapes = our_shapes(config, head=head, num_labels=3, pooler=family.pooler is not None)
    options = {"head_may_be_new": False} | options
    return match_weights(tensors, names, shapes=shapes, family=family, **options)


def our_shapes(config: dict[str, Any], *, head: str, num_labels: int, pooler: bool) -> dict[str, torch.Size]:
    ours = encoder_config(config)
    with torch.device("meta"):
        modules: dict[str, torch.nn.Module] = {"encoder": TransformerEncoder(ours)}
        if pooler:
            modules["pooler"] = torch.nn.Linear(ours.hidden_size, ours.hidden_size)
        if head == "sequence":
            modules["head"] = SequenceHead(ours, num_labels)
        elif head != "base":
            modules["head"] = PerTokenHead(ours, num_labels, dropout=0.0)
        return {name: value.shape for name, value in torch.nn.ModuleDict(modules).state_dict().items()}


def old_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    names = list(tensors)
    for new, old in renamed.items():
        names = [name.replace(new, old) for name in names]
    assert names != list(tensors)
    return dict(zip(names, tensors.values(), strict=True))


def assert_same_state(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]
    assert different == []


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tasks_with_heads(family: str) -> dict[str, Task]:
    """Tasks by the ending of the classes of transformers that have their heads."""
    tasks: dict[str, Task] = {"ForMaskedLM": MaskedLanguageModeling.of()}
    if family in WITH_CHOICE:
        tasks["ForMultipleChoice"] = MultipleChoice.of()
    if family in ("bert", "albert", "ernie"):
        tasks["ForPreTraining"] = MaskedLanguageModeling.of(sentence_objective="sop")
    elif family == "electra":
        tasks["ForPreTraining"] = ReplacedTokens.of()
    return tasks


@with_current_names
@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_and_shapes_of_published_checkpoints(name: str) -> None:
    """Our key map and shapes are those of transformers' classes, which published files fit, in a model of few layers.

    What transformers ties to the word embeddings, or to another bias, is in no file.
    """
    family_name, values = PUBLISHED[name]
    family = FAMILY_DATA[family_name]
    layers = {"n_layers" if family_name == "distilbert" else "num_hidden_layers": 3}
    config = getattr(transformers, f"{PREFIX[family_name]}Config")(**values, **layers, num_labels=2)
    raw = config.to_dict()
    heads: dict[str, tuple[PreTrainedModel, dict[str, torch.Size]]] = {}  # type of head -> their model, our shapes
    for head in HEADS:
        if has_head(family_name, head):
            with torch.device("meta"):
                theirs = hf_class(family_name, head)(config)
            pooler = head == "base" and any(key.startswith("pooler.") for key in theirs.state_dict())
            heads[head] = theirs, our_shapes(raw, head=head, num_labels=2, pooler=pooler)
    for suffix, task in tasks_with_heads(family_name).items():
        with torch.device("meta"):
            theirs, model = getattr(transformers, PREFIX[family_name] + suffix)(config), TaskModel(raw, task)
        heads[str(task.head_kind)] = theirs, {key: value.shape for key, value in model.state_dict().items()}
    for head, (theirs, shapes) in heads.items():
        pooler = any(key.startswith("pooler.") for key in shapes)
        names = parameter_map(family_of(raw), encoder_config(raw), head=head, pooler=pooler)
        ours = {}
        for key, shape in shapes.items():
            for source in names[key]:
                full = source.removeprefix(family.prefix) if head == "base" else source
                ours[full] = torch.Size([shape[0] // len(names[key]), *shape[1:]])
        tied = theirs.all_tied_weights_keys
        assert ours == {key: value.shape for key, value in theirs.state_dict().items() if key not in tied}, head


@pytest.mark.parametrize(("family", "class_name"), PRETRAINING)
def test_pretraining_checkpoints_load(family: str, class_name: str, tmp_path: Path) -> None:
    model = getattr(transformers, class_name)(hf_config(family))
    model.save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(tmp_path)
    report = encoder.load_report
    assert report is not None
    assert report.dropped
    assert not report.new
    encoder.save_pretrained(tmp_path / "ours")
    base = {f"{model.base_model_prefix}.{name}": value for name, value in model.base_model.state_dict().items()}
    saved = module_tensors(load_file(tmp_path / "ours" / "model.safetensors"), FAMILY_DATA[model.config.model_type])
    assert_same_state({f"{model.base_model_prefix}.{name}": value for name, value in saved.items()}, base)
    assert set(report.loaded) == base.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path / "theirs")
    encoder = Encoder.from_pretrained(tmp_path / "theirs")
    encoder.save_pretrained(tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert_same_state(ours, theirs)
    reloaded, loading = AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded.state_dict(), model.state_dict())


@pytest.mark.slow  # of 22 million parameters
def test_embedded_weights_round_trip(embedded_model: Path, tmp_path: Path) -> None:
    encoder = Encoder.from_pretrained(embedded_model)
    assert encoder.load_report is not None
    assert encoder.load_report.ignored == ("embeddings.position_ids",)
    encoder.save_pretrained(tmp_path)
    original = load_file(embedded_model / "model.safetensors")
    del original["embeddings.position_ids"]
    assert_same_state(load_file(tmp_path / "model.safetensors"), original)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(reloaded) == 30522


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_old_norm_names(prefix: str, tmp_path: Path) -> None:
    model = small_model("bert")
    tensors = {prefix + name: tensor for name, tensor in old_norms(model.state_dict()).items()}
    encoder = Encoder.from_pretrained(write(tmp_path / "old", model.config.to_dict(), tensors))
    encoder.save_pretrained(tmp_path / "ours")
    assert_same_state(load_file(tmp_path / "ours" / "model.safetensors"), model.state_dict())
    report = encoder.load_report
    assert report is not None
    assert report.renamed == sum(".LayerNorm." in f".{name}" or not prefix for name in model.state_dict())


@pytest.mark.parametrize("layout", ["sharded", "bin", "sharded-bin"])
def test_other_file_layouts(layout: str, tmp_path: Path) -> None:
    model = small_model("roberta")
    state = model.state_dict()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    if layout != "sharded":
        for file in tmp_path.glob("model*.safetensors*"):
            file.unlink()
    if layout == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    elif layout == "sharded-bin":
        shards = {name: f"pytorch_model-0000{1 + (i % 2)}-of-00002.bin" for i, name in enumerate(state)}
        for shard in set(shards.values()):
            torch.save({name: state[name] for name in state if shards[name] == shard}, tmp_path / shard)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    Encoder.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    assert_same_state(load_file(tmp_path / "ours" / "model.safetensors"), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = small_model("electra").to(dtype)
    loaded = match(model, model.state_dict()).tensors
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    embedding = loaded["encoder.embeddings.word.weight"]
    assert torch.equal(embedding, model.state_dict()["embeddings.word_embeddings.weight"].float())
    embedding.zero_()
    assert model.embeddings.word_embeddings.weight.abs().sum() > 0  # what is loaded is a copy
    wide = match(model, model.state_dict(), dtype=torch.float64).tensors
    assert {tensor.dtype for tensor in wide.values()} == {torch.float64}


def test_buffers_of_old_versions_are_ignored() -> None:
    model = small_model("bert", "token")
    buffers = {"bert.embeddings.position_ids": torch.arange(4), "bert.embeddings.token_type_ids": torch.zeros(4)}
    report = match(model, buffers | model.state_dict() | small_pooler(model)).report
    assert set(report.ignored) == buffers.keys()


def small_pooler(model: PreTrainedModel) -> dict[str, Tensor]:
    size = model.config.hidden_size
    return {"bert.pooler.dense.weight": torch.ones(size, size), "bert.pooler.dense.bias": torch.ones(size)}


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: state | {name: change(state[name])}


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([tensor.flatten()[:-1], torch.tensor([value])]).reshape(tensor.shape)


QUERY, KEY = (f"encoder.layer.1.attention.self.{projection}.weight" for projection in ("query", "key"))
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (without("embeddings.LayerNorm.weight"), "missing tensor bert.embeddings.LayerNorm.weight"),
    "missing-key": (without(KEY), f"missing tensor bert.{KEY}"),
    "unknown": (lambda state: state | {"surprise.weight": torch.ones(1)}, "unknown key surprise.weight"),
    "layer-5": (
        lambda state: state | {"encoder.layer.4.output.dense.bias": torch.ones(36)},
        "unknown key encoder.layer.4.output.dense.bias",
    ),
    "shape": (replaced(QUERY, lambda t: t[:, 1:]), f"bert.{QUERY} has shape [36, 35], expected [36, 36]"),
    "transposed": (
        replaced("encoder.layer.0.output.dense.weight", lambda t: t.T),
        "bert.encoder.layer.0.output.dense.weight has shape [56, 36], expected [36, 56]",
    ),
    "nan": (replaced(QUERY, poisoned(float("nan"))), f"bert.{QUERY} holds NaN"),
    "infinite": (replaced(KEY, poisoned(float("-inf"))), f"bert.{KEY} holds NaN or infinite"),
    "integers": (replaced(QUERY, lambda t: t.long()), f"bert.{QUERY} has dtype torch.int64"),
    "twice": (
        lambda state: state | {"embeddings.LayerNorm.gamma": torch.ones(36)},
        "bert.embeddings.LayerNorm.weight appears twice",
    ),
    "twice-prefix": (
        lambda state: state | {f"bert.{QUERY}": torch.ones(36, 36)},
        f"bert.{QUERY} appears twice, as {QUERY} and as bert.{QUERY}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_once(damage: str) -> None:
    change, message = DAMAGES[damage]
    model = small_model("bert")
    with pytest.raises(CheckpointError) as caught:
        match(model, change(model.state_dict()))
    problems = str(caught.value).splitlines()[1:]
    assert [problem.strip().startswith(message) for problem in problems] == [True], problems


def test_all_problems_are_reported_at_once() -> None:
    model = small_model("bert")
    state = without(QUERY)(model.state_dict()) | {"surprise": torch.ones(1)}
    with pytest.raises(CheckpointError, match=rf"(?s)missing tensor bert\.{QUERY}.*unknown key surprise"):
        match(model, state)
    with pytest.raises(CheckpointError, match="and 63 more"):
        match(model, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_another_size_is_new_in_training_only(family: str) -> None:
    model = hf_model(family, "sequence", dtype=torch.float32, config=hf_config(family, num_labels=5))
    names = parameter_map(
        family_of(model.config.to_dict()), encoder_config(model.config.to_dict()), head="sequence", pooler=False
    )
    shapes = our_shapes(model.config.to_dict(), head="sequence", num_labels=3, pooler=False)
    options: dict[str, Any] = {"shapes": shapes, "family": family_of(model.config.to_dict())}
    output = names["head.output.weight"][0]
    with pytest.raises(CheckpointError, match=rf"{output} has shape \[5, 36\], expected \[3, 36\]"):
        match_weights(model.state_dict(), names, head_may_be_new=False, **options)
    loose = match_weights(model.state_dict(), names, head_may_be_new=False, strict=False, **options)
    matched = match_weights(model.state_dict(), names, head_may_be_new=True, **options)
    assert set(loose.report.dropped) == set(matched.report.dropped)
    assert set(matched.report.new) == {output, output.replace("weight", "bias")}
    assert set(matched.report.dropped) == set(matched.report.new)
    assert ("head.dense.weight" in matched.tensors) == ("head.dense.weight" in shapes)


def test_head_of_another_task_is_dropped() -> None:
    model = small_model("bert", "token")
    matched = match(model, model.state_dict() | small_pooler(model))
    assert set(matched.report.dropped) == {"classifier.weight", "classifier.bias"}
    names = parameter_map(
        family_of(model.config.to_dict()), encoder_config(model.config.to_dict()), head="token", pooler=False
    )
    shapes = our_shapes(model.config.to_dict(), head="token", num_labels=3, pooler=False)
    options: dict[str, Any] = {"shapes": shapes, "family": family_of(model.config.to_dict())}
    ignoring = match_weights(model.state_dict(), names, head_may_be_new=True, ignore_head=True, **options)
    assert set(ignoring.report.new) == {"classifier.weight", "classifier.bias"}
    assert set(ignoring.report.dropped) == set(ignoring.report.new)

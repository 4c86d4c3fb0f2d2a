"""Checkpoints of Google's TensorFlow 1 programs: the same tensors, sizes and logits as in Hugging Face's format."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks import Encoder, TaskModel
from bert_tasks.checkpoints import tf1
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.checkpoints.load import read_config, read_weights
from bert_tasks.checkpoints.sentencepiece import read_sentencepiece
from bert_tasks.checkpoints.tensor_bundle import Entry, TensorBundle
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from support.small_checkpoints import copied, edit_config
from support.tf1_checkpoints import (
    ALBERT,
    BERT,
    ELECTRA,
    FIXTURES,
    FOLDER,
    GENERATOR,
    VOCABULARY,
    albert,
    bert,
    electra,
    embeddings,
    output,
    values,
    with_optimizer,
)

# HF's name of a module -> Google's, in this order: the other way round from what the package does.
LAYER = ((r"\.layer\.(\d+)\.", r".layer_\1."),)
HEADS = ((r"^classifier\.", ""), (r"^qa_outputs\.", "cls.squad."))
TO_GOOGLE: dict[str, tuple[tuple[str, str], ...]] = {
    "bert": (*LAYER, *HEADS),
    "albert": (
        (r"^albert\.pooler\.", "bert.pooler.dense."),
        (r"^albert\.", "bert."),
        (r"albert_layer_groups\.(\d+)\.albert_layers\.0\.", r"transformer.group_\1.inner_group_0."),
        (r"attention\.(query|key|value)\.", r"attention_1.self.\1."),
        (r"attention\.dense\.", "attention_1.output.dense."),
        (r"attention\.LayerNorm\.", "LayerNorm."),
        (r"full_layer_layer_norm\.", "LayerNorm_1."),
        (r"ffn_output\.", "ffn_1.intermediate.output.dense."),
        (r"ffn\.", "ffn_1.intermediate.dense."),
        (r"^predictions\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
        (r"^predictions\.", "cls.predictions."),
        (r"^sop_classifier\.classifier\.", "cls.seq_relationship."),
    ),
    "electra": (*LAYER, (r"dense_prediction\.", "dense_1.")),
    "generator": (
        *LAYER,
        (r"^electra\.(encoder|embeddings_project)\.", r"generator.\1."),
        (r"^generator_lm_head\.", "generator_predictions."),
    ),
}
# Of these, weights and biases are Google's output_weights and output_bias.
OUTPUTS = re.compile(r"(cls\.seq_relationship|cls\.squad|^)\.?(weight|bias)$|(predictions)\.(bias)$")


def google_variable(rules: str, parameter: str) -> tuple[str, bool]:
    """Google's name of a parameter of HF, and whether its values are transposed."""
    for pattern, replacement in TO_GOOGLE[rules]:
        parameter = re.sub(pattern, replacement, parameter)
    module, _, kind = parameter.rpartition(".")
    if module.endswith("_embeddings"):
        return module.replace(".", "/"), False
    if "LayerNorm" in module:
        kind = {"weight": "gamma", "bias": "beta"}[kind]
    elif OUTPUTS.search(parameter):
        kind = {"weight": "output_weights", "bias": "output_bias"}[kind]
    elif kind == "weight":
        kind = "kernel"
    return "/".join([*module.split("."), kind]).lstrip("/"), kind == "kernel"


def tied(name: str) -> bool:
    """Whether transformers has a parameter of this name twice."""
    return "decoder" in name or name.startswith("generator_lm_head.weight")


def hf_reference(
    rules: str, hf_class: type[transformers.PreTrainedModel], **config: Any
) -> transformers.PreTrainedModel:
    """transformers' model with the numbers that TensorFlow wrote into the checkpoint."""
    model = hf_class(hf_class.config_class(**config)).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if tied(name) or not tensor.is_floating_point():
            continue
        variable, transposed = google_variable(rules, name)
        shape = tuple(tensor.shape)[::-1] if transposed else tuple(tensor.shape)
        content = torch.from_numpy(values(variable, shape))
        tensor.copy_(content.t() if transposed else content)
    model.tie_weights()
    return model


GELU_NEW = {**ALBERT, "hidden_act": "gelu_new"}
# fixture, rules, class of HF, its configuration, task, its labels
CASES = {
    "bert": ("bert", "bert", transformers.BertForPreTraining, BERT),
    "bert_classifier": (
        "bert_classifier",
        "bert",
        transformers.BertForSequenceClassification,
        {**BERT, "num_labels": 3},
    ),
    "bert_squad": ("bert_squad", "bert", transformers.BertForQuestionAnswering, BERT),
    "albert": ("albert", "albert", transformers.AlbertForPreTraining, GELU_NEW),
    "electra": ("electra", "electra", transformers.ElectraForPreTraining, ELECTRA),
    "generator": ("electra", "generator", transformers.ElectraForMaskedLM, {**GENERATOR, "num_attention_heads": 2}),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a case; that of the generator states its class."""
    found = copied(FOLDER / CASES[request.param][0], tmp_path / "google")
    if request.param == "generator":
        edit_config(found, architectures=["ElectraForMaskedLM"])
    return found


ALL_CASES = pytest.mark.parametrize(("case", "folder"), [(case, case) for case in CASES], indirect=["folder"])


@ALL_CASES
def test_tensors_are_equal_bit_by_bit(case: str, folder: Path) -> None:
    _, rules, hf_class, config = CASES[case]
    model = hf_reference(rules, hf_class, **config)
    expected = {name: tensor for name, tensor in model.state_dict().items() if not tied(name)}
    found = read_weights(folder)
    missing = {name for name in expected if "pooler" in name} if case == "bert_squad" else set()
    assert found.keys() - expected.keys() <= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert expected.keys() - found.keys() == missing
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    stated = read_config(folder)
    assert stated["architectures"] == [hf_class.__name__]
    ours, theirs = encoder_config(stated), encoder_config(model.config.to_dict())
    assert ours == theirs


TASKS = {
    **dict.fromkeys(("bert", "albert", "generator"), "masked-language-modeling"),
    "electra": "replaced-token-detection",
}


@ALL_CASES
def test_logits_are_those_of_the_same_weights_in_transformers(case: str, folder: Path, tmp_path: Path) -> None:
    _, rules, hf_class, config = CASES[case]
    reference = hf_reference(rules, hf_class, **config)
    ids = torch.tensor([[3, 6, 8, 9, 15, 4], [3, 30, 31, 4, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": segments}
    with torch.no_grad():
        expected = reference(**inputs)
        ours = TaskModel.from_pretrained(folder, task=TASKS.get(case))
        found = ours(**inputs)
        hidden = Encoder.from_pretrained(folder)(**inputs)
        base = getattr(reference, reference.base_model_prefix)(**inputs)[0]
    real = inputs["attention_mask"].bool()
    assert (hidden - base)[real].abs().max() < 2e-6
    wanted = expected.prediction_logits if case in ("bert", "albert") else None
    if case == "bert_squad":
        wanted = torch.stack([expected.start_logits, expected.end_logits], -1)
    wanted = expected.logits if wanted is None else wanted
    shown = slice(None) if case == "bert_classifier" else real
    assert (found.reshape(wanted.shape) - wanted)[shown].abs().max() < 2e-5
    # The same weights as transformers saves them.
    reference.save_pretrained(tmp_path / "hf")
    ours.tokenizer.save_pretrained(tmp_path / "hf")
    stock = TaskModel.from_pretrained(tmp_path / "hf", task=TASKS.get(case)).state_dict()
    assert ours.state_dict().keys() == stock.keys()
    assert all(torch.equal(tensor, stock[name]) for name, tensor in ours.state_dict().items())
    # What we save is an ordinary folder.
    ours.save_pretrained(tmp_path / "ours")
    again = hf_class.from_pretrained(tmp_path / "ours").state_dict()
    own = {name for name in again if "pair" not in name and "seq_relationship" not in name and "sop_" not in name}
    assert all(torch.equal(reference.state_dict()[name], again[name]) for name in own if "pooler" not in name)


PUBLISHED = {
    "bert-base": ("bert", bert, {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12}),
    "bert-large": ("bert", bert, {"vocab_size": 28996, "hidden_size": 1024, "num_hidden_layers": 24}),
    "albert-base": ("albert", albert, {"vocab_size": 30000, "hidden_size": 768, "num_hidden_layers": 12}),
    "albert-xxlarge": ("albert", albert, {"vocab_size": 30000, "hidden_size": 4096, "num_hidden_layers": 12}),
    "electra-small": ("electra", electra, {"vocab_size": 30522, "hidden_size": 256, "num_hidden_layers": 12}),
    "electra-base": ("electra", electra, {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12}),
    "electra-large": ("electra", electra, {"vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24}),
}
HEAD_CLASSES = {
    "bert": transformers.BertForPreTraining,
    "albert": transformers.AlbertForPreTraining,
    "electra": transformers.ElectraForPreTraining,
    "generator": transformers.ElectraForMaskedLM,
}


def bundle_of(shapes: Mapping[str, tuple[int, ...]]) -> TensorBundle:
    """The index of a checkpoint without data."""
    entries = {
        name: Entry(dtype=1, shape=shape, shard=0, offset=0, size=0, checksum=0, is_partitioned=False)
        for name, shape in shapes.items()
    }
    return TensorBundle(path=Path("folder/model.ckpt.index"), num_shards=1, entries=entries)


@pytest.mark.parametrize(
    ("name", "generator"),
    [(name, generator) for name in PUBLISHED for generator in (False, True)[: 1 + name.startswith("electra")]],
)
def test_names_and_shapes_of_published_sizes(name: str, generator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, variables, sizes = PUBLISHED[name]
    hidden = sizes["hidden_size"]
    embedding = {"albert": 128, "electra": 128 if name == "electra-small" else hidden}.get(rules, hidden)
    config = {
        **(ALBERT if rules == "albert" else BERT),
        **sizes,
        "embedding_size": embedding,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "num_attention_heads": hidden // 64,
    }
    small = {**config, "hidden_size": hidden // 4 if hidden > 256 else 64, "intermediate_size": hidden}
    shapes = with_optimizer(electra(config, small) if rules == "electra" else variables(config))
    if generator:
        rules, config = "generator", {**small, "num_attention_heads": small["hidden_size"] // 64}
    hf_class = HEAD_CLASSES[rules]
    with torch.device("meta"):
        reference = hf_class(hf_class.config_class(**config))
    monkeypatch.setattr(tf1, "open_bundle", lambda path: bundle_of(shapes))
    stated = {"architectures": [hf_class.__name__]} if generator else {}
    found = tf1.open_google(Path("folder/model.ckpt.index"), stated)
    expected = {key: tuple(tensor.shape) for key, tensor in reference.state_dict().items() if not tied(key)}
    assert {key: found.shape(key) for key in found.parameters} == expected
    for key in expected:
        assert found.parameters[key] == google_variable(rules, key)
    if variables is electra:
        sized = tf1.tf1_config(found)
        assert {key: sized[key] for key in sizes} == {key: config[key] for key in sizes}
        for key in ("embedding_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"):
            assert sized[key] == config[key]


def bert_folder(tmp_path: Path, name: str = "bert") -> Path:
    return copied(FOLDER / name, tmp_path / name)


def put_index(folder: Path, monkeypatch: pytest.MonkeyPatch, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Makes the folder's index one with these variables."""
    bundle = replace(bundle_of(shapes), path=folder / "model.ckpt.index")
    monkeypatch.setattr(tf1, "open_bundle", lambda path: bundle)


def inspect_strictly(folder: Path) -> None:
    raise CheckpointError("; ".join(inspect_checkpoint(folder).problems))


@pytest.mark.parametrize(
    "load",
    [
        Encoder.from_pretrained,
        lambda folder: TaskModel.from_pretrained(folder, task="masked-language-modeling"),
        inspect_strictly,
    ],
)
def test_a_variable_of_another_shape_is_not_read(
    load: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bert_folder(tmp_path)
    (folder / "bert_config.json").write_text(json.dumps({**BERT, "vocab_size": 45}))
    read, names = TensorBundle.read, list[str]()

    def noted(self: TensorBundle, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(TensorBundle, "read", noted)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight has shape \[40, 16\], expected \[45, 16\]"):
        load(folder)
    assert "bert/embeddings/position_embeddings" in names
    assert "bert/embeddings/word_embeddings" not in names


def test_variables_of_tensorflow_hub_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"module/{name}": shape for name, shape in albert(ALBERT).items()}
    put_index(Path("folder"), monkeypatch, shapes)
    found = tf1.open_google(Path("folder/model.ckpt.index"), {})
    assert found.family.model_type == "albert"
    assert {name: google_variable("albert", name)[0] for name in found.parameters} == {
        name: variable.removeprefix("module/") for name, (variable, _) in found.parameters.items()
    }


def test_generator_with_embeddings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {**electra(ELECTRA, GENERATOR), **embeddings("generator", ELECTRA, 24)}
    put_index(Path("folder"), monkeypatch, shapes)
    stated = {"num_attention_heads": 2}
    of_generator = tf1.open_google(Path("index"), stated | {"architectures": ["ElectraForMaskedLM"]})
    assert tf1.tf1_config(of_generator)["embedding_size"] == 24
    assert of_generator.parameters["electra.embeddings.word_embeddings.weight"][0].startswith("generator/")
    assert tf1.tf1_config(tf1.open_google(Path("index"), stated))["embedding_size"] == 8


def test_a_generator_alone_is_loaded_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: shape for name, shape in electra(ELECTRA, GENERATOR).items() if "electra/encoder" not in name}
    put_index(Path("folder"), monkeypatch, shapes)
    assert tf1.open_google(Path("index"), {}).head == "masked-lm"


@pytest.mark.parametrize(
    ("shapes", "stated", "reason"),
    [
        ({"_CHECKPOINTABLE_OBJECT_GRAPH": (), "a/b": ()}, {}, "object-based checkpoint of TensorFlow 2"),
        ({"conv/kernel": (3, 3)}, {}, "variables are not those of albert, bert, electra: conv/kernel"),
        (
            electra({**ELECTRA, "hidden_size": 100}, GENERATOR),
            {},
            "hidden_size 100 is not a multiple of 64: state it in",
        ),
        ({"electra/encoder/layer_0/output/dense/bias": (8,)}, {}, "vocab_size cannot be determined: .* is missing"),
        (
            {**bert(BERT), **output("", 10**9, BERT)},
            {"num_attention_heads": 2},
            "1000000000 classes, expected at most 100000",
        ),
        (bert(BERT), {}, "bert_config.json is missing; expected Google's configuration beside"),
    ],
)
def test_checkpoints_that_are_refused(
    shapes: Mapping[str, tuple[int, ...]], stated: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_index(Path("folder"), monkeypatch, shapes)
    with pytest.raises(CheckpointError, match=reason):
        tf1.tf1_config(tf1.open_google(Path("index"), stated))


def test_several_checkpoints_in_a_folder(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    for file in ("index", "data-00000-of-00002", "data-00001-of-00002"):
        (folder / f"bert_model.ckpt.{file}").rename(folder / f"model.ckpt-2.{file}")
    for path in (FOLDER / "bert_squad").glob("model.ckpt-7.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"several TensorFlow checkpoints \(model.ckpt-2.index, model.ckpt-7.index\)"
    ):
        read_config(folder)
    (folder / "checkpoint").write_text(
        'model_checkpoint_path: "/elsewhere/model.ckpt-2"\nall_model_checkpoint_paths: "x"\n'
    )
    assert read_config(folder)["architectures"] == ["BertForPreTraining"]
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    assert read_config(folder)["architectures"] == ["BertForQuestionAnswering"]
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-9"\n')
    with pytest.raises(CheckpointError, match="several"):
        read_weights(folder)


def test_data_without_an_index(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "bert_model.ckpt.index").rename(folder / "bert_model.ckpt.idx")
    with pytest.raises(
        CheckpointError, match=r"data-00000-of-00002: a data file of .*, whose index bert_model.ckpt.index is missing"
    ):
        read_config(folder)


def test_what_a_configuration_of_another_model_states(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    copied_config = {**BERT, "model_type": "roberta", "architectures": ["BertModel"]}
    (folder / "bert_config.json").write_text(json.dumps(copied_config))
    assert {key: read_config(folder)[key] for key in ("model_type", "architectures")} == {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
    }
    (folder / "config.json").write_text('{"model_type": "electra"}')
    with pytest.raises(
        CheckpointError, match=r"config.json: it names another model than the one in bert_model.ckpt.index, bert"
    ):
        read_config(folder)


def test_a_configuration_that_states_nothing_of_the_heads(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "bert_config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(CheckpointError, match=r"bert_config.json: num_attention_heads is missing; expected"):
        read_config(folder)
    (folder / "config.json").write_text(json.dumps(BERT))
    assert read_config(folder)["num_attention_heads"] == 2


def test_a_configuration_with_an_unusable_value(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "bert_config.json").write_text(json.dumps({**BERT, "hidden_act": "swish"}))
    with pytest.raises(CheckpointError, match=r"bert/bert_config.json: activation 'swish' is not supported"):
        read_config(folder)
    (folder / "config.json").write_text('{"hidden_size": "16"}')
    with pytest.raises(
        CheckpointError, match=r"bert_config.json or config.json: hidden_size = '16', expected an integer"
    ):
        read_config(folder)


def test_a_number_of_layers_that_no_model_has(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "bert_config.json").write_text(json.dumps({**BERT, "num_hidden_layers": 10**9}))
    for read in (inspect_checkpoint, Encoder.from_pretrained):
        with pytest.raises(CheckpointError, match=r"num_hidden_layers = 1000000000, expected at most 1000"):
            read(folder)


def test_a_variable_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, "bert_squad")
    (folder / "bert_config.json").write_text(json.dumps({**BERT, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"unknown key bert.encoder.layer.1"):
        Encoder.from_pretrained(folder)
    (folder / "bert_config.json").write_text(json.dumps({**BERT, "intermediate_size": 25}))
    with pytest.raises(CheckpointError, match=r"has shape \[24, 16\], expected \[25, 16\]"):
        Encoder.from_pretrained(folder)
    assert any("[25, 16]" in problem for problem in inspect_checkpoint(folder).problems)


def test_labels_of_a_classifier_can_be_stated(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, "bert_classifier")
    model = TaskModel.from_pretrained(folder)
    assert (model.task.name, model.task.labels) == ("sequence-classification", ("LABEL_0", "LABEL_1", "LABEL_2"))
    names = ["bad", "fair", "good"]
    assert TaskModel.from_pretrained(folder, labels=names).task.labels == tuple(names)
    (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names))}))
    stated = TaskModel.from_pretrained(folder)
    assert stated.task.labels == tuple(names)
    texts = [{"text": "The birds sang"}, {"text": "a fine film"}]
    expected = [prediction.score for prediction in model.predict(texts)]
    assert [prediction.score for prediction in stated.predict(texts)] == expected


def test_weights_of_hugging_face_win(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    model = TaskModel.from_pretrained(folder, task="sequence-classification", labels=["no", "yes"])
    model.save_pretrained(folder)
    (folder / "bert_model.ckpt.index").write_bytes(b"not even read")
    again = TaskModel.from_pretrained(folder)
    assert again.task.labels == ("no", "yes")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["bert", "albert", "electra"])
def test_report_of_inspect(name: str) -> None:
    found = inspect_checkpoint(FOLDER / name)
    assert (found.family, found.problems, found.report.dropped) == (name, (), ())
    of_generator = [variable for variable in FIXTURES[name][1] if variable.startswith("generator")]
    assert found.report.ignored == tuple(sorted(of_generator))
    assert found.sizes["layers"] == 2
    listed = {path.name for path in (FOLDER / name).iterdir()} - {"ids.json", "30k-clean.vocab"}
    assert set(found.files) == listed


def test_vocabulary_of_sentencepiece_gives_the_ids_of_googles_program() -> None:
    tokenizer = load_tokenizer(FOLDER / "albert", vocab_size=ALBERT["vocab_size"])
    assert tokenizer is not None
    for text, ids in json.loads((FOLDER / "albert" / "ids.json").read_text()).items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text


def case_of(folder: Path) -> bool:
    """Whether the folder's tokenizer lower-cases."""
    tokenizer = load_tokenizer(folder, vocab_size=100)
    assert tokenizer is not None
    lowered = tokenizer("Film", add_special_tokens=False)["input_ids"]
    return lowered == tokenizer("film", add_special_tokens=False)["input_ids"]


SMALL = [token for token in VOCABULARY if token == token.lower() or token.startswith("[")]


@pytest.mark.parametrize(
    ("tokens", "stated", "expected"),
    [
        (VOCABULARY, {}, False),
        (VOCABULARY, {"do_lower_case": True}, True),
        (SMALL, {}, True),
        (SMALL, {"do_lower_case": False}, False),
        ([*SMALL, "café"], {}, None),
        ([*SMALL, "cafe\u0301"], {"do_lower_case": "yes"}, None),
        ([*VOCABULARY[:6], "3", "1", ",", ".", "你", "好"], {}, None),
        ([*SMALL, "café"], {"do_lower_case": False}, False),
    ],
)
def test_cased_or_uncased(tokens: list[str], stated: dict[str, Any], expected: bool | None, tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    if stated:
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    if expected is None:
        message = r'cased or uncased: state it in .*tokenizer_config.json, as {"do_lower_case": true} \(uncased\)'
        with pytest.raises(CheckpointError, match=message):
            case_of(folder)
    else:
        assert case_of(folder) is expected


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False}),
        ("bert", {"do_lower_case": False, "strip_accents": True, "model_max_length": 64, "truncation_side": "left"}),
        ("albert", {"do_lower_case": False, "keep_accents": True, "model_max_length": 64}),
    ],
)
def test_settings_of_the_tokenizer_count_as_in_transformers(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = bert_folder(tmp_path, name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if name == "bert":
        expected = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"), **settings)
    else:
        pieces = read_sentencepiece(folder / "30k-clean.model")
        expected = transformers.AlbertTokenizer(
            vocab=list(pieces.pieces), _spm_precompiled_charsmap=pieces.characters, **settings
        )
    found = load_tokenizer(folder, vocab_size=200)
    assert found is not None
    assert found.model_max_length == settings.get("model_max_length", expected.model_max_length)
    assert found.truncation_side == settings.get("truncation_side", "right")
    text = "Ein Café, né 电影 in 3 Teilen"
    assert found.tokenize(text) == expected.tokenize(text)


def test_pieces_that_the_tokenizer_cannot_use(tmp_path: Path) -> None:
    """The reason is that of the library, not advice for files of another kind."""
    folder = bert_folder(tmp_path, "albert")
    (folder / "30k-clean.model").write_bytes(PIECES + b"\x1a\x03\x12\x01\xff")  # a table of characters of one byte
    with pytest.raises(CheckpointError, match=r"30k-clean.model: the tokenizer does not load \(.*[Pp]recompiled"):
        case_of(folder)


def test_vocabularies_that_are_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    (folder / "30k-clean.model").write_bytes((FOLDER / "albert" / "30k-clean.model").read_bytes())
    with pytest.raises(CheckpointError, match=r"several vocabularies \(30k-clean.model, vocab.txt\)"):
        case_of(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match="150 tokens, but the model has 100"):
        case_of(folder)
    (folder / "30k-clean.model").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer; looked for"):
        TaskModel.from_pretrained(folder, task="masked-language-modeling")
    assert Encoder.from_pretrained(folder).tokenizer is None


PIECES = (FOLDER / "albert" / "30k-clean.model").read_bytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PIECES[:-1], "not a SentencePiece model, or damaged"),
        (b"\x0a\x02\x08\x01", "damaged: piece 0 is not a text with a score"),
        (b"\x0a\x03\x0a\x01\xff", "damaged: 'utf-8'"),
        (b"\x12\x02\x18\x02", r"SentencePiece model of type 2; supported is 1 \(Unigram\)"),
        (b"\x12\x00", "of 0 pieces"),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x02\x05", "of 1 piece, whose unknown piece has the id 5"),
        (b"\x0a\x0e\x0a\x01a\x10" + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        (b"\x0a\x05\x0a\x01a\x10\x01", "piece 0 is not a text with a score"),
        (b"\x0a\x0c\x0a\x01a\x11" + bytes(8), "piece 0 is not a text with a score"),
        (b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f", "piece 0 has the score nan"),
        (b"\x0a\x07\x0d" + bytes(4) + b"\x10\x01", "piece 0 is not a text with a score"),
    ],
)
def test_pieces_that_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "30k-clean.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_sentencepiece(path)


def test_a_number_with_its_comma_is_not_one_token(tmp_path: Path) -> None:
    """Google's program splits such a piece again, however probable it is."""
    folder = bert_folder(tmp_path, "albert")
    piece = b"\x0a\x02" + b"5," + b"\x15" + struct.pack("<f", -0.5)
    (folder / "30k-clean.model").write_bytes(PIECES + b"\x0a" + bytes([len(piece)]) + piece)
    tokenizer = load_tokenizer(folder, vocab_size=ALBERT["vocab_size"] + 1)
    assert tokenizer is not None
    assert tokenizer.convert_tokens_to_ids("5,") == ALBERT["vocab_size"]
    assert "5," not in tokenizer.tokenize("15,000")


def test_pieces_of_another_model(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, "albert")
    (folder / "30k-clean.model").write_bytes(PIECES.replace(b"[CLS]", b"[CLX]"))
    with pytest.raises(CheckpointError, match=r"30k-clean.model: the pieces \[CLS\] are missing, which"):
        case_of(folder)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(PIECES) - 1), st.integers(1, 255))
def test_any_pieces_are_read_or_refused(place: int, bits: int) -> None:
    path = Path(os.environ["HF_HOME"]) / "changed.model"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PIECES[:place] + bytes([PIECES[place] ^ bits]) + PIECES[place + 1 :])
    with contextlib.suppress(CheckpointError):  # any other exception fails the test
        read_sentencepiece(path)

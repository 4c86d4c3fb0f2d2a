"""Checkpoints of Google's TensorFlow 1 programs: converted to the same tensors, sizes and logits as in transformers."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bert_tasks import Encoder, TaskModel
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.cli import main
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.tensorflow import convert as module
from bert_tasks.tensorflow.convert import convert
from bert_tasks.tensorflow.tensor_bundle import Entry, TensorBundle
from support.small_checkpoints import copied, edit_config
from support.tf1_checkpoints import (
    ALBERT,
    BERT,
    ELECTRA,
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
    module, _, suffix = parameter.rpartition(".")
    if module.endswith("_embeddings"):
        return module.replace(".", "/"), False
    if "LayerNorm" in module:
        suffix = {"weight": "gamma", "bias": "beta"}[suffix]
    elif OUTPUTS.search(parameter):
        suffix = {"weight": "output_weights", "bias": "output_bias"}[suffix]
    elif suffix == "weight":
        suffix = "kernel"
    return "/".join([*module.split("."), suffix]).lstrip("/"), suffix == "kernel"


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
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a case; the folder of the generator states its class."""
    folder = copied(FOLDER / CASES[request.param][0], tmp_path / "google")
    if request.param == "generator":
        edit_config(folder, architectures=["ElectraForMaskedLM"])
    return folder


TASKS = {
    **dict.fromkeys(("bert", "albert", "generator"), "masked-language-modeling"),
    "electra": "replaced-token-detection",
}


@pytest.mark.parametrize(("case", "source"), [(case, case) for case in CASES], indirect=["source"])
def test_tensors_and_logits_are_those_of_transformers(case: str, source: Path, tmp_path: Path) -> None:
    _, rules, hf_class, config = CASES[case]
    reference = hf_reference(rules, hf_class, **config)
    conversion = convert(source, tmp_path / "hf")
    assert conversion.architecture == hf_class.__name__
    stock = hf_class.from_pretrained(tmp_path / "hf").eval()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(stock.state_dict()[name], tensor) or "pooler" in name, name
    ids = torch.tensor([[3, 6, 8, 9, 15, 4], [3, 30, 31, 4, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": segments}
    with torch.no_grad():
        expected = reference(**inputs)
        logits = TaskModel.from_pretrained(tmp_path / "hf", task=TASKS.get(case))(**inputs)
        hidden = Encoder.from_pretrained(tmp_path / "hf")(**inputs)
        base = getattr(reference, reference.base_model_prefix)(**inputs)[0]
    real = inputs["attention_mask"].bool()
    assert (hidden - base)[real].abs().max() < 2e-6
    target = expected.prediction_logits if case in ("bert", "albert") else None
    if case == "bert_squad":
        target = torch.stack([expected.start_logits, expected.end_logits], -1)
    target = expected.logits if target is None else target
    shown = slice(None) if case == "bert_classifier" else real
    assert (logits.reshape(target.shape) - target)[shown].abs().max() < 2e-5


PUBLISHED = {
    "bert-base": ("bert", bert, {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12}),
    "albert-xxlarge": ("albert", albert, {"vocab_size": 30000, "hidden_size": 4096, "num_hidden_layers": 12}),
    "electra-small": ("electra", electra, {"vocab_size": 30522, "hidden_size": 256, "num_hidden_layers": 12}),
    "electra-large": ("electra", electra, {"vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24}),
}
HEAD_CLASSES = {
    "bert": transformers.BertForPreTraining,
    "albert": transformers.AlbertForPreTraining,
    "electra": transformers.ElectraForPreTraining,
    "generator": transformers.ElectraForMaskedLM,
}


def bundle_of(shapes: Mapping[str, tuple[int, ...]], path: Path = Path("folder/model.ckpt.index")) -> TensorBundle:
    """The index of a checkpoint without data."""
    entries = {
        name: Entry(dtype=1, shape=shape, shard=0, offset=0, size=0, checksum=0, is_partitioned=False)
        for name, shape in shapes.items()
    }
    return TensorBundle(path=path, num_shards=1, entries=entries)


@pytest.mark.parametrize(
    ("name", "generator"),
    [(name, generator) for name in PUBLISHED for generator in (False, True)[: 1 + name.startswith("electra")]],
)
def test_names_and_shapes_of_published_sizes(name: str, generator: bool) -> None:
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
    settings = {"architectures": [hf_class.__name__]} if generator else {}
    bundle = bundle_of(shapes)
    names, parameters, head = module._model(bundle, settings)
    expected = {key: tuple(tensor.shape) for key, tensor in reference.state_dict().items() if not tied(key)}
    assert parameters == {key: google_variable(rules, key) for key in expected}
    for key, (variable, is_transposed) in parameters.items():
        assert (shapes[variable][::-1] if is_transposed else shapes[variable]) == expected[key]
    if variables is electra:
        sized = module._config(bundle, names, parameters, head, settings)
        stated_sizes = ("embedding_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        assert {key: sized[key] for key in (*sizes, *stated_sizes)} == {
            key: config[key] for key in (*sizes, *stated_sizes)
        }


def test_other_layouts_of_variables() -> None:
    _, parameters, _ = module._model(bundle_of({f"module/{name}": shape for name, shape in albert(ALBERT).items()}), {})
    assert {name: google_variable("albert", name)[0] for name in parameters} == {
        name: variable.removeprefix("module/") for name, (variable, _) in parameters.items()
    }
    untied = bundle_of({**electra(ELECTRA, GENERATOR), **embeddings("generator", ELECTRA, 24)})
    _, parameters, head = module._model(untied, {"architectures": ["ElectraForMaskedLM"]})
    assert parameters["electra.embeddings.word_embeddings.weight"][0].startswith("generator/")
    assert head == "masked-lm"
    alone = {name: shape for name, shape in electra(ELECTRA, GENERATOR).items() if "electra/encoder" not in name}
    assert module._model(bundle_of(alone), {})[2] == "masked-lm"


def test_an_albert_that_answers_questions_has_the_head_of_bert() -> None:
    """run_squad_v1.py of ALBERT writes its head under BERT's name."""
    _, parameters, head = module._model(bundle_of({**albert(ALBERT), **output("cls/squad/", 2, ALBERT)}), {})
    assert parameters["qa_outputs.weight"] == ("cls/squad/output_weights", False)
    assert head == "span"


@pytest.mark.parametrize(
    ("shapes", "settings", "reason"),
    [
        ({"_CHECKPOINTABLE_OBJECT_GRAPH": (), "a/b": ()}, {}, "object-based checkpoint of TensorFlow 2"),
        ({"conv/kernel": (3, 3)}, {}, r"variables do not belong to bert, albert, electra \(conv/kernel\)"),
        (electra({**ELECTRA, "hidden_size": 100}, GENERATOR), {}, "Set num_attention_heads in config.json"),
        ({"electra/encoder/layer_0/output/dense/bias": (8,)}, {}, "vocab_size is not known, because .* is missing"),
        ({**bert(BERT), **output("", 10**9, BERT)}, {"num_attention_heads": 2}, "1000000000 classes, expected at most"),
        (bert(BERT), {}, "Set num_attention_heads in bert_config.json"),
        (bert(BERT), {"num_attention_heads": 2, "model_type": "electra"}, "names another model than .*, bert"),
    ],
)
def test_checkpoints_that_are_rejected(
    shapes: Mapping[str, tuple[int, ...]], settings: dict[str, Any], reason: str
) -> None:
    bundle = bundle_of(shapes)
    with pytest.raises(CheckpointError, match=reason):
        module._config(bundle, *module._model(bundle, settings), settings)


def test_several_checkpoints_in_a_folder(tmp_path: Path) -> None:
    folder = copied(FOLDER / "bert", tmp_path / "bert")
    for file in ("index", "data-00000-of-00002", "data-00001-of-00002"):
        (folder / f"bert_model.ckpt.{file}").rename(folder / f"model.ckpt-2.{file}")
    for path in (FOLDER / "bert_squad").glob("model.ckpt-7.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"several TensorFlow checkpoints \(model.ckpt-2.index, model.ckpt-7"):
        convert(folder, tmp_path / "hf")
    (folder / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-2"\nall_model: "x"\n')
    assert convert(folder, tmp_path / "2").architecture == "BertForPreTraining"
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    assert convert(folder, tmp_path / "7").architecture == "BertForQuestionAnswering"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**BERT, "hidden_act": "swish"}, "activation 'swish' is not supported"),
        ({**BERT, "num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, expected at most 1000"),
        ({**BERT, "num_hidden_layers": 1}, "unknown key bert.encoder.layer.1"),
        ({**BERT, "intermediate_size": 25}, r"has shape \[24, 16\], expected \[25, 16\]"),
    ],
)
def test_a_configuration_that_does_not_fit(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = copied(FOLDER / "bert_squad", tmp_path / "google")
    (folder / "bert_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason):
        convert(folder, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["google"]


def test_config_json_names_the_labels(tmp_path: Path) -> None:
    folder = copied(FOLDER / "bert_classifier", tmp_path / "google")
    convert(folder, tmp_path / "plain")
    assert TaskModel.from_pretrained(tmp_path / "plain").task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    names = {"0": "bad", "1": "fair", "2": "good"}
    (folder / "config.json").write_text(json.dumps({"id2label": names}))
    convert(folder, tmp_path / "named")
    assert TaskModel.from_pretrained(tmp_path / "named").task.labels == tuple(names.values())
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        convert(folder, tmp_path / "named")


def test_loading_names_the_command_that_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("bert", FOLDER / "bert"), ("electra", FOLDER / "electra")):
        with pytest.raises(CheckpointError, match=rf"{name} holds a TensorFlow.*bert-tasks convert .*{name}"):
            Encoder.from_pretrained(path)
    with pytest.raises(CheckpointError, match=r"bert_model.ckpt is a TensorFlow checkpoint.*bert-tasks convert"):
        Encoder.from_pretrained(FOLDER / "bert" / "bert_model.ckpt")
    monkeypatch.setattr(sys, "argv", ["bert-tasks", "convert", str(FOLDER / "bert"), "--output", str(tmp_path / "hf")])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert Encoder.from_pretrained(tmp_path / "hf").config.hidden_size == BERT["hidden_size"]


def test_vocabulary_of_sentencepiece_gives_the_ids_of_googles_program(tmp_path: Path) -> None:
    convert(FOLDER / "albert", tmp_path / "hf")
    ours = load_tokenizer(tmp_path / "hf", vocab_size=ALBERT["vocab_size"])
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert ours is not None
    for text, ids in json.loads((FOLDER / "albert" / "ids.json").read_text()).items():
        assert ours(text, add_special_tokens=False)["input_ids"] == ids, text
        assert stock(text, add_special_tokens=False)["input_ids"] == ids, text


SMALL = [token for token in VOCABULARY if token == token.lower() or token.startswith("[")]


@pytest.mark.parametrize(
    ("tokens", "settings", "expected"),
    [
        (VOCABULARY, {}, False),
        (VOCABULARY, {"do_lower_case": True}, True),
        (SMALL, {}, True),
        (SMALL, {"do_lower_case": False}, False),
        ([*SMALL, "café"], {}, None),
        ([*SMALL, "cafe\u0301"], {"do_lower_case": "yes"}, None),
        ([*VOCABULARY[:6], "3", "1", ",", ".", "你", "好"], {}, None),
    ],
)
def test_cased_or_uncased(tokens: list[str], settings: dict[str, Any], expected: bool | None, tmp_path: Path) -> None:
    source, folder = copied(FOLDER / "bert", tmp_path / "google"), tmp_path / "hf"
    folder.mkdir()
    (source / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    if settings:
        (source / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 64}))
    if expected is None:
        with pytest.raises(CheckpointError, match=r'cased or uncased\. Set {"do_lower_case": true}'):
            module._write_vocabulary(source, folder)
        return
    module._write_vocabulary(source, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.tokenize("Film") == tokenizer.tokenize("film")) is expected
    assert tokenizer.model_max_length == (64 if settings else tokenizer.model_max_length)


def test_vocabularies_that_are_rejected(tmp_path: Path) -> None:
    folder = copied(FOLDER / "albert", tmp_path / "google")
    pieces = (FOLDER / "albert" / "30k-clean.model").read_bytes()
    (folder / "30k-clean.model").write_bytes(pieces[:-1])
    with pytest.raises(CheckpointError, match=r"30k-clean.model: not a SentencePiece model, or damaged"):
        convert(folder, tmp_path / "hf")
    (folder / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match=r"several vocabularies \(30k-clean.model, vocab.txt\)"):
        convert(folder, tmp_path / "hf")
    for name in ("30k-clean.model", "vocab.txt"):
        (folder / name).unlink()
    assert convert(folder, tmp_path / "hf").tokenizer is None

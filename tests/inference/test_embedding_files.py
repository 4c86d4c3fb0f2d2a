"""Embeddings of files: the same numbers in every format, resumed as predictions are, and what is refused."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from bert_tasks.cli.app import app
from bert_tasks.errors import BertTasksError, DataError, UsageError
from bert_tasks.inference import WriteOptions, embed_file, sinks
from bert_tasks.inference.sinks import unfinished_folder
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel

TEXTS = ["a ferry", "", "the boats were late", "rain", "a b c d e f g h i j k l"]


@pytest.fixture(scope="module")
def encoder(base: Path) -> Encoder:
    return Encoder.from_pretrained(base)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "new.jsonl"
    rows = [{"text": text, "id": number, "embedding": "x"} for number, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_format_has_the_same_numbers(encoder: Encoder, data: Path, tmp_path: Path) -> None:
    expected = encoder.embed(TEXTS)
    for name in ("a.parquet", "a.npy", "a.jsonl"):
        assert embed_file(encoder, data, tmp_path / name).rows == 5
    table = parquet.read_table(tmp_path / "a.parquet")
    vector_type = table.schema.field("embedding").type
    assert (vector_type.list_size, str(vector_type.value_type)) == (36, "float")
    vectors = table.column("embedding").combine_chunks().flatten().to_numpy().reshape(5, 36)
    np.testing.assert_array_equal(vectors, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), expected)
    assert table.column("id").to_pylist() == [line["id"] for line in lines] == [0, 1, 2, 3, 4]
    assert table.column("text").to_pylist() == TEXTS
    assert table.column("input.embedding").to_pylist() == ["x"] * 5


def test_an_output_without_rows_keeps_its_type(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError):
        embed_file(encoder, tmp_path / "none.jsonl", tmp_path / "a.parquet")
    embed_file(encoder, [], tmp_path / "a.parquet")
    embed_file(encoder, [], tmp_path / "a.npy")
    assert parquet.read_schema(tmp_path / "a.parquet").field("embedding").type.list_size == 36
    assert np.load(tmp_path / "a.npy").shape == (0, 36)


@pytest.mark.parametrize("name", ["a.parquet", "a.npy"])
def test_an_interrupted_output_is_resumed(
    name: str, encoder: Encoder, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 2)
    embed_file(encoder, data, tmp_path / name)
    expected, target = (tmp_path / name).read_bytes(), tmp_path / f"resumed-{name}"
    append = sinks.LineFile.append

    def stop_after(partial: sinks.LineFile, lines: bytes) -> None:
        append(partial, lines)
        if partial.completed == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sinks.LineFile, "append", stop_after)
        with pytest.raises(KeyboardInterrupt):
            embed_file(encoder, data, target)
    assert not target.exists()
    assert embed_file(encoder, data, target).resumed == 4
    assert target.read_bytes() == expected
    assert not unfinished_folder(target).exists()


def test_other_settings_start_again(
    encoder: Encoder, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 2)
    target, finalize = tmp_path / "a.npy", "bert_tasks.inference.sinks.LineFile.finish"

    def fail(*arguments: Any, **options: Any) -> None:
        raise UsageError("full")

    with monkeypatch.context() as patched:
        patched.setattr(finalize, fail)
        with pytest.raises(UsageError, match="full"):
            embed_file(encoder, data, target)
    assert embed_file(encoder, data, target, pooling="max").resumed == 0
    np.testing.assert_array_equal(np.load(target), encoder.embed(TEXTS, pooling="max"))


def test_a_stream_gets_json_lines(encoder: Encoder, data: Path) -> None:
    stream = io.BytesIO()
    embed_file(encoder, data, stream, writing=WriteOptions(keep_columns="none"))
    rows = [json.loads(line)["embedding"] for line in stream.getvalue().splitlines()]
    np.testing.assert_array_equal(np.array(rows, np.float32), encoder.embed(TEXTS))


def test_rows_that_cannot_be_used_are_left_out(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
    result = embed_file(encoder, tmp_path / "bad.jsonl", tmp_path / "a.parquet", writing=WriteOptions(on_error="skip"))
    assert (result.rows, result.rejected) == (2, 1)
    assert parquet.read_table(tmp_path / "a.parquet").column("line").to_pylist() == [1, 3]


def test_a_trained_model_is_embedded_without_its_head(model: TaskModel, base: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    vectors = Encoder.from_pretrained(tmp_path / "model").embed(TEXTS)
    np.testing.assert_array_equal(vectors, Encoder.from_pretrained(base).embed(TEXTS))


def test_messages_say_what_was_computed(encoder: Encoder, base: Path, data: Path, tmp_path: Path) -> None:
    result = embed_file(encoder, data, tmp_path / "a.npy", layer=1, normalize=False, max_length=6)
    assert result.lines() == [
        "mean pooling of layer 1 of 2, 36 numbers, not normalised, at most 6 tokens",
        "2 of 5 (40.0%) rows are longer than max_length = 6 tokens and were truncated",
    ]


def folder_with_pooling(base: Path, folder: Path, mode: str, **prompts: Any) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        os.symlink(file, folder / file.name)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_the_folder_says_how_to_pool(base: Path, encoder: Encoder, data: Path, tmp_path: Path) -> None:
    folder = folder_with_pooling(base, tmp_path / "st", "cls")
    result = embed_file(folder, data, tmp_path / "a.npy")
    assert result.notes == ("cls pooling (1_Pooling/config.json), 36 numbers, length 1, at most 12 tokens",)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), encoder.embed(TEXTS, pooling="cls", max_length=12))
    mean_result = embed_file(folder, data, tmp_path / "a.npy", pooling="mean")
    assert mean_result.notes[1] == "the model's 1_Pooling/config.json asks for cls pooling"


def test_the_default_prompt_can_be_replaced(base: Path, encoder: Encoder, data: Path, tmp_path: Path) -> None:
    prompts = {"default_prompt_name": "query", "prompts": {"query": "find: "}}
    folder, target = folder_with_pooling(base, tmp_path / "st", "cls", **prompts), tmp_path / "a.npy"
    notes: dict[str | None, tuple[str, ...]] = {
        None: ("prompt 'find: ' in front of each text",),
        "Say ": ("prompt 'Say ' in front of each text", "the model's default prompt is 'find: '"),
        "": ("the model's default prompt is 'find: '",),
    }
    for prompt, expected in notes.items():
        result = embed_file(folder, data, target, prompt=prompt)
        assert (result.notes[1:], result.resumed) == (expected, 0)
        texts = [("find: " if prompt is None else prompt) + text for text in TEXTS]
        vectors = encoder.embed(texts, pooling="cls", max_length=12)
        np.testing.assert_array_equal(np.load(target), vectors)
        target.unlink()
        options = [] if prompt is None else ["--prompt", prompt]
        shown = CliRunner().invoke(app, ["embed", str(folder), str(data), "--output", str(target), "--quiet", *options])
        assert shown.exit_code == 0, shown.output
        assert [note for note in expected if note not in shown.stderr] == []
        np.testing.assert_array_equal(np.load(target), vectors)


def test_pooling_that_is_not_computed_must_be_replaced(base: Path, data: Path, tmp_path: Path) -> None:
    folder = folder_with_pooling(base, tmp_path / "st", "lasttoken")
    with pytest.raises(BertTasksError, match=r"lasttoken pooling, which bert_tasks does not support\. Set pooling"):
        embed_file(folder, data, tmp_path / "a.npy")
    assert embed_file(folder, data, tmp_path / "a.npy", pooling="mean").rows == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.csv", {}, r"the output's extension must be \.jsonl, \.parquet or \.npy"),
        ("-", {"format": "npy"}, "npy cannot be written to a stream. Name a file, or choose one of jsonl"),
        ("a.parquet", {"format": "csv"}, "there is no output format 'csv'. Choose one of jsonl, parquet, npy"),
        ("a.npy", {"keep_columns": ("id",)}, "npy holds the vectors alone"),
        ("a.npy", {"on_error": "skip"}, "npy has no place for line numbers"),
    ],
)
def test_outputs_without_a_place_for_vectors(
    name: str, options: dict[str, Any], message: str, encoder: Encoder, data: Path, tmp_path: Path
) -> None:
    target = name if name == "-" else tmp_path / name
    with pytest.raises(UsageError, match=message):
        embed_file(encoder, data, target, writing=WriteOptions(**options))

"""``batch_predictor``: the predictions of ``predict`` for batches of any kind, with the same columns every time."""

import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features
from datasets.fingerprint import Hasher

from bert_tasks import TaskModel, batch_predictor, predict, predict_file
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.inference import batches
from bert_tasks.inference import predictor as predictor_module
from bert_tasks.inference.batches import prediction_schema
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.outputs.classes import Classes
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks import SequenceClassification, TokenClassification
from support.task_contract import unlabelled
from support.task_examples import EXAMPLES

Convert = Callable[[pa.Table], Any]
TEXTS = ["a fine film", "never again", "", "what a wonderful evening", "is this seat free"]


def arrays(table: pa.Table) -> dict[str, np.ndarray]:
    """As Ray hands them: texts and lists are objects."""
    columns = {}
    for name in table.column_names:
        columns[name] = np.empty(len(table), dtype=object)
        columns[name][:] = [np.array(v, dtype=object) if isinstance(v, list) else v for v in table[name].to_pylist()]
    return columns


KINDS: dict[str, Convert] = {
    "lists": pa.Table.to_pydict,
    "arrays": arrays,
    "frame": pa.Table.to_pandas,
    "table": lambda table: table,
    "record batch": lambda table: table.combine_chunks().to_batches()[0],
}


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch in Python's types, without what is null."""
    if isinstance(batch, pa.Table | pa.RecordBatch):
        columns = batch.to_pydict()
    else:
        columns = {name: list(batch[name]) for name in batch}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [without_null(row) for row in rows]


def without_null(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        cells = {name: without_null(cell) for name, cell in value.items()}
        return {name: cell for name, cell in cells.items() if cell is not None}
    if isinstance(value, list):
        return [without_null(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier."""
    saved = tmp_path_factory.mktemp("classifier")
    task = SequenceClassification.of(labels=("bad", "good"), max_length=16)
    TaskModel.from_pretrained(base, task=task).save_pretrained(saved)
    return saved


LIKE_OTHERS = {"windows", "token crf", "span", "pair", "pair regression"}  # their columns are those of another one


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in EXAMPLES]
)
def test_equals_predict_for_every_task_and_kind_of_batch(name: str, base: Path, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    TaskModel.from_pretrained(base, task=example.task).save_pretrained(tmp_path)
    rows = json.loads(json.dumps(unlabelled(example)).replace("[MASK]", "<mask>"))
    predictions = predict(tmp_path, rows)
    expected = [without_null(prediction.to_json()) for prediction in predictions]
    assert {field.name for field in fields(example.task.output.prediction)} == set(vars(predictions[0]))
    predictor = batch_predictor(tmp_path, keep_columns="none")
    names = dict.fromkeys(name for row in rows for name in row)  # from_pylist would take the first row's
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    for form, convert in KINDS.items():
        batch = convert(table)
        result = predictor(batch)
        assert type(result) is type(batch), form
        assert rows_of(result) == expected, form
        assert (
            list(result if isinstance(result, dict | pd.DataFrame) else result.schema.names) == predictor.schema.names
        )
    assert predictor(table).schema == predictor.schema
    assert predictor(table.slice(0, 0)).schema == predictor.schema
    parts = [row for start in range(0, 8, 3) for row in predictor(table.slice(start, 3)).to_pylist()]
    for piece, whole in zip(parts, predictor(table).to_pylist(), strict=True):
        assert json.loads(json.dumps(piece), parse_float=lambda _: 0.0) == json.loads(
            json.dumps(whole), parse_float=lambda _: 0.0
        )


def test_a_task_without_a_stated_schema_has_a_column_of_json() -> None:
    class UntypedClasses(Classes):
        prediction = Prediction

    class Untyped(SequenceClassification):
        outputs = (UntypedClasses,)

    assert prediction_schema({"": Untyped.of(labels=("a", "b"))}).names == ["prediction"]


def test_keeps_columns_under_names_that_no_prediction_has(folder: Path) -> None:
    table = pa.table({"text": TEXTS, "label": [3, 1, 2, 0, 4], "note": [None, "x", "y", "z", "ü"]})
    predictor = batch_predictor(folder)
    names = ["text", "input.label", "note", "label", "score", "scores"]
    for convert in KINDS.values():
        result = predictor(convert(table))
        assert list(result if isinstance(result, dict | pd.DataFrame) else result.schema.names) == names
        kept = [{name: row.get(name) for name in names[:3]} for row in rows_of(result)]
        assert kept == table.rename_columns(names[:3]).to_pylist()
    assert predictor.output_schema(table.schema) == predictor(table).schema
    assert batch_predictor(folder, keep_columns=["note"])(table).column_names == ["note", *names[3:]]
    with pytest.raises(DataError, match="no column 'nota' to keep, did you mean 'note'"):
        batch_predictor(folder, keep_columns=["nota"])(table)


def test_kept_columns_have_the_names_that_predict_gives_them(folder: Path, tmp_path: Path) -> None:
    names = ("text", "explanation", "logits", "labels", "scores", "note", "input.note")
    table = pa.table(dict.fromkeys(names, TEXTS[:2]))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    predict_file(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    expected = list(json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0]))
    assert "input.explanation" in expected
    assert batch_predictor(folder)(table).column_names == expected


def test_a_frame_keeps_its_index_and_missing_texts_are_named(folder: Path) -> None:
    frame = pd.DataFrame({"text": ["a", None, "c"], 7: [1.0, 2.0, 3.0]}, index=[5, 5, 2])
    with pytest.raises(
        DataError, match=r"1 of the 3 rows of a batch cannot be used(?s:.*)row 1: missing text in column 'text'"
    ):
        batch_predictor(folder)(frame)
    result = batch_predictor(folder, on_error="skip")(frame)
    assert list(result.index) == [5, 5, 2]
    assert list(result.columns) == ["text", "7", "label", "score", "scores", "error"]
    assert result["error"].isna().tolist() == [True, False, True]
    assert result["score"].isna().tolist() == [False, True, False]
    expected = [prediction.score for prediction in predict(folder, ["a", "c"])]
    assert result["score"].dropna().tolist() == pytest.approx(expected, abs=1e-6)


def test_all_rows_of_a_batch_may_be_unusable(folder: Path) -> None:
    predictor = batch_predictor(folder, on_error="skip")
    result = predictor({"text": [None, 3]})
    assert result["label"] == result["score"] == result["scores"] == [None, None]
    assert result["error"][1] == "not a text in column 'text': 3. Write it in quotes."
    missing = np.array(["a", np.nan, None], dtype=object)  # as pandas writes a missing text, and as Arrow does
    errors = predictor({"text": missing})["error"]
    assert errors[0] is None
    assert errors[1] == errors[2] == result["error"][0]
    assert predictor({"text": []}) == {name: [] for name in ("text", *predictor.schema.names)}


def test_columns_are_those_stated_or_of_the_training_data(folder: Path, tmp_path: Path) -> None:
    expected = [prediction.label for prediction in predict(folder, TEXTS)]
    assert batch_predictor(folder, columns={"text": "body"})({"body": TEXTS})["label"] == expected
    for column, data in (("body", {"text": TEXTS}), ("text", {"texts": TEXTS})):
        with pytest.raises(DataError, match=f"the batch: no column '{column}'"):
            batch_predictor(folder, columns={"text": column})(data)
    model = TaskModel.from_pretrained(folder)
    model.columns = {"text": "review"}
    model.save_pretrained(tmp_path)
    assert batch_predictor(tmp_path)({"review": TEXTS})["label"] == expected
    assert batch_predictor(tmp_path)({"text": TEXTS})["label"] == expected


def test_what_cannot_be_used_is_refused_before_the_engine_starts(folder: Path, base: Path, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": TaskModel.from_pretrained(folder)}, "model.save_pretrained"),
        ({"on_error": "stop"}, "expected 'fail' or 'skip'"),
        ({"keep_columns": "some"}, "expected 'all', 'none' or a list"),
        ({"dtype": "half"}, "expected one of 'float32'"),
        ({"threads": 0}, "whole number from 1"),
        ({"settings": {"max_lenght": 8}}, "did you mean 'max_length'"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UsageError, match=message):
            batch_predictor(**{"model": folder, **arguments})
    with pytest.raises(DataError, match="not 'txt', did you mean 'text'"):
        batch_predictor(folder, columns={"txt": "x"})
    with pytest.raises(CheckpointError, match=r"no such folder|does not exist|nothing there"):
        batch_predictor(tmp_path / "none")
    task = TokenClassification.of(labels=("O", "B-X"), max_length=24, doc_stride=6, context_tokens=4)
    TaskModel.from_pretrained(base, task=task).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="reads the rows around each row"):
        batch_predictor(tmp_path)
    result = batch_predictor(tmp_path, settings={"context_tokens": 0})({"words": [["a"]], "tags": [["x"]]})
    assert result["tags"][0][0] in task.output.labels
    assert list(result)[:2] == ["input.tags", "words"]  # the words of the batch are those of the prediction


def test_what_is_no_batch_is_refused(folder: Path) -> None:
    predictor = batch_predictor(folder)
    for batch, message in (
        ([{"text": "a"}], "a batch is a dict of columns, a pandas DataFrame or a pyarrow Table, not list"),
        ({"text": ["a"], "n": [1, 2]}, r"different numbers of values \('text' 1, 'n' 2\)"),
        ({"text": "abc"}, "the column 'text' of a batch is a str, expected a list of values"),
        ({"text": b"abc"}, "the column 'text' of a batch is a bytes"),
        ({"text": 3}, "the column 'text' of a batch is a int"),
        ({"text": ["a"], "n": 4}, "the column 'n' of a batch is a int"),
        ({"text": np.array("a")}, "the column 'text' of a batch is a ndarray"),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), "several columns 'text'"),
    ):
        with pytest.raises(DataError, match=message):
            predictor(batch)


def test_names_of_columns_may_be_numbers(folder: Path) -> None:
    result = batch_predictor(folder)({0: ["x"], "text": ["a"]})
    assert (result["0"], result["text"]) == (["x"], ["a"])


def test_a_pickled_predictor_is_small_and_loads_its_model_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = batch_predictor(folder)
    expected = predictor({"text": TEXTS})
    content = pickle.dumps(predictor)
    assert len(content) < 10_000
    loads: list[Any] = []
    load = batches.load_trained
    monkeypatch.setattr(batches, "load_trained", lambda *args, **named: loads.append(args) or load(*args, **named))
    assert pickle.loads(content)({"text": TEXTS}) == expected
    assert loads == []
    monkeypatch.setattr(batches, "_loaded", {})
    for _ in range(2):  # an engine may send the function with every task
        assert pickle.loads(content)({"text": TEXTS}) == expected
    assert len(loads) == 1
    monkeypatch.setattr(batches.os, "getpid", lambda: -1)  # as in a process that was forked
    assert pickle.loads(content)({"text": TEXTS}) == expected
    assert len(loads) == 2


def test_a_model_that_changed_is_loaded_again(folder: Path, base: Path, tmp_path: Path) -> None:
    first = batch_predictor(folder)
    assert Hasher.hash(first) == Hasher.hash(batch_predictor(folder))  # datasets.map finds its cache
    task = SequenceClassification.of(labels=("bad", "good"), max_length=16)
    for seed in (1, 2):
        model = TaskModel.from_pretrained(base, task=task)
        draw_new_head(model, seed)
        model.save_pretrained(tmp_path)
        predictor = batch_predictor(tmp_path)
        assert Hasher.hash(predictor) != Hasher.hash(first)
        assert predictor({"text": TEXTS})["score"] == [prediction.score for prediction in predict(tmp_path, TEXTS)]


def test_threads_are_those_stated_and_only_during_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = predictor_module.predict_batch

    def noted(*args: Any, **named: Any) -> Any:
        seen.append(torch.get_num_threads())
        return original(*args, **named)

    monkeypatch.setattr(predictor_module, "predict_batch", noted)
    torch.set_num_threads(2)
    try:
        batch_predictor(folder)({"text": TEXTS})
        batch_predictor(folder, threads=3)({"text": TEXTS})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 3]


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_map_of_datasets(folder: Path, processes: int | None) -> None:
    data = Dataset.from_dict({"text": TEXTS * 2, "label": [str(number) for number in range(10)]})
    predictor = batch_predictor(folder)
    expected = [prediction.to_json() for prediction in predict(folder, TEXTS)] * 2
    torch.set_num_threads(2)
    predict(folder, TEXTS)  # in the parent, with threads, which a process that is forked does not have
    try:
        dataset = data.with_format("arrow").map(predictor, batched=True, batch_size=3, num_proc=processes)
    finally:
        torch.set_num_threads(1)
    assert dataset.features == Features.from_arrow_schema(predictor.output_schema(data.features.arrow_schema))
    rows = dataset.with_format(None).to_list()
    assert [row["input.label"] for row in rows] == data["label"]
    assert [row["label"] for row in rows] == [row["label"] for row in expected]
    assert [row["scores"]["good"] for row in rows] == pytest.approx([r["scores"]["good"] for r in expected], abs=1e-6)

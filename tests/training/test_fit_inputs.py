"""What ``fit`` refuses before it trains, and what it leaves behind for the next run of the same model."""

import json
import math

import pytest
import torch
from datasets import Dataset, DatasetDict

from bert_tasks import evaluate, fit
from bert_tasks.distributed import make_accelerator
from bert_tasks.errors import DataError, DivergedError, RecipeError, UsageError
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.training.step import OptimizerSteps
from support.training_runs import LABELS, load_model, make_rows, weights_of

QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a", "lable": "positive"}, {"text": "b", "label": None}],
            "train:1: .* in column 'label'.*\n.*train:2: .* in column",
        ),
        (
            [{"text": "a", "label": "postive"}, {"text": "b", "label": "bad"}],
            "'postive'. Did you mean 'positive'.*\n.*'bad'",
        ),
    ],
)
def test_rows_in_memory_are_checked_like_files(checkpoint, tmp_path, rows, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        fit(load_model(checkpoint), rows, make_rows(3), output_dir=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("validation", [None, make_rows(3)])
def test_no_rows_are_refused_with_and_without_validation_rows(checkpoint, tmp_path, validation):
    (tmp_path / "head.csv").write_text("text,label\n", "utf-8")
    for rows in ([], tmp_path / "head.csv"):
        with pytest.raises(DataError, match="no rows"):
            fit(load_model(checkpoint), rows, validation, output_dir=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "Text"}, r"^train: no column 'Text', did you mean 'text'\?\n  the columns are: 'label', 'text'\n"),
        ({"label": "stars"}, r"^train: no column 'stars'\n  the columns are: 'label', 'text'\n"),
        ({"txt": "text"}, "^the task reads the columns text, label.*, not 'txt', did you mean 'text'"),
    ],
)
def test_columns_that_rows_in_memory_lack_are_named_once(checkpoint, tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as error:
        fit(load_model(checkpoint), make_rows(9), make_rows(3), output_dir=tmp_path / "run", columns=columns, **QUICK)
    assert "times" not in str(error.value)


def test_a_diverged_run_leaves_no_gradients_to_the_next(checkpoint, tmp_path, monkeypatch):
    fresh, model = load_model(checkpoint), load_model(checkpoint)
    original = OptimizerSteps.backward

    def poisoned(steps, step, batch):
        sums = original(steps, step, batch)
        steps.objective.model.head.output.weight.grad.fill_(math.nan)
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSteps, "backward", poisoned)
        with pytest.raises(DivergedError):
            fit(model, make_rows(16), make_rows(3), output_dir=tmp_path / "bad", **QUICK)
    for name, run in (("fresh", fresh), ("again", model)):
        fit(run, make_rows(16), make_rows(3), output_dir=tmp_path / name, **QUICK)
    ours, theirs = weights_of(model), weights_of(fresh)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_accelerate_setting_that_would_scale_gradients_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(UsageError, match="gradient_accumulation_steps = 4"):
        make_accelerator()


def test_balanced_weights_cannot_be_evaluated_before_they_are_numbers(checkpoint):
    task = SequenceClassification.of(labels=LABELS, max_length=40, class_weights="balanced")
    with pytest.raises(UsageError, match="needs the training rows"):
        evaluate(load_model(checkpoint, task), make_rows(3))


def splits_of(**sizes):
    return DatasetDict({name: Dataset.from_list(make_rows(size, seed=size)) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("sizes", "validation", "sets", "unread"),
    [
        ({"train": 9, "validation": 6, "test": 3}, None, {"": 6}, "'test'"),
        ({"train": 9, "dev": 6}, None, {"": 6}, None),
        (
            {"train": 9, "validation_matched": 6, "validation_mismatched": 5},
            None,
            {"matched": 6, "mismatched": 5},
            None,
        ),
        ({"train": 9, "validation": 6}, make_rows(4), {"": 4}, "'validation'"),
        ({"train": 9, "test": 3}, None, {"": 2}, "'test'"),  # split off from the training rows
    ],
)
def test_a_dict_of_data_sets_has_the_rows_by_their_splits(
    checkpoint, tmp_path, caplog, sizes, validation, sets, unread
):
    model = load_model(checkpoint)
    fit(model, splits_of(**sizes), validation, output_dir=tmp_path / "run", **QUICK)
    data = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["data"]
    rows = {name.removeprefix("validation").removeprefix("_"): each["rows"] for name, each in data.items()}
    assert rows.pop("train") == (7 if sets == {"": 2} else 9)
    assert rows == sets
    said = [record.getMessage() for record in caplog.records if "DatasetDict" in record.getMessage()]
    expected = [] if unread is None else [f"fit: splits of the DatasetDict that are not read: {unread}"]
    assert said == expected


def test_a_trial_on_some_rows_says_so(checkpoint, tmp_path):
    rows, validation = make_rows(40), make_rows(6, seed=1)
    result = fit(load_model(checkpoint), rows, validation, output_dir=tmp_path / "run", max_rows=10, **QUICK)
    note = "the model was trained on a random sample of 10 of 40 rows (max_rows). Train on all rows before you use it"
    assert result.notes[0] == note
    assert json.loads((tmp_path / "run" / "metrics.json").read_text("utf-8"))["notes"][0] == note
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["data"]["train"]["rows"] == 10
    with pytest.raises(RecipeError, match="max_rows = 0"):
        fit(load_model(checkpoint), rows, validation, output_dir=tmp_path / "none", max_rows=0, **QUICK)

"""A report on several tasks treats the rows of each as it treats the rows of an only task."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, load_recipe, train
from bert_tasks.data.options import ReadOptions
from bert_tasks.inference import evaluate_data
from bert_tasks.report import make_report
from bert_tasks.report.results import evaluation_headline
from support.small_checkpoints import save_checkpoint
from support.task_examples import CLASSES

RECIPE = """
[model]
name = "base"
[data]
train = "train.jsonl"
validation = "dev.jsonl"
[tasks.topic]
task = "sequence-classification"
columns = {label = "topic"}
max_length = 32
[tasks.parity]
task = "sequence-classification"
columns = {label = "parity"}
max_length = 32
[optim]
epochs = 1
batch_size = 4
[run]
output_dir = "run"
"""
ROWS: list[dict[str, Any]] = [
    {"text": row["text"], "topic": row["label"], "parity": ("even", "odd")[number % 2], "channel": "ab"[number % 2]}
    for number, row in enumerate(CLASSES)
]
LABELLED = {"topic": ROWS[1:], "parity": ROWS}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture
def run(tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose first validation row has no topic."""
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, wide=True)
    write_lines(tmp_path / "train.jsonl", ROWS)
    first, *others = ROWS
    write_lines(tmp_path / "dev.jsonl", [{name: first[name] for name in first if name != "topic"}, *others])
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    train(load_recipe(tmp_path / "recipe.toml"), progress=False)
    return tmp_path / "run"


def test_rows_of_each_task_are_divided_listed_and_explained(run: Path, tmp_path: Path) -> None:
    report = make_report(run, by=["channel"], mistakes=tmp_path / "wrong.jsonl", explain=1)
    results = report.results[0]
    assert list(results) == ["parity", "topic"]
    assert report.runs[0].missing == ()
    lines = [json.loads(line) for line in (tmp_path / "wrong.jsonl").read_text("utf-8").splitlines()]
    for name, each in results.items():
        assert each.rows == len(LABELLED[name])
        (slices,) = each.slices
        counts = {row.name: row.count for row in slices.slices}
        assert counts == {channel: sum(row["channel"] == channel for row in LABELLED[name]) for channel in "ab"}
        assert each.sections.examples is not None
        shadings = [example.shading for example in each.sections.examples.items]
        assert [shading is not None for shading in shadings] == [number < 1 for number in range(len(shadings))]
        wrong = [line for line in lines if line["set"] == name]
        assert len(wrong) == sum(not row.is_correct for row in each.sections.results) > 0
        texts = {row["text"]: row for row in ROWS}
        assert all(line["label"] == texts[line["text"]][name] != line["prediction"] for line in wrong)
        assert all(line["channel"] == texts[line["text"]]["channel"] for line in wrong)


def test_the_headline_of_an_evaluation_counts_the_rows_of_each_task(run: Path, tmp_path: Path) -> None:
    model = MultiTaskModel.from_pretrained(run / "model")
    evaluation = evaluate_data(model, tmp_path / "dev.jsonl", reading=ReadOptions())
    mean = f"mean_primary_metric {evaluation.metrics['mean_primary_metric']:.4f}"
    counts = f"parity: {len(ROWS)} rows, topic: {len(ROWS) - 1} rows"
    assert evaluation_headline(model.tasks, evaluation) == f"{mean} ({counts})"

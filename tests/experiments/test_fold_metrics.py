"""Metrics over all folds are those of the predictions as they are written, whatever a fold fitted to its rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.experiments.folds import train_folds
from bert_tasks.metrics.classification import classification_metrics, multilabel_metrics, regression_metrics
from bert_tasks.metrics.squad import squad_v2_metrics
from bert_tasks.metrics.tagging import tagging_metrics
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.report import make_report
from support.report_runs import write_rows
from support.task_examples import CHOICES, CLASSES, NUMBERS, PAIRS, SENTENCES, SETS, SOME_WITHOUT_ANSWER, SPANS

Line = Mapping[str, Any]
Metrics = Mapping[str, float]
FOLDS = 2
REPEATS = 3  # of the rows, each time with another word
LOW, HIGH = -1e9, 1e9  # thresholds of null odds, below and above all


def classes(lines: Sequence[Line]) -> Metrics:
    names = sorted(lines[0]["scores"])
    sides = ([names.index(line[name]) for line in lines] for name in ("input.label", "label"))
    return classification_metrics(*sides, names)


def sets(lines: Sequence[Line]) -> Metrics:
    names = sorted(lines[0]["scores"])
    sides = ([[name in line[column] for name in names] for line in lines] for column in ("input.labels", "labels"))
    return multilabel_metrics(*sides, names)


def numbers(lines: Sequence[Line]) -> Metrics:
    return regression_metrics([line["input.label"] for line in lines], [line["score"] for line in lines])


def choices(lines: Sequence[Line]) -> Metrics:
    return {"accuracy": sum(line["label"] == line["input.label"] for line in lines) / len(lines)}


def tags(lines: Sequence[Line]) -> Metrics:
    return tagging_metrics([line["input.tags"] for line in lines], [line["tags"] for line in lines], raw=False)


def answers(lines: Sequence[Line]) -> Metrics:
    return squad_v2_metrics([line["answers"]["text"] for line in lines], [line["answer"] for line in lines], None)


# Task, rows, settings, metrics of lines, and what two folds fit to their rows.
CASES: dict[str, tuple[str, Sequence[Line], Line, Callable[[Sequence[Line]], Metrics], Sequence[Line]]] = {
    "answers": (
        "span-extraction",
        SOME_WITHOUT_ANSWER,
        {**SPANS, "version_2_with_negative": True},
        answers,
        ({"null_threshold": LOW}, {"null_threshold": HIGH}),
    ),
    "sets": (
        "sequence-classification",
        SETS,
        {"problem_type": "multi_label_classification", "class_weights": "balanced"},
        sets,
        ({"thresholds": [0.0] * 3}, {"thresholds": [1.0] * 3}),
    ),
    "tags": (
        "token-classification",
        SENTENCES,
        {"crf": True, "doc_stride": 6},
        tags,
        ({"scheme": "IOB1"}, {"scheme": "BIOES"}),
    ),
    "classes": ("sequence-classification", CLASSES, {"class_weights": "balanced"}, classes, ({}, {})),
    "numbers": ("sequence-classification", NUMBERS, {"problem_type": "regression"}, numbers, ({}, {})),
    "pairs": ("pair-classification", PAIRS, {}, classes, ({}, {})),
    "choices": ("multiple-choice", CHOICES, {}, choices, ({}, {})),
}


def repeated(row: Line, number: int) -> dict[str, Any]:
    """The row with one more word in the text that it is told from others by."""
    if "words" in row:
        return {**row, "words": [*row["words"], f"n{number}"], "tags": [*row["tags"], "O"]}
    column = "context" if "context" in row else "text"
    named = {"id": f"{row['id']}-{number}"} if "id" in row else {}
    return {**row, **named, column: f"{row[column]} n{number}"}


@pytest.mark.slow  # two folds of each task, which test_folds.py trains for one
@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_the_written_predictions(name: str, checkpoint: Path, tmp_path: Path) -> None:
    task, rows, settings, naive, fitted = CASES[name]
    write_rows(tmp_path / "train.jsonl", [repeated(row, number) for number in range(REPEATS) for row in rows])
    settings_lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {"max_length": 32, **settings}.items())
    (tmp_path / "recipe.toml").write_text(
        f'task = "{task}"\n[model]\nname = "{checkpoint}"\n[settings]\n{settings_lines}'
        '[data]\ntrain = "train.jsonl"\nvalidation_share = 0.3\n'
        "[optim]\nepochs = 1\nbatch_size = 4\nlearning_rate = 1e-3\n"
        f'[run]\noutput_dir = "out"\n[folds]\ncount = {FOLDS}\n',
        "utf-8",
    )
    recipe, out = load_recipe(tmp_path / "recipe.toml"), tmp_path / "out"
    train_folds(recipe, progress=False)
    for fold, values in enumerate(fitted, start=1):  # as different as they can be
        config = out / f"fold-{fold}" / "model" / "config.json"
        content = json.loads(config.read_text("utf-8"))
        assert values.keys() <= content["bert_tasks"].keys()
        content["bert_tasks"] |= values
        config.write_text(json.dumps(content), "utf-8")
    result = train_folds(recipe, progress=False)
    assert all(run.reused for run in result.runs)
    lines = [json.loads(line) for line in (out / "out_of_fold.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == REPEATS * len(rows)
    expected = naive(lines)
    stored = json.loads((out / "folds.json").read_text("utf-8"))["metrics"]
    assert {key: stored[key]["pooled"] for key in expected} == pytest.approx(expected)
    report = make_report(out, tmp_path / "page.html")
    estimates = {key: estimate.value for key, estimate in report.results[0][""].estimates.items() if key in expected}
    assert estimates
    assert estimates == pytest.approx({key: expected[key] for key in estimates})
    page = report.output.read_text("utf-8")
    assert "chosen:" not in page
    assert ("It was chosen on the validation rows of each fold&#39;s run" in page) == (name == "answers")
    figures = report.results[0][""].to_json()
    assert figures.get("curve", {}).get("chosen") is None

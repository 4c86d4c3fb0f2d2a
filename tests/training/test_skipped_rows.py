"""Training on data with rows that cannot be used: left out, counted, and written down with what is wrong with them."""

import json

import pytest

from bert_tasks import fit, load_recipe, train
from bert_tasks.data.columns import REJECT
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.reading import read
from bert_tasks.errors import RecipeError
from bert_tasks.recipe.check import check
from bert_tasks.tasks.span_extraction import SpanExtraction
from bert_tasks.training.files import read_run_metadata
from support.recipes import write_with_data
from support.training_runs import load_model, make_rows

QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
BAD = [{"text": None, "label": "positive"}, {"text": "b", "label": None}, {"text": 3, "label": "negative"}]


def write_jsonl(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def rejects(folder):
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture
def folder(tmp_path, checkpoint, monkeypatch):
    """A recipe whose training rows have bad ones at lines 1, 6 and 12, and whose validation rows at line 2."""
    monkeypatch.chdir(tmp_path)
    path = write_with_data(tmp_path, checkpoint, optim="epochs = 1\nbatch_size = 6", run="")
    path.write_text(path.read_text("utf-8").replace(".csv", ".jsonl"), "utf-8")
    rows = make_rows(9)
    write_jsonl(tmp_path / "train.jsonl", [BAD[0], *rows[:4], BAD[1], *rows[4:], BAD[2]])
    first, *others = make_rows(5, seed=1)
    write_jsonl(tmp_path / "dev.jsonl", [first, BAD[0], *others])
    return tmp_path


def recipe(folder, *overrides):
    return load_recipe(folder / "recipe.toml", overrides=overrides)


def test_bad_rows_stop_a_run_that_says_how_to_skip_them(folder):
    with pytest.raises(RowIssues, match=r'4 problems .*, or set data.on_error = "skip" to skip such rows.\n'):
        train(recipe(folder), progress=False)
    with pytest.raises(RecipeError, match="on_error"):
        recipe(folder, "data.on_error=drop")


def test_bad_rows_are_left_out_counted_and_written_down(folder, capsys):
    skipping = recipe(folder, "data.on_error=skip")
    train(skipping)
    note = "train: 3 of 12 rows cannot be used and were left out (line 1, 6, 12)"
    assert note in " ".join(capsys.readouterr().err.split())
    entries = rejects(folder / "out")
    assert [(line["file"], line["line"]) for line in entries] == [
        ("train.jsonl", 1),
        ("train.jsonl", 6),
        ("train.jsonl", 12),
        ("dev.jsonl", 2),
    ]
    assert [line["raw"] for line in entries] == [*BAD, BAD[0]]
    assert entries[1]["reason"] == "missing label in column 'label'."
    facts = read_run_metadata(folder / "out").data
    assert [(facts[name].rows, facts[name].rows_left_out) for name in ("train", "validation")] == [(9, 3), (5, 1)]
    assert "  3 of 12 rows cannot be used and were left out (line 1, 6, 12)" in check(skipping).lines()
    write_jsonl(folder / "train.jsonl", make_rows(9))
    write_jsonl(folder / "dev.jsonl", make_rows(5, seed=1))
    train(skipping, progress=False, overwrite=True)
    assert not (folder / "out" / "rejects.jsonl").exists()


def test_validation_rows_are_set_aside_from_the_rows_that_can_be_used(folder):
    text = (folder / "recipe.toml").read_text("utf-8").replace('validation = "dev.jsonl"\n', "validation_share = 0.4\n")
    (folder / "recipe.toml").write_text(text, "utf-8")
    train(recipe(folder, "data.on_error=skip"), progress=False)
    assert [line["line"] for line in rejects(folder / "out")] == [1, 6, 12]
    facts = read_run_metadata(folder / "out").data
    assert facts["train"].rows + facts["validation"].rows == 9


@pytest.mark.parametrize("source", ["rows", "file"])
def test_fit_leaves_bad_rows_out(checkpoint, tmp_path, source):
    data, rows = tmp_path / "train.jsonl", [*make_rows(8), *BAD]
    write_jsonl(data, rows)
    train_data = rows if source == "rows" else data
    with pytest.raises(RowIssues, match=r'3 problems .*, or pass on_error="skip" to skip such rows.\n'):
        fit(load_model(checkpoint), train_data, make_rows(3), output_dir=tmp_path / "run", **QUICK)
    skipping, clean = load_model(checkpoint), load_model(checkpoint)
    result = fit(skipping, train_data, make_rows(3), output_dir=tmp_path / "run", on_error="skip", **QUICK)
    expected = fit(clean, make_rows(8), make_rows(3), output_dir=tmp_path / "clean", **QUICK)
    assert result.metrics == expected.metrics
    assert [line["line"] for line in rejects(tmp_path / "run")] == [9, 10, 11]


def test_fit_refuses_when_no_row_is_left(checkpoint, tmp_path):
    for data in (BAD, tmp_path / "bad.jsonl"):
        write_jsonl(tmp_path / "bad.jsonl", BAD)
        with pytest.raises(RowIssues, match="3 problems"):
            fit(load_model(checkpoint), data, make_rows(3), output_dir=tmp_path / "run", on_error="skip", **QUICK)
    with pytest.raises(RecipeError, match="on_error is 'ignore', expected 'fail' or 'skip'"):
        fit(load_model(checkpoint), BAD, BAD, output_dir=tmp_path / "run", on_error="ignore", **QUICK)


def test_answers_that_are_not_in_their_context_can_be_left_out():
    context = "The ferry leaves at seven."
    rows = [
        {"question": "When?", "context": context, "answers": {"text": [text], "answer_start": [start]}}
        for text, start in (("at seven", 17), ("at eight", 17), ("The ferry", 0))
    ]
    table = read(rows, SpanExtraction.of().columns, name="train", skip_errors=True).without_errors()
    assert [row["line"] for row in table] == [1, 3]
    assert table.errors is not None
    (line,) = map(json.loads, table.errors.values(REJECT))
    assert line["line"] == 2
    assert "misplaced answer in column 'answers': 'at eight'" in line["reason"]

"""A run's model on any labelled file: its figures, the scores by columns, and the mistakes as a file."""

import csv
import json
import random

import pytest
from typer.testing import CliRunner

from bert_tasks import TaskModel, evaluate
from bert_tasks.cli.app import app
from bert_tasks.data.options import ReadOptions
from bert_tasks.errors import DataError, UsageError
from bert_tasks.report import make_report
from bert_tasks.report.results import EMPTY
from support.report_runs import HOSTILE, KINDS, kinds, write_rows

EXTENSIONS = ("csv", "tsv", "jsonl")
EXTRA = ("web", "phone", None, "=cmd|' /C calc'!A0")


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def with_columns(rows):
    """The rows with two columns that no task reads."""
    return [{**row, "channel": EXTRA[index % len(EXTRA)], "number": index} for index, row in enumerate(rows)]


@pytest.fixture
def file_of(tmp_path):
    """A labelled file of a kind of task: other rows than those of the run, in another order."""

    def write_file(name):
        rows = with_columns(KINDS[name].rows)
        random.Random(0).shuffle(rows)
        return write_rows(tmp_path / "test.jsonl", [*rows, *rows[:3]]), [*rows, *rows[:3]]

    return write_file


@pytest.mark.parametrize("name", kinds("choices", "labels", "numbers", "pairs", "masks"))
def test_figures_are_those_of_evaluate(run_of, file_of, tmp_path, name):
    data, rows = file_of(name)
    on_file = make_report(run_of(name), tmp_path / "page.html", data=data, by=["channel"]).on_file
    metrics = evaluate(run_of(name) / "model", data)
    assert on_file.metrics == metrics
    values = {metric: estimate.value for metric, estimate in on_file.results.estimates.items() if metric in metrics}
    assert values == pytest.approx({metric: metrics[metric] for metric in values}, abs=1e-6)
    assert values
    (channels,) = on_file.slices
    counted = {value: sum(row["channel"] == value for row in rows) for value in EXTRA}
    assert {row_slice.name: row_slice.count for row_slice in channels.slices} == {
        EMPTY if v is None else v: counted[v] for v in EXTRA
    }
    for row_slice in channels.slices if name != "masks" else ():  # where a part of the rows has other masks
        subset = [row for row in rows if (EMPTY if row["channel"] is None else row["channel"]) == row_slice.name]
        expected = evaluate(run_of(name) / "model", subset)
        for metric, score in row_slice.scores.items():
            if metric in expected and score.value is not None:
                assert score.value == pytest.approx(expected[metric], abs=1e-4)  # other batches, other last digits


@pytest.mark.parametrize(("name", "scheme"), [(name, ("light", "dark")[n % 2]) for n, name in enumerate(KINDS)])
def test_page_about_a_file_is_sound(browser, run_of, file_of, tmp_path, name, scheme):
    data, _ = file_of(name)
    page = make_report(run_of(name), tmp_path / "page.html", data=data, by=["channel", "number"]).output
    browser.open(page, scheme=scheme, width=1280)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.errors() == []
    assert "On test.jsonl" in [heading.text for heading in browser.find_all("h2")]
    assert browser.low_contrast() == []
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    assert browser.find_all("script, img, #broken") == []
    ids = [element.get_attribute("id") for element in browser.find_all("[id]")]
    assert len(ids) == len(set(ids))


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file]
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.mark.parametrize(("name", "extension"), [(name, EXTENSIONS[n % 3]) for n, name in enumerate(KINDS)])
def test_mistakes_are_the_rows_that_are_wrong(run_of, file_of, tmp_path, name, extension):
    data, rows = file_of(name)
    path = tmp_path / f"wrong.{extension}"
    report = make_report(run_of(name), tmp_path / "page.html", data=data, mistakes=path)
    written = read(path)
    assert report.mistakes.rows == len(written) > 0
    scores = [float(row["score"]) for row in written]
    assert scores == sorted(scores, reverse=True)
    assert next(iter(written[0])) == "line"
    assert list(written[0])[-3:] == ["label", "prediction", "score"]
    lines = [int(row["line"]) for row in written]
    model = TaskModel.from_pretrained(run_of(name) / "model")
    for row in written:
        source = rows[int(row["line"]) - 1]
        assert str(row["number"]) == str(source["number"])
        marked = "'" if extension != "jsonl" and str(source["channel"]).startswith("=") else ""
        assert row["channel"] in (f"{marked}{source['channel']}", None if source["channel"] is None else "-", "")
    if name in ("classes", "pairs"):
        predictions = model.predict(rows)
        assert sorted(lines) == [
            n
            for n, (row, prediction) in enumerate(zip(rows, predictions, strict=True), 1)
            if row["label"] != prediction.label
        ]
        assert all(row["label"] != row["prediction"] for row in written)
        assert all(row["label"] == rows[line - 1]["label"] for row, line in zip(written, lines, strict=True))


def test_mistakes_of_the_validation_rows(run_of, tmp_path):
    path = tmp_path / "wrong.csv"
    done = call("report", run_of("classes"), "--output", tmp_path / "page.html", "--mistakes", path)
    assert done.exit_code == 0
    written = read(path)
    assert f"{len(written)} mistakes: {path}" in done.stdout
    assert list(written[0]) == ["line", "text", "label", "prediction", "score"]
    assert HOSTILE in {row["text"] for row in written}


def test_a_file_with_columns_of_other_names(run_of, tmp_path):
    rows = KINDS["classes"].rows
    data, path = tmp_path / "test.csv", tmp_path / "wrong.csv"
    with data.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([["review", "grade", "score", "label"], *([r["text"], r["label"], "3", "old"] for r in rows)])
    names = ["--column", "text=review", "--column", "label=grade", "--delimiter", ";"]
    done = call(
        "report", run_of("classes"), "--output", tmp_path / "p.html", "--data", data, "--mistakes", path, *names
    )
    assert done.exit_code == 0, done.stderr
    written = read(path)
    assert list(written[0]) == ["line", "review", "grade", "input.score", "input.label", "label", "prediction", "score"]
    assert {row["input.label"] for row in written} == {"old"}
    assert all(row["grade"] == row["label"] for row in written)


def test_wrong_options(run_of, file_of, tmp_path):
    run, page = run_of("classes"), tmp_path / "page.html"
    data, _ = file_of("classes")
    several, overwritten = [run, run_of("labels")], tmp_path / ".." / tmp_path.name / data.name
    for runs, options, message in (
        (run, {"data": data, "by": ["chanel"]}, r"no row has this column\. The .*id you mean 'channel'\?$"),
        (run, {"by": ["channel"]}, r"--by channel: no row has this column\. The columns are 'text', 'label'$"),
        (several, {"data": data}, "for one run, not for 2"),
        (run, {"data": data, "mistakes": tmp_path / "wrong.xlsx"}, r"ends in \.csv, \.tsv or \.jsonl"),
        (run, {"data": data, "mistakes": overwritten}, "would overwrite"),
        (run, {"data": data, "mistakes": tmp_path / "no" / "wrong.csv"}, "does not exist"),
        (run, {"data": tmp_path / "nothing.csv"}, "nothing.csv"),
        (run, {"reading": ReadOptions(delimiter=";")}, "delimiter: this says how a file is read"),
    ):
        with pytest.raises((UsageError, DataError), match=message):
            make_report(runs, page, **options)
    assert not page.exists()

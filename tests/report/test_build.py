"""What a report is made from, what it says when something is gone, and the commands that make one."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bert_tasks.api import write_after_run
from bert_tasks.cli.app import app
from bert_tasks.errors import UsageError
from bert_tasks.report import make_report
from bert_tasks.report.charts import drawn_metrics
from bert_tasks.report.collect import gather
from bert_tasks.report.page import run_page
from bert_tasks.report.results import results_of
from bert_tasks.report.statistics import Estimate
from support.report_runs import KINDS, write_recipe


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def copy_of(run_of, tmp_path):
    """A run with its recipe and rows, to be changed: (folder of the run, folder of the rows)."""

    def copied(name):
        home = shutil.copytree(run_of(name).parent, tmp_path / name)
        recipe = home / "run" / "recipe.toml"
        recipe.write_text(recipe.read_text("utf-8").replace(str(run_of(name).parent), str(home)), "utf-8")
        return home / "run", home

    return copied


@pytest.mark.parametrize("name", KINDS)
def test_figures_are_those_of_the_run(run_of, tmp_path, name):
    report = make_report(run_of(name), tmp_path / "page.html")
    (run,), (results,) = report.runs, report.results
    assert run.missing == ()
    values = {metric: estimate.value for metric, estimate in results[""].estimates.items() if metric in run.metrics}
    assert values
    assert values == pytest.approx({metric: run.metrics[metric] for metric in values}, abs=1e-4)
    json.dumps(report.to_json(), allow_nan=False)


def test_a_report_changes_nothing_in_the_run(copy_of):
    run, _ = copy_of("classes")

    def files():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = files()
    assert make_report(run).output == run / "report.html"
    after = files()
    assert after == before | {run / "report.html": after[run / "report.html"]}
    make_report(run)
    assert files() == after  # the same run gives the same bytes


def test_rows_that_changed_are_said_to_have(copy_of):
    run, home = copy_of("classes")
    (home / "dev.jsonl").write_text((home / "dev.jsonl").read_text("utf-8").replace("ferry", "tram"), "utf-8")
    report = make_report(run)
    assert "changed since the run" in report.runs[0].missing[0]
    assert report.results == ({},)
    html = report.output.read_text("utf-8")
    assert "changed since the run" in html
    assert "Learning curves" in html


def edit(path, change):
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


def test_the_metric_that_the_model_was_chosen_by_comes_first(copy_of, tmp_path):
    run, _ = copy_of("classes")
    edit(run / "run.json", lambda metadata: metadata["metrics"].update({"best": "matthews_correlation"}))
    report = make_report(run)
    assert tuple(report.results[0][""].headline) == ("matthews_correlation", "accuracy", "macro_f1")
    assert drawn_metrics(report.runs[0])[0] == "matthews_correlation"
    html = report.output.read_text("utf-8")
    assert html.count("Matthews correlation") >= 3  # tile, curve, evaluations
    both = shutil.copytree(run, tmp_path / "other")
    (comparison,) = make_report([run, both], tmp_path / "page.html").comparisons
    assert comparison.metric == "matthews_correlation"


def test_a_metric_that_follows_from_no_sums_is_shown_without_interval(copy_of):
    run, _ = copy_of("classes")
    edit(run / "run.json", lambda metadata: metadata["metrics"].update({"best": "map"}))
    edit(run / "metrics.json", lambda summary: summary["metrics"].update({"map": 0.625}))
    html = make_report(run).output.read_text("utf-8")
    tiles = html.partition('<ul class="tiles">')[2].partition("</ul>")[0]
    assert re.findall(r'class="label">([^<]*)<', tiles) == ["mean average precision", "accuracy", "macro F1"]
    assert re.findall(r'class="value">([^<]*)<', tiles)[0] == "0.625"
    assert "no interval" in tiles


def test_rows_on_which_something_was_chosen_are_named(run_of, copy_of):
    (labels,), (classes,) = gather([run_of("labels")]), gather([run_of("classes")])
    caution = "on this data, so expect worse scores on new data. The intervals ignore this."
    assert f"The best of 2 checkpoints was chosen and thresholds were tuned {caution}" in page_of(labels)
    assert f"The best of 2 checkpoints was chosen {caution}" in page_of(classes)
    first = [event for event in classes.events if event.event != "evaluation" or event.epoch == 1]
    assert "expect worse" not in page_of(replace(classes, events=first))


def test_only_the_first_validation_set_is_said_to_be_tuned_on(run_of):
    (run,) = gather([run_of("spans")])
    about = run.metadata.metrics.model_copy(update={"sets": ["easy", "hard"], "best": "easy/f1"})
    metadata = run.metadata.model_copy(update={"metrics": about})
    metrics = {f"easy/{key}": value for key, value in run.metrics.items()}
    metrics |= {f"hard/{key}": value for key, value in run.metrics.items() if not key.startswith("untuned_")}
    (prediction_set,) = run.predicted
    sets = tuple(replace(prediction_set, name=name) for name in ("easy", "hard"))
    summary = run.summary.model_copy(update={"metrics": metrics})
    html = page_of(replace(run, metadata=metadata, summary=summary, predicted=sets))
    assert "It was chosen on these questions." in html.partition('id="results2"')[0]
    assert "It was chosen on the questions of easy." in html.partition('id="results2"')[2]
    assert html.count("expect worse") == 1


def test_an_interval_without_width_is_none(run_of):
    (run,) = gather([run_of("classes")])
    (prediction_set,) = run.predicted
    results = results_of(prediction_set.task, prediction_set.predictions, prediction_set.rows)
    sure = {**results.estimates, "accuracy": Estimate(value=1.0, low=1.0, high=1.0)}
    html = run_page(run, {"": replace(results, estimates=sure)})
    assert "no interval, because all samples are equal" in html
    assert "1.000 to 1.000" not in html


def page_of(run):
    return run_page(run, {split.name: results_of(split.task, split.predictions, split.rows) for split in run.predicted})


def test_an_unfinished_run_says_what_each_figure_is_about(copy_of):
    run, _ = copy_of("classes")
    (run / "metrics.json").unlink()
    (run / "recipe.toml").unlink()
    report = make_report(run)
    missing = report.runs[0].missing
    assert "The run is unfinished" in missing[0]
    assert "has no recipe" in missing[1]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert report.runs[0].metrics == [event["metrics"] for event in events if event["event"] == "evaluation"][-1]
    html = report.output.read_text("utf-8")
    assert "The run is unfinished. Metrics are of the latest evaluation, all else is of the best model so far." in html
    assert "The latest evaluation on the validation rows" in html
    assert "The best model on" not in html


def test_runs_are_compared_on_the_same_rows(run_of, copy_of, tmp_path):
    other, _ = copy_of("classes")
    report = make_report([run_of("classes"), other], tmp_path / "page.html")
    (comparison,) = report.comparisons
    assert comparison.runs[1].p == 1.0


def test_runs_on_other_rows_are_refused_by_name(run_of, copy_of, tmp_path):
    other, _ = copy_of("classes")
    edit(other / "run.json", lambda metadata: metadata["data"]["validation"].update({"fingerprint": "f" * 64}))
    message = r"classes\S*run and .*classes/run were validated on different rows .*ffffffff"
    with pytest.raises(UsageError, match=message):
        make_report([run_of("classes"), other], tmp_path / "page.html")


def test_wrong_arguments(run_of, tmp_path):
    tags = run_of("tags")
    for runs, output, message in (
        (tmp_path / "nothing", "page.html", "no such folder"),
        (tmp_path, "page.html", r"run\.json is missing"),
        ([tags, tags], "page.html", "occurs twice"),
        (tags, "page.pdf", r"ends in \.html"),
        (tags, "nowhere/page.html", "Make it first"),
        ([run_of("classes"), tags], "page.html", "different tasks"),
    ):
        with pytest.raises(UsageError, match=message):
            make_report(runs, tmp_path / output)


def test_command_prints_where_the_report_is_or_its_figures(run_of, tmp_path):
    done = call("report", run_of("spans"), "--output", tmp_path / "page.html")
    assert done.exit_code == 0
    *figures, last = done.stdout.splitlines()
    assert last == f"report: {tmp_path / 'page.html'}"
    assert [line.split()[0] for line in figures if line] == ["f1", "exact", "questions", "with", "without"]
    figures = json.loads(call("report", run_of("spans"), "--output", tmp_path / "page.html", "--json").stdout)
    validation = figures["runs"][0]["validation"][""]
    assert set(validation["estimates"]) == {"exact", "f1"}
    assert validation["curve"]["points"]


def test_train_makes_a_report_and_goes_on_as_if_there_were_none(checkpoint, tmp_path):
    recipe = write_recipe(tmp_path, checkpoint, KINDS["labels"], epochs=1)
    ended = call("train", recipe, "--quiet")
    assert ended.exit_code == 0
    page = tmp_path / "run" / "report.html"
    assert f"report: {page}" in ended.stdout
    assert page.is_file()
    assert "already complete" in call("train", recipe, "--quiet").stdout
    plain = call("train", recipe, "--quiet", "--no-report", "--output-dir", tmp_path / "plain")
    assert "report:" not in plain.stdout
    assert not (tmp_path / "plain" / "report.html").exists()
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "run")]
    assert weights[0] == weights[1]


def test_a_report_that_fails_is_a_warning(copy_of, caplog):
    run, _ = copy_of("labels")
    (run / "report.html").mkdir()
    assert write_after_run(run, report=True) is None
    assert "the run is complete, but writing the report failed (" in caplog.text


def test_a_metric_that_equals_another_is_shown_under_one_name(copy_of):
    run, _ = copy_of("classes")
    edit(run / "run.json", lambda metadata: metadata["metrics"].update({"best": "f1"}))
    report = make_report(run)
    assert tuple(report.results[0][""].headline) == ("macro_f1", "accuracy")
    assert drawn_metrics(report.runs[0]) == ["macro_f1", "accuracy"]

"""What a page says first: a sentence on the result, its circumstances; and the command that repeats the run."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from html import unescape
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

from bert_tasks import TaskModel
from bert_tasks.cli.app import app
from bert_tasks.outputs.choice import ChoicePrediction
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.outputs.label_set import LabelSetPrediction
from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.report import make_report
from bert_tasks.report.charts import Strip, interval_axis
from bert_tasks.report.collect import gather
from bert_tasks.report.page import row_per_cent, run_page
from bert_tasks.report.results import results_of
from bert_tasks.report.settings import circumstances, repeat_command, setting_groups
from bert_tasks.report.statistics import Estimate
from bert_tasks.tasks import MultipleChoice, PairClassification, SequenceClassification, TokenClassification
from support.report_runs import HOSTILE, KINDS, write_rows


def summary(task, predictions, rows):
    return task.output.report(predictions, rows, task.texts).summary


def test_classes_are_compared_with_the_most_frequent_label():
    task = SequenceClassification.of(labels=("complaint", "praise"))
    rows = [{"text": "a", "label": label} for label in ("complaint", "complaint", "praise", "complaint")]
    predictions = [ClassPrediction(label=label, score=0.9, scores={}) for label in ("complaint", "praise") * 2]
    expected = "1 prediction is right (25.0 %); always predicting 'complaint' would give 75.0 %"
    assert summary(task, predictions, rows) == expected


def test_label_sets_are_equal_whatever_the_order():
    task = SequenceClassification.of(labels=("x", "y"), problem_type="multi_label_classification")
    rows = [{"text": "a", "labels": labels} for labels in (["x", "y"], ["y", "x"], [])]
    scores = {"x": 0.9, "y": 0.9}
    predictions = [LabelSetPrediction(label="x", labels=("x", "y"), score=0.9, scores=scores) for _ in rows]
    expected = "2 predictions are right in all labels (66.7 %); always predicting 'x, y' would give 66.7 %"
    assert summary(task, predictions, rows) == expected


@pytest.mark.parametrize("loss", ["none", "listnet"])
def test_numbers_are_compared_with_the_median_unless_they_only_rank(loss):
    task = PairClassification.of(problem_type="regression", ranking_loss=loss)
    rows = [{"text": "a", "text_pair": "b", "label": label, "group": "g"} for label in (0.0, 1.0, 5.0)]
    predictions = [NumberPrediction(score=score) for score in (1.0, 1.0, 3.0)]
    expected = (
        "the predictions differ from the labels by 1 on average; always predicting 1, the median label, would differ "
        "by 1.67"
    )
    assert summary(task, predictions, rows) == (expected if loss == "none" else "")


def test_choices_are_compared_with_chance():
    rows = [{"context": "a", "choices": ["x", "y", "z", "w"][:count], "label": 0} for count in (2, 4)]
    predictions = [
        ChoicePrediction(label=label, answer="x", score=0.9, scores=(0.1,) * len(row["choices"]))
        for label, row in zip((0, 1), rows, strict=True)
    ]
    expected = "1 prediction is right (50.0 %); choosing at random would give 37.5 %"
    assert summary(MultipleChoice.of(), predictions, rows) == expected


ENTITIES = ("O", "B-X", "I-X")


@pytest.mark.parametrize(
    ("tags", "predicted", "expected"),
    [
        (
            ["B-X", "I-X", "O", "B-X"],
            ["B-X", "I-X", "B-X", "O"],
            "the model finds 1 of the 2 entities (50.0 %), and 1 of the 2 that it predicts are right (50.0 %)",
        ),
        (["B-X", "O"], ["O", "O"], "the model finds 0 of the 1 entities (0.0 %), because it predicts none"),
        (["O", "O"], ["B-X", "O"], "there is no entity, and the model predicts 1"),
    ],
)
def test_entities_are_found_or_predicted_in_vain(tags, predicted, expected):
    words = ("w",) * len(tags)
    prediction = TokenPrediction(words=words, tags=tuple(predicted), scores=(0.5,) * len(tags), entities=())
    assert summary(TokenClassification.of(labels=ENTITIES), [prediction], [{"words": words, "tags": tags}]) == expected


def test_tags_without_entities_are_counted():
    prediction = TokenPrediction(words=("a", "b", "c"), tags=("noun",) * 3, scores=(0.5,) * 3, entities=())
    row = {"words": ["a", "b", "c"], "tags": ["noun", "verb", "noun"]}
    expected = "2 of the 3 tags are right (66.7 %); always predicting 'noun' would give 66.7 %"
    assert summary(TokenClassification.of(labels=("noun", "verb")), [prediction], [row]) == expected


SENTENCES = {
    "spans": r"On 9 validation questions, (\d) predictions? (?:is|are) exactly right \(.*; never .* 44\.4 %\.",
    "masks": r"On \d validation texts, (\d+) of the \d+ masked tokens are predicted right \(",
    "classes": r"On 10 validation rows, (\d+) predictions? (?:is|are) right \(",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_comes_before_all_figures_with_date_and_device(run_of, tmp_path, name):
    report = make_report(run_of(name), tmp_path / "page.html")
    html = unescape(report.output.read_text("utf-8"))
    head = html.partition("<main>")[0]
    (sentence,) = re.findall('<p class="summary">(.*?)</p>', head)
    found = re.match(SENTENCES[name], sentence)
    assert found is not None, sentence
    right = sum(result.is_correct for result in report.results[0][""].sections.results)
    if name != "masks":
        assert int(found[1]) == right
    started = json.loads((run_of(name) / "run.json").read_text("utf-8"))["started"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", started)
    assert head.index(sentence) < head.index(f"started {started} UTC") < head.index("trained for ")
    assert "on 1 x cpu, " in head


def test_a_run_of_an_older_version_has_no_date(run_of):
    (run,) = gather([run_of("classes")])
    old = replace(run, metadata=run.metadata.model_copy(update={"started": None, "device_name": "H200"}), summary=None)
    assert circumstances(old) == ["on 1 x cpu, H200"]


def test_each_data_set_has_a_sentence(run_of, tmp_path):
    data = write_rows(tmp_path / "more.jsonl", KINDS["classes"].rows[:4])
    report = make_report(run_of("classes"), tmp_path / "page.html", data=data)
    (first, second) = re.findall('<p class="summary">(.*?)</p>', report.output.read_text("utf-8"))
    assert first.startswith("On 10 validation rows, ")
    assert second.startswith("On 4 rows of more.jsonl, ")
    (run,) = report.runs
    page = run_page(run, {"dev": report.results[0][""]})
    assert "On 10 validation rows of dev, " in page


def test_without_predictions_the_recorded_score_is_said(run_of):
    (run,) = gather([run_of("classes")])
    accuracy = f"{run.metrics['accuracy']:.3f}"
    assert f'<p class="summary">The best model has accuracy {accuracy} on the validation rows.</p>' in run_page(run, {})
    unfinished = replace(run, summary=None)
    assert f"The latest evaluation gives accuracy {unfinished.metrics['accuracy']:.3f}" in run_page(unfinished, {})


def test_intervals_are_drawn_on_an_axis_that_covers_them():
    high = [Estimate(value=0.95, low=0.931, high=0.97), Estimate(value=0.99, low=0.99, high=0.99)]
    axis = interval_axis(high)
    assert 0.9 <= axis.low <= 0.931
    assert 0.99 <= axis.high <= 1.0
    assert Strip.left <= Strip.across(0.931, axis) < Strip.across(0.97, axis) <= Strip.right
    numbered = Strip.numbered_ticks(axis)
    assert 2 <= len(numbered) <= 4
    assert numbered[0] == axis.ticks[0]
    assert interval_axis([*high, Estimate(value=0.2, low=0.1, high=0.4)]).low <= 0.1
    assert interval_axis([Estimate(value=1.0, low=1.0, high=1.0), Estimate(value=None)]) is None
    errors = interval_axis([Estimate(value=12.0, low=11.0, high=14.0)])
    assert 10 <= errors.low < errors.high <= 15


def test_the_page_draws_numbered_axes(run_of, tmp_path):
    html = make_report(run_of("numbers"), tmp_path / "page.html").output.read_text("utf-8")
    tiles = re.findall('<li class="tile">.*?</li>', html, flags=re.DOTALL)
    assert len(tiles) == 3  # an error has an axis, too
    for tile in tiles:
        axis = [float(text.replace("\N{MINUS SIGN}", "-")) for text in re.findall(r"<text [^>]*>([^<]*)</text>", tile)]
        low, high = re.findall(r"interval (\S+) to ([^<]+)<", tile)[0]
        assert len(axis) >= 2
        span = axis[1] - axis[0]  # of at most two ticks
        assert axis[0] - 1e-3 <= float(low.replace("\N{MINUS SIGN}", "-"))
        assert float(high.replace("\N{MINUS SIGN}", "-")) <= axis[-1] + span


@pytest.mark.parametrize(
    ("count", "total", "shown"),
    [(41, 43, "95%"), (1, 1000, "<1%"), (999, 1000, ">99%"), (1000, 1000, "100%"), (5, 1000, "0%")],
)
def test_only_all_are_100_per_cent(count, total, shown):
    assert row_per_cent(count, total) == shown


def test_the_confusion_matrix_has_percentages_of_its_rows(run_of):
    (run,) = gather([run_of("classes")])
    rows = [{"text": "a", "label": label} for label in ("low", "low", "low", "low", "mid")]
    predictions = [ClassPrediction(label=label, score=0.5, scores={}) for label in ("low", "low", "low", "mid", "mid")]
    task = SequenceClassification.of(labels=("low", "mid"))
    page = run_page(run, {"": results_of(task, predictions, rows)})
    cells = re.findall(r'<td class="cell"[^>]*>(.*?)</td>', page)
    assert cells == ["3<small>75%</small>", "1<small>25%</small>", "0", "1<small>100%</small>"]


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("classes", "✗ wrong"),
        ("spans", "✓ right|✗ wrong|✗ partly right"),
        ("masks", "✓ right|✗ wrong"),
        ("tags", r"✓ all correct|✗ 1 span differs|✗ \d spans differ"),
    ],
)
def test_examples_begin_with_the_verdict(run_of, tmp_path, name, verdicts):
    html = make_report(run_of(name), tmp_path / "page.html").output.read_text("utf-8")
    examples = html.partition('<ol class="examples">')[2].partition("</ol>")[0]
    items = examples.split("<li>")[1:]
    assert items
    for item in items:
        first = re.match(r'<p class="verdict"><span class="(?:good|bad)">([^<]*)</span>', item)
        assert first is not None, item[:200]
        assert re.fullmatch(verdicts, first[1])
        if name != "tags":
            assert item.index("prediction") < item.index("</p>")


def test_an_error_begins_its_example(run_of, tmp_path):
    html = make_report(run_of("numbers"), tmp_path / "page.html").output.read_text("utf-8")
    assert re.search(r'<li><p class="verdict"><span class="bad">off by \d', html)


def test_the_legend_of_shaded_words_stands_once_in_a_section(run_of, tmp_path):
    page = make_report(run_of("classes"), tmp_path / "page.html", explain=2).output.read_text("utf-8")
    assert page.count('class="shading"') == 2
    assert page.count("red, dashed line") == 1
    assert page.index("red, dashed line") < page.index('<ol class="examples">')
    plain = make_report(run_of("classes"), tmp_path / "plain.html").output.read_text("utf-8")
    assert "red, dashed line" not in plain


def test_settings_are_in_three_groups(run_of):
    (run,) = gather([run_of("classes")])
    groups = setting_groups(run)
    assert list(groups) == ["Data", "Model and task", "Optimisation and run"]
    data, model, optimisation = groups.values()
    assert {"train rows from", "train fingerprint", "training rows"} <= data.keys()
    assert (model["task"], model["maximum length in tokens"]) == ("sequence-classification", "48")
    assert (optimisation["epochs"], optimisation["batch size"], optimisation["seed"]) == ("2", "4", "1")
    assert optimisation["torch"] == version("torch")
    assert not data.keys() & optimisation.keys()
    page = run_page(run, {})
    titles = [page.index(f"<h3>{title}</h3>") for title in groups]
    assert page.index(repeat_command(run)) < titles[0]
    assert titles == sorted(titles)


def test_the_command_names_paths_and_processes(run_of, tmp_path):
    (run,) = gather([run_of("classes")])
    strange = replace(run, folder=tmp_path / "a run")
    assert repeat_command(strange) == (
        f"bert-tasks train '{tmp_path}/a run/recipe.toml' --output-dir '{tmp_path}/a run-again'"
    )
    two = replace(run, metadata=run.metadata.model_copy(update={"processes": 2}))
    assert repeat_command(two).startswith("torchrun --nproc_per_node 2 -m bert_tasks train ")
    assert repeat_command(replace(run, recipe=None)) is None
    assert "no command repeats it" in run_page(replace(run, recipe=None), {})


@pytest.mark.slow
def test_the_command_repeats_the_run(run_of, tmp_path):
    run = shutil.copytree(run_of("classes"), tmp_path / "run")
    (gathered,) = gather([run])
    program, *arguments = shlex.split(repeat_command(gathered))
    assert program == "bert-tasks"
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    first, again = (TaskModel.from_pretrained(folder).state_dict() for folder in (run, tmp_path / "run-again"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_labels_in_the_sentence_stay_texts(run_of):
    (run,) = gather([run_of("classes")])
    task = SequenceClassification.of(labels=(HOSTILE, "other"))
    rows = [{"text": "a", "label": HOSTILE}] * 3
    predictions = [ClassPrediction(label=HOSTILE, score=0.5, scores={}) for _ in rows]
    page = run_page(run, {"": results_of(task, predictions, rows)})
    assert "always predicting" in page
    assert "<script" not in page

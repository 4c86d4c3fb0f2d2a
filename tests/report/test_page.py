"""The page in a real browser: every task, light and dark."""

import re
import shutil
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from bert_tasks.experiments.folds import FoldMetric, FoldRun, FoldsRecord
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.report import make_report
from bert_tasks.report.collect import gather
from bert_tasks.report.page import _fold_rows, comparison_page, run_page
from bert_tasks.report.results import results_of
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.tasks.token_classification import TokenClassification
from support.report_runs import HOSTILE, KINDS, MARK, kinds

CASES = [(name, ("light", "dark")[index % 2]) for index, name in enumerate((*KINDS, "classes"))]


@pytest.fixture(scope="session")
def page_of(run_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return cache(lambda name: make_report(run_of(name), folder / f"{name}.html").output)


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_page_is_sound(browser, page_of, name, scheme):
    browser.open(page_of(name), scheme=scheme)
    assert browser.errors() == []
    assert not browser.is_blank()
    text = browser.text()
    assert [expected for expected in (*KINDS[name].texts, "What was run", "fingerprint") if expected not in text] == []
    assert len(browser.find_all("svg.chart[role=img][aria-label]")) == KINDS[name].charts
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.low_contrast() == []
    # Texts stay texts, and the page needs nothing else.
    assert browser.find_all("script, img, #broken") == []
    assert browser.run("return document.title").endswith("bert-tasks report")
    html = page_of(name).read_text("utf-8")
    assert "<script" not in html
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\(|https?:""", html) == []
    assert '<html lang="en">' in html


@pytest.mark.parametrize("name", kinds("choices"))
def test_page_is_reachable_and_narrow(browser, page_of, name):
    browser.open(page_of(name), width=400)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    stops = browser.tab_stops(100)
    scrolling = browser.run("return document.querySelectorAll('.scroll').length")
    assert stops.count("div.scroll") == scrolling > 0
    assert stops.count("summary") == len(browser.find_all("summary"))
    levels = browser.headings()
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert browser.run("return [...document.querySelectorAll('table')].every(t => t.caption && t.caption.innerText)")
    assert browser.run("return [...document.querySelectorAll('th')].every(cell => cell.scope)")


def test_page_stays_small_whatever_the_rows_hold(run_of):
    (run,) = gather([run_of("tags")])
    (prediction_set,) = run.predicted
    row, prediction = prediction_set.rows[0], prediction_set.predictions[0]
    words = ["x" * 3000] * 300
    tags = ("B-WHO", "O") * 150
    long = type(prediction)(words=tuple(words), tags=("O",) * 300, scores=(0.5,) * 300, entities=())
    rows = [{**row, "words": words, "tags": list(tags)}] * 100
    page = run_page(run, {"": results_of(prediction_set.task, [long] * 100, rows)})
    assert len(page.encode()) < 2_000_000


def test_page_stays_small_whatever_the_run_recorded(run_of):
    (run,) = gather([run_of("classes")])
    per_class = {
        f"{score}_{number}{'x' * 500}": 0.5 for number in range(5000) for score in ("f1", "precision", "recall")
    }
    metrics = {"accuracy": 0.25, **per_class, "overall_accuracy": 0.75}
    summary = run.summary.model_copy(update={"metrics": metrics})
    page = run_page(replace(run, summary=summary), {})
    assert len(page.encode()) < 2_000_000
    assert all(f'<th scope="row">{name}</th>' in page for name in ("accuracy", "overall_accuracy"))
    assert "14,702 more are in metrics.json" in page


def test_several_runs_side_by_side(browser, run_of, tmp_path):
    other = shutil.copytree(run_of("classes"), tmp_path / "other")
    html = make_report([run_of("classes"), other], tmp_path / "both.html").output
    for scheme in ("light", "dark"):
        browser.open(html, scheme=scheme, width=1000)
        assert browser.errors() == []
        assert browser.low_contrast() == []
        assert browser.overflowing() == []
        assert browser.unreachable() == []
    text = browser.text()
    assert "by a permutation test" in text
    assert "rows are independent" in text
    assert MARK in text
    assert HOSTILE not in text  # examples are those of one run


@pytest.mark.parametrize(("sets", "filler"), [(1, "&"), pytest.param(8, "\N{GRINNING FACE}", marks=pytest.mark.slow)])
def test_page_stays_small_whatever_the_labels_and_sets_are(run_of, sets, filler):
    """200 labels of 10,000 characters, of which HTML needs up to five bytes each."""
    (run,) = gather([run_of("classes")])
    labels = tuple(f"{number:03d}{filler * 10_000}" for number in range(200))
    task = SequenceClassification.of(labels=labels)
    rows = [{"text": filler * 3000, "text_pair": filler * 3000, "label": labels[n * 7 % 200]} for n in range(2000)]
    predictions = [ClassPrediction(label=labels[(n * 7 + n % 5) % 200], score=0.5, scores={}) for n in range(2000)]
    results = dict.fromkeys((f"set{number}" for number in range(sets)), results_of(task, predictions, rows))
    page = run_page(run, results)
    assert len(page.encode()) < 2_000_000
    assert page.count("</section>") == page.count("<section") > 2 * sets
    assert f"000{filler}".replace("&", "&amp;") in page
    left_out = re.findall(r"The (\d+) rarest are left out", page)
    assert left_out == ([] if sets == 1 else ["175"] * sets)
    comparison = comparison_page([run, run], [results, results], [])
    assert len(comparison.encode()) < 2_000_000


@pytest.mark.slow
def test_page_stays_small_whatever_the_tags_are(run_of):
    (run,) = gather([run_of("tags")])
    types = [f"{number}{'&' * 5000}" for number in range(100)]
    task = TokenClassification.of(labels=("O", *(f"B-{name}" for name in types)))
    words = ["&" * 100] * 300
    rows = [{"words": words, "tags": [f"B-{types[n % 100]}" for n in range(300)]}] * 40
    wrong = tuple(f"B-{types[(n + 1) % 100]}" for n in range(300))
    prediction = TokenPrediction(words=tuple(words), tags=wrong, scores=(0.5,) * 300, entities=())
    assert len(run_page(run, {"": results_of(task, [prediction] * 40, rows)}).encode()) < 4_000_000


def test_a_page_shows_the_start_of_a_long_recipe(run_of):
    (run,) = gather([run_of("classes")])
    page = run_page(replace(run, recipe="x" * 50_000), {})
    assert max(map(len, re.findall("x+", page))) == 20_000


def test_counts_in_the_table_of_folds_are_whole_numbers():
    runs = [
        FoldRun.model_construct(metrics={"support_a": 3.0, "support_b": 2.0, "f1_a": 1.0, "exact": 50.0}),
        FoldRun.model_construct(metrics={"support_a": 4.0, "exact": 33.25}),
    ]
    metrics = {
        name: FoldMetric(out_of_fold=value, mean=3.5, std=0.5)
        for name, value in {"support_a": 7.0, "support_b": 2.0, "f1_a": 1.0, "exact": 40.0}.items()
    }
    assert _fold_rows(FoldsRecord.model_construct(metrics=metrics, runs=runs)) == [
        ("support_a", ["7", "3.5", "0.500", "3", "4"]),
        ("support_b", ["2", "3.5", "0.500", "2", "\N{EN DASH}"]),
        ("f1_a", ["1.000", "3.5", "0.500", "1.000", "\N{EN DASH}"]),
        ("exact", ["40.0", "3.5", "0.500", "50.0", "33.2"]),
    ]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_page_says_that_there_are_no_mistakes(run_of, wrong):
    (run,) = gather([run_of("classes")])
    rows = [{"text": "a", "label": ("low", "mid")[number % 2]} for number in range(6)]
    labels = [row["label"] for row in rows[wrong:]] + ["high"] * wrong
    predictions = [ClassPrediction(label=label, score=0.5, scores={}) for label in labels]
    page = run_page(run, {"": results_of(run.tasks[""], predictions, rows)})
    assert ("Every prediction is correct" in page) == (wrong == 0)

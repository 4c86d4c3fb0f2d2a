"""The page about a search: all trials, the best values, and what there is without a score."""

import json
import re

import pytest

from bert_tasks.report.search import search_page

RATE, LENGTH = "optim.learning_rate", "settings.max_length"
LONG = "settings.max_length is 4000, but the model has 512 positions; choose at most 512, or another model with more"


def trial(number, score, note="", state="complete"):
    values = {RATE: 1e-5 * 3**number, LENGTH: (16, 32)[number % 2]}
    return {"number": number, "values": values, "score": score, "note": note, "state": state, "seconds": 1.0}


def study(sampler, trials):
    scored = [entry for entry in trials if entry["score"] is not None]
    best = max(scored, key=lambda entry: entry["score"])["number"] if scored else None
    fresh = None if best is None else {"mean": 0.7, "std": 0.01, "runs": 2}
    return {"sampler": sampler, "trials": trials, "best": best, "fresh": fresh}


@pytest.fixture
def page_of(tmp_path):
    (tmp_path / "recipe.toml").write_text(
        'task = "sequence-classification"\n[model]\nname = "m"\n[data]\ntrain = "t.csv"\nvalidation = "v.csv"\n'
        "[search]\nlearning_rate = {low = 1e-5, high = 1e-3, log = true}\n"
        "settings.max_length = {choices = [16, 32]}\n",
        "utf-8",
    )

    def page(study):
        content = {"metric": "accuracy", "lower_is_better": False, **study, "baseline": None, "notes": []}
        (tmp_path / "search.json").write_text(json.dumps(content), "utf-8")
        html = tmp_path / "report.html"
        html.write_text(search_page(tmp_path), "utf-8")
        return html

    return page


SOME = [trial(0, 0.5), trial(1, None, LONG, "failed"), trial(2, 0.75), trial(3, None, "pruned after 2", "pruned")]


def test_all_trials_are_listed(page_of):
    text = page_of(study("tpe", SOME)).read_text("utf-8")
    assert "4 trials of tpe, 2 of them without a score" in text
    rows = re.findall(r'<tr><th scope="row">(\d)</th><td>(?:([\d.]+)|[^<])</td>', text)
    assert rows[-4:] == [("0", "0.500"), ("1", ""), ("2", "0.750"), ("3", "")]
    assert f'<td class="remark">{LONG}</td>' in text
    assert text.count('<td class="remark">best</td>') == 1
    assert "<code>optim.learning_rate = 9e-05</code>" in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1000)])
def test_the_page_is_sound(browser, page_of, scheme, width):
    browser.open(page_of(study("tpe", SOME)), scheme=scheme, width=width)
    assert browser.errors() == []
    assert browser.low_contrast() == []
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    assert browser.headings() == [1, 2, 2]


def test_a_search_without_any_score_says_so(page_of):
    text = page_of(study("tpe", [trial(0, None, "diverged", "failed")])).read_text("utf-8")
    assert "No trial has a score" in text
    assert '<td class="remark">diverged</td>' in text

"""The page about a search: all trials, the best values, and what there is without a score."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.experiments.search import METRIC, STUDY
from bert_tasks.experiments.study import Study
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.report.search import search_page

LONG = "settings.max_length is 4000, but the model has 512 positions; choose at most 512, or another model with more"
RECIPE = """task = "sequence-classification"
[model]
name = "m"
[data]
train = "t.csv"
validation = "v.csv"
[search]
sampler = "random"
learning_rate = {low = 1e-5, high = 1e-3, log = true}
settings.max_length = {choices = [16, 32]}
"""
SOME = [(0.5, ""), (None, LONG), (0.75, ""), (None, "pruned after 2")]
PageOf = Callable[[Sequence[tuple[float | None, str]]], Path]


@pytest.fixture
def page_of(tmp_path: Path) -> PageOf:
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")

    def page(ends: Sequence[tuple[float | None, str]]) -> Path:
        section = load_recipe(tmp_path / "recipe.toml").search
        assert section is not None
        study = Study(tmp_path / STUDY, section)
        first = {"optim.learning_rate": 9e-5}
        study.open({METRIC: "accuracy"}, first=first, seed=1, lower_is_better=False)
        for score, note in ends:
            study.ask()
            study.end(score, note)
        html = tmp_path / "report.html"
        html.write_text(search_page(tmp_path), "utf-8")
        return html

    return page


def test_all_trials_are_listed(page_of: PageOf) -> None:
    text = page_of(SOME).read_text("utf-8")
    assert "4 trials, 2 of them without a score" in text
    rows = re.findall(r'<tr><th scope="row">(\d)</th><td>(?:([\d.]+)|[^<])</td>', text)
    assert rows == [("0", "0.500"), ("1", ""), ("2", "0.750"), ("3", "")]
    assert f'<td class="remark">{LONG}</td>' in text
    assert text.count('<td class="remark">best</td>') == 1
    assert "<td>9e-05</td>" in text
    assert "too good on average" in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1000)])
def test_the_page_is_sound(browser: Any, page_of: PageOf, scheme: str, width: int) -> None:
    browser.open(page_of(SOME), scheme=scheme, width=width)
    assert browser.errors() == []
    assert browser.low_contrast() == []
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    assert browser.headings() == [1, 2, 2]


@pytest.mark.parametrize("ends", [[(None, "diverged")], []])
def test_a_search_without_any_score_says_so(ends: list[tuple[None, str]], page_of: PageOf) -> None:
    text = page_of(ends).read_text("utf-8")
    assert "No trial has a score" in text
    assert text.count('<td class="remark">diverged</td>') == len(ends)

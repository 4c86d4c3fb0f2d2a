"""The matrix holds every row whatever the number of classes, and says what it leaves out."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.outputs.sections import MOST_CELLS, SHOWN_CLASSES, Confusion
from bert_tasks.report.collect import gather
from bert_tasks.report.page import run_page
from bert_tasks.report.results import Results

TOO_MANY = int(MOST_CELLS**0.5) + 1


def drawn(classes, rows, *, wrong=0.3, name="class number {}"):
    """Labels, and so many rows of them."""
    chance = random.Random(classes)
    labels = [name.format(number) for number in range(classes)]
    true = [*labels, *(chance.choice(labels) for _ in range(rows - classes))]
    predicted = [chance.choice(labels) if chance.random() < wrong else label for label in true]
    return Confusion.of(true, predicted, labels, "rows")


@given(st.integers(2, 60), st.data())
def test_every_row_is_in_the_matrix(classes, data):
    numbers = st.integers(0, classes - 1)
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=80))
    true, predicted = [str(label) for label, _ in pairs], [str(prediction) for _, prediction in pairs]
    labels = [str(number) for number in range(classes)]
    confusion = Confusion.of(true, predicted, labels, "rows")
    counted, matrix = Counter(zip(true, predicted, strict=True)), confusion.matrix
    assert sum(map(sum, matrix.counts)) == len(pairs)
    shown = matrix.labels[:-1] if confusion.left_out else matrix.labels
    for i, label in enumerate(shown):
        assert [counted[label, prediction] for prediction in shown] == list(matrix.counts[i][: len(shown)])
    assert len(matrix.labels) <= SHOWN_CLASSES
    if confusion.left_out:
        whole = confusion.full
        assert whole.labels == confusion.labels == tuple(label for label in labels if label in {*true, *predicted})
        assert [[counted[a, b] for b in whole.labels] for a in whole.labels] == [list(row) for row in whole.counts]
        wrong = Counter(label for pair in counted.elements() if pair[0] != pair[1] for label in pair)
        assert min(wrong[label] for label in shown) >= max(wrong[label] for label in set(whole.labels) - set(shown))
    else:
        assert confusion.full is None
        assert set(shown) >= {*true, *predicted}


def test_classes_with_the_most_mistakes_are_shown_rather_than_the_frequent_ones():
    labels = [f"c{number}" for number in range(2 * SHOWN_CLASSES)]
    right, wrong = labels[:SHOWN_CLASSES], labels[SHOWN_CLASSES:]
    true = [label for label in right for _ in range(5)] + wrong
    predicted = [label for label in right for _ in range(5)] + wrong[1:] + wrong[:1]
    matrix = Confusion.of(true, predicted, labels, "rows").matrix
    assert matrix.labels == (*wrong[: SHOWN_CLASSES - 1], f"{SHOWN_CLASSES + 1} others")
    assert matrix.counts[-1][-1] == len(right) * 5


@pytest.fixture
def page_of(run_of, tmp_path):
    def page(confusion):
        (run,) = gather([run_of("classes")])
        (prediction_set,) = run.predicted
        sections = prediction_set.task.output.report(
            prediction_set.predictions, prediction_set.rows, prediction_set.task.texts
        )
        html = run_page(run, {"": Results.of(replace(sections, confusion=confusion))})
        path = tmp_path / "page.html"
        path.write_text(html, "utf-8")
        return path

    return page


@pytest.mark.parametrize(("classes", "rows"), [(2, 500), (7, 60_000), (SHOWN_CLASSES, 60_000), (80, 60_000)])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_no_column_is_hidden(browser, page_of, classes, rows, media):
    path = page_of(drawn(classes, rows))
    browser.open(path, width=1280 if media == "screen" else 720)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    box = "document.querySelector('.matrix').parentElement"
    assert browser.run(f"return {box}.scrollWidth - {box}.clientWidth") <= 0
    cut = "return [...document.querySelectorAll('.matrix td')].filter(c => c.scrollWidth > c.clientWidth).length"
    assert browser.run(cut) == 0
    assert len(browser.find_all(".matrix tbody tr")) == min(classes, SHOWN_CLASSES)
    sentence = f"The {SHOWN_CLASSES - 1} of {classes} classes with the most mistakes"
    assert (sentence in browser.text()) == (classes > SHOWN_CLASSES)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_whole_matrix_is_in_the_page_and_scrolls(browser, page_of):
    path = page_of(drawn(SHOWN_CLASSES + 10, 3000))
    browser.open(path, width=1280)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert len(browser.find_all(".full tbody tr")) == SHOWN_CLASSES + 10
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    assert browser.low_contrast() == []


@pytest.mark.parametrize(
    ("classes", "name"), [(TOO_MANY - 1, "x" * 900 + "{}"), (TOO_MANY, "ж" * 300 + "{}"), (3000, "class number {}")]
)
def test_the_page_stays_small(page_of, classes, name):
    html = page_of(drawn(classes, 20_000, name=name)).read_text("utf-8")
    assert len(html.encode()) < 2_000_000
    assert ("too large for this page" in html) == (classes >= TOO_MANY)


@pytest.mark.parametrize("width", [400, 1280])
def test_no_caption_is_cut(browser, page_of, width):
    """Captions are whole in the part of a table that is visible before anybody scrolls."""
    browser.open(page_of(drawn(80, 60_000, name="a class with a long name and the number {}")), width=width)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    outside = """return [...document.querySelectorAll('caption > span, figcaption, figcaption small')].filter(one => {
      const box = (one.closest('.scroll') || one.parentElement).getBoundingClientRect();
      const own = one.getBoundingClientRect();
      return own.right > box.right + 0.5 || own.left < box.left - 0.5 || one.scrollWidth > one.clientWidth + 1;
    }).map(one => one.textContent)"""
    assert browser.run(outside) == []

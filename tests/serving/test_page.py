"""The page that tries a model, in real Chromium: all tasks, light and dark, by mouse and by keyboard."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.connections import Limits
from support.runs import PATIENCE
from support.servers import listening
from support.task_examples import EXAMPLES

if TYPE_CHECKING:
    from support.browser import Browser

ModelOf = Callable[[str], TaskModel]
KINDS = ("single", "several", "regression", "pair", "token", "span", "span v2")
TITLES = {
    "single": "Text classification",
    "pair": "Text classification",
    "token": "Token classification",
    "span": "Question answering",
}


@pytest.fixture(scope="module")
def pages(model_of: ModelOf) -> Iterator[dict[str, str]]:
    with listening([model_of(kind) for kind in KINDS], limits=Limits(max_characters=400, timeout=PATIENCE)) as urls:
        yield dict(zip(KINDS, urls, strict=True))


def opened(browser: "Browser", url: str, *, dark: bool = False) -> None:
    browser.open(url, scheme="dark" if dark else "light", width=900)
    browser.wait(lambda: browser.find("#form").is_displayed(), "the form")


def predicted(browser: "Browser") -> None:
    browser.wait(lambda: browser.find("#result").is_displayed(), "an answer")


def write(browser: "Browser", field: str, text: str) -> None:
    browser.run("document.getElementById(arguments[0]).value = arguments[1]", f"field-{field}", text)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_predicted_and_shown(browser: "Browser", pages: dict[str, str], kind: str, dark: bool) -> None:
    opened(browser, pages[kind], dark=dark)
    if kind in TITLES:
        assert browser.text("h1") == TITLES[kind]
    browser.find("#predict").click()
    predicted(browser)
    for details in browser.find_all("details"):
        browser.run("arguments[0].open = true", details)
    shown = browser.text("#answer")
    task = EXAMPLES[kind].task
    if task.name in ("sequence-classification", "pair-classification"):
        assert all(label in shown for label in task.labels)
        assert shown.count("%") == len(task.labels)
    elif task.name == "token-classification":
        assert all(word in shown for word in ("Lovelace", "Babbage", "London"))
    else:
        assert "The letter was written by Ada in May." in shown
        assert browser.find_all(".candidates button[aria-pressed=true]")
    assert browser.text("#status") != ""
    assert browser.errors() == []
    assert not browser.is_blank()
    assert browser.low_contrast() == []
    assert browser.overflowing() == []
    assert browser.unreachable() == []
    assert browser.headings()[:2] == [1, 2]


def test_entities_stand_in_the_text_with_their_type(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["token"])
    text = "  The 🎈 ferry,\n<b>Zoë</b> told the baker"
    write(browser, "words", text)
    browser.find("#predict").click()
    predicted(browser)
    marked = browser.find_all("#marked mark")
    assert marked, "the model of this test marks something"
    types = [browser.run("return arguments[0].querySelector('.type').textContent", mark) for mark in marked]
    assert set(types) <= {"THING", "WHO"}
    plain = browser.run(
        "const copy = document.getElementById('marked').cloneNode(true);"
        "copy.querySelectorAll('.type').forEach((type) => type.remove()); return copy.textContent"
    )
    assert plain == text
    assert browser.run("return document.querySelectorAll('#marked b').length") == 0
    legend = browser.text(".legend")
    assert all(f"{kind} \u00d7 {types.count(kind)}" in legend for kind in set(types))


def test_an_answer_is_marked_where_it_stands_and_so_are_its_rivals(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["span"])
    context = "🎈🎈 Café: the ferry leaves at seven, the baker sleeps."
    write(browser, "context", context)
    browser.find("#predict").click()
    predicted(browser)
    for button in browser.find_all(".candidates button")[:4]:
        button.click()
        wanted = browser.run("return arguments[0].querySelector('.name').textContent", button)
        assert browser.text("#marked mark") == wanted
        assert browser.text("#marked") == context
        assert button.get_attribute("aria-pressed") == "true"


def test_no_answer_is_said(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["span v2"])
    write(browser, "context", "")
    browser.find("#predict").click()
    predicted(browser)
    assert browser.text(".found").startswith("No answer in this context")


def test_errors_of_the_server_are_shown_beside_their_field(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["single"])
    write(browser, "text", "<img src=x onerror=alert(1)>" * 20)
    browser.find("#predict").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.text("#error") == "Text: String should have at most 400 characters"
    assert browser.find("#field-text").get_attribute("aria-invalid") == "true"
    assert browser.low_contrast() == []
    assert len(browser.errors()) == 1  # the console notes the status
    write(browser, "text", "short")
    browser.find("#predict").click()
    predicted(browser)
    assert not browser.find("#error").is_displayed()


def test_a_server_that_is_gone_is_told(browser: "Browser", model_of: ModelOf) -> None:
    with listening([model_of("single")]) as (url,):
        opened(browser, url)
    browser.find("#predict").click()
    browser.wait(lambda: "does not answer" in browser.text("#error"), "an error")
    browser.errors()


def test_the_keyboard_is_enough(browser: "Browser", pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["single"])
    stops = browser.tab_stops()
    assert "textarea#field-text" in stops
    assert "button#predict.main" in stops
    browser.find("#field-text").send_keys(Keys.CONTROL, Keys.ENTER)
    predicted(browser)
    assert browser.run("return document.querySelector('label[for=field-text]').textContent") == "Text"
    assert browser.find("#status").get_attribute("aria-live") == "polite"


def test_a_narrow_window_does_not_scroll_sideways(browser: "Browser", pages: dict[str, str], tmp_path: Path) -> None:
    for kind in ("token", "span"):
        browser.open(pages[kind], width=340)
        browser.wait(lambda: browser.find("#form").is_displayed(), "the form")
        browser.find("#predict").click()
        predicted(browser)
        assert browser.overflowing() == []

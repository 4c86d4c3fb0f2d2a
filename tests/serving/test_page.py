"""The page that tries a model, in real Chromium: all tasks, light and dark, by mouse and by keyboard."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.limits import Limits
from support.runs import PATIENCE
from support.servers import listening
from support.task_examples import EXAMPLES

if TYPE_CHECKING:
    from support.browser import Browser

ModelOf = Callable[[str], TaskModel]
KINDS = ("single", "several", "regression", "pair", "choice", "token", "span", "span v2", "masked")
TITLES = {
    "single": "Text classification",
    "pair": "Text classification",
    "token": "Token classification",
    "span": "Question answering",
    "choice": "Multiple choice",
    "masked": "Fill mask",
}


@pytest.fixture(scope="module")
def pages(model_of: ModelOf) -> Iterator[dict[str, str]]:
    with listening([model_of(case) for case in KINDS], limits=Limits(characters=400, timeout=PATIENCE)) as urls:
        yield dict(zip(KINDS, urls, strict=True))


def opened(browser: "Browser", url: str, *, dark: bool = False) -> None:
    browser.open(url, scheme="dark" if dark else "light", width=900)
    browser.wait(lambda: browser.find("#form").is_displayed(), "the form")


def predicted(browser: "Browser") -> None:
    browser.wait(lambda: browser.find("#result").is_displayed(), "an answer")


def write(browser: "Browser", field: str, text: str) -> None:
    browser.run("document.getElementById(arguments[0]).value = arguments[1]", f"field-{field}", text)


@pytest.mark.parametrize(("case", "dark"), [(case, index % 2 == 0) for index, case in enumerate(KINDS)])
def test_every_task_is_predicted_and_shown(browser: "Browser", pages: dict[str, str], case: str, dark: bool) -> None:
    opened(browser, pages[case], dark=dark)
    if case in TITLES:
        assert browser.text("h1") == TITLES[case]
    browser.find("#predict").click()
    predicted(browser)
    for details in browser.find_all("details"):
        browser.run("arguments[0].open = true", details)
    shown = browser.text("#answer")
    task = EXAMPLES[case].task
    if task.name in ("sequence-classification", "pair-classification"):
        assert all(label in shown for label in task.output.labels)
        assert shown.count("%") == len(task.output.labels)
    elif task.name == "multiple-choice":
        choices = task.example_rows[0]["choices"]
        assert all(choice in shown for choice in choices)
        assert shown.count("%") == len(choices)
        assert len(browser.find_all(".bars .best")) == 1
    elif task.name == "token-classification":
        assert all(word in shown for word in ("Lovelace", "Babbage", "London"))
    elif task.name == "masked-language-modeling":
        assert "Paris is the capital of" in shown
        assert len(browser.find_all("#answer .bars li")) == 5
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
    assert all(f"{entity_type} \u00d7 {types.count(entity_type)}" in legend for entity_type in set(types))
    assert not browser.find("#explain").is_displayed()  # each entity has its own explanation


def test_an_answer_is_marked_where_it_stands_and_so_are_its_rivals(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["span"])
    context = "🎈🎈 Café: the ferry leaves at seven, the baker sleeps."
    write(browser, "context", context)
    browser.find("#predict").click()
    predicted(browser)
    for button in browser.find_all(".candidates button")[:4]:
        button.click()
        expected = browser.run("return arguments[0].querySelector('.name').textContent", button)
        assert browser.text("#marked mark") == expected
        assert browser.text("#marked") == context
        assert button.get_attribute("aria-pressed") == "true"


def test_no_answer_is_said(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["span v2"])
    write(browser, "context", "")
    browser.find("#predict").click()
    predicted(browser)
    assert browser.text(".found").startswith("No answer in this context")


@pytest.mark.parametrize(("case", "dark"), [("regression", True), ("pair", False), ("span", True), ("choice", False)])
def test_words_are_shaded_by_their_contribution(
    browser: "Browser", pages: dict[str, str], model_of: ModelOf, case: str, dark: bool
) -> None:
    opened(browser, pages[case], dark=dark)
    row = EXAMPLES[case].task.example_rows[0]
    browser.find("#predict").click()
    predicted(browser)
    browser.find("#explain").click()
    browser.wait(lambda: browser.text("#explanation") != "", "an explanation")
    explanation = model_of(case).predict(row, explain=True)[0].to_json()["explanation"]
    most = max(abs(word["contribution"]) for word in explanation["words"])
    strong = [word for word in explanation["words"] if abs(word["contribution"]) >= 0.06 * most]
    marks = {(mark.text, str(mark.get_attribute("class"))) for mark in browser.find_all("#explanation mark")}
    for word in strong:
        assert (word["word"], "for" if word["contribution"] > 0 else "against") in marks
    shown = browser.text("#explanation")
    assert all(text in shown for text in row.values() if isinstance(text, str))
    assert all(word["word"] in shown for word in explanation["words"])
    browser.run("document.querySelector('#explanation details').open = true")
    assert browser.text("#explanation tbody tr").startswith(explanation["words"][0]["word"])
    assert "Explained." in browser.text("#status")
    assert browser.errors() == []
    assert browser.low_contrast() == []
    assert browser.unreachable() == []
    assert browser.overflowing() == []


def test_errors_of_the_server_are_shown_beside_their_field(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["single"])
    write(browser, "text", "<img src=x onerror=alert(1)>" * 20)
    browser.find("#predict").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.text("#error") == "Text: 560 characters, at most 400 are read"
    assert browser.find("#field-text").get_attribute("aria-invalid") == "true"
    assert browser.low_contrast() == []
    assert len(browser.errors()) == 1  # the console notes the status
    write(browser, "text", "short")
    browser.find("#predict").click()
    predicted(browser)
    assert not browser.find("#error").is_displayed()


def test_an_error_names_the_field_that_the_text_was_written_in(browser: "Browser", pages: dict[str, str]) -> None:
    """The words of a sentence are sent as its text, which has no field of its own."""
    opened(browser, pages["token"])
    write(browser, "words", "word " * 100)
    browser.find("#predict").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.text("#error").startswith("Sentence: ")
    assert browser.find("#field-words").get_attribute("aria-invalid") == "true"
    browser.errors()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_edge_of_a_field_can_be_seen(browser: "Browser", pages: dict[str, str], dark: bool) -> None:
    """WCAG 1.4.11: 3 to 1 against what is around it."""
    from support.browser import contrast

    opened(browser, pages["pair"], dark=dark)
    edge, card = browser.run(
        "const colour = (selector, name) => getComputedStyle(document.querySelector(selector))[name];"
        "return [colour('textarea', 'borderTopColor'), colour('form', 'backgroundColor')]"
        ".map((value) => value.match(/[0-9]+/g).map(Number))"
    )
    assert contrast(tuple(edge), tuple(card)) >= 3


def test_choices_are_typed_on_lines_of_their_own(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["choice"])
    assert browser.text("label[for=field-question]") == "Question (optional)"
    write(browser, "question", "")
    write(browser, "choices", "at nine\n\n  at ten \nat nine")
    browser.find("#predict").click()
    predicted(browser)
    names = [browser.run("return arguments[0].firstChild.data", name) for name in browser.find_all(".bars .name")]
    assert [name.strip() for name in names] == ["at nine", "at ten", "at nine"]
    assert len(browser.find_all(".bars .best")) == 1
    write(browser, "choices", "only one")
    browser.find("#predict").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.text("#error").startswith("Choices: ")
    assert not browser.find("#result").is_displayed()
    browser.errors()


def test_a_text_without_a_mask_is_said_to_have_none(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["masked"])
    write(browser, "text", "The harbour was cold.")
    browser.find("#predict").click()
    predicted(browser)
    assert "Write [MASK] in place of a word." in browser.text("#answer")


def test_a_prediction_stays_when_its_explanation_fails(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["single"])
    browser.find("#predict").click()
    predicted(browser)
    browser.run("answered.row = { text: 5 }")
    browser.find("#explain").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.find("#result").is_displayed()
    browser.errors()


def test_the_model_is_described_first(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["single"])
    labels = ", ".join(EXAMPLES["single"].task.output.labels)
    facts = browser.text("#facts")
    assert facts.startswith(
        f"Labels{labels}Limits24 tokens in a window, 64 rows in a request, 400 characters in a text"
    )


def test_the_score_of_the_run_is_shown(browser: "Browser", run: Path) -> None:
    with listening([TaskModel.from_pretrained(run)]) as (url,):
        opened(browser, url)
        facts = browser.text("#facts")
        accuracy = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]["accuracy"]
        assert f"Scoreaccuracy {accuracy:.4g} on validation (8 rows)" in facts
        assert f"Base model{run.parent.name}/base" in facts
        assert browser.low_contrast() == []
        assert browser.overflowing() == []


def test_examples_are_named_and_fill_the_form(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["span"])
    rows = EXAMPLES["span"].task.example_rows
    buttons = browser.find_all("#examples button")
    assert [button.text for button in buttons] == [row["question"] for row in rows]
    buttons[1].click()
    predicted(browser)
    value = "return document.getElementById(arguments[0]).value"
    assert [browser.run(value, f"field-{name}") for name in ("question", "context")] == list(rows[1].values())
    assert not browser.find("#lines").is_displayed()  # a row has two texts


@pytest.mark.parametrize("case", ["single", "token", "masked"])
def test_each_line_is_a_row(browser: "Browser", pages: dict[str, str], case: str) -> None:
    opened(browser, pages[case])
    field = "words" if case == "token" else "text"
    write(browser, field, "the ferry leaves\n\n the baker [MASK] ")
    browser.find("#several").click()
    browser.find("#predict").click()
    predicted(browser)
    rows = browser.run(
        "return [...document.querySelectorAll('.rows tbody tr')].map((row) => row.children[0].textContent)"
    )
    assert rows == ["the ferry leaves", " the baker [MASK] "]
    shown = browser.run(
        "return [...document.querySelectorAll('.rows tbody tr')].map((row) => row.children[1].textContent)"
    )
    assert all(shown)
    if case == "single":
        assert all(any(label in text for label in EXAMPLES[case].task.output.labels) for text in shown)
    assert not browser.find("#explaining").is_displayed()
    assert browser.text("#status").startswith("2 texts predicted")
    assert browser.errors() == []
    assert browser.low_contrast() == []
    assert browser.overflowing() == []
    assert browser.unreachable() == []


def test_an_error_names_the_line(browser: "Browser", pages: dict[str, str]) -> None:
    opened(browser, pages["single"])
    browser.find("#several").click()
    write(browser, "text", "short\n" + "a" * 401)
    browser.find("#predict").click()
    browser.wait(lambda: browser.find("#error").is_displayed(), "an error")
    assert browser.text("#error") == "Text 2: 401 characters, at most 400 are read"
    browser.find("#examples button").click()
    predicted(browser)
    assert not browser.find("#several").is_selected()
    browser.errors()


def test_a_server_that_is_gone_is_told(browser: "Browser", model_of: ModelOf) -> None:
    with listening([model_of("single")]) as (url,):
        opened(browser, url)
        browser.find("#predict").click()
        predicted(browser)
    browser.find("#predict").click()
    browser.wait(lambda: "does not answer" in browser.text("#error"), "an error")
    assert not browser.find("#result").is_displayed()  # it would be of another text
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
    for case in ("token", "span", "choice"):
        browser.open(pages[case], width=340, height=300)
        browser.wait(lambda: browser.find("#form").is_displayed(), "the form")
        browser.find("#predict").click()
        predicted(browser)
        assert browser.overflowing() == []
        assert browser.run("return document.getElementById('result').getBoundingClientRect().top < innerHeight")

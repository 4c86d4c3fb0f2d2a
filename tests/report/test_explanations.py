"""Examples of a report are explained on request: the words that counted, shaded, as the model explains the row."""

import html
import re
import shutil

import pytest

from bert_tasks.cli import main
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.report import make_report
from bert_tasks.report.page import signed
from support.report_runs import HOSTILE, write_rows

OTHERS = ("numbers", "choices")


@pytest.mark.parametrize("name", ["classes", "spans", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_the_first_examples_are_explained(run_of, tmp_path, name):
    plain = make_report(run_of(name), tmp_path / "plain.html")
    asked = make_report(run_of(name), tmp_path / "page.html", explain=2)
    assert 'class="shading"' not in plain.output.read_text("utf-8")
    before, after = (report.results[0][""].sections.examples.items for report in (plain, asked))
    assert [example.shading is not None for example in after] == [index < 2 for index in range(len(after))]
    assert [(example.line, example.remarks) for example in after] == [
        (example.line, example.remarks) for example in before
    ]
    model = TaskModel.from_pretrained(run_of(name) / "model")
    page = asked.output.read_text("utf-8")
    for example in after[:2]:
        (prediction,) = model.predict([example.row], explain=True)
        words = [piece for _, pieces in example.shading.texts for piece in pieces if piece[1] is not None]
        assert [word for word, _ in words] == [word.word for word in prediction.explanation.words]
        numbers = [word.contribution for word in prediction.explanation.words]
        assert [number for _, number in words] == pytest.approx(numbers, abs=1e-5)
        for column, pieces in example.shading.texts:
            text = example.shading.label if column == "choices" else example.row[column]
            assert "".join(piece for piece, _ in pieces) == text
        word, number = max(words, key=lambda word: abs(word[1]))
        css_class = "for" if number > 0 else "against"
        shaded = rf'<mark class="{css_class}" style="--share:1.00" title="[+\u2212][\d.e\u2212]+">'
        assert re.search(shaded + re.escape(html.escape(word)) + "<", page)
    assert page.count('class="shading"') == 2
    assert "<script>" not in page


def test_examples_of_a_file_are_explained_too(run_of, tmp_path):
    # One text with each label: some prediction is wrong, so that there are examples.
    rows = write_rows(tmp_path / "more.jsonl", [{"text": HOSTILE, "label": label} for label in ("low", "mid")])
    report = make_report(run_of("classes"), tmp_path / "page.html", data=rows, explain=1)
    items = report.on_file.results.sections.examples.items
    assert len(items) >= 1
    assert items[0].shading is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shades_can_be_read(browser, run_of, tmp_path, scheme):
    browser.open(make_report(run_of("pairs"), tmp_path / "page.html", explain=5).output, scheme=scheme)
    assert browser.find_all(".shading mark")
    assert browser.errors() == []
    assert browser.low_contrast() == []
    assert browser.overflowing() == []


def test_long_texts_are_cut(run_of, tmp_path):
    rows = write_rows(tmp_path / "long.jsonl", [{"text": "word " * 500, "label": name} for name in ("low", "mid")])
    page = make_report(run_of("classes"), tmp_path / "page.html", data=rows, explain=20).output.read_text("utf-8")
    assert "word …" in page


def test_what_cannot_be_explained_is_refused(run_of, tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match="token-classification has several for a row"):
        make_report(run_of("tags"), tmp_path / "page.html", explain=1)
    with pytest.raises(UsageError, match="--explain are for one run, not for 2"):
        make_report(
            [run_of("classes"), shutil.copytree(run_of("classes"), tmp_path / "other")],
            tmp_path / "page.html",
            explain=1,
        )
    assert not (tmp_path / "page.html").exists()
    for name, message in (("tags", "has several for a row"), ("classes", "Invalid value for '--explain'")):
        count = "1" if name == "tags" else "-1"
        monkeypatch.setattr("sys.argv", ["bert-tasks", "report", str(run_of(name)), "--explain", count])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_contributions_have_a_sign_and_as_many_digits_as_say_something():
    numbers = {1.23456: "+1.235", -0.0123: "\N{MINUS SIGN}0.012", 0.000123: "+0.00012", 0.0: "+0"}
    assert {number: signed(number) for number in numbers} == numbers

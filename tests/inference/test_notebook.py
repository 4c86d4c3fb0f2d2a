"""What notebooks show of predictions, results and reports, and predictions as a DataFrame."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest
from datasets import Dataset

from bert_tasks import MultiTaskModel, TaskModel, WriteOptions, fit, predict, predict_file
from bert_tasks.errors import UsageError
from bert_tasks.outputs.explanation import Explanation, WordContribution
from bert_tasks.outputs.notebook import Predictions
from bert_tasks.outputs.tag_prediction import EntitySpan, TokenPrediction
from bert_tasks.report import make_report
from support.training_runs import LABELS, load_model, make_rows

HOSTILE = '<script>alert("1")</script> & so on'


def cells(html: str) -> list[list[str]]:
    """The texts of a table, row by row; the HTML must be well-formed."""
    table = ElementTree.fromstring(f"<div>{html}</div>").find("table")
    assert table is not None
    return [["".join(cell.itertext()) for cell in row] for row in table]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TaskModel:
    return load_model(checkpoint)


def test_predictions_are_a_list_and_a_table(model: TaskModel) -> None:
    texts = [HOSTILE, *(f"text {number}" for number in range(24))]
    predictions = model.predict(texts)
    assert isinstance(predictions, list)
    assert [each.label for each in predictions] == [model.predict(text)[0].label for text in texts]
    html = predictions._repr_html_()
    head, *rows = cells(html.removesuffix("<p>... and 5 more</p>"))
    assert head == ["label", "score", "scores"]
    assert [row[0] for row in rows] == [prediction.label for prediction in predictions[:20]]
    assert rows[0][1] == f"{predictions[0].score:.4g}"
    assert html.endswith("<p>... and 5 more</p>")


def test_a_frame_has_what_a_file_has(model: TaskModel, tmp_path: Path) -> None:
    rows = make_rows(5)
    frame = predict(model, rows).to_frame()
    predict_file(model, rows, tmp_path / "rows.jsonl", writing=WriteOptions(keep_columns="none"))
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("records") == written
    assert frame.label.isin(LABELS).all()


def predict_in_memory(model: TaskModel, rows: Any) -> Predictions[Any]:
    return predict(model, rows)


def model_predict(model: TaskModel, rows: Any) -> Predictions[Any]:
    return model.predict(rows)


@pytest.mark.parametrize("call", [predict_in_memory, model_predict])
def test_predictions_keep_the_index_of_a_frame(
    model: TaskModel, call: Callable[[TaskModel, Any], Predictions[Any]]
) -> None:
    rows = make_rows(12)
    by_text = {row["text"]: model.predict(row["text"])[0].score for row in rows}
    frame = pandas.DataFrame(rows).sample(frac=0.7, random_state=1)
    assert frame.index.tolist() != sorted(frame.index)
    for data in (frame, frame["text"]):
        joined = frame.join(call(model, data).to_frame()[["score"]])
        assigned = frame.assign(score=call(model, data).to_frame()["score"])
        expected = pytest.approx([by_text[text] for text in frame["text"]], abs=1e-6)
        assert joined["score"].tolist() == expected
        assert assigned["score"].tolist() == expected


@pytest.mark.parametrize("call", [predict_in_memory, model_predict])
def test_predictions_keep_the_order_of_a_dataset(
    model: TaskModel, call: Callable[[TaskModel, Any], Predictions[Any]]
) -> None:
    dataset = Dataset.from_list(make_rows(12)).shuffle(seed=1).select(range(2, 9))
    frame = call(model, dataset).to_frame()
    assert frame.index.tolist() == list(range(7))
    scores = [model.predict(text)[0].score for text in dataset["text"]]
    assert frame["score"].tolist() == pytest.approx(scores, abs=1e-6)


def test_several_tasks_keep_the_index(checkpoint: Path) -> None:
    heads = {"mood": {"task": "sequence-classification", "labels": LABELS}}
    model = MultiTaskModel.from_pretrained(checkpoint, tasks=heads)
    frame = pandas.DataFrame(make_rows(3)).sample(frac=1, random_state=1)
    predicted = predict(model, frame).to_frame()
    assert predicted.index.equals(frame.index)
    assert len(model.predict(frame)) == 3  # not a prediction for each column


def test_a_changed_list_has_no_index(model: TaskModel) -> None:
    frame = pandas.DataFrame(make_rows(4))
    copied = pickle.loads(pickle.dumps(model.predict(frame)))
    assert copied.to_frame().index.equals(frame.index)
    copied.sort(key=lambda prediction: -prediction.score)
    copied.reverse()
    with pytest.raises(UsageError, match="changed or sorted"):
        copied.to_frame()
    rest = model.predict(frame)
    del rest[0]
    with pytest.raises(UsageError, match="changed or sorted"):
        rest.to_frame()
    assert len(model.predict(["a", "b"])[1:]) == 1


def test_explanations_shade_words(model: TaskModel) -> None:
    predictions = model.predict([HOSTILE], explain=True)
    html = predictions._repr_html_()
    head, row = cells(html)
    words = " ".join(word.word for word in predictions[0].explanation.words)
    assert (head[-1], row[-1].split()) == ("explanation", words.split())
    assert "<script" not in html
    largest = max(predictions[0].explanation.words, key=lambda word: abs(word.contribution))
    assert f'title="{largest.contribution:+.4f}" style="background: rgba(' in html
    assert "1.00)" in html


def test_entities_are_shaded_by_type() -> None:
    entities = (EntitySpan(entity_group="PER", score=0.9, word="Ada <3", start=0, end=6),)
    words, tags = ("Ada", "<3", "in", "Rome"), ("B-PER", "I-PER", "O", "B-LOC")
    shown = TokenPrediction(words=words, tags=tags, scores=(0.9, 0.9, 1.0, 0.5), entities=entities)
    html = Predictions([shown])._repr_html_()
    assert cells(html) == [["words", "entities"], ["Ada <3 in Rome", "Ada <3 (PER)"]]
    colours = [style.split(";")[0] for style in html.split("background: ")[1:]]
    assert len(colours) == 3  # the word outside has none
    assert colours[0] == colours[1] != colours[2]
    assert 'title="B-LOC 0.500"' in html


def test_explanations_of_entities_shade_a_line_of_words_each() -> None:
    entities = tuple(
        EntitySpan(
            entity_group=label,
            score=0.9,
            word=word,
            start=0,
            end=3,
            explanation=Explanation(
                label=label,
                logit=1.0,
                baseline_logit=0.0,
                words=(WordContribution(column="words", word="Ada", start=0, end=3, contribution=1.0),),
                completeness_error=0.0,
                steps=16,
            ),
        )
        for label, word in (("PER", "Ada"), ("LOC", "Rome"))
    )
    words, tags = ("Ada", "Rome"), ("B-PER", "B-LOC")
    shown = TokenPrediction(words=words, tags=tags, scores=(0.9, 0.9), entities=entities)
    html = Predictions([shown])._repr_html_()
    assert cells(html) == [["words", "entities", "explanation"], ["Ada Rome", "Ada (PER), Rome (LOC)", "AdaAda"]]
    assert html.count('title="+1.0000"') == 2


def test_results_and_reports_are_shown_in_the_page(checkpoint: Path, tmp_path: Path) -> None:
    options = {"output_dir": tmp_path / "run", "epochs": 1, "batch_size": 8, "report": True, "progress": False}
    result = fit(load_model(checkpoint), make_rows(8), make_rows(6, seed=1), **options)
    html = result._repr_html_()
    assert ["accuracy", f"{result.metrics['accuracy']:.4f}"] in cells(html)
    assert f"model: {tmp_path / 'run' / 'model'}" in html
    assert f"report: {tmp_path / 'run' / 'report.html'}" in html
    report = make_report(tmp_path / "run")
    frame = ElementTree.fromstring(report._repr_html_())
    assert (frame.tag, frame.get("srcdoc")) == ("iframe", report.output.read_text("utf-8").replace("\n", " "))

"""What one does with the folder of a model of several tasks: open, predict, evaluate, export, describe and serve it."""

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pandas
import pyarrow.parquet
import pytest
import torch
from pydantic import TypeAdapter
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from bert_tasks import TaskModel, WriteOptions, batch_predictor, evaluate, fit, predict, predict_file
from bert_tasks.cli.app import app
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.export import export
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.inputs import load_table
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.report import make_report
from bert_tasks.report.charts import display_name
from bert_tasks.report.collect import GivenRows
from bert_tasks.serving.requests import answers_schema
from bert_tasks.serving.server import load_warm
from bert_tasks.tasks import PairClassification, SequenceClassification, TokenClassification
from bert_tasks.tasks.examples import TEXTS, example_rows_of
from support.sampling import slow_except
from support.servers import SLOW, application
from support.small_checkpoints import copied, edit_config, save_checkpoint

TASKS: dict[str, dict[str, Any]] = {
    "intent": {"task": "sequence-classification", "columns": {"label": "intent"}},
    "slots": {"task": "token-classification", "columns": {"tags": "slots"}},
}
WORDS = (("fly", "to", "rome"), ("eat", "soup"), ("fly", "to", "oslo", "now"), ("eat", "rice", "now"))
SLOTS = {"rome": "B-CITY", "oslo": "B-CITY", "soup": "B-FOOD", "rice": "B-FOOD"}
ROWS: list[dict[str, Any]] = [
    {
        "text": " ".join(words),
        "words": list(words),
        "slots": [SLOTS.get(word, "O") for word in words],
        "intent": "travel" if words[0] == "fly" else "eat",
    }
    for words in WORDS
]
WORDS_ROWS = [{name: value for name, value in row.items() if name != "text"} for row in ROWS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, wide=True)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The output folder of a run."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    torch.manual_seed(1)
    model = MultiTaskModel.from_pretrained(base, tasks=TASKS)
    fit(model, ROWS * 2, ROWS, output_dir=folder, epochs=2, learning_rate=1e-3, batch_size=4, progress=False)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(*arguments: str | Path) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


def test_a_head_opens_as_a_model_of_its_task(run: Path, tmp_path: Path) -> None:
    models = MultiTaskModel.from_pretrained(run).models
    for name in TASKS:
        model = TaskModel.from_pretrained(run, task=name)
        assert (model.task, model.columns) == (models[name].task, models[name].columns)
        state, expected = model.state_dict(), models[name].state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in state.items())
        predictions = model.predict([row["text"] for row in ROWS])
        assert predictions == models[name].predict([row["text"] for row in ROWS])
        model.save_pretrained(tmp_path / name)
        assert TaskModel.from_pretrained(tmp_path / name).predict([row["text"] for row in ROWS]) == predictions


def test_settings_and_the_order_of_labels_of_a_head_may_change(run: Path) -> None:
    slots = TaskModel.from_pretrained(run, task="slots", max_length=16)
    assert (slots.task.max_length, slots.task.output.labels) == (16, ("B-CITY", "B-FOOD", "O"))
    first = TaskModel.from_pretrained(run, task="intent")
    second = TaskModel.from_pretrained(run, task="intent", labels=["travel", "eat"])
    logits = [model.predict("fly to oslo", logits=True)[0].logits for model in (first, second)]
    assert logits[0] == pytest.approx(logits[1][::-1], abs=1e-6)
    assert TaskModel.from_pretrained(run, task="ner", labels=["O", "B-X"]).load_report.new  # a new head on its encoder


def test_an_unknown_head_is_rejected_with_the_names(run: Path, base: Path) -> None:
    with pytest.raises(UsageError, match=r"has the tasks intent, slots, not 'slot', did you mean 'slots'\?"):
        TaskModel.from_pretrained(run, task="slot")
    with pytest.raises(UsageError, match="unknown task 'slots'"):
        TaskModel.from_pretrained(base, task="slots")


def test_predict_writes_the_predictions_of_all_heads(run: Path, file: Path, tmp_path: Path) -> None:
    command("predict", run, file, "--output", tmp_path / "all.jsonl", "--keep-columns", "none")
    models = MultiTaskModel.from_pretrained(run).models
    expected = []
    for row in ROWS:
        intent, (slots,) = models["intent"].predict(row["text"])[0].to_json(), models["slots"].predict(row["text"])
        columns = {f"intent.{name}": value for name, value in intent.items()}
        columns |= {f"slots.{name}": value for name, value in slots.to_json().items()}
        expected.append(columns)
    rounded = json.loads(json.dumps(lines_of(tmp_path / "all.jsonl")), parse_float=lambda text: round(float(text), 5))
    assert rounded == json.loads(json.dumps(expected), parse_float=lambda text: round(float(text), 5))
    assert [list(prediction) for prediction in predict(run, ["eat soup", ROWS[0]])] == [["intent", "slots"]] * 2


GIVEN = ("text", "words", "slots", "intent")
WRITTEN = (
    "intent.label",
    "intent.score",
    "intent.scores",
    "slots.words",
    "slots.tags",
    "slots.scores",
    "slots.entities",
)


@pytest.mark.parametrize("form", slow_except(("jsonl", "csv", "tsv", "parquet", "frame", "table"), "jsonl", "table"))
def test_every_file_and_batch_has_the_same_columns(run: Path, file: Path, tmp_path: Path, form: str) -> None:
    """Beside the columns of the input, which keep their names because no column of a prediction has one of them."""
    frame = pandas.DataFrame(ROWS)
    if form == "frame":
        result = batch_predictor(run)(frame)
        assert len(result) == len(ROWS)
        names = list(result)
    elif form == "table":
        names = batch_predictor(run)(pyarrow.Table.from_pylist(ROWS)).column_names
    else:
        output = tmp_path / f"all.{form}"
        command("predict", run, file, "--output", output)
        if form == "jsonl":
            names = list(lines_of(output)[0])
        elif form == "parquet":
            names = pyarrow.parquet.read_table(output).column_names
        else:
            names = list(pandas.read_csv(output, sep="," if form == "csv" else "\t"))
    expected = [*GIVEN, *WRITTEN]
    if form in ("csv", "tsv"):  # a column for each label
        at = expected.index("intent.scores")
        expected[at : at + 1] = ["intent.scores.eat", "intent.scores.travel"]
    assert names == expected


def test_a_field_with_the_name_of_its_task_is_one_column(base: Path, tmp_path: Path) -> None:
    tasks = {
        "label": {"task": "sequence-classification", "labels": ["eat", "travel"]},
        "entities": {"task": "token-classification", "labels": ["O", "B-CITY"]},
    }
    MultiTaskModel.from_pretrained(base, tasks=tasks).save_pretrained(tmp_path / "model")
    rows = [{"text": "fly to rome", "label": "travel", "label.scores.x": 1}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    predict_file(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert list(line) == [
        *("text", "input.label", "input.label.scores.x"),
        *("entities.words", "entities.tags", "entities.scores", "entities"),
        *("label", "label.score", "label.scores"),
    ]
    assert (line["input.label"], line["label"] in ("eat", "travel"), type(line["entities"])) == ("travel", True, list)


def test_predict_and_evaluate_run_one_head(
    run: Path, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command("predict", run, file, "--output", tmp_path / "slots.jsonl", "--task", "slots", "--keep-columns", "none")
    assert list(lines_of(tmp_path / "slots.jsonl")[0]) == ["words", "tags", "scores", "entities"]
    capfd.readouterr()
    metrics = []
    for options in ([], ["--task", "slots"]):
        command("evaluate", run, file, "--json", *options)
        metrics.append(json.loads(capfd.readouterr().out))
    assert metrics[0]["slots.overall_f1"] == metrics[1]["overall_f1"]
    assert metrics[0] == evaluate(run, file)


@pytest.fixture(scope="module")
def words_run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The folder of a model whose intent reads the words of the slots as its text."""
    folder = tmp_path_factory.mktemp("runs") / "words"
    tasks = {**TASKS, "intent": {**TASKS["intent"], "columns": {"text": "words", "label": "intent"}}}
    model = MultiTaskModel.from_pretrained(base, tasks=tasks)
    fit(model, WORDS_ROWS * 2, WORDS_ROWS, output_dir=folder, epochs=1, batch_size=4, progress=False)
    return folder


@pytest.mark.parametrize("form", slow_except(("jsonl", "parquet", "rows"), "jsonl"))
def test_a_head_reads_the_words_that_all_heads_read(words_run: Path, tmp_path: Path, form: str) -> None:
    data: Any = WORDS_ROWS
    if form != "rows":
        data = tmp_path / f"words.{form}"
        write = pandas.DataFrame(WORDS_ROWS)
        write.to_parquet(data) if form == "parquet" else write.to_json(data, orient="records", lines=True)
    whole, alone = evaluate(words_run, data), evaluate(words_run, data, task="intent")
    assert alone["accuracy"] == whole["intent.accuracy"]
    predict_file(words_run, data, tmp_path / "all.jsonl", writing=WriteOptions(keep_columns="none"))
    predict_file(words_run, data, tmp_path / "intent.jsonl", task="intent", writing=WriteOptions(keep_columns="none"))
    labels = [line["label"] for line in lines_of(tmp_path / "intent.jsonl")]
    assert labels == [line["intent.label"] for line in lines_of(tmp_path / "all.jsonl")]
    model = TaskModel.from_pretrained(words_run, task="intent")
    assert [prediction.label for prediction in model.predict(WORDS_ROWS)] == labels


def test_a_list_that_is_not_named_as_the_text_is_rejected(words_run: Path) -> None:
    model = TaskModel.from_pretrained(words_run, task="intent")
    with pytest.raises(DataError, match="not a text"):
        model.predict({"words": ["fly", 3]})
    with pytest.raises(DataError, match="not a text"):
        model.predict({"text": ["fly", "to"]})


def test_rows_may_have_the_input_of_one_task_only(run: Path) -> None:
    for row, names in (({"words": ["eat", "soup"]}, ["slots"]), ({"text": "eat soup"}, ["intent", "slots"])):
        (prediction,) = predict(run, [row])
        assert list(prediction) == names


def test_two_texts_are_no_row_of_these_tasks(run: Path) -> None:
    with pytest.raises(DataError, match="expected a mapping"):
        predict(run, [("fly", "to")])


def test_embeddings_are_of_the_encoder(run: Path) -> None:
    encoder, expected = Encoder.from_pretrained(run), MultiTaskModel.from_pretrained(run).encoder.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in encoder.encoder.state_dict().items())
    assert encoder.embed(["fly to rome", "eat"]).shape == (2, encoder.config.hidden_size)


@pytest.mark.parametrize("name", TASKS)
def test_transformers_opens_an_exported_head_with_equal_logits(run: Path, tmp_path: Path, name: str) -> None:
    command("export", run, "--task", name, "--to", "transformers", "--output", tmp_path / "stock")
    auto = {"intent": AutoModelForSequenceClassification, "slots": AutoModelForTokenClassification}[name]
    stock, info = auto.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    texts = AutoTokenizer.from_pretrained(tmp_path / "stock")([row["text"] for row in ROWS], padding=True)
    ids, mask = torch.tensor(texts["input_ids"]), torch.tensor(texts["attention_mask"])
    ours = MultiTaskModel.from_pretrained(run).models[name]
    with torch.no_grad():
        expected, logits = stock.eval()(ids, mask).logits, ours(ids, mask)
    if name == "slots":
        expected = expected * mask[..., None]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert stock.config.id2label == dict(enumerate(ours.task.output.labels))


def test_an_ordinary_model_is_exported_to_transformers(run: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(run, task="slots")
    exported = export(model, to="transformers", output=tmp_path / "stock")
    assert exported.lines() == ["BertForTokenClassification with 3 labels", f"exported: {tmp_path / 'stock'}"]
    assert TaskModel.from_pretrained(tmp_path / "stock").predict("eat soup") == model.predict("eat soup")
    with pytest.raises(UsageError, match="is not an empty folder"):
        export(model, to="transformers", output=tmp_path / "stock")


@pytest.mark.slow
def test_a_head_is_exported_to_onnx(run: Path, tmp_path: Path, file: Path) -> None:
    command("export", run, "--task", "slots", "--to", "onnx", "--output", tmp_path / "onnx", "--data", file)
    expected = TaskModel.from_pretrained(run, task="slots").predict(ROWS)
    predictions = predict(tmp_path / "onnx", ROWS)
    assert [prediction.tags for prediction in predictions] == [prediction.tags for prediction in expected]


def test_stock_transformers_has_one_of_several_tasks(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^choose one of the tasks intent, slots with .*task"):
        export(run, to="transformers", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transformers_lacks_some_heads(base: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(base, task="sequence-classification", labels=["a", "b"], pooling="mean")
    with pytest.raises(UsageError, match="transformers lacks the head of this sequence-classification"):
        export(model, to="transformers", output=tmp_path / "out")


def test_a_run_gets_a_card_with_the_metrics_of_all_heads(run: Path) -> None:
    text = (run / "model" / "README.md").read_text()
    assert {"| intent.accuracy | ", "| slots.overall\\_f1 | "} <= set(re.findall(r"\| [\w.\\]+ \| ", text))
    assert "pipeline_tag" not in text
    assert 'model = MultiTaskModel.from_pretrained(".")' in text
    example = re.search(r"model\.predict\(\[(.*)\]\)", text)
    assert example is not None
    assert list(MultiTaskModel.from_pretrained(run).predict(json.loads(example[1]))[0]) == ["intent", "slots"]


def test_the_server_answers_with_all_heads(run: Path) -> None:
    model = MultiTaskModel.from_pretrained(run)
    rows = [{"text": "eat soup"}, {"words": ["fly", "to", "rome"]}, {"words": ["fly"], "text": "fly"}]

    async def ask() -> tuple[list[Any], Any, Any]:
        async with application(model, limits=replace(SLOW, characters=50)) as served:
            answers = [await served.post(content) for content in (rows[0], {"inputs": rows}, {}, {"text": "a" * 51})]
            documents = [await served.client.get(path) for path in ("/model", "/openapi.json")]
            examples = [await served.post(row) for row in documents[0].json()["examples"]]
            assert {answer.status_code for answer in examples} == {200}
            return answers, *(document.json() for document in documents)

    (single, several, empty, long), about, document = asyncio.run(ask())
    assert single.json()["intent"]["label"] == model.predict("eat soup")[0]["intent"].label
    assert [list(answer) for answer in several.json()["predictions"]] == [
        ["intent", "slots"],
        ["slots"],
        ["intent", "slots"],
    ]
    assert (
        empty.json()["detail"][0]["msg"]
        == "no input of any task. The tasks read 'text' (intent), 'words' or 'text' (slots)."
    )
    assert long.json()["detail"][0]["msg"] == "51 characters, at most 50 are read"
    names = ["text", "words", "document", "question", "context"]
    assert [column["name"] for column in about["columns"]] == names
    operation = document["paths"]["/predict"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$defs"]["Row"]["properties"].keys() == set(names)
    assert "required" not in schema["$defs"]["Row"]
    assert {"ClassPrediction", "TokenPrediction"} < document["components"]["schemas"].keys()
    jsonschema.validate(several.json(), TypeAdapter(answers_schema(model.tasks)).json_schema(mode="serialization"))


def test_requests_that_run_together_are_answered_each_for_its_tasks(run: Path) -> None:
    model, forward_fn = load_warm(run, task=None, settings=None, revision=None, dtype="float32")
    rows = [ROWS[0], {"words": ["eat", "rice"]}, {"text": "fly to oslo"}, WORDS_ROWS[1], {"text": "eat"}]
    batches: list[int] = []

    async def ask() -> list[Any]:
        async with application(model, max_wait=0.3, run=lambda batch: batches.append(1) or forward_fn(batch)) as served:
            return await asyncio.gather(*(served.post({"inputs": [row, rows[0]]}) for row in rows))

    answers = [answer.json()["predictions"] for answer in asyncio.run(ask())]
    assert len(batches) < len(rows)
    for row, answer in zip(rows, answers, strict=True):
        expected = [
            {name: prediction.to_json() for name, prediction in predictions.items()}
            for predictions in predict(run, [row, rows[0]])
        ]
        assert rounded(answer) == rounded(expected)


def rounded(content: Any) -> Any:
    return json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 5))


def test_a_server_of_several_tasks_lacks_what_belongs_to_one(run: Path) -> None:
    asked = [
        ("/predict", {"text": "eat", "labels": ["a", "b"]}),
        ("/predict?explain=true", {"text": "eat"}),
        ("/embed", {"inputs": "eat"}),
        ("/rerank", {"query": "eat", "texts": ["fly"]}),
    ]

    async def ask() -> tuple[list[Any], Any, Any]:
        async with application(MultiTaskModel.from_pretrained(run)) as served:
            answers = [await served.client.post(path, json=content) for path, content in asked]
            about, document = [(await served.client.get(path)).json() for path in ("/model", "/openapi.json")]
            return answers, about, document

    answers, about, document = asyncio.run(ask())
    assert {answer.status_code for answer in answers} == {422}
    labels, explained, *others = [answer.json() for answer in answers]
    (fault,) = labels["detail"]
    message = "a model of several tasks (intent, slots) has labels of its own"
    assert (fault["loc"], fault["msg"]) == (["body", "labels"], message)
    assert explained["detail"][0]["msg"].startswith("choose one of the tasks intent, slots with")
    assert [failure["error"] for failure in others] == [
        "the model does not embed texts. Serve an encoder with --task embedding",
        "the model needs one score, or two labels, for a pair of texts",
    ]
    assert not {"/embed", "/rerank", "/v1/embeddings"}.intersection(document["paths"])
    assert (about["task"], about["pipeline_tag"], about["problem_type"]) == ("multi-task", None, None)
    assert (about["labels"], about["explains"]) == ([], False)


def test_examples_have_the_inputs_of_all_tasks() -> None:
    tasks = {"intent": SequenceClassification.of(), "pair": PairClassification.of(), "slots": TokenClassification.of()}
    pairs = tasks["pair"].example_rows
    names = {"intent": {"label": "intent"}, "pair": {"text": "first"}, "slots": {"text": "sentence"}}
    assert example_rows_of(tasks, names) == [
        {"text": text, "first": pair["text"], "text_pair": pair["text_pair"], "sentence": text}
        for text, pair in zip(TEXTS, pairs, strict=True)
    ]
    assert example_rows_of({"": tasks["pair"]}, {"": {"text": "first"}}) == pairs


@pytest.mark.parametrize("option", ["logits", "explain"])
def test_logits_and_explanations_are_of_one_task(run: Path, option: str) -> None:
    with pytest.raises(UsageError, match=r"^choose one of the tasks intent, slots with .*task"):
        predict(run, ["eat soup"], **{option: True})
    assert predict(run, ["eat soup"], task="intent", **{option: True})


def given_rows(run: Path) -> GivenRows:
    model = MultiTaskModel.from_pretrained(run)
    return GivenRows(validation={"": load_table(ROWS, model.row_columns)}, tasks=model.tasks)


def test_the_report_has_a_section_for_each_head(run: Path, tmp_path: Path) -> None:
    report = make_report(run, tmp_path / "r.html", fit_rows=given_rows(run))
    assert list(report.results[0]) == ["intent", "slots"]
    metrics = report.runs[0].metrics
    estimates = {name: results.estimates for name, results in report.results[0].items()}
    assert estimates["intent"]["accuracy"].value == metrics["intent.accuracy"]
    assert estimates["slots"]["overall_f1"].value == metrics["slots.overall_f1"]
    page = (tmp_path / "r.html").read_text()
    assert [f"Results on {name}" in page for name in TASKS] == [True, True]
    for name in ("intent.accuracy", "slots.overall_f1"):
        assert display_name(name, ("",)) in page
    assert report.runs[0].missing == ()


@pytest.mark.slow
def test_the_report_has_the_scores_of_all_heads_on_a_file(run: Path, file: Path, tmp_path: Path) -> None:
    options = {"data": file, "by": ["intent"], "fit_rows": given_rows(run)}
    on_file = make_report(run, tmp_path / "r.html", **options).on_file
    assert on_file is not None
    assert on_file.metrics == evaluate(run, file)
    assert on_file.results is None
    (slices,) = on_file.slices
    for row in slices.slices:
        rows = [each for each in ROWS if each["intent"] == row.name]
        assert row.count == len(rows)
        expected = evaluate(run, rows)["mean_primary_metric"]
        assert row.scores["mean_primary_metric"].value == pytest.approx(expected)
    with pytest.raises(UsageError, match=r"--explain shades one explanation .* but token-classification has several"):
        make_report(run, tmp_path / "r.html", explain=1, fit_rows=given_rows(run))


@pytest.mark.slow  # trains
def test_adapters_are_trained_together_and_saved_with_one_head(base: Path, tmp_path: Path) -> None:
    model = MultiTaskModel.from_pretrained(base, tasks=TASKS)
    options = {"epochs": 1, "learning_rate": 1e-2, "batch_size": 4, "lora_rank": 2, "progress": False}
    fit(model, ROWS, ROWS, output_dir=tmp_path / "run", **options)
    with pytest.raises(UsageError, match=r"Call model\.models\['intent'\]\.save_adapter$"):
        model.save_adapter(tmp_path / "adapter")
    for name, task_model in model.models.items():
        task_model.save_adapter(tmp_path / name)
        opened = TaskModel.from_pretrained(tmp_path / name)
        for key, tensor in task_model.state_dict().items():
            torch.testing.assert_close(opened.state_dict()[key], tensor, atol=1e-6, rtol=0)
    before, after = (Encoder.from_pretrained(folder).encoder.state_dict() for folder in (base, tmp_path / "run"))
    assert any(not torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (5, "heads is 5"),
        ({}, "there are no tasks with a head each"),
        ({"intent": {"task": "nope"}}, "tasks.intent: unknown task 'nope'"),
        ({"intent": {"task": 5}}, "tasks.intent: unknown task 5"),
        (
            {"intent": {"task": "token-classification", "columns": {"tags": 5}}},
            r"tasks.intent: columns is \{'tags': 5\}",
        ),
        *(
            ({"intent": {"task": "sequence-classification", "labels": labels}}, r"tasks.intent: labels is ")
            for labels in ([1, 2], [None, "b"], [["a"], "b"], {"a": 1}, 7, None, [True, False])
        ),
        ({"intent": {"task": ["x"]}}, r"tasks.intent: unknown task \['x'\]"),
        ({"intent": {"task": "ner", "labels": ["a", "b"], "max_length": "9"}}, "tasks.intent: max_length is '9'"),
        ({"intent": {"task": "ner", "labels": ["a", "b"], "max_length": True}}, "tasks.intent: max_length is True"),
        (
            {"intent": {"task": "ner", "labels": ["a", "b"], "max_length": 10**18}},
            "max_length is 10{18}, expected at most",
        ),
        ({"intent": {"task": "question-answering", "n_best_size": 10**18}}, "n_best_size is 10{18}, expected at most"),
        ({"intent": {"task": "question-answering", "n_best_size": 2000}}, "n_best_size is 2000, expected at most 1000"),
        ({"intent": {"task": "question-answering", "n_best_size": 1e308}}, "n_best_size is 1e.308"),
        ({"intent": {"task": "question-answering", "max_answer_length": 10**400}}, "max_answer_length is 10*"),
        ({"intent": {"task": "ner", "labels": ["a", "b"], "weight": 10**400}}, "weight is 10*"),
        ({"intent": {"task": "ner", "labels": ["a", "b"], "nope": 3}}, "nope"),
        ({"intent": 3}, r"heads\.intent is 3"),
    ],
)
def test_damaged_tasks_are_named(run: Path, tmp_path: Path, heads: Any, message: str) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    shutil.copy(run / "model" / "config.json", folder)  # which is read before the weights
    edit_config(folder, bert_tasks={"task": "multi-task", "settings": {"heads": heads}})
    for task in (None, "intent"):
        with pytest.raises(CheckpointError, match=rf"config\.json, key bert_tasks: .*{message}"):
            TaskModel.from_pretrained(folder, task=task)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"max_length": 100_000}, "max_length = 100000, but the checkpoint has"), ({"labels": []}, "needs labels")],
)
def test_a_head_that_no_model_can_have_is_named(
    run: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = copied(run / "model", tmp_path / "damaged")
    stored = json.loads((folder / "config.json").read_text())["bert_tasks"]
    stored["settings"]["heads"]["intent"] |= changed
    edit_config(folder, bert_tasks=stored)
    with pytest.raises(CheckpointError, match=rf"damaged.*{message}"):
        MultiTaskModel.from_pretrained(folder)


def test_rows_are_not_evaluated_by_labels_that_nobody_named(base: Path) -> None:
    with pytest.raises(UsageError, match="needs labels"):
        evaluate(MultiTaskModel.from_pretrained(base, tasks=TASKS), ROWS)

"""Labels in a request: the answers of the model in Python, beside requests of pairs, and every wrong request."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.model.task_model import TaskModel
from support.servers import Application, errors_of, rounded, visit
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

LABELS = ["the weather", "food and drink", "politics"]
HYPOTHESIS = "This text is about {}."
OPTIONS = {"labels": LABELS, "hypothesis": HYPOTHESIS}


@pytest.fixture(scope="module")
def model(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> TaskModel:
    folder, labels = tmp_path_factory.mktemp("nli"), ("contradiction", "neutral", "entailment")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, head="sequence", labels=labels, wide=True)
    return TaskModel.from_pretrained(folder, task="pair-classification")


def posted(model: TaskModel, contents: list[Any], **options: Any) -> list[httpx2.Response]:
    """The responses to requests that run together."""

    async def ask(served: Application) -> list[httpx2.Response]:
        return await asyncio.gather(*map(served.post, contents))

    responses: list[httpx2.Response] = visit(model, ask, **options)
    return responses


def test_texts_stand_for_rows(model: TaskModel) -> None:
    rows = [{"text": line} for line in LINES[:2]]
    contents = [{"inputs": rows, **OPTIONS}, {"inputs": LINES[:2], **OPTIONS}, {"inputs": LINES[0], **OPTIONS}]
    # In a batch of their own, requests of equal rows have equal bits.
    expected, texts, text = (posted(model, [content])[0] for content in contents)
    assert texts.json() == expected.json()
    assert text.json()["label"] == expected.json()["predictions"][0]["label"]


def test_answers_equal_the_models_beside_requests_of_pairs(model: TaskModel) -> None:
    rows = [{"text": line} for line in LINES]
    pair = {"text": LINES[0], "text_pair": LINES[1]}
    contents = [
        {"inputs": rows, **OPTIONS},
        pair,
        {**rows[1], **OPTIONS, "multi_label": True},
        {**rows[2], "labels": LABELS[:1]},
        {"inputs": [pair, pair]},
    ]
    several, first, multi, single, pairs = posted(model, contents, max_wait=0.2)
    zero_shot = model.zero_shot(LABELS, hypothesis=HYPOTHESIS)
    assert several.json() == {"predictions": [rounded(prediction.to_json()) for prediction in zero_shot.predict(rows)]}
    (expected,) = model.predict([pair])
    assert first.json() == rounded(expected.to_json())
    assert pairs.json() == {"predictions": [rounded(expected.to_json())] * 2}
    (expected,) = model.zero_shot(LABELS, hypothesis=HYPOTHESIS, multi_label=True).predict(rows[1])
    assert multi.json() == rounded(expected.to_json())
    (expected,) = model.zero_shot(LABELS[:1]).predict(rows[2])
    assert single.json() == rounded(expected.to_json())


def test_names_of_the_training_data(model: TaskModel) -> None:
    """A column may be called hypothesis: without labels it is the second text."""
    columns = {"text": "premise", "text_pair": "hypothesis"}
    contents = [{"premise": LINES[0], "labels": LABELS}, {"premise": LINES[0], "hypothesis": LINES[1]}]
    labelled, pair = posted(model, contents, columns=columns)
    assert labelled.json() == rounded(model.zero_shot(LABELS).predict(LINES[0])[0].to_json())
    assert pair.json() == rounded(model.predict([(LINES[0], LINES[1])])[0].to_json())


ROW = {"text": "a text"}
TEXTS = "expected a list of 1 to 64 texts"
WRONG: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({**ROW, "labels": "a,b"}, {"body.labels": TEXTS}),
    ({**ROW, "labels": []}, {"body.labels": TEXTS}),
    ({**ROW, "labels": ["a"] * 65}, {"body.labels": TEXTS}),
    ({**ROW, "labels": ["a", 1]}, {"body.labels": "not a text. Write it in quotes."}),
    ({**ROW, "labels": ["a", ""]}, {"body.labels": "a label is empty. Write them as 'sports,politics'."}),
    ({**ROW, "labels": ["a", "b", "a"]}, {"body.labels": "labels 1 and 3 are equal. Write each label once."}),
    ({**ROW, "labels": ["\ud800"]}, {"body.labels": "half a character (surrogate U+D800). Replace it."}),
    ({**ROW, **OPTIONS, "multi_label": 1}, {"body.multi_label": "expected true or false"}),
    (
        {**ROW, **OPTIONS, "hypothesis": "{:99999999999}"},
        {"body.hypothesis": "it needs {} for the label, once. Write it as 'This example is {}.'."},
    ),
    ({**ROW, **OPTIONS, "hypothesis": None}, {"body.hypothesis": 'missing text. Write an empty text as "".'}),
    (
        {**ROW, **OPTIONS, "hypothesis": "word " * 60 + "{}"},
        {"body.hypothesis": "with a label it leaves no room for the text in max_length = 48 tokens"},
    ),
    (
        {**ROW, **OPTIONS, "hypothesis": "a" * 20_000 + "{}"},
        {"body.hypothesis": "20016 characters, at most 20000 are read"},
    ),
    ({**OPTIONS}, {"body.text": "missing text. The row has no columns."}),
    (
        {**ROW, **OPTIONS, "text_pair": "b"},
        {"body": "a text with labels has no second text. Remove text_pair"},
    ),
    ({"inputs": [ROW] * 22, **OPTIONS}, {"body": "22 rows x 3 labels, at most 64 pairs are read"}),
    ({"inputs": [ROW], **OPTIONS, "more": 1}, {"body.more": "no other key may be beside inputs"}),
]


def test_wrong_requests(model: TaskModel) -> None:
    responses = posted(model, [content for content, _ in WRONG])
    assert [response.status_code for response in responses] == [422] * len(WRONG)
    assert [errors_of(response) for response in responses] == [errors for _, errors in WRONG]


def test_other_models_and_explanations(model: TaskModel, model_of: Callable[[str], TaskModel]) -> None:
    (single,) = posted(model_of("single"), [{**ROW, **OPTIONS}])
    message = "the model needs a label that begins with 'entail'. Its labels are low, mid, high"
    assert (single.status_code, errors_of(single)) == (422, {"body.labels": message})
    (tagger,) = posted(model_of("token"), [{**ROW, **OPTIONS}])
    message = "the model must be one of pair-classification, not of token-classification"
    assert (tagger.status_code, errors_of(tagger)) == (422, {"body.labels": message})
    (pair,) = posted(model_of("pair"), [{**ROW, **OPTIONS}])
    message = "the model needs a label that begins with 'entail'. Its labels are no, yes"
    assert (pair.status_code, errors_of(pair)) == (422, {"body.labels": message})
    (several,) = posted(model_of("several"), [{**ROW, "labels": ["a"]}])  # the column of a row of training
    assert several.status_code == 200

    async def explained(served: Application) -> httpx2.Response:
        return await served.client.post("/predict?explain=true", json={**ROW, **OPTIONS})

    assert errors_of(visit(model, explained)) == {
        "query.explain": "predictions of labels in a request are not explained"
    }


def test_the_document_describes_labels(model: TaskModel) -> None:
    async def ask(served: Application) -> Any:
        return (await served.client.get("/openapi.json")).json()

    document = visit(model, ask)
    schema = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "paths": document["paths"]})
    properties = {name for definition in schema["$defs"].values() for name in definition["properties"]}
    assert {"text", "text_pair", "inputs", "labels", "hypothesis", "multi_label"} <= properties
    for content in (ROW | OPTIONS, {"inputs": [ROW], **OPTIONS, "multi_label": True}, {**ROW, "text_pair": "b"}):
        validator.validate(content)


def test_a_served_folder(model: TaskModel, tmp_path: Path) -> None:
    """A folder of transformers does not say that its classifier reads pairs; labels do."""
    assert model.origin is not None
    stock = TaskModel.from_pretrained(model.origin.name)
    (response,) = posted(stock, [{**ROW, **OPTIONS}])
    (expected,) = model.zero_shot(LABELS, hypothesis=HYPOTHESIS).predict(ROW)
    assert response.json() == rounded(expected.to_json())

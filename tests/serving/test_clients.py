"""Clients of other servers: the openai library, and requests of TEI's clients."""

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.errors import NoHeadError, UsageError
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.server import load_warm
from support.servers import SLOW, Application, listening, posted, visit
from support.task_examples import TEXTS

ModelOf = Callable[[str], TaskModel]


def loaded(folder: Path, **settings: Any) -> TaskModel:
    return load_warm(folder, task="embedding", settings=settings, revision=None, dtype="float32")[0].one_task()


@pytest.fixture(scope="module")
def vectors(encoder: Path) -> Any:
    return Encoder.from_pretrained(encoder).embed(TEXTS)


# OpenAI's embeddings.


def test_the_openai_library(embedder: TaskModel, vectors: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with listening([embedder]) as (url,):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        response = client.embeddings.create(model="any", input=list(TEXTS))  # the library asks for base64
        assert np.array([item.embedding for item in response.data]) == pytest.approx(vectors, abs=1e-5)
        single = client.embeddings.create(model="any", input=TEXTS[0], encoding_format="float")
        assert single.data[0].embedding == pytest.approx(list(vectors[0]), abs=1e-5)
        with pytest.raises(openai.UnprocessableEntityError, match="expected a list of 1 to 64 rows"):
            client.embeddings.create(model="any", input=[])


def test_embeddings_in_the_forms_of_openai_and_tei(embedder: TaskModel, vectors: Any) -> None:
    texts = list(TEXTS)
    numbers, encoded, single, tei, raw = posted(
        embedder,
        ("/v1/embeddings", {"input": texts, "model": "m", "user": "u"}),
        ("/v1/embeddings", {"input": texts, "model": "m", "encoding_format": "base64"}),
        ("/embed", {"inputs": TEXTS[0], "truncate": True, "truncation_direction": "Right"}),
        ("/embed", {"inputs": texts}),
        ("/embed", {"inputs": texts, "normalize": False}),
    )
    content = numbers.json()
    assert (content["object"], content["model"]) == ("list", "tests/model")
    assert [(item["object"], item["index"]) for item in content["data"]] == [
        ("embedding", i) for i in range(len(TEXTS))
    ]
    assert np.array([item["embedding"] for item in content["data"]]) == pytest.approx(vectors, abs=1e-5)
    tokens = sum(len(embedder.require_tokenizer()(text)["input_ids"]) for text in TEXTS)
    assert content["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in encoded.json()["data"]]
    assert np.stack(decoded) == pytest.approx(vectors, abs=1e-5)
    assert np.array(single.json()) == pytest.approx(vectors[:1], abs=1e-5)
    assert np.array(tei.json()) == pytest.approx(vectors, abs=1e-5)
    lengths = np.linalg.norm(np.array(raw.json()), axis=1, keepdims=True)
    assert np.array(raw.json()) / lengths == pytest.approx(vectors, abs=1e-5)
    assert abs(lengths - 1).min() > 0.1


def test_settings_of_an_embedding(encoder: Path) -> None:
    (response,) = posted(loaded(encoder, pooling="cls", normalize=False), ("/embed", {"inputs": TEXTS[0]}))
    expected = Encoder.from_pretrained(encoder).embed(TEXTS[:1], pooling="cls", normalize=False)
    assert np.array(response.json()) == pytest.approx(expected, abs=1e-4)
    for wrong, message in (
        ({"poolin": "cls"}, "did you mean 'pooling'"),
        ({"max_length": "a"}, "max_length is 'a'"),
    ):
        with pytest.raises(UsageError, match=message):
            loaded(encoder, **wrong)
    with pytest.raises(UsageError, match="served without adapters"):
        load_warm(encoder, task="embedding", settings=None, revision=None, dtype="float32", adapter=encoder)
    with pytest.raises(NoHeadError, match="To serve vectors of texts, use task='embedding'"):
        load_warm(encoder, task=None, settings=None, revision=None, dtype="float32")


# TEI: rerank and predict.


def test_texts_are_sorted_by_their_scores(model_of: ModelOf) -> None:
    query, texts = TEXTS[0], list(TEXTS[1:6])
    rows = [{"text": query, "text_pair": text} for text in texts]
    request = {"query": query, "texts": texts}
    for case in ("pair", "pair regression"):
        model = model_of(case)
        plain, named, raw = posted(
            model,
            ("/rerank", request),
            ("/rerank", {**request, "return_text": True, "truncate": True}),
            ("/rerank", {**request, "raw_scores": True}),
        )
        predictions = model.predict(rows)
        logits = [
            prediction.score
            if case == "pair regression"
            else np.log(prediction.scores["yes"] / prediction.scores["no"])
            for prediction in predictions
        ]
        order = sorted(range(len(texts)), key=lambda index: -logits[index])
        assert [rank["index"] for rank in plain.json()] == [rank["index"] for rank in raw.json()] == order
        expected = [1 / (1 + np.exp(-logits[index])) for index in order]
        assert [rank["score"] for rank in plain.json()] == pytest.approx(expected, abs=1e-4)
        assert [rank["score"] for rank in raw.json()] == pytest.approx([logits[index] for index in order], abs=1e-3)
        assert [rank["text"] for rank in named.json()] == [texts[index] for index in order]
        assert "text" not in plain.json()[0]


def test_predict_in_the_form_of_tei(model_of: ModelOf) -> None:
    text, batch = posted(
        model_of("single"),
        ("/predict", {"inputs": TEXTS[0]}),
        ("/predict", {"inputs": [[TEXTS[0]], [TEXTS[1]]], "raw_scores": False, "truncate": True}),
    )
    (prediction,) = model_of("single").predict(TEXTS[:1])
    assert {element["label"]: element["score"] for element in text.json()} == pytest.approx(prediction.scores, abs=1e-4)
    assert [element["score"] for element in text.json()] == pytest.approx(
        sorted(prediction.scores.values(), reverse=True), abs=1e-4
    )
    assert [len(answer) for answer in batch.json()] == [3, 3]
    pair, pairs = posted(
        model_of("pair"),
        ("/predict", {"inputs": [TEXTS[0], TEXTS[1]]}),
        ("/predict", {"inputs": [[TEXTS[0], TEXTS[1]]]}),
    )
    (expected,) = model_of("pair").predict([(TEXTS[0], TEXTS[1])])
    assert {element["label"]: element["score"] for element in pair.json()} == pytest.approx(expected.scores, abs=1e-4)
    assert [element["label"] for element in pairs.json()[0]] == [element["label"] for element in pair.json()]


@pytest.mark.parametrize("name", ["single", "masked"])
def test_a_list_of_texts_is_a_row_for_each_text(model_of: ModelOf, name: str) -> None:
    texts = ["a [MASK] wind", "they brought [MASK] home"]
    rows = [{"text": text} for text in texts]
    contents = [{"inputs": rows}, {"inputs": texts}, {"inputs": [texts[0], rows[1]]}, {"inputs": texts[:1]}]
    # In a batch of their own, requests of equal rows have equal bits.
    responses = [posted(model_of(name), ("/predict", content))[0] for content in contents]
    expected, *answers, one = responses
    predictions = expected.json()["predictions"]
    assert len(predictions) == 2
    assert [answer.json() for answer in answers] == [{"predictions": predictions}] * 2
    assert len(one.json()["predictions"]) == 1


def test_a_text_is_a_row_of_a_model_that_does_not_classify(model_of: ModelOf) -> None:
    (response,) = posted(model_of("token"), ("/predict", {"inputs": "a b"}))
    assert response.json()["words"] == ["a", "b"]


# Errors.

LONG = "word " * 60
SMALL = Limits(rows=3, characters=400, timeout=SLOW.timeout)
NO_VECTORS = "the model does not embed texts. Serve an encoder with --task embedding"
NO_SCORES = "the model needs one score, or two labels, for a pair of texts"
TOO_LONG = "tokens too long. Shorten it, or set truncate to true"
EXTRA = "Extra inputs are not permitted"
WRONG: list[tuple[str, str, Any, str]] = [
    # the model, the path, the content, the message
    ("embedder", "/v1/embeddings", {}, "input: Field required"),
    ("embedder", "/v1/embeddings", [], "expected an object, sent as application/json"),
    ("embedder", "/v1/embeddings", {"input": 5}, "input: Input should be a valid list"),
    ("embedder", "/v1/embeddings", {"input": [[1, 2]]}, "input.0: Input should be a valid string"),
    ("embedder", "/v1/embeddings", {"input": []}, "input: expected a list of 1 to 3 rows"),
    ("embedder", "/v1/embeddings", {"input": ["a"] * 4}, "input: expected a list of 1 to 3 rows"),
    ("embedder", "/v1/embeddings", {"input": "a" * 401}, "input.0.text: 401 characters, at most 400 are read"),
    ("embedder", "/v1/embeddings", {"input": "a", "dimensions": 5}, f"dimensions: {EXTRA}"),
    (
        "embedder",
        "/v1/embeddings",
        {"input": "a", "encoding_format": "int8"},
        "encoding_format: Input should be 'float' or 'base64'",
    ),
    ("embedder", "/embed", {"inputs": ["a", None]}, "inputs.1: Input should be a valid string"),
    ("embedder", "/embed", {"inputs": "a", "normalize": 1}, "normalize: Input should be a valid boolean"),
    (
        "embedder",
        "/embed",
        {"inputs": ["a", LONG], "truncate": False},
        f"a text is 14 {TOO_LONG}",
    ),
    ("embedder", "/rerank", {"query": "a", "texts": ["b"]}, NO_SCORES),
    (
        "single",
        "/v1/embeddings",
        {"input": "a"},
        NO_VECTORS,
    ),
    ("single", "/embed", {"inputs": "a"}, NO_VECTORS),
    ("single", "/rerank", {"query": "a", "texts": ["b"]}, NO_SCORES),
    ("regression", "/rerank", {"query": "a", "texts": ["b"]}, NO_SCORES),  # it reads no pairs
    ("pair", "/rerank", {"query": "a", "texts": []}, "texts: expected a list of 1 to 3 rows"),
    ("pair", "/rerank", {"query": "a", "texts": "b"}, "texts: Input should be a valid list"),
    ("pair", "/rerank", {"texts": ["b"]}, "query: Field required"),
]


def test_masks_of_a_request_are_limited(model_of: ModelOf) -> None:
    """The texts of all candidates together would be as long as the square of the request."""
    few, many = ({"inputs": [{"text": "[MASK] " * 400}] * rows} for rows in (1, 2))
    answered, refused = posted(model_of("masked"), ("/predict", few), ("/predict", many))
    assert len(answered.json()["predictions"][0]["masks"]) == 400
    assert refused.status_code == 422
    assert "at most 10,000,000 are returned" in refused.json()["detail"][0]["msg"]


@pytest.mark.parametrize("name", sorted({name for name, *_ in WRONG}))
def test_wrong_requests(name: str, model_of: ModelOf, embedder: TaskModel) -> None:
    cases = [(path, content, message) for of, path, content, message in WRONG if of == name]
    model = embedder if name == "embedder" else model_of(name)
    responses = posted(model, *((path, content) for path, content, _ in cases), limits=SMALL)
    for (path, content, message), response in zip(cases, responses, strict=True):
        body = response.json()
        assert response.status_code == 422, (path, content)
        if path == "/v1/embeddings":
            assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", None)
            key = body["error"]["param"]
            assert message.startswith(f"{key}: ") if key else ": " not in message
            body = body["error"] | {"error": body["error"]["message"]}
        else:
            assert set(body) == {"error", "error_type"}
            assert body["error_type"] == "validation"
        assert body["error"] == message, body


@pytest.mark.parametrize("query", ["", "?explain=true"])
def test_a_text_that_is_too_long_is_refused_if_asked(query: str, model_of: ModelOf) -> None:
    content = {"inputs": "word " * 600, "truncate": False}
    (response,) = posted(model_of("single"), (f"/predict{query}", content))
    assert response.status_code == 422
    assert response.json()["detail"][0]["msg"].endswith(TOO_LONG)


def test_tei_predict_has_the_errors_of_rows(model_of: ModelOf) -> None:
    contents = [
        {"inputs": [["a", "b", "c"]]},
        {"inputs": [["a", "b"]]},
        {"inputs": [["a"], []]},
        {"inputs": "a", "raw_scores": True},
    ]
    responses = posted(model_of("single"), *(("/predict", content) for content in contents))
    assert [response.status_code for response in responses] == [422] * 4
    assert "--task pair-classification" in responses[1].json()["detail"][0]["msg"]
    message = "expected a text, a list of one or two texts, or a list of such lists"
    for response in (responses[0], responses[2]):
        (fault,) = response.json()["detail"]
        assert (fault["loc"], fault["msg"]) == (["body", "inputs"], message)
    three, span = (
        posted(model_of(name), ("/predict", {"inputs": ["a", "b", "c"]}))[0].json()["detail"][0]
        for name in ("pair", "span")
    )
    assert (three["loc"], three["msg"]) == (["body", "inputs"], message)
    assert span["loc"] == ["body", "inputs", 0]
    assert span["msg"].startswith("expected a mapping such as ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(), max_size=9)
KEYS = st.sampled_from(["inputs", "input", "query", "texts", "normalize", "truncate"])
PAYLOADS = VALUES | st.dictionaries(KEYS, VALUES | TEXT | st.lists(TEXT, max_size=3), max_size=4)


@pytest.mark.parametrize("case", ["pair", *(pytest.param(c, marks=pytest.mark.slow) for c in ("embedder", "token"))])
def test_any_payload_gets_200_or_4xx(case: str, model_of: ModelOf, embedder: TaskModel) -> None:
    async def ask(served: Application) -> None:
        loop = asyncio.get_running_loop()

        @settings(max_examples=60, deadline=None, database=None, derandomize=True)
        @given(st.sampled_from(["/embed", "/rerank", "/v1/embeddings", "/predict"]), PAYLOADS)
        def send(path: str, content: Any) -> None:
            request = served.client.post(
                path, content=json.dumps(content).encode(), headers={"content-type": "application/json"}
            )
            response = asyncio.run_coroutine_threadsafe(request, loop).result()
            assert response.status_code == 200 or 400 <= response.status_code < 500
            json.loads(response.content)

        await asyncio.to_thread(send)

    visit(embedder if case == "embedder" else model_of(case), ask)


def test_limits_hold(embedder: TaskModel) -> None:
    limits = Limits(body_bytes=100, queue=1, timeout=SLOW.timeout)

    async def ask(served: Application) -> list[httpx2.Response]:
        large = await served.client.post("/embed", json={"inputs": "a" * 200})
        unread = await served.client.post("/embed", content=b"{", headers={"content-type": "application/json"})
        many = await asyncio.gather(*(served.client.post("/v1/embeddings", json={"input": "a"}) for _ in range(3)))
        text = (await served.client.get("/metrics")).text
        assert 'bert_tasks_requests_total{status="413"} 1.0' in text
        assert 'bert_tasks_requests_total{status="429"} 2.0' in text
        return [large, unread, *sorted(many, key=lambda response: response.status_code)]

    large, unread, good, full, _ = visit(embedder, ask, limits=limits, max_wait=0.2)
    assert large.json() == {"error": "the body is larger than 100 bytes", "error_type": "validation"}
    assert unread.json() == {"error": "1: not JSON from this character on", "error_type": "validation"}
    assert (good.status_code, full.status_code, full.headers["retry-after"]) == (200, 429, "1")
    assert full.json()["error"]["message"].startswith("the queue is full (1 request)")


@pytest.mark.parametrize(
    ("case", "paths"),
    [("embedder", {"/v1/embeddings", "/embed"}), ("pair", {"/rerank"}), ("regression", set()), ("choice", set())],
)
def test_the_document_describes_the_paths(case: str, paths: set[str], model_of: ModelOf, embedder: TaskModel) -> None:
    examples = {
        "/v1/embeddings": {"input": "a", "model": "b"},
        "/embed": {"inputs": ["a"]},
        "/rerank": {"query": "a", "texts": ["b"]},
    }

    async def ask(served: Application) -> None:
        documented = (await served.client.get("/openapi.json")).json()["paths"]
        names = {path for path, methods in documented.items() if "post" in methods}
        assert names == {"/predict", *paths}
        schema = documented["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert ("ClassifyRequest" in schema["$defs"]) == (case in ("pair", "regression"))
        for path in paths:
            schema = documented[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(examples[path], schema)
            assert (await served.client.post(path, json=examples[path])).status_code == 200

    visit(embedder if case == "embedder" else model_of(case), ask)

"""The HTTP interface in this process: answers equal the model's, every bad request is a clean 4xx, limits hold."""

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any

import httpx2
import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from torch import Tensor

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.gate import Gate
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.metrics import ServerMetrics
from bert_tasks.serving.requests import answers_schema, request_schema
from support.servers import SLOW, Application, each_task, errors_of, posted, rounded, visit
from support.task_contract import unlabelled
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES

ModelOf = Callable[[str], TaskModel]
JSON = {"content-type": "application/json"}
TEXT = {"text": "is this seat free"}
EXPLAINED = ("pair", "span", "token")
SMALL = replace(SLOW, body_bytes=4000, rows=3, characters=50)


@pytest.mark.parametrize("case", each_task(EXAMPLES | FAMILY_EXAMPLES))
def test_answers_equal_the_models_and_are_described(model_of: ModelOf, case: str) -> None:
    model, rows = model_of(case), unlabelled((EXAMPLES | FAMILY_EXAMPLES)[case])
    expected = [prediction.to_json() for prediction in model.predict(rows)]
    limits = replace(SLOW, body_bytes=40_000)

    async def ask(served: Application) -> tuple[httpx2.Response, httpx2.Response, list[Any]]:
        documents = [await served.client.get(path) for path in ("/model", "/openapi.json", "/")]
        body = documents[1].json()["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["examples"]) == {"one row", "several rows"}
        contents = [*documents[0].json()["examples"], *(example["value"] for example in body["examples"].values())]
        assert {(await served.post(content)).status_code for content in contents} == {200}
        pages = [documents[0].json(), body["schema"], documents[2].text]
        return await served.post(rows[0]), await served.post({"inputs": rows}), pages

    response, many, (about, documented, page) = visit(model, ask, limits=limits)
    assert (response.status_code, many.status_code) == (200, 200)
    assert response.json() == rounded(expected[0])
    assert many.json() == {"predictions": rounded(expected)}
    schema = TypeAdapter(answers_schema(model.tasks)).json_schema(mode="serialization")
    jsonschema.validate(response.json(), schema)
    jsonschema.validate(many.json(), schema)
    # The page shows the form that the description of the model asks for.
    assert set(re.findall(r"\babout\.(\w+)", page)) <= about.keys()
    assert (about["model"], about["task"]) == ("tests/model", model.task.name)
    assert about["labels"] == list(model.task.output.labels)
    names = [column.name for column in model.task.columns if not column.is_label]
    assert [column["name"] for column in about["columns"]] == names
    assert about["limits"] == asdict(limits)
    assert (about["max_length"], about["run"]) == (model.task.max_length, None)
    assert about["examples"] == json.loads(json.dumps(model.task.example_rows))
    # The documented schema offers what the task accepts.
    jsonschema.Draft202012Validator.check_schema(documented)
    columns = [column for schema in documented["$defs"].values() for column in schema["properties"].items()]
    least = {name: schema["minItems"] for name, schema in columns if schema.get("minItems")}
    assert least == {"inputs": 1} | ({"choices": 2} if "choices" in dict(columns) else {})


NO_OBJECT = "expected an object with the task's columns, sent as application/json"
NOT_A_TEXT = "not a text. Write it in quotes."
MISSING = 'missing text. Write an empty text as "".'
ONE_TO_THREE = "expected a list of 1 to 3 rows"
BAD_BODIES: list[tuple[bytes, dict[str, str]]] = [
    (rb'{"text": "\ud800"}', {"body.text": "half a character (surrogate U+D800). Replace it."}),
    (
        rb'{"inputs": [{"text": "a"}, {"text": "b\udc00"}]}',
        {"body.inputs.1.text": "half a character (surrogate U+DC00). Replace it."},
    ),
    (b"null", {"body": NO_OBJECT}),
    (b'"text"', {"body": NO_OBJECT}),
    (b"[]", {"body": NO_OBJECT}),
    (b"NaN", {"body": NO_OBJECT}),
    (b"{}", {"body.text": "missing text. The row has no columns."}),
    (b"", {"body.0": "not JSON from this character on"}),
    (b'{"te', {"body.1": "not JSON from this character on"}),
    (b'{"text": NaN}', {"body.text": MISSING}),
    (b'{"text": 1e999}', {"body.text": NOT_A_TEXT}),
    (b'{"text": null}', {"body.text": MISSING}),
    (b'{"text": ["a"]}', {"body.text": NOT_A_TEXT}),
    (b'{"inputs": []}', {"body.inputs": ONE_TO_THREE}),
    (b'{"inputs": null}', {"body.inputs": ONE_TO_THREE}),
    (b'{"inputs": [{"text": "a"}, 5]}', {"body.inputs.1": NO_OBJECT}),
    (b'{"inputs": [{"text": "a"}, 5, {"text": 5}]}', {"body.inputs.1": NO_OBJECT}),  # only the first fault is told
    (b'{"inputs": [{"text": "a"}], "x": 1, "y": 2}', {"body.x": "no other key may be beside inputs"}),
    (b'{"inputs": [{"text": "a"}], "text": "b"}', {"body.text": "no other key may be beside inputs"}),
    (b'{"inputs": [], "' + b"k" * 300 + b'": 1}', {f"body.{'k' * 100}": "no other key may be beside inputs"}),
    (b'{"text": "' + b"a" * 51 + b'"}', {"body.text": "51 characters, at most 50 are read"}),
    (b'{"inputs": [' + b",".join([b'{"text": "a"}'] * 4) + b"]}", {"body.inputs": ONE_TO_THREE}),
]


def test_bad_bodies_are_told_by_their_path_and_never_sent_back(model_of: ModelOf) -> None:
    async def ask(served: Application) -> list[httpx2.Response]:
        answers = [await served.client.post("/predict", content=body, headers=JSON) for body, _ in BAD_BODIES]
        assert (await served.post(TEXT)).status_code == 200
        return answers

    responses = visit(model_of("single"), ask, limits=SMALL)
    for (body, errors), response in zip(BAD_BODIES, responses, strict=True):
        assert response.status_code == 422, body
        assert errors_of(response) == errors, body


@pytest.mark.parametrize(
    "body", [b"[" * 3900, b'{"text":' * 480, b'{"text":' + b"9" * 3900 + b"}", b'{"text": "\xff"}'], ids=lambda b: b[:9]
)
def test_what_json_cannot_read_is_a_clean_400(model_of: ModelOf, body: bytes) -> None:
    async def ask(served: Application) -> httpx2.Response:
        return await served.client.post("/predict", content=body * 20, headers=JSON)

    response = visit(model_of("single"), ask)
    assert response.status_code in (400, 422)
    assert "Traceback" not in response.text
    if response.status_code == 400:
        assert response.json()["detail"].startswith("the body is not JSON that can be read")


def test_words_are_counted_together_and_ids_may_be_numbers(model_of: ModelOf) -> None:
    (tags,) = posted(model_of("token"), {"words": ["word"] * 13}, limits=SMALL)
    assert errors_of(tags) == {"body.words": "52 characters, at most 50 are read"}
    row = {"question": "who", "context": "the baker"}
    rows = [{**row, "id": name} for name in ("q1", 7, True, {}, "\ud800")]
    named, numbered, *refused = posted(model_of("span"), *rows, limits=SMALL)
    assert (named.json()["id"], numbered.json()["id"]) == ("q1", "7")
    assert [response.status_code for response in refused] == [422] * 3


def test_a_second_text_for_a_model_of_single_texts_is_not_dropped_in_silence(model_of: ModelOf) -> None:
    pair = {**TEXT, "text_pair": "it is"}

    bodies = (pair, {"inputs": [TEXT, pair]}, {**TEXT, "text_pair": None, "pair": "it is"})
    single, many, other = posted(model_of("single"), *bodies)
    assert "--task pair-classification" in errors_of(single)["body"]
    assert errors_of(many) == {"body.inputs.1": errors_of(single)["body"]}
    assert other.status_code == 200
    assert [response.status_code for response in posted(model_of("pair"), pair)] == [200]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NAMED = st.dictionaries(st.sampled_from(["text", "inputs", "label", "id", "words"]), VALUES, max_size=3)
ROWS = st.fixed_dictionaries({"inputs": st.lists(st.fixed_dictionaries({"text": VALUES}), max_size=4)})


def test_any_payload_gets_200_or_4xx(model_of: ModelOf) -> None:
    """Generated payloads, as JSON (with NaN and lone surrogates) and as raw bytes."""

    async def ask(served: Application) -> None:
        loop = asyncio.get_running_loop()

        def send(body: bytes) -> httpx2.Response:
            sent = served.client.post("/predict", content=body, headers=JSON)
            return asyncio.run_coroutine_threadsafe(sent, loop).result()

        @settings(max_examples=40, deadline=None, database=None, derandomize=True)
        @given(NAMED | ROWS | VALUES)
        def as_json(content: Any) -> None:
            response = send(json.dumps(content).encode())
            assert response.status_code == 200 or 400 <= response.status_code < 500
            json.loads(response.content)

        @settings(max_examples=20, deadline=None, database=None, derandomize=True)
        @given(st.binary(max_size=60))
        def as_bytes(content: bytes) -> None:
            response = send(b'{"text": "' + content)
            assert response.status_code == 200 or 400 <= response.status_code < 500

        await asyncio.to_thread(as_json)
        await asyncio.to_thread(as_bytes)

    visit(model_of("single"), ask)


def test_a_body_too_large_is_413_with_and_without_its_length(model_of: ModelOf) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1000

    async def ask(served: Application) -> None:
        for content in (chunks(), b" " * 10_000):
            response = await served.client.post("/predict", content=content, headers=JSON)
            assert response.status_code == 413
            assert response.json() == {"detail": "the body is larger than 4000 bytes"}

    visit(model_of("single"), ask, limits=SMALL)


def test_a_body_that_does_not_come_is_408(model_of: ModelOf) -> None:
    async def silence() -> AsyncIterator[bytes]:
        yield b'{"text"'
        await asyncio.Event().wait()

    async def ask(served: Application) -> httpx2.Response:
        return await served.client.post("/predict", content=silence(), headers=JSON)

    assert visit(model_of("single"), ask, limits=Limits(timeout=0.1)).status_code == 408


def test_special_tokens_in_a_text_stay_text(model_of: ModelOf) -> None:
    rows = [{"text": "the wind [SEP] the rain [MASK]"}, {"text": "the wind the rain"}]

    (response,) = posted(model_of("single"), {"inputs": rows})
    predictions = response.json()["predictions"]
    assert predictions == [rounded(prediction.to_json()) for prediction in model_of("single").predict(rows)]
    assert predictions[0]["scores"] != rounded(predictions[1]["scores"])


def test_scores_that_are_no_numbers_are_a_clean_error_for_their_row_only(model_of: ModelOf) -> None:
    model = model_of("single")

    def poisoned(batch: PackedBatch) -> Tensor:
        logits = model(batch)
        long = logits.new_tensor([count > 8 for count in batch.layout.lengths]).bool()
        return logits.masked_fill(long[:, None], float("nan"))

    async def ask(served: Application) -> list[httpx2.Response]:
        return await asyncio.gather(served.post(TEXT), served.post({"text": "word " * 12}), served.post(TEXT))

    good, bad, other = visit(model, ask, run=poisoned)
    assert (good.status_code, bad.status_code, other.status_code) == (200, 500, 200)
    assert bad.json() == {"detail": "the model returned a score that is not a finite number, so there is no prediction"}


def test_scores_that_are_no_numbers_are_not_explained(model_of: ModelOf) -> None:
    model = copy.deepcopy(model_of("single"))
    torch.nn.init.constant_(model.head.output.weight, float("nan"))

    async def ask(served: Application) -> httpx2.Response:
        return await served.client.post("/predict?explain=true", json=TEXT)

    assert visit(model, ask).json()["detail"].startswith("the model returned a score that is not a finite number")


def test_internal_errors_say_nothing_of_the_inside(model_of: ModelOf) -> None:
    def broken(batch: PackedBatch) -> Tensor:
        raise RuntimeError("secret place")

    (response,) = posted(model_of("single"), TEXT, run=broken)
    assert response.status_code == 500
    assert "secret" not in response.text


async def counters(served: Application) -> dict[str, dict[str, float]]:
    """The samples of /metrics by name and status, as Prometheus' own parser reads them."""
    response = await served.client.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE_LATEST
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[sample.labels.get("status", "")] = sample.value
    return samples


def test_health_readiness_and_counters(model_of: ModelOf) -> None:
    async def ask(served: Application) -> None:
        assert (await served.client.get("/healthz")).json() == {"status": "ok"}
        assert (await served.client.get("/readyz")).status_code == 200
        await asyncio.gather(*(served.post({"inputs": [TEXT] * 3}) for _ in range(2)), served.post({}))
        await served.client.post("/predict", content=b" " * 2_000_000, headers=JSON)
        samples = await counters(served)
        assert samples["bert_tasks_requests_total"] == {"200": 2, "422": 1, "413": 1}
        assert samples["bert_tasks_rows_total"] == {"": 6}
        assert samples["bert_tasks_request_seconds_count"] == {"": 4}
        assert samples["bert_tasks_batch_rows_sum"] == {"": 6}
        assert samples["bert_tasks_queue_depth"] == {"": 0}
        assert samples["bert_tasks_ready"] == {"": 1}
        served.draining.append(True)
        draining = await served.client.get("/readyz")
        assert (draining.status_code, draining.headers["connection"]) == (503, "close")
        assert (await served.client.get("/healthz")).status_code == 200
        assert (await counters(served))["bert_tasks_ready"] == {"": 0}

    visit(model_of("single"), ask)


@pytest.mark.parametrize("case", ["single", "token crf", *(pytest.param(c, marks=pytest.mark.slow) for c in EXPLAINED)])
def test_the_query_asks_for_an_explanation_of_one_row(model_of: ModelOf, case: str) -> None:
    model, rows = model_of(case), unlabelled(EXAMPLES[case])

    async def ask(served: Application) -> tuple[dict[str, Any], list[httpx2.Response]]:
        queries = ("explain=true", "explain=false", "explain=<script>", "explain=true")
        contents = (rows[0], rows[0], rows[0], {"inputs": rows[:2]})
        responses = [
            await served.client.post(f"/predict?{query}", json=content)
            for query, content in zip(queries, contents, strict=True)
        ]
        return (await served.client.get("/model")).json(), responses

    about, (asked, plain, unread, several) = visit(model, ask)
    assert plain.json() == rounded(model.predict(rows[0])[0].to_json())
    assert (unread.status_code, several.status_code) == (422, 422)
    assert list(errors_of(unread)) == list(errors_of(several)) == ["query.explain"]
    assert "<script>" not in unread.text
    assert about["explains"] == (case != "token crf")
    if case == "token crf":
        assert "crf = true scores sequences of tags" in errors_of(asked)["query.explain"]
        return
    expected = model.predict(rows[0], explain=True)[0].to_json()
    assert asked.json() == rounded(expected)
    schema = TypeAdapter(answers_schema(model.tasks)).json_schema(mode="serialization")
    jsonschema.validate(asked.json(), schema)
    assert "one row can be explained, the request has 2" in errors_of(several)["query.explain"]


def test_a_server_without_adapters_says_so(model_of: ModelOf) -> None:
    async def ask(served: Application) -> httpx2.Response:
        return await served.client.get("/model?adapter=none")

    assert errors_of(visit(model_of("single"), ask)) == {"query.adapter": "the server has no adapters"}


def test_a_row_of_many_windows_is_not_explained(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of an explanation grows with the row, and cannot be stopped when the client leaves."""
    monkeypatch.setattr("bert_tasks.serving.batching.MOST_EXPLAINED_TOKENS", 60)
    short, long = ({"text": "a cold wind " * count} for count in (3, 40))

    async def ask(served: Application) -> list[httpx2.Response]:
        return [await served.client.post("/predict?explain=true", json=row) for row in (short, long)]

    explained, refused = visit(model_of("windows"), ask)
    assert (explained.status_code, refused.status_code) == (200, 422)
    assert "the server explains up to 60. Shorten the row" in refused.text


def test_head_is_answered_as_get_without_a_body(model_of: ModelOf) -> None:
    async def ask(served: Application) -> None:
        for path in ("/", "/docs", "/model", "/healthz", "/readyz", "/metrics", "/openapi.json"):
            whole, head = await served.client.get(path), await served.client.head(path)
            assert (whole.status_code, head.status_code) == (200, 200)
            assert head.headers == whole.headers
            assert (bool(whole.content), head.content) == (True, b"")
        assert (await served.client.head("/predict")).status_code == 405

    visit(model_of("single"), ask)


def test_while_the_model_is_loaded_only_health_answers() -> None:
    async def ask() -> None:
        gate = Gate(limits=SLOW, metrics=ServerMetrics(), draining=lambda: False)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate), base_url="http://any") as client:
            assert (await client.get("/healthz")).status_code == 200
            for path in ("/readyz", "/predict", "/"):
                response = await client.get(path)
                assert (response.status_code, response.headers["retry-after"]) == (503, "2")

    asyncio.run(ask())


def test_other_hosts_are_refused(model_of: ModelOf) -> None:
    async def ask(served: Application) -> list[int]:
        hosts = ("localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST", "evil.example", "127.0.0.1.evil.example", "")
        return [(await served.client.get("/healthz", headers={"host": host})).status_code for host in hosts]

    assert visit(model_of("single"), ask) == [200] * 4 + [400] * 3


def test_headers_forbid_what_a_page_does_not_need(model_of: ModelOf) -> None:
    async def ask(served: Application) -> tuple[httpx2.Response, httpx2.Response]:
        return await served.client.get("/"), await served.post({"text": "<script>alert(1)</script>"})

    page, answer = visit(model_of("single"), ask)
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for response in (page, answer):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "script>" not in answer.text
    assert b"//" not in page.content.replace(b"http://www.w3.org/2000/svg", b"").replace(b"// ", b"")


def test_rows_may_have_the_names_of_the_training_data(model_of: ModelOf) -> None:
    model = model_of("single")
    (expected,) = (prediction.to_json() for prediction in model.predict([TEXT]))

    renamed = {"review": TEXT["text"], "stars": 3}
    bodies = (renamed, TEXT, {**TEXT, "review": "something else"}, {"inputs": [renamed]}, {"reviews": "x"})
    alone, task_names, both, several, unknown = posted(model, *bodies, columns={"text": "review", "label": "stars"})
    assert [answer.status_code for answer in (alone, task_names, both, several, unknown)] == [200, 200, 200, 200, 422]
    assert alone.json() == task_names.json() == both.json() == rounded(expected)
    assert several.json() == {"predictions": [rounded(expected)]}
    assert errors_of(unknown) == {"body.text": "missing text. The row has 'reviews'."}


def test_a_tagger_takes_a_text(model_of: ModelOf) -> None:
    model, text = model_of("token"), "Nobody told the baker's wife, and the ferry left."
    (expected,) = (prediction.to_json() for prediction in model.predict([text]))

    bodies = ({"text": text}, {"inputs": [{"text": text}]}, {}, {"text": "x" * 51})
    response, many, empty, long = posted(model, *bodies, limits=SMALL)
    assert response.json() == rounded(expected)
    assert many.json() == {"predictions": [rounded(expected)]}
    assert [text[entity["start"] : entity["end"]] for entity in response.json()["entities"]] == [
        entity["word"] for entity in response.json()["entities"]
    ]
    assert errors_of(empty) == {"body.words": "missing words. The row has no columns."}
    assert errors_of(long) == {"body.words": "51 characters, at most 50 are read"}
    documented = TypeAdapter(request_schema(model, SMALL)).json_schema()["$defs"]["Row"]
    assert "words" not in documented.get("required", [])

"""openapi.json tells what the routes respond: each status that it names is seen, and each response fits its schema."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import jsonschema
import pytest
from torch import Tensor

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.model.task_model import TaskModel
from support.servers import SLOW, application

ModelOf = Callable[[str], TaskModel]
JSON = {"content-type": "application/json"}
CONTENTS: dict[str, Any] = {
    "/predict": {"text": "is this seat free"},
    "/rerank": {"query": "a seat", "texts": ["is this seat free"]},
    "/embed": {"inputs": ["is this seat free"]},
    "/v1/embeddings": {"input": ["is this seat free"]},
}


async def silence() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def failures(model: TaskModel, path: str) -> list[httpx2.Response]:
    """A response of each status to one path."""
    content, free = CONTENTS[path], threading.Event()

    def broken(batch: PackedBatch) -> Tensor:
        raise RuntimeError("broken")

    def held(batch: PackedBatch) -> Tensor:
        assert free.wait(60)
        return model(batch)

    async with application(model, limits=replace(SLOW, body_bytes=1000)) as served:
        post = served.client.post
        responses = [
            await post(path, json=content),
            await post(path, json={"unknown": 1}),
            await post(path, content=b'"\xff"', headers=JSON),
            await post(path, content=b" " * 1001, headers=JSON),
            await post(path, json=content, headers={"x-long": "a" * 2**14}),
            await post(path, json=content, headers={"host": "evil.example"}),
        ]
    async with application(model, limits=replace(SLOW, timeout=0.1)) as served:
        responses.append(await served.client.post(path, content=silence(), headers=JSON))
    async with application(model, run=broken) as served:
        responses.append(await served.client.post(path, json=content))
    async with application(model, limits=replace(SLOW, timeout=0.5, queue=1), run=held, max_wait=10) as served:
        both = (served.client.post(path, json=content) for _ in range(2))
        responses += await asyncio.gather(*both)
        free.set()
    return responses


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("single", "/predict"),
        pytest.param("pair", "/rerank", marks=pytest.mark.slow),
        pytest.param("embedder", "/embed", marks=pytest.mark.slow),
        pytest.param("embedder", "/v1/embeddings", marks=pytest.mark.slow),
    ],
)
def test_every_status_of_the_document_is_seen_and_has_its_schema(
    case: str, path: str, model_of: ModelOf, embedder: TaskModel
) -> None:
    model = embedder if case == "embedder" else model_of(case)
    document = document_of(model)
    responses = asyncio.run(failures(model, path))
    statuses = {str(response.status_code) for response in responses}
    assert statuses == set(document["paths"][path]["post"]["responses"])
    for response in responses:
        check(document, path, "post", response)


def test_texts_without_columns_have_the_documented_answer(model_of: ModelOf) -> None:
    model = model_of("single")
    document = document_of(model)

    async def ask() -> list[httpx2.Response]:
        async with application(model) as served:
            return [await served.post({"inputs": inputs}) for inputs in ("a text", [["a text"], ["another"]])]

    for response in asyncio.run(ask()):
        assert response.status_code == 200
        check(document, "/predict", "post", response)
    assert "LabelScore" in document["components"]["schemas"]
    assert "LabelScore" not in document_of(model_of("token"))["components"]["schemas"]


def test_the_states_have_the_documented_answers(model_of: ModelOf) -> None:
    model = model_of("single")
    document = document_of(model)
    seen: dict[str, set[str]] = {}

    async def ask(loaded: bool) -> None:
        async with application(model) as served:
            if not loaded:
                served.gate.app = None
            for path in ("/model", "/model?adapter=none", "/healthz", "/readyz", "/metrics"):
                response = await served.client.get(path)
                name = path.partition("?")[0]
                seen.setdefault(name, set()).add(str(response.status_code))
                check(document, name, "get", response)

    asyncio.run(ask(loaded=True))
    asyncio.run(ask(loaded=False))
    for path, statuses in seen.items():
        assert statuses == set(document["paths"][path]["get"]["responses"])


def document_of(model: TaskModel) -> Any:
    async def ask() -> Any:
        async with application(model) as served:
            return (await served.client.get("/openapi.json")).json()

    return asyncio.run(ask())


def check(document: Any, path: str, method: str, response: httpx2.Response) -> None:
    """Compares a response with the schema of its status and type."""
    documented = document["paths"][path][method]["responses"][str(response.status_code)]
    kind = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][kind]["schema"]
    if kind == "application/json":
        jsonschema.validate(response.json(), {**schema, "components": document["components"]})

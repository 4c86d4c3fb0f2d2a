"""The HTTP interface of a loaded model: the routes, their documentation, the page, and the response to each failure.

A failure is a status and one sentence; what a client sent is never sent back.
"""

import asyncio
import base64
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from importlib.resources import files
from operator import or_
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from pydantic import TypeAdapter

from bert_tasks.data.columns import Row
from bert_tasks.data.problems import counted
from bert_tasks.errors import CheckpointError, DataError, NotFiniteScoresError, UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.batching import Batcher, QueueFullError, retrieve_exception
from bert_tasks.serving.gate import DISCONNECTED, PREDICT, Gate
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import (
    ADAPTER,
    BodyReader,
    answers_schema,
    body_error,
    option_error,
    parsed_body,
    request_schema,
    requested_labels,
    source_columns,
)
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.zero_shot import zero_shot_task

T = TypeVar("T")
Served = Mapping[str, tuple[TaskModel, Batcher]]  # by the name of the adapter; "": the base
_LARGE_BODY = 2**16  # bytes; parsing and encoding a larger one would block the event loop for too long
_ERRORS = {
    400: "The body cannot be read as JSON.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting; `Retry-After` states when to try again.",
    503: "The server is stopping, or the response took too long.",
}


def build_app(served: Served, gate: Gate, *, name: str) -> FastAPI:
    """The application. It has no interactive documentation, which would load scripts from other sites."""
    model, _ = _named(served, None, "query")
    title, description = f"bert-tasks: {name}", f"{model.task.name} with {name}."
    app = FastAPI(title=title, description=description, docs_url=None, redoc_url=None)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "internal error; see the log of the server"}, 500)

    @app.exception_handler(NotFiniteScoresError)
    async def not_finite(request: Request, error: NotFiniteScoresError) -> JSONResponse:
        detail = "the model gave a score that is not a finite number; there is no prediction"
        return JSONResponse({"detail": detail}, 500)

    gate.metrics.queue_depth.set_function(lambda: sum(batcher.waiting for _, batcher in served.values()))
    gate.metrics.ready.set_function(lambda: not gate.draining())
    _add_predict(app, served, gate.limits)
    _add_state(app, served, gate, name)
    return app


def _named(served: Served, name: object, location: str) -> tuple[TaskModel, Batcher]:
    """Returns the model that a request chooses. Default: the first one."""
    if name is None:
        return next(iter(served.values()))
    if not isinstance(name, str) or name not in served:
        message = f"no such adapter. The adapters are {', '.join(filter(None, served))}"
        raise HTTPException(422, [{"loc": [location, ADAPTER], "msg": message, "type": "value_error"}])
    return served[name]


def _request_tasks(model: TaskModel) -> list[Task]:
    """Returns the task of a model and, if the model knows entailment, the task of labels in a request."""
    with suppress(CheckpointError, UsageError):
        return [model.task, zero_shot_task(model.task, model.hf_config, ["label"])]
    return [model.task]


def _add_predict(app: FastAPI, served: Served, limits: Limits) -> None:
    adapters, models = [*filter(None, served)], [model for model, _ in served.values()]
    rows = Card.of(models[0].task).example_rows
    examples = {"one row": {"value": rows[0]}, "several rows": {"value": {"inputs": rows}}}
    pointer = f"#/paths/{PREDICT.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    tasks = [(task, each.columns) for each in models for task in _request_tasks(each)]
    schemas = {type(task): request_schema(task, limits, columns, adapters) for task, columns in tasks}
    schema = TypeAdapter(reduce(or_, schemas.values())).json_schema(ref_template=pointer)
    content = {"application/json": {"schema": schema, "examples": examples}}
    readers = {
        id(model): BodyReader(model.task, limits, model.columns, has_adapters=bool(adapters)) for model in models
    }
    threads = asyncio.Lock()

    def read(body: bytes, content_type: str) -> tuple[Batcher, Task | None, list[Row], bool]:
        content, name = parsed_body(body, content_type), None
        if adapters and isinstance(content, dict):
            name = content.pop(ADAPTER, None)
        model, batcher = _named(served, name, "body")
        task = requested_labels(content, model, limits)
        if task is None:
            return batcher, None, *readers[id(model)].rows(content)
        rows, several = BodyReader(task, limits, model.columns, has_adapters=bool(adapters)).rows(content)
        if len(rows) * len(task.labels) > limits.rows:
            raise body_error((), f"{len(rows)} rows x {len(task.labels)} labels, at most {limits.rows} pairs are read")
        return batcher, task, rows, several

    async def call(body: bytes, work: Callable[[], T]) -> T:
        """Works for large bodies in a thread, one at a time: each holds the interpreter's lock for long."""
        if len(body) <= _LARGE_BODY:
            return work()
        async with threads:
            return await asyncio.to_thread(work)

    @app.post(
        PREDICT,
        summary="Predict one row, or several",
        response_model=answers_schema(*(model.task for model in models)),
        responses={status: {"description": text} for status, text in _ERRORS.items()},
        openapi_extra={"requestBody": {"content": content, "required": True}},
    )
    async def predict(request: Request, explain: bool = False) -> Response:
        """With `explain=true` the prediction for one row has an `explanation`, if the model has explanations."""
        body, content_type = request.scope["body"], request.headers.get("content-type", "")
        batcher, task, rows, several = await call(body, lambda: read(body, content_type))
        problem = batcher.no_explanations if task is None else "predictions of labels in a request are not explained"
        if len(rows) > 1:
            problem = f"one row can be explained, the request has {len(rows)}; send a request for each of them"
        if explain and problem is not None:
            raise HTTPException(422, [{"loc": ["query", "explain"], "msg": problem, "type": "value_error"}])
        predictions = await _answers(request, batcher.answer(rows, explain=explain, task=task), limits)

        def encode() -> bytes:
            answers = [prediction.to_json() for prediction in predictions]
            return encoded({"predictions": answers} if several else answers[0])

        return Response(await call(body, encode), media_type="application/json")


def _add_state(app: FastAPI, served: Served, gate: Gate, name: str) -> None:
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()
    policy = "default-src 'none'"
    for element in (b"script", b"style"):  # the one of the page
        (text,) = re.findall(b"<%b>(.*)</%b>" % (element, element), content, flags=re.DOTALL)
        digest = base64.b64encode(bytes.fromhex(sha256(text))).decode()
        policy += f"; {element.decode()}-src 'sha256-{digest}'"
    policy += "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

    @app.get("/", include_in_schema=False)
    async def try_the_model() -> Response:
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/model", summary="The served model: task, labels, columns, limits, examples")
    async def describe(adapter: str | None = None) -> JSONResponse:
        model, batcher = _named(served, adapter, "query")
        task = model.task
        return JSONResponse(
            {
                "model": name,
                "task": task.name,
                "pipeline_tag": Card.of(task).pipeline_tag,
                "problem_type": getattr(task, "problem_type", None),
                "labels": list(task.labels),
                "adapters": [*filter(None, served)],
                "columns": [asdict(column) for column in source_columns(task)],
                "limits": asdict(gate.limits),
                "examples": list(Card.of(task).example_rows),
                "explains": batcher.no_explanations is None,
            }
        )

    @app.get("/healthz", summary="Whether the process responds")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Whether the server answers predictions", responses={503: {"description": "Not now."}})
    async def readyz() -> JSONResponse:
        return JSONResponse({"status": "stopping"}, 503) if gate.draining() else JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Counters in Prometheus' text format", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(gate.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def encoded(content: Any) -> bytes:
    """JSON in UTF-8.

    Raises:
        NotFiniteScoresError: A number cannot be represented in JSON.
    """
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise NotFiniteScoresError("a score is not a finite number") from None


async def _answers(
    request: Request, predictions: Coroutine[Any, Any, Sequence[Prediction]], limits: Limits
) -> Sequence[Prediction]:
    """The predictions. If the client disconnects or time is up first, the request is removed from the queue."""
    answer = asyncio.ensure_future(predictions)
    answer.add_done_callback(retrieve_exception)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, timeout=limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
    except DataError as error:  # which a task finds only when it makes features
        raise body_error((), str(error)) from None
    except UsageError as error:  # a hypothesis that is too long
        raise option_error(error) from None
    except QueueFullError:
        detail = f"the queue is full ({counted(limits.queue, 'request')}); try again in a moment"
        raise HTTPException(429, detail, headers={"Retry-After": "1"}) from None
    finally:
        answer.cancel()
        gone.cancel()
    if gone.done() and not gone.cancelled():
        raise HTTPException(DISCONNECTED, "the client has disconnected")
    detail = f"no answer within {limits.timeout:g} s; send fewer or shorter rows, or try later"
    raise HTTPException(503, detail, headers={"Retry-After": "5"})

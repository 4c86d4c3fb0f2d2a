"""The HTTP interface of a loaded model: the routes, their documentation, the page, and the response to each failure.

A failure is a status and one sentence; what a client sent is never sent back.
"""

import asyncio
import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from pydantic import TypeAdapter

from bert_tasks.data.columns import Row
from bert_tasks.data.problems import counted
from bert_tasks.errors import DataError, NotFiniteScoresError
from bert_tasks.serving.batching import Batcher, QueueFullError, retrieve_exception
from bert_tasks.serving.gate import DISCONNECTED, PREDICT, ServerMetrics
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import BodyReader, answers_schema, body_error, request_schema
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Prediction, Task
from bert_tasks.tasks.shared.card import Card


def page() -> tuple[bytes, str]:
    """The page to try the model, and its Content-Security-Policy, which allows this script and this style only."""
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()

    def hashes(element: bytes) -> str:
        parts = re.findall(b"<%b>(.*?)</%b>" % (element, element), content, flags=re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(bytes.fromhex(sha256(part))).decode()}'" for part in parts)

    rules = (
        "default-src 'none'",
        f"script-src {hashes(b'script')}",
        f"style-src {hashes(b'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return content, "; ".join(rules)


T = TypeVar("T")
_LARGE_BODY = 2**16  # bytes; parsing and encoding a larger one would block the event loop for too long
_NOT_FINITE = "the model gave a score that is not a finite number; there is no prediction"
_REFUSALS = {
    400: "The body cannot be read as JSON.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting; `Retry-After` states when to try again.",
    503: "The server is stopping, or the response took too long.",
}


@dataclass(frozen=True, kw_only=True)
class AppState:
    """A loaded model and what its routes need.

    Attributes:
        name: the name of the model on the page.
        task: its task.
        limits: the limits of a request.
        batcher: predicts the rows of a request.
        metrics: the server's metrics.
        draining: returns whether the server has been asked to stop.
        columns: the task's columns -> their names in the training data, which rows may use instead.
    """

    name: str
    task: Task
    limits: Limits
    batcher: Batcher
    metrics: ServerMetrics
    draining: Callable[[], bool]
    columns: Mapping[str, str] = field(default_factory=dict)


class NotFiniteError(HTTPException):
    """A score of the model is not a finite number."""


def build_app(served: AppState) -> FastAPI:
    """The application. It has no interactive documentation, which would load scripts from other sites."""
    app = FastAPI(
        title=f"bert-tasks: {served.name}",
        description=f"{served.task.name} with {served.name}.",
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "internal error; see the log of the server"}, 500)

    served.metrics.queue_depth.set_function(lambda: served.batcher.waiting)
    served.metrics.ready.set_function(lambda: not served.draining())
    _add_predict(app, served)
    _add_state(app, served)
    return app


def _add_predict(app: FastAPI, served: AppState) -> None:
    task, limits, names = served.task, served.limits, served.columns
    rows = Card.of(task).example_rows
    examples = {"one row": {"value": rows[0]}, "several rows": {"value": {"inputs": rows}}}
    pointer = f"#/paths/{PREDICT.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = TypeAdapter(request_schema(task, limits, names)).json_schema(ref_template=pointer)
    content = {"application/json": {"schema": schema, "examples": examples}}
    reader, threads = BodyReader(task, limits, names), asyncio.Lock()

    def encode(predictions: Sequence[Prediction], several: bool) -> bytes:
        answers = [prediction.to_json() for prediction in predictions]
        return encoded({"predictions": answers} if several else answers[0])

    @app.post(
        PREDICT,
        summary="Predict one row, or several",
        response_model=answers_schema(task),
        responses={status: {"description": text} for status, text in _REFUSALS.items()},
        openapi_extra={"requestBody": {"content": content, "required": True}},
    )
    async def predict(request: Request, explain: bool = False) -> Response:
        """With `explain=true` the prediction for one row has an `explanation`, if the model has explanations."""
        body, content_type = await request.body(), request.headers.get("content-type", "")
        large = len(body) > _LARGE_BODY
        rows, several = await _call(large, threads, lambda: reader.rows(body, content_type))
        unexplained = served.batcher.no_explanations
        if len(rows) > 1:
            unexplained = f"one row can be explained, the request has {len(rows)}; send a request for each of them"
        if explain and unexplained is not None:
            raise HTTPException(422, [{"loc": ["query", "explain"], "msg": unexplained, "type": "value_error"}])
        predictions = await _answers(request, served, rows, explain=explain)
        return Response(
            await _call(large, threads, lambda: encode(predictions, several)), media_type="application/json"
        )


async def _call(large: bool, threads: asyncio.Lock, work: Callable[[], T]) -> T:
    """Calls ``work``, for large requests in a thread, one at a time: each holds the interpreter's lock for long."""
    if not large:
        return work()
    async with threads:
        return await asyncio.to_thread(work)


def _add_state(app: FastAPI, served: AppState) -> None:
    content, policy = page()

    @app.get("/", include_in_schema=False)
    async def try_the_model() -> Response:
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/model", summary="The served model: task, labels, columns, limits, examples")
    async def model() -> JSONResponse:
        task = served.task
        return JSONResponse(
            {
                "model": served.name,
                "task": task.name,
                "pipeline_tag": Card.of(task).pipeline_tag,
                "problem_type": getattr(task, "problem_type", None),
                "labels": list(task.labels),
                "columns": [asdict(column) for column in task.columns if not column.is_label],
                "limits": asdict(served.limits),
                "examples": list(Card.of(task).example_rows),
                "explains": served.batcher.no_explanations is None,
            }
        )

    @app.get("/healthz", summary="Whether the process responds")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Whether the server answers predictions", responses={503: {"description": "Not now."}})
    async def readyz() -> JSONResponse:
        return JSONResponse({"status": "stopping"}, 503) if served.draining() else JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Counters in Prometheus' text format", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(served.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def encoded(content: Any) -> bytes:
    """JSON in UTF-8. Raises NotFiniteError for a number that JSON cannot represent."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise NotFiniteError(500, _NOT_FINITE) from None


async def _answers(request: Request, served: AppState, rows: Sequence[Row], *, explain: bool) -> Sequence[Prediction]:
    """The predictions. If the client disconnects or time is up first, the request is removed from the queue."""
    answer = asyncio.ensure_future(served.batcher.answer(rows, explain=explain))
    answer.add_done_callback(retrieve_exception)
    gone = asyncio.ensure_future(request.receive())  # the body was read, so the next message is the disconnect
    try:
        await asyncio.wait({answer, gone}, timeout=served.limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
    except DataError as error:  # which a task finds only when it makes features
        raise body_error((), str(error)) from None
    except NotFiniteScoresError:
        raise NotFiniteError(500, _NOT_FINITE) from None
    except QueueFullError:
        detail = f"the queue is full ({counted(served.limits.queue, 'request')}); try again in a moment"
        raise HTTPException(429, detail, headers={"Retry-After": "1"}) from None
    finally:
        answer.cancel()
        gone.cancel()
    if gone.done() and not gone.cancelled():
        raise HTTPException(DISCONNECTED, "the client has disconnected")
    detail = f"no answer within {served.limits.timeout:g} s; send fewer or shorter rows, or try later"
    raise HTTPException(503, detail, headers={"Retry-After": "5"})

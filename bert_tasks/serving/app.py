"""The page that tries the model: one static file, and the policy under which a browser may run it.

Must not know the task: the page asks ``GET /model``.

The HTTP interface of a loaded model.

Owns the routes, their documents, and what each failure is for a caller: a status and one sentence. What a caller sent
is never sent back. Must not know how batches are formed, or what is in a body.
"""

import asyncio
import base64
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.serving.batching import Batcher, QueueFullError, retrieve_exception
from bert_tasks.serving.connections import Limits
from bert_tasks.serving.gate import GONE, PREDICT, ServerMetrics
from bert_tasks.serving.requests import (
    BodyError,
    BodyReader,
    answers_schema,
    request_schema,
)
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Prediction, Task


@cache
def page() -> tuple[bytes, str]:
    """The file and its Content-Security-Policy, which allows this script and this style and no others."""
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()
    script, style = (_source(content, name) for name in (b"script", b"style"))
    rules = (
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return content, "; ".join(rules)


def _source(content: bytes, element: bytes) -> str:
    found = re.findall(b"<%b>(.*?)</%b>" % (element, element), content, flags=re.DOTALL)
    hashes = [base64.b64encode(bytes.fromhex(sha256(part))).decode() for part in found]
    return " ".join(f"'sha256-{value}'" for value in hashes)


T = TypeVar("T")
_LARGE_BODY = 2**16  # bytes; beyond them reading and encoding would hold up the event loop
_REFUSALS = {
    400: "The body is not JSON that can be read.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    503: "The server is stopping, or the answer took too long.",
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that answers.

    Attributes:
        draining: whether the server has been asked to stop.
        columns: the task's columns -> the names of the training data, which rows may have instead.
    """

    name: str
    task: Task
    limits: Limits
    batcher: Batcher
    metrics: ServerMetrics
    draining: Callable[[], bool]
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return not self.draining()


class NotFiniteError(Exception):
    """The model gave a score that is no number."""


def build_app(served: Served) -> FastAPI:
    """The application; ``GET /openapi.json`` describes it. The interactive documents would load scripts from others."""
    app = FastAPI(
        title=f"bert-tasks: {served.name}",
        description=f"{served.task.name} with {served.name}.",
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(BodyError, _bad_body)
    app.add_exception_handler(DataError, _bad_row)
    app.add_exception_handler(NotFiniteError, _not_finite)
    app.add_exception_handler(Exception, _internal)
    served.metrics.watch(queue_depth=lambda: served.batcher.waiting, ready=lambda: served.ready)
    _add_predict(app, served)
    _add_state(app, served)
    return app


def _add_predict(app: FastAPI, served: Served) -> None:
    examples = served.task.example_rows
    shown: dict[str, Any] = {"one row": {"value": examples[0]}, "several rows": {"value": {"inputs": examples}}}

    reader, threads = BodyReader(served.task, served.limits, served.columns), asyncio.Lock()

    async def answer(request: Request) -> Response:
        body, content_type = await request.body(), request.headers.get("content-type", "")
        large = len(body) > _LARGE_BODY
        rows, several = await _call(large, threads, lambda: reader.rows(body, content_type))
        predictions = await _answers(request, served, rows)
        content = await _call(large, threads, lambda: _encoded_predictions(predictions, several))
        return Response(content, media_type="application/json")

    class PredictRoute(APIRoute):
        """Documents the body by its type. FastAPI would read it on the event loop, and list every fault."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            return answer

    def predict(body: Any) -> None:
        """For the documents only."""

    # The type depends on the task, so that it cannot stand in the signature.
    predict.__annotations__["body"] = Annotated[
        request_schema(served.task, served.limits, served.columns), Body(openapi_examples=shown)
    ]
    app.router.add_api_route(
        PREDICT,
        predict,
        methods=["POST"],
        summary="Predict one row, or several",
        description="",
        response_model=served.task.prediction_schema | answers_schema(served.task),
        responses={status: {"description": text} for status, text in _REFUSALS.items()},
        route_class_override=PredictRoute,
    )


async def _call(large: bool, threads: asyncio.Lock, work: Callable[[], T]) -> T:
    """What ``work`` returns; of large requests in a thread, one at a time: each holds the interpreter for long."""
    if not large:
        return work()
    async with threads:
        return await asyncio.to_thread(work)


def _encoded_predictions(predictions: Sequence[Prediction], several: bool) -> bytes:
    answers = [prediction.to_json() for prediction in predictions]
    return encoded({"predictions": answers} if several else answers[0])


def _add_state(app: FastAPI, served: Served) -> None:
    content, policy = page()

    @app.get("/", include_in_schema=False)
    async def try_the_model() -> Response:
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/model", summary="What is served: task, labels, columns, limits, examples")
    async def model() -> JSONResponse:
        return JSONResponse(description(served))

    @app.get("/healthz", summary="Whether the process answers")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Whether predictions are answered", responses={503: {"description": "Not now."}})
    async def readyz() -> JSONResponse:
        return JSONResponse({"status": "ready" if served.ready else "stopping"}, 200 if served.ready else 503)

    @app.get("/metrics", summary="Counters in Prometheus' text format", response_class=Response)
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def description(served: Served) -> dict[str, Any]:
    """What ``GET /model`` says, and the page reads."""
    task = served.task
    return {
        "model": served.name,
        "task": task.name,
        "pipeline_tag": task.pipeline_tag,
        "problem_type": getattr(task, "problem_type", None),
        "labels": list(task.labels),
        "columns": [asdict(column) for column in task.columns if not column.is_target],
        "limits": asdict(served.limits),
        "examples": list(task.example_rows),
    }


def encoded(content: Any) -> bytes:
    """JSON. Raises NotFiniteError for a number that JSON cannot say."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise NotFiniteError from None


async def _answers(request: Request, served: Served, rows: Sequence[Row]) -> Sequence[Prediction]:
    """The batcher's answers, unless the caller leaves or time is up first: then the request leaves the queue."""
    answer = asyncio.ensure_future(served.batcher.answer(rows))
    answer.add_done_callback(retrieve_exception)
    gone = asyncio.ensure_future(request.receive())  # the body was read: what comes now is that the caller leaves
    try:
        await asyncio.wait({answer, gone}, timeout=served.limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
    except QueueFullError:
        detail = f"{served.limits.max_queue} requests are waiting already; try again in a moment"
        raise HTTPException(429, detail, headers={"Retry-After": "1"}) from None
    finally:
        answer.cancel()
        gone.cancel()
    if gone.done() and not gone.cancelled():
        raise HTTPException(GONE, "the caller has gone")
    detail = f"no answer within {served.limits.timeout:g} seconds; send fewer or shorter rows, or try later"
    raise HTTPException(503, detail, headers={"Retry-After": "5"})


async def _bad_body(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, BodyError):  # it is registered for no other
        raise error
    return JSONResponse({"detail": error.detail}, error.status)


async def _bad_row(request: Request, error: Exception) -> JSONResponse:
    """What a task refuses only while it makes features."""
    return JSONResponse({"detail": [{"loc": ["body"], "msg": str(error), "type": "value_error"}]}, 422)


async def _not_finite(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "the model gave a score that is not a finite number; nothing can be answered"}, 500)


async def _internal(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "internal error; the server's log says more"}, 500)

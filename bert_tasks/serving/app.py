"""The HTTP routes of a loaded model, their documentation, the page and errors.

The response to a failure is a status and one sentence. It never contains what a client sent.
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
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException as StarletteHTTPException
from typing_extensions import TypedDict

from bert_tasks.data.columns import source_columns
from bert_tasks.data.issues import counted
from bert_tasks.errors import CheckpointError, DataError, NotFiniteScoresError, UsageError
from bert_tasks.model.multitask import AnyModel
from bert_tasks.serving.batching import Batcher, QueueFullError, retrieve_exception
from bert_tasks.serving.clients import (
    ClassifyRequest,
    EmbedRequest,
    LabelScore,
    OpenAIRequest,
    OpenAIResponse,
    Rank,
    RerankRequest,
    classify_call,
    embed_call,
    is_classifier,
    is_tei,
    openai_call,
    rerank_call,
)
from bert_tasks.serving.failures import (
    EMBED,
    OPENAI,
    PREDICT,
    RERANK,
    Failure,
    Invalid,
    documented_failures,
    error_response,
)
from bert_tasks.serving.gate import DISCONNECTED, Gate
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import (
    ADAPTER,
    Call,
    Source,
    answers_schema,
    body_error,
    check_pairs,
    example_rows,
    option_error,
    parsed_body,
    request_schema,
    requested_labels,
    written_prediction,
)
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.reranking import can_rank
from bert_tasks.tasks.several import task_name
from bert_tasks.tasks.zero_shot import zero_shot_task

T = TypeVar("T")
Served = Mapping[str, tuple[AnyModel, Batcher]]  # by the name of the adapter, which is "" for the base
_LOADING = "The model is being loaded."
_LARGE_BODY = 2**16  # bytes, because parsing a larger body would block the event loop for too long


class State(TypedDict):
    """Whether the server responds."""

    status: Literal["ok", "ready", "stopping"]


def build_app(served: Served, gate: Gate, *, name: str) -> FastAPI:
    """Builds the application.

    FastAPI's pages of documentation load scripts of other servers, so they are left out. The document itself stays.

    Args:
        served: The models, of which the first is the default.
        gate: What every request passes.
        name: The name of the model on the page and in responses.
    """
    model, _ = _named(served, None, "query")
    description = f"{task_name(model.tasks)} with {name}."
    app = FastAPI(title=f"bert-tasks: {name}", description=description, docs_url=None, redoc_url=None)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return error_response(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid_query(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own response would repeat the value that the client sent.
        faults = [{key: fault[key] for key in ("loc", "msg", "type")} for fault in error.errors()]
        return error_response(request.scope, HTTPException(422, faults))

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.scope, HTTPException(500, "internal error. See the log of the server"))

    @app.exception_handler(NotFiniteScoresError)
    async def not_finite(request: Request, error: NotFiniteScoresError) -> JSONResponse:
        detail = "the model returned a score that is not a finite number, so there is no prediction"
        return error_response(request.scope, HTTPException(500, detail))

    # These two are asked when the metrics are read, so that no event has to keep them up to date.
    gate.metrics.queue_depth.set_function(lambda: sum(batcher.waiting for _, batcher in served.values()))
    gate.metrics.ready.set_function(lambda: not gate.draining())
    answer = _Answers(served, gate.limits, name)
    _add_predict(app, served, answer)
    _add_clients(app, served, answer)
    _add_page(app)
    _add_description(app, served, gate.limits, name)
    _add_state(app, gate)
    return app


def _named(served: Served, name: object, location: str) -> tuple[AnyModel, Batcher]:
    """Returns the model that a request chooses, or by default the first one."""
    if name is None:
        return next(iter(served.values()))
    if not isinstance(name, str) or name not in served:
        adapters = [adapter for adapter in served if adapter]
        message = f"no such adapter. The adapters are {', '.join(adapters)}"
        raise HTTPException(422, [{"loc": [location, ADAPTER], "msg": message, "type": "value_error"}])
    return served[name]


def _labels_tasks(model: AnyModel) -> list[Task]:
    """Returns the tasks of one and of several labels in a request. A model that knows no entailment has none."""
    with suppress(CheckpointError, UsageError):
        task = model.one_task().task
        return [zero_shot_task(task, model.hf_config, labels) for labels in (["label"], ["label", "other"])]
    return []


def _add_predict(app: FastAPI, served: Served, answer: "_Answers") -> None:
    """Adds ``/predict``, which reads rows, or texts in the form of text-embeddings-inference."""
    models = [model for model, _ in served.values()]
    rows = example_rows(models[0])
    examples = {"one row": {"value": rows[0]}, "several rows": {"value": {"inputs": rows}}}
    tasks_of_models = [model.tasks for model in models]
    for model in models:
        tasks_of_models += [{"": task} for task in _labels_tasks(model)]
    response: Any = answers_schema(*tasks_of_models)
    if any(is_classifier(model) for model in models):
        response |= list[LabelScore] | list[list[LabelScore]]

    def read(content: Any, source: Source) -> Call:
        task = requested_labels(content, source.model, source.limits)
        if task is None and is_tei(content, source.model):
            return classify_call(content, source)
        rows, several = source.reader(task).rows(content)
        pair_task = source.task if task is None else task
        check_pairs(rows, pair_task, source.limits)

        def respond(predictions: Sequence[Any], tokens: int) -> Any:
            answers = [written_prediction(prediction) for prediction in predictions]
            if several:
                return {"predictions": answers}
            return answers[0]

        return Call(rows=rows, respond=respond, task=task)

    @app.post(
        PREDICT,
        summary="Predict one row, or several",
        response_model=response,
        responses=documented_failures(PREDICT),
        openapi_extra=_body_schema(_predict_schema(served, answer.limits), examples=examples),
    )
    async def predict(request: Request, explain: bool = False) -> Response:
        """With `explain=true` the prediction for one row has an `explanation`, if the model has explanations."""
        return await answer.to(request, read, explain=explain)


def _predict_schema(served: Served, limits: Limits) -> dict[str, Any]:
    """Returns the JSON schema of the bodies of ``/predict``, in which each kind of task occurs once."""
    adapters = [name for name in served if name]
    schemas: dict[Any, Any] = {}
    for model, _ in served.values():
        kinds = tuple(type(task) for task in model.tasks.values())
        schemas[kinds] = request_schema(model, limits, adapters)
        labels = next(iter(_labels_tasks(model)), None)
        if labels is not None:
            schemas[(type(labels),)] = request_schema(model, limits, adapters, labels=labels)
        if is_classifier(model):
            schemas[ClassifyRequest] = ClassifyRequest
    # In a JSON pointer "~1" stands for a "/" of a key (RFC 6901).
    path = PREDICT.replace("/", "~1")
    pointer = f"#/paths/{path}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    union = reduce(or_, schemas.values())
    return TypeAdapter(union).json_schema(ref_template=pointer)


def _add_clients(app: FastAPI, served: Served, answer: "_Answers") -> None:
    """Adds the paths of clients of other servers. The document has those that a model can answer."""
    models = [model for model, _ in served.values()]
    only_tasks = [model.tasks.get("") for model in models]
    embeds = any(isinstance(task, Embedding) for task in only_tasks)
    reranks = any(task is not None and can_rank(task) for task in only_tasks)

    @app.post(
        OPENAI,
        summary="Embed texts, in OpenAI's form",
        response_model=OpenAIResponse,
        responses=documented_failures(OPENAI),
        openapi_extra=_body_schema(OpenAIRequest.model_json_schema()),
        include_in_schema=embeds,
    )
    async def embeddings(request: Request) -> Response:
        return await answer.to(request, openai_call)

    @app.post(
        EMBED,
        summary="Embed texts, in the form of text-embeddings-inference",
        response_model=list[list[float]],
        responses=documented_failures(EMBED),
        openapi_extra=_body_schema(EmbedRequest.model_json_schema()),
        include_in_schema=embeds,
    )
    async def embed(request: Request) -> Response:
        return await answer.to(request, embed_call)

    @app.post(
        RERANK,
        summary="Sort texts by their scores with a query, in the form of text-embeddings-inference",
        response_model=list[Rank],
        responses=documented_failures(RERANK),
        openapi_extra=_body_schema(RerankRequest.model_json_schema()),
        include_in_schema=reranks,
    )
    async def rerank(request: Request) -> Response:
        return await answer.to(request, rerank_call)


def _body_schema(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the description of a body that FastAPI does not read itself."""
    return {"requestBody": {"content": {"application/json": {"schema": schema, **more}}, "required": True}}


def _check_explainable(call: Call, batcher: Batcher) -> None:
    """Raises the response to a request whose prediction cannot be explained."""
    problem = batcher.no_explanations
    if call.task is not None:
        problem = "predictions of labels in a request are not explained"
    if len(call.rows) > 1:
        problem = f"one row can be explained, the request has {len(call.rows)}. Send a request for each row"
    if problem is not None:
        raise HTTPException(422, [{"loc": ["query", "explain"], "msg": problem, "type": "value_error"}])


class _Answers:
    """The responses to requests for predictions.

    Args:
        served, limits, name: As for ``build_app``.
    """

    def __init__(self, served: Served, limits: Limits, name: str) -> None:
        self.limits = limits
        self._served = served
        self._name = name
        self._threads = asyncio.Lock()

    async def to(self, request: Request, read: Callable[[Any, Source], Call], *, explain: bool = False) -> Response:
        """Reads a request, predicts its rows, and returns the response."""
        body = request.scope["body"]
        content_type = request.headers.get("content-type", "")
        # A large request has a large response, so both are made where the event loop does not wait for them.
        batcher, call = await self._work(body, lambda: self._read(body, content_type, read))
        if explain:
            _check_explainable(call, batcher)
        predicting = batcher.answer(call.rows, explain=explain, task=call.task, check=call.count)
        predictions = await _answers(request, predicting, self.limits)
        content = await self._work(body, lambda: encoded(call.respond(predictions, call.tokens)))
        return Response(content, media_type="application/json")

    def _read(self, body: bytes, content_type: str, read: Callable[[Any, Source], Call]) -> tuple[Batcher, Call]:
        """Returns what a body asks for, and the batcher of the model that it chooses."""
        content = parsed_body(body, content_type)
        name = None
        has_adapters = any(self._served)
        if has_adapters and isinstance(content, dict):
            name = content.pop(ADAPTER, None)
        model, batcher = _named(self._served, name, "body")
        source = Source(name=self._name, model=model, limits=self.limits, has_adapters=has_adapters)
        return batcher, read(content, source)

    async def _work(self, body: bytes, work: Callable[[], T]) -> T:
        """Works for large bodies one at a time, because each holds Python's lock."""
        if len(body) <= _LARGE_BODY:
            return work()
        async with self._threads:
            return await asyncio.to_thread(work)


def _add_page(app: FastAPI) -> None:
    """Adds the page to try the model, whose policy allows its own script and style and no other."""
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()
    policy = "default-src 'none'"
    for element in (b"script", b"style"):
        # The page has one of each. A browser runs what has this digest (Content Security Policy Level 3, 2.3.1).
        (text,) = re.findall(b"<%b>(.*)</%b>" % (element, element), content, flags=re.DOTALL)
        digest = base64.b64encode(bytes.fromhex(sha256(text))).decode()
        policy += f"; {element.decode()}-src 'sha256-{digest}'"
    policy += "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

    @app.get("/", include_in_schema=False)
    async def try_the_model() -> Response:
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})


def _add_description(app: FastAPI, served: Served, limits: Limits, name: str) -> None:
    """Adds ``/model``, from which the page builds its form."""

    @app.get(
        "/model",
        summary="Task, labels, columns, limits and examples of the served model",
        responses={
            422: {"description": "No such adapter.", "model": Invalid},
            503: {"description": _LOADING, "model": Failure},
        },
    )
    async def describe(adapter: str | None = None) -> JSONResponse:
        model, batcher = _named(served, adapter, "query")
        task = model.tasks.get("")
        pipeline_tag = None
        problem_type = None
        if task is not None:
            pipeline_tag = task.output.pipeline_tag
            problem_type = task.output.hf_config().get("problem_type")
        columns = source_columns(model.input_columns)
        return JSONResponse(
            {
                "model": name,
                "task": task_name(model.tasks),
                "pipeline_tag": pipeline_tag,
                "problem_type": problem_type,
                "labels": list(model.labels),
                "adapters": [adapter for adapter in served if adapter],
                "columns": [asdict(column) for column in columns],
                "limits": asdict(limits),
                "examples": list(example_rows(model)),
                "explains": batcher.no_explanations is None,
            }
        )


def _add_state(app: FastAPI, gate: Gate) -> None:
    """Adds what orchestrators and monitors ask for."""
    failure = {"$ref": "#/components/schemas/Failure"}  # FastAPI would describe a model as plain text

    @app.get("/healthz", summary="Whether the process responds", response_model=State)
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get(
        "/readyz",
        summary="Whether the server answers predictions",
        response_model=State,
        responses={503: {"description": "The server is loading or stopping.", "model": Failure | State}},
    )
    async def readyz() -> JSONResponse:
        if gate.draining():
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        summary="Counters in Prometheus' text format",
        response_class=PlainTextResponse,
        responses={503: {"description": _LOADING, "content": {"application/json": {"schema": failure}}}},
    )
    async def metrics() -> Response:
        return Response(generate_latest(gate.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def encoded(content: Any) -> bytes:
    """Encodes JSON in UTF-8.

    Raises:
        NotFiniteScoresError: A number cannot be represented in JSON.
    """
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise NotFiniteScoresError("a score is not a finite number") from None


async def _answers(request: Request, predictions: Coroutine[Any, Any, Sequence[Any]], limits: Limits) -> Sequence[Any]:
    """Returns predictions. If the client disconnects or the time is over, the request leaves the queue."""
    # After the body, a disconnect is all that a client can send.
    answer = asyncio.ensure_future(predictions)
    answer.add_done_callback(retrieve_exception)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, timeout=limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
    except DataError as error:  # a task finds some errors only when it makes features
        raise body_error((), str(error)) from None
    except UsageError as error:  # a hypothesis that is too long
        raise option_error(error) from None
    except QueueFullError:
        detail = f"the queue is full ({counted(limits.queue, 'request')}). Try again in a moment"
        raise HTTPException(429, detail, headers={"Retry-After": "1"}) from None
    finally:
        answer.cancel()
        gone.cancel()
    if gone.done() and not gone.cancelled():
        raise HTTPException(DISCONNECTED, "the client has disconnected")
    detail = f"no answer within {limits.timeout:g} s. Send fewer or shorter rows, or try later"
    raise HTTPException(503, detail, headers={"Retry-After": "5"})

"""Builds the HTTP application that serves loaded models.

It owns the routes, their description for OpenAPI, the page to try a model, and the handlers of errors. ``requests`` and
``clients`` read the bodies, ``batching`` runs the models, and ``gate`` is passed before and after this application.

The response to a failure is a status and one sentence. It never contains what a client sent.

Clients see some of the names and docstrings below: FastAPI writes the docstrings of routes and of types of responses to
``/openapi.json``, and makes the identifiers of operations from the names of the functions of routes.
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
from bert_tasks.serving.docs import docs_page
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
from bert_tasks.serving.run_info import run_info
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import TEXTS, Task
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.reranking import can_rank
from bert_tasks.tasks.several import task_name
from bert_tasks.tasks.zero_shot import zero_shot_task

ResultT = TypeVar("ResultT")
ServedModels = Mapping[str, tuple[AnyModel, Batcher]]  # by the name of the adapter, which is "" for the base
_ReadCall = Callable[[Any, Source], Call]  # what a path asks for, from the JSON content of a body
_LOADING = "The model is being loaded."
_MOST_BYTES_ON_EVENT_LOOP = 2**16  # of a body. Work for a larger one would block the event loop for too long


class State(TypedDict):
    """Whether the server responds."""

    status: Literal["ok", "ready", "stopping"]


def build_app(served_models: ServedModels, gate: Gate, *, name: str) -> FastAPI:
    """Builds the application, which the gate calls once the models have been loaded.

    FastAPI's pages of documentation load scripts of other servers, so they are left out. ``/openapi.json`` stays, and
    ``/docs`` is a page of this package.

    Args:
        served_models: The models and their batchers, of which the first is the default.
        gate: What every request passes. Its metrics are connected to the batchers.
        name: The name of the model on the page and in responses.
    """
    default_model, _ = next(iter(served_models.values()))
    description = f"{task_name(default_model.tasks)} with {name}."
    app = FastAPI(title=f"bert-tasks: {name}", description=description, docs_url=None, redoc_url=None)

    # Starlette's class is the base of FastAPI's. The router raises it for an unknown path or method.
    @app.exception_handler(StarletteHTTPException)
    async def handle_http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return error_response(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_query(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own response would repeat the value that the client sent.
        faults = [{key: fault[key] for key in ("loc", "msg", "type")} for fault in error.errors()]
        return error_response(request.scope, HTTPException(422, faults))

    # After this response Starlette raises the error again, so that it is logged.
    @app.exception_handler(Exception)
    async def handle_internal_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.scope, HTTPException(500, "internal error. See the log of the server"))

    @app.exception_handler(NotFiniteScoresError)
    async def handle_not_finite_scores(request: Request, error: NotFiniteScoresError) -> JSONResponse:
        detail = "the model returned a score that is not a finite number, so there is no prediction"
        return error_response(request.scope, HTTPException(500, detail))

    # These two functions are called when the metrics are read, so that no event has to keep the values up to date.
    gate.metrics.queue_depth.set_function(lambda: sum(batcher.waiting for _, batcher in served_models.values()))
    gate.metrics.ready.set_function(lambda: not gate.draining())
    responder = _Responder(served_models, gate.limits, name)
    _add_predict(app, served_models, responder, gate.limits)
    _add_clients(app, served_models, responder)
    _add_page(app)
    _add_docs(app)
    _add_description(app, served_models, gate.limits, name)
    _add_state(app, gate)
    return app


def _adapter_names(served_models: ServedModels) -> list[str]:
    """Returns the names that a request can choose a model by. The base has none."""
    return [name for name in served_models if name]


def _choose_model(
    served_models: ServedModels, name: object, location: Literal["body", "query"]
) -> tuple[AnyModel, Batcher]:
    """Returns the model that a request chooses, and its batcher.

    Args:
        served_models: As for ``build_app``.
        name: The name of an adapter, or None for the first model. A body may have any JSON value here.
        location: The part of the request that has the name.

    Raises:
        HTTPException: The response to a request for an unknown adapter.
    """
    if name is None:
        return next(iter(served_models.values()))
    if not isinstance(name, str) or name not in served_models:
        message = "the server has no adapters"
        names = _adapter_names(served_models)
        if names:
            message = f"no such adapter. The adapters are {', '.join(names)}"
        raise HTTPException(422, [{"loc": [location, ADAPTER], "msg": message, "type": "value_error"}])
    return served_models[name]


def _zero_shot_examples(model: AnyModel) -> list[Task]:
    """Returns a task of one and a task of two labels in a request, from which the requests are described.

    Both are needed, because the predictions have different types: a single label is decided alone, and two compete. The
    list is empty for a model that cannot use labels of a request, for example because it knows no entailment.
    """
    with suppress(CheckpointError, UsageError):
        task = model.one_task().task
        return [zero_shot_task(task, model.hf_config, labels) for labels in (["label"], ["label", "other"])]
    return []


def _add_predict(app: FastAPI, served_models: ServedModels, responder: "_Responder", limits: Limits) -> None:
    """Adds ``/predict``, which reads rows, or texts in the form of text-embeddings-inference (TEI)."""
    models = [model for model, _ in served_models.values()]
    rows = example_rows(models[0])
    examples = {"one row": rows[0], "several rows": {"inputs": rows}}
    tasks_of_models = [model.tasks for model in models]
    for model in models:
        for task in _zero_shot_examples(model):
            tasks_of_models.append({"": task})  # "" is the name of an only task
    # This type is for the document alone. FastAPI checks nothing by it, because the route returns a ``Response``.
    response_type: Any = answers_schema(*tasks_of_models)
    if any(is_classifier(model) for model in models):
        response_type |= list[LabelScore] | list[list[LabelScore]]  # TEI's form
    schema = _predict_schema(served_models, limits)

    @app.post(
        PREDICT,
        summary="Predict one row, or several",
        response_model=response_type,
        responses=documented_failures(PREDICT),
        openapi_extra=_describe_body(schema, examples),
    )
    async def predict(request: Request, explain: bool = False) -> Response:
        """With `explain=true` the prediction for one row has an `explanation`, if the model has explanations."""
        return await responder.respond(request, _predict_call, explain=explain)


def _predict_call(content: Any, source: Source) -> Call:
    """Reads a request to ``/predict``, and leaves one in TEI's form to ``classify_call``."""
    # This comes first, because it removes the labels and their options from the content. What is left are the rows.
    labels_task = requested_labels(content, source.model, source.limits)
    if labels_task is None and is_tei(content, source.model):
        return classify_call(content, source)
    rows, is_list = source.reader(labels_task).rows(content)
    task: Task | None = labels_task
    if task is None:
        task = source.task
    check_pairs(rows, task, source.limits)

    def respond(predictions: Sequence[Any], tokens: int) -> Any:
        written = [written_prediction(prediction) for prediction in predictions]
        if is_list:
            return {"predictions": written}
        return written[0]

    # Without labels the task is None, not the model's: ``Batcher.answer`` then uses the tasks of all heads.
    return Call(rows=rows, respond=respond, task=labels_task)


def _predict_schema(served_models: ServedModels, limits: Limits) -> dict[str, Any]:
    """Returns the JSON schema of a body of ``/predict``, which is a union of all forms that a model reads.

    Models with the same kinds of tasks have one form together, which is that of the last of them.
    """
    adapters = _adapter_names(served_models)
    body_types: dict[Any, Any] = {}  # a dict for the sake of its keys, by which a form occurs once
    for model, _ in served_models.values():
        kinds = tuple(type(task) for task in model.tasks.values())
        body_types[kinds] = request_schema(model, limits, adapters)
        labels_task = next(iter(_zero_shot_examples(model)), None)  # the number of labels does not change a request
        if labels_task is not None:
            body_types[(type(labels_task),)] = request_schema(model, limits, adapters, labels=labels_task)
        if is_classifier(model):
            body_types[ClassifyRequest] = ClassifyRequest
    # The schema refers to definitions of its own ("$defs"), but a reference begins at the root of the whole document.
    # In a JSON pointer "~1" stands for a "/" of a key (RFC 6901). pydantic replaces {model} by a definition's name.
    path = PREDICT.replace("/", "~1")
    pointer = f"#/paths/{path}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    union = reduce(or_, body_types.values())  # ``or`` of types is their union
    return TypeAdapter(union).json_schema(ref_template=pointer)


def _add_clients(app: FastAPI, served_models: ServedModels, responder: "_Responder") -> None:
    """Adds the paths of clients of text-embeddings-inference and of OpenAI's embeddings.

    Every server has all of them, so that a model that cannot answer one responds with the reason instead of 404. The
    document describes only those that one of the models can answer.
    """
    models = [model for model, _ in served_models.values()]
    only_tasks = [model.tasks.get("") for model in models]  # None for a model of several tasks
    embeds = any(isinstance(task, Embedding) for task in only_tasks)
    reranks = any(task is not None and can_rank(task) for task in only_tasks)
    texts = list(TEXTS[:2])
    query = {"query": TEXTS[2], "texts": texts}

    @app.post(
        OPENAI,
        summary="Embed texts, in OpenAI's form",
        response_model=OpenAIResponse,
        responses=documented_failures(OPENAI),
        openapi_extra=_describe_body(OpenAIRequest.model_json_schema(), {"two texts": {"input": texts}}),
        include_in_schema=embeds,
    )
    async def embeddings(request: Request) -> Response:
        return await responder.respond(request, openai_call)

    @app.post(
        EMBED,
        summary="Embed texts, in the form of text-embeddings-inference",
        response_model=list[list[float]],
        responses=documented_failures(EMBED),
        openapi_extra=_describe_body(EmbedRequest.model_json_schema(), {"two texts": {"inputs": texts}}),
        include_in_schema=embeds,
    )
    async def embed(request: Request) -> Response:
        return await responder.respond(request, embed_call)

    @app.post(
        RERANK,
        summary="Sort texts by their scores with a query, in the form of text-embeddings-inference",
        response_model=list[Rank],
        responses=documented_failures(RERANK),
        openapi_extra=_describe_body(RerankRequest.model_json_schema(), {"a query and two texts": query}),
        include_in_schema=reranks,
    )
    async def rerank(request: Request) -> Response:
        return await responder.respond(request, rerank_call)


def _describe_body(schema: Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a JSON body, for FastAPI's ``openapi_extra``.

    A route that takes the request as it is reads the body itself, so FastAPI cannot describe it.

    Args:
        schema: The JSON schema of the body.
        examples: The name of each example -> its content.
    """
    media_type = {"schema": schema, "examples": {name: {"value": value} for name, value in examples.items()}}
    return {"requestBody": {"content": {"application/json": media_type}, "required": True}}


def _check_explainable(call: Call, batcher: Batcher) -> None:
    """Raises the response to a request whose prediction cannot be explained.

    What the client can change comes before what the model lacks.
    """
    problem = batcher.no_explanations
    if len(call.rows) > 1:
        problem = f"one row can be explained, the request has {len(call.rows)}. Send a request for each row"
    elif call.task is not None:
        problem = "predictions of labels in a request are not explained"
    if problem is not None:
        raise HTTPException(422, [{"loc": ["query", "explain"], "msg": problem, "type": "value_error"}])


class _Responder:
    """Responds to the requests for predictions of all paths.

    Args:
        served_models, limits, name: As for ``build_app``.
    """

    def __init__(self, served_models: ServedModels, limits: Limits, name: str) -> None:
        self._served_models = served_models
        self._limits = limits
        self._name = name
        self._large_body_lock = asyncio.Lock()

    async def respond(self, request: Request, read: _ReadCall, *, explain: bool = False) -> Response:
        """Reads a request, predicts its rows, and returns the response.

        Args:
            request: The request, whose body the gate has read.
            read: The function that reads the content of the path's bodies.
            explain: True if the prediction has an explanation.

        Raises:
            HTTPException: The response to a request that cannot be answered.
            NotFiniteScoresError: A score is not a finite number.
        """
        body = request.scope["body"]
        content_type = request.headers.get("content-type", "")
        # A large request has a large response, so both are made where the event loop does not wait for them.
        batcher, call = await self._run_work(body, lambda: self._read(body, content_type, read))
        if explain:
            _check_explainable(call, batcher)
        # ``call.count`` sets ``call.tokens`` when the rows have been tokenized, so the tokens are read after the wait.
        predicting = batcher.answer(call.rows, explain=explain, task=call.task, check=call.count)
        predictions = await _wait_for_predictions(request, predicting, self._limits)
        content = await self._run_work(body, lambda: encoded(call.respond(predictions, call.tokens)))
        return Response(content, media_type="application/json")

    def _read(self, body: bytes, content_type: str, read: _ReadCall) -> tuple[Batcher, Call]:
        """Returns what a body asks for, and the batcher of the model that it chooses."""
        content = parsed_body(body, content_type)
        has_adapters = len(_adapter_names(self._served_models)) > 0
        name = None
        if has_adapters and isinstance(content, dict):
            name = content.pop(ADAPTER, None)  # what is left is for ``read``, which knows no adapters
        model, batcher = _choose_model(self._served_models, name, "body")
        source = Source(name=self._name, model=model, limits=self._limits, has_adapters=has_adapters)
        return batcher, read(content, source)

    async def _run_work(self, body: bytes, work: Callable[[], ResultT]) -> ResultT:
        """Returns what ``work`` returns, which runs on a thread if the body is large.

        Work for large bodies runs one at a time, because all of it holds Python's global lock (GIL). More threads would
        finish no earlier, and would leave the event loop less time.
        """
        if len(body) <= _MOST_BYTES_ON_EVENT_LOOP:
            return work()
        async with self._large_body_lock:
            return await asyncio.to_thread(work)


def _add_page(app: FastAPI) -> None:
    """Adds the page to try the model.

    Its policy replaces the stricter one of the gate. It allows the page's own script and style and no other, images
    that the page itself contains, and requests to this server.
    """
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()
    policy = f"{_content_policy(content, b'script', b'style')}; connect-src 'self'; img-src data:"

    @app.get("/", include_in_schema=False)
    async def try_the_model() -> Response:
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})


def _add_docs(app: FastAPI) -> None:
    """Adds ``/docs``, a page about what the server can be asked."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        content = docs_page(app.openapi(), str(request.base_url).rstrip("/")).encode()
        headers = {"Content-Security-Policy": _content_policy(content, b"style")}
        return Response(content, media_type="text/html", headers=headers)


def _content_policy(content: bytes, *elements: bytes) -> str:
    """Returns a policy that allows these elements of a page, of which it has one each, and nothing else."""
    policy = "default-src 'none'"
    for element in elements:
        # A browser runs what has this digest, which the policy writes in base64 (Content Security Policy Level 3,
        # 2.3.1).
        (text,) = re.findall(b"<%b>(.*)</%b>" % (element, element), content, flags=re.DOTALL)
        digest_bytes = bytes.fromhex(sha256(text))
        digest = base64.b64encode(digest_bytes).decode()
        policy += f"; {element.decode()}-src 'sha256-{digest}'"
    return f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _add_description(app: FastAPI, served_models: ServedModels, limits: Limits, name: str) -> None:
    """Adds ``/model``, which describes a model. The page builds its form from the description."""
    # The files of a run are read once, before the first request.
    infos = {key: run_info(model) for key, (model, _) in served_models.items()}
    default = next(iter(served_models))

    @app.get(
        "/model",
        summary="Task, labels, columns, limits and examples of the served model, and what its run recorded",
        responses={
            422: {"description": "No such adapter.", "model": Invalid},
            503: {"description": _LOADING, "model": Failure},
        },
    )
    async def describe(adapter: str | None = None) -> JSONResponse:
        model, batcher = _choose_model(served_models, adapter, "query")
        task = model.tasks.get("")  # None for a model of several tasks
        pipeline_tag = None
        problem_type = None
        max_length = None
        if task is not None:
            max_length = task.max_length
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
                "adapters": _adapter_names(served_models),
                "columns": [asdict(column) for column in columns],
                "limits": asdict(limits),
                "examples": list(example_rows(model)),
                "max_length": max_length,
                "run": infos[default if adapter is None else adapter],
                "explains": batcher.no_explanations is None,
            }
        )


def _add_state(app: FastAPI, gate: Gate) -> None:
    """Adds ``/healthz`` and ``/readyz`` for orchestrators, and ``/metrics`` for Prometheus.

    While the model is being loaded, the gate responds in place of these routes. Its failures are described here.
    """
    # FastAPI would describe a failure of /metrics as plain text, like its response, but it is JSON. So the description
    # refers to the schema that FastAPI writes for other routes.
    failure_schema = {"$ref": "#/components/schemas/Failure"}

    @app.get("/healthz", summary="Whether the process responds", response_model=State)
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get(
        "/readyz",
        summary="Whether the server answers predictions",
        response_model=State,
        # The gate responds with a Failure while the model is being loaded, and this route with a State before the end.
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
        responses={503: {"description": _LOADING, "content": {"application/json": {"schema": failure_schema}}}},
    )
    async def metrics() -> Response:
        return Response(generate_latest(gate.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def encoded(content: Any) -> bytes:
    """Encodes JSON in UTF-8.

    Raises:
        NotFiniteScoresError: A number is infinite or not a number (NaN), which JSON cannot represent.
    """
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise NotFiniteScoresError("a score is not a finite number") from None


async def _wait_for_predictions(
    request: Request, predictions: Coroutine[Any, Any, Sequence[Any]], limits: Limits
) -> Sequence[Any]:
    """Returns the predictions, if they come in time and the client is still connected.

    Otherwise they are cancelled, so that the request leaves the queue.

    Args:
        request: The request, whose body has been read.
        predictions: A call of ``Batcher.answer``.
        limits: Limits of requests. The timeout ends the wait.

    Raises:
        HTTPException: The response to rows or options that cannot be used, to a full queue, and to a disconnect or a
            timeout.
    """
    predicting = asyncio.ensure_future(predictions)
    # Nobody awaits it after a disconnect or a timeout, but it may still fail.
    predicting.add_done_callback(retrieve_exception)
    # After the body, a disconnect is all that a client can send.
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({predicting, disconnect}, timeout=limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if predicting.done():
            return predicting.result()
    except DataError as error:  # a task, or ``Call.count``, finds some errors only when there are features
        raise body_error((), str(error)) from None
    except UsageError as error:  # a hypothesis that is too long
        raise option_error(error) from None
    except QueueFullError:
        waiting = counted(limits.queue, "request")
        detail = f"the queue is full ({waiting}). Try again in a moment"
        raise HTTPException(429, detail, headers={"Retry-After": "1"}) from None
    finally:
        predicting.cancel()
        disconnect.cancel()
    if disconnect.done() and not disconnect.cancelled():
        raise HTTPException(DISCONNECTED, "the client has disconnected")
    detail = f"no answer within {limits.timeout:g} s. Send fewer or shorter rows, or try later"
    raise HTTPException(503, detail, headers={"Retry-After": "5"})

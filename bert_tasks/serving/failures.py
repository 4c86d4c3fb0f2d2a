"""The responses to failures, in the form that the clients of a path read, and their description for OpenAPI.

The docstrings of the classes below are shown in the description.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

PREDICT, OPENAI, EMBED, RERANK = PATHS = ("/predict", "/v1/embeddings", "/embed", "/rerank")  # of predictions


class Failure(TypedDict):
    """One sentence."""

    detail: str


class Fault(TypedDict):
    """What is wrong with a value. ``loc`` begins with ``body`` or ``query``."""

    loc: list[str | int]
    msg: str
    type: str


class Invalid(TypedDict):
    """The first value of a request that cannot be used."""

    detail: list[Fault]


class TEIFailure(TypedDict):
    """A failure as text-embeddings-inference describes it."""

    error: str
    error_type: Literal["validation", "overloaded", "backend"]


class OpenAIError(TypedDict):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: None


class OpenAIFailure(TypedDict):
    """A failure as OpenAI describes it."""

    error: OpenAIError


_DESCRIPTIONS = {
    400: "The body cannot be read as JSON. As plain text: the Host header is not accepted.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    422: "A value cannot be used.",
    429: "Too many requests are waiting. `Retry-After` says when to try again.",
    431: "The headers are too long.",
    500: "The prediction failed.",
    503: "The server loads or stops, or the response took too long. As plain text: too many connections are open.",
}
_PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def error_response(scope: Mapping[str, Any], error: HTTPException) -> JSONResponse:
    """Returns the response to a failure, in the form that the path's clients read."""
    status = error.status_code
    detail = cast("Any", error.detail)  # starlette declares a text
    path = scope["path"]
    if scope["method"] != "POST" or path not in PATHS or path == PREDICT:
        return JSONResponse({"detail": detail}, status, error.headers)
    key = ""
    message = detail
    if isinstance(detail, list):
        # FastAPI's form of what is wrong with a value. The first part of its place is "body".
        key = ".".join(map(str, detail[0]["loc"][1:]))
        message = detail[0]["msg"]
    if key:
        message = f"{key}: {message}"
    if path == OPENAI:
        return JSONResponse(_openai_failure(status, key, message), status, error.headers)
    return JSONResponse(_tei_failure(status, message), status, error.headers)


def _openai_failure(status: int, key: str, message: str) -> OpenAIFailure:
    """Returns the content of a failure for OpenAI's clients."""
    param = key if key else None
    if status < 500:
        return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}
    return {"error": {"message": message, "type": "server_error", "param": param, "code": None}}


def _tei_failure(status: int, message: str) -> TEIFailure:
    """Returns the content of a failure for TEI's clients."""
    if status == 429:
        return {"error": message, "error_type": "overloaded"}
    if status < 500:
        return {"error": message, "error_type": "validation"}
    return {"error": message, "error_type": "backend"}


def documented_failures(path: str) -> dict[int | str, dict[str, Any]]:
    """Returns every failure that a path of predictions responds with, for FastAPI's ``responses``."""
    form: Any = TEIFailure
    if path == PREDICT:
        form = Failure
    elif path == OPENAI:
        form = OpenAIFailure
    responses: dict[int | str, dict[str, Any]] = {}
    for status, description in _DESCRIPTIONS.items():
        responses[status] = {"description": description, "model": form}
        if "plain text" in description:
            responses[status]["content"] = _PLAIN_TEXT
    if path == PREDICT:
        responses[422]["model"] = Invalid
    return responses

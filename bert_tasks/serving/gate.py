"""Limits of bodies, security headers and Prometheus counters of the server."""

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert_tasks.serving.failures import PATHS, error_response
from bert_tasks.serving.limits import Limits

HEADER_BYTES = 2**14  # of a path and all headers
DISCONNECTED = 499  # the status that is counted for a client that did not wait
_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


class ServerMetrics:
    """The Prometheus metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Requests for predictions by status (499 if the client disconnected).")
        self._requests = Counter(*requests, ["status"], registry=registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=registry)
        latency = ("bert_tasks_request_seconds", "Seconds from the headers of a request to the end of its response.")
        self._seconds = Histogram(*latency, registry=registry)
        sizes = [2**power for power in range(10)]
        together = ("bert_tasks_batch_requests", "Requests of a batch.")
        self._batch_requests = Histogram(*together, buckets=sizes, registry=registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=sizes, registry=registry)
        self.queue_depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=registry)
        self.ready = Gauge("bert_tasks_ready", "1 while the server answers predictions.", registry=registry)
        self.answered = 0

    def request(self, status: int, seconds: float) -> None:
        """Counts a request for predictions."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self.answered += status == 200

    def batch(self, requests: int, rows: int) -> None:
        """Counts a batch that was run."""
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._rows.inc(rows)


def _head_bytes(scope: Scope) -> int:
    """Returns the size of what a client sent before the body."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value) + len(": \r\n")
    return size


class Gate:
    """An ASGI application around ``app``, which is set when the model has been loaded.

    ``draining`` returns True after the server has been asked to stop. Each response then closes its connection.
    """

    def __init__(self, *, limits: Limits, metrics: ServerMetrics, draining: Callable[[], bool]) -> None:
        self.app: ASGIApp | None = None
        self.limits, self.metrics, self.draining = limits, metrics, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), DISCONNECTED
        no_body = scope["method"] == "HEAD"  # the response to GET without its body (RFC 9110, 9.3.2)
        if no_body:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = _HEADERS | {b"connection": b"close"} if self.draining() else _HEADERS
                message = {**message, "headers": list((headers | dict(message["headers"])).items())}
            elif no_body:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._respond(scope, receive, send_with_headers)
        except ClientDisconnect:
            return
        finally:
            if scope["method"] == "POST" and scope["path"] in PATHS:
                self.metrics.request(status, time.perf_counter() - started)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if _head_bytes(scope) > HEADER_BYTES:
                detail = f"the path and the headers are longer than {HEADER_BYTES} bytes"
                raise HTTPException(431, detail, {"connection": "close"})
            if self.app is None and scope["path"] == "/healthz":
                await JSONResponse({"status": "ok"})(scope, receive, send)
            elif self.app is None:
                raise HTTPException(503, "the model is being loaded", {"retry-after": "2"})
            else:  # what is left to receive is that the client disconnects
                await self.app({**scope, "body": await self._body(scope, receive)}, receive, send)
        except HTTPException as error:
            await error_response(scope, error)(scope, receive, send)
        except asyncio.CancelledError:  # the grace period is over, and nothing follows
            stopped = HTTPException(503, "the server has stopped", {"connection": "close"})
            await error_response(scope, stopped)(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body. Drains a body that is too large before it responds."""
        most, seconds = self.limits.body_bytes, self.limits.timeout
        body, is_too_large = bytearray(), False
        try:
            async with asyncio.timeout(seconds):
                async for chunk in Request(scope, receive).stream():
                    body += chunk
                    if len(body) > most:
                        is_too_large = True
                        body.clear()
        except TimeoutError:
            detail = f"the body did not arrive within {seconds:g} s"
            raise HTTPException(408, detail, {"connection": "close"}) from None
        if is_too_large:
            raise HTTPException(413, f"the body is larger than {most} bytes", {"connection": "close"})
        return bytes(body)

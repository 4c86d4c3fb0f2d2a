"""The outermost layer of the server: what applies to every request before its body is parsed.

It checks the Host header, limits the size of bodies and the time that they may take, responds while the model is being
loaded, adds security headers, tells clients to close while the server stops, and counts requests for Prometheus.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert_tasks.serving.connections import Limits

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """The Prometheus metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Requests to /predict by status; 499: the client disconnected.")
        self._requests = Counter(*requests, ["status"], registry=registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=registry)
        latency = ("bert_tasks_request_seconds", "Seconds from the headers of a request to the end of its response.")
        self._seconds = Histogram(*latency, buckets=SECONDS, registry=registry)
        together = ("bert_tasks_batch_requests", "Requests of a batch.")
        self._batch_requests = Histogram(*together, buckets=SIZES, registry=registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=SIZES, registry=registry)
        self.queue_depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=registry)
        self.ready = Gauge("bert_tasks_ready", "1 while the server answers predictions.", registry=registry)
        self.answered = 0

    def request(self, status: int, seconds: float) -> None:
        """Counts a request to /predict."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self.answered += status == 200

    def batch(self, requests: int, rows: int) -> None:
        """Counts a batch that was run."""
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._rows.inc(rows)


PREDICT = "/predict"
DISCONNECTED = 499  # the status that is counted for a client that did not wait
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_DISCARDED = 2**26  # bytes of too large a body that are read and discarded, so that its sender reads the response
_FULL = "the bodies of other requests use all the memory that is reserved for them; try again in a moment"
_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


class _DisconnectedError(Exception):
    """The client disconnected before its body was complete."""


class RequestLimits:
    """An ASGI application around another one, ``app``, which is set when the model has been loaded.

    Args:
        limits: limits of bodies.
        metrics: counts the requests.
        hosts: names that the Host header may have; None: any. The check stops pages of other sites whose name was made
            to point here (DNS rebinding).
        draining: returns whether the server has been asked to stop. Every response then closes its connection.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        metrics: ServerMetrics,
        hosts: frozenset[str] | None,
        draining: Callable[[], bool],
    ) -> None:
        self.app: ASGIApp | None = None
        self._limits, self._metrics, self._hosts, self._draining = limits, metrics, hosts, draining
        self._free = limits.max_total_body_bytes  # how many more bytes the bodies of all requests may have together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), DISCONNECTED
        no_body = scope["method"] == "HEAD"  # the response to GET without its body (RFC 9110, 9.3.2)
        if no_body:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name.lower() for name, _ in message["headers"]}
                headers = _HEADERS | {b"connection": b"close"} if self._draining() else _HEADERS
                added = [(name, value) for name, value in headers.items() if name not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            elif no_body:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._respond(scope, receive, send_with_headers)
        finally:
            if scope["path"] == PREDICT:
                self._metrics.request(status, time.perf_counter() - started)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts:
                raise HTTPException(
                    421, "this server does not accept that Host header; its operator can allow it (--allow-host)"
                )
            if self.app is None and scope["path"] == "/healthz":
                await JSONResponse({"status": "ok"})(scope, receive, send)
            elif self.app is None:
                raise HTTPException(503, "the model is being loaded", {"retry-after": "2"})
            else:
                async with self._body(headers, receive) as body:  # until the response is sent
                    unread = [{"type": "http.request", "body": body, "more_body": False}]

                    async def replay() -> Message:
                        """The body, then what ``receive`` delivers: that the client disconnects."""
                        return unread.pop() if unread else await receive()

                    await self.app(scope, replay, send)
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code, error.headers)(scope, receive, send)
        except _DisconnectedError:
            return
        except asyncio.CancelledError:  # the grace period is over; nothing follows
            response = JSONResponse({"detail": "the server has stopped"}, 503, {"connection": "close"})
            await response(scope, receive, send)

    @asynccontextmanager
    async def _body(self, headers: Headers, receive: Receive) -> AsyncIterator[bytes]:
        """The whole body, counted among those of all requests while the context is entered.

        A body that is too large is read and discarded before it is refused.
        """
        limits = self._limits
        too_large = HTTPException(
            413, f"the body is larger than {limits.max_body_bytes} bytes", {"connection": "close"}
        )
        length = headers.get("content-length", "0")
        declared = int(length) if length.isascii() and length.isdigit() else 0
        if headers.get("expect", "").lower() == "100-continue" and declared > limits.max_body_bytes:
            raise too_large  # the client waits for a response before it sends the body
        parts: list[bytes] = []
        size, held, more, refusal = 0, 0, True, None
        try:
            try:
                async with asyncio.timeout(limits.timeout):
                    while more and size <= limits.max_body_bytes + _DISCARDED:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise _DisconnectedError
                        part, more = message.get("body", b""), message.get("more_body", False)
                        size += len(part)
                        if refusal is None and size > limits.max_body_bytes:
                            refusal = too_large
                        elif refusal is None and len(part) > self._free:
                            refusal = HTTPException(503, _FULL, {"retry-after": "1", "connection": "close"})
                        if refusal is None:
                            parts.append(part)
                            held += len(part)
                            self._free -= len(part)
                        else:
                            self._free += held
                            held = 0
                            parts.clear()
            except TimeoutError:
                detail = f"the body did not arrive within {limits.timeout:g} s"
                raise HTTPException(408, detail, {"connection": "close"}) from None
            if refusal is not None:
                raise refusal
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._free += held


def host_name(host: str) -> str:
    """The name in a Host header in lower case, without port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")

"""The outermost layer of the server: what applies to every request before its body is parsed.

It checks the Host header, limits the size of bodies and the time that they may take, responds while the model is being
loaded, adds security headers, and counts requests for Prometheus.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert_tasks.serving.connections import Limits

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """The Prometheus metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Requests to /predict by status; 499: the client disconnected.")
        self._requests = Counter(*requests, ["status"], registry=self.registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=self.registry)
        latency = ("bert_tasks_request_seconds", "Seconds from the headers of a request to the end of its response.")
        self._seconds = Histogram(*latency, buckets=SECONDS, registry=self.registry)
        together = ("bert_tasks_batch_requests", "Requests of a batch.")
        self._batch_requests = Histogram(*together, buckets=SIZES, registry=self.registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=SIZES, registry=self.registry)
        self._depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=self.registry)
        self._ready = Gauge("bert_tasks_ready", "1 while the server answers predictions.", registry=self.registry)
        self.answered = 0

    def watch(self, *, queue_depth: Callable[[], float], ready: Callable[[], float]) -> None:
        """Sets the functions that are called when the metrics are read."""
        self._depth.set_function(queue_depth)
        self._ready.set_function(ready)

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

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


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


class _RefusedError(Exception):
    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.headers = {} if headers is None else headers


class _DisconnectedError(Exception):
    """The client disconnected before its body was complete."""


class Gate:
    """An ASGI application around another one, ``app``, which is set when the model has been loaded.

    Args:
        limits: limits of bodies.
        metrics: counts the requests.
        hosts: names that the Host header may have; None: any. The check stops pages of other sites whose name was made
            to point here (DNS rebinding).
    """

    def __init__(self, *, limits: Limits, metrics: ServerMetrics, hosts: frozenset[str] | None) -> None:
        self.app: ASGIApp | None = None
        self._limits, self._metrics, self._hosts = limits, metrics, hosts
        self._held = _HeldBytes(limits.max_total_body_bytes)

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
                added = [(name, value) for name, value in _HEADERS.items() if name not in given]
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
                raise _RefusedError(
                    421, "this server does not accept that Host header; its operator can allow it (--allow-host)"
                )
            if self.app is None and scope["path"] == "/healthz":
                await _send(send, 200, {"status": "ok"}, {})
            elif self.app is None:
                raise _RefusedError(503, "the model is being loaded", {"retry-after": "2"})
            else:
                with _Body(self._held) as body:  # until the response is sent
                    content = await self._read(headers, receive, body)
                    await self.app(scope, _replayed(content, receive), send)
        except _RefusedError as refusal:
            await _send(send, refusal.status, {"detail": refusal.detail}, refusal.headers)
        except _DisconnectedError:
            return
        except asyncio.CancelledError:  # the grace period is over; nothing follows
            await _send(send, 503, {"detail": "the server has stopped"}, {"connection": "close"})

    async def _read(self, headers: Headers, receive: Receive, body: "_Body") -> bytes:
        """The whole body. One that is too large is read and discarded before it is refused."""
        limits = self._limits
        too_large = _RefusedError(
            413, f"the body is larger than {limits.max_body_bytes} bytes", {"connection": "close"}
        )
        length = headers.get("content-length", "0")
        declared = int(length) if length.isascii() and length.isdigit() else 0
        if headers.get("expect", "").lower() == "100-continue" and declared > limits.max_body_bytes:
            raise too_large  # the client waits for a response before it sends the body
        size, refusal = 0, None
        try:
            async with asyncio.timeout(limits.timeout):
                async for part in _parts(receive):
                    size += len(part)
                    if refusal is None and size > limits.max_body_bytes:
                        refusal = too_large
                    if refusal is None and not body.add(part):
                        refusal = _RefusedError(503, _FULL, {"retry-after": "1", "connection": "close"})
                    if refusal is not None:
                        body.clear()
                        if size > limits.max_body_bytes + _DISCARDED:
                            break
        except TimeoutError:
            detail = f"the body did not arrive within {limits.timeout:g} seconds"
            raise _RefusedError(408, detail, {"connection": "close"}) from None
        if refusal is not None:
            raise refusal
        return body.content()


class _HeldBytes:
    """How many more bytes the bodies of all requests may have together."""

    def __init__(self, most: int) -> None:
        self.free = most


class _Body:
    """The parts of one body, counted among those of all requests while it is entered."""

    def __init__(self, held: _HeldBytes) -> None:
        self._held, self._parts, self._size = held, list[bytes](), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def add(self, part: bytes) -> bool:
        """Adds a part, unless all bodies together would be too large; returns whether it did."""
        if len(part) > self._held.free:
            return False
        self._held.free -= len(part)
        self._size += len(part)
        self._parts.append(part)
        return True

    def clear(self) -> None:
        self._held.free += self._size
        self._parts, self._size = [], 0

    def content(self) -> bytes:
        """The whole body, whose bytes stay counted."""
        whole, self._parts = b"".join(self._parts), []
        return whole


def host_name(host: str) -> str:
    """The name in a Host header in lower case, without port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Delivers the body once, then what ``receive`` delivers: that the client disconnects."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _send(send: Send, status: int, content: Mapping[str, str], headers: Mapping[str, str]) -> None:
    body = json.dumps(content).encode()
    named = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})

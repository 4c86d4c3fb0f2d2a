"""What the server counts, for Prometheus, in a registry of its own.

Must not know HTTP's or the model's types: it is told numbers.

The outermost layer of the server: what every request meets before anything reads it.

Owns the Host check, the size of bodies and the time they may take, answers while the model is being loaded, headers
for browsers, and the count of requests. Must not know the model or what is in a body.
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
    """Counters of one server; ``queue_depth`` is asked when somebody looks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Answered calls of /predict by status; 499: the caller had gone.")
        self._requests = Counter(*requests, ["status"], registry=self.registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=self.registry)
        latency = ("bert_tasks_request_seconds", "From a call's headers to the end of its answer.")
        self._seconds = Histogram(*latency, buckets=SECONDS, registry=self.registry)
        together = ("bert_tasks_batch_requests", "Requests that ran together.")
        self._batch_requests = Histogram(*together, buckets=SIZES, registry=self.registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=SIZES, registry=self.registry)
        self._depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=self.registry)
        self._ready = Gauge("bert_tasks_ready", "1 while predictions are answered.", registry=self.registry)
        self.answered = 0

    def watch(self, *, queue_depth: Callable[[], float], ready: Callable[[], float]) -> None:
        self._depth.set_function(queue_depth)
        self._ready.set_function(ready)

    def request(self, status: int, seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self.answered += status == 200

    def batch(self, requests: int, rows: int) -> None:
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._rows.inc(rows)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


PREDICT = "/predict"
GONE = 499  # what is counted for a caller who did not wait
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_UNREAD = 2**26  # bytes of a body too large that are read and thrown away, so that its sender reads the answer
_FULL = "the bodies of other requests fill the memory that is set aside for them; try again in a moment"
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


class _GoneError(Exception):
    """The caller left before the body was whole."""


class Gate:
    """An ASGI application around another one, which comes when the model is loaded.

    Args:
        hosts: names that the Host header may bear; None: any. A page of another site whose name was made to point here
            (DNS rebinding) bears its own.
    """

    def __init__(self, *, limits: Limits, metrics: ServerMetrics, hosts: frozenset[str] | None) -> None:
        self.app: ASGIApp | None = None
        self._limits, self._metrics, self._hosts = limits, metrics, hosts
        self._held = _HeldBytes(limits.max_total_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), GONE
        no_body = scope["method"] == "HEAD"  # answered as GET is, without the body (RFC 9110, 9.3.2)
        if no_body:
            scope = {**scope, "method": "GET"}

        async def told(message: Message) -> None:
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
            await self._answer(scope, receive, told)
        finally:
            if scope["path"] == PREDICT:
                self._metrics.request(status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            if self.app is None:
                await self._while_loading(scope, send)
            else:
                with _Body(self._held) as body:  # until the request is answered
                    content = await self._read(headers, receive, body)
                    await self.app(scope, _replayed(content, receive), send)
        except _RefusedError as refusal:
            await _send(send, refusal.status, {"detail": refusal.detail}, refusal.headers)
        except _GoneError:
            return
        except asyncio.CancelledError:  # the time that a stop may take is over; nothing comes after this
            await _send(send, 503, {"detail": "the server has stopped"}, {"connection": "close"})

    def _check_host(self, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if self._hosts is not None and name not in self._hosts:
            raise _RefusedError(
                421, "this server does not answer to that Host; its operator may allow it (--allow-host)"
            )

    async def _while_loading(self, scope: Scope, send: Send) -> None:
        if scope["path"] == "/healthz":
            await _send(send, 200, {"status": "ok"}, {})
        else:
            raise _RefusedError(503, "the model is being loaded", {"retry-after": "2"})

    async def _read(self, headers: Headers, receive: Receive, body: "_Body") -> bytes:
        """The whole body. One that does not fit is read to its end, within reason, and thrown away."""
        limits = self._limits
        too_large = _RefusedError(
            413, f"the body is larger than {limits.max_body_bytes} bytes", {"connection": "close"}
        )
        if headers.get("expect", "").lower() == "100-continue" and _declared(headers) > limits.max_body_bytes:
            raise too_large  # its sender waits to be asked for the body
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
                        if size > limits.max_body_bytes + _UNREAD:
                            break
        except TimeoutError:
            detail = f"the body did not arrive within {limits.timeout:g} seconds"
            raise _RefusedError(408, detail, {"connection": "close"}) from None
        if refusal is not None:
            raise refusal
        return body.content()


class _HeldBytes:
    """The bytes of bodies that all requests hold together."""

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
        """Whether there was room for it."""
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
        """The whole body; its parts are given back, its bytes stay counted."""
        whole, self._parts = b"".join(self._parts), []
        return whole


def host_name(host: str) -> str:
    """The name in a Host header, without port, brackets and capitals."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _declared(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes: that the caller leaves."""
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

"""What every request passes, before and behind the application of the model.

It limits headers and body, adds the security headers of the response, and counts the request. While the model is being
loaded, it answers in its place.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert_tasks.serving.failures import PATHS, error_response
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.metrics import ServerMetrics

HEADER_BYTES = 2**14  # of a path and all headers
DISCONNECTED = 499  # the status that is counted for a client that did not wait
_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


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
        self.limits = limits
        self.metrics = metrics
        self.draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds to a request."""
        started = time.perf_counter()
        status = DISCONNECTED
        no_body = scope["method"] == "HEAD"  # the response to GET without its body (RFC 9110, 9.3.2)
        if no_body:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The headers of a response come last, so that the page can state a policy of its own.
                headers = dict(_HEADERS)
                if self.draining():
                    headers[b"connection"] = b"close"
                headers.update(message["headers"])
                message = {**message, "headers": list(headers.items())}
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
        """Checks a request and passes it on, or responds with a failure."""
        try:
            if _head_bytes(scope) > HEADER_BYTES:
                detail = f"the path and the headers are longer than {HEADER_BYTES} bytes"
                raise HTTPException(431, detail, {"connection": "close"})
            if self.app is None and scope["path"] == "/healthz":
                await JSONResponse({"status": "ok"})(scope, receive, send)
            elif self.app is None:
                raise HTTPException(503, "the model is being loaded", {"retry-after": "2"})
            else:
                body = await self._body(scope, receive)  # then only a disconnect is left to receive
                await self.app({**scope, "body": body}, receive, send)
        except HTTPException as error:
            await error_response(scope, error)(scope, receive, send)
        except asyncio.CancelledError:  # the grace period is over, and nothing follows
            stopped = HTTPException(503, "the server has stopped", {"connection": "close"})
            await error_response(scope, stopped)(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body.

        A body that is too large is read to its end and dropped, because a client that still sends would see a reset
        connection instead of the response.
        """
        most = self.limits.body_bytes
        seconds = self.limits.timeout
        body = bytearray()
        is_too_large = False
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

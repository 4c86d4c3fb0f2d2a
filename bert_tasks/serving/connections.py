"""Limits of the server, and connections: how many may be open, and how long each may keep the server waiting.

The connections enforce what uvicorn does not limit: clients that send nothing or half a header, clients that do not
read their response, and the number of file descriptors. ``gate.py`` limits the time for a body and its response;
uvicorn limits the time between two requests.
"""

import asyncio
import errno
import logging
import resource
import socket
import time
from dataclasses import dataclass, fields
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bert_tasks.data.problems import counted, is_or_are
from bert_tasks.errors import UsageError

_LARGEST = 2**53  # the largest integer that is exact in JSON; GET /model shows the limits


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request, and of all requests and connections together.

    Attributes:
        max_body_bytes: bytes of a body (otherwise 413). The rest of a larger body, up to 64 MiB, is read and discarded,
            so that its sender reads the response.
        max_rows: rows of a request (otherwise 422).
        max_characters: characters of one text, or of a row's words joined by spaces (otherwise 422).
        max_queue: requests that wait for the model (otherwise 429).
        timeout: seconds for a body to arrive (otherwise 408), then for its response (otherwise 503), then for the
            client to read it (otherwise the connection is closed).
        max_connections: open connections (otherwise 503); fewer if the limit of open files is lower.
        max_total_body_bytes: bytes of the bodies of all unanswered requests (otherwise 503).
        header_timeout: seconds for the first byte on a connection, and for the whole header of a request.
    """

    max_body_bytes: int = 2**20
    max_rows: int = 64
    max_characters: int = 20_000
    max_queue: int = 128
    timeout: float = 30.0
    max_connections: int = 512
    max_total_body_bytes: int = 2**25
    header_timeout: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if not given > 0:
                raise UsageError(f"{field.name} is {given}, expected more than 0")
            if isinstance(given, int) and given > _LARGEST:
                raise UsageError(f"{field.name} is larger than {_LARGEST}; choose a smaller number")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests are run together.

    Attributes:
        tokens: requests are added to a batch until it has so many tokens; 1 runs one request at a time. None: as many
            as prediction uses, 4,096 on a CPU and 16,384 on another device, fewer with a CRF. A larger request is run
            in several packed batches.
        max_wait: seconds that a request waits for others while the model is idle.
    """

    tokens: int | None = None
    max_wait: float = 0.005

    def __post_init__(self) -> None:
        if self.tokens is not None and not 1 <= self.tokens <= _LARGEST:
            raise UsageError(f"the number of tokens in a batch is outside 1 to {_LARGEST}")
        if not 0 <= self.max_wait <= 60:
            raise UsageError(f"max_wait is {self.max_wait} s, expected 0 to 60")


ACCEPTED_AT_ONCE = 16  # by asyncio in one iteration of the loop, before any of them can be refused
WAITING = 2048  # connections in the backlog of the kernel
_RESERVED = 128  # descriptors for the model's files, libraries, and connections that are being refused
_CHECK_SECONDS = 0.25
_MESSAGE_SECONDS = 60.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL = b'{"detail": "too many connections are open; try again in a moment"}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)
_LOGGER = logging.getLogger("bert_tasks.serving")


def allowed_connections(wanted: int) -> int:
    """``wanted``, or fewer if the limit of open files (``ulimit -n``) is too low for so many.

    Raises:
        UsageError: the limit is too low for any connection.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return wanted
    if files <= _RESERVED:
        needed = f"serving needs more than {_RESERVED}; raise the limit"
        raise UsageError(f"only {files} files may be open (ulimit -n), {needed}")
    return min(wanted, files - _RESERVED)


class Connections:
    """The open connections of a server.

    Args:
        limits: the timeouts of a connection.
        most: how many may be open; a further one gets a 503 and is closed.
    """

    def __init__(self, *, limits: Limits, most: int) -> None:
        self.limits, self.most = limits, most
        self.open: set[Connection] = set()
        self._last_warning = float("-inf")

    async def close_expired(self) -> None:
        """Closes connections that keep the server waiting for too long, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            for connection in [found for found in self.open if found.expired(now)]:
                connection.transport.abort()

    def warn(self, message: str) -> None:
        """Logs a message, at most one per minute: clients decide how often there is a reason."""
        now = time.monotonic()
        if now - self._last_warning >= _MESSAGE_SECONDS:
            self._last_warning = now
            _LOGGER.warning("%s; logged at most once in %g seconds", message, _MESSAGE_SECONDS)

    def handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler: a connection that cannot be accepted is one line, not a traceback."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
            self.warn(
                f"a connection could not be accepted: {error.strerror}; lower --max-connections or raise ulimit -n"
            )
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """One connection, which records since when it has kept the server waiting."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = connections
        self._request_since: float | None = None  # when the request was due whose header is incomplete
        self._response_since: float | None = None  # when unread response data was first seen

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        most = self._all.most
        if len(self._all.open) < most:
            self._all.open.add(self)
            self._request_since = time.monotonic()
            super().connection_made(transport)
        else:
            count = f"{counted(most, 'connection')} {is_or_are(most)}"
            self._all.warn(f"{count} open, which is the limit; others are refused (--max-connections)")
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._request_since = None
        elif self._request_since is None:
            self._request_since = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._all.open:  # it was not refused
            self._all.open.remove(self)
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """Waits for the next request of an idle client, whose response tells it to close.

        uvicorn would close at once, and the request that the client is sending would fail.
        """
        grace = self.config.timeout_graceful_shutdown
        seconds = self.timeout_keep_alive if grace is None else min(self.timeout_keep_alive, grace / 2)
        self.timeout_keep_alive = seconds  # type: ignore[assignment]  # uvicorn only passes it to call_later
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def expired(self, now: float) -> bool:
        """Whether the client is too late with its header, or with reading the response."""
        limits = self._all.limits
        if self._request_since is not None and now - self._request_since > limits.header_timeout:
            return True
        if not self.transport.get_write_buffer_size():
            self._response_since = None
        elif self._response_since is None:
            self._response_since = now
        return self._response_since is not None and now - self._response_since > limits.timeout


class Server(uvicorn.Server):
    """uvicorn's server with a long backlog that accepts few connections at a time: asyncio uses one number for both."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in [] if sockets is None else sockets:
            listener.listen(WAITING)

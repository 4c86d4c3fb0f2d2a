"""The server's process.

It loads the model while /healthz already answers, and stops on a signal. After a signal no new connection is accepted,
requests on open connections are answered with ``Connection: close``, and the process ends with code 0. So a balancer
can replace a server without losing a request.
"""

import asyncio
import ipaddress
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadOptions
from bert_tasks.errors import CheckpointError, NoHeadError, NotFiniteScoresError, UsageError, argument
from bert_tasks.inference.embedding import load_embedder
from bert_tasks.inference.precision import DType, default_device, logits_of
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.inputs import load_trained
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import predict_rows
from bert_tasks.serving.app import build_app, encoded
from bert_tasks.serving.batching import Batcher
from bert_tasks.serving.gate import HEADER_BYTES, Gate
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.listener import BACKLOG, ignore_new_connections
from bert_tasks.serving.metrics import ServerMetrics
from bert_tasks.serving.requests import example_rows, written_prediction
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.several import task_name

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_KEEP_ALIVE = 5  # seconds until an idle connection is closed
_HANDSHAKE = 0.2  # seconds that a connection may take that has begun when the server stops


class Server(uvicorn.Server):
    """uvicorn's server, which stops without resetting a connection.

    uvicorn would close the listener while connections wait to be accepted, and close idle connections unanswered,
    although their clients may be sending the next request.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts the connections that have begun, lets open ones send a last request, and stops."""
        if sockets is not None:
            for listener in sockets:
                ignore_new_connections(listener)
        await asyncio.sleep(_HANDSHAKE)  # meanwhile asyncio accepts all that waits
        for server in self.servers:
            server.close()
        seconds: float = _KEEP_ALIVE
        grace = self.config.timeout_graceful_shutdown
        if grace is not None:
            seconds = min(seconds, grace / 2)
        end = asyncio.get_running_loop().time() + seconds
        while self.server_state.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.1)
        await super().shutdown(sockets)


class Protocol(H11Protocol):
    """uvicorn's protocol, with status 431 instead of 400 for headers that are too long.

    It sees headers that have not ended within the limit. The gate sees those that arrived whole.
    """

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that cannot be read, and closes the connection."""
        received, _ = self.conn.trailing_data
        if len(received) <= HEADER_BYTES:
            super().send_400_response(msg)
            return
        status = b"HTTP/1.1 431 Request Header Fields Too Large"
        self.transport.write(status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()


def http_config(app: ASGIApp, *, connections: int, grace: float) -> uvicorn.Config:
    """Returns uvicorn's configuration.

    Its parser and event loop are the ones in pure Python, so that every installation behaves as tested.
    """
    seconds = None
    if isfinite(grace):
        seconds = max(1, round(grace))
    return uvicorn.Config(
        app,
        http=Protocol,
        loop="asyncio",
        backlog=BACKLOG,
        limit_concurrency=connections,
        timeout_keep_alive=_KEEP_ALIVE,
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=seconds,
    )


async def run_server(
    name: str,
    load: Callable[[], Mapping[str, tuple[AnyModel, ForwardFn]]],
    listener: socket.socket,
    *,
    hosts: Sequence[str],
    limits: Limits,
    batch_tokens: int | None,
    max_wait: float,
    grace: float,
    notify: Callable[[str], None],
) -> None:
    """Serves models until a signal. They are loaded on a thread while the server already responds.

    Args:
        name: The name of the model on the page and in responses.
        load: A function that loads the models and the functions that run their batches, by the names of adapters.
        listener: The socket.
        hosts: The names that a Host header may have.
        limits, batch_tokens, max_wait, grace, notify: As for ``serving.serve``.
    """
    gate = Gate(limits=limits, metrics=ServerMetrics(), draining=lambda: server.should_exit)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below this level it tells about each start and stop
    # A page of another site may let its own name point to this machine (DNS rebinding). A browser then takes the server
    # for a part of that site, but sends its name in the Host header.
    app = TrustedHostMiddleware(gate, allowed_hosts=hosts, www_redirect=False)
    server = Server(http_config(app, connections=limits.connections, grace=grace))
    with _signals_to(server):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        loader = ThreadPoolExecutor(1, "loader")  # asyncio would wait for its own executor at the end of the loop
        try:
            loading = asyncio.get_running_loop().run_in_executor(loader, load)
            both: set[asyncio.Future[Any]] = {serving, loading}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if server.should_exit or serving.done():  # a signal came first, and may have closed the listener
                if not loading.cancel():  # it is done, and its model is not used
                    loading.exception()  # otherwise asyncio would write a traceback
                return
            options: dict[str, Any] = {"batch_tokens": batch_tokens, "max_wait": max_wait, "max_queue": limits.queue}
            async with AsyncExitStack() as stack:
                served: dict[str, tuple[AnyModel, Batcher]] = {}
                for key, (model, run) in loading.result().items():
                    batcher = Batcher(model, run=run, observe=gate.metrics.batch, **options)
                    served[key] = model, await stack.enter_async_context(batcher)
                gate.app = build_app(served, gate, name=name)
                default, _ = next(iter(served.values()))
                notify(f"{task_name(default.tasks)} on {_url_of(listener)}  (SIGTERM or Ctrl-C stops)")
                await serving
        finally:
            server.should_exit = True
            loader.shutdown(wait=False)
            await serving
    notify(f"stopped after {counted(gate.metrics.answered, 'answered request')}")


def _url_of(listener: socket.socket) -> str:
    """Returns the address for a browser, in which that of IPv6 is in brackets."""
    host, port = listener.getsockname()[:2]
    if ":" in host:
        return f"http://[{host}]:{port}"
    return f"http://{host}:{port}"


def load_served(
    base: str | Path, adapters: Mapping[str, str | Path], **options: Any
) -> dict[str, tuple[AnyModel, ForwardFn]]:
    """Returns the base under the name "", if it has a trained head, and each adapter.

    Raises:
        CheckpointError, UsageError: As for ``load_warm``.
    """
    served: dict[str, tuple[AnyModel, ForwardFn]] = {}
    # A base that was only pre-trained answers nothing itself, but its adapters have heads.
    try:
        served[""] = load_warm(base, **options)
    except NoHeadError:
        if not adapters:
            raise
    for name, adapter in adapters.items():
        earlier = [model for model, _ in served.values()]
        served[name] = load_warm(base, adapter=adapter, earlier=earlier, **options)
    return served


def load_warm(
    model: str | Path,
    *,
    task: str | type[Task] | None,
    settings: Mapping[str, Any] | None,
    revision: str | None,
    dtype: DType,
    adapter: str | Path | None = None,
    earlier: Sequence[AnyModel] = (),
) -> tuple[AnyModel, ForwardFn]:
    """Returns the model and the warmed-up function that runs its batches.

    The model shares the memory of equal weights with the ``earlier`` models.

    Raises:
        CheckpointError: The model cannot be loaded, or its scores are not finite.
    """
    options: dict[str, Any] = {"settings": settings, "revision": revision}
    if task == Embedding.name:
        if adapter is not None:
            raise UsageError("an encoder that embeds texts is served without adapters")
        loaded: AnyModel = load_embedder(model, **options)
    else:
        try:
            loaded = load_trained(model, reading=ReadOptions(), task=task, adapter=adapter, **options)
        except NoHeadError as error:
            raise NoHeadError(f"{error}. To serve vectors of texts, use {argument('task', Embedding.name)}") from None
    loaded.to(default_device())
    for other in earlier:
        _share_weights(loaded, other)
    run = logits_of(loaded, dtype)
    rows = example_rows(loaded)
    # The first batches are slow, because libraries choose and compile what they run for each shape. One, a few and
    # many rows are common shapes.
    try:
        for batch in (rows[:1], rows, [*rows] * 8):
            predictions = predict_rows(loaded, batch, forward_fn=run)
            encoded([written_prediction(prediction) for prediction in predictions])
    except NotFiniteScoresError:
        folder = model if adapter is None else adapter
        reason = "its scores are not finite numbers, so it cannot be served"
        raise CheckpointError(f"{folder}: {reason}") from None
    return loaded, run


def host_names(host: str, bound: str, allowed: Sequence[str]) -> list[str]:
    """Returns the allowed names in a Host header, if ``host`` resolved to ``bound``.

    Raises:
        UsageError: One of the ``allowed`` names is not a host name.
    """
    for name in allowed:
        if not re.fullmatch(r"\*|(\*\.)?[^*]+", name):
            raise UsageError(f"{name!r} is not a host name. Write a name such as example.org or *.example.org")
    names = [*allowed]
    for name in (host, bound):
        if ":" in name:  # the Host header has an address of IPv6 in brackets
            name = f"[{name}]"
        names.append(name)
    if ipaddress.ip_address(bound).is_loopback:
        return [*LOOPBACK, *names]
    if not allowed:
        return ["*"]
    return names


@contextmanager
def _signals_to(server: uvicorn.Server) -> Iterator[None]:
    """Lets SIGTERM and SIGINT only stop the server.

    uvicorn installs its handlers late, and at its end raises the signals once more that it has received.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets only this one handle signals
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, server.handle_exit) for number in numbers}
    # Another handler must not be left behind, because the program may go on, such as a test.
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _share_weights(model: AnyModel, other: AnyModel) -> None:
    """Shares the memory of equal weights with another model on the same device."""
    weights = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        if name in weights and weights[name].shape == weight.shape and torch.equal(weights[name], weight):
            weight.data = weights[name].data

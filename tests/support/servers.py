"""Owns servers for tests: an application in this process, the same behind a real socket, and the console script."""

import asyncio
import copy
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from _pytest.mark import ParameterSet
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from bert_tasks.model.encoder_with_heads import EncoderWithHeads, ForwardFn
from bert_tasks.serving.app import build_app
from bert_tasks.serving.batching import Batcher
from bert_tasks.serving.gate import Gate
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.metrics import ServerMetrics
from bert_tasks.serving.server import LOOPBACK, http_config
from support.runs import CONSOLE, PATIENCE, Program

SLOW = Limits(timeout=PATIENCE)
# Examples whose task another example has, too. `make test` leaves them to `make test-slow`.
VARIANTS = ("windows", "regression", "token crf", "span v2", "pair regression")


def each_task(examples: Iterable[str]) -> list[ParameterSet]:
    """The names of examples as parameters of a test, of which the fast suite has one for each task."""
    return [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in examples]


@dataclass(kw_only=True)
class Application:
    """A loaded server without a process of its own. ``draining`` is what its readiness asks."""

    app: ASGIApp
    gate: Gate
    batcher: Batcher
    metrics: ServerMetrics
    client: httpx2.AsyncClient
    draining: list[bool] = field(default_factory=list)

    async def post(self, content: Any, path: str = "/predict") -> httpx2.Response:
        """Any content: json escapes what UTF-8 cannot say."""
        headers = {"content-type": "application/json"}
        return await self.client.post(path, content=json.dumps(content).encode(), headers=headers)


@asynccontextmanager
async def application(
    model: EncoderWithHeads,
    *,
    limits: Limits = SLOW,
    max_wait: float = 0.005,
    run: ForwardFn | None = None,
    columns: Mapping[str, str] | None = None,
) -> AsyncIterator[Application]:
    metrics, draining = ServerMetrics(), list[bool]()
    gate = Gate(limits=limits, metrics=metrics, draining=lambda: bool(draining))
    app = TrustedHostMiddleware(gate, allowed_hosts=LOOPBACK)
    async with AsyncExitStack() as stack:
        run = model if run is None else run
        batcher = Batcher(model, run=run, max_wait=max_wait, max_queue=limits.queue, observe=metrics.batch)
        await stack.enter_async_context(batcher)
        described = copy.copy(model)
        described.columns = model.columns if columns is None else columns
        gate.app = build_app({"": (described, batcher)}, gate, name="tests/model")
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        client = await stack.enter_async_context(httpx2.AsyncClient(transport=transport, base_url="http://localhost"))
        yield Application(app=app, gate=gate, batcher=batcher, metrics=metrics, client=client, draining=draining)


def visit(model: EncoderWithHeads, work: Callable[[Application], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """What ``work`` returns from a server that lives as long."""

    async def run() -> Any:
        async with application(model, **options) as served:
            return await work(served)

    return asyncio.run(run())


def posted(model: EncoderWithHeads, *contents: Any, path: str = "/predict", **options: Any) -> list[httpx2.Response]:
    """The responses to requests, one after the other. A content may be a pair of a path and a content."""

    async def ask(served: Application) -> list[httpx2.Response]:
        responses = []
        for content in contents:
            target, body = content if isinstance(content, tuple) else (path, content)
            responses.append(await served.post(body, target))
        return responses

    responses: list[httpx2.Response] = visit(model, ask, **options)
    return responses


def rounded(value: Any) -> Any:
    """Numbers to 4 digits: rows that run together are not the same to the last bit."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@contextmanager
def listening(models: Sequence[EncoderWithHeads], *, limits: Limits = SLOW) -> Iterator[list[str]]:
    """Each model behind a socket of its own, on a thread of this process; their addresses."""
    urls, servers, started = list[str](), list[uvicorn.Server](), threading.Event()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            tasks = []
            for model in models:
                opened = await stack.enter_async_context(application(model, limits=limits))
                listener = socket.create_server(("127.0.0.1", 0))
                urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
                config = http_config(opened.app, connections=limits.connections, grace=inf)
                servers.append(uvicorn.Server(config))
                tasks.append(asyncio.create_task(servers[-1].serve(sockets=[listener])))
            started.set()
            await asyncio.gather(*tasks)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield urls
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(PATIENCE)


class Serving:
    """``bert-tasks serve`` in a process of its own, on a free port."""

    def __init__(self, model: Path, *options: object, folder: Path) -> None:
        self.program = Program([*CONSOLE, "serve", model, "--port", "0", *options], folder=folder, HF_HUB_OFFLINE="1")
        self.program.until(lambda: " on http://" in self.program.out.read_text("utf-8"))
        match = re.search(r"http://\S+", self.program.out.read_text("utf-8"))
        assert match is not None
        self.url = match[0]

    def answered(self) -> int:
        """How many requests the server says, at its end, that it answered."""
        return int(self.program.out.read_text("utf-8").split("stopped after ")[1].split()[0])


def errors_of(response: httpx2.Response) -> dict[str, str]:
    """Path -> message of every error that an answer names."""
    detail = json.loads(response.content)["detail"]
    return {".".join(map(str, fault["loc"])): fault["msg"] for fault in detail}

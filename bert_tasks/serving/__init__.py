"""``serve`` answers ``POST /predict`` over HTTP and shows a page to try the model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.environment import check_libraries
from bert_tasks.errors import UsageError
from bert_tasks.inference.precision import DType
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.listener import bound_listener
from bert_tasks.serving.run_info import short_name
from bert_tasks.tasks.base import Task

__all__ = ["Limits", "serve"]


def serve(
    model: str | Path,
    *,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    batch_tokens: int | None = None,
    max_wait: float = 0.005,
    grace: float = 20.0,
    allowed_hosts: Sequence[str] = (),
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    notify: Callable[[str], None] = lambda message: None,
) -> None:
    """Serves a model until SIGTERM or SIGINT.

    Requests that were accepted before the signal are answered first. A thread that still loads the model or runs a
    batch at the end cannot be ended. Python waits for it at exit, but ``os._exit`` does not.

    Args:
        model: A folder, or a name on the hub. With adapters their base, which is served, too, if it has a trained head.
        adapters: The folder of the adapters for each name that requests choose (``TaskModel.from_pretrained``).
            Weights in float32 that adapters do not change are in memory once.
        host: The address to listen on.
        port: The port to listen on. 0 chooses a free one.
        limits: Limits of requests.
        batch_tokens: Requests are added to a batch until it has this number of tokens. 1 runs one request at a time.
            Default: the size of a batch in prediction.
        max_wait: Seconds that a request waits for others while the model is idle.
        grace: Seconds that running requests get after the signal.
        allowed_hosts: Names that the Host header may have in addition to the names of loopback, for example
            ``*.example.org``. On another address any name is accepted by default.
        task: ``embedding`` serves vectors of texts. Other tasks are as for ``inference.predict``.
        settings, revision, dtype: As for ``inference.predict``. The settings of ``embedding`` are arguments of
            ``Encoder.embed``.
        notify: Receives a message when the server is ready, and one when it has stopped.

    Raises:
        UsageError: A library of the ``serve`` extra is missing, or the address cannot be used.
        CheckpointError: The model cannot be loaded, or its scores are not finite.
    """
    check_libraries(("fastapi", "uvicorn", "prometheus_client"), extra="serve", purpose="serving")
    if "" in adapters:
        raise UsageError("the name of an adapter is empty. Name each adapter as requests choose it")
    if not 0 <= max_wait <= 60:
        raise UsageError(f"max_wait is {max_wait} s, expected 0 to 60")
    if not grace > 0:
        raise UsageError(f"grace is {grace} s, expected more than 0. Set inf to wait for every running request")
    from bert_tasks.serving.server import host_names, load_served, run_server  # it needs the serve extra

    # The address is taken before the model is loaded, so that one in use is found at once.
    with bound_listener(host, port) as listener:
        if limits is None:
            limits = Limits()
        serving = run_server(
            short_name(model),
            partial(load_served, model, adapters, task=task, settings=settings, revision=revision, dtype=dtype),
            listener,
            hosts=host_names(host, listener.getsockname()[0], allowed_hosts),
            limits=limits,
            batch_tokens=batch_tokens,
            max_wait=max_wait,
            grace=grace,
            notify=notify,
        )
        asyncio.run(serving)

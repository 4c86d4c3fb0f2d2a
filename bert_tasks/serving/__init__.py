"""A trained model behind HTTP: ``serve`` answers ``POST /predict`` and shows a page to try the model.

The modules below import the libraries of the ``serve`` extra; this one checks first that they are installed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.environment import check_libraries
from bert_tasks.serving.limits import Batching, Limits

if TYPE_CHECKING:
    from bert_tasks.model.precision import DType
    from bert_tasks.tasks.base import Task

__all__ = ["Batching", "Limits", "serve"]

_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    batching: Batching | None = None,
    grace: float = 20.0,
    allowed_hosts: Sequence[str] = (),
    task: "str | type[Task] | None" = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: "DType" = "float32",
    notify: Callable[[str], None] = lambda message: None,
) -> None:
    """Serves a model until SIGTERM or SIGINT. Requests that were accepted before the signal are answered first.

    A thread that still loads the model or runs a batch at the end cannot be ended. Python waits for it at exit, but
    ``os._exit`` does not.

    Args:
        model: a folder, or a name on the hub.
        host: the address to listen on.
        port: the port to listen on; 0 chooses a free one, which ``notify`` states.
        limits: limits of requests.
        batching: how requests are run together.
        grace: seconds that running requests get after the signal.
        allowed_hosts: names that the Host header may have in addition to the names of loopback; ``*.example.org``
            accepts each name below it. On another address any name is accepted if none is given.
        task, settings, revision, dtype: as in ``inference.predict``.
        notify: receives one message when the server is ready and one when it has stopped.

    Raises:
        UsageError: the ``serve`` extra is not installed, or the address cannot be used; both are found before the model
            is loaded.
        CheckpointError: the model cannot be loaded, or its scores are not finite.
    """
    check_libraries(_LIBRARIES, extra="serve", purpose="serving")
    if dtype == "int8":
        from bert_tasks.export.graph import LIBRARIES

        check_libraries(LIBRARIES, extra="export", purpose="ONNX graphs and int8")
    from bert_tasks.serving.server import Address, bound_listener, load_warm, run_server

    name = "/".join(Path(model).parts[-2:])  # the page need not show where a folder is
    load = partial(load_warm, model, task=task, settings=settings, revision=revision, dtype=dtype)
    address = Address(host=host, port=port, allowed_hosts=tuple(allowed_hosts), grace=grace)
    limits = Limits() if limits is None else limits
    batching = Batching() if batching is None else batching
    with bound_listener(address) as listener:
        asyncio.run(run_server(name, load, address, listener, limits=limits, batching=batching, notify=notify))

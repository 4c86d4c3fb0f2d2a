"""A trained model behind HTTP: ``serve`` answers POST /predict and shows a page to try the model.

The libraries of the ``serve`` extra are imported below this module only, after it has looked for them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.serving.connections import Batching, Limits

if TYPE_CHECKING:
    from bert_tasks.model.onnx import DType
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
    tell: Callable[[str], None] = lambda text: None,
) -> bool:
    """Serves a model until SIGTERM or SIGINT; requests that were taken in are answered first.

    Args:
        port: 0 takes a free one; ``tell`` is told which.
        grace: seconds that running requests get after the signal.
        allowed_hosts: names that the Host header may bear besides those of loopback; on another address any name may
            stand there if none is given.
        task, settings, revision, dtype: as in ``inference.predict``.
        tell: gets one line when predictions are answered, and one at the end.

    Returns:
        Whether it was stopped while the model was still being loaded. A thread goes on with that, and Python waits for
        it at its end; ``os._exit`` does not.

    Raises:
        UsageError: the extra is not installed, or the address cannot be had; both before the model is loaded.
        CheckpointError: the model cannot be loaded, or gives scores that are not finite.
    """
    from bert_tasks.model.onnx import check_libraries

    check_libraries(_LIBRARIES, extra="serve", purpose="serving")
    if dtype == "int8":
        check_libraries()
    from bert_tasks.serving.server import Address, Wanted, run_server

    wanted = Wanted(model=model, task=task, settings=settings, revision=revision, dtype=dtype)
    address = Address(host=host, port=port, allowed_hosts=tuple(allowed_hosts), grace=grace)
    limits = Limits() if limits is None else limits
    batching = Batching() if batching is None else batching
    return run_server(wanted, address, limits=limits, batching=batching, tell=tell)

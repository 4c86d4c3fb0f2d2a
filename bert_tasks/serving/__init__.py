"""A trained model behind HTTP: ``serve`` answers POST /predict and shows a page to try the model.

The libraries of the ``serve`` extra are imported below this module only, after it has looked for them.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.errors import UsageError
from bert_tasks.serving.limits import Batching, Limits

if TYPE_CHECKING:
    from bert_tasks.model.onnx import DType
    from bert_tasks.tasks.base import Task

__all__ = ["Batching", "Limits", "serve"]

_LIBRARIES = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "export": ("onnx", "onnxruntime", "onnxscript")}


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
) -> None:
    """Serves a model until SIGTERM or SIGINT; requests that were taken in are answered first.

    Args:
        port: 0 takes a free one; ``tell`` is told which.
        grace: seconds that running requests get after the signal.
        allowed_hosts: names that the Host header may bear besides those of loopback; on another address any name may
            stand there if none is given.
        task, settings, revision, dtype: as in ``inference.predict``.
        tell: gets one line when predictions are answered, and one at the end.

    Raises:
        UsageError: the extra is not installed, or the address cannot be had; both before the model is loaded.
        CheckpointError: the model cannot be loaded, or gives scores that are not finite.
    """
    _check_extra("serve", "serving")
    if dtype == "int8":
        _check_extra("export", "int8")
    from bert_tasks.serving.server import Address, Wanted, run_server

    wanted = Wanted(model=model, task=task, settings=settings, revision=revision, dtype=dtype)
    address = Address(host=host, port=port, allowed_hosts=tuple(allowed_hosts), grace=grace)
    limits = Limits() if limits is None else limits
    batching = Batching() if batching is None else batching
    run_server(wanted, address, limits=limits, batching=batching, tell=tell)


def _check_extra(extra: str, what: str) -> None:
    missing = [name for name in _LIBRARIES[extra] if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing, needed for {what}: pip install 'bert-tasks[{extra}]'")

"""The processes of a job: how they find each other, share what the first one makes, and end.

Owns the one place that makes an accelerator. Must not know what the processes work on.
"""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from bert_tasks.errors import BertTasksError, CheckpointError, ClosedPipeError, DataError, UsageError

Result = TypeVar("Result")

# What accelerate may be configured to do that this package neither wants nor tests.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")


def make_accelerator(mixed_precision: str = "no", *, timeout: float | None = None) -> Accelerator:
    """The one place that decides about devices and processes.

    Without a GPU ``cpu=True`` is needed: a plain ``Accelerator()`` started by torchrun would run every process alone.
    ``timeout``: seconds that processes wait for each other; the first call decides. None: torch's 30 minutes (10 on
    GPUs).

    Raises:
        UsageError: the launcher started more processes than take part, fp16 without a GPU, or an accelerate
            configuration that would change the training (accumulation, FSDP, DeepSpeed, ...).
    """
    cuda = torch.cuda.is_available()
    if mixed_precision == "fp16" and not cuda:
        raise UsageError("mixed_precision = 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'")
    _forget_precision(mixed_precision)
    group = [] if timeout is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))]
    accelerator = Accelerator(cpu=not cuda, mixed_precision=mixed_precision, kwargs_handlers=group)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UsageError(
            f"the launcher started {launched} processes, but {accelerator.num_processes} take part; "
            "start with: torchrun --nproc_per_node N -m bert_tasks ..."
        )
    if launched > 1:
        atexit.unregister(leave_process_group)
        atexit.register(leave_process_group)
    kind = accelerator.distributed_type.name
    if accelerator.gradient_accumulation_steps != 1 or kind not in _PLAIN:
        raise UsageError(
            f"accelerate is configured for {kind} with {accelerator.gradient_accumulation_steps} accumulation steps; "
            "change the configuration: here optim.micro_batch_tokens decides about accumulation, on plain processes"
        )
    return accelerator


def leave_process_group() -> None:
    """Ends the communication threads while Python still runs: one that asks for the interpreter later aborts it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_first_process() -> bool:
    """Whether this is the first of the processes that work together, or the only one."""
    return bool(PartialState(cpu=not torch.cuda.is_available()).is_main_process)


def broadcast_from_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """What the first process makes, on every process.

    Raises:
        BertTasksError: what the first process raised, on every process: none is left waiting.
    """
    outcome: list[tuple[Result | None, tuple[int, str] | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except BertTasksError as error:
            if accelerator.num_processes == 1:
                raise
            outcome = [(None, (error.exit_code, str(error)))]
    broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        code, text = failure
        kinds = (UsageError, DataError, CheckpointError, ClosedPipeError)
        told = next((kind for kind in kinds if kind.exit_code == code), BertTasksError)(text)
        told.collective = True
        raise told
    return cast("Result", result)


def main_process_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Runs work on the first process, then on the others, which find its results in the cache.

    Raises:
        BertTasksError: see ``broadcast_from_main``.
    """
    own: list[Result] = []
    broadcast_from_main(accelerator, lambda: own.append(work()))
    return own[0] if own else work()


def _forget_precision(wanted: str) -> None:
    """Lets a process train in one precision and go on in another: accelerate keeps its first choice for good.

    Clears the state that all accelerators of the process share; it has no public way. The process group, which
    accelerate holds elsewhere, stays.
    """
    stored = AcceleratorState._shared_state
    if stored.get("_mixed_precision", wanted) != wanted:
        stored.clear()

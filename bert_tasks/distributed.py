"""The processes of a run, their start, shared results, agreement, cores and end."""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object

from bert_tasks.errors import BertTasksError, CheckpointError, ClosedPipeError, DataError, UsageError
from bert_tasks.storage import os_error_message

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])

# The types of processes that are tested. accelerate may be configured for others.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")
_LONGEST_TIMEOUT = 10**9  # in seconds, because torch cannot represent much more
_LONGEST_VALUE = 80  # characters of a value in a message


def make_accelerator(mixed_precision: str = "no", *, timeout: float | None = None) -> Accelerator:
    """Makes the accelerator, on a GPU if possible. The first call sets the timeout.

    Args:
        mixed_precision: Number format of the matrix products.
        timeout: Seconds that processes wait for each other. Default: torch's 30 minutes (10 on GPUs).

    Raises:
        UsageError: The timeout, the launcher, the precision or the configuration of accelerate cannot be used.
    """
    cuda = torch.cuda.is_available()
    if mixed_precision == "fp16" and not cuda:
        raise UsageError("mixed_precision = 'fp16' needs a GPU. On a CPU use 'bf16' or 'no'")
    stored = AcceleratorState._shared_state
    if stored.get("_mixed_precision", mixed_precision) != mixed_precision:
        # Accelerate keeps its first choice and has no public way to change it. The process group is stored elsewhere.
        stored.clear()
    if timeout is not None and not 1 <= timeout <= _LONGEST_TIMEOUT:
        raise UsageError(f"a timeout of {timeout:g} s, expected 1 to {_LONGEST_TIMEOUT:,} seconds (--dist-timeout)")
    group = [] if timeout is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))]
    # Without cpu=True every process that torchrun starts would run alone.
    accelerator = Accelerator(cpu=not cuda, mixed_precision=mixed_precision, kwargs_handlers=group)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UsageError(
            f"the launcher started {launched} processes, but accelerate uses {accelerator.num_processes}. "
            "Start with `torchrun --nproc_per_node N -m bert_tasks ...`"
        )
    if launched > 1:
        atexit.unregister(leave_process_group)
        atexit.register(leave_process_group)
    mode, steps = accelerator.distributed_type.name, accelerator.gradient_accumulation_steps
    if steps != 1 or mode not in _PLAIN:
        raise UsageError(
            f"accelerate is configured for {mode} with gradient_accumulation_steps = {steps}. "
            "Configure plain processes without accumulation, because optim.micro_batch_tokens decides about it"
        )
    return accelerator


def leave_process_group() -> None:
    """Ends communication threads, which would abort Python if they needed it later."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_main_process() -> bool:
    """Returns True on the main process of several, or on the only process."""
    return bool(PartialState(cpu=not torch.cuda.is_available()).is_main_process)


def broadcast_from_main(
    accelerator: Accelerator, work: Callable[..., Result], *arguments: Any, **options: Any
) -> Result:
    """Calls a function on the main process and shares its result or error.

    An OSError becomes a UsageError that names the file.
    """
    result, error = None, None
    if accelerator.is_main_process:
        try:
            result = work(*arguments, **options)
        except (BertTasksError, OSError) as raised:
            error = raised
    return cast("Result", _share(accelerator, result, error))


def on_main_process(method: Method) -> Method:
    """Decorates a method to run on the main process and return its result on all."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return broadcast_from_main(self.accelerator, method, self, *arguments, **options)

    return cast("Method", call)


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Runs the block on the main process first, which fills the cache for the others."""
    error: BertTasksError | OSError | None = None
    if not accelerator.is_main_process:
        _share(accelerator, None, None)
    try:
        yield
    except (BertTasksError, OSError) as raised:
        if not accelerator.is_main_process:
            raise
        error = raised
    if accelerator.is_main_process:
        _share(accelerator, None, error)


def _share(accelerator: Accelerator, result: Result | None, error: BertTasksError | OSError | None) -> Result | None:
    """Returns the main process's result, or raises its error, on every process."""
    if error is not None and accelerator.num_processes == 1:
        raise error
    failure = None
    if error is not None:
        shared = error if isinstance(error, BertTasksError) else UsageError(os_error_message(error))
        failure = (shared.exit_code, str(shared))
    outcome: list[tuple[Result | None, tuple[int, str] | None]] = [(result, failure)]
    broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        code, text = failure
        kinds = (UsageError, DataError, CheckpointError, ClosedPipeError)
        copy = next((error_type for error_type in kinds if error_type.exit_code == code), BertTasksError)(text)
        copy.collective = True
        raise copy
    return result


def check_agreement(values: Mapping[str, str], *, found_in_data: tuple[str, ...]) -> None:
    """Compares labels, settings, rows, tokenizer and the like over all processes.

    Different processes would train different models without an error, or wait for each other forever.

    Args:
        values: Value of this process by name.
        found_in_data: Prefixes of the names of values that follow from the rows.

    Raises:
        DataError: Only values that follow from the rows differ.
        UsageError: Other values differ.
    """
    gathered: list[Mapping[str, str]] = gather_object([values])
    differing = disagreements(gathered)
    if differing:
        error_type = DataError if all(name.startswith(found_in_data) for name in differing) else UsageError
        error = error_type(
            f"the {len(gathered)} processes of this run disagree on {', '.join(differing.values())}. "
            "Start all processes with the same recipe, the same arguments and the same files"
        )
        error.collective = True
        raise error


def disagreements(gathered: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the processes' values in words for each name that differs."""
    names = dict.fromkeys(name for values in gathered for name in values)
    differing: dict[str, str] = {}
    for name in names:
        processes: dict[str, list[str]] = {}
        for number, values in enumerate(gathered):
            processes.setdefault(values.get(name, "not set"), []).append(str(number))
        if len(processes) > 1:
            shown = (
                f"{value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'} "
                f"on process{'es' if len(on) > 1 else ''} {', '.join(on)}"
                for value, on in processes.items()
            )
            differing[name] = f"{name} ({', but '.join(shown)})"
    return differing


class StopSignals:
    """The signal that asked to stop, in ``received``, or None."""

    received: signal.Signals | None = None


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Stores a first SIGTERM or SIGINT (main thread only). A second ends the process."""
    signals, before = StopSignals(), {}

    def receive(number: int, frame: FrameType | None) -> None:
        if signals.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signals.received = signal.Signals(number)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def thread_hint(threads: int, processes: int, cores: float) -> str | None:
    """Returns a hint if processes have more threads than ``cores``, which is slow."""
    if threads * processes <= cores:
        return None
    share = f"{processes} x {threads} threads share {cores:g} cores"
    if threads == 1:
        return f"{share}, which slows training down. Start at most {int(cores)} process{'es' if cores >= 2 else ''}"
    variable = f"OMP_NUM_THREADS={max(1, int(cores) // processes)}"
    return f"{share}, which can slow training down many times. Set the environment variable {variable}"


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Returns the cores that this process may use, in a container perhaps a fraction."""
    cores = os.cpu_count() if not hasattr(os, "sched_getaffinity") else len(os.sched_getaffinity(0))
    limits = [1.0 if cores is None else float(cores)]
    with suppress(OSError, ValueError):  # no quota: the first word is "max"
        microseconds, period = quota.read_text("utf-8").split()
        limits.append(int(microseconds) / int(period))
    return max(1.0, min(limits))

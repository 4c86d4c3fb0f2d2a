"""The processes of a run, their start, shared results, agreement, cores and end.

Every process executes the same program. The main process, whose rank is 0, reads and writes files and shares the
results with the others. Two rules keep the processes together. Each of them has to take part in every exchange, or the
others wait until the timeout. And an error of the main process has to reach all of them, or they wait for results that
never come.
"""

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
from accelerate.utils import InitProcessGroupKwargs, KwargsHandler, broadcast_object_list, gather_object

from bert_tasks.errors import BertTasksError, CheckpointError, ClosedPipeError, DataError, UsageError
from bert_tasks.storage import os_error_message

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])

# The types of processes that are tested. accelerate may be configured for others, such as DeepSpeed.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")
_LONGEST_TIMEOUT = 10**9  # in seconds, because torch cannot represent much more
_LONGEST_VALUE = 80  # the most characters of a value that a message shows


def make_accelerator(mixed_precision: str = "no", *, timeout: float | None = None) -> Accelerator:
    """Makes the accelerator, on a GPU if there is one. Only the first call of a process can set the timeout.

    Args:
        mixed_precision: Number format of the matrix products, "no", "bf16" or "fp16".
        timeout: Seconds that processes wait for each other. Default: torch's 30 minutes (10 on GPUs).

    Raises:
        UsageError: The timeout, the launcher, the precision or the configuration of accelerate cannot be used.
    """
    cuda = torch.cuda.is_available()
    if mixed_precision == "fp16" and not cuda:
        raise UsageError("mixed_precision = 'fp16' needs a GPU. On a CPU use 'bf16' or 'no'")
    stored = AcceleratorState._shared_state
    if stored.get("_mixed_precision", mixed_precision) != mixed_precision:
        # Accelerate keeps its first choice and has no public way to change it. The process group is stored elsewhere,
        # so clearing the state does not disturb it.
        stored.clear()
    if timeout is not None and not 1 <= timeout <= _LONGEST_TIMEOUT:
        raise UsageError(f"a timeout of {timeout:g} s, expected 1 to {_LONGEST_TIMEOUT:,} seconds (--dist-timeout)")
    group: list[KwargsHandler] = []
    if timeout is not None:
        group.append(InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)))
    # Without cpu=True every process that torchrun starts would run alone.
    accelerator = Accelerator(cpu=not cuda, mixed_precision=mixed_precision, kwargs_handlers=group)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UsageError(
            f"the launcher started {launched} processes, but accelerate uses {accelerator.num_processes}. "
            "Start with `torchrun --nproc_per_node N -m bert_tasks ...`"
        )
    if launched > 1:
        atexit.unregister(leave_process_group)  # of an earlier call
        atexit.register(leave_process_group)
    mode, steps = accelerator.distributed_type.name, accelerator.gradient_accumulation_steps
    if steps != 1 or mode not in _PLAIN:
        raise UsageError(
            f"accelerate is configured for {mode} with gradient_accumulation_steps = {steps}. "
            "Configure plain processes without accumulation, because optim.micro_batch_tokens decides about it"
        )
    return accelerator


def leave_process_group() -> None:
    """Ends the threads of communication, which would abort the process if they ran while Python shuts down."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_main_process() -> bool:
    """Returns True on the main process of several, or on the only process."""
    return bool(PartialState(cpu=not torch.cuda.is_available()).is_main_process)


def broadcast_from_main(
    accelerator: Accelerator, work: Callable[..., Result], *arguments: Any, **options: Any
) -> Result:
    """Calls a function on the main process and shares its result or error with all processes.

    All processes have to call it. An OSError becomes a UsageError that names the file. The result is pickled for the
    others, so it should be small.
    """
    result, error = None, None
    if accelerator.is_main_process:
        try:
            result = work(*arguments, **options)
        except (BertTasksError, OSError) as raised:
            error = raised
    return cast("Result", _share(accelerator, result, error))


def on_main_process(method: Method) -> Method:
    """Decorates a method to run on the main process and return its result on all processes.

    The object needs an attribute ``accelerator``.
    """

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return broadcast_from_main(self.accelerator, method, self, *arguments, **options)

    return cast("Method", call)


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Runs the block on the main process first, which fills the cache that the others then read.

    If it fails there, all processes raise the error, and the others do not run the block.
    """
    error: BertTasksError | OSError | None = None
    if not accelerator.is_main_process:
        _share(accelerator, None, None)  # which waits for the main process
    try:
        yield
    except (BertTasksError, OSError) as raised:
        if not accelerator.is_main_process:
            raise
        error = raised
    if accelerator.is_main_process:
        _share(accelerator, None, error)


def _share(accelerator: Accelerator, result: Result | None, error: BertTasksError | OSError | None) -> Result | None:
    """Returns the result of the main process, or raises its error, on every process.

    Errors are sent as their exit code and text, because an exception may hold what cannot be pickled.
    """
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
        error_type: type[BertTasksError] = BertTasksError
        for candidate in (UsageError, DataError, CheckpointError, ClosedPipeError):
            if candidate.exit_code == code:
                error_type = candidate
                break
        copy = error_type(text)
        copy.collective = True
        raise copy
    return result


def check_agreement(values: Mapping[str, str], *, found_in_data: tuple[str, ...]) -> None:
    """Compares labels, settings, rows, tokenizer and the like over all processes.

    Processes with different ones would train different models without an error, or wait for each other forever.

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
        error_type: type[BertTasksError] = UsageError
        if all(name.startswith(found_in_data) for name in differing):
            error_type = DataError
        error = error_type(
            f"the {len(gathered)} processes of this run disagree on {', '.join(differing.values())}. "
            "Start all processes with the same recipe, the same arguments and the same files"
        )
        error.collective = True
        raise error


def disagreements(gathered: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the values of the processes in words for each name under which they differ."""
    names: dict[str, None] = {}
    for values in gathered:
        names |= dict.fromkeys(values)
    differing: dict[str, str] = {}
    for name in names:
        processes: dict[str, list[str]] = {}  # the numbers of the processes that have a value
        for number, values in enumerate(gathered):
            processes.setdefault(values.get(name, "not set"), []).append(str(number))
        if len(processes) == 1:
            continue
        parts: list[str] = []
        for value, numbers in processes.items():
            if len(value) > _LONGEST_VALUE:
                value = value[: _LONGEST_VALUE - 3] + "..."
            word = "processes" if len(numbers) > 1 else "process"
            parts.append(f"{value} on {word} {', '.join(numbers)}")
        differing[name] = f"{name} ({', but '.join(parts)})"
    return differing


class StopSignals:
    """Holds the signal that asked the process to stop as ``received``, which is None before."""

    received: signal.Signals | None = None


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Stores a first SIGTERM or SIGINT instead of ending the process, which a second one does.

    So a run can save itself when a scheduler, which sends SIGTERM some time before SIGKILL, or a user stops it. Python
    lets only the main thread handle signals, so in another thread the block just runs.
    """
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
    """Returns a hint if the processes have more threads than ``cores``, or None.

    The threads of a matrix product wait for each other, so one that has no core delays all of them.
    """
    if threads * processes <= cores:
        return None
    share = f"{processes} x {threads} threads share {cores:g} cores"
    if threads == 1:
        word = "processes" if cores >= 2 else "process"
        return f"{share}, which slows training down. Start at most {int(cores)} {word}"
    variable = f"OMP_NUM_THREADS={max(1, int(cores) // processes)}"
    return f"{share}, which can slow training down many times. Set the environment variable {variable}"


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Returns the number of cores that this process may use, in a container perhaps a fraction of one more.

    ``quota`` is the file in which Linux keeps the limit of a container (cgroup v2): microseconds of computing time in
    each period. ``os.cpu_count`` does not know it and returns the cores of the whole machine.
    """
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        cores = len(os.sched_getaffinity(0))
    limits = [1.0 if cores is None else float(cores)]
    with suppress(OSError, ValueError):  # without a quota the first word is "max"
        microseconds, period = quota.read_text("utf-8").split()
        limits.append(int(microseconds) / int(period))
    return max(1.0, min(limits))

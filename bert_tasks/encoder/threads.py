"""Batches that are computed at the same time on a CPU: in two Python threads, each with half of torch's threads.

When one batch has all of torch's threads, they wait for each other at the end of every operation, and what is not
divided (drawing random bits, compiling a product for a new shape, Python itself) uses one of them. Two batches wait for
each other at their end only.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from itertools import chain, islice
from typing import TypeVar

import torch

_WORKERS = 2

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_batches(device: torch.device) -> int:
    """How many batches are computed at the same time: 2 on a CPU where torch's threads can be divided, else 1."""
    return _WORKERS if device.type == "cpu" and torch.get_num_threads() % _WORKERS == 0 else 1


def map_batches(
    function: Callable[[Item], Result], batches: Iterable[Item], *, device: torch.device
) -> Generator[Result, None, None]:
    """``function`` of each batch, in their order; several at the same time where ``parallel_batches`` says so.

    Threads know the context variables of the caller, but not torch's modes (inference, autocast), which ``function``
    sets. A batch that has no other beside it gets all of torch's threads.

    Args:
        batches: read as they are needed, a few ahead.
        device: where ``function`` computes.

    Raises:
        Exception: what ``function`` raises, after the batches that have begun.
    """
    if parallel_batches(device) == 1:
        yield from map(function, batches)
        return
    remaining = iter(batches)
    first = list(islice(remaining, 2))
    if len(first) < 2:
        yield from map(function, first)
        return
    threads = torch.get_num_threads()
    pool = _pool(os.getpid(), threads // _WORKERS)
    pending: deque[Future[Result]] = deque()
    try:
        for batch in chain(first, remaining):
            pending.append(pool.submit(copy_context().run, function, batch))
            if len(pending) == 2 * _WORKERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
        torch.set_num_threads(threads)  # a worker that has begun meanwhile has changed what later threads begin with


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The workers of a process, each with so many threads of torch.

    They stay, because oneDNN keeps for each thread what it has prepared. A process that was forked has none of them.
    """
    return ThreadPoolExecutor(_WORKERS, "bert_tasks", initializer=_begin, initargs=(threads,))


def _begin(threads: int) -> None:
    torch.get_num_threads()  # first, because the first use in a thread sets the number that all threads begin with
    torch.set_num_threads(threads)

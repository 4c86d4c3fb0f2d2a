"""Batches that are computed at the same time: their order, their threads, and what becomes of errors."""

import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest
import torch

from bert_tasks.encoder import cpu
from bert_tasks.encoder.cpu import map_batches

CPU = torch.device("cpu")
NAME: ContextVar[str] = ContextVar("NAME", default="none")


@pytest.fixture
def four_threads() -> Iterator[None]:
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_results_come_in_order(two_threads: None, count: int) -> None:
    def slow_at_first(number: int) -> int:
        if number % 7 == 0:
            threading.Event().wait(0.01)
        return number * number

    assert list(map_batches(slow_at_first, range(count), device=CPU)) == [number * number for number in range(count)]


def test_two_batches_are_computed_at_the_same_time_with_half_of_the_threads(four_threads: None) -> None:
    both = threading.Barrier(2, timeout=60)  # broken unless two batches wait for each other

    def compute(_: int) -> tuple[int, str]:
        both.wait()
        return torch.get_num_threads(), threading.current_thread().name

    results = list(map_batches(compute, range(4), device=CPU))
    assert [count for count, _ in results] == [2] * 4
    assert threading.current_thread().name not in {name for _, name in results}
    assert torch.get_num_threads() == 4


def test_later_threads_begin_with_all_of_torchs_threads(four_threads: None) -> None:
    cpu._pool.cache_clear()  # so that the workers begin now
    list(map_batches(torch.neg, torch.zeros(4).unbind(), device=CPU))
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [4]


def test_a_single_batch_has_all_threads(two_threads: None) -> None:
    (result,) = map_batches(lambda _: (torch.get_num_threads(), threading.current_thread()), [0], device=CPU)
    assert result == (2, threading.current_thread())


@pytest.mark.parametrize(("count", "device"), [(1, "cpu"), (3, "cpu"), (2, "meta"), (2, "cuda")])
def test_threads_that_cannot_be_divided_compute_one_batch_after_the_other(
    two_threads: None, count: int, device: str
) -> None:
    torch.set_num_threads(count)
    used = {*map_batches(lambda _: threading.current_thread(), range(3), device=torch.device(device))}
    assert used == {threading.current_thread()}


def test_batches_are_read_a_few_ahead(two_threads: None) -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    results = map_batches(lambda number: number, numbers(), device=CPU)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert len(read) <= 14
    results.close()
    assert len(read) <= 14


def test_an_error_is_raised_where_its_result_would_be(two_threads: None) -> None:
    done: list[int] = []

    def fails_at_5(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        done.append(number)
        return number

    results = map_batches(fails_at_5, range(1000), device=CPU)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)
    after = len(done)
    assert after < 20, "batches after the error were computed"
    assert torch.get_num_threads() == 2
    assert list(map_batches(int, range(3), device=CPU)) == [0, 1, 2], "the threads are used again"
    assert len(done) == after


def test_an_error_while_batches_are_read_is_raised(two_threads: None) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        list(map_batches(int, numbers(), device=CPU))


def test_threads_know_the_context_variables_of_the_caller(two_threads: None) -> None:
    token = NAME.set("mine")
    try:
        assert list(map_batches(lambda _: NAME.get(), range(4), device=CPU)) == ["mine"] * 4
    finally:
        NAME.reset(token)
    assert list(map_batches(lambda _: NAME.get(), range(4), device=CPU)) == ["none"] * 4


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_was_forked_has_its_own_threads(two_threads: None) -> None:
    list(map_batches(int, range(4), device=CPU))
    child = os.fork()
    if child == 0:
        numbers = list(map_batches(int, range(4), device=CPU))
        os._exit(0 if numbers == [0, 1, 2, 3] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_worker_keeps_its_threads_whatever_is_set_before_it_computes(four_threads: None) -> None:
    """torch sets the number of a thread when that first uses it."""
    has_begun, is_reset, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        cpu._begin(2)
        has_begun.set()
        assert is_reset.wait(60)
        torch.ones(300, 300).sum(0)
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=work)
    worker.start()
    assert has_begun.wait(60)
    torch.set_num_threads(4)
    is_reset.set()
    worker.join()
    assert seen == [2]

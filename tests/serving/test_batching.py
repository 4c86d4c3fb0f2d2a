"""Dynamic batching: who runs with whom, and that everybody gets his own answers whatever others do."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.model import windows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.serving import batching
from bert_tasks.serving.batching import Batcher, QueueFullError
from support.runs import PATIENCE
from support.servers import SLOW, application, each_task
from support.task_contract import numbers, unlabelled
from support.task_examples import EXAMPLES

ModelOf = Callable[[str], TaskModel]
ROW: Row = {"text": "is this seat free"}


def same(left: Sequence[Prediction], right: Sequence[Prediction]) -> bool:
    """Equal but for float32's noise: rows that run together are not the same to the last bit."""
    return len(left) == len(right) and numbers(left) == pytest.approx(numbers(right), abs=1e-4)


class Gauge:
    """Runs a model's batches, holding them while ``held``; ``batches`` counts the sequences of each."""

    def __init__(self, model: TaskModel) -> None:
        self.model, self.free, self.entered = model, threading.Event(), threading.Event()
        self.batches: list[int] = []
        self.free.set()

    def run(self, batch: PackedBatch) -> Tensor:
        self.batches.append(len(batch.layout.lengths))
        self.entered.set()
        assert self.free.wait(PATIENCE)
        return self.model(batch)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.free.clear()
        try:
            yield
        finally:
            self.free.set()


def batcher(gauge: Gauge, **options: Any) -> Batcher:
    return Batcher(gauge.model, run=gauge.run, **{"max_wait": 0.3, "max_queue": 1000, **options})


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Lets pytest run a test that is a coroutine."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("case", each_task(EXAMPLES))
def test_requests_that_run_together_get_their_own_answers(model_of: ModelOf, case: str) -> None:
    model, rows = model_of(case), unlabelled(EXAMPLES[case])
    requests = [rows[start : start + 1 + start % 3] for start in range(len(rows))] * 2
    batches: list[tuple[int, int]] = []

    async def ask() -> Any:
        async with batcher(Gauge(model), observe=lambda *sizes: batches.append(sizes)) as opened:
            return await asyncio.gather(*map(opened.answer, requests))

    for request, answer in zip(requests, asyncio.run(ask()), strict=True):
        assert same(answer, model.predict(request))
    assert max(requests for requests, _ in batches) > 1
    assert sum(count for _, count in batches) == sum(map(len, requests))


@in_event_loop
async def test_one_token_per_batch_is_one_request_at_a_time(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, batch_tokens=1, max_wait=60) as opened:
        await asyncio.gather(*(opened.answer([ROW]) for _ in range(5)))
    assert gauge.batches == [1] * 5


def test_predictions_that_come_during_an_explanation_are_answered_first(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, entered, free = model_of("single"), threading.Event(), threading.Event()
    predict_rows = batching.predict_rows

    def held(*arguments: Any, explain: bool = False, **options: Any) -> Any:
        if explain:
            entered.set()
            assert free.wait(PATIENCE)
        return predict_rows(*arguments, explain=explain, **options)

    expected = model.predict([ROW], explain=True)[0]
    monkeypatch.setattr(batching, "predict_rows", held)

    async def ask() -> Any:
        async with batcher(Gauge(model), max_queue=2) as opened:
            asked, left = (asyncio.create_task(opened.answer([ROW], explain=True)) for _ in range(2))
            await until(entered.is_set)
            with pytest.raises(QueueFullError):  # explanations have a limit of their own
                await opened.answer([ROW], explain=True)
            async with asyncio.timeout(PATIENCE):
                assert same(await opened.answer([ROW]), model.predict([ROW]))
            assert not asked.done()
            left.cancel()
            free.set()
            prediction = await asked
            await opened.answer([ROW], explain=True)  # their places are free again
            return prediction

    (prediction,) = asyncio.run(ask())
    assert prediction.explanation.words == expected.explanation.words


@in_event_loop
async def test_a_server_stops_during_an_explanation(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    began, free = threading.Event(), threading.Event()

    def held(*_: Any, **__: Any) -> Any:
        began.set()
        assert free.wait(PATIENCE)

    monkeypatch.setattr(batching, "predict_rows", held)
    async with batcher(Gauge(model_of("single"))) as opened:
        asked = asyncio.create_task(opened.answer([ROW], explain=True))
        await until(began.is_set)
        asked.cancel()
    assert not free.is_set()
    free.set()


@in_event_loop
async def test_a_full_batch_does_not_wait(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, batch_tokens=12, max_wait=60) as opened, asyncio.timeout(PATIENCE / 4):
        await asyncio.gather(*(opened.answer([ROW]) for _ in range(6)))  # 6 tokens each
    assert gauge.batches == [2, 2, 2]


@in_event_loop
async def test_who_waits_while_the_model_runs_goes_next_without_waiting(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, max_wait=0.05) as opened:
        with gauge.held():
            first = asyncio.create_task(opened.answer([ROW]))
            await until(gauge.entered.is_set)
            others = [asyncio.create_task(opened.answer([ROW])) for _ in range(7)]
            await until(lambda: opened.waiting == 7)
            await asyncio.sleep(0.1)
        await asyncio.gather(first, *others)
    assert gauge.batches == [1, 7]


@in_event_loop
async def test_who_has_left_keeps_no_place_while_the_model_runs(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, max_wait=0, max_queue=2) as opened:
        with gauge.held():
            first = asyncio.create_task(opened.answer([ROW]))
            await until(gauge.entered.is_set)
            gone = [asyncio.create_task(opened.answer([ROW] * 5)) for _ in range(2)]
            await until(lambda: opened.waiting == 2)
            await asyncio.sleep(0.05)  # tokenised
            for request in gone:
                request.cancel()
            await asyncio.wait(gone)
            assert opened.waiting == 0
            new = asyncio.create_task(opened.answer([ROW] * 2))
            await until(lambda: opened.waiting == 1)
        assert [len(answer) for answer in await asyncio.gather(first, new)] == [1, 2]
        assert opened.waiting == 0
    assert gauge.batches == [1, 2]


@in_event_loop
@pytest.mark.parametrize(("tokens", "batches"), [(None, [2, 2, 2]), (30, [5, 1]), (1, [2, 2, 2])])
async def test_what_was_collected_runs_in_batches_of_as_many_tokens(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tokens: int | None, batches: list[int]
) -> None:
    """A request's own rows run together, whatever the number."""
    monkeypatch.setattr(windows, "CPU_BATCH_TOKENS", 12)
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, batch_tokens=tokens, max_wait=0) as opened:
        assert len(await opened.answer([ROW] * 6)) == 6  # 6 tokens each
    assert gauge.batches == batches


@in_event_loop
async def test_a_batch_that_nobody_waits_for_ends(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CPU_BATCH_TOKENS", 12)
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, batch_tokens=1, max_wait=0) as opened:
        with gauge.held():
            gone = asyncio.create_task(opened.answer([ROW] * 6))  # three batches
            await until(gauge.entered.is_set)
            gone.cancel()
            await asyncio.wait({gone})
        await opened.answer([ROW])
    assert len(gauge.batches) < 4


@in_event_loop
async def test_a_full_queue_refuses(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    async with batcher(gauge, max_wait=0, max_queue=2) as opened:
        with gauge.held():
            first = asyncio.create_task(opened.answer([ROW]))
            await until(gauge.entered.is_set)
            others = [asyncio.create_task(opened.answer([ROW])) for _ in range(2)]
            await until(lambda: opened.waiting == 2)
            with pytest.raises(QueueFullError):
                await opened.answer([ROW])
        assert len(await asyncio.gather(first, *others)) == 3


def test_one_failing_request_does_not_fail_those_it_ran_with(model_of: ModelOf) -> None:
    model = model_of("single")

    def run(batch: PackedBatch) -> Tensor:
        if max(batch.layout.lengths) > 12:
            raise RuntimeError("out of memory")
        return model(batch)

    async def ask() -> list[Any]:
        async with Batcher(model, run=run, max_wait=0.3, max_queue=9) as opened:
            answers = (opened.answer([{"text": text}]) for text in ("the rain", "word " * 20, "the baker"))
            return await asyncio.gather(*answers, return_exceptions=True)

    good, bad, other = asyncio.run(ask())
    assert same([*good, *other], model.predict([{"text": "the rain"}, {"text": "the baker"}]))
    assert isinstance(bad, RuntimeError)


def test_rows_of_one_request_are_not_context_of_another(base: Path) -> None:
    task = EXAMPLES["token"].task.with_settings(context_tokens=6)
    model = TaskModel.from_pretrained(base / "bert", task=task)
    rows = [{"words": text.split(), "document": "one"} for text in ("a cold wind", "brought rain", "to the baker")]
    assert not same(model.predict(rows), [prediction for row in rows for prediction in model.predict([row])])

    async def ask() -> Any:
        async with batcher(Gauge(model)) as opened:
            return await asyncio.gather(*(opened.answer([row]) for row in rows))

    for row, answer in zip(rows, asyncio.run(ask()), strict=True):
        assert same(answer, model.predict([row]))


def test_a_caller_who_leaves_or_waits_too_long_is_dropped(model_of: ModelOf) -> None:
    gauge = Gauge(model_of("single"))
    left = asyncio.Event
    body = [{"type": "http.request", "body": b'{"text": "the rain"}', "more_body": False}]
    scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]

    async def ask() -> tuple[int, str]:
        leaving = left()

        async def receive() -> Any:
            if body:
                return body.pop()
            await leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        limits = replace(SLOW, timeout=0.5)
        async with application(gauge.model, limits=limits, max_wait=0, run=gauge.run) as served:
            with gauge.held():
                first = asyncio.create_task(served.post(ROW))
                await until(gauge.entered.is_set)
                request = served.app({**scope, "headers": headers, "app": None}, receive, send)
                gone = asyncio.create_task(request)
                await until(lambda: served.batcher.waiting == 1)
                leaving.set()
                await gone
                status = (await first).status_code
            await until(lambda: served.batcher.waiting == 0)
            return status, generate_latest(served.metrics.registry).decode()

    status, counted = asyncio.run(ask())
    assert status == 503  # the first one, whose time was up
    assert 'bert_tasks_requests_total{status="499"} 1.0' in counted
    assert gauge.batches == [1]


def test_a_stop_while_the_model_runs_leaves_no_unretrieved_exception(model_of: ModelOf) -> None:
    """asyncio logs an exception that nobody has retrieved when its future is collected."""
    gauge, logged = Gauge(model_of("single")), list[dict[str, Any]]()

    def run(batch: PackedBatch) -> Tensor:
        gauge.run(batch)
        raise RuntimeError("the model failed")

    async def stop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        rows = [{"text": " ".join(["word"] * count)} for count in range(1, 40)]
        async with Batcher(gauge.model, run=run, batch_tokens=20, max_wait=0, max_queue=9) as served:
            gauge.free.clear()
            waiting = asyncio.create_task(served.answer(rows))
            await until(gauge.entered.is_set)
            waiting.cancel()
            threading.Timer(0.2, gauge.free.set).start()  # leaving waits for the model's thread
        gc.collect()

    asyncio.run(stop())
    gc.collect()
    assert logged == []

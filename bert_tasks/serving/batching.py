"""Dynamic batching: the rows of several requests run through the model together, and each gets its own predictions.

Two threads work for the queue: one tokenizes, because a tokenizer is not safe for two, and one runs the model. All else
happens on one event loop, so nothing here needs a lock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bert_tasks.data.columns import Row
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.environment import return_freed_memory
from bert_tasks.errors import GivenUpError
from bert_tasks.model.task_model import CHUNK_ROWS, Logits, TaskModel
from bert_tasks.serving.connections import Batching
from bert_tasks.tasks.base import Feature, Prediction
from bert_tasks.tasks.features import checked_features


class QueueFullError(Exception):
    """The queue is full; the client may try again."""


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """A callback for futures that may fail when nobody waits for them: asyncio would log them as never retrieved."""
    if not future.cancelled():
        future.exception()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """One request. Whoever waits for ``answer`` may cancel it."""

    rows: Sequence[Row]
    features: Sequence[Feature]
    tokens: int
    arrived: float
    answer: asyncio.Future[Sequence[Prediction]]


class Batcher:
    """Predicts the rows of requests; an asynchronous context manager that runs on the event loop that enters it.

    Args:
        model: the model.
        run: runs a packed batch; see ``model.precision.logits_of``.
        batching: how requests are combined.
        max_queue: how many requests may wait.
        observe: called with the number of requests and rows of every batch that was run.
    """

    def __init__(
        self,
        model: TaskModel,
        *,
        run: Logits,
        batching: Batching,
        max_queue: int,
        observe: Callable[[int, int], None] = lambda requests, rows: None,
    ) -> None:
        self.waiting = 0  # requests that were accepted and are not running yet
        self._model, self._run, self._observe = model, run, observe
        self._max_queue, self._max_wait = max_queue, batching.max_wait
        self._tokens = model.batch_tokens if batching.tokens is None else batching.tokens
        self._requests: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._rows_since_trim = 0  # rows run since freed memory was returned; used by the model's thread only
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._running = ThreadPoolExecutor(1, "model")

    async def __aenter__(self) -> Self:
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abandons what is still running."""
        self._closed = True
        self._collector.cancel()
        with suppress(asyncio.CancelledError):
            await self._collector
        for executor in (self._tokenizing, self._running):
            executor.shutdown(cancel_futures=True)

    async def answer(self, rows: Sequence[Row]) -> Sequence[Prediction]:
        """One prediction per row, in row order. Cancelling it removes the request from the queue.

        Args:
            rows: rows in canonical form, which were validated before.

        Raises:
            QueueFullError: too many other requests are waiting.
        """
        if self.waiting >= self._max_queue:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        answer: asyncio.Future[Sequence[Prediction]] = loop.create_future()
        answer.add_done_callback(retrieve_exception)  # the client may disconnect before it fails
        self.waiting += 1
        features: list[Feature] | None = None
        try:
            model, tokenizer = self._model, self._model.require_tokenizer()
            features = await loop.run_in_executor(
                self._tokenizing, checked_features, model.task, rows, tokenizer, model.config
            )
        finally:
            self.waiting -= features is None  # cancelled meanwhile
        tokens = sum(len(feature["input_ids"]) for feature in features)
        request = _Request(rows=rows, features=features, tokens=tokens, arrived=arrived, answer=answer)
        self._requests.append(request)
        self._arrived.set()
        try:
            return await answer
        finally:
            if request in self._requests:  # cancelled: its place is free, even while the model runs
                self._requests.remove(request)
                self.waiting -= 1

    async def _collect(self) -> None:
        """Runs the oldest requests together, again and again, until it is cancelled."""
        while True:
            while not self._requests:
                self._arrived.clear()
                await self._arrived.wait()
            # The first request waits for others until a batch is full or its time is over; a request that waited while
            # the model ran does not wait again.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._requests[0].arrived + self._max_wait):
                    while sum(request.tokens for request in self._requests) < self._tokens:
                        self._arrived.clear()
                        await self._arrived.wait()
            requests: list[_Request] = []
            tokens = 0
            while self._requests and tokens < self._tokens:
                request = self._requests.popleft()
                self.waiting -= 1
                if not request.answer.done():  # it may have been cancelled
                    requests.append(request)
                    tokens += request.tokens
            if requests:
                await self._run_together(requests)

    async def _run_together(self, requests: Sequence[_Request]) -> None:
        """Runs requests as one batch. If it fails, each is run alone, so that one cannot fail the others."""
        loop = asyncio.get_running_loop()
        outcome = loop.run_in_executor(self._running, self._predictions, requests)
        outcome.add_done_callback(retrieve_exception)  # stopping the server does not wait for it
        await asyncio.wait({outcome})
        error = outcome.exception()
        if error is None:
            self._observe(len(requests), sum(len(request.rows) for request in requests))
            for request, answer in zip(requests, outcome.result(), strict=True):
                if not request.answer.done():
                    request.answer.set_result(answer)
        elif len(requests) > 1:
            for request in requests:
                await self._run_together([request])
        elif not requests[0].answer.done():
            requests[0].answer.set_exception(error)

    def _predictions(self, requests: Sequence[_Request]) -> list[Sequence[Prediction]]:
        """Runs on the model's thread: all windows in packed batches, sorted by length, then decoding per request.

        Decoding per request keeps what a task reads around a row (documents) within the request.
        """

        def logits(batch: PackedBatch) -> Any:
            if self._closed or all(request.answer.done() for request in requests):
                raise GivenUpError
            return self._run(batch)

        self._rows_since_trim += sum(len(request.rows) for request in requests)
        if self._rows_since_trim >= CHUNK_ROWS:
            self._rows_since_trim = 0
            return_freed_memory()
        features = [feature for request in requests for feature in request.features]
        room = max(self._tokens, self._model.batch_tokens)
        found = iter(self._model.reduced_logits(features, max_tokens=room, run=logits))
        task, tokenizer = self._model.task, self._model.require_tokenizer()
        return [
            task.with_texts(
                task.decode([next(found) for _ in request.features], request.features, request.rows), tokenizer
            )
            for request in requests
        ]

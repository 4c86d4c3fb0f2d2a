"""Dynamic batching: the rows of several requests through the model together, each request's answers back to it.

Owns the queue, who runs with whom, and the two threads: one tokenises (a tokenizer is not made for two), one runs the
model. Everything else happens on one event loop, so nothing here needs a lock. Must not know HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import GivenUpError
from bert_tasks.model.predicting import (
    CHUNK_ROWS,
    Logits,
    batch_tokens,
    checked_features,
    feature_summaries,
    return_freed_memory,
    tokenizer_of,
)
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.connections import Batching
from bert_tasks.tasks.base import Feature, Prediction


class QueueFullError(Exception):
    """As many requests wait as may; the caller may try again."""


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """For futures that nobody may be waiting for when they fail: asyncio would log "exception was never retrieved"."""
    if not future.cancelled():
        future.exception()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """One request. ``answer`` is cancelled by whoever waits for it."""

    rows: Sequence[Row]
    features: Sequence[Feature]
    tokens: int
    arrived: float
    answer: asyncio.Future[Sequence[Prediction]]


class Batcher:
    """Answers requests while entered, on the event loop that entered it.

    Args:
        run: what runs a packed batch (``model.onnx.logits_of``).
        max_queue: requests that may wait.
        observe: told the requests and rows of every batch that was run.
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
        self.waiting = 0  # requests that were taken in and are not running yet
        self._model, self._run, self._observe = model, run, observe
        self._max_queue, self._max_wait = max_queue, batching.max_wait
        self._tokens = batch_tokens(model) if batching.tokens is None else batching.tokens
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._untidy_rows = 0  # since freed memory was given back; of the model's thread
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._running = ThreadPoolExecutor(1, "model")

    async def __aenter__(self) -> Self:
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives up what is still running; who wants it finished awaits the answers first."""
        self._closed = True
        self._collector.cancel()
        with suppress(asyncio.CancelledError):
            await self._collector
        for executor in (self._tokenizing, self._running):
            executor.shutdown(cancel_futures=True)

    async def answer(self, rows: Sequence[Row]) -> Sequence[Prediction]:
        """One prediction per row, in row order. Cancelling it takes the request out of the queue.

        ``rows`` are canonical: a bad one would be an error of the model's thread.

        Raises:
            QueueFullError: too many others wait.
        """
        if self.waiting >= self._max_queue:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        answer: asyncio.Future[Sequence[Prediction]] = loop.create_future()
        answer.add_done_callback(retrieve_exception)  # the caller may leave while it fails
        self.waiting += 1
        features: list[Feature] | None = None
        try:
            model, tokenizer = self._model, tokenizer_of(self._model)
            features = await loop.run_in_executor(
                self._tokenizing, checked_features, model.task, rows, tokenizer, model.config
            )
        finally:
            self.waiting -= features is None  # cancelled meanwhile
        tokens = sum(len(feature["input_ids"]) for feature in features)
        job = _Job(rows=rows, features=features, tokens=tokens, arrived=arrived, answer=answer)
        self._jobs.append(job)
        self._arrived.set()
        try:
            return await answer
        finally:
            if job in self._jobs:  # nobody waits for it any more: its place is free, even while the model runs
                self._jobs.remove(job)
                self.waiting -= 1

    async def _collect(self) -> None:
        while True:
            while not self._jobs:
                self._arrived.clear()
                await self._arrived.wait()
            await self._others()
            jobs = self._next_jobs()
            if jobs:
                await self._answer_together(jobs)

    async def _others(self) -> None:
        """Waits until the first request has waited long enough, or a batch is full.

        Who waited while the model ran waits no longer.
        """
        end = self._jobs[0].arrived + self._max_wait
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while sum(job.tokens for job in self._jobs) < self._tokens:
                    self._arrived.clear()
                    await self._arrived.wait()

    def _next_jobs(self) -> list[_Job]:
        """The oldest requests that fill a batch; none if all have left. One whose caller leaves just now is dropped."""
        jobs: list[_Job] = []
        tokens = 0
        while self._jobs and tokens < self._tokens:
            job = self._jobs.popleft()
            self.waiting -= 1
            if not job.answer.done():
                jobs.append(job)
                tokens += job.tokens
        return jobs

    async def _answer_together(self, jobs: Sequence[_Job]) -> None:
        """Runs some requests. If that fails they are run alone, so that one cannot fail the others."""
        loop = asyncio.get_running_loop()
        outcome = loop.run_in_executor(self._running, self._predictions, jobs)
        outcome.add_done_callback(retrieve_exception)  # a stop does not wait for it
        await asyncio.wait({outcome})
        error = outcome.exception()
        if error is None:
            self._observe(len(jobs), sum(len(job.rows) for job in jobs))
            for job, answer in zip(jobs, outcome.result(), strict=True):
                if not job.answer.done():
                    job.answer.set_result(answer)
        elif len(jobs) > 1:
            for job in jobs:
                await self._answer_together([job])
        elif not jobs[0].answer.done():
            jobs[0].answer.set_exception(error)

    def _predictions(self, jobs: Sequence[_Job]) -> list[Sequence[Prediction]]:
        """On the model's thread: all windows sorted by length in packed batches, then each request by itself.

        Decoding by request keeps what a task reads around a row (documents) within the request.
        """

        def logits(batch: PackedBatch) -> Tensor:
            if self._closed or all(job.answer.done() for job in jobs):
                raise GivenUpError
            return self._run(batch)

        self._untidy_rows += sum(len(job.rows) for job in jobs)
        if self._untidy_rows >= CHUNK_ROWS:
            self._untidy_rows = 0
            return_freed_memory()
        features = [feature for job in jobs for feature in job.features]
        room = max(self._tokens, batch_tokens(self._model))
        found = iter(feature_summaries(self._model, features, max_tokens=room, run=logits))
        decode = self._model.task.decode
        return [decode([next(found) for _ in job.features], job.features, job.rows) for job in jobs]

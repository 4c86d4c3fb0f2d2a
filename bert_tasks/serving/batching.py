"""Dynamic batching of the rows of several requests.

A model runs a batch of many windows in little more time than one window, so requests that wait are run together. Two
threads work for the queue. One tokenizes, because a tokenizer is not safe for two, and one runs the model. A third
thread explains predictions. All else happens on one event loop, so that nothing of it needs a lock.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from bert_tasks.data.columns import Row, input_rows
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, GivenUpError, UsageError
from bert_tasks.model import windows
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.explanation import check_explainable
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import decode, predict_rows, prediction_of_row
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.features import checked_features

# Tokens of all windows of a row that is explained. An explanation computes gradients at 16 or more points of each.
MOST_EXPLAINED_TOKENS = 2048


class QueueFullError(Exception):
    """The queue is full. The client may try again."""


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieves an exception that nobody waits for, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


@dataclass(kw_only=True, eq=False)
class _Request:
    """One request. Whoever waits for ``answer`` may cancel it."""

    rows: Sequence[Row]
    task: Task | None  # as for ``Batcher.answer``
    arrived: float
    answer: asyncio.Future[Sequence[Any]]
    features: Sequence[Feature] = ()
    is_running: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of all windows."""
        return sum(len(feature["input_ids"]) for feature in self.features)


class Batcher:
    """Predicts the rows of requests.

    It is an asynchronous context manager that runs on the event loop that enters it.

    Attributes:
        waiting: The number of requests that were accepted and are not running yet.
        no_explanations: The reason why the model's predictions cannot be explained. None if they can, in float32.

    Args:
        model: The model.
        run: The function that runs a packed batch (``inference.precision.logits_of``).
        batch_tokens, max_wait: As for ``serving.serve``.
        max_queue: The maximum number of requests that wait, and of requests for explanations.
        observe: A function that is called with the number of requests and rows of every batch that was run.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        run: ForwardFn,
        batch_tokens: int | None = None,
        max_wait: float = 0.005,
        max_queue: int,
        observe: Callable[[int, int], None] = lambda requests, rows: None,
    ) -> None:
        self.waiting = 0
        self.no_explanations: str | None = None
        try:
            check_explainable(model, model.one_task().task)
        except UsageError as error:
            self.no_explanations = str(error)
        self._model = model
        self._run = run
        self._observe = observe
        self._max_queue = max_queue
        self._max_wait = max_wait
        if batch_tokens is None:
            batch_tokens = windows.batch_tokens(model)
        self._tokens = batch_tokens
        self._requests: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._explanations = 0  # requests for them that are not answered yet, which have a limit of their own
        self._explained_model = copy.copy(model)  # the same weights, and a tokenizer for the third thread
        self._explained_model.tokenizer = copy.deepcopy(model.require_tokenizer())
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._running = ThreadPoolExecutor(1, "model")
        self._explaining = ThreadPoolExecutor(1, "explanations")

    async def __aenter__(self) -> Self:
        """Starts to run requests."""
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abandons running work without waiting for it."""
        self._collector.cancel()
        with suppress(asyncio.CancelledError):
            await self._collector
        for executor in (self._tokenizing, self._running, self._explaining):
            executor.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self,
        rows: Sequence[Row],
        *,
        explain: bool = False,
        task: Task | None = None,
        check: Callable[[Sequence[Feature]], None] = lambda features: None,
    ) -> Sequence[Any]:
        """Returns one prediction for each validated row, in row order, as ``predict_rows`` yields it.

        If it is cancelled, the request leaves the queue.

        Args:
            rows: Rows that the model reads.
            explain: True if the predictions have explanations.
            task: A task that reads the logits of the only head in another way. Default: the tasks of the model.
            check: A function that is called with the features before the request waits for the model. Its errors are
                raised.

        Raises:
            DataError: The predictions would be too long, or the row is too long to be explained.
            QueueFullError: Too many other requests are waiting.
        """
        waiting = self._explanations if explain else self.waiting
        if waiting >= self._max_queue:
            raise QueueFullError
        for name, head_task in self._tasks(task).items():
            head_task.check_rows(list(input_rows(rows, name).values()))
        if not explain:
            return await self._predicted(rows, task, check)
        self._explanations += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._explaining, self._explained, rows, check)
        finally:
            self._explanations -= 1

    def _tasks(self, task: Task | None) -> dict[str, Task]:
        """Returns the task of each head for a request, whose own task replaces that of the only head."""
        if task is None:
            return self._model.tasks
        return {"": task}

    def _features(self, rows: Sequence[Row], task: Task | None) -> list[Feature]:
        """Tokenizes rows, on the tokenizer's thread."""
        model = self._model
        tokenizer = model.require_tokenizer()
        if task is None:
            return windows.features_of(model, rows, tokenizer)
        return checked_features(task, rows, tokenizer, model.config)

    def _explained(self, rows: Sequence[Row], check: Callable[[Sequence[Feature]], None]) -> Sequence[Any]:
        """Predicts and explains rows that are short enough, because an explanation that has begun cannot be stopped."""
        model = self._explained_model
        features = windows.features_of(model, rows, model.require_tokenizer())
        check(features)
        tokens = sum(len(feature["input_ids"]) for feature in features)
        if tokens > MOST_EXPLAINED_TOKENS:
            raise DataError(
                f"the windows of the row have {tokens:,} tokens, and the server explains up to "
                f"{MOST_EXPLAINED_TOKENS:,}. Shorten the row, or explain it with `bert-tasks predict --explain`"
            )
        return list(predict_rows(model, rows, explain=True))

    async def _predicted(
        self, rows: Sequence[Row], task: Task | None, check: Callable[[Sequence[Feature]], None]
    ) -> Sequence[Any]:
        """Tokenizes a request, lets it wait for its batch, and returns its predictions."""
        loop = asyncio.get_running_loop()
        request = _Request(rows=rows, task=task, arrived=loop.time(), answer=loop.create_future())
        request.answer.add_done_callback(retrieve_exception)  # the client may disconnect before it fails
        self.waiting += 1
        try:
            request.features = await loop.run_in_executor(self._tokenizing, self._features, rows, task)
            check(request.features)
            self._requests.append(request)
            self._arrived.set()
            return await request.answer
        finally:
            # A cancelled request frees its place, even while the model runs.
            if request in self._requests:
                self._requests.remove(request)
            self.waiting -= not request.is_running

    async def _collect(self) -> None:
        """Runs the oldest requests together, again and again, until it is cancelled."""
        while True:
            while not self._requests:
                self._arrived.clear()
                await self._arrived.wait()
            # The first request waits for others until a batch is full or its time is over. A request that waited while
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
                request.is_running = True
                self.waiting -= 1
                if not request.answer.done():  # it may have been cancelled
                    requests.append(request)
                    tokens += request.tokens
            if requests:
                await self._run_together(requests)

    async def _run_together(self, requests: Sequence[_Request]) -> None:
        """Runs requests as one batch, or each alone if the batch fails."""
        outcome = asyncio.get_running_loop().run_in_executor(self._running, self._predictions, requests)
        try:
            await asyncio.wait({outcome})
        finally:
            outcome.cancel()  # stopping the server does not wait for it
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

    def _predictions(self, requests: Sequence[_Request]) -> list[Sequence[Any]]:
        """Runs all windows in packed batches on the model's thread, sorted by length.

        Each request is decoded by itself, which keeps what a task reads around a row (documents) within the request.
        """

        def logits(batch: PackedBatch) -> Any:
            # The rest of a batch is not computed if nobody waits for it.
            if all(request.answer.done() for request in requests):
                raise GivenUpError
            return self._run(batch)

        features: list[Feature] = []
        for request in requests:
            features += request.features
        room = max(self._tokens, windows.batch_tokens(self._model))
        compact = iter(windows.forward_windows(self._model, features, max_tokens=room, forward_fn=logits))
        answers: list[Sequence[Any]] = []
        for request in requests:
            inputs: Sequence[Tensor] = [next(compact) for _ in request.features]
            if request.task is not None:
                inputs = request.task.output.compact(inputs, request.features)
            decoded = decode(self._model, inputs, request.features, request.rows, self._tasks(request.task))
            answers.append([prediction_of_row(predictions) for predictions in decoded])
        return answers

"""Dynamic batching: the rows of several requests run through the model together, and each gets its own predictions.

Two threads work for the queue: one tokenizes, because a tokenizer is not safe for two, and one runs the model. A third
one explains predictions beside them, and pauses while the model runs. All else happens on one event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bert_tasks.data.columns import Row
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import GivenUpError, UsageError
from bert_tasks.model.explanation import explainable_task, explained
from bert_tasks.model.pretrained_module import finite
from bert_tasks.model.task_model import ForwardFn, TaskModel
from bert_tasks.serving.limits import Batching
from bert_tasks.tasks.base import Feature, Prediction
from bert_tasks.tasks.shared.explanation import Explainable, ExplainedLogit, TokenSpans, with_explanations
from bert_tasks.tasks.shared.features import checked_features
from bert_tasks.tasks.shared.rendering import Rendering


class QueueFullError(Exception):
    """The queue is full; the client may try again."""


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """A callback for futures that may fail when nobody waits for them: asyncio would log them as never retrieved."""
    if not future.cancelled():
        future.exception()


# The predictions of a request, and the logits of which they are to be explained: none if they are not.
_Answer = tuple[Sequence[Prediction], Sequence[ExplainedLogit]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """One request. Whoever waits for ``answer`` may cancel it.

    Attributes:
        spans: what the tokens of the features stand for, if the predictions are to be explained.
    """

    rows: Sequence[Row]
    features: Sequence[Feature]
    spans: TokenSpans | None
    tokens: int
    arrived: float
    answer: asyncio.Future[_Answer]


class Batcher:
    """Predicts the rows of requests; an asynchronous context manager that runs on the event loop that enters it.

    Attributes:
        waiting: requests that were accepted and are not running yet.
        no_explanations: why the model's predictions cannot be explained; None where they can, in float32.

    Args:
        model: the model.
        run: runs a packed batch; see ``model.precision.logits_of``.
        batching: how requests are combined.
        max_queue: how many requests may wait, and how many requests for explanations may be unanswered.
        observe: called with the number of requests and rows of every batch that was run.
    """

    def __init__(
        self,
        model: TaskModel,
        *,
        run: ForwardFn,
        batching: Batching,
        max_queue: int,
        observe: Callable[[int, int], None] = lambda requests, rows: None,
    ) -> None:
        self.waiting = 0
        self.no_explanations: str | None = None
        try:
            explainable_task(model, model.task)
        except UsageError as error:
            self.no_explanations = str(error)
        self._model, self._run, self._observe = model, run, observe
        self._max_queue, self._max_wait = max_queue, batching.max_wait
        self._tokens = model.batch_tokens if batching.tokens is None else batching.tokens
        self._requests: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._explanations = 0  # requests for them that are not answered yet, which have a limit of their own
        self._closed = False
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._running = ThreadPoolExecutor(1, "model")
        self._explaining, self._explanation_turn = ThreadPoolExecutor(1, "explanations"), asyncio.Lock()
        self._idle = threading.Event()  # cleared while the model runs
        self._idle.set()

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
        self._idle.set()
        for executor in (self._tokenizing, self._running, self._explaining):
            executor.shutdown(cancel_futures=True)

    async def answer(self, rows: Sequence[Row], *, explain: bool = False) -> Sequence[Prediction]:
        """One prediction per row, in row order. Cancelling it removes the request from the queue.

        Args:
            rows: rows in canonical form, which were validated before.
            explain: give the predictions their explanations; the task must be ``Explainable``.

        Raises:
            QueueFullError: too many other requests are waiting.
        """
        if self.waiting >= self._max_queue or (explain and self._explanations >= self._max_queue):
            raise QueueFullError
        self._explanations += explain
        try:
            return await self._answered(rows, explain=explain)
        finally:
            self._explanations -= explain

    async def _answered(self, rows: Sequence[Row], *, explain: bool) -> Sequence[Prediction]:
        """See ``answer``."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        answer: asyncio.Future[_Answer] = loop.create_future()
        answer.add_done_callback(retrieve_exception)  # the client may disconnect before it fails
        self.waiting += 1
        tokenized: tuple[list[Feature], TokenSpans | None] | None = None
        try:
            tokenized = await loop.run_in_executor(self._tokenizing, self._tokenized, rows, explain)
        finally:
            self.waiting -= tokenized is None  # cancelled meanwhile
        features, spans = tokenized
        tokens = sum(len(feature["input_ids"]) for feature in features)
        request = _Request(rows=rows, features=features, spans=spans, tokens=tokens, arrived=arrived, answer=answer)
        self._requests.append(request)
        self._arrived.set()
        try:
            predictions, logits = await answer
        finally:
            if request in self._requests:  # cancelled: its place is free, even while the model runs
                self._requests.remove(request)
                self.waiting -= 1
        return await self._with_explanations(request, predictions, logits)

    async def _with_explanations(
        self, request: _Request, predictions: Sequence[Prediction], logits: Sequence[ExplainedLogit]
    ) -> Sequence[Prediction]:
        """The predictions and their explanations, which are computed for one request after another."""
        model, features, spans = self._model, request.features, request.spans
        if spans is None:
            return predictions
        given_up = threading.Event()

        def check() -> None:
            """Called before each batch of gradients: waits while the model runs for other requests."""
            self._idle.wait()
            if self._closed or given_up.is_set():
                raise GivenUpError

        def explain() -> Sequence[Prediction]:
            return with_explanations(predictions, explained(model, model.head, logits, features, spans, check=check))

        async with self._explanation_turn:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._explaining, explain)
            finally:
                given_up.set()

    def _tokenized(self, rows: Sequence[Row], explain: bool) -> tuple[list[Feature], TokenSpans | None]:
        """Runs on the tokenizer's thread: the features, and what their tokens stand for."""
        task, tokenizer = self._model.task, self._model.require_tokenizer()
        features = checked_features(task, rows, tokenizer, self._model.config)
        spans = Explainable.of(task).token_spans(rows, tokenizer) if explain and Explainable.has(task) else None
        return features, spans

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
        self._idle.clear()
        outcome = loop.run_in_executor(self._running, self._predictions, requests)
        outcome.add_done_callback(retrieve_exception)  # stopping the server does not wait for it
        await asyncio.wait({outcome})
        self._idle.set()
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

    def _predictions(self, requests: Sequence[_Request]) -> list[_Answer]:
        """Runs on the model's thread: all windows in packed batches, sorted by length, then decoding per request.

        Decoding per request keeps what a task reads around a row (documents) within the request.
        """

        def check() -> None:
            if self._closed or all(request.answer.done() for request in requests):
                raise GivenUpError

        def logits(batch: PackedBatch) -> Any:
            check()
            found = self._run(batch)
            return finite(found) if any(request.spans is not None for request in requests) else found

        features = [feature for request in requests for feature in request.features]
        room = max(self._tokens, self._model.batch_tokens)
        found = iter(self._model.forward_windows(features, max_tokens=room, forward_fn=logits))
        task, tokenizer = self._model.task, self._model.require_tokenizer()
        answers: list[_Answer] = []
        for request in requests:
            compact = [next(found) for _ in request.features]
            predictions = Rendering.of(task).with_texts(task.decode(compact, request.features, request.rows), tokenizer)
            logits_to_explain: Sequence[ExplainedLogit] = ()
            if request.spans is not None:
                logits_to_explain = Explainable.of(task).explained_logits(
                    predictions, compact, request.features, request.rows
                )
            answers.append((predictions, logits_to_explain))
        return answers

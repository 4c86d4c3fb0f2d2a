"""A line on a terminal that says how far a command is, and how quick. Owns when it is shown."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bert_tasks.cli.app import is_first_process
from bert_tasks.terminal import message_stream

_INTERVAL = 0.2  # seconds between two states of the line


@contextmanager
def rows_progress(*, quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """What takes the numbers of rows that are done, and of all, and shows them with the rows per second.

    Nothing is shown if ``quiet``, where standard error is no terminal, and by others than the first process.
    """
    if quiet or not message_stream().isatty() or not is_first_process():
        yield lambda done, total: None
        return
    line = _Line()
    try:
        yield line.show
    finally:
        line.clear()


class _Line:
    """The line, which each state writes over. Speed counts from the first state on: before it the model is loaded."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._shown = 0.0
        self._width = 0

    def show(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if now - self._shown < _INTERVAL and done != total:
            return
        self._shown = now
        self._write(f"{done:,} rows" if total is None else f"{done:,} of {total:,} rows", self._speed(now, done))

    def clear(self) -> None:
        if self._width:
            self._show("\r" + " " * self._width + "\r")

    def _speed(self, now: float, done: int) -> str:
        start, before = (now, done) if self._first is None else self._first
        return f", {(done - before) / (now - start):,.0f} rows/s" if done > before and now > start else ""

    def _write(self, state: str, speed: str) -> None:
        text = state + speed
        self._show("\r" + text.ljust(self._width))
        self._width = max(self._width, len(text))

    def _show(self, text: str) -> None:
        stream = message_stream()
        stream.write(text)
        stream.flush()

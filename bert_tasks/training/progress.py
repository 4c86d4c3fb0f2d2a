"""What a run tells while it trains: a live bar on a terminal, plain lines elsewhere, nothing on ranks above 0.

Owns the wording and the pace of messages. Must not know how training works. Everything goes to standard error, and
what cannot be written there is lost: it never ends a run.

Where a run tells what happens: to people, to metrics.jsonl, and to the trackers what metrics.jsonl gets.

Must not know how training works.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bert_tasks.run_dir import files as outputs
from bert_tasks.terminal import message_stream, printable, write_message
from bert_tasks.training.job import Callback
from bert_tasks.training.step import StepLog
from bert_tasks.training.tracking import Trackers


class Reporter(Protocol):
    """Receives what happens in a run, in order."""

    def note(self, text: str) -> None: ...

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None: ...

    def close(self) -> None: ...


class Clock:
    """Seconds and ``tokens`` of training since it was made."""

    def __init__(self) -> None:
        self.tokens = 0
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class SilentReporter:
    """Says nothing."""

    def note(self, text: str) -> None:
        pass

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        pass

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        pass

    def close(self) -> None:
        pass


class PlainReporter:
    """One line every ``logging_steps`` steps, without control characters, on a stream or on standard error."""

    def __init__(self, *, total_steps: int, logging_steps: int, stream: TextIO | None = None) -> None:
        self._total, self._every, self._stream = total_steps, logging_steps, stream
        self._started = time.monotonic()
        self._first: int | None = None  # the first step that this part of the run did

    def note(self, text: str) -> None:
        write_message(text, stream=self._stream)

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        done = log.step + 1
        self._first = log.step if self._first is None else self._first
        if done % self._every and done not in (1, self._total):
            return
        left = (time.monotonic() - self._started) / (done - self._first) * (self._total - done)
        self.note(
            f"step {done}/{self._total}  epoch {epoch + 1}  loss {log.loss:.4f}  lr {log.learning_rate:.2e}  "
            f"{tokens_per_second:,.0f} tokens/s  ETA {_clock(left)}"
        )

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        self.note(evaluation_line(step, metrics, best=best))

    def close(self) -> None:
        pass


class RichReporter:
    """A bar that stays in place, with evaluations above it."""

    def __init__(self, *, total_steps: int, console: Console) -> None:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[rate]}  {task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("epoch 1", total=total_steps, loss="-", rate="-", speed="-")
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(printable(text), highlight=False, markup=False)

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        self._progress.update(
            self._bar,
            completed=log.step + 1,
            description=f"epoch {epoch + 1}",
            loss=f"{log.loss:.4f}",
            rate=f"{log.learning_rate:.2e}",
            speed=f"{tokens_per_second:,.0f}",
        )

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        self.note(evaluation_line(step, metrics, best=best))

    def close(self) -> None:
        self._progress.stop()


def make_reporter(*, total_steps: int, logging_steps: int, visible: bool) -> Reporter:
    """The reporter that fits the place where standard error goes."""
    if not visible:
        return SilentReporter()
    console = Console(file=message_stream())
    if console.is_terminal:
        return RichReporter(total_steps=total_steps, console=console)
    return PlainReporter(total_steps=total_steps, logging_steps=logging_steps)


def evaluation_line(step: int, metrics: Mapping[str, float], *, best: bool) -> str:
    shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return f"evaluation after step {step}: {shown}{'  (best so far)' if best else ''}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True, kw_only=True)
class MetricsLogger:
    """The listeners of one process; only the first process's are not silent. ``callback``: the user's own, if any."""

    folder: Path
    reporter: Reporter
    trackers: Trackers
    callback: Callback | None = None

    def note(self, text: str) -> None:
        """Tells people."""
        self.reporter.note(text)

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds a line to metrics.jsonl; for the first process.

        Raises:
            CheckpointError: it cannot be written.
        """
        outputs.append_event(self.folder, event)
        self.trackers.log(event)

    def call_back(self, event: Mapping[str, Any]) -> bool:
        """Shows the user's callback what was recorded; whether it asks to stop."""
        return self.callback is not None and bool(self.callback(dict(event)))

    def close(self) -> None:
        self.reporter.close()
        self.trackers.close()

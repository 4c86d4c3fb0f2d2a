"""How a run reports: a progress bar or lines on standard error, metrics.jsonl, trackers, and the user's callback.

Owns the wording and pace of messages, and how a run is named and resumed in a tracker. metrics.jsonl is the record;
TensorBoard, W&B, MLflow and Trackio, called through accelerate, get copies. Neither a terminal that cannot be written
nor a tracker that fails ends a run.
"""

import io
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from accelerate.tracking import (
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bert_tasks.environment import disable_telemetry, masked
from bert_tasks.errors import UsageError
from bert_tasks.run_dir import files as outputs
from bert_tasks.terminal import message_stream, printable, write_message
from bert_tasks.training.step import StepLog

_LOGGER = logging.getLogger("bert_tasks")
# The machine, the command line and the code are nobody's business; the curves are. W&B's own variables still count.
_WANDB = {"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True}
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./ :]")


class Callback(Protocol):
    """What a run calls on its first process with each line that it adds to metrics.jsonl, once it is written.

    ``record["event"]`` is "step" (with step, epoch, loss, learning_rate, grad_norm, tokens_per_second) or "evaluation"
    (with step, epoch, metrics). A true answer to an evaluation ends the run as early stopping does: the best model so
    far is its result. Answers to steps do not count.
    """

    def __call__(self, record: dict[str, Any], /) -> object: ...


class Reporter:
    """Receives what happens in a run, in order. This one reports nothing: it is for progress=False and other ranks."""

    def note(self, text: str) -> None:
        """Shows a message."""

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        """Shows a completed step; ``epoch`` counts from 0."""

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Shows the metrics after a number of steps."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.note(f"evaluation after step {step}: {shown}{'  (best so far)' if best else ''}")

    def close(self) -> None:
        """Ends the display."""


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


class PlainReporter(Reporter):
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


class RichReporter(Reporter):
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

    def close(self) -> None:
        self._progress.stop()


def make_reporter(*, total_steps: int, logging_steps: int, visible: bool) -> Reporter:
    """The reporter that fits the place where standard error goes."""
    if not visible:
        return Reporter()
    console = Console(file=message_stream())
    if console.is_terminal:
        return RichReporter(total_steps=total_steps, console=console)
    return PlainReporter(total_steps=total_steps, logging_steps=logging_steps)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def check_installed(names: Sequence[str]) -> None:
    """Refuses trackers whose package is not there; accelerate would only warn and track nothing.

    Raises:
        UsageError: naming the extra to install.
    """
    installed = [str(kind) for kind in get_available_trackers()]
    missing = [name for name in names if name not in installed]
    if missing:
        raise UsageError(
            f"run.trackers: {' and '.join(missing)} not installed: pip install 'bert-tasks[tracking]', "
            "or take it out of run.trackers"
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tracker puts a run.

    Attributes:
        known: what the tracker calls the run, if it has it already.
        silent: the tracker itself says nothing.
    """

    folder: Path
    project: str
    known: str | None
    silent: bool

    @property
    def name(self) -> str:
        """What people see: the folder's name; runs of several seeds have their parent's name before it."""
        folder = self.folder.absolute()
        return f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"seed-\d+", folder.name) else folder.name

    def key(self) -> str:
        """What the tracker calls the run, or a name that no other run has."""
        return f"{self.name}-{uuid.uuid4().hex[:8]}" if self.known is None else self.known


@dataclass(frozen=True, kw_only=True)
class Started:
    """A tracker at work.

    Attributes:
        key: what it calls the run.
        has: kind of event -> the step up to which it has them from an earlier part of the run.
    """

    name: str
    tracker: Any
    key: str
    has: Mapping[str, float] = field(default_factory=dict)

    def log(self, event: Mapping[str, Any]) -> None:
        """Passes an event on, unless the tracker has it."""
        values = points(event)
        if self.name == "mlflow":
            values = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in values.items()}
        if values and event["step"] > self.has.get(event["event"], 0):
            self.tracker.log(values, step=event["step"])

    def finish(self) -> None:
        """Lets the tracker write what it holds."""
        if (
            self.name == "trackio"
        ):  # accelerate ends the run behind its back: it would be ended again, and told, at exit
            import_module("trackio").finish()
        else:
            self.tracker.finish()


class Trackers:
    """The trackers of one run; without names, and on all processes but the first, it does nothing."""

    def __init__(self, names: Sequence[str], *, project: str, folder: Path, silent: bool) -> None:
        self._names, self._project, self._folder, self._silent = names, project, folder, silent
        self._started: list[Started] = []
        self._reached = _reached(folder) if names else {}  # now: resuming cuts metrics.jsonl back

    def start(self, config: Mapping[str, Any], *, step: int, changed: bool) -> None:
        """Begins the run in each tracker, or goes on with it.

        A run that a tracker does not have yet gets all points of metrics.jsonl. One that it has gets those that were
        not in metrics.jsonl before: the points between the checkpoint and the kill were logged once, and they
        come out the same. With other settings they do not: then the tracker begins another run.

        Args:
            step: where training goes on from.
            changed: settings differ from those of the run so far.

        Raises:
            UsageError: a tracker cannot start and nothing is trained yet. Later the run goes on without it.
        """
        if not self._names:
            return
        disable_telemetry()
        stored = {} if changed else _stored(self._folder)
        for name in self._names:
            with self._survived(name, "cannot start", fatal=step == 0):
                self._started.append(self._start(name, stored.get(name, {}), config))
        kept = {one.name: {"project": self._project, "run": one.key} for one in self._started}
        outputs.write_json(self._folder / outputs.TRACKERS, {**stored, **kept})

    def log(self, event: Mapping[str, Any]) -> None:
        """Passes on a line of metrics.jsonl. A tracker that fails is given up."""
        for one in tuple(self._started):
            with self._survived(one.name, f"failed at step {event['step']}", dropped=one):
                one.log(event)

    def close(self) -> None:
        """Lets every tracker write what it holds."""
        for one in self._started:
            with self._survived(one.name, "could not finish"):
                one.finish()
        self._started.clear()

    def _start(self, name: str, stored: Mapping[str, str], config: Mapping[str, Any]) -> Started:
        known = stored.get("run") if stored.get("project") == self._project else None
        place = Place(folder=self._folder, project=self._project, known=known, silent=self._silent)
        tracker, key = _MAKERS[name](place)
        tracker.start()
        if name == "mlflow":  # it alone chooses the key
            key = tracker.tracker.info.run_id
        if known is not None and name != "tensorboard":
            return Started(name=name, tracker=tracker, key=key, has=self._reached)
        tracker.store_init_configuration(_plain(config))
        started = Started(name=name, tracker=tracker, key=key)
        for event in outputs.read_events(self._folder):
            started.log(event)
        return started

    @contextmanager
    def _survived(self, name: str, what: str, *, fatal: bool = False, dropped: Started | None = None) -> Iterator[None]:
        def told(error: Exception) -> None:
            reason = f"tracker {name} {what} ({type(error).__name__}: {masked(str(error).partition(chr(10))[0])[:300]})"
            if fatal:
                raise UsageError(f"{reason}: mend it, or take it out of run.trackers") from error
            if dropped is not None:
                self._started.remove(dropped)
            _LOGGER.warning("%s; the run goes on without it, and %s has everything", reason, outputs.EVENTS)

        # Some of them print, and standard output is the command's.
        with _Caught(told), redirect_stdout(io.StringIO() if self._silent else message_stream()):
            yield


class _Caught:
    """Hands any exception to a function: four libraries raise what they like, and none may end a run."""

    def __init__(self, told: Callable[[Exception], None]) -> None:
        self._told = told

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._told(error)
        return isinstance(error, Exception)


def points(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event: ``train/loss``, ``validation/accuracy``; one that is not finite is left out."""
    if event["event"] == "step":
        values = {f"train/{name}": value for name, value in event.items() if name not in ("event", "step")}
    elif event["event"] == "evaluation":
        values = {f"validation/{name}": value for name, value in event["metrics"].items()}
    else:
        values = {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _tensorboard(place: Place) -> tuple[Any, str]:
    """Its files are written anew each time: they are in the run's folder, and metrics.jsonl has every point."""
    shutil.rmtree(place.folder / outputs.TENSORBOARD, ignore_errors=True)
    return TensorBoardTracker(outputs.TENSORBOARD, place.folder), place.key()


def _wandb(place: Place) -> tuple[Any, str]:
    key = place.key()
    settings = {**_WANDB, "silent": True} if place.silent else _WANDB
    options: dict[str, Any] = {} if "WANDB_DIR" in os.environ else {"dir": str(place.folder)}
    tracker = WandBTracker(place.project, name=place.name, id=key, resume="allow", settings=settings, **options)
    return tracker, key


def _mlflow(place: Place) -> tuple[Any, str]:
    # Its own tag would be the path of the console script.
    tags = {"mlflow.source.name": "bert-tasks"}
    return MLflowTracker(place.project, run_id=place.known, run_name=place.name, tags=tags), ""


def _trackio(place: Place) -> tuple[Any, str]:
    """Trackio knows runs by their names."""
    key = place.key()
    options = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    return TrackioTracker(place.project, name=key, **options), key


_MAKERS: Mapping[str, Callable[[Place], tuple[Any, str]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def _reached(folder: Path) -> dict[str, float]:
    """Kind of event -> the last step of metrics.jsonl that has one."""
    last: dict[str, float] = {}
    for event in outputs.read_events(folder):
        last[event["event"]] = max(event["step"], last.get(event["event"], 0))
    return last


def _stored(folder: Path) -> dict[str, dict[str, str]]:
    """What each tracker calls the run; a damaged file counts as none."""
    try:
        stored = json.loads((folder / outputs.TRACKERS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) and all(isinstance(value, dict) for value in stored.values()) else {}


def _plain(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """TensorBoard takes neither lists nor null."""
    return {key: value if isinstance(value, str | int | float | bool) else str(value) for key, value in config.items()}


def tracker_config(metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a tracker shows beside the curves: run.json's settings, of a local model its name alone, and versions."""
    shown = ("python", "platform", "processes", "device", "threads")
    versions = {f"versions.{name}": version for name, version in metadata["versions"].items()}
    named: dict[str, Any] = outputs.without_folders(settings)
    return {**named, **{name: metadata[name] for name in shown}, **versions}


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

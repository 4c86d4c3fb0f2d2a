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
# Trackers get the curves, not the machine, the command line or the code. W&B's own variables still apply.
_WANDB = {"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True}
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./ :]")


class Callback(Protocol):
    """A function that the main process calls with each record of metrics.jsonl, after it is written.

    ``record["event"]`` is "step" (with step, epoch, loss, learning_rate, grad_norm, tokens_per_second) or "evaluation"
    (with step, epoch, metrics). A true return value for an evaluation ends the run as early stopping does: its result
    is the best model so far. Return values for steps are ignored.
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
    """Writes a line every ``logging_steps`` steps, without control characters, to a stream or to standard error."""

    def __init__(self, *, total_steps: int, logging_steps: int, stream: TextIO | None = None) -> None:
        self._total, self._every, self._stream = total_steps, logging_steps, stream
        self._started = time.monotonic()
        self._first: int | None = None  # the first step since the run began or was resumed

    def note(self, text: str) -> None:
        write_message(text, stream=self._stream)

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        completed = log.step + 1
        self._first = log.step if self._first is None else self._first
        if completed % self._every and completed not in (1, self._total):
            return
        left = (time.monotonic() - self._started) / (completed - self._first) * (self._total - completed)
        self.note(
            f"step {completed}/{self._total}  epoch {epoch + 1}  loss {log.loss:.4f}  lr {log.learning_rate:.2e}  "
            f"{tokens_per_second:,.0f} tokens/s  ETA {_clock(left)}"
        )


class RichReporter(Reporter):
    """Shows a progress bar, with evaluations and messages above it."""

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
    """Refuses trackers whose package is not installed; accelerate would only warn and track nothing.

    Raises:
        UsageError: naming the extra to install.
    """
    installed = [str(kind) for kind in get_available_trackers()]
    missing = [name for name in names if name not in installed]
    if missing:
        raise UsageError(
            f"run.trackers: {' and '.join(missing)} not installed: pip install 'bert-tasks[tracking]', "
            "or remove it from run.trackers"
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a run in a tracker.

    Attributes:
        known: the tracker's identifier of the run, if the tracker has the run already.
        silent: suppress messages of the tracker.
    """

    folder: Path
    project: str
    known: str | None
    silent: bool

    @property
    def name(self) -> str:
        """The displayed name: that of the folder, after its parent's name for runs of several seeds."""
        folder = self.folder.absolute()
        return f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"seed-\d+", folder.name) else folder.name

    def key(self) -> str:
        """The tracker's identifier of the run, or a new unique one."""
        return f"{self.name}-{uuid.uuid4().hex[:8]}" if self.known is None else self.known


@dataclass(frozen=True, kw_only=True)
class Started:
    """A tracker that has begun or resumed the run.

    Attributes:
        key: its identifier of the run.
        has: kind of event -> the step up to which it has events from before the run was resumed.
    """

    name: str
    tracker: Any
    key: str
    has: Mapping[str, float] = field(default_factory=dict)

    def log(self, event: Mapping[str, Any]) -> None:
        """Sends an event, unless the tracker has it already."""
        values = points(event)
        if self.name == "mlflow":
            values = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in values.items()}
        if values and event["step"] > self.has.get(event["event"], 0):
            self.tracker.log(values, step=event["step"])

    def finish(self) -> None:
        """Lets the tracker write what is pending."""
        if self.name == "trackio":  # accelerate would leave the run to be ended, with a message, at exit
            import_module("trackio").finish()
        else:
            self.tracker.finish()


class Trackers:
    """The trackers of one run; does nothing without names, as on all processes except the main one."""

    def __init__(self, names: Sequence[str], *, project: str, folder: Path, silent: bool) -> None:
        self._names, self._project, self._folder, self._silent = names, project, folder, silent
        self._started: list[Started] = []
        self._reached = _reached(folder) if names else {}  # now: resuming cuts metrics.jsonl back

    def start(self, config: Mapping[str, Any], *, step: int, changed: bool) -> None:
        """Begins or resumes the run in each tracker.

        A tracker that does not have the run yet gets all points of metrics.jsonl. One that has it gets those that were
        not in metrics.jsonl before: the points between the checkpoint and the kill were logged once, and training them
        again gives the same values. With other settings the values differ, and the tracker begins another run.

        Args:
            step: from which training resumes.
            changed: settings differ from those of the run so far.

        Raises:
            UsageError: a tracker cannot start before the first step. Later the run continues without it.
        """
        if not self._names:
            return
        disable_telemetry()
        stored = {} if changed else _stored(self._folder)
        for name in self._names:
            with self._survived(name, "cannot start", fatal=step == 0):
                self._started.append(self._start(name, stored.get(name, {}), config))
        started = {one.name: {"project": self._project, "run": one.key} for one in self._started}
        outputs.write_json(self._folder / outputs.TRACKERS, {**stored, **started})

    def log(self, event: Mapping[str, Any]) -> None:
        """Sends a record of metrics.jsonl. A tracker that fails is dropped."""
        for one in tuple(self._started):
            with self._survived(one.name, f"failed at step {event['step']}", dropped=one):
                one.log(event)

    def close(self) -> None:
        """Lets every tracker write what is pending."""
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
        def report(error: Exception) -> None:
            reason = f"tracker {name} {what} ({type(error).__name__}: {masked(str(error).partition(chr(10))[0])[:300]})"
            if fatal:
                raise UsageError(f"{reason}: fix this, or remove it from run.trackers") from error
            if dropped is not None:
                self._started.remove(dropped)
            _LOGGER.warning("%s; the run continues without it, and %s has all records", reason, outputs.EVENTS)

        # Some trackers print, but standard output belongs to the command.
        with _Caught(report), redirect_stdout(io.StringIO() if self._silent else message_stream()):
            yield


class _Caught:
    """Passes any exception to a function: four libraries may raise anything, and none may end a run."""

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._report(error)
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
    """Its files are written again each time: they are in the run's folder, and metrics.jsonl has every point."""
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
    """The identifiers of the run in each tracker; a damaged file counts as none."""
    try:
        stored = json.loads((folder / outputs.TRACKERS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) and all(isinstance(value, dict) for value in stored.values()) else {}


def _plain(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """TensorBoard takes neither lists nor null."""
    return {key: value if isinstance(value, str | int | float | bool) else str(value) for key, value in config.items()}


def tracker_config(metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a tracker shows beside the curves: the settings of run.json, without local paths, and versions."""
    shown = ("python", "platform", "processes", "device", "threads")
    versions = {f"versions.{name}": version for name, version in metadata["versions"].items()}
    named: dict[str, Any] = outputs.without_folders(settings)
    return {**named, **{name: metadata[name] for name in shown}, **versions}


@dataclass(frozen=True, kw_only=True)
class MetricsLogger:
    """Where one process reports; all processes except the main one are silent. ``callback``: the user's, if any."""

    folder: Path
    reporter: Reporter
    trackers: Trackers
    callback: Callback | None = None

    def note(self, text: str) -> None:
        """Shows a message to people."""
        self.reporter.note(text)

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds a record to metrics.jsonl and sends it to the trackers; for the main process.

        Raises:
            CheckpointError: it cannot be written.
        """
        outputs.append_event(self.folder, event)
        self.trackers.log(event)

    def call_back(self, event: Mapping[str, Any]) -> bool:
        """Calls the user's callback with a record; True if it asks to stop."""
        return self.callback is not None and bool(self.callback(dict(event)))

    def close(self) -> None:
        self.reporter.close()
        self.trackers.close()

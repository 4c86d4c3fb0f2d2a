"""How a run reports: a progress bar or lines on standard error, metrics.jsonl, and trackers.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bert_tasks.environment import masked
from bert_tasks.errors import UsageError
from bert_tasks.terminal import message_stream, printable
from bert_tasks.training import files as outputs
from bert_tasks.training.step import StepLog
from bert_tasks.variables import disable_telemetry

_LOGGER = logging.getLogger("bert_tasks")
_HOUR = 3600.0  # seconds, over which the speed is averaged that tells the remaining time
# Trackers get the curves, not the machine, the command line or the code. W&B's own variables still apply.
_WANDB: dict[str, Any] = {"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True}
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./ :]")


@dataclass(kw_only=True)
class Clock:
    """Seconds and ``tokens`` of training since it was made."""

    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Reporter:
    """Reports a run on standard error: a progress bar on a terminal, else lines without control characters.

    Args:
        total_steps: Number of steps of the run.
        logging_steps: Number of steps between lines.
        visible: False to report nothing.
        console: Where to report. Default: standard error.
    """

    def __init__(
        self, *, total_steps: int, logging_steps: int, visible: bool = True, console: Console | None = None
    ) -> None:
        console = Console(file=message_stream()) if console is None else console
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[rate]}  {task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._total, self._every, self._is_visible, self._console = total_steps, logging_steps, visible, console
        self._has_bar = visible and console.is_terminal
        self._progress = Progress(*columns, console=console, speed_estimate_period=_HOUR)
        self._bar = self._progress.add_task("epoch 1", total=total_steps, loss="-", rate="-", speed="-")
        if self._has_bar:
            self._progress.start()

    def note(self, text: str) -> None:
        """Shows a message."""
        if self._is_visible:
            self._console.out(printable(text), highlight=False)

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        """Shows a completed step; ``epoch`` counts from 0."""
        completed = log.step + 1
        loss, rate, speed = f"{log.loss:.4f}", f"{log.learning_rate:.2e}", f"{tokens_per_second:,.0f}"
        description = f"epoch {epoch + 1}"
        self._progress.update(
            self._bar, completed=completed, description=description, loss=loss, rate=rate, speed=speed
        )
        if not self._has_bar and (completed % self._every == 0 or completed in (1, self._total)):
            left = self._progress.tasks[0].time_remaining
            remaining = "-:--:--" if left is None else timedelta(seconds=round(left))
            self.note(
                f"step {completed}/{self._total}  {description}  loss {loss}  lr {rate}  {speed} tokens/s  "
                f"ETA {remaining}"
            )

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Shows the metrics after a number of steps."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.note(f"evaluation after step {step}: {shown}{'  (best so far)' if best else ''}")

    def close(self) -> None:
        """Ends the display."""
        if self._has_bar:
            self._progress.stop()


def check_installed(names: Sequence[str]) -> None:
    """Rejects trackers whose package is not installed; accelerate would only warn and track nothing.

    Raises:
        UsageError: naming the extra to install.
    """
    installed = [str(name) for name in get_available_trackers()]
    missing = [name for name in names if name not in installed]
    if missing:
        raise UsageError(
            f"run.trackers: {' and '.join(missing)} not installed: pip install '.[tracking]', "
            "or remove it from run.trackers"
        )


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A tracker that has begun or resumed the run.

    Attributes:
        tracker: accelerate's tracker.
        key: its identifier of the run.
        has: event -> the step up to which it has records from before the run was resumed.
    """

    tracker: Any
    key: str
    has: Mapping[str, float]

    def log(self, event: Mapping[str, Any]) -> None:
        """Sends an event, unless the tracker has it already."""
        values = points(event)
        if self.tracker.name == "mlflow":
            values = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in values.items()}
        if values and event["step"] > self.has.get(event["event"], 0):
            self.tracker.log(values, step=event["step"])


class MetricsLogger:
    """Where the main process records a run: metrics.jsonl, and the trackers, which get copies of its records.

    It does nothing without trackers until something is recorded, as on all processes except the main one.
    """

    def __init__(self, folder: Path, *, trackers: Sequence[str], project: str, silent: bool) -> None:
        """Stores what the trackers need.

        Args:
            folder: of the run.
            trackers: their names.
            project: the project's name at the trackers.
            silent: suppress messages of the trackers.
        """
        self._folder, self._names, self._project, self._silent = folder, trackers, project, silent
        self._started: dict[str, Tracked] = {}
        self._reached: dict[str, float] = {}  # event -> its last step; now: resuming cuts metrics.jsonl back
        for event in outputs.read_events(folder) if trackers else ():
            self._reached[event["event"]] = max(event["step"], self._reached.get(event["event"], 0))

    def start_trackers(
        self, metadata: Mapping[str, Any], settings: Mapping[str, Any], *, step: int, changed: bool
    ) -> None:
        """Begins or resumes the run in each tracker.

        A tracker that does not have the run yet gets all points of metrics.jsonl. One that has it gets those that were
        not in metrics.jsonl before: the points between the checkpoint and the kill were logged once, and training them
        again gives the same values. With other settings the values differ, and the tracker begins another run.

        Args:
            metadata, settings: see ``tracker_config``.
            step: from which training resumes.
            changed: settings differ from those of the run so far.

        Raises:
            UsageError: a tracker cannot start before the first step. Later the run continues without it.
        """
        disable_telemetry()
        stored: dict[str, dict[str, str]] = {}  # the identifiers of the run in each tracker
        with suppress(OSError, ValueError, AttributeError):  # a damaged file counts as none
            content = {} if changed else json.loads((self._folder / outputs.TRACKERS).read_text(encoding="utf-8"))
            stored = {name: entry for name, entry in content.items() if entry.get("project") == self._project}
        for name in self._names:
            with self._survived(name, "cannot start", fatal=step == 0):
                known = stored.get(name, {}).get("run")
                self._started[name] = self._start(name, known, tracker_config(metadata, settings))
        started = {name: {"project": self._project, "run": tracked.key} for name, tracked in self._started.items()}
        outputs.write_json(self._folder / outputs.TRACKERS, {**stored, **started})

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds a record to metrics.jsonl and sends it to the trackers. A tracker that fails is dropped.

        Raises:
            CheckpointError: it cannot be written.
        """
        outputs.append_event(self._folder, event)
        for name, tracked in tuple(self._started.items()):
            with self._survived(name, f"failed at step {event['step']}"):
                tracked.log(event)

    def close(self) -> None:
        """Lets every tracker write what is pending."""
        for name, tracked in tuple(self._started.items()):
            with self._survived(name, "could not finish"):
                if name == "trackio":  # accelerate would leave the run to be ended, with a message, at exit
                    import_module("trackio").finish()
                else:
                    tracked.tracker.finish()
        self._started.clear()

    def _start(self, name: str, known: str | None, config: Mapping[str, Any]) -> Tracked:
        """Begins the run in a tracker, or resumes the one with the identifier ``known``."""
        folder = self._folder.absolute()
        # The displayed name is that of the folder, after its parent's name for runs of several seeds.
        shown = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"seed-\d+", folder.name) else folder.name
        key = f"{shown}-{uuid.uuid4().hex[:8]}" if known is None else known
        options: dict[str, Any] = {"run_name": self._project}
        if name == "tensorboard":  # metrics.jsonl has every point: its files are written again
            shutil.rmtree(self._folder / outputs.TENSORBOARD, ignore_errors=True)
            options, known = {"run_name": outputs.TENSORBOARD, "logging_dir": self._folder}, None
        elif name == "wandb":
            options |= {"name": shown, "id": key, "resume": "allow"}
            options["settings"] = _WANDB | ({"silent": True} if self._silent else {})
            options |= {} if "WANDB_DIR" in os.environ else {"dir": str(self._folder)}
        elif name == "mlflow":  # its own tag would be the path of the console script
            options = {"experiment_name": self._project, "run_id": known, "run_name": shown}
            options["tags"] = {"mlflow.source.name": "bert-tasks"}
        else:  # trackio knows runs by their names
            options |= {"name": key, "resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        tracker = LOGGER_TYPE_TO_CLASS[name](**options)
        tracker.start()
        if name == "mlflow":  # it alone chooses the identifier
            key = tracker.tracker.info.run_id
        started = Tracked(tracker=tracker, key=key, has={} if known is None else self._reached)
        if known is None:
            tracker.store_init_configuration(
                # TensorBoard takes neither lists nor null.
                {key: item if isinstance(item, str | int | float | bool) else str(item) for key, item in config.items()}
            )
            for event in outputs.read_events(self._folder):
                started.log(event)
        return started

    @contextmanager
    def _survived(self, name: str, what: str, *, fatal: bool = False) -> Iterator[None]:
        """Drops a tracker that raises anything, unless it is fatal: four libraries, and none may end a run."""

        def report(kind: object, error: BaseException | None, trace: object) -> bool:
            if not isinstance(error, Exception):
                return False
            reason = f"tracker {name} {what} ({type(error).__name__}: {masked(str(error).partition(chr(10))[0])[:300]})"
            if fatal:
                raise UsageError(f"{reason}: fix this, or remove it from run.trackers") from error
            self._started.pop(name, None)
            _LOGGER.warning("%s; the run continues without it, and %s has all records", reason, outputs.EVENTS)
            return True

        with ExitStack() as stack:
            stack.push(report)
            # Some trackers print, but standard output belongs to the command.
            stack.enter_context(redirect_stdout(io.StringIO() if self._silent else message_stream()))
            yield


def points(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event: ``train/loss``, ``validation/accuracy``; one that is not finite is left out."""
    if event["event"] == "step":
        shown = {name: value for name, value in event.items() if name not in ("event", "step", "terms")}
        values = {f"train/{name}": value for name, value in {**shown, **event.get("terms", {})}.items()}
    elif event["event"] == "evaluation":
        values = {f"validation/{name}": value for name, value in event["metrics"].items()}
    else:
        values = {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def tracker_config(metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a tracker shows beside the curves: the settings of run.json, without local paths, and versions."""
    shown = ("python", "platform", "processes", "device", "threads")
    versions = {f"versions.{name}": version for name, version in metadata["versions"].items()}
    named: dict[str, Any] = outputs.without_folders(settings)
    return {**named, **{name: metadata[name] for name in shown}, **versions}

"""Reports a run on standard error, in metrics.jsonl, and to trackers.

The file metrics.jsonl is the complete record. TensorBoard, W&B, MLflow and Trackio, which are called through
accelerate, get copies. Neither a terminal that cannot be written nor a tracker that fails ends a run, because a run may
have taken days by then.
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
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bert_tasks.data.issues import counted
from bert_tasks.environment import masked
from bert_tasks.errors import UsageError
from bert_tasks.terminal import message_stream, message_text
from bert_tasks.training import files as outputs
from bert_tasks.training.records import EventRecord, RunRecord
from bert_tasks.training.step import StepLog, StepResult
from bert_tasks.variables import disable_telemetry

_LOGGER = logging.getLogger("bert_tasks")
_WIDE = 100  # columns of a terminal with room for all figures. On others, rich would shorten the times
_HOUR = 3600.0  # in seconds, the time over which the speed is averaged that predicts the remaining time
# Trackers get the curves, but neither the machine nor the command line nor the code. The environment variables of W&B
# still apply.
_WANDB: dict[str, Any] = {"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True}
# The characters that MLflow rejects in the names of metrics.
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./ :]")


class Clock:
    """Measures the time of training in intervals, between which the run evaluates and saves.

    Attributes:
        tokens: The number of tokens in the present interval.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Makes a clock that reads the time in seconds from ``now``."""
        self.tokens, self._now = 0, now
        self._began: float | None = None
        self._all_tokens, self._all_seconds = 0, 0.0  # of the intervals that have ended

    def start(self) -> None:
        """Begins an interval."""
        self.tokens, self._began = 0, self._now()

    def stop(self) -> float:
        """Ends the interval, if there is one, and returns its seconds."""
        seconds = self._seconds
        if self._began is not None:
            self._all_tokens += self.tokens
            self._all_seconds += seconds
            self._began = None
        return seconds

    @property
    def _seconds(self) -> float:
        """The seconds of the present interval so far, 0 if there is none."""
        if self._began is None:
            return 0.0
        return self._now() - self._began

    @property
    def tokens_per_second(self) -> float:
        """The speed in the present interval."""
        return self.tokens / self._seconds

    @property
    def mean_tokens_per_second(self) -> float:
        """The speed over all intervals that have ended, 0 without any token."""
        if not self._all_tokens:
            return 0.0
        return self._all_tokens / self._all_seconds


class Reporter:
    """Reports a run on standard error.

    On a terminal or in a notebook it shows a progress bar, and elsewhere a line every ``logging_steps`` steps. A narrow
    terminal has no room for the learning rate and the speed. It writes nothing if it is not ``visible``, as on all
    processes but the main one.
    """

    def __init__(
        self, *, total_steps: int, logging_steps: int, visible: bool = True, console: Console | None = None
    ) -> None:
        console = Console(file=message_stream()) if console is None else console
        figures = "loss {task.fields[loss]}"
        if console.width >= _WIDE:
            figures += "  lr {task.fields[rate]}  {task.fields[speed]} tokens/s"
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(figures),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._total, self._every, self._is_visible, self._console = total_steps, logging_steps, visible, console
        # Without ipywidgets rich would show a new bar in each update of a notebook.
        self._has_bar = visible and (
            console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        )
        self._progress = Progress(*columns, console=console, speed_estimate_period=_HOUR)
        self._bar = self._progress.add_task("epoch 1", total=total_steps, loss="-", rate="-", speed="-")
        if self._has_bar:
            self._progress.start()

    def line(self, text: str) -> None:
        """Shows a line about the progress."""
        if self._is_visible:
            self._console.out(message_text(text), highlight=False)

    def note(self, text: str) -> None:
        """Shows what a reader of the run must know."""
        self.line(f"note: {text}")

    def step(self, log: StepLog, *, epoch: int, tokens_per_second: float) -> None:
        """Shows a completed step. ``epoch`` counts from 0."""
        completed = log.step + 1
        loss, rate, speed = f"{log.loss:.4f}", f"{log.learning_rate:.2e}", f"{tokens_per_second:,.0f}"
        description = f"epoch {epoch + 1}"
        self._progress.update(
            self._bar, completed=completed, description=description, loss=loss, rate=rate, speed=speed
        )
        if not self._has_bar and (completed % self._every == 0 or completed in (1, self._total)):
            task = self._progress.tasks[0]
            elapsed, left = _clock_time(task.elapsed), _clock_time(task.time_remaining)
            self.line(
                f"step {completed}/{self._total}  {description}  loss {loss}  lr {rate}  {speed} tokens/s  "
                f"elapsed {elapsed}  left {left}"
            )

    def evaluation(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Shows the metrics after a number of steps."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if best:
            shown += "  (best so far)"
        self.line(f"evaluation after step {step}: {shown}")

    def early_end(self, evaluations: int | None) -> None:
        """Shows why a run ends before its last step.

        ``evaluations`` is the number of evaluations without a better model, or None if the callback ends the run.
        """
        if evaluations is None:
            self.note("the callback asked to stop")
        else:
            self.note(f"stopped early without a better model in {counted(evaluations, 'evaluation')}")

    def end(
        self,
        *,
        seconds: float,
        tokens_per_second: float,
        best_epoch: float,
        epochs: float,
        frequent: tuple[str, float] | None,
    ) -> None:
        """Shows a finished run.

        Args:
            seconds: The time that was spent on training.
            tokens_per_second: The mean speed of training.
            best_epoch, epochs: The number of epochs until the best model, and the number of all epochs.
            frequent: The most frequent label of the validation rows and its fraction, if there are labels.
        """
        label = ""
        if frequent is not None:
            label = f", most frequent label {frequent[0]!r} ({frequent[1]:.1%})"
        self.line(
            f"trained for {seconds:.0f} s at {tokens_per_second:,.0f} tokens/s, "
            f"best epoch {best_epoch:.3g} of {epochs:.3g}{label}"
        )

    def close(self) -> None:
        """Ends the display, so that the terminal has its cursor back."""
        if self._has_bar:
            self._progress.stop()


def _clock_time(seconds: float | None) -> str:
    """Returns a time as hours, minutes and seconds. It is unknown before the first steps."""
    if seconds is None:
        return "-:--:--"
    return str(timedelta(seconds=round(seconds)))


def check_installed(names: Sequence[str]) -> None:
    """Raises UsageError for trackers that are not installed, about which accelerate would only warn."""
    installed = [str(name) for name in get_available_trackers()]
    missing = [name for name in names if name not in installed]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} not installed, needed for run.trackers. Run `pip install '.[tracking]'`, "
            "or change run.trackers"
        )


class MetricsLogger:
    """Records a run in metrics.jsonl and sends copies to the trackers.

    Only the main process records. ``project`` is the name of the project at the trackers. ``silent`` suppresses the
    messages that they print.
    """

    def __init__(self, folder: Path, *, trackers: Sequence[str], project: str, silent: bool) -> None:
        self._folder, self._names, self._project, self._silent = folder, trackers, project, silent
        self._trackers: dict[str, Any] = {}  # the trackers that have begun or resumed the run
        self._keys: dict[str, str] = {}  # the identifiers of the run at the trackers

    def start_trackers(self, metadata: RunRecord, *, step: int, changed: bool) -> None:
        """Begins or resumes the run in each tracker.

        A tracker that does not have the run gets all points of metrics.jsonl, and one that has it gets the points of
        the steps that are trained from now on. So after a kill it has the points between the checkpoint and the kill
        twice, with the same values. With other settings (``changed``) the tracker begins another run.

        A tracker that cannot start ends a run at step 0, because nothing is lost yet. Later the run continues without
        the tracker.
        """
        disable_telemetry()
        stored: dict[str, dict[str, str]] = {}  # the identifiers of the run in each tracker
        with suppress(OSError, ValueError, AttributeError):  # a damaged file counts as none
            if not changed:
                content = json.loads((self._folder / outputs.TRACKERS).read_text(encoding="utf-8"))
                stored = {name: entry for name, entry in content.items() if entry.get("project") == self._project}
        config = tracker_config(metadata)
        for key, value in config.items():
            if not isinstance(value, str | int | float | bool):
                config[key] = str(value)  # because TensorBoard takes neither lists nor null
        for name in self._names:
            with self._survived(name, "cannot start", fatal=step == 0):
                self._start(name, stored.get(name, {}).get("run"), config)
        started = {name: {"project": self._project, "run": self._keys[name]} for name in self._trackers}
        outputs.write_json(self._folder / outputs.TRACKERS, {**stored, **started})

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds a record to metrics.jsonl and to trackers. Drops a tracker that fails."""
        record = EventRecord.model_validate(event)
        outputs.append_event(self._folder, record)
        for name in tuple(self._trackers):
            with self._survived(name, f"failed at step {record.step}"):
                self._send(name, record)

    def close(self) -> None:
        """Lets every tracker write its pending records."""
        # A tuple, because a tracker that fails is removed meanwhile.
        for name, tracker in tuple(self._trackers.items()):
            with self._survived(name, "could not finish"):
                if name == "trackio":  # accelerate would leave the run to be ended, with a message, at exit
                    import_module("trackio").finish()
                else:
                    tracker.finish()
        self._trackers.clear()

    def _send(self, name: str, event: EventRecord) -> None:
        """Sends the numbers of an event to a tracker."""
        values = points(event)
        if name == "mlflow":
            values = {_NOT_IN_MLFLOW.sub("_", key): value for key, value in values.items()}
        if values:
            self._trackers[name].log(values, step=event.step)

    def _start(self, name: str, key: str | None, config: Mapping[str, Any]) -> None:
        """Begins the run in a tracker, or resumes the one with this identifier."""
        folder = self._folder.absolute()
        shown = folder.name
        if re.fullmatch(r"seed-\d+", shown):  # which says nothing without the name of the recipe's folder
            shown = f"{folder.parent.name}-{shown}"
        new_key = f"{shown}-{uuid.uuid4().hex[:8]}" if key is None else key
        options: dict[str, Any] = {"run_name": self._project}
        if name == "tensorboard":  # its files are written again, because metrics.jsonl has every point
            shutil.rmtree(self._folder / outputs.TENSORBOARD, ignore_errors=True)
            options, key = {"run_name": outputs.TENSORBOARD, "logging_dir": self._folder}, None
        elif name == "wandb":
            options |= {"name": shown, "id": new_key, "resume": "allow", "settings": dict(_WANDB)}
            if self._silent:
                options["settings"]["silent"] = True
            if "WANDB_DIR" not in os.environ:
                options["dir"] = str(self._folder)
        elif name == "mlflow":  # its own tag would be the path of the console script
            options = {"experiment_name": self._project, "run_id": key, "run_name": shown}
            options["tags"] = {"mlflow.source.name": "bert-tasks"}
        else:  # trackio knows runs by their names
            options |= {"name": new_key, "resume": "allow", "embed": False, "auto_log_gpu": False}
            options["auto_log_cpu"] = False
        tracker: Any = LOGGER_TYPE_TO_CLASS[name](**options)
        tracker.start()
        if name == "mlflow":  # which alone chooses the identifier itself
            new_key = tracker.tracker.info.run_id
        self._trackers[name], self._keys[name] = tracker, new_key
        if key is not None:  # the tracker has the run already
            return
        tracker.store_init_configuration(dict(config))
        for event in outputs.read_events(self._folder):
            self._send(name, event)

    @contextmanager
    def _survived(self, name: str, failure: str, *, fatal: bool = False) -> Iterator[None]:
        """Drops a tracker that raises any error, unless the error is fatal."""
        # Some trackers print, but standard output belongs to the result of the command.
        stream = io.StringIO() if self._silent else message_stream()
        try:
            with redirect_stdout(stream):
                yield
        except Exception as error:  # four libraries with errors of their own, none of which may end a run
            # The message may hold a key from the environment, and may be a page of HTML.
            text = masked(str(error).partition("\n")[0])[:300]
            reason = f"tracker {name} {failure} ({type(error).__name__}: {text})"
            if fatal:
                raise UsageError(f"{reason}. Fix this, or remove it from run.trackers") from error
            self._trackers.pop(name, None)
            _LOGGER.warning("%s. The run continues without it, and %s has all records", reason, outputs.EVENTS)


def step_record(log: StepLog, *, epoch: int, tokens_per_second: float, has_terms: bool) -> dict[str, Any]:
    """Returns the record of a step in metrics.jsonl, with its loss terms if it has several.

    ``epoch`` counts from 0.
    """
    record: dict[str, Any] = {"event": "step", "step": log.step + 1, "epoch": epoch + 1}
    record |= {"loss": log.loss, "learning_rate": log.learning_rate, "grad_norm": log.grad_norm}
    if has_terms:
        record["terms"] = dict(log.terms)
    record["tokens_per_second"] = round(tokens_per_second, 1)
    return record


def diverged_record(result: StepResult, *, epoch: int, rows: Sequence[int]) -> dict[str, Any]:
    """Returns the record of a step whose loss or gradient is not finite. ``epoch`` and ``rows`` count from 0."""
    loss, norm, *_ = result.values.tolist()
    record: dict[str, Any] = {"event": "diverged", "step": result.step + 1, "epoch": epoch + 1}
    record |= {"loss": loss, "learning_rate": result.learning_rate, "grad_norm": norm}
    record["rows"] = [row + 1 for row in rows]
    return record


def points(event: EventRecord) -> dict[str, float]:
    """Returns the finite numbers of an event by the names at the trackers, for example ``train/loss``."""
    values: dict[str, float] = {}
    if event.event == "step":
        shown = event.model_dump(exclude={"event", "step", "terms"}, exclude_unset=True)
        values = {f"train/{name}": value for name, value in {**shown, **event.terms}.items()}
    elif event.event == "evaluation":
        values = {f"validation/{name}": value for name, value in event.metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def tracker_config(metadata: RunRecord) -> dict[str, Any]:
    """Returns the versions and settings of run.json for trackers, without the folders of this machine."""
    shown = {name: getattr(metadata, name) for name in ("python", "platform", "processes", "device", "threads")}
    versions = {f"versions.{name}": version for name, version in metadata.versions.items()}
    named: dict[str, Any] = outputs.without_folders(metadata.settings)
    return {**named, **shown, **versions}

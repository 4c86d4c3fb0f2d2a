"""Whether a run on CPUs has more threads than there are cores for them, which can make it many times slower.

Owns the rule and what the machine tells of itself. A piece of that which is missing or unreadable is left out and never
an error. Must not know training.

What a run is made of, in words for people and as facts for run.json and for trackers.

Must not know what is done with them.

Whether all processes of a run are about to train the same thing.

Owns what is compared before the first step, and the error that names what differs. Must not know how training works.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.features import Cuts, tokenizer_content
from bert_tasks.encoder.attention import attention_backend
from bert_tasks.errors import DataError, UsageError
from bert_tasks.model.predicting import tokenizer_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.run_dir import files as outputs
from bert_tasks.storage import sha256_parts
from bert_tasks.training import state as run_folder
from bert_tasks.training.evaluation import TrainerState, best_metric, chosen_set, lower_is_better
from bert_tasks.training.job import Job
from bert_tasks.training.progress import MetricsLogger
from bert_tasks.training.step import TrainContext

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class CPUUse:
    """The threads of a run and the cores of its machine.

    Attributes:
        threads: of each process (``torch.get_num_threads``).
        processes: of the run on this machine, this one included.
        cores: that the run may use; a quota may be a fraction.
        load: how many threads of all programs want to run; None if it is not known, or if the run may use a part of
            the machine only, because the load then may be on the other cores.
    """

    threads: int
    processes: int
    cores: float
    load: float | None = None

    @property
    def free_cores(self) -> int:
        """The cores that other programs leave, at least 1. One thread of each process is part of the load."""
        others = 0.0 if self.load is None else max(0.0, self.load - self.processes)
        return max(1, round(int(self.cores) - others))


def thread_hint(use: CPUUse) -> str | None:
    """What to set where threads outnumber the cores; None where they do not."""
    total, free = use.threads * use.processes, use.free_cores
    if total <= use.cores and total <= free:
        return None
    what = f"{use.processes} x {use.threads} threads" if use.processes > 1 else f"{use.threads} threads"
    if use.threads == 1:
        if use.processes <= use.cores:
            return None  # other programs are busy, and this run cannot use fewer threads
        return f"{what} share {use.cores:g} cores, which slows training down: start at most {int(use.cores)} processes"
    busy = "" if total > use.cores else f", on which other programs are busy (load {use.load:.1f})"
    return (
        f"{what} share {use.cores:g} cores{busy}, which can slow training down many times: "
        f"set the environment variable OMP_NUM_THREADS={max(1, free // use.processes)}"
    )


def cpu_use(*, threads: int, processes: int, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> CPUUse:
    """What the machine tells now.

    Args:
        threads, processes: see ``CPUUse``.
        proc, cgroups: where the kernel shows its files.
    """
    present = os.cpu_count()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quotas = _quotas(proc, cgroups)
    known = [float(number) for number in (present, allowed) if number is not None]
    cores = max(1.0, min([*known, *quotas], default=1.0))
    is_whole = present is not None and cores >= present
    return CPUUse(threads=threads, processes=processes, cores=cores, load=_load(proc) if is_whole else None)


def _quotas(proc: Path, cgroups: Path) -> list[float]:
    """The cores that cpu.max allows to this process's control group and to those around it (version 2 only)."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            own = cgroups / line.removeprefix("0::/")
            folders = [own, *own.parents]
            for folder in folders[: folders.index(cgroups) + 1]:
                match _read(folder / "cpu.max").split():
                    case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                        found.append(int(quota) / int(period))
    return found


def _load(proc: Path) -> float | None:
    """The lower of the last minute's average and the threads that can run now.

    The average alone still counts a program that has ended, such as the last training run; the present number alone may
    count one that runs for a moment only.
    """
    try:
        average, _, _, now, _ = _read(proc / "loadavg").split()
        return min(float(average), float(now.partition("/")[0]))
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run_metadata(job: Job, stepper: TrainContext) -> dict[str, Any]:
    """For run.json."""
    task, device = job.model.task, stepper.accelerator.device
    return {
        **outputs.environment(),
        "seed": job.run.seed,
        "processes": stepper.accelerator.num_processes,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "attention": _attention(job, stepper.accelerator),
        "model": {} if job.model.origin is None else dict(vars(job.model.origin)),
        "task": task.name,
        "labels": list(task.labels),
        "metrics": metric_facts(job),
        "data": outputs.data_facts(job.splits),
        "rows": len(job.splits.train),
        "steps": stepper.total_steps,
        "initial_weights": weights_digest(job.model),
    }


def metric_facts(job: Job) -> dict[str, Any]:
    """What a reader of the metrics must know of them: the validation sets, what picks the best model, directions."""
    task, sets = job.model.task, list(job.splits.validation)
    return {
        "sets": sets,
        "best": best_metric(task, job.run, sets),
        "primary": task.primary_metric,
        "lower_is_better": sorted(lower_is_better(task)),
        "neutral": sorted(task.neutral_metrics),
    }


def weights_digest(model: TaskModel) -> str:
    """The sha256 over all weights, those of a new head included: what training starts from."""

    def parts() -> Iterator[bytes | memoryview]:
        for name, parameter in sorted(model.named_parameters()):
            yield name.encode()
            yield parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data

    return sha256_parts(parts())


def tracker_config(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a tracker shows beside the curves: run.json's settings, of a local model its name alone, and versions."""
    shown = ("python", "platform", "processes", "device", "threads")
    versions = {f"versions.{name}": version for name, version in facts["versions"].items()}
    named: dict[str, Any] = without_folders(settings)
    return {**named, **{name: facts[name] for name in shown}, **versions}


def without_folders(value: Any) -> Any:
    """Settings in which a path of this machine is its last name; a recipe that was resolved has absolute paths only."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    is_path = isinstance(value, str) and (PurePath(value).is_absolute() or PureWindowsPath(value).is_absolute())
    return PurePath(value.replace("\\", "/")).name if is_path else value


def log_run_summary(job: Job, stepper: TrainContext, journal: MetricsLogger) -> None:
    """Tells people what begins, and what of their data is not as they may think."""
    accelerator = stepper.accelerator
    journal.note(
        f"{accelerator.num_processes} x {accelerator.device.type}, attention {_attention(job, accelerator)}, "
        f"mixed precision {job.optim.mixed_precision}"
    )
    if accelerator.device.type == "cpu":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun: the processes on this machine
        processes = int(local) if local.isdecimal() else accelerator.num_processes
        hint = thread_hint(cpu_use(threads=torch.get_num_threads(), processes=processes))
        if hint is not None:
            journal.note(f"note: {hint}")
    report = job.model.load_report
    if report is not None:
        journal.note(report.summary())
    tables = {"train": job.splits.train} | {
        f"validation {name}".strip(): t for name, t in job.splits.validation.items()
    }
    for name, table in tables.items():
        for note in table.notes:
            journal.note(f"{name}: {note}")
    for note in job.model.task.cut_notes(Cuts.of(stepper.samples.features, rows=len(job.splits.train))):
        journal.note(f"train: {note}")


def collapse_notes(course: TrainerState, job: Job) -> tuple[str, ...]:
    """That the best model predicts one label only, and what may help; nothing where it does not."""
    if course.best_collapse is None:
        return ()
    name = chosen_set(course.task, job.run, list(job.splits.validation))
    where = f" of the validation set {name!r}" if name else ""
    *first, last = (
        f"a lower learning_rate (now {job.optim.learning_rate:g})",
        f"more epochs (now {job.optim.epochs})",
        *course.task.collapse_remedies,
    )
    return (
        f"the best model {course.best_collapse}{where}, although the labels of the validation rows differ. "
        f"Try {', '.join(first)} or {last}",
    )


def _attention(job: Job, accelerator: Accelerator) -> str:
    """The kernel that training will use, for the log: the choice never changes the mathematics."""
    config = job.model.config
    return attention_backend(
        device=accelerator.device,
        dtype=_DTYPES[job.optim.mixed_precision],
        head_size=config.head_size,
        dropout=config.attention_probs_dropout_prob,
    )


_OF_EACH = ("model.name", "model.revision")  # a machine may keep the weights elsewhere; DDP sends the first one's
_FROM_DATA = ("settings.labels", "data.")  # found in the rows, not stated
_MOST = 80  # characters of a value in the message


def check_agreement(job: Job, accelerator: Accelerator) -> None:
    """Compares labels, settings, rows and tokenizer over all processes.

    Which batches there are, and what a class number means, follows from these on each process alone: processes that
    differ would train different models without an error, or wait for each other forever.

    Raises:
        DataError: the labels or the rows differ, on every process; the message names which, and on which processes.
        UsageError: the same of settings or the tokenizer.
    """
    if accelerator.num_processes == 1:
        return
    found: list[dict[str, str]] = gather_object([_compared(job)])
    differing = disagreements(found)
    if not differing:
        return
    kind = DataError if all(name.startswith(_FROM_DATA) for name in differing) else UsageError
    error = kind(
        f"the {len(found)} processes of this run were given different things: {'; '.join(differing.values())}. "
        "Start all processes with the same recipe, the same arguments and the same files"
    )
    error.collective = True
    raise error


def disagreements(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Name -> what the processes have, in the order of the first process's names; empty if all agree."""
    names = dict.fromkeys(name for process in found for name in process)
    values = {name: [process.get(name, "not set") for process in found] for name in names}
    return {name: _told(name, each) for name, each in values.items() if len(set(each)) > 1}


def _compared(job: Job) -> dict[str, str]:
    settings: dict[str, Any] = {k: v for k, v in run_folder.settings(job).items() if k not in _OF_EACH}
    settings["tokenizer"] = tokenizer_content(tokenizer_of(job.model))
    return {name: json.dumps(value, ensure_ascii=False) for name, value in settings.items()}


def _told(name: str, values: Sequence[str]) -> str:
    """``settings.labels: ["0", "1"] on process 0, ["1", "0"] on processes 1, 2``."""
    processes: dict[str, list[str]] = {}
    for number, value in enumerate(values):
        processes.setdefault(value, []).append(str(number))
    shown = [
        f"{value if len(value) <= _MOST else value[: _MOST - 3] + '...'} on process{'es' if len(on) > 1 else ''} "
        f"{', '.join(on)}"
        for value, on in processes.items()
    ]
    return f"{name} is {'; '.join(shown)}"

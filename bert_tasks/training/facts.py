"""What a run is made of, in words for people and as facts for run.json and for trackers.

Must not know what is done with them.
"""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath, PureWindowsPath
from typing import Any

import torch
from accelerate import Accelerator

from bert_tasks.data.batching import Cuts
from bert_tasks.encoder.attention import attention_backend
from bert_tasks.model.task_model import TaskModel
from bert_tasks.training import outputs
from bert_tasks.training.job import Job
from bert_tasks.training.journal import Journal
from bert_tasks.training.selection import Course, best_metric, chosen_set, lower_is_better
from bert_tasks.training.steps import Stepper
from bert_tasks.training.threads import cpu_use, thread_hint

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run_facts(job: Job, stepper: Stepper) -> dict[str, Any]:
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
    """sha256 over all weights, a new head's included: what training starts from."""
    digest = sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def announce(job: Job, stepper: Stepper, journal: Journal) -> None:
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


def collapse_notes(course: Course, job: Job) -> tuple[str, ...]:
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

"""Whether all processes of a run are about to train the same thing.

Owns what is compared before the first step, and the error that names what differs. Must not know how training works.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.features_cache import tokenizer_content
from bert_tasks.errors import DataError, UsageError
from bert_tasks.model.predicting import tokenizer_of
from bert_tasks.training import run_folder
from bert_tasks.training.job import Job

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

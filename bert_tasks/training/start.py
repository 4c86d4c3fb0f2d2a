"""What a run says about itself when it begins: the content of run.json, and notes for people."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from bert_tasks.data.splits import Splits
from bert_tasks.distributed import thread_hint, usable_cores
from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.model.inputs import input_notes
from bert_tasks.recipe.schema import RunSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.windows import Windows
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.objectives import weights_digest
from bert_tasks.training.optim import attention_kernel, count_trained
from bert_tasks.training.step import OptimizerSteps


def run_environment(accelerator: Accelerator, task: Task) -> dict[str, Any]:
    """Returns what bit-equal results depend on besides the settings and the data."""
    device = accelerator.device
    return {
        **outputs.environment(Windows.of(task).libraries),
        "processes": accelerator.num_processes,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def run_metadata(steps: OptimizerSteps, splits: Splits, run: RunSection) -> dict[str, Any]:
    """Returns the content of run.json: what bit-equal results depend on, and what a reader of the metrics must know."""
    model, task = steps.objective.model, steps.objective.model.task
    vocabulary, adapters = steps.optimizer.vocabulary, steps.optimizer.adapters
    rows = None if vocabulary is None else {"trained": len(vocabulary.ids), "all": model.config.vocab_size}
    return {
        **run_environment(steps.accelerator, task),
        "seed": steps.seed,
        "attention": attention_kernel(model, steps.optim.mixed_precision),
        "model": {} if model.origin is None else dict(vars(model.origin)),
        "task": task.name,
        "labels": list(task.labels),
        "metrics": metric_metadata(task, run, list(splits.validation)),
        "data": outputs.data_metadata(splits),
        "rows": len(splits.train),
        "steps": steps.plan.total,
        "vocabulary_rows": rows,  # of the word embeddings; None: all that the settings do not freeze
        "trained_parameters": count_trained(steps.objective, adapters),
        "initial_weights": weights_digest(steps.objective.checkpoint_parameters()),
        # With adapters the checkpoints do not hold them: a resumed run needs the same ones.
        "encoder_weights": None if adapters is None else weights_digest(model.encoder.state_dict()),
    }


def start_notes(steps: OptimizerSteps, splits: Splits, attention: str) -> Iterator[str]:
    """Yields sentences for people: what begins, and what may be unexpected in the data."""
    accelerator, objective, optimizer = steps.accelerator, steps.objective, steps.optimizer
    model = objective.model
    yield (
        f"{accelerator.num_processes} x {accelerator.device.type}, attention {attention}, "
        f"mixed precision {steps.optim.mixed_precision}"
    )
    if accelerator.device.type == "cpu":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun: the processes on this machine
        processes = int(local) if local.isdecimal() else accelerator.num_processes
        hint = thread_hint(torch.get_num_threads(), processes, usable_cores())
        if hint is not None:
            yield f"note: {hint}"
        slow = slow_bfloat16() if steps.optim.mixed_precision == "bf16" else None
        if slow is not None:
            yield f'note: {slow}; set optim.mixed_precision = "no"'
    if model.load_report is not None:
        yield model.load_report.summary()
    if optimizer.adapters is not None:
        trained = count_trained(objective, optimizer.adapters)
        yield f"low-rank adapters and the head are trained: {trained:,} parameters"
    yield from optimizer.notes
    yield from objective.notes
    tables = {f"validation {name}".strip(): table for name, table in splits.validation.items()}
    for name, table in {"train": splits.train, **tables}.items():
        for text in table.notes:
            yield f"{name}: {text}"
    for text in input_notes(steps.samples, model, rows=len(splits.train)):
        yield f"train: {text}"

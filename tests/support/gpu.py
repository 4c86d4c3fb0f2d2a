"""Owns what the tests of tests/gpu share: the device, a checkpoint that the fast kernels take, and short runs.

Without a CUDA device the tests that compare it with the CPU are skipped, and the others run on the CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel
from bert_tasks.data.reading import read
from bert_tasks.distributed import make_accelerator
from bert_tasks.model.features import tokenized
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.step import OptimizerSteps, StepLog, read_step_metrics
from support.hf_models import hf_class, hf_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = "no" if DEVICE.type == "cpu" else "bf16"
# Heads of 16, which FlashAttention takes.
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
needs_cuda = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")


@contextmanager
def device_of_runs(device: torch.device) -> Iterator[None]:
    """Lets runs take this device, whatever the machine has."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def save_checkpoint(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, *, dropout: float = 0.0) -> Path:
    """Saves a small model without a task head."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    rates = dict.fromkeys((*names, "classifier_dropout_prob", "seq_classif_dropout"), dropout)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 66, "initializer_range": 0.1}
    torch.manual_seed(0)
    hf_class(family, "base")(hf_config(family, **WIDTHS, **sizes, **rates)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_device_steps(
    model: TaskModel, rows: Sequence[Any], *, objective: Objective | None = None, precision: str = "no", **optim: Any
) -> OptimizerSteps:
    """Returns the steps of a run on the device of runs."""
    options = {"max_steps": 30, "batch_size": 4, "learning_rate": 1e-4, "adam_epsilon": 1e-6, **optim}
    return OptimizerSteps(
        objective=Supervised(model) if objective is None else objective,
        samples=tokenized(read(list(rows), model.row_columns, require_labels=False), model),
        optim=OptimSection(mixed_precision=precision, **options),
        seed=3,
        accelerator=make_accelerator(precision),
    )


def run_steps(steps: OptimizerSteps, *, first: int = 0, count: int | None = None) -> list[StepLog]:
    """Runs all steps, or ``count`` steps from ``first`` on, and reads their numbers at the end."""
    results = [
        steps.update(step, batch, steps.backward(step, batch))
        for step, batch in steps.batches(first)
        if count is None or step < first + count
    ]
    return [
        read_step_metrics(result, overflows=0, mixed_precision=steps.optim.mixed_precision)[0] for result in results
    ]

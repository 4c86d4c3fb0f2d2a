"""One optimizer step: forward and backward over a batch's micro-batches, then the update.

Owns the arithmetic that makes a step independent of how its batch is cut: losses are summed, and the gradient is
divided once by the global count of labelled items. Must not know epochs, evaluation or files.

Shape legend: 0-dimensional tensors unless said otherwise.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from bert_tasks.data.batching import Samples, token_batches
from bert_tasks.errors import DivergedError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import Feature, LossSum, collate
from bert_tasks.training.optim import clip_and_scale
from bert_tasks.training.sampling import (
    epoch_batches,
    linear_schedule,
    rank_share,
    step_seed,
    total_steps,
    warmup_steps,
)

# With fp16 an overflow lowers the loss scale and skips the step, which is normal; this many in a row are not.
MOST_OVERFLOWS = 20


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """What every step of a run needs.

    Attributes:
        model: the model itself; ``prepared`` is what is called (wrapped for several processes or mixed precision).
        optimizer: as prepared; ``rates`` are its groups' learning rates before the schedule.
        total_steps: of the whole run.
    """

    accelerator: Accelerator
    model: TaskModel
    prepared: torch.nn.Module
    optimizer: Any
    rates: tuple[float, ...]
    samples: Samples
    optim: OptimSection
    seed: int
    total_steps: int

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return total_steps(len(self.samples), self.optim.batch_size, 1)

    def batches(self, epoch: int) -> list[list[int]]:
        """The samples of each optimizer step of an epoch."""
        return epoch_batches(self.samples.lengths, batch_size=self.optim.batch_size, seed=self.seed, epoch=epoch)

    def factor(self, step: int) -> float:
        """The schedule's factor for the step (from 0)."""
        warmup = warmup_steps(self.optim.warmup_ratio, self.total_steps)
        return linear_schedule(step, total_steps=self.total_steps, warmup_steps=warmup)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step's numbers, on their way from the device to the host.

    Attributes:
        values: ``[4]`` mean loss, gradient norm before clipping, 1 if either is not finite, and how many processes
            want to stop.
        ready: the event after which ``values`` may be read; None on the CPU.
    """

    step: int
    batch: Sequence[int]
    learning_rate: float
    values: Tensor
    ready: Any

    def numbers(self) -> dict[str, float]:
        """Waits for the values."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, _, _ = self.values.tolist()
        return {"step": self.step + 1, "loss": loss, "learning_rate": self.learning_rate, "grad_norm": norm}


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """A finished step in plain numbers. ``stop``: a process was asked to stop; all of them read the same."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    stop: bool = False


def accumulate(stepper: TrainContext, step: int, batch: Sequence[int]) -> Tensor:
    """Forward and backward of this process's share of the batch, leaving summed gradients.

    Gradients hold the sum of losses divided by the samples of the batch, a scale that keeps half precision in range.
    A process without samples runs the shortest one with weight 0, because the others wait for its gradients.

    Returns:
        ``[2]`` float64: summed loss and count over this process's samples.
    """
    accelerator, lengths = stepper.accelerator, stepper.samples.lengths
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(step_seed(stepper.seed, step, rank))
    share = rank_share(batch, lengths, rank=rank, world_size=world)
    weight = 1.0 if share else 0.0
    samples = share if share else [min(batch, key=lengths.__getitem__)]
    parts = token_batches(samples, lengths, max_tokens=stepper.optim.micro_batch_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(stepper.prepared):
            loss = _loss(stepper, part)
            accelerator.backward(loss.total * (weight / len(batch)))
        sums += torch.stack([loss.total.detach().double(), loss.count.double()]) * weight
    return sums


def _loss(stepper: TrainContext, samples: Sequence[int]) -> LossSum:
    features = cast("list[Feature]", stepper.samples.features_of(samples))
    packed = collate(features, position_offset=stepper.model.config.position_offset).to(stepper.accelerator.device)
    return stepper.model.task.loss(stepper.prepared(packed), packed)


def update(stepper: TrainContext, step: int, batch: Sequence[int], sums: Tensor, *, stop: bool = False) -> StepResult:
    """Scales the gradient to that of the mean over all labelled items, clips, and steps the optimizer.

    A loss or norm that is not finite skips the update on the device, without waiting for the host. ``stop``: this
    process wants to end; the others learn it with the step's numbers.
    """
    accelerator, optimizer = stepper.accelerator, stepper.optimizer
    total, count, stops = accelerator.reduce(torch.cat([sums, sums.new_tensor([float(stop)])]), reduction="sum")
    # Gradients are averaged over processes and already divided by the samples; no labels at all: no gradient.
    factor = torch.where(count > 0, accelerator.num_processes * len(batch) / count, 0.0)
    if stepper.optim.mixed_precision == "fp16":
        accelerator.unscale_gradients(optimizer)
    norm = clip_and_scale(stepper.model.parameters(), factor=factor, max_norm=stepper.optim.max_grad_norm)
    loss = total / count.clamp(min=1e-30)
    bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
    if stepper.optim.mixed_precision != "fp16":  # there the loss scaler skips
        optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, bad.float()
    for group, rate in zip(optimizer.param_groups, stepper.rates, strict=True):
        group["lr"] = rate * stepper.factor(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    values = torch.stack([loss, norm.double(), bad.double(), stops]).to("cpu", non_blocking=True)
    ready = None
    if accelerator.device.type == "cuda":
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
        ready.record()
    rate = max(stepper.rates) * stepper.factor(step)
    return StepResult(step=step, batch=batch, learning_rate=rate, values=values, ready=ready)


def read_step_metrics(
    result: StepResult,
    *,
    overflows: int,
    mixed_precision: str,
    rows_of: Callable[[Sequence[int]], Sequence[int]] = list,
) -> tuple[StepLog, int]:
    """Reads a step's numbers, one step later, when they have long arrived.

    Args:
        overflows: steps in a row that were skipped before this one.
        rows_of: the rows that samples are of, from 0.

    Returns:
        The numbers, and the steps in a row skipped now.

    Raises:
        DivergedError: the loss or the gradient was not finite. Weights are those before the step.
    """
    if result.ready is not None:
        result.ready.synchronize()
    loss, norm, bad, stops = result.values.tolist()
    log = StepLog(step=result.step, loss=loss, grad_norm=norm, learning_rate=result.learning_rate, stop=stops > 0)
    if not bad:
        return log, 0
    if mixed_precision == "fp16" and overflows + 1 < MOST_OVERFLOWS:
        return log, overflows + 1
    rows = [row + 1 for row in sorted(rows_of(result.batch))]
    raise DivergedError(
        f"step {result.step + 1}: the loss is {loss}, the gradient norm {norm}, "
        f"the learning rate {result.learning_rate:.3g}. The weights are those before this step. "
        f"Rows of the batch (the first of the data is 1): {', '.join(map(str, rows[:10]))}"
        f"{', ...' if len(rows) > 10 else ''}. "
        "Lower optim.learning_rate, raise optim.warmup_ratio, or look at those rows"
    )

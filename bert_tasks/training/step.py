"""One optimizer step: forward and backward over a batch's micro-batches, then the update.

Owns the arithmetic that makes a step independent of how its batch is cut: losses are summed, and the gradient is
divided once by the global count of labelled items. Must not know epochs, evaluation or files.

Shape legend: 0-dimensional tensors unless said otherwise.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate as accumulated
from itertools import pairwise
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from bert_tasks.data.features import Samples, token_batches
from bert_tasks.errors import DivergedError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import Feature, FeatureKeys, LossTerm, collate
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
    The totals of a second and further loss terms are multiplied by the reference count over their own count, so that
    dividing all gradients by the reference count gives the sum of the terms' means. The reference is the first term
    with a count. A process without samples runs the shortest one with weight 0, because the others wait for its
    gradients.

    Returns:
        ``[K, 2]`` float64: weighted sum and count of each of K loss terms over this process's samples.
    """
    accelerator, samples = stepper.accelerator, stepper.samples
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(step_seed(stepper.seed, step, rank))
    share = rank_share(batch, samples.lengths, rank=rank, world_size=world)
    weight = 1.0 if share else 0.0
    parts = _micro_batches(stepper, step, share if share else [min(batch, key=samples.lengths.__getitem__)])
    ratios = _count_ratios(stepper, parts, weight)
    sums = torch.zeros(1, dtype=torch.float64, device=accelerator.device)
    for position, features in enumerate(parts):
        last = position == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(stepper.prepared):
            terms = _loss(stepper, features)
            scaled = [term.total * (term.weight * weight / len(batch)) for term in terms]
            if ratios is not None:
                scaled = [total * ratio.to(total.dtype) for total, ratio in zip(scaled, ratios, strict=True)]
            accelerator.backward(scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum())
        values = [torch.stack([term.total.detach().double() * term.weight, term.count.double()]) for term in terms]
        sums = sums + torch.stack(values) * weight
    return sums


def _micro_batches(stepper: TrainContext, step: int, chosen: Sequence[int]) -> list[list[Feature]]:
    """The prepared features of some samples, cut into micro-batches."""
    samples = stepper.samples
    numbers = samples.indices(chosen)
    keys = FeatureKeys(seed=stepper.seed, epoch=step // stepper.epoch_steps, numbers=numbers)
    features = cast("list[Feature]", samples.features_of(chosen))
    features = list(stepper.model.task.prepare(features, keys, cast("Sequence[Feature]", samples.features)))
    starts = accumulated((int(samples.starts[one + 1] - samples.starts[one]) for one in chosen), initial=0)
    windows = [features[start:end] for start, end in pairwise(starts)]
    lengths = [sum(len(feature["input_ids"]) for feature in one) for one in windows]
    parts = token_batches(range(len(windows)), lengths, max_tokens=stepper.optim.micro_batch_tokens)
    return [[feature for one in part for feature in windows[one]] for part in parts]


def _count_ratios(stepper: TrainContext, parts: Sequence[Sequence[Feature]], weight: float) -> Tensor | None:
    """``[K]`` the reference count over the count of each term, over all processes; None for a single term.

    A term that has no count anywhere gets 0. Nothing waits for the device.
    """
    counts = [stepper.model.task.counts(features) for features in parts]
    if len(counts[0]) == 1:
        return None
    own = torch.tensor([list(part.values()) for part in counts], dtype=torch.float64).sum(dim=0) * weight
    device = stepper.accelerator.device
    total = stepper.accelerator.reduce(own.to(device, non_blocking=True), reduction="sum")
    return torch.where(total > 0, _reference_count(total) / total, 0.0)


def _reference_count(counts: Tensor) -> Tensor:
    """The first of the counts that is not 0."""
    return counts.index_select(0, (counts > 0).int().argmax().view(1)).squeeze(0)


def _loss(stepper: TrainContext, features: Sequence[Feature]) -> tuple[LossTerm, ...]:
    packed = collate(features, position_offset=stepper.model.config.position_offset).to(stepper.accelerator.device)
    return stepper.model.task.loss(stepper.prepared(packed), packed)


def update(stepper: TrainContext, step: int, batch: Sequence[int], sums: Tensor, *, stop: bool = False) -> StepResult:
    """Scales the gradient to that of the sum of the terms' means, clips, and steps the optimizer.

    A loss or norm that is not finite skips the update on the device, without waiting for the host. ``stop``: this
    process wants to end; the others learn it with the step's numbers.
    """
    accelerator, optimizer = stepper.accelerator, stepper.optimizer
    *values, stops = accelerator.reduce(torch.cat([sums.flatten(), sums.new_tensor([float(stop)])]), reduction="sum")
    totals, counts = torch.stack(values).view(-1, 2).unbind(dim=1)
    count = _reference_count(counts)
    # Gradients are averaged over processes and already divided by the samples; no labels at all: no gradient.
    factor = torch.where(count > 0, accelerator.num_processes * len(batch) / count, 0.0)
    if stepper.optim.mixed_precision == "fp16":
        accelerator.unscale_gradients(optimizer)
    norm = clip_and_scale(stepper.model.parameters(), factor=factor, max_norm=stepper.optim.max_grad_norm)
    loss = (totals / counts.clamp(min=1e-30)).sum()
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

"""The arithmetic of an optimizer step.

This module chooses the samples of a process, cuts them into micro-batches, runs backward and updates the weights. A
step gives the same gradient however its batch is cut into micro-batches and divided over processes. The mean of the
means of micro-batches would not, because they have different numbers of labels. With the loss terms k of weight w_k,
their totals t_k of a micro-batch, their totals T_k and counts C_k over all micro-batches and processes, n samples in
the batch and R processes:

    loss of the step            sum over k of  w_k x T_k / C_k
    backward of a micro-batch   sum over k of  t_k x w_k x (C_ref / C_k) / n
    factor, with the clipping   R x n / C_ref

C_ref is the first count that is not 0, and terms without a count are skipped. Division by n keeps half precision in
range, and the factor undoes it together with the mean over processes that DDP computes. A single term has C_ref / C_k =
1, so the counts are needed before its backward pass only if there are several terms.

The module also owns when training has diverged. It knows neither evaluation nor files.

Shape legend: 0-dimensional tensors unless said otherwise, K loss terms.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from bert_tasks.data.features import Samples, token_batches
from bert_tasks.encoder.cpu import reuse_bfloat16_weights
from bert_tasks.errors import DivergedError
from bert_tasks.model.windows import pack_features
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.training.objectives import Objective
from bert_tasks.training.optim import ModelOptimizer, OptimizerFactory
from bert_tasks.training.sampling import SampleOrder, learning_rate_factor, rank_share, step_seed

# With fp16 an overflow lowers the loss scale and skips the step. This number of them in a row is not normal.
MOST_OVERFLOWS = 20


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The numbers of a step, on their way from the device to the host.

    Attributes:
        values: ``[4 + K]`` the mean loss, the gradient norm before clipping, 1 if either is not finite, how many
            processes want to stop, and the mean of each loss term, which is NaN if the term counted nothing.
        terms: Names of the loss terms.
        ready: The event after which ``values`` may be read. None on the CPU.
    """

    step: int
    batch: Sequence[int]
    learning_rate: float
    values: Tensor
    ready: Any
    terms: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """A finished step in plain numbers.

    Attributes:
        loss: The weighted sum of ``terms``.
        terms: The mean of each loss term that counted something, by name.
        stop: True if a process was asked to stop. All processes read the same value.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    terms: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The numbers of optimizer steps of the whole run, of its warm-up, and of the decay in the schedule ``wsd``."""

    total: int
    warmup: int
    decay: int

    @classmethod
    def of(cls, optim: OptimSection, order: SampleOrder) -> Self:
        """Returns the plan of a run with these settings and batches."""
        total = order.first_step(optim.epochs) if optim.max_steps is None else optim.max_steps
        # Fractions of a step are rounded up, as in transformers' Trainer.
        warmup, decay = math.ceil(optim.warmup_ratio * total), math.ceil(optim.decay_ratio * total)
        return cls(total=total, warmup=warmup, decay=decay)


class OptimizerSteps:
    """The optimizer steps of a run.

    Attributes:
        objective: The objective to minimise.
        samples: The tokenised training rows.
        optimizer: The trained parameters and their optimizer.
        order: The samples that form each step.
        plan: The number of steps.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        samples: Samples,
        optim: OptimSection,
        seed: int,
        accelerator: Accelerator,
        factory: OptimizerFactory | None = None,
    ) -> None:
        """Moves the objective to the device and makes its `ModelOptimizer`."""
        self.objective, self.samples, self.optim = objective, samples, optim
        self.seed, self.accelerator = seed, accelerator
        self.order = SampleOrder.of(samples, optim, seed=seed)
        self.plan = StepPlan.of(optim, self.order)
        objective.to(accelerator.device)
        objective.train()
        objective.zero_grad(set_to_none=True)
        self.optimizer = ModelOptimizer(
            objective, samples.features, optim, seed=seed, accelerator=accelerator, factory=factory
        )

    def batches(self, first: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Returns the steps of the run from ``first`` on, each with its samples."""
        return self.order.batches(first, self.plan.total)

    def choose(self, batch: Sequence[int]) -> tuple[list[int], float]:
        """Returns the samples of a batch that this process computes, and their weight.

        A process without samples computes the shortest one with weight 0, because the others wait for its gradients.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        share = rank_share(batch, self.samples.lengths, rank=rank, world_size=world)
        if share:
            return share, 1.0
        return [min(batch, key=self.samples.lengths.__getitem__)], 0.0

    def cut(self, step: int, batch: Sequence[int]) -> list[list[Feature]]:
        """Returns the prepared features in micro-batches, which are cut between samples.

        The windows of a long sample stay together, because its logits may be computed from all of them.
        """
        samples = self.samples
        keys = FeatureKeys(seed=self.seed, epoch=self.order.epoch_of(step), numbers=samples.indices(batch))
        stored = cast("Sequence[Feature]", samples.features_of(batch))
        prepared = iter(self.objective.prepare(stored, keys, cast("Sequence[Feature]", samples.features)))
        windows: list[list[Feature]] = []  # of each sample
        lengths: list[int] = []
        for i in batch:
            count = int(samples.starts[i + 1] - samples.starts[i])
            sample = list(islice(prepared, count))
            windows.append(sample)
            lengths.append(sum(len(feature["input_ids"]) for feature in sample))
        micro_batches: list[list[Feature]] = []
        for numbers in token_batches(range(len(windows)), lengths, max_tokens=self.optim.micro_batch_tokens):
            features: list[Feature] = []
            for i in numbers:
                features += windows[i]
            micro_batches.append(features)
        return micro_batches

    @reuse_bfloat16_weights()
    def backward(self, step: int, batch: Sequence[int]) -> tuple[LossTerm, ...]:
        """Computes the gradients of a batch, which ``update`` scales.

        Returns:
            The loss terms of this process for the whole batch, with float64 totals and counts.
        """
        accelerator, optimizer = self.accelerator, self.optimizer
        self.objective.train()
        optimizer.begin_step()
        # Dropout depends on the step and the process alone, so that a resumed run draws the same numbers.
        torch.manual_seed(step_seed(self.seed, step, accelerator.process_index))
        share, weight = self.choose(batch)
        micro_batches = self.cut(step, share)
        ratios = self._ratios(micro_batches, weight)
        terms: tuple[LossTerm, ...] = ()
        tables = []
        with optimizer.attached():  # the backward pass, too, may run layers
            for features in micro_batches:
                # DDP averages the gradients of all processes in a backward pass. Only the last one needs that.
                synchronization: AbstractContextManager[None] = nullcontext()
                if features is not micro_batches[-1]:
                    synchronization = accelerator.no_sync(optimizer.wrapped_objective)
                with synchronization:
                    terms = self._add_gradients(features, weight / len(batch), ratios)
                tables.append(_term_table(terms))
        for parameter in optimizer.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # so that the norm has each row once, as a sum
        sums = torch.stack(tables).sum(dim=0) * weight  # [K, 2]
        return tuple(replace(term, total=total, count=count) for term, (total, count) in zip(terms, sums, strict=True))

    def _ratios(self, micro_batches: Sequence[Sequence[Feature]], weight: float) -> Tensor | None:
        """Returns C_ref / C_k ``[K]``, which is 0 for a term without a count, or None if there is one term."""
        counts = [list(self.objective.counts(features).values()) for features in micro_batches]
        if len(counts[0]) == 1:
            return None
        counted = torch.tensor(counts, dtype=torch.float64).sum(dim=0) * weight
        total = self.accelerator.reduce(counted.to(self.accelerator.device, non_blocking=True), reduction="sum")
        return torch.where(total > 0, _reference_count(total) / total, 0.0)

    def _add_gradients(self, features: Sequence[Feature], scale: float, ratios: Tensor | None) -> tuple[LossTerm, ...]:
        """Adds the gradients of the terms, times ``scale`` and ``ratios``. Returns the terms without a graph."""
        batch = pack_features(self.objective.model, features)
        terms: tuple[LossTerm, ...] = self.optimizer.wrapped_objective(batch)
        losses = [term.total * (term.weight * scale) for term in terms]
        if ratios is not None:
            losses = [loss * ratio.to(loss.dtype) for loss, ratio in zip(losses, ratios, strict=True)]
        loss = losses[0]
        if len(losses) > 1:
            loss = torch.stack(losses).sum()
        self.accelerator.backward(loss)
        return tuple(replace(term, total=term.total.detach()) for term in terms)

    def update(self, step: int, batch: Sequence[int], terms: Sequence[LossTerm], *, stop: bool = False) -> StepResult:
        """Scales and clips the gradients, and updates the weights.

        Nothing is updated if the loss or a gradient is not finite. The host does not wait for the device here. It
        learns of that, and of the loss, when it reads the result.

        Args:
            step: The number of the step, from 0.
            batch: Its samples.
            terms: What ``backward`` returned.
            stop: True tells the other processes that this one was asked to stop.
        """
        accelerator, plan = self.accelerator, self.plan
        table = _term_table(terms)
        flags = table.new_full((1,), float(stop))
        # One message carries the totals, the counts and the flags, because each one costs the processes a round trip.
        *values, stops = accelerator.reduce(torch.cat([table.flatten(), flags]), reduction="sum")
        totals, counts = torch.stack(values).view(-1, 2).unbind(dim=1)
        count = _reference_count(counts)
        # A batch without a label has no gradient.
        factor = torch.where(count > 0, accelerator.num_processes * len(batch) / count, 0.0)
        # Gradients of fp16 are multiplied by the loss scale, which the norm must not include.
        if self.optim.mixed_precision == "fp16":
            accelerator.unscale_gradients(self.optimizer.accelerated)
        norm = clip_and_scale(self.optimizer.parameters, factor=factor, max_norm=self.optim.max_grad_norm)
        means = totals / counts.clamp(min=1e-30)  # 0 instead of NaN without a count, so that the loss stays finite
        loss = torch.stack([mean * term.weight for mean, term in zip(means, terms, strict=True)]).sum()
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        schedule = learning_rate_factor(
            step, self.optim.lr_scheduler_type, total_steps=plan.total, warmup_steps=plan.warmup, decay_steps=plan.decay
        )
        self.optimizer.step(schedule, bad)
        # One copy to the host for all numbers, which does not wait for the device.
        numbers = torch.stack([loss, norm.double(), bad.double(), stops])
        numbers = torch.cat([numbers, torch.where(counts > 0, means, torch.nan)]).to("cpu", non_blocking=True)
        ready = None
        if accelerator.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            ready.record()
        return StepResult(
            step=step,
            batch=batch,
            learning_rate=max(self.optimizer.rates) * schedule,
            values=numbers,
            ready=ready,
            terms=tuple(term.name for term in terms),
        )


def _term_table(terms: Sequence[LossTerm]) -> Tensor:
    """Returns ``[K, 2]`` float64, the total and the count of each loss term."""
    return torch.stack([torch.stack([term.total.double(), term.count.double()]) for term in terms])


def _reference_count(counts: Tensor) -> Tensor:
    """Returns the first of the counts that is not 0."""
    return counts.index_select(0, (counts > 0).int().argmax().view(1)).squeeze(0)


def read_step_metrics(
    result: StepResult,
    *,
    overflows: int,
    mixed_precision: str,
    rows_of: Callable[[Sequence[int]], Sequence[int]] = list,
) -> tuple[StepLog, int]:
    """Reads the numbers of a step, usually while the next one runs.

    Args:
        result: The numbers of the step.
        overflows: The number of steps in a row that were skipped before this one.
        mixed_precision: The number format of the run. With "fp16" some steps overflow, until the loss scale is low
            enough.
        rows_of: Returns the rows of samples, counted from 0.

    Returns:
        The numbers of the step, and the number of steps in a row that were skipped up to this one.

    Raises:
        DivergedError: The loss or the gradient was not finite. The weights are those before the step.
    """
    if result.ready is not None:
        result.ready.synchronize()
    loss, norm, bad, stops, *means = result.values.tolist()
    terms = {name: mean for name, mean in zip(result.terms, means, strict=True) if not math.isnan(mean)}
    numbers = {"loss": loss, "grad_norm": norm, "learning_rate": result.learning_rate}
    log = StepLog(step=result.step, **numbers, terms=terms, stop=stops > 0)
    if not bad:
        return log, 0
    # The loss scaler of fp16 has skipped the update and lowered its scale, so the next step may succeed.
    if mixed_precision == "fp16" and overflows + 1 < MOST_OVERFLOWS:
        return log, overflows + 1
    rows = [row + 1 for row in sorted(rows_of(result.batch))]
    shown = ", ".join(map(str, rows[:10]))
    if len(rows) > 10:
        shown += ", ..."
    raise DivergedError(
        f"step {result.step + 1}: the loss is {loss}, the gradient norm {norm}, "
        f"the learning rate {result.learning_rate:.3g}. The weights are not changed. "
        f"The batch has the rows {shown} (the first of the data is 1). "
        "Lower optim.learning_rate, raise optim.warmup_ratio, or look at these rows"
    )


def clip_and_scale(parameters: Iterable[nn.Parameter], *, factor: Tensor, max_norm: float | None) -> Tensor:
    """Scales summed gradients by ``factor``, then clips their norm to ``max_norm``.

    Both happen in one multiplication, and nothing waits for the device. The coefficient is the one of
    ``torch.nn.utils.clip_grad_norm_``.

    Args:
        parameters: Parameters without a gradient are not changed. Sparse gradients are coalesced.
        factor: 0-dimensional, on the gradients' device. It is processes x samples of the batch over the global count of
            labels, and 0 without labels.
        max_norm: The largest global norm. None clips nothing.

    Returns:
        The norm after ``factor`` and before clipping. It is not finite if a gradient is not.
    """
    present = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient.values() if gradient.is_sparse else gradient for gradient in present]
    if not gradients:
        return factor.new_zeros(())
    # The functions with "foreach" run one kernel for all gradients instead of one for each.
    norms = torch.stack(torch._foreach_norm(gradients))
    scale = factor.to(norms.dtype)
    norm: Tensor = torch.linalg.vector_norm(norms) * scale
    if max_norm is not None:
        scale = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm

"""The optimizer steps of a run: gradients of a batch, their scaling and clipping, the update, and a step's numbers.

Owns the arithmetic of a step, which parameter gets which learning rate and weight decay, and when training has
diverged. It knows neither evaluation nor files.

Shape legend: 0-dimensional tensors unless said otherwise; K loss terms.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from bert_tasks.data.table import Samples, token_batches
from bert_tasks.encoder.cpu import constant_weights
from bert_tasks.encoder.lora import Adapters
from bert_tasks.errors import DivergedError, UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks.base import Feature, FeatureKeys
from bert_tasks.training.objectives import Objective
from bert_tasks.training.sampling import BatchSize, SampleOrder, learning_rate_factor, rank_share, step_seed
from bert_tasks.training.vocabulary import TrainedVocabulary

# With fp16 an overflow lowers the loss scale and skips the step, which is normal; this many in a row are not.
MOST_OVERFLOWS = 20
# 0.999999^(2^23) is 0.0002; float32, in which AdamW counts, holds as many further steps.
_WITHOUT_CORRECTION = 2.0**23


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step's numbers, on their way from the device to the host.

    Attributes:
        values: ``[4 + K]`` mean loss, gradient norm before clipping, 1 if either is not finite, how many processes
            want to stop, and the mean of each loss term, not a number without a count.
        terms: the names of the loss terms.
        ready: the event after which ``values`` may be read; None on the CPU.
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
        loss: the weighted sum of ``terms``.
        terms: name -> mean of each loss term that counted something.
        stop: a process was asked to stop; all of them read the same.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    terms: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Numbers of optimizer steps: of the run, of the warm-up, and of the decay of ``wsd``."""

    total: int
    warmup: int
    decay: int

    @classmethod
    def of(cls, optim: OptimSection, order: SampleOrder) -> Self:
        total = order.first_step(optim.epochs) if optim.max_steps is None else optim.max_steps
        # Shares are rounded up as in HF's Trainer.
        warmup, decay = (math.ceil(share * total) for share in (optim.warmup_ratio, optim.decay_ratio))
        return cls(total=total, warmup=warmup, decay=decay)


def sample_order(samples: Samples, optim: OptimSection, seed: int) -> SampleOrder:
    """Which samples form each step of a run."""
    size = BatchSize(samples=optim.batch_size, tokens=optim.batch_tokens)
    return SampleOrder(samples.lengths, size, seed=seed)


class OptimizerSteps:
    """The optimizer steps of a run: which samples form each of them, its gradients, and its update.

    The arithmetic makes a step independent of how its batch is cut: losses are summed over micro-batches and processes,
    and gradients are divided once by a global count of labelled items.

    Attributes:
        objective: what is minimised; ``prepared`` is what is called (wrapped for several processes or mixed precision).
        optimizer: AdamW as accelerate prepared it; ``rates`` are its groups' learning rates before the schedule.
        order: which samples form each step; ``plan``: how many steps there are; ``total_steps``: of the run.
        vocabulary: the rows of the word embeddings that are trained; None: all.
        adapters: what is trained in place of the encoder's weights; None: these themselves.
    """

    def __init__(
        self, *, objective: Objective, samples: Samples, optim: OptimSection, seed: int, accelerator: Accelerator
    ) -> None:
        """Moves the objective to the device and makes its optimizer."""
        self.objective, self.samples, self.optim = objective, samples, optim
        self.seed, self.accelerator = seed, accelerator
        self.order = sample_order(samples, optim, seed)
        self.plan = StepPlan.of(optim, self.order)
        self.total_steps = self.plan.total
        objective.to(accelerator.device)
        objective.train()
        objective.zero_grad(set_to_none=True)
        set_sparse_gradients(objective, accelerator.device.type == "cpu" and accelerator.num_processes == 1)
        self._tables: dict[nn.Parameter, Tensor] = {}
        self._term_weights: dict[str, float] = {}  # of each loss term, as the batches so far had them
        self.vocabulary: TrainedVocabulary | None = None
        if optim.vocabulary_rows == "in_data" and not objective.reads_all_embeddings:
            if accelerator.num_processes > 1:  # DDP sends the parameters of the main process, the rows left out not
                broadcast(objective.model.encoder.embeddings.word.weight.data)
            self.vocabulary = TrainedVocabulary.of(objective.model, samples.features)
        self.adapters = make_adapters(objective, optim, seed)
        self.prepared: nn.Module
        self.optimizer: Any
        with self._trained_parameters():
            groups = parameter_groups(
                objective,
                learning_rate=optim.learning_rate,
                weight_decay=optim.weight_decay,
                head_learning_rate=optim.head_learning_rate,
                layerwise_lr_decay=optim.layerwise_lr_decay,
            )
            self.rates = tuple(group["lr"] for group in groups)
            betas = (optim.adam_beta1, optim.adam_beta2)
            optimizer = torch.optim.AdamW(groups, betas=betas, eps=optim.adam_epsilon, fused=True)
            if not optim.bias_correction:
                disable_bias_correction(optimizer)
            self.prepared, self.optimizer = accelerator.prepare(objective, optimizer)

    def batches(self, first: int = 0) -> Iterator[tuple[int, list[int]]]:
        """The steps of the run from ``first`` on, each with its samples."""
        return self.order.batches(first, self.total_steps)

    @constant_weights()
    def accumulate(self, step: int, batch: Sequence[int]) -> Tensor:
        """Forward and backward of this process's share of the batch, leaving summed gradients.

        Gradients hold the sum of losses divided by the samples of the batch, a scale that keeps half precision in
        range. The total of each loss term is multiplied by the reference count over its own count, so that dividing all
        gradients by the reference count gives the sum of the terms' means; the reference is the first term with a
        count. A process without samples runs the shortest one with weight 0, because the others wait for its gradients.

        Returns:
            ``[K, 2]`` float64: sum and count of each loss term over this process's samples.
        """
        accelerator, samples, objective = self.accelerator, self.samples, self.objective
        objective.train()
        if self.adapters is not None:
            self.adapters.remove()
        rank, world = accelerator.process_index, accelerator.num_processes
        torch.manual_seed(step_seed(self.seed, step, rank))
        share = rank_share(batch, samples.lengths, rank=rank, world_size=world)
        weight = 1.0 if share else 0.0
        chosen = share if share else [min(batch, key=samples.lengths.__getitem__)]

        # The features as this step sees them, cut into micro-batches between samples.
        keys = FeatureKeys(seed=self.seed, epoch=self.order.epoch_of(step), numbers=samples.indices(chosen))
        stored, corpus = (cast("Sequence[Feature]", one) for one in (samples.features_of(chosen), samples.features))
        prepared = iter(objective.prepare(stored, keys, corpus))
        windows = [list(islice(prepared, int(samples.starts[i + 1] - samples.starts[i]))) for i in chosen]
        lengths = [sum(len(feature["input_ids"]) for feature in one) for one in windows]
        parts = token_batches(range(len(windows)), lengths, max_tokens=self.optim.micro_batch_tokens)
        micro_batches = [[feature for one in part for feature in windows[one]] for part in parts]

        ratios = None  # [K] the reference count over the count of each term, over all processes; 0 without a count
        counts = [list(objective.counts(features).values()) for features in micro_batches]
        if len(counts[0]) > 1:
            own = torch.tensor(counts, dtype=torch.float64).sum(dim=0) * weight
            total = accelerator.reduce(own.to(accelerator.device, non_blocking=True), reduction="sum")
            ratios = torch.where(total > 0, _reference_count(total) / total, 0.0)

        sums = []
        with self._trained_parameters():  # the backward pass, too, may run layers
            for features in micro_batches:
                is_last = features is micro_batches[-1]
                with nullcontext() if is_last else accelerator.no_sync(self.prepared):
                    sums.append(self._gradients(features, weight / len(batch), ratios))
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # each row once
        return torch.stack(sums).sum(dim=0) * weight

    def _gradients(self, features: Sequence[Feature], scale: float, ratios: Tensor | None) -> Tensor:
        """Adds the gradients of a batch, each loss term's multiplied by ``scale`` and its ratio, to the parameters'.

        Returns:
            ``[K, 2]`` float64: sum and count of each loss term.
        """
        terms = self.prepared(self.objective.model.packed(features))
        losses = [term.total * (term.weight * scale) for term in terms]
        if ratios is not None:
            losses = [loss * ratio.to(loss.dtype) for loss, ratio in zip(losses, ratios, strict=True)]
        self.accelerator.backward(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        self._term_weights = {term.name: term.weight for term in terms}
        return torch.stack([torch.stack([term.total.detach().double(), term.count.double()]) for term in terms])

    def update(self, step: int, batch: Sequence[int], sums: Tensor, *, stop: bool = False) -> StepResult:
        """Scales the gradient to that of the sum of the terms' means, clips it, and steps the optimizer.

        A loss or norm that is not finite skips the update on the device, without waiting for the host. ``stop``: this
        process wants to end; the others learn it with the step's numbers.
        """
        accelerator, optimizer, precision = self.accelerator, self.optimizer, self.optim.mixed_precision
        flags = sums.new_tensor([float(stop)])
        *values, stops = accelerator.reduce(torch.cat([sums.flatten(), flags]), reduction="sum")
        totals, counts = torch.stack(values).view(-1, 2).unbind(dim=1)
        count = _reference_count(counts)
        # Gradients are averaged over processes and already divided by the samples; no labels at all: no gradient.
        factor = torch.where(count > 0, accelerator.num_processes * len(batch) / count, 0.0)
        if precision == "fp16":
            accelerator.unscale_gradients(optimizer)
        norm = clip_and_scale(self.parameters, factor=factor, max_norm=self.optim.max_grad_norm)
        means = totals / counts.clamp(min=1e-30)
        loss = torch.stack([mean * part for mean, part in zip(means, self._term_weights.values(), strict=True)]).sum()
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        if precision != "fp16":  # there the loss scaler skips
            optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, bad.float()
        schedule = learning_rate_factor(
            step,
            self.optim.lr_scheduler_type,
            total_steps=self.plan.total,
            warmup_steps=self.plan.warmup,
            decay_steps=self.plan.decay,
        )
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * schedule
        with self._dense_gradients():
            optimizer.step()
        if self.vocabulary is not None:
            self.vocabulary.add_step(optimizer.param_groups, bad)
        optimizer.zero_grad(set_to_none=True)
        numbers = torch.stack([loss, norm.double(), bad.double(), stops])
        numbers = torch.cat([numbers, torch.where(counts > 0, means, torch.nan)]).to("cpu", non_blocking=True)
        ready = None
        if accelerator.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            ready.record()
        rate = max(self.rates) * schedule
        terms = tuple(self._term_weights)
        return StepResult(step=step, batch=batch, learning_rate=rate, values=numbers, ready=ready, terms=terms)

    def update_weights(self) -> None:
        """Brings all weights of the model up to date; call it before anything but a step reads them."""
        if self.vocabulary is not None:
            self.vocabulary.update_table()
        if self.adapters is not None:
            self.adapters.merge()

    def release(self) -> None:
        """Ends training: the word embeddings are up to date, and an encoder with adapters has its own weights again.

        The memory that only the optimizer needs is freed.
        """
        if self.vocabulary is not None:
            self.vocabulary.update_table()
        if self.adapters is not None:
            self.adapters.remove()
        self.optimizer.optimizer.state.clear()
        self._tables.clear()

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that checkpoints hold, under their names there: with adapters those that are trained."""
        if self.adapters is None:
            return self.objective.checkpoint_parameters()
        with self._trained_parameters():
            every = self.objective.checkpoint_parameters()
        return {name: parameter for name, parameter in every.items() if parameter.requires_grad}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _trained_parameters(self) -> AbstractContextManager[None]:
        """Meanwhile the model holds the parameters that are trained."""
        if self.adapters is not None:  # then the word embeddings are frozen
            return self.adapters.attached()
        return nullcontext() if self.vocabulary is None else self.vocabulary.attached()

    @contextmanager
    def _dense_gradients(self) -> Iterator[None]:
        """Replaces sparse gradients by tables, which hold zeros otherwise, so that only a batch's rows are written."""
        written = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                if parameter not in self._tables:
                    self._tables[parameter] = torch.zeros_like(parameter)
                table, rows = self._tables[parameter], gradient.indices().squeeze(0)
                parameter.grad = table.index_copy_(0, rows, gradient.values())
                written.append((table, rows))
        yield
        for table, rows in written:
            table.index_fill_(0, rows, 0.0)


def _reference_count(counts: Tensor) -> Tensor:
    """The first of the counts that is not 0."""
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
        overflows: steps in a row that were skipped before this one.
        rows_of: the rows that samples are of, from 0.

    Returns:
        The numbers, and the steps in a row skipped now.

    Raises:
        DivergedError: the loss or the gradient was not finite. Weights are those before the step.
    """
    if result.ready is not None:
        result.ready.synchronize()
    loss, norm, bad, stops, *means = result.values.tolist()
    terms = {name: mean for name, mean in zip(result.terms, means, strict=True) if not math.isnan(mean)}
    numbers = {"loss": loss, "grad_norm": norm, "learning_rate": result.learning_rate}
    log = StepLog(step=result.step, **numbers, terms=terms, stop=stops > 0)
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


def parameter_groups(
    model: Objective | TaskModel,
    *,
    learning_rate: float,
    weight_decay: float,
    head_learning_rate: float | None = None,
    layerwise_lr_decay: float | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters in groups of equal learning rate and weight decay.

    The rate falls by the factor ``layerwise_lr_decay`` with each step down from the head, whose own rate
    ``head_learning_rate`` replaces. Biases and layer norms do not decay; they are found by their modules, because
    families name them differently.
    """
    depths = model.parameter_depths()
    top = max(depths.values())
    undecayed = {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or parameter is getattr(module, "bias", None)
    }
    factor = 1.0 if layerwise_lr_decay is None else layerwise_lr_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = learning_rate * factor ** (top - depths[name])
        if head_learning_rate is not None and depths[name] == top:
            rate = head_learning_rate
        decay = 0.0 if id(parameter) in undecayed else weight_decay
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items()]


def disable_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """Makes an AdamW without a state divide its moments by 1: it takes itself to be at a step where 1 - beta^step is 1.

    Google's AdamWeightDecayOptimizer, with which BERT and ELECTRA were trained, has no bias correction.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(_WITHOUT_CORRECTION, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_sparse_gradients(objective: Objective, enabled: bool) -> None:
    """Whether the gradients of word embeddings hold a batch's rows alone.

    That saves filling, measuring and scaling the other rows, nearly all of them. The optimizer needs them still. Where
    a head reads the whole table, these rows are added to the gradient that the head gives.
    """
    models = [module for module in objective.modules() if isinstance(module, TaskModel)]
    for table in (model.encoder.embeddings.word for model in models):
        table.sparse = enabled


def clip_and_scale(parameters: Iterable[nn.Parameter], *, factor: Tensor, max_norm: float | None) -> Tensor:
    """Scales summed gradients by ``factor``, then down to ``max_norm`` if their global norm exceeds it.

    Both happen in one multiplication, and nothing waits for the device.

    Args:
        parameters: those without a gradient are left alone; sparse gradients are coalesced.
        factor: 0-dimensional, on the gradients' device: processes x samples of the batch over the global count of
            labels; 0 without labels.
        max_norm: None clips nothing.

    Returns:
        The norm after ``factor`` and before clipping; not finite if a gradient is not.
    """
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient.values() if gradient.is_sparse else gradient for gradient in found]
    if not gradients:
        return factor.new_zeros(())
    norms = torch.stack(torch._foreach_norm(gradients))
    scale = factor.to(norms.dtype)
    norm: Tensor = torch.linalg.vector_norm(norms) * scale
    if max_norm is not None:
        scale = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm


def freeze(model: Objective | TaskModel, *, embeddings: bool, layers: int) -> None:
    """Stops the embeddings or the first ``layers`` layers from being trained.

    Raises:
        UsageError: the model has fewer layers, or the last of these shares its weights with a later one.
    """
    depths = model.parameter_depths()
    ends = sorted(set(depths.values()) - {0, max(depths.values())})
    if layers != 0 and layers not in ends:
        choices = ", ".join(str(end) for end in ends)
        raise UsageError(
            f"freeze_layers = {layers}: expected 0 or one of {choices} (layers that share weights are frozen together)"
        )
    for name, parameter in model.named_parameters():
        if (embeddings and depths[name] == 0) or 1 <= depths[name] <= layers:
            parameter.requires_grad_(False)


def freeze_encoder(objective: Objective, optim: OptimSection) -> None:
    """Stops all weights of the encoder from being trained, because adapters are trained in their place.

    Raises:
        UsageError: several models are trained together, the rank is greater than the encoder's width, or the weights
            are in half precision, in which small changes are lost.
    """
    model = objective.model
    if sum(isinstance(module, TaskModel) for module in objective.modules()) > 1:
        raise UsageError(
            f"optim.lora_rank: {model.task.name} trains two models together, and adapters are for one; remove it"
        )
    if optim.lora_rank is not None and optim.lora_rank > model.config.hidden_size:
        raise UsageError(
            f"lora_rank = {optim.lora_rank}: expected at most {model.config.hidden_size}, the encoder's hidden_size"
        )
    for parameter in model.encoder.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"optim.lora_rank: adapters are trained in float32, but the model's weights are {parameter.dtype}: "
                "call model.float()"
            )
        parameter.requires_grad_(False)


def make_adapters(objective: Objective, optim: OptimSection, seed: int) -> Adapters | None:
    """The adapters of the encoder; None if its own weights are trained."""
    if optim.lora_rank is None:
        return None
    return Adapters(
        objective.model.encoder,
        rank=optim.lora_rank,
        alpha=optim.lora_rank if optim.lora_alpha is None else optim.lora_alpha,
        dropout=optim.lora_dropout,
        targets=optim.lora_targets,
        seed=seed,
    )


def count_trained(objective: Objective, adapters: Adapters | None) -> int:
    """How many numbers are trained; of the word embeddings all, unless they are frozen."""
    with nullcontext() if adapters is None else adapters.attached():
        return sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)

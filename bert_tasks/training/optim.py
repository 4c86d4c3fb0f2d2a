"""The trained parameters of a run, and their optimizer.

Owns which parameters are trained, in which groups, and by which optimizer. Owns also what an optimizer needs in
addition to its update, which is skipped steps, moments in checkpoints, sparse gradients, untrained word embeddings, and
low-rank adapters.

Shape legend: V vocabulary, E width of the embeddings.
"""

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.encoder.attention import attention_backend
from bert_tasks.encoder.lora import Adapters
from bert_tasks.errors import UsageError
from bert_tasks.model.multitask import AnyModel
from bert_tasks.recipe.schema import OPTIMIZERS, OptimSection, import_name
from bert_tasks.tasks.several import task_name
from bert_tasks.training.objectives import Objective
from bert_tasks.training.vocabulary import TrainedVocabulary, remap_moment

# Takes parameter groups, each with `params`, `lr` and `weight_decay`, and returns the optimizer of a run.
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# 0.999999^(2^23) is 0.0002. AdamW counts in float32, which holds as many further steps.
_WITHOUT_CORRECTION = 2.0**23
_ROWS = "rows"  # key of the ids of a table's trained rows, next to its moments in a checkpoint


class ModelOptimizer:
    """The trained parameters of an objective, and their optimizer.

    AdamW trains only the word embeddings whose tokens are in the training rows. The other rows have no gradient, so
    that each step only multiplies them by 1 - learning rate x weight decay, and `TrainedVocabulary` does this later.
    Another optimizer may do more with such rows, so it trains all of them.

    Attributes:
        objective: The objective to minimise. ``wrapped_objective`` is the module to call, which is wrapped for several
            processes or half precision.
        accelerated: The optimizer as accelerate wraps it.
        rates: The learning rate of each parameter group before the schedule.
        vocabulary: The rows of the word embeddings that are trained. None trains all of them.
        adapters: Weights that are trained instead of the weights of the encoder. None trains its weights.
        notes: Sentences for the log.
    """

    def __init__(
        self,
        objective: Objective,
        features: ArrowRows,
        optim: OptimSection,
        *,
        seed: int,
        accelerator: Accelerator,
        factory: OptimizerFactory | None = None,
    ) -> None:
        """Makes the optimizer of an objective, which is on its device.

        ``features`` are the features of all training rows. ``factory`` makes the optimizer, by default the factory that
        ``optim.optimizer`` sets. ``seed`` is for new adapters.
        """
        self.objective, self.accelerator = objective, accelerator
        factory = load_factory(optim) if factory is None else factory
        self._is_adamw = factory is None
        set_sparse_gradients(objective, accelerator.device.type == "cpu" and accelerator.num_processes == 1)
        self._tables: dict[nn.Parameter, Tensor] = {}
        self.notes: tuple[str, ...] = ()
        self.vocabulary: TrainedVocabulary | None = None
        if optim.vocabulary_rows == "in_data" and not objective.reads_all_embeddings:
            if factory is not None:
                self.notes = ("all rows of the word embeddings are trained, because the optimizer is not AdamW",)
            else:
                if accelerator.num_processes > 1:  # DDP sends the trained parameters of the main process only
                    broadcast(objective.model.encoder.embeddings.word.weight.data)
                self.vocabulary = TrainedVocabulary.of(objective.model, features)
        self.adapters = make_adapters(objective, optim, seed)
        self.wrapped_objective: nn.Module
        self.accelerated: Any
        with self.attached():
            groups = parameter_groups(
                objective,
                learning_rate=optim.learning_rate,
                weight_decay=optim.weight_decay,
                head_learning_rate=optim.head_learning_rate,
                layerwise_lr_decay=optim.layerwise_lr_decay,
            )
            optimizer = make_adamw(groups, optim) if factory is None else make_optimizer(groups, factory)
            self.rates = tuple(group["lr"] for group in optimizer.param_groups)
            self.wrapped_objective, self.accelerated = accelerator.prepare(objective, optimizer)
        objective.model.encoder.graphs = None
        is_plain = self.adapters is None and self._is_adamw and accelerator.num_processes == 1
        if is_plain and vars(type(objective)).get("allows_graphs", False):  # not inherited
            # Only the shapes of the flash kernel can be fixed, as CUDA graphs need.
            kernel = attention_kernel(objective.model, optim.mixed_precision)
            if kernel == "flash" and not objective.model.config.convolution_size:
                objective.model.encoder.use_graphs(_DTYPES[optim.mixed_precision])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for group in self.accelerated.param_groups for parameter in group["params"]]

    def attached(self) -> AbstractContextManager[None]:
        """Returns a context in which the model holds the trained parameters."""
        if self.adapters is not None:  # then the word embeddings are frozen
            return self.adapters.attached()
        return nullcontext() if self.vocabulary is None else self.vocabulary.attached()

    def begin_step(self) -> None:
        """Prepares the model for the forward passes of a step."""
        if self.adapters is not None:
            self.adapters.remove()
        if self.objective.model.encoder.graphs is not None:
            self.objective.model.encoder.graphs.begin_step()

    def step(self, schedule: float, bad: Tensor) -> None:
        """Updates the parameters with rates times ``schedule``, and drops their gradients.

        ``bad`` is 0-dimensional, True if the loss or a gradient is not finite. Then nothing is changed. With fp16 the
        loss scaler decides.
        """
        for group, rate in zip(self.accelerated.param_groups, self.rates, strict=True):
            group["lr"] = rate * schedule
        has_scaler = self.accelerator.scaler is not None
        if self._is_adamw and not has_scaler:  # the fused kernel skips on the device, so the host does not wait
            self.accelerated.optimizer.grad_scale, self.accelerated.optimizer.found_inf = None, bad.float()
        if self._is_adamw or has_scaler or not bad:
            with self._dense_gradients():
                self.accelerated.step()
        if self.vocabulary is not None:
            self.vocabulary.add_step(self.accelerated.param_groups, bad)
        self.accelerated.zero_grad(set_to_none=True)

    def update_weights(self) -> None:
        """Brings all weights up to date. Call it before anything but a step reads them."""
        if self.vocabulary is not None:
            self.vocabulary.update_table()
        if self.adapters is not None:
            self.adapters.merge()

    def release(self) -> None:
        """Brings all weights up to date and frees the memory of the optimizer."""
        if self.vocabulary is not None:
            self.vocabulary.update_table()
        if self.adapters is not None:
            self.adapters.remove()
        self.objective.model.encoder.graphs = None
        self.accelerated.optimizer.state.clear()
        self._tables.clear()

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters in checkpoints by name. With adapters, only trained ones."""
        if self.adapters is None:
            return self.objective.checkpoint_parameters()
        with self.attached():
            every = self.objective.checkpoint_parameters()
        return {name: parameter for name, parameter in every.items() if parameter.requires_grad}

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the moments as ``parameter/name``, and the rest for JSON.

        The rest is ``values`` by the same names, and an optimizer's entries of its ``groups``. AdamW has neither.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for name, parameter in self.checkpoint_parameters().items():
            trained = self._trained(parameter)
            if trained is not parameter and self.vocabulary is not None:
                tensors[f"{name}/{_ROWS}"] = self.vocabulary.ids
            for key, value in self.accelerated.optimizer.state.get(trained, {}).items():
                (tensors if isinstance(value, Tensor) else values)[f"{name}/{key}"] = value
        if self._is_adamw:
            return tensors, {}
        groups = [
            {name: value for name, value in group.items() if _is_plain(value) and name not in ("lr", "weight_decay")}
            for group in self.accelerated.param_groups
        ]
        return tensors, {"values": values, "groups": groups}

    @torch.no_grad()
    def load_state_dict(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], other: Any) -> None:
        """Loads the parameters of a checkpoint, and what ``state_dict`` returned.

        Raises:
            CheckpointError: Rows of word embeddings were trained whose tokens are in no training row now.
        """
        index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        saved: dict[str, dict[str, Any]] = {}
        for path, value in {**tensors, **other.get("values", {})}.items():
            name, _, key = path.rpartition("/")
            saved.setdefault(name, {})[key] = value
        state: dict[int, Any] = {}
        for name, parameter in self.checkpoint_parameters().items():
            parameter.copy_(weights[name])
            moments, trained, rows = saved.get(name, {}), self._trained(parameter), None
            if trained is not parameter and self.vocabulary is not None:
                self.vocabulary.read_table()
                rows = self.vocabulary.ids.cpu()
            stored_rows = moments.pop(_ROWS, None)
            if moments and trained in index_of:
                state[index_of[trained]] = {
                    key: remap_moment(value, stored_rows, rows, len(parameter))
                    if isinstance(value, Tensor) and value.dim() > 0
                    else value
                    for key, value in moments.items()
                }
        groups = self.accelerated.optimizer.state_dict()["param_groups"]
        changed = other.get("groups", [{}] * len(groups))
        groups = [{**group, **change} for group, change in zip(groups, changed, strict=True)]
        self.accelerated.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _trained(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the trained tensor of a parameter, for word embeddings a smaller table."""
        is_table = self.vocabulary is not None and parameter is self.vocabulary.table.weight
        return self.vocabulary.weight if is_table and self.vocabulary is not None else parameter

    @contextmanager
    def _dense_gradients(self) -> Iterator[None]:
        """Replaces sparse gradients by tables of zeros with a batch's rows."""
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


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | numbers.Real | str)


def attention_kernel(model: AnyModel, mixed_precision: str) -> str:
    """Returns the attention kernel of a run, which never changes the mathematics."""
    config = model.config
    return attention_backend(
        device=model.device,
        dtype=_DTYPES[mixed_precision],
        head_size=config.head_size,
        has_scores=config.positions in ("relative", "disentangled"),
    )


def load_factory(optim: OptimSection) -> OptimizerFactory | None:
    """Returns the factory of ``optim.optimizer``, or None for AdamW."""
    name = OPTIMIZERS.get(optim.optimizer, optim.optimizer)
    if name is None:
        return None
    factory: OptimizerFactory = import_name(name, "optim.optimizer", example="'module:name'")
    return factory


def make_adamw(groups: list[dict[str, Any]], optim: OptimSection) -> torch.optim.AdamW:
    """Returns AdamW (Loshchilov and Hutter, arXiv:1711.05101) for parameter groups.

    Without bias correction, as in Google's AdamWeightDecayOptimizer, with which BERT and ELECTRA were trained, it
    divides its moments by 1, as in a step in which 1 - beta^step is 1.
    """
    betas = (optim.adam_beta1, optim.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=optim.adam_epsilon, fused=True)
    for parameter in () if optim.bias_correction else (item for group in groups for item in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.full((), _WITHOUT_CORRECTION, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def make_optimizer(groups: list[dict[str, Any]], factory: OptimizerFactory) -> torch.optim.Optimizer:
    """Calls a factory and checks that it returns an optimizer of all parameters."""
    name = getattr(factory, "__qualname__", repr(factory))
    parameters = {parameter for group in groups for parameter in group["params"]}
    try:
        optimizer = factory(groups)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer: {name} rejects the parameter groups ({error})") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer: {name} returns a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if {parameter for group in optimizer.param_groups for parameter in group["params"]} != parameters:
        raise UsageError(f"optimizer: {name} returns an optimizer of other parameters than it received")
    return optimizer


def parameter_groups(
    model: Objective,
    *,
    learning_rate: float,
    weight_decay: float,
    head_learning_rate: float | None = None,
    layerwise_lr_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Returns the trained parameters in groups of equal rate and weight decay.

    The rate falls by the factor ``layerwise_lr_decay`` with each step down from the head, whose own rate
    ``head_learning_rate`` replaces. Biases and layer norms do not decay. They are detected by their modules, because
    families name them differently.
    """
    depths = model.parameter_depths()
    top = max(depths.values())
    undecayed = {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) or parameter is getattr(module, "bias", None)
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


def set_sparse_gradients(objective: Objective, enabled: bool) -> None:
    """Sets whether the gradients of word embeddings hold a batch's rows alone.

    This saves work on nearly all rows. If a head reads the whole table, these rows are added to the gradient of the
    head.
    """
    models = [module for module in objective.modules() if isinstance(module, AnyModel)]
    for table in (model.encoder.embeddings.word for model in models):
        table.sparse = enabled


def freeze(model: Objective, *, embeddings: bool, layers: int) -> None:
    """Freezes embeddings or first layers. Raises UsageError between shared weights."""
    depths = model.parameter_depths()
    ends = sorted(set(depths.values()) - {0, max(depths.values())})
    if layers != 0 and layers not in ends:
        choices = ", ".join(str(end) for end in ends)
        raise UsageError(
            f"freeze_layers is {layers}, expected 0 or one of {choices} (layers that share weights are frozen together)"
        )
    for name, parameter in model.named_parameters():
        if (embeddings and depths[name] == 0) or 1 <= depths[name] <= layers:
            parameter.requires_grad_(False)


def freeze_encoder(objective: Objective, optim: OptimSection) -> None:
    """Freezes the encoder for adapters. Raises UsageError if they do not fit."""
    model = objective.model
    if sum(isinstance(module, AnyModel) for module in objective.modules()) > 1:
        raise UsageError(
            f"optim.lora_rank adapts one model, but {task_name(model.tasks)} trains two models together. Remove it"
        )
    if optim.lora_rank is not None and optim.lora_rank > model.config.hidden_size:
        raise UsageError(
            f"lora_rank is {optim.lora_rank}, expected at most {model.config.hidden_size}, the encoder's hidden_size"
        )
    for parameter in model.encoder.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"optim.lora_rank trains adapters in float32, but the model's weights are {parameter.dtype}. "
                "Call model.float()"
            )
        parameter.requires_grad_(False)


def make_adapters(objective: Objective, optim: OptimSection, seed: int) -> Adapters | None:
    """Returns the adapters of the encoder, or None if its own weights are trained."""
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
    """Returns the number of trained parameters, with all unfrozen word embeddings."""
    with nullcontext() if adapters is None else adapters.attached():
        return sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)

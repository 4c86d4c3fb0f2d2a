"""The trained parameters of a run, and their optimizer.

Owns which parameters are trained, in which groups, and by which optimizer. It also owns what an optimizer needs in
addition to its update: steps that are skipped because a number was not finite, the moments in checkpoints, sparse
gradients of word embeddings, the word embeddings whose tokens do not occur, and low-rank adapters.

Shape legend: V vocabulary, R rows of the word embeddings that are trained, E width of the embeddings.
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
# `torch.optim.SGD` is such a function, because every optimizer of torch accepts a list of groups.
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A number of steps after which 1 - beta^step is 1 for any usual beta. Even 0.999999^(2^23) is only 0.0002. AdamW counts
# steps in float32, whose integers are exact up to 2^24, so that a run can add as many further steps.
_WITHOUT_CORRECTION = 2.0**23
_ROWS = "rows"  # key of the ids of a table's trained rows, next to its moments in a checkpoint


class ModelOptimizer:
    """The trained parameters of an objective, and their optimizer.

    AdamW trains only the word embeddings whose tokens are in the training rows. The other rows have no gradient, so
    that each step only multiplies them by 1 - learning rate x weight decay, and `TrainedVocabulary` does this later.
    Another optimizer may do more with such rows, so it trains all of them.

    Attributes:
        objective: The objective to minimise. ``wrapped_objective`` is the module to call, because accelerate wraps the
            objective for several processes or for half precision.
        accelerated: The optimizer as accelerate wraps it.
        rates: The learning rate of each parameter group before the schedule multiplies it.
        vocabulary: The rows of the word embeddings that are trained, or None if all of them are.
        adapters: The low-rank adapters that are trained instead of the weights of the encoder, or None if its weights
            are trained.
        notes: Whole sentences for the log of the run.
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
        """Makes the optimizer of an objective that is already on its device.

        ``features`` are the features of all training rows. ``factory`` makes the optimizer, by default the factory that
        ``optim.optimizer`` sets. ``seed`` is for new adapters.
        """
        self.objective, self.accelerator = objective, accelerator
        if factory is None:
            factory = load_factory(optim)
        self._is_adamw = factory is None
        set_sparse_gradients(objective, accelerator.device.type == "cpu" and accelerator.num_processes == 1)
        self._tables: dict[nn.Parameter, Tensor] = {}
        self.notes: tuple[str, ...] = ()
        self.vocabulary: TrainedVocabulary | None = None
        if optim.vocabulary_rows == "in_data" and not objective.reads_all_embeddings:
            if factory is not None:
                self.notes = ("all rows of the word embeddings are trained, because the optimizer is not AdamW",)
            else:
                # DDP sends the trained parameters of the main process to the others. The whole table is none of them.
                if accelerator.num_processes > 1:
                    broadcast(objective.model.encoder.embeddings.word.weight.data)
                self.vocabulary = TrainedVocabulary.of(objective.model, features)
        self.adapters = make_adapters(objective, optim, seed)
        # While the trained parameters are attached, accelerate and the groups see the same parameters as each step.
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
        # CUDA graphs replay fixed kernels, so nothing may change the layers or their parameters between two steps.
        objective.model.encoder.graphs = None
        is_plain = self.adapters is None and self._is_adamw and accelerator.num_processes == 1
        # A subclass may run its layers in another way, so it has to allow graphs itself, and `vars` skips base classes.
        if is_plain and vars(type(objective)).get("allows_graphs", False):
            # Only the shapes of the flash kernel can be fixed, as CUDA graphs need.
            kernel = attention_kernel(objective.model, optim.mixed_precision)
            if kernel == "flash" and not objective.model.config.convolution_size:
                objective.model.encoder.use_graphs(_DTYPES[optim.mixed_precision])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the optimizer's groups."""
        parameters: list[nn.Parameter] = []
        for group in self.accelerated.param_groups:
            parameters += group["params"]
        return parameters

    def attached(self) -> AbstractContextManager[None]:
        """Returns a context in which the model holds the trained parameters."""
        if self.adapters is not None:  # then the word embeddings are frozen, so there is no smaller table
            return self.adapters.attached()
        if self.vocabulary is not None:
            return self.vocabulary.attached()
        return nullcontext()

    def begin_step(self) -> None:
        """Prepares the model for the forward passes of a step."""
        if self.adapters is not None:  # an evaluation has merged them into the weights
            self.adapters.remove()
        if self.objective.model.encoder.graphs is not None:
            self.objective.model.encoder.graphs.begin_step()

    def step(self, schedule: float, bad: Tensor) -> None:
        """Updates the parameters with the rates times ``schedule``, and drops their gradients.

        ``bad`` is a 0-dimensional tensor that is True if the loss or a gradient is not finite. Then no parameter
        changes. With fp16 the loss scaler decides about this itself.
        """
        for group, rate in zip(self.accelerated.param_groups, self.rates, strict=True):
            group["lr"] = rate * schedule
        has_scaler = self.accelerator.scaler is not None
        # The fused kernel of AdamW reads `found_inf` on the device and skips the update there, as it does for a loss
        # scaler of fp16. So the host need not wait for `bad`. Other optimizers do not know it, so `not bad` waits.
        if self._is_adamw and not has_scaler:
            self.accelerated.optimizer.grad_scale, self.accelerated.optimizer.found_inf = None, bad.float()
        if self._is_adamw or has_scaler or not bad:
            with self._dense_gradients():
                self.accelerated.step()
        if self.vocabulary is not None:
            self.vocabulary.add_step(self.accelerated.param_groups, bad)
        self.accelerated.zero_grad(set_to_none=True)

    def update_weights(self) -> None:
        """Brings all weights up to date, which is needed before anything but a step reads them."""
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
        """Returns the parameters that a checkpoint stores, by name, with adapters only the trained ones."""
        if self.adapters is None:
            return self.objective.checkpoint_parameters()
        # The parameters of the adapters are those of the model only while they are attached.
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
            # The moments have the shape of the smaller table, so the ids of its rows are stored next to them.
            trained = self._trained(parameter)
            if trained is not parameter and self.vocabulary is not None:
                tensors[f"{name}/{_ROWS}"] = self.vocabulary.ids
            for key, value in self.accelerated.optimizer.state.get(trained, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    values[f"{name}/{key}"] = value
        if self._is_adamw:
            return tensors, {}
        # Some optimizers, such as schedule-free ones, keep running numbers in their groups. The rate and the decay come
        # from the settings, which a resumed run may change.
        groups: list[dict[str, Any]] = []
        for group in self.accelerated.param_groups:
            plain = {key: value for key, value in group.items() if _is_plain(value)}
            plain.pop("lr", None)
            plain.pop("weight_decay", None)
            groups.append(plain)
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
            trained, moments = self._trained(parameter), saved.get(name, {})
            rows: Tensor | None = None
            if trained is not parameter and self.vocabulary is not None:
                self.vocabulary.read_table()
                rows = self.vocabulary.ids.cpu()
            stored_rows = moments.pop(_ROWS, None)
            if not moments or trained not in index_of:
                continue
            of_parameter: dict[str, Any] = {}
            for key, value in moments.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # the number of steps is 0-dimensional
                    of_parameter[key] = remap_moment(value, stored_rows, rows, len(parameter))
                else:
                    of_parameter[key] = value
            state[index_of[trained]] = of_parameter
        # What the settings say of a group is kept as it is now, because a resumed run may change it.
        groups = self.accelerated.optimizer.state_dict()["param_groups"]
        changed = other.get("groups", [{}] * len(groups))
        groups = [{**group, **change} for group, change in zip(groups, changed, strict=True)]
        self.accelerated.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _trained(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the tensor that is trained in place of a parameter, which word embeddings have as a smaller table."""
        if self.vocabulary is not None and parameter is self.vocabulary.table.weight:
            return self.vocabulary.weight
        return parameter

    @contextmanager
    def _dense_gradients(self) -> Iterator[None]:
        """Replaces each sparse gradient by a dense table that holds its rows, with zeros elsewhere.

        torch's AdamW takes dense gradients only. The tables live as long as the optimizer, and only the rows that were
        written are set back to zero, because filling a whole table in each step would cost what sparse gradients save.
        """
        written: list[tuple[Tensor, Tensor]] = []
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
    """Returns True for a value that JSON can hold, which a tensor or a function in a group is not."""
    return value is None or isinstance(value, bool | numbers.Real | str)


def attention_kernel(model: AnyModel, mixed_precision: str) -> str:
    """Returns the attention kernel of a run, which depends on the device and never changes the mathematics."""
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

    ``optim.bias_correction = false`` gives the update of Google's AdamWeightDecayOptimizer, with which BERT and ELECTRA
    were trained. torch has no such option. So the moments begin at a step so late that 1 - beta^step is 1, and dividing
    by it changes nothing.
    """
    betas = (optim.adam_beta1, optim.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=optim.adam_epsilon, fused=True)
    if optim.bias_correction:
        return optimizer
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.full((), _WITHOUT_CORRECTION, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def make_optimizer(groups: list[dict[str, Any]], factory: OptimizerFactory) -> torch.optim.Optimizer:
    """Calls a factory and checks that it returns an optimizer of all parameters.

    Raises:
        UsageError: The factory rejects the groups, or returns something else, or an optimizer of other parameters.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    parameters = _parameters_of(groups)
    try:
        optimizer = factory(groups)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer: {name} rejects the parameter groups ({error})") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer: {name} returns a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if _parameters_of(optimizer.param_groups) != parameters:
        raise UsageError(f"optimizer: {name} returns an optimizer of other parameters than it received")
    return optimizer


def _parameters_of(groups: list[dict[str, Any]]) -> set[nn.Parameter]:
    """Returns the parameters of all groups."""
    parameters: set[nn.Parameter] = set()
    for group in groups:
        parameters.update(group["params"])
    return parameters


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
    ``head_learning_rate`` replaces. Biases and the parameters of norms do not decay. They are detected by their
    modules, because families name them differently.
    """
    depths = model.parameter_depths()
    top = max(depths.values())
    undecayed: set[int] = set()
    for module in model.modules():
        is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        bias = getattr(module, "bias", None)
        for parameter in module.parameters(recurse=False):
            if is_norm or parameter is bias:
                undecayed.add(id(parameter))
    factor = 1.0 if layerwise_lr_decay is None else layerwise_lr_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Lower layers hold more general features, so they may change more slowly (Howard and Ruder, arXiv:1801.06146).
        rate = learning_rate * factor ** (top - depths[name])
        if head_learning_rate is not None and depths[name] == top:
            rate = head_learning_rate
        decay = 0.0 if id(parameter) in undecayed else weight_decay
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items()]


def set_sparse_gradients(objective: Objective, enabled: bool) -> None:
    """Sets whether the gradients of word embeddings hold only the rows of the tokens in a batch.

    This saves work on nearly all rows. If a head reads the whole table, these rows are added to the dense gradient of
    the head.
    """
    for module in objective.modules():
        if isinstance(module, AnyModel):
            module.encoder.embeddings.word.sparse = enabled


def freeze(model: Objective, *, embeddings: bool, layers: int) -> None:
    """Freezes the embeddings if asked, and as many of the first layers.

    Raises:
        UsageError: There are not so many layers, or the number would divide layers that share their weights.
    """
    depths = model.parameter_depths()
    # The depths at which a layer is used for the last time. 0 are the embeddings, and the largest is the head.
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
    """Freezes the encoder, because low-rank adapters are trained instead of its weights.

    Raises:
        UsageError: The run trains two models, the rank exceeds the width of the encoder, or its weights are not in
            float32 or float64.
    """
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
        # Adding a small change to weights in half precision would round most of it away.
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
    # The product of the adapters is scaled by alpha / rank (Hu et al., arXiv:2106.09685), so the default scale is 1.
    alpha = optim.lora_rank if optim.lora_alpha is None else optim.lora_alpha
    return Adapters(
        objective.model.encoder,
        rank=optim.lora_rank,
        alpha=alpha,
        dropout=optim.lora_dropout,
        targets=optim.lora_targets,
        seed=seed,
    )


def count_trained(objective: Objective, adapters: Adapters | None) -> int:
    """Returns the number of trained parameters. All rows of unfrozen word embeddings count."""
    attached: AbstractContextManager[None] = nullcontext()
    if adapters is not None:
        attached = adapters.attached()
    with attached:
        return sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)

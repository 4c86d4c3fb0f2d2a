"""Objectives, which compute the loss terms of a batch and hold the model that is saved.

Owns the interface between the training loop and a loss, the loss of the labels alone, the depth of each parameter in a
model, and the digest by which two sets of weights are compared. The losses that need a second model are in
distillation.py, distillation_of_several.py and replaced_tokens.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.inference.precision import float32
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.windows import count_terms, loss_terms, prepared_features
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import FeatureKeys, is_dynamic
from bert_tasks.training.evaluation import Validation


class Objective(nn.Module, ABC):
    """A loss together with the parameters that it trains.

    The training loop calls ``forward`` through accelerate, optimises every parameter that requires a gradient, and
    stores all parameters in checkpoints. Every forward pass must use every trainable parameter, if only by adding 0
    times an output, because processes that train together wait for each other's gradients.

    Attributes:
        model: The model that is evaluated and saved.
        allows_graphs: True if CUDA graphs may run the layers. Then each forward pass must be followed by at most one
            backward pass. A subclass does not inherit the value, because it may run the layers in another way.
    """

    allows_graphs: ClassVar[bool] = False

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the terms of a batch's loss, the same ones in the same order for every batch.

        Accelerate runs it with automatic mixed precision. An implementation computes its losses in float32 with
        autocast disabled, because sums over many rows are inexact in half precision.
        """

    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        """Returns the features as a step sees them. See ``Task.prepare``."""
        return prepared_features(self.model, features, keys, corpus)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the count of each loss term for prepared features. See ``Output.counts``."""
        return count_terms(self.model, features)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of this objective, by section, which a resumed run must have, too."""
        return {}

    def begin(self, features: ArrowRows, device: torch.device) -> None:
        """Receives the features of the training rows before the first step, on the main process first."""

    def agreement(self, validation: Validation, accelerator: Accelerator) -> dict[str, float]:
        """Returns, for each validation set, the fraction of predictions that equal those of another model."""
        return {}

    @property
    def forward_fn(self) -> ForwardFn | None:
        """The function that runs a batch in evaluation, or None to call the model."""
        return None

    @property
    def further_models(self) -> Mapping[str, AnyModel]:
        """The models that are saved in addition to the best one, by the name of their folder in the run's folder."""
        return {}

    @property
    def reads_all_embeddings(self) -> bool:
        """True if a step may read word embeddings of tokens that are not in the training rows.

        It does if a head is tied to their table, or if a task draws tokens, such as the random ones of masking.
        """
        for module in self.modules():
            if not isinstance(module, AnyModel):
                continue
            if module.head.reads_embeddings or any(is_dynamic(task) for task in module.tasks.values()):
                return True
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Whole sentences about the loss, for the log of the run."""
        return ()

    def parameter_depths(self) -> dict[str, int]:
        """Returns the depth of each parameter, which determines its learning rate.

        Parameters outside the model, for example those of a generator, are as deep as its head. See
        ``parameter_depths``.
        """
        depths = {f"model.{name}": depth for name, depth in parameter_depths(self.model).items()}
        head_depth = max(depths.values())
        return {name: depths.get(name, head_depth) for name, _ in self.named_parameters()}

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """Returns all parameters by name.

        Those of the model have the names that they have in it, so that a checkpoint can be compared with the saved
        model. The others begin with ``objective.``.
        """
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            if name.startswith("model."):
                parameters[name.removeprefix("model.")] = parameter
            else:
                parameters[f"objective.{name}"] = parameter
        return parameters


class Supervised(Objective):
    """The loss of the model's tasks against the labels of the rows."""

    allows_graphs: ClassVar[bool] = True

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        logits = float32(self.model(batch))
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return loss_terms(self.model, logits, batch)


def parameter_depths(model: AnyModel) -> dict[str, int]:
    """Returns the depth of each parameter of a model, 0 for embeddings and i + 1 for layer i.

    A layer that is used several times, as in ALBERT, is as deep as its last use. The head is one deeper than the last
    layer.
    """
    order = model.encoder.layer_order  # the index of the layer that runs at each depth
    depths = {"encoder.embeddings": 0, "encoder.positions": 0, "encoder.convolution": 1}
    depths |= {f"encoder.layers.{index}": depth for depth, index in enumerate(order, start=1)}
    depths |= {"encoder.norm": len(order), "head": len(order) + 1}
    depth_of: dict[str, int] = {}
    for name, _ in model.named_parameters():
        # With the dot, because "encoder.layers.1" is also the beginning of "encoder.layers.10".
        depth_of[name] = next(depth for prefix, depth in depths.items() if name.startswith(f"{prefix}."))
    return depth_of


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of tensors and of their names, which does not depend on the order of the mapping."""
    return sha256(_named_bytes(tensors))


def _named_bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the name and the bytes of each tensor. NumPy has no bfloat16, so the numbers are viewed as bytes."""
    for name, tensor in sorted(tensors.items()):
        yield name.encode()
        yield tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data

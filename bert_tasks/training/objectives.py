"""Objectives compute the loss terms of a batch and hold the model that is saved."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
    """A loss with the parameters it trains.

    The training loop calls ``forward`` through accelerate, optimises every parameter that requires a gradient, and
    stores all parameters in checkpoints. Every forward pass must use every trainable parameter, if only by adding 0
    times an output, because processes that train together wait for each other's gradients.

    Attributes:
        model: The model that is evaluated and saved.
        allows_graphs: True if CUDA graphs may run the layers. Then a forward pass has at most one backward pass.
    """

    allows_graphs: ClassVar[bool] = False

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the terms of a batch's loss, the same in the same order for every batch.

        Accelerate runs it with automatic mixed precision. Compute losses from float32 with autocast disabled.
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
        """Section -> settings of this objective that a resumed run must have, too."""
        return {}

    def begin(self, features: ArrowRows, device: torch.device) -> None:
        """Receives the features of the training rows, on the main process first."""

    def agreement(self, validation: Validation, accelerator: Accelerator) -> dict[str, float]:
        """Returns validation set -> share of predictions that equal another model's."""
        return {}

    @property
    def forward_fn(self) -> ForwardFn | None:
        """The function that runs a batch in evaluation. None runs the model."""
        return None

    @property
    def further_models(self) -> Mapping[str, AnyModel]:
        """Folder of the run -> a model that is saved there in addition to the best model."""
        return {}

    @property
    def reads_all_embeddings(self) -> bool:
        """Returns True if a step may read word embeddings of tokens outside the training rows.

        It does if a head is tied to their table, or if tokens are drawn.
        """
        models = [module for module in self.modules() if isinstance(module, AnyModel)]
        return any(model.head.reads_embeddings or any(map(is_dynamic, model.tasks.values())) for model in models)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people about the loss."""
        return ()

    def parameter_depths(self) -> dict[str, int]:
        """Returns each parameter's depth, which determines its learning rate.

        Parameters outside the model are as deep as its head. See ``parameter_depths``.
        """
        depths = {f"model.{name}": depth for name, depth in parameter_depths(self.model).items()}
        return {name: depths.get(name, max(depths.values())) for name, _ in self.named_parameters()}

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """Returns all parameters by names, the model's by their names in the model."""
        return {
            name.removeprefix("model.") if name.startswith("model.") else f"objective.{name}": parameter
            for name, parameter in self.named_parameters()
        }


class Supervised(Objective):
    """The loss of the model's tasks against the labels of the rows."""

    allows_graphs: ClassVar[bool] = True

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        logits = float32(self.model(batch))
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return loss_terms(self.model, logits, batch)


def parameter_depths(model: AnyModel) -> dict[str, int]:
    """Returns the depth of each parameter of a model, 0 for embeddings and i + 1 for layer i.

    The depth of a shared layer is its last use. The head is one deeper than the last layer.
    """
    order = model.encoder.layer_order
    depths = {"encoder.embeddings": 0, "encoder.positions": 0, "encoder.convolution": 1}
    depths |= {f"encoder.layers.{index}": depth for depth, index in enumerate(order, start=1)}
    depths |= {"encoder.norm": len(order), "head": len(order) + 1}
    return {
        name: next(depth for prefix, depth in depths.items() if name.startswith(f"{prefix}."))
        for name, _ in model.named_parameters()
    }


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of tensors and of their names."""
    return sha256(
        chunk
        for name, tensor in sorted(tensors.items())
        for chunk in (name.encode(), tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    )

"""A model that predicts without weights, such as an exported one."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import PredictionT, Task


class FixedModel(TaskModel[PredictionT]):
    """A model without weights. A subclass sets ``no_weights_reason``."""

    def __init__(self, hf_config: Mapping[str, Any], task: Task[PredictionT]) -> None:
        with torch.device("meta"):
            super().__init__(hf_config, task)
        del self.encoder

    @property
    def device(self) -> torch.device:
        """The device of the head, which is the CPU for a head without parameters (a decoder that is the table)."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def forward(self, input_ids: Tensor | PackedBatch, *_: Any, **__: Any) -> Any:
        if not isinstance(input_ids, PackedBatch):
            raise UsageError(f"it accepts packed batches, not padded tensors, because {self.no_weights_reason}")
        return self.packed_logits(input_ids)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.check_parameters()
        return super().train(mode)

    def check_parameters(self) -> None:
        raise UsageError(f"it can be neither trained nor saved, because {self.no_weights_reason}")

"""A model that predicts, but has no weights of its own: an exported one, or the mean of several.

Owns what such a model refuses.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import PredictionT, Task


class FixedModel(TaskModel[PredictionT]):
    """A model without modules of its own that predicts as ``TaskModel`` does. A subclass sets ``no_weights_reason``."""

    def __init__(self, hf_config: Mapping[str, Any], task: Task[PredictionT]) -> None:
        with torch.device("meta"):
            super().__init__(hf_config, task)
        del self.encoder

    def forward(self, input_ids: Tensor | PackedBatch, *_: Any, **__: Any) -> Any:
        if not isinstance(input_ids, PackedBatch):
            self._refuse("it takes no padded tensors, only packed batches")
        return self.packed_logits(input_ids)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._refuse("it cannot be trained")
        return super().train(mode)

    def save_pretrained(self, folder: str | Path) -> None:
        self._refuse("it cannot be saved")

    def restore(self, folder: str | Path) -> None:
        self._refuse("it cannot be given other weights")

    def with_layers(
        self, layers: Sequence[int] | Literal["every-other"] | None = None, *, family: str | None = None
    ) -> Self:
        self._refuse("it has no layers to copy")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{what}: {self.no_weights_reason}")

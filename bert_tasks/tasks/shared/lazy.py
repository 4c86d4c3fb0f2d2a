"""torch, transformers and the encoder for tasks, imported on first use.

Their import takes seconds. Code that reads rows and computes nothing, such as ``init``, does not wait for it.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule(ModuleType):
    """Stands for a module. The first use of one of its names imports it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
    from torch.nn.utils import rnn
    from torch.utils import checkpoint as activations
    from transformers import PreTrainedTokenizerBase

    from bert_tasks.encoder import crf, heads, packing
    from bert_tasks.encoder.heads import Head, VocabularyOutput
    from bert_tasks.encoder.packing import PackedBatch
else:
    torch, F, rnn, activations = map(
        _LazyModule, ("torch", "torch.nn.functional", "torch.nn.utils.rnn", "torch.utils.checkpoint")
    )
    crf, heads, packing = (_LazyModule(f"bert_tasks.encoder.{name}") for name in ("crf", "heads", "packing"))
    Tensor = PreTrainedTokenizerBase = Head = VocabularyOutput = PackedBatch = Any  # names of types in annotations

__all__ = [
    "F",
    "Head",
    "PackedBatch",
    "PreTrainedTokenizerBase",
    "Tensor",
    "VocabularyOutput",
    "activations",
    "crf",
    "heads",
    "packing",
    "rnn",
    "torch",
]

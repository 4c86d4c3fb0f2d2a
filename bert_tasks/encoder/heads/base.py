"""The contract of heads, and of their outputs that are more than one tensor.

A head selects the tokens that it reads from the last layer (``select``) and turns their states into logits
(``forward``). The families differ in data (``HeadConfig``).

Shape legend: N tokens, H hidden, R tokens that a head reads, V vocabulary, E width of the embeddings.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bert_tasks.encoder.packing import Layout, Selection


class Head(nn.Module, ABC):
    """The layers of a task on the encoder.

    A task returns a head from ``Task.head``. The heads of this package suit most tasks, and your own task may return
    any other subclass.

    Attributes:
        per_token: The logits have one row for each token that is read, and not one for each sequence.
        reads_embeddings: The logits are products with a table over the vocabulary, the word embeddings or the head's
            decoder.
        label_dims: Maps the name of a parameter of single labels to its dimensions that count labels, so that loading
            can reorder the labels.
        output: The linear layer that makes the logits. A head without this layer overrides ``num_logits``.
        depth: Number of the encoder's layers that run before the head. None means all.
        outputs_per_token: Number of outputs for each token. If it is large, prediction runs fewer tokens.
    """

    per_token: ClassVar[bool] = False
    reads_embeddings: ClassVar[bool] = False
    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {"output.weight": (0,), "output.bias": (0,)}
    output: nn.Linear
    depth: int | None = None
    outputs_per_token: int = 1

    @property
    def num_logits(self) -> int:
        """The number of logits in a row. Export needs it."""
        return self.output.out_features

    @property
    def outside_graph(self) -> dict[str, Tensor]:
        """Returns the parameters that are not in an exported graph, by their names."""
        return {}

    def from_graph(self, logits: Tensor) -> Tensor:
        """Returns the output of ``forward`` for the logits of an exported graph."""
        return logits

    def select(self, layout: Layout) -> Selection | None:
        """Returns the tokens whose states ``forward`` reads. None means all."""
        return None

    @abstractmethod
    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Any:
        """Returns the logits of the selected tokens, or a ``HeadOutput``.

        Args:
            hidden: ``[R, H]``, or ``[N, H]`` of all tokens.
            layout: Layout of the sequences.
            embeddings: ``[V, E]`` the encoder's word embeddings, for heads with ``reads_embeddings``. Other heads must
                not read them, because in training they may be the rows of some tokens only
                (``training/vocabulary.py``).
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadOutput:
    """The output of a head that is more than one tensor.

    It has methods of tensors, under the same names, so that the code between head and task need not tell them apart.

    Attributes:
        logit_fields: Names of the fields that hold logits, as tensors or further outputs.
    """

    logit_fields: ClassVar[tuple[str, ...]]

    @property
    def parts(self) -> Mapping[str, Any]:
        """The logits by name."""
        return {name: getattr(self, name) for name in self.logit_fields}

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(iter(self.parts.values())).dtype
        return dtype

    def to(self, dtype: torch.dtype) -> Self:
        """Returns the output with its logits in another precision."""
        return replace(self, **{name: logits.to(dtype) for name, logits in self.parts.items()})

    def isfinite(self) -> Tensor:
        """Returns True for each part that is finite."""
        return torch.stack([logits.isfinite().all() for logits in self.parts.values()])

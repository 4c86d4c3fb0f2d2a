"""Vectors of texts, which are neither trained nor evaluated.

Shape legend: S samples (rows), H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.outputs.base import LossTerm, Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingPrediction(Prediction):
    """The vector of one text.

    Attributes:
        embedding: ``[H]`` float32.
    """

    embedding: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Vector(Output[EmbeddingPrediction]):
    """A vector for each text.

    Such vectors serve semantic search, clustering and deduplication, with the models of sentence-transformers.

    Attributes:
        normalize: True if vectors have length 1.

    Examples:
        >>> Embedding.of(depth=6).output
        Vector(labels=(), normalize=True)
    """

    name: ClassVar[str] = "embedding"
    prediction: ClassVar[type[Prediction]] = EmbeddingPrediction
    has_labels: ClassVar[bool] = False
    pipeline_tag: ClassVar[str | None] = "feature-extraction"
    row_formats: ClassVar[tuple[str, ...]] = ("jsonl", "parquet", "npy")
    column: ClassVar[Column | None] = None
    normalize: bool = True

    def hf_config(self) -> dict[str, Any]:
        """Returns nothing, because a model without a head has no names of outputs."""
        return {}

    def vector_columns(self, config: EncoderConfig) -> Mapping[str, int]:
        return {"embedding": config.hidden_size}

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[EmbeddingPrediction]:
        if not rows:
            return []
        vectors = torch.stack(list(compact)).float()  # [S, H]
        if self.normalize:  # the dot product of two vectors is then their cosine
            vectors = F.normalize(vectors, dim=-1)
        return [EmbeddingPrediction(embedding=vector) for vector in vectors.numpy()]

    def agreements(
        self, predictions: Sequence[EmbeddingPrediction], others: Sequence[EmbeddingPrediction]
    ) -> list[bool]:
        """Treats vectors as the same if their cosine similarity is at least 0.98."""
        same = []
        for prediction, other in zip(predictions, others, strict=True):
            left, right = torch.from_numpy(prediction.embedding), torch.from_numpy(other.embedding)
            same.append(float(F.cosine_similarity(left, right, dim=0)) >= _NEAR)
        return same

    # Training and evaluation, which are refused

    @property
    def no_teacher_reason(self) -> str:
        return _NO_TRAINING

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Raises UsageError."""
        _refuse_training()

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Raises UsageError."""
        _refuse_training()

    def metrics(self, predictions: Sequence[EmbeddingPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Raises UsageError."""
        _refuse_training()

    @property
    def primary_metric(self) -> str:
        """Raises UsageError."""
        _refuse_training()


_NEAR = 0.98
_NO_TRAINING = "embedding has no labels, so it can be neither trained nor evaluated"


def _refuse_training() -> NoReturn:
    """Raises UsageError, because nothing in a row says what its vector should be."""
    raise UsageError(_NO_TRAINING)

"""Embeddings, a vector for each text from the hidden states of an encoder.

No recipe trains this task.

Shape legend: S samples (rows), H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import Feature, LossTerm, OutputKind, Part, Prediction, Task
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.encoding import truncated_texts
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.rendering import Rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EmbeddingPooling = Literal["mean", "cls", "max"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingPrediction(Prediction):
    """The vector of one text.

    Attributes:
        embedding: ``[H]`` float32.
    """

    embedding: NDArray[np.float32]


class EmbeddingFormats(Card, Rendering, HFConfig):
    """Embeddings on cards, in files of predictions and in a config of transformers."""

    pipeline_tag: ClassVar[str] = "feature-extraction"
    row_formats: ClassVar[tuple[str, ...]] = ("jsonl", "parquet", "npy")

    @property
    def entries(self) -> dict[str, Any]:
        return {}

    def vector_columns(self, config: EncoderConfig) -> Mapping[str, int]:
        return {"embedding": config.hidden_size}


@dataclass(frozen=True, kw_only=True)
class Embedding(Task[EmbeddingPrediction]):
    """Embedding of texts.

    Attributes:
        pooling: The mean over the tokens of a text, special tokens included, the first token, or the largest values.
        normalize: True if vectors have length 1.
        depth: Number of layers of the encoder to run. 0 reads the embeddings of the tokens.
        prompt: Text in front of each text.
        lowercase: True if texts and prompt are changed to lower case.
    """

    name: ClassVar[str] = "embedding"
    columns: ClassVar[tuple[Column, ...]] = (Column(name="text", kind="text"),)
    output_kind: ClassVar[OutputKind] = "value"
    parts: ClassVar[tuple[type[Part], ...]] = (EmbeddingFormats,)
    pooling: EmbeddingPooling = "mean"
    normalize: bool = True
    depth: int
    prompt: str = ""
    lowercase: bool = False

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns one window for each row. Special tokens in a text stay characters."""
        texts = [self.prompt + row["text"] for row in rows]
        if self.lowercase:
            texts = [text.lower() for text in texts]
        encoded = truncated_texts([texts], tokenizer, max_length=self.max_length)
        return [text.feature() for text in encoded]

    def head(self, config: EncoderConfig) -> Head:
        return heads.EmbeddingHead(width=config.hidden_size, pooling=self.pooling, depth=self.depth)

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> Sequence[EmbeddingPrediction]:
        if not rows:
            return []
        vectors = torch.stack(list(compact)).float()  # [S, H]
        vectors = F.normalize(vectors, dim=-1) if self.normalize else vectors
        return [EmbeddingPrediction(embedding=vector) for vector in vectors.numpy()]

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        _refuse_training()

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        _refuse_training()

    def metrics(self, predictions: Sequence[EmbeddingPrediction], rows: Sequence[Row]) -> dict[str, float]:
        _refuse_training()

    @property
    def primary_metric(self) -> str:
        _refuse_training()


def _refuse_training() -> NoReturn:
    raise UsageError("embedding has no labels, so it can be neither trained nor evaluated")

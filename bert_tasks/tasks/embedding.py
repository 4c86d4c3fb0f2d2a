"""Embeddings, a vector for each text from the hidden states of an encoder.

No recipe trains this task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.vector import EmbeddingPrediction as EmbeddingPrediction
from bert_tasks.outputs.vector import Vector
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.windows.texts import truncated_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EmbeddingPooling = Literal["mean", "cls", "max"]


@dataclass(frozen=True, kw_only=True)
class Embedding(Task[EmbeddingPrediction]):
    """Embedding of texts, as models of sentence-transformers compute it.

    Attributes:
        pooling: The mean over the tokens of a text, special tokens included, the first token, or the largest values.
        depth: Number of layers of the encoder to run. 0 reads the embeddings of the tokens.
        prompt: Text in front of each text.
        lowercase: True if texts and prompt are changed to lower case.
    """

    name: ClassVar[str] = "embedding"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Vector,)
    columns: ClassVar[tuple[Column, ...]] = (Column(name="text", kind="text"),)
    output: Vector
    pooling: EmbeddingPooling = "mean"
    depth: int
    prompt: str = ""
    lowercase: bool = False

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns one window for each row. Special tokens in a text stay characters."""
        texts = [self.prompt + row["text"] for row in rows]
        if self.lowercase:  # sentence-transformers' do_lower_case, whatever the tokenizer does
            texts = [text.lower() for text in texts]
        encoded = truncated_texts([texts], tokenizer, max_length=self.max_length)
        return [text.feature() for text in encoded]

    def head(self, config: EncoderConfig) -> Head:
        return heads.EmbeddingHead(width=config.hidden_size, pooling=self.pooling, depth=self.depth)

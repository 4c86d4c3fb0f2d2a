"""Unknown tokens, which the vocabulary of a model cannot spell.

A model reads each of them as the same token, so that a text in another script or language says nothing to it. This
module owns their number in features, and the note on it. A tokenizer of bytes, or without an unknown token, never has
any.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute
from numpy.typing import NDArray

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.data.features import number_array

_MOST = 0.01  # share without a warning
_WINDOWS = 10_000
_RARE = "\U00012000"  # the cuneiform sign A, which only tokenizers of bytes know
_ADVICE = (
    "Choose a multilingual model or a model for the language of the texts, or train a vocabulary with `bert-tasks "
    "tokenizer` and pre-train a new model"
)


class UnknownTokens(NamedTuple):
    """Number of unknown tokens, and of all tokens except special tokens around a text."""

    unknown: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, ids: Iterable[NDArray[np.integer[Any]]], tokenizer: Any) -> "UnknownTokens":
        """Counts unknown tokens.

        Args:
            ids: Token ids, in arrays of any length.
            tokenizer: The tokenizer that made them.

        Returns:
            The counts. They are 0 if no text is unknown to the tokenizer.
        """
        unk = tokenizer.unk_token_id
        if unk not in tokenizer(_RARE, add_special_tokens=False)["input_ids"]:
            return cls()  # in tagging, words without characters have the token nevertheless
        special = [token for token in tokenizer.all_special_ids if token != unk]
        counts = [cls(int(np.sum(array == unk)), array.size - int(np.isin(array, special).sum())) for array in ids]
        return cls.total(counts)

    @classmethod
    def of_features(cls, features: ArrowRows, tokenizer: Any) -> "UnknownTokens":
        """Counts the unknown tokens of a table's features from their file."""
        tables = features.tables(["input_ids"], size=_WINDOWS)
        return cls.of((number_array(pyarrow.compute.list_flatten(table.column(0))) for table in tables), tokenizer)

    @classmethod
    def total(cls, counts: Iterable[Sequence[int]]) -> "UnknownTokens":
        """Returns the sums of several counts, for example of all tables."""
        return cls(*map(sum, zip(*counts, strict=True)))

    def notes(self, vocabulary: str) -> tuple[str, ...]:
        """Returns a line for people if there are unknown tokens, a warning if many.

        Args:
            vocabulary: Name of the model that has the vocabulary.
        """
        if self.unknown == 0:
            return ()
        line = f"{self.unknown} of {self.tokens} tokens ({self.unknown / self.tokens:.2%}) are unknown to {vocabulary}"
        if self._are_many:
            line += f". {_ADVICE}"
        return (line,)

    def warnings(self, vocabulary: str) -> tuple[str, ...]:
        """Returns the line of ``notes`` if it is a warning."""
        if not self._are_many:
            return ()
        return self.notes(vocabulary)

    @property
    def _are_many(self) -> bool:
        """True if so many tokens are unknown that the model probably does not fit the texts."""
        return self.unknown > _MOST * self.tokens
